"""What is asked of one server, and how: a client that trusts nothing it hears.

Errors come in three kinds: :class:`Trouble`, the server cannot be used; :class:`Again`, another try may
help; and what a request deserves itself (:mod:`tailopt.replay.http_stream`). None of them holds the API
key.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tailopt.errors import one_line
from tailopt.replay.http_server import KEY, PATHS, READ_ONLY, Abilities, Server, api_key
from tailopt.replay.http_stream import DONE, EventReader, Nonsense, Refused, error_text, read_chunk
from tailopt.replay.tiny_model import FIRST_TOKEN

ANSWER_S = 60.0
"""For anything but a completion."""

ID_FIELDS = {"vLLM": "request_id", "SGLang": "rid"}
"""What a server calls the id of a request that the client chooses."""


@dataclass(frozen=True)
class Settings:
    """How a link behaves.

    Attributes:
        blocks, block_tokens: the KV cache that the engine is taken to have.
        model: which model to ask for; None for the only one.
        priority: whether to send priorities.
        silence_s: a server with work that says nothing for so long is dead.
        connect_s: how long to try to reach it at first.
        retries: of one request, and of anything else.
        back_off_s: before the first of them; then twice as long each time.
        abort_s: how long an abort may take.
    """

    blocks: int
    block_tokens: int
    model: str | None = None
    priority: bool = False
    silence_s: float = 60.0
    connect_s: float = 30.0
    retries: int = 3
    back_off_s: float = 0.2
    abort_s: float = 10.0


class Trouble(Exception):
    """The server cannot be used."""


class Again(Exception):
    """Worth another try, after at least so many seconds."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


@dataclass(frozen=True)
class Part:
    """Something of a completion.

    Attributes:
        tokens: gained; stand-ins if the server does not tell which.
        told: whether it tells.
        finish: why the completion has ended, None if it has not.
        id: what the server calls it.
    """

    tokens: tuple[int, ...] = ()
    told: bool = False
    finish: str | None = None
    id: str = ""


class Client:
    """Speaks to one server; to be made within an event loop.

    Attributes:
        abilities: what it was found to do.
        closing: set to end the wait for a server that does not answer.
    """

    def __init__(self, server: Server, settings: Settings) -> None:
        self.server, self._settings, self._key = server, settings, api_key()
        self.abilities, self.closing = Abilities(), False
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S),
            trust_env=False,  # no proxies
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def safe(self, error: BaseException | str) -> str:
        """One line that can be shown: of what a server says, not the key."""
        text = str(error) or type(error).__name__
        return one_line(text.replace(self._key, "***") if self._key else text)[:300]

    async def call(self, method: str, path: str, **more: Any) -> tuple[int, str]:
        """Status and text."""
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        url = self.server.url + path
        async with self._session.request(method, url, timeout=limit, allow_redirects=False, **more) as answer:
            return answer.status, (await answer.content.read(8 << 20)).decode(errors="replace")

    async def must(self, method: str, path: str, **more: Any) -> str:
        """As :meth:`call`, tried again if that may help."""
        for attempt in range(self._settings.retries + 1):
            try:
                status, text = await self.call(method, path, **more)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = f"{path}: {type(error).__name__} {error}"
            else:
                if status < 400:
                    return text
                why = f"{path}: {status} {_message(text)}"
                if status < 500 and status != 429:
                    break
            await asyncio.sleep(self._settings.back_off_s * 2**attempt)
        raise Trouble(why)

    async def connect(self) -> None:
        """Reach the server, and find out what it is."""
        models = await self._models()
        wanted = self._settings.model
        names = [str(one.get("id")) for one in models]
        if wanted is not None and wanted not in names:
            raise Trouble(f"has no model {wanted!r:.60}; it has {', '.join(names)[:200]}")
        if wanted is None and len(set(names)) != 1:
            raise Trouble(f"has the models {', '.join(names)[:200]}, expected one to be chosen")
        chosen = models[names.index(wanted or names[0])]
        most = chosen.get("max_model_len")
        paths = await self._paths()
        self.abilities = Abilities(
            name=await self._name(paths, str(chosen.get("owned_by", ""))),
            model=str(chosen["id"]),
            most_tokens=most if isinstance(most, int) else None,
            paths=paths,
        )

    async def _models(self) -> list[dict[str, Any]]:
        until_s, pause_s = time.monotonic() + self._settings.connect_s, self._settings.back_off_s
        while not self.closing:
            try:
                status, text = await self.call("GET", "/v1/models")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = f"cannot be reached ({short(error)})"
            else:
                if status == 200:
                    return _data(text)
                if status in (401, 403):
                    raise Trouble(f"wants an API key ({status}), or another one than {KEY} has")
                why = f"/v1/models: {status} {_message(text)}"
                if status not in (429, 500, 502, 503, 504):
                    raise Trouble(why)
            if time.monotonic() + pause_s > until_s:
                raise Trouble(why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
        raise Trouble("closed")

    async def _paths(self) -> frozenset[str]:
        """Those of :data:`PATHS` that the server has."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            status, text = await self.call("GET", "/openapi.json")
            if status == 200:
                there = _object(text).get("paths")
                if isinstance(there, dict) and "/v1/completions" in there:
                    known = {path for path in PATHS if path in there}
                    status, _ = await self.call("GET", "/metrics")  # often mounted beside the rest
                    return frozenset(known | ({"/metrics"} if status == 200 else set()))
        found = set()
        for path in PATHS:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                if path in READ_ONLY:
                    status, _ = await self.call("GET", path)
                    if status == 200:
                        found.add(path)
                elif await self._takes_post(path):
                    found.add(path)
        return frozenset(found)

    async def _takes_post(self, path: str) -> bool:
        """Whether OPTIONS or the refusal of another method says that a POST is taken; nothing is posted."""
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        async with self._session.request(
            "OPTIONS", self.server.url + path, timeout=limit, allow_redirects=False
        ) as answer:
            return answer.status in (200, 204, 405) and "POST" in answer.headers.get("Allow", "")

    async def _name(self, paths: frozenset[str], owner: str) -> str:
        kind = {"vllm": "vLLM", "sglang": "SGLang"}.get(owner.lower(), "server")
        for path in ("/version", "/get_server_info", "/server_info"):
            if path in paths:
                with contextlib.suppress(Trouble, ValueError):
                    version = _object(await self.must("GET", path)).get("version")
                    if isinstance(version, str):
                        return f"{kind} {one_line(version)[:40]} over HTTP"
        return f"{kind} over HTTP"

    async def probe(self) -> None:
        """Which fields of a request it understands, by asking for two tokens; it must give just these."""
        forced: dict[str, object] = {"min_tokens": 2, "ignore_eos": True}
        usage: dict[str, object] = {"include_usage": True}
        running: dict[str, object] = {"include_usage": True, "continuous_usage_stats": True}
        tries: list[dict[str, object]] = [
            {**forced, "return_token_ids": True, "stream_options": running},
            {**forced, "stream_options": running},
            {**forced, "stream_options": usage},
            forced,
        ]
        found, refusal = self.abilities, ""
        for fields in tries:
            self.abilities = replace(found, fields=fields)
            parts: list[Part] = []
            try:
                async for part in self.complete("tailopt-probe", [FIRST_TOKEN + 1, FIRST_TOKEN + 2], 2, 0):
                    parts.append(part)
            except Refused as error:
                refusal = self.safe(error)
                continue
            count = sum(len(part.tokens) for part in parts)
            if count != 2:
                raise Trouble(f"gave {count} tokens when 2 were asked for: it does not force lengths")
            told = all(part.told for part in parts if part.tokens)
            self.abilities = replace(self.abilities, token_ids=told)
            return
        raise Trouble(f"refuses a completion with a forced length ({refusal})")

    async def complete(
        self, name: str, prompt: list[int], tokens: int, priority: int
    ) -> AsyncGenerator["Part", None]:
        """What comes of one POST, the first part empty, when the answer begins.

        Args:
            name: the id that the server is told.
            prompt: token ids.
            tokens: how many to generate.
            priority: sent if the settings say so.

        Raises:
            Refused: the server does not want it. Nonsense: it answers something else. Again, or an error of
                the connection: worth another try.
        """
        fields = {**self.abilities.fields, "min_tokens": tokens}
        kind = self.abilities.name.split()[0]
        if kind in ID_FIELDS:
            fields[ID_FIELDS[kind]] = name
        if self._settings.priority:
            fields["priority"] = priority
        body = {
            "model": self.abilities.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            **fields,
        }
        url = self.server.url + "/v1/completions"
        async with self._session.post(url, json=body, allow_redirects=False) as answer:
            if answer.status != 200:
                text = (await answer.content.read(1 << 20)).decode(errors="replace")
                why = f"{answer.status} {_message(text)}"
                if answer.status == 429 or answer.status >= 500:
                    raise Again(why, _seconds(answer.headers.get("Retry-After")))
                raise Refused(why)
            kind = answer.headers.get("Content-Type", "no content type")
            if "text/event-stream" not in kind:
                raise Nonsense(f"{one_line(kind)[:60]}, expected a stream")
            yield Part()
            reader, finish, counted, over = EventReader(), None, 0, False
            while data := await answer.content.readany():
                for text in reader.feed(data):
                    if text == DONE:
                        over = True
                        continue
                    chunk = read_chunk(text)
                    new = chunk.tokens or ()
                    if chunk.tokens is None and not self.abilities.token_ids:
                        more = int(chunk.text != "") if chunk.total is None else chunk.total - counted
                        new = (FIRST_TOKEN,) * max(more, 0)
                    counted += len(new)
                    finish = chunk.finish or finish
                    if counted > tokens:
                        raise Nonsense(f"{counted} tokens, when {tokens} were asked for")
                    if new or chunk.finish:
                        yield Part(new, chunk.tokens is not None, chunk.finish, chunk.id)
            if not over and finish is None:
                raise Again(f"closed the stream after {counted} of {tokens} tokens")


def short(error: BaseException) -> str:
    """What went wrong with a connection, in a few words."""
    reason = getattr(error, "os_error", None) or error
    text = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
    return one_line(str(text))[:200]


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("expected an object")
    return found


def _message(text: str) -> str:
    """What a server says about an error."""
    try:
        return error_text(_object(text))[0]
    except (ValueError, RecursionError):
        return one_line(text)[:200]


def _data(text: str) -> list[dict[str, Any]]:
    """The models that a server lists."""
    try:
        models = _object(text).get("data")
    except (ValueError, RecursionError):
        models = None
    if not isinstance(models, list) or not models or not all(isinstance(one, dict) for one in models):
        raise Nonsense(f"/v1/models: {one_line(text)[:100]!r}, expected a list of models")
    return models


def _seconds(text: str | None) -> float:
    """``Retry-After`` as a number; dates and nonsense count as none."""
    try:
        return max(float(text or 0), 0.0)
    except ValueError:
        return 0.0
