"""One engine in a process of its own, told what to do line by line: ``PYTHON -P worker.py CONFIG``.

Runs in the environment of the engine (vLLM pins packages that clash with tailopt's), so it needs the standard
library and vLLM, and nothing of tailopt. Commands come as JSON lines on standard input and events go as JSON
lines to standard output; what the engine itself prints goes to standard error. Times are
``time.monotonic()``, on Linux one clock for all processes of a machine. When standard input ends, so does the
worker.

Between two steps all commands that have come are obeyed, so that a step is never disturbed:

=========================================  =================================================================
``{"do": "submit", "requests": [...]}``    each ``[key, prompt token ids, tokens wanted, priority]``; answered
                                           by ``submitted``, or ``rejected`` with the reason
``{"do": "abort", "keys": [...]}``         answered by ``aborted``: those that were there and are gone now, as
                                           ``[key, was running]``, and ``absent``, those that were not there
``{"do": "update", "requests": [...]}``    each ``[key, tokens wanted, priority]``, of requests that are there
``{"do": "limit", "running": n}``          at most so many may run from now on; with ``"later"``, pairs of
                                           requests finished from now on, rising, and what ``n`` is then
``{"do": "pause"}``, ``{"do": "go"}``      no more steps (answered by ``paused``), and steps again; a worker
                                           starts paused
``{"do": "sleep"}``, ``{"do": "wake"}``    give up the engine's memory and take it back, where it can
``{"do": "forget"}``                       empty the prefix cache; nothing may run
``{"do": "stop"}``                         answered by ``stopped``, the last event
=========================================  =================================================================

A ``step`` event tells all about one step: ``t`` when it began and ``s`` how long it took, with all that was
done since the step before if the engine was busy, so that steps leave no gaps; ``engine_s`` of it in the
engine, and ``cpu_s`` of processor time; ``run`` and ``wait``, requests running and waiting in it; ``n``
that gained a token, holding ``K`` tokens with one new one each, and ``P`` tokens computed besides; ``kv``,
tokens of KV cache in use, in whole blocks; ``free``, blocks free at its end; ``new``, the tokens gained as
``[key, token, ...]``; ``in``, ``out`` and ``done``, the keys admitted, preempted and finished.
"""

import contextlib
import gc
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Message = dict[str, Any]

NGRAM = (2, 4)
"""Tokens that an n-gram looked up in the prompt has, at least and at most."""


class Engine(Protocol):
    """What :func:`serve` drives: vLLM, or something that behaves like it."""

    def about(self) -> Message:
        """Versions and limits."""
        ...

    def submit(self, key: int, prompt: list[int], want: int, priority: int) -> None:
        """Queue a request; ValueError if it cannot be served."""
        ...

    def abort(self, keys: list[int]) -> tuple[list[list[int]], list[int]]:
        """Remove requests: those that were there, with whether they ran, and those that were not."""
        ...

    def update(self, key: int, want: int, priority: int) -> None:
        """Change what a request that is there wants."""
        ...

    def limit(self, running: int) -> None:
        """Let at most so many run from now on."""
        ...

    def busy(self) -> bool:
        """Whether there is anything to do."""
        ...

    def step(self) -> Message:
        """Take one step; its event without times."""
        ...

    def sleep(self) -> bool:
        """Give up memory; False if it cannot."""
        ...

    def wake(self) -> None:
        """Take it back."""
        ...

    def forget(self) -> None:
        """Empty the prefix cache."""
        ...


class Vllm:
    """One vLLM engine in this process."""

    def __init__(self, config: Message) -> None:
        from importlib.metadata import version

        import torch
        import vllm
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.cuda = torch.cuda.is_available()
        if config.get("threads"):
            torch.set_num_threads(config["threads"])
        more: Message = {}
        if config.get("draft_tokens"):
            least, most = NGRAM
            more["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": config["draft_tokens"],
                "prompt_lookup_min": least,
                "prompt_lookup_max": most,
            }
        if config.get("blocks"):
            more["num_gpu_blocks_override"] = config["blocks"] + 1  # one stands for "no block"
        if self.cuda:
            more["enable_sleep_mode"] = True
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=config["model"],
                load_format=config.get("load_format", "dummy"),
                skip_tokenizer_init=True,
                dtype=config.get("dtype", "float32"),
                seed=config.get("seed", 0),
                max_model_len=config["max_model_len"],
                max_num_seqs=config["max_running"],
                max_num_batched_tokens=config["token_budget"],
                block_size=config["block_tokens"],
                enable_prefix_caching=config["prefix_caching"],
                enable_chunked_prefill=True,
                scheduling_policy=config.get("scheduling", "fcfs"),
                tensor_parallel_size=config.get("tensor_parallel", 1),
                enforce_eager=not self.cuda,
                async_scheduling=False,
                disable_log_stats=True,
                **more,
            )
        )
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.blocks = self.scheduler.kv_cache_manager.block_pool
        self.block_tokens: int = config["block_tokens"]
        self.temperature = float(config.get("temperature", 0.0))
        self.seed = int(config.get("seed", 0))
        self.stop: list[int] | None = config.get("stop")  # tokens that end a response; None: none does
        self.sampling, self.delta = SamplingParams, RequestOutputKind.DELTA
        self.ids: dict[int, str] = {}
        self.seen: Message = {}
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        with contextlib.suppress(Exception):
            self.versions["transformers"] = version("transformers")
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._watched

    def about(self) -> Message:
        """Versions and limits."""
        return {
            "versions": self.versions,
            "device": "cuda" if self.cuda else "cpu",
            "blocks": self.blocks.num_gpu_blocks - 1,
            "block_tokens": self.block_tokens,
            "max_running": self.scheduler.max_num_running_reqs,
            "token_budget": self.scheduler.max_num_scheduled_tokens,
        }

    def submit(self, key: int, prompt: list[int], want: int, priority: int) -> None:
        """Queue a request of exactly so many tokens, or of at most so many if it may end by itself."""
        params = self.sampling(
            max_tokens=want,
            min_tokens=want if self.stop is None else 0,
            ignore_eos=True,
            stop_token_ids=self.stop,
            temperature=self.temperature,
            seed=None if self.temperature == 0 else self.seed + key,
            detokenize=False,
            output_kind=self.delta,
        )
        self.ids[key] = self.engine.add_request(
            str(key), {"prompt_token_ids": prompt}, params, priority=priority
        )

    def abort(self, keys: list[int]) -> tuple[list[list[int]], list[int]]:
        """Gone from the engine, or RuntimeError."""
        scheduler = self.scheduler
        there = {key: self.ids[key] for key in keys if self.ids.get(key) in scheduler.requests}
        running = {request.request_id for request in scheduler.running}
        if there:  # an empty list must never be taken for all
            self.engine.abort_request(list(there.values()), internal=True)
        left = [name for name in there.values() if name in scheduler.requests]
        if left or any(request.request_id in there.values() for request in scheduler.running):
            raise RuntimeError(f"the engine did not abort {left}")
        for key in there:
            del self.ids[key]
        gone = [[key, int(name in running)] for key, name in there.items()]
        return gone, [key for key in keys if key not in there]

    def update(self, key: int, want: int, priority: int) -> None:
        """Nothing happens if it is gone."""
        request = self.scheduler.requests.get(self.ids.get(key))
        if request is not None:
            request.max_tokens = want
            request.sampling_params.max_tokens = want
            request.sampling_params.min_tokens = 0
            request.priority = priority

    def limit(self, running: int) -> None:
        """Whoever runs already goes on."""
        self.scheduler.max_num_active_reqs = min(running, self.scheduler.max_num_running_reqs)

    def busy(self) -> bool:
        """Whether a request is there."""
        return bool(self.engine.has_unfinished_requests())

    def step(self) -> Message:
        """One step of vLLM, with what its scheduler decided and what came out."""
        outputs = self.engine.step()
        new, done = [], []
        for output in outputs:
            key = int(output.request_id)
            tokens = list(output.outputs[0].token_ids)
            if tokens:
                new.append([key, *tokens])
            if output.finished:
                done.append(key)
                del self.ids[key]
        return {**self.seen, "free": self.blocks.get_num_free_blocks(), "new": new, "done": done}

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        """The scheduler's decision, with what it decided written down."""
        decision = self._schedule(*args, **kwargs)
        requests, drafts = self.scheduler.requests, decision.scheduled_spec_decode_tokens
        sampling = [
            request
            for request in (requests[name] for name in decision.num_scheduled_tokens)
            if request.num_computed_tokens >= request.num_tokens
        ]
        admitted = [one.req_id for one in decision.scheduled_new_reqs]
        admitted += decision.scheduled_cached_reqs.resumed_req_ids
        pool = self.blocks
        self.seen = {
            "run": len(self.scheduler.running),
            "wait": len(self.scheduler.waiting),
            "n": len(sampling),
            "K": sum(request.num_tokens + 1 for request in sampling),
            "P": decision.total_num_scheduled_tokens - len(sampling) - sum(map(len, drafts.values())),
            "kv": (pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) * self.block_tokens,
            "in": [_key(name) for name in admitted],
            "out": [_key(name) for name in decision.preempted_req_ids or ()],
        }
        return decision

    def sleep(self) -> bool:
        """Weights to main memory, KV cache away; not without a GPU."""
        if not self.cuda:
            return False
        self.engine.sleep(1)
        return True

    def wake(self) -> None:
        """Take memory again."""
        self.engine.wake_up()

    def forget(self) -> None:
        """Empty the prefix cache."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")


def _key(name: str) -> int:
    """vLLM appends a random part to the id it is given."""
    return int(name.split("-")[0])


class Lines:
    """JSON lines from one file descriptor and to another."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink, self.rest, self.open = source, sink, b"", True

    def read(self, *, wait: bool) -> list[Message]:
        """The commands that are there; if ``wait``, at least one, unless the other end is closed."""
        while self.open and select.select([self.source], [], [], None if wait else 0)[0]:
            chunk = os.read(self.source, 1 << 20)
            self.open = bool(chunk)
            self.rest += chunk
            if b"\n" in chunk:
                break
        *lines, self.rest = self.rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def write(self, message: Message) -> None:
        """Send one event."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[os.write(self.sink, data) :]


def serve(engine: Engine, lines: Lines) -> None:
    """Obey commands and take steps until told to stop, or until nobody is there to tell."""
    paused, asleep, end_s = True, False, 0.0
    finished, later = 0, deque[list[int]]()  # since the last limit
    while True:
        stepping = not paused and engine.busy()
        for command in lines.read(wait=not stepping):
            match command:
                case {"do": "submit", "requests": requests}:
                    submitted, rejected = [], []
                    for key, prompt, want, priority in requests:
                        try:
                            engine.submit(key, prompt, want, priority)
                            submitted.append(key)
                        except ValueError as error:
                            rejected.append([key, str(error)])
                    lines.write({"event": "submitted", "t": time.monotonic(), "keys": submitted})
                    if rejected:
                        lines.write({"event": "rejected", "t": time.monotonic(), "keys": rejected})
                case {"do": "abort", "keys": keys}:
                    gone, absent = engine.abort(keys)
                    lines.write({"event": "aborted", "t": time.monotonic(), "keys": gone, "absent": absent})
                case {"do": "update", "requests": requests}:
                    for key, want, priority in requests:
                        engine.update(key, want, priority)
                case {"do": "limit", "running": running, **more}:
                    engine.limit(running)
                    finished, later = 0, deque(more.get("later", ()))
                case {"do": "pause"}:
                    paused = True
                    lines.write({"event": "paused", "t": time.monotonic()})
                case {"do": "go"}:
                    paused = False
                case {"do": "sleep"}:
                    began_s = time.monotonic()
                    asleep = engine.sleep()
                    lines.write({"event": "asleep", "t": time.monotonic(), "s": time.monotonic() - began_s})
                case {"do": "wake"}:
                    began_s = time.monotonic()
                    if asleep:
                        engine.wake()
                    asleep = False
                    lines.write({"event": "awake", "t": time.monotonic(), "s": time.monotonic() - began_s})
                case {"do": "forget"}:
                    engine.forget()
                    gc.collect()
                case {"do": "stop"}:
                    lines.write({"event": "stopped", "t": time.monotonic()})
                    return
                case _:
                    raise ValueError(f"unknown command {command!r:.200}")
        if not lines.open:
            return
        if not stepping:
            end_s = time.monotonic()
        if paused or not engine.busy():
            continue
        called_s, cpu_s = time.monotonic(), time.process_time()
        step = engine.step()
        finished += len(step["done"])
        while later and later[0][0] <= finished:
            engine.limit(later.popleft()[1])
        begin_s, end_s = end_s, time.monotonic()
        lines.write(
            {
                "event": "step",
                "t": begin_s,
                "s": end_s - begin_s,
                "engine_s": end_s - called_s,
                "cpu_s": time.process_time() - cpu_s,
                **step,
            }
        )


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""The engine in this process, on the cores it is given, silent, and without a network."""


def main(config: Message, make: Callable[[Message], Engine] = Vllm) -> None:
    """Make the engine, say so, and serve."""
    sink = os.dup(1)
    os.dup2(2, 1)
    lines = Lines(0, sink)
    if config.get("cores"):
        os.sched_setaffinity(0, config["cores"])
    if config.get("gpus") is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config["gpus"]))
    threads = config.get("threads") or len(config.get("cores") or [0])
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(threads))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.get("kv_gb", 1))
    began_s = time.monotonic()
    engine = make(config)
    gc.collect()
    gc.freeze()
    gc.disable()  # it would stop the engine in the middle of a step; done when the cache is emptied
    now_s = time.monotonic()
    lines.write({"event": "ready", "t": now_s, "s": now_s - began_s, **engine.about()})
    serve(engine, lines)
    sys.stderr.flush()
    os._exit(0)  # the engine's threads need no farewell


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
