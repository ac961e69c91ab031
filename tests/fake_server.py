"""A server that answers as vLLM, SGLang or something plainer does, and has no model; on demand it goes wrong.

It runs in a thread of the test's process, so that tests can look inside, or, to be killed, in a process of
its own: python fake_server.py PORT STEP_S. Its engine takes steps of ``step_s`` in which every running
request gains the token that :func:`fake_worker.next_token` says, as a model that always takes the likeliest
would.
"""

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web
from fake_worker import next_token

VLLM_PATHS = (
    "/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache", "/sleep", "/wake_up",
    "/is_sleeping",
)  # fmt: skip
SGLANG_PATHS = (
    "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache",
    "/release_memory_occupation", "/resume_memory_occupation", "/get_server_info",
)  # fmt: skip


@dataclass(eq=False)
class Running:
    """One completion in the engine."""

    name: str
    tokens: list[int]
    prompt: int
    most: int
    queue: "asyncio.Queue[tuple[int | None, str | None]]" = field(default_factory=asyncio.Queue)
    out: int = 0


@dataclass(eq=False)
class FakeServer:
    """A context manager; ``url`` is where it is."""

    kind: Literal["vllm", "sglang", "plain"] = "vllm"
    dev: bool = True
    openapi: bool = True
    metrics: bool = True
    key: str | None = None
    step_s: float = 0.002
    token_s: float = 0.0
    """To prefill a token."""
    burst_s: float = 0.0
    """What steps gave is told only so often, as on a busy machine; even after a pause was answered."""
    max_running: int = 8
    most_tokens: int = 2048
    fault: Callable[[dict[str, Any]], str | None] = lambda body: None
    """From a request's body to what goes wrong with it."""
    deaf: frozenset[str] = frozenset()
    """Aborts that are not obeyed: ``"abort"``, ``"close"``."""
    refuses: frozenset[str] = frozenset()
    """Paths that are listed, and answered with 501."""
    pretends: frozenset[str] = frozenset()
    """Paths that are answered with 200, and nothing else happens."""
    port: int = 0

    def __post_init__(self) -> None:
        self.url = ""
        self.paused = self.asleep = False
        self.most_there = self.aborted = self.slept = 0
        self.aborted_all = False
        self.calls: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self._untold: list[tuple[Running, int | None, str | None]] = []
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(20)
        assert not self.aborted_all, "an empty list of aborts was sent"

    @property
    def completions(self) -> list[dict[str, Any]]:
        """The bodies of all completion requests, but for probes."""
        found = [body for _, path, body in self.calls if path == "/v1/completions"]
        return [body for body in found if "probe" not in str(body.get("request_id", body.get("rid")))]

    def _serve(self) -> None:
        self._loop.run_until_complete(self._live())
        self._loop.close()

    async def _live(self) -> None:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._front])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        if self.openapi:
            app.router.add_get("/openapi.json", self._openapi)
        if self.metrics:
            app.router.add_get("/metrics", self._metrics)
        if self.kind == "vllm":
            app.router.add_get("/version", self._version)
        paths = {"vllm": VLLM_PATHS, "sglang": SGLANG_PATHS, "plain": ()}[self.kind]
        for path in paths if self.dev else ():
            if path.startswith(("/is_", "/get_")):
                app.router.add_get(path, self._ask)
            else:
                app.router.add_post(path, self._do)
        version = ["/version"] if self.kind == "vllm" else []
        self._routes = ["/v1/completions", *version, *(paths if self.dev else ())]
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        engine = asyncio.create_task(self._engine())
        self._ready.set()
        await self._stop.wait()
        engine.cancel()
        await runner.cleanup()

    @web.middleware
    async def _front(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """The key, and a note of everything."""
        body: Any = None
        if request.method == "POST":
            raw = await request.read()
            body = json.loads(raw) if raw else None
        self.calls.append((request.method, request.path, body))
        self.headers.append(dict(request.headers))
        sent = request.headers.get("Authorization", "")
        if self.key is not None and sent != f"Bearer {self.key}":
            return web.json_response({"error": f"Unauthorized: {sent}"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    # the engine --------------------------------------------------------------------------------------

    async def _engine(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if self.paused or self.asleep:
                continue
            while self.waiting and len(self.running) < self.max_running:
                self.running.append(self.waiting.pop(0))
                await asyncio.sleep(self.token_s * self.running[-1].prompt)
            self.most_there = max(self.most_there, len(self.running) + len(self.waiting))
            for one in list(self.running):
                one.tokens.append(next_token(one.tokens))
                one.out += 1
                finish = "length" if one.out >= one.most else None
                if finish:
                    self.running.remove(one)
                self._tell(one, one.tokens[-1], finish)

    def _tell(self, one: Running, token: int | None, finish: str | None) -> None:
        self._untold.append((one, token, finish))
        if not self.burst_s:
            self._tell_all()
        elif len(self._untold) == 1:
            self._loop.call_later(self.burst_s, self._tell_all)

    def _tell_all(self) -> None:
        for one, token, finish in self._untold:
            one.queue.put_nowait((token, finish))
        self._untold.clear()

    def _abort(self, one: Running) -> None:
        for there in (self.running, self.waiting):
            if one in there:
                there.remove(one)
                self.aborted += 1
                self._tell(one, None, "abort")

    # what it answers ---------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        owner = {"vllm": "vllm", "sglang": "sglang", "plain": "someone"}[self.kind]
        more = {} if self.kind == "plain" else {"max_model_len": self.most_tokens}
        model = {"id": "tiny", "object": "model", "owned_by": owner, **more}
        return web.json_response({"object": "list", "data": [model]})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in self._routes}})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.0.1"})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.kind == "sglang":
            names = 'sglang:num_running_reqs{model="tiny"}', 'sglang:num_queue_reqs{model="tiny"}'
        else:
            names = 'vllm:num_requests_running{engine="0"}', 'vllm:num_requests_waiting{engine="0"}'
        counts = len(self.running), len(self.waiting)
        lines = [f"{name} {float(count)}" for name, count in zip(names, counts, strict=True)]
        return web.Response(text="# HELP some\n" + "\n".join(lines) + "\n")

    async def _ask(self, request: web.Request) -> web.Response:
        answers = {
            "/is_paused": {"is_paused": self.paused},
            "/is_sleeping": {"is_sleeping": self.asleep},
            "/get_server_info": {"version": "0.0.2"},
        }
        return web.json_response(answers[request.path])

    async def _do(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        if request.path in self.refuses:
            return web.json_response({"error": "not with this build"}, status=501)
        if request.path in self.pretends:
            return web.json_response({"status": "ok"})
        match request.path:
            case "/pause":
                assert request.query["mode"] == "keep"
                self.paused = True
            case "/pause_generation":
                assert body["mode"] == "in_place"
                self.paused = True
            case "/resume" | "/continue_generation":
                self.paused = False
            case "/sleep" | "/release_memory_occupation":
                self.asleep = True
                self.slept += 1
            case "/wake_up" | "/resume_memory_occupation":
                self.asleep = False
            case "/abort_requests":
                everything = not body.get("request_ids")
                self.aborted_all |= everything
                for one in [*self.running, *self.waiting]:
                    if "abort" not in self.deaf and (everything or one.name in body["request_ids"]):
                        self._abort(one)
            case "/abort_request":
                self.aborted_all |= not body.get("rid")
                for one in [*self.running, *self.waiting]:
                    if "abort" not in self.deaf and one.name.startswith(body.get("rid", "")):
                        self._abort(one)
        return web.json_response({"status": "ok"})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        known = {"model", "prompt", "max_tokens", "temperature", "stream", "min_tokens", "ignore_eos"}
        if self.kind == "plain" and (extra := sorted(set(body) - known)):
            return self._refusal(f"unknown fields {extra}")
        prompt, most = body["prompt"], body["max_tokens"]
        probe = "probe" in str(body.get("request_id", body.get("rid", ""))) or (len(prompt), most) == (2, 2)
        fault = None if probe else self.fault(body)
        if body["model"] != "tiny" or len(prompt) + most > self.most_tokens or fault == "refuse":
            return self._refusal(f"cannot do {len(prompt)} + {most} tokens")
        match fault:
            case "busy":
                return web.json_response({}, status=429, headers={"Retry-After": "0.01"})
            case "broken":
                return web.Response(text="<html>Internal Server Error</html>", status=500)
            case "echo":
                return web.json_response(
                    {"error": {"message": f"bad {dict(request.headers)}", "code": 400}}, status=400
                )
            case "elsewhere":
                return web.Response(status=307, headers={"Location": "http://192.0.2.1/v1/completions"})
            case "page":
                return web.Response(text="<html>hello</html>", content_type="text/html")
            case "drop":
                assert request.transport is not None
                request.transport.close()
                return web.Response()
        number = len(self.calls)
        name = {
            "vllm": f"cmpl-{body.get('request_id', number)}-0",
            "sglang": str(body.get("rid", number)),
            "plain": str(number),
        }[self.kind]
        one = Running(name, list(prompt), len(prompt), most)
        if fault == "lie":
            one.most = most + 1
        elif fault is not None and fault.startswith("short"):
            one.most = max(most // 2, 1)
        self.waiting.append(one)
        try:
            return await self._stream(request, body, one, fault)
        finally:
            if "close" not in self.deaf:
                self._abort(one)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], one: Running, fault: str | None
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        if fault == "hang":
            await asyncio.sleep(60)
        with contextlib.suppress(ConnectionResetError):
            async for data in self._events(body, one, fault):
                half = len(data) // 2  # events are cut anywhere on their way
                await answer.write(data[:half])
                await answer.write(data[half:])
                if fault == "cut" and one.out >= max(one.most // 2, 1):
                    assert request.transport is not None
                    request.transport.close()
                    return answer
                if fault == "end" and one.out >= max(one.most // 2, 1):
                    break
                if fault == "stall" and one.out >= max(one.most // 2, 1):
                    await asyncio.sleep(60)
        return answer

    async def _events(self, body: dict[str, Any], one: Running, fault: str | None) -> AsyncIterator[bytes]:
        """The stream as vLLM's, but for what other kinds leave out."""
        name, first, counted = one.name.removesuffix("-0"), True, 0
        options = body.get("stream_options") or {}
        yield b": a comment\r\n\r\n"
        if fault == "error":
            error = {"error": {"message": "Token id 9 is out of vocabulary", "code": 400}}
            yield b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"
            return
        while True:
            token, finish = await one.queue.get()
            tokens = [] if token is None else [token]
            counted += len(tokens)
            if fault == "garbage" and counted > 1:
                yield b"data: {not json\n\n"
                return
            if fault == "shape" and counted > 1:
                yield b'data: {"choices": [{"token_ids": ["x"]}]}\n\n'
                return
            headless = fault == "headless" and finish == "length"
            if headless:
                finish = None
            if fault == "short_stop" and finish == "length":
                finish = "stop"
            choice = {"index": 0, "text": "".join(f" w{t}" for t in tokens), "logprobs": None}
            choice |= {"finish_reason": finish, "stop_reason": None}
            if body.get("return_token_ids") and self.kind == "vllm":
                choice |= {
                    "prompt_token_ids": one.tokens[: one.prompt] if first else None,
                    "token_ids": tokens,
                }
            event: dict[str, Any] = {"id": name, "object": "text_completion", "choices": [choice]}
            usage = {"prompt_tokens": one.prompt, "completion_tokens": counted}
            if options.get("continuous_usage_stats") and self.kind == "vllm":
                event["usage"] = usage
            first = False
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
            if headless:
                return
            if finish is not None:
                if options.get("include_usage"):
                    last = {"id": name, "choices": [], "usage": usage}
                    yield b"data: " + json.dumps(last).encode() + b"\r\n\r\n"
                yield b"data: [DONE]\n\n"
                return

    def _refusal(self, why: str) -> web.Response:
        return web.json_response({"error": {"message": why, "code": 400}}, status=400)


if __name__ == "__main__":
    with FakeServer(port=int(sys.argv[1]), step_s=float(sys.argv[2])) as server:
        print(server.url, flush=True)
        sys.stdin.read()
