"""One server as an engine: the worker's commands and events (:mod:`tailopt.replay.worker`) spoken over HTTP.

All links of a process live in one thread with an event loop; the driver's side is as that of a worker.

**Steps.** A server does not tell its steps, but what a step gives is sent at once. So what arrives within
``GATHER_S`` is one step, from the end of the one before: n, K and the tokens gained are exact; P is what
the prompts of requests that got their first token have, whether cached or not; KV use counts the tokens
that running requests hold; preemptions are not seen. Where a server does not tell token ids, tokens are
counted, and stand-ins are kept for them: a request that moves then has a prompt of the right length but
other content.

**Order.** Requests are sent in the order given, the next when the answer to the one before has begun, or
after ``ORDER_S``.

**Standing still.** A server that can be paused is, and takes submissions meanwhile, so that all of a batch
are there when it goes on. One that cannot goes on; submissions wait here, and what it says meanwhile is
held back: it counts when the engine goes on, and not at all for requests that are taken away.

**Limits.** A running stream cannot be told a new one. A raised limit is a second submission when the first
has ended. A lowered one cuts what is held back; a stream that has enough is aborted if it has it now, and
closed as soon as it gets there; what the server generates beyond it counts for nobody.

**Aborting.** By id where the server can, and then the stream says that it ended; else, and where that did
not help, by closing the stream, and then the server's metrics must say that it is gone. Never with an empty
list of ids, which stands for all.

**Errors.** A refused connection, 429, 5xx, or a stream that is cut is tried again with the tokens gained so
far, ``retries`` times with growing pauses in which ``Retry-After`` is heeded; then the engine counts as
dead. A request that is refused (4xx), or answered with nonsense, ends the replay.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tailopt.replay.http_client import ANSWER_S, Again, Client, Settings, Trouble, short
from tailopt.replay.http_server import Abilities, Server, requests_there
from tailopt.replay.http_stream import Nonsense, Refused
from tailopt.replay.process import Message

GATHER_S = 0.002
ORDER_S = 0.02
QUIET_S = 0.02
"""After a pause, nothing must have come for so long."""


@dataclass(eq=False)
class _Stream:
    """One submission."""

    key: int
    name: str  # the id that the server is told
    prompt: list[int]
    want: int
    priority: int
    got: list[int] = field(default_factory=list)  # told to the driver, or about to be
    held: list[int] = field(default_factory=list)  # came while standing still
    asked: int = 0
    id: str = ""  # as the server calls it
    running: bool = False
    ended: bool = False
    aborting: bool = False
    task: asyncio.Task[None] | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    sent_s: float = 0.0
    heard_s: float = 0.0

    @property
    def tokens(self) -> int:
        return len(self.got) + len(self.held)


class HttpLink:
    """A link to a server (:class:`tailopt.replay.process.Link`).

    Args:
        loop: runs in another thread.
        server: where.
        settings: how.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, server: Server, settings: Settings) -> None:
        self.server, self._settings, self._loop = server, settings, loop
        self.connected: Future[Abilities] = Future()
        self.alive = True
        self._hear, self._wake = os.pipe()
        os.set_blocking(self._hear, False)
        os.set_blocking(self._wake, False)
        self._lock, self._events = threading.Lock(), deque[Message]()
        self._why = ""
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._kick, self._idle = asyncio.Event(), asyncio.Event()
        self._streams: dict[int, _Stream] = {}
        self._unsent: deque[_Stream] = deque()
        self._tasks: set[asyncio.Task[None]] = (
            set()
        )  # some outlive their streams: of a server that lags behind
        self._new: dict[int, list[int]] = {}
        self._gathering = False
        self._limit, self._finished = 1 << 30, 0
        self._later = deque[list[int]]()  # limits to come, by requests finished since they were told
        self._paused, self._asleep, self._server_paused = True, False, False
        self._first_s = self._end_s = self._heard_s = time.monotonic()
        self._client: Client  # made in the loop
        self._task: asyncio.Task[None] | None = None
        asyncio.run_coroutine_threadsafe(self._live(), loop)

    # the driver's side -------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Give a command."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)

    def fileno(self) -> int:
        """Readable when there are events."""
        return self._hear

    def read(self) -> list[Message]:
        """The events that are there."""
        with self._lock:
            with contextlib.suppress(BlockingIOError, OSError):
                os.read(self._hear, 1 << 16)
            events = list(self._events)
            self._events.clear()
        return events

    def kill(self) -> None:
        """End all streams, let the server go on for others, and close the connections."""
        if self._hear < 0:
            return
        self.alive = False
        ending = asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
        with contextlib.suppress(Exception):
            ending.result(ANSWER_S)
        with self._lock:
            os.close(self._hear)
            os.close(self._wake)
            self._hear = self._wake = -1

    def complaint(self) -> str:
        """Why it is gone."""
        return self._why or "closed"

    # the loop's side ---------------------------------------------------------------------------------

    def _emit(self, what: str, **facts: Any) -> None:
        with self._lock:
            if self._wake < 0:
                return
            self._events.append({"event": what, "t": time.monotonic()} | facts)
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b".")

    async def _live(self) -> None:
        """Connect, then obey."""
        self._task = asyncio.current_task()
        began_s = time.monotonic()
        self._client = Client(self.server, self._settings)
        helpers = []
        try:
            await self._client.connect()
            await self._as_if_new()
            await self._client.probe()
            await self._try_to_stand()
            self.connected.set_result(self._client.abilities)
            versions = {"server": self._client.abilities.name}
            self._emit("ready", s=time.monotonic() - began_s, versions=versions)
            helpers = [asyncio.create_task(self._sending()), asyncio.create_task(self._watching())]
            while (command := await self._inbox.get())["do"] != "stop":
                await self._obey(command)
            self._emit("stopped")
            self._die("stopped")
        except (Trouble, Again, Nonsense, Refused) as error:
            self._die(self._client.safe(error))
        except Exception as error:  # whatever it is, the driver must hear of it
            self._die(self._client.safe(f"{type(error).__name__} {error}"))
        finally:
            for helper in helpers:
                helper.cancel()

    def _die(self, why: str) -> None:
        if self._why:
            return
        self._why, self.alive = why, False
        if not self.connected.done():
            self.connected.set_exception(Trouble(f"server {self.server}: {why}"))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._emit("died")
        if self._task is not asyncio.current_task():
            self._inbox.put_nowait({"do": "stop"})

    async def _shut(self) -> None:
        self._why = self._why or "closed"
        self._client.closing = True
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._task is not None:
            # a call that is under way must be over at the server too, or it might undo what follows
            self._inbox.put_nowait({"do": "stop"})
            done, _ = await asyncio.wait([self._task], timeout=ANSWER_S)
            if not done:
                self._task.cancel()
        with contextlib.suppress(Exception):
            if self._asleep:
                await self._awake()
        with contextlib.suppress(Exception):
            if self._server_paused:
                await self._go_on()
        await self._client.close()
        if not self.connected.done():
            self.connected.set_exception(Trouble(f"server {self.server}: closed"))

    async def _run(self, stream: _Stream) -> None:
        """One submission, from the first try to the end."""
        tries = 0
        while True:
            before, stream.asked = stream.tokens, stream.want - stream.tokens
            finish: str | None = None
            after_s = 0.0
            try:
                prompt = stream.prompt + stream.got + stream.held
                answer = self._client.complete(stream.name, prompt, stream.asked, stream.priority)
                async with contextlib.aclosing(answer) as parts:
                    async for part in parts:
                        stream.answered.set()
                        self._heard_s = stream.heard_s = time.monotonic()
                        stream.id, finish = part.id or stream.id, part.finish or finish
                        less = stream.want < before + stream.asked
                        enough = stream.tokens + len(part.tokens) >= stream.want
                        enough = enough and (less or finish is not None)
                        if part.tokens or enough:
                            self._gain(stream, part.tokens, over=enough)
                        if enough and less:
                            break  # it wants less than when it asked
                if stream.ended or stream.aborting:
                    return
                if finish == "abort":
                    raise Again(f"aborted by somebody else after {stream.tokens} tokens")
                if before + stream.asked > stream.tokens or stream.tokens >= stream.want:
                    self._gain(stream, (), over=True)  # if these are too few, the ledger will say so
                    return
                continue  # it wants more than when it asked
            except (Refused, Nonsense) as error:
                kind = "" if isinstance(error, Refused) else "answers nonsense: "
                self._emit("rejected", keys=[[stream.key, kind + self._client.safe(error)]])
                return
            except Again as error:
                why, after_s = str(error), error.after_s
            except aiohttp.ClientPayloadError:
                why = f"closed the stream after {stream.tokens} of {stream.want} tokens"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = short(error)
            except Exception as error:  # whatever it is, the driver must hear of it
                self._die(self._client.safe(f"{type(error).__name__} {error}"))
                return
            if stream.tokens >= stream.want:  # cut off behind the last token
                self._gain(stream, (), over=True)
                return
            tries += 1
            if tries > self._settings.retries:
                self._die(self._client.safe(why))
                return
            await asyncio.sleep(max(self._settings.back_off_s * 2 ** (tries - 1), min(after_s, 30.0)))

    def _gain(self, stream: _Stream, new: Sequence[int], *, over: bool) -> None:
        """Tokens have come, and perhaps the end."""
        new = list(new[: max(stream.want - stream.tokens, 0)])
        stream.ended = stream.ended or over
        if self._paused:
            stream.held += new
            return
        stream.got += new
        self._new.setdefault(stream.key, []).extend(new)
        self._gather()

    def _gather(self) -> None:
        if not self._gathering:
            self._gathering, self._first_s = True, time.monotonic()
            self._loop.call_later(GATHER_S, self._tell)

    def _tell(self) -> None:
        """What has come is a step."""
        self._gathering = False
        new, self._new = self._new, {}
        there = {key: self._streams[key] for key in new if key in self._streams}
        if not there:
            return
        first = [stream for stream in there.values() if not stream.running]
        sent_s = [stream.sent_s for stream in first]
        end_s = max(self._first_s, self._end_s + 1e-6, *sent_s)
        begin_s, self._end_s = self._end_s, end_s
        for stream in first:
            stream.running = True
        gained = [there[key] for key, tokens in new.items() if tokens and key in there]
        done = [stream for stream in there.values() if stream.ended]
        running = [stream for stream in self._streams.values() if stream.running]
        size = self._settings.block_tokens

        def blocks(streams: Sequence[_Stream]) -> int:
            return sum(-(-(len(one.prompt) + len(one.got)) // size) for one in streams)

        used = blocks(running)
        self._emit(
            "step",
            t=begin_s,
            s=end_s - begin_s,
            engine_s=end_s - max(begin_s, *sent_s) if sent_s else end_s - begin_s,
            run=len(running),
            wait=len(self._streams) - len(running),
            n=len(gained),
            K=sum(len(one.prompt) + len(one.got) for one in gained),
            P=sum(len(one.prompt) - 1 for one in first),
            kv=used * size,
            free=max(self._settings.blocks - used + blocks(done), 0),
            new=[[key, *tokens] for key, tokens in new.items() if tokens and key in there],
            **{"in": [one.key for one in first], "out": [], "done": [one.key for one in done]},
        )
        for stream in done:
            del self._streams[stream.key]
        self._finished += len(done)
        while self._later and self._later[0][0] <= self._finished:
            self._limit = self._later.popleft()[1]
        self._kick.set()

    async def _sending(self) -> None:
        """Send what may be sent, in order."""
        while True:
            while self._unsent and self._may_send():
                stream = self._unsent.popleft()
                if not any(one.task is not None for one in self._streams.values()):
                    self._end_s = time.monotonic()
                stream.sent_s = stream.heard_s = self._heard_s = time.monotonic()
                stream.task = asyncio.create_task(self._run(stream))
                self._tasks.add(stream.task)
                stream.task.add_done_callback(self._tasks.discard)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stream.answered.wait(), ORDER_S)
            self._idle.set()
            self._kick.clear()
            await self._kick.wait()

    def _may_send(self) -> bool:
        if self._why or self._asleep or (self._paused and not self._server_paused):
            return False
        return sum(one.task is not None for one in self._streams.values()) < self._limit

    async def _watching(self) -> None:
        """Notice a server, or one stream, that says nothing while this process listens."""
        most_s = self._settings.silence_s
        tick_s, woken_s = min(1.0, most_s / 4), time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            before_s, now_s = woken_s, time.monotonic()
            woken_s, deaf_s = now_s, max(now_s - before_s - 2 * tick_s, 0.0)
            self._heard_s += deaf_s
            for stream in self._streams.values():
                stream.heard_s += deaf_s
            out = [one for one in self._streams.values() if one.task is not None and not one.ended]
            if self._paused or not out:
                self._heard_s = now_s
                for stream in out:
                    stream.heard_s = now_s
            elif now_s - self._heard_s > most_s:
                self._die(f"has said nothing for {most_s:g} s")
            elif any(one.running and now_s - one.heard_s > 5 * most_s for one in out):
                self._die(f"has forgotten a request for {5 * most_s:g} s")

    # commands ----------------------------------------------------------------------------------------

    async def _obey(self, command: Message) -> None:
        match command:
            case {"do": "submit", "requests": requests}:
                for key, prompt, want, priority in requests:
                    name = f"tailopt-{os.getpid()}-{id(self)}-{key}."  # SGLang aborts all that begin so
                    stream = _Stream(key, name, list(prompt), want, priority)
                    self._streams[key] = stream
                    self._unsent.append(stream)
                self._emit("submitted", keys=[key for key, *_ in requests])
                self._idle.clear()
                self._kick.set()
            case {"do": "abort", "keys": keys}:
                await self._abort(keys)
            case {"do": "update", "requests": requests}:
                await self._update([(self._streams[k], *more) for k, *more in requests if k in self._streams])
            case {"do": "limit", "running": running, **more}:
                self._limit, self._finished, self._later = running, 0, deque(more.get("later", ()))
                self._kick.set()
            case {"do": "pause"}:
                await self._stand()
                self._emit("paused")
            case {"do": "go"}:
                await self._set_off()
            case {"do": "sleep"}:
                began_s = time.monotonic()
                await self._sleep()
                self._emit("asleep", s=time.monotonic() - began_s)
            case {"do": "wake"}:
                began_s = time.monotonic()
                await self._awake()
                self._emit("awake", s=time.monotonic() - began_s)
            case {"do": "forget"}:
                path = self._client.abilities.first("/reset_prefix_cache", "/flush_cache")
                if path is not None:
                    await self._client.must("POST", path)
            case _:
                raise Trouble(f"unknown command {command!r:.200}")

    async def _update(self, changes: Sequence[tuple[_Stream, int, int]]) -> None:
        """These want less or more than they did, of which they may have got some that nobody has heard of."""
        enough = []
        for stream, want, priority in changes:
            stream.want, stream.priority = want, priority
            del stream.held[max(want - len(stream.got), 0) :]
            if stream.tokens >= want:
                if stream in self._unsent:
                    self._unsent.remove(stream)
                stream.ended = True
                enough.append(stream)
            elif stream.ended:
                if stream.task is not None:
                    stream.task.cancel()  # it may not have seen the end of its stream
                    await asyncio.gather(stream.task, return_exceptions=True)
                stream.ended, stream.task, stream.answered = False, None, asyncio.Event()
                self._unsent.appendleft(stream)
                self._idle.clear()
        try:
            await self._end(enough)
        except Trouble as error:
            self._emit("rejected", keys=[[enough[0].key, self._client.safe(error)]])
        self._kick.set()

    async def _stand(self) -> None:
        """No more steps, or at least none that anybody hears of."""
        path = self._client.abilities.first("/pause", "/pause_generation")
        if path is not None and not self._server_paused:
            self._server_paused = True  # even if this is cut off: better woken once more than left asleep
            if path == "/pause":
                await self._client.must("POST", path, params={"mode": "keep"})
            else:
                await self._client.must("POST", path, json={"mode": "in_place"})
            until_s = time.monotonic() + 50 * QUIET_S
            while (now_s := time.monotonic()) < until_s and now_s - self._heard_s < QUIET_S:
                await asyncio.sleep(QUIET_S / 4)
        self._tell()
        self._paused = True

    async def _try_to_stand(self) -> None:
        """At first; if the pause that the server has does not work, it counts as one that has none."""
        try:
            await self._stand()
            known = self._client.abilities.first("/is_paused")
            works = known is None or "true" in await self._client.must("GET", known)
        except Trouble:
            works = False
        if self._server_paused and not works:
            with contextlib.suppress(Trouble):
                await self._go_on()
            self._server_paused = False
            self._client.abilities = self._client.abilities.without("/pause", "/pause_generation")
            await self._stand()

    async def _set_off(self) -> None:
        """What was held back counts now, and steps again."""
        if self._server_paused:
            await self._idle.wait()
            await self._go_on()
        self._paused = False
        self._heard_s = time.monotonic()
        for stream in self._streams.values():
            if stream.held or stream.ended:
                stream.got += stream.held
                self._new.setdefault(stream.key, []).extend(stream.held)
                stream.held = []
                self._gather()
        if not any(one.running for one in self._streams.values()):
            self._end_s = time.monotonic()
        self._kick.set()

    async def _as_if_new(self) -> None:
        """Wake a server that somebody left asleep or paused."""
        for path, then in (("/is_sleeping", self._awake), ("/is_paused", self._go_on)):
            known = self._client.abilities.first(path)
            if known is not None and "true" in await self._client.must("GET", known):
                self._asleep = path == "/is_sleeping"
                await then()

    async def _go_on(self) -> None:
        path = self._client.abilities.first("/resume", "/continue_generation")
        if path is not None:
            await self._client.must("POST", path, json={})
        self._server_paused = False

    async def _sleep(self) -> None:
        """Give up the GPU's memory, if the server can."""
        path = self._client.abilities.first("/sleep", "/release_memory_occupation")
        if path is None or self._asleep:
            return
        more: dict[str, Any] = {"params": {"level": 1}} if path == "/sleep" else {"json": {}}
        status, _ = await self._client.call("POST", path, **more)
        self._asleep = status == 200 if (slept := await self._sleeps()) is None else slept

    async def _awake(self) -> None:
        if not self._asleep:
            return
        path = self._client.abilities.first("/wake_up", "/resume_memory_occupation")
        if path is not None:
            await self._client.must("POST", path, json={})
        if await self._sleeps():
            raise Trouble(f"{path}: sleeps on")
        self._asleep = False
        if self._server_paused:  # waking may have ended that
            self._server_paused = False
            await self._stand()

    async def _sleeps(self) -> bool | None:
        """What the server says; None if it does not."""
        known = self._client.abilities.first("/is_sleeping")
        return None if known is None else "true" in await self._client.must("GET", known)

    async def _abort(self, keys: Sequence[int]) -> None:
        """Take these away, and see that they are gone."""
        here = [self._streams[key] for key in keys if key in self._streams]
        sent = [stream for stream in here if stream.task is not None]
        for stream in sent:
            stream.aborting = True
        try:
            seen = await self._end(sent)
        except Trouble as error:  # to go on with requests that run twice would measure something else
            self._emit("rejected", keys=[[sent[0].key, self._client.safe(error)]])
            return
        self._tell()
        gone = []
        for stream in here:
            if stream.key in self._streams:
                if stream.task is None:
                    self._unsent.remove(stream)
                del self._streams[stream.key]
                gone.append([stream.key, int(stream.running)])
        left = {key for key, _ in gone}
        self._emit("aborted", keys=gone, absent=[key for key in keys if key not in left], seen=seen)
        self._kick.set()

    async def _end(self, streams: Sequence[_Stream]) -> bool:
        """End these streams at the server; whether it was seen that it did so."""
        tasks = {one.task: one for one in streams if one.task is not None and not one.task.done()}
        if not tasks:
            return True
        path = self._client.abilities.first("/abort_requests", "/abort_request")
        if path is not None:
            # the id in the engine: vLLM counts the prompts of a request
            names = [f"{one.id or 'cmpl-' + one.name}-0" for one in tasks.values()]
            assert names
            assert all(names)  # none, or an empty one, stands for all
            try:
                if path == "/abort_requests":
                    await self._client.must("POST", path, json={"request_ids": names})
                else:
                    for one in tasks.values():
                        await self._client.must("POST", path, json={"rid": one.name})
                await asyncio.wait(tasks, timeout=self._settings.abort_s / 2)
            except Trouble:  # listed, and not to be had
                self._client.abilities = self._client.abilities.without(path)
        closed = [task for task in tasks if not task.done()]
        for task in closed:
            task.cancel()
        await asyncio.gather(*closed, return_exceptions=True)
        if not closed:
            return True
        if self._server_paused or "/metrics" not in self._client.abilities.paths:
            return False
        rest = sum(one.task is not None and not one.task.done() for one in self._streams.values())
        until_s = time.monotonic() + self._settings.abort_s
        while (there := requests_there(await self._client.must("GET", "/metrics"))) is not None:
            if there <= rest:
                return True
            if time.monotonic() > until_s:
                raise Trouble(f"still has {there} requests when all but {rest} were aborted")
            await asyncio.sleep(0.05)
        return False
