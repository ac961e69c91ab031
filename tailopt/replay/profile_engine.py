"""A live engine as a bench, by the links that carry out plans, too (:mod:`tailopt.replay.process`)."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from tailopt.plan import Engine
from tailopt.replay.backend import PATIENCE_S, START_S, Engines
from tailopt.replay.errors import ReplayError
from tailopt.replay.fit import Steps
from tailopt.replay.process import Link, Message, wait_for_any
from tailopt.replay.tiny_model import FIRST_TOKEN, TINY


class EngineBench:
    """One engine from anywhere, for measuring (:class:`tailopt.replay.profile.Bench`); a context manager.

    Args:
        engines: where to get it.
        engine: which.
        seed: of the prompts, which are random.
        vocabulary: token ids are below it; None for the tiny model's.

    Raises:
        ReplayError: if it cannot be started, dies, or says nothing.
    """

    def __init__(
        self, engines: Engines, engine: Engine, *, seed: int = 0, vocabulary: int | None = None
    ) -> None:
        size = TINY["vocab_size"] if vocabulary is None else vocabulary
        assert isinstance(size, int)
        self._engines, self._engine, self._size = engines, engine, size
        self._rng, self._keys = np.random.default_rng(seed), 0
        self._heard: list[Message] = []
        self._before: list[Message] = []  # steps between the last command to stand still and its answer
        self._stopping = False
        self._link: Link | None = engines.take(engine)
        self._until("ready", "awake", patience_s=START_S)

    def measure(self, requests: Sequence[tuple[int, int]]) -> Steps:
        """All steps from standing still to the end of these."""
        keys = self._submit([(self._prompt(prompt), tokens) for prompt, tokens in requests])
        self._send({"do": "go"})
        steps, left = [], set(keys)
        while left:
            step = self._until("step")
            steps.append(step)
            left -= set(step["done"])
        self._stand()
        rows = [
            (one["n"], one["K"], one["P"], one["s"], 0, one["t"]) for one in steps if one["n"] or one["P"]
        ]
        return Steps(*(np.array(column) for column in zip(*rows, strict=True)))

    def resubmit(self, context: int) -> float:
        """Seconds from the abort of a request with so much context until its next token.

        The prefix cache is emptied in between, as another engine would have nothing in it.
        """
        prompt, gained = self._prompt(max(context - 8, 1)), list[int]()
        (key,) = self._submit([(prompt, 64)])
        self._send({"do": "go"})
        while len(gained) < 8:
            gained += self._gained(key)
        began_s = self._stand()
        gained += self._gained_before(key)
        self._send({"do": "abort", "keys": [key]})
        self._until("aborted")
        self._send({"do": "forget"})
        (again,) = self._submit([(prompt + gained, 8)])
        self._send({"do": "go"})
        while True:
            step = self._until("step")
            if any(new[0] == again for new in step["new"]):
                seconds = float(step["t"]) + float(step["s"]) - began_s
                break
        while again not in step["done"]:
            step = self._until("step")
        self._stand()
        return seconds

    def switch(self) -> tuple[float, float]:
        """Seconds to put the engine away, and to have it back, as a backend does it."""
        assert self._link is not None
        began_s = time.monotonic()
        if self._engines.keeps(self._engine):
            self._send({"do": "forget"})
            self._send({"do": "sleep"})
            self._until("asleep")
            middle_s = time.monotonic()
            self._send({"do": "wake"})
        else:
            self._stopping = True
            self._send({"do": "stop"})
            self._until("died")
            self._stopping = False
            self._link.kill()
            middle_s = time.monotonic()
            self._link = self._engines.take(self._engine)
        self._until("ready", "awake", patience_s=START_S)
        return middle_s - began_s, time.monotonic() - middle_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back, or end it if anything went wrong."""
        if self._link is not None and kind is None:
            self._engines.give_back(self._engine, self._link)
        elif self._link is not None:
            self._link.kill()
        self._link = None

    def _prompt(self, tokens: int) -> list[int]:
        found: list[int] = self._rng.integers(FIRST_TOKEN, self._size, tokens).tolist()
        return found

    def _submit(self, requests: Sequence[tuple[list[int], int]]) -> list[int]:
        keys = list(range(self._keys, self._keys + len(requests)))
        self._keys += len(keys)
        wanted = [[key, prompt, want, 0] for key, (prompt, want) in zip(keys, requests, strict=True)]
        self._send({"do": "submit", "requests": wanted})
        return keys

    def _send(self, message: Message) -> None:
        assert self._link is not None
        self._link.send(message)

    def _stand(self) -> float:
        """No more steps; when the last one was over."""
        self._send({"do": "pause"})
        self._before = []
        while (event := self._next(PATIENCE_S))["event"] != "paused":
            if event["event"] == "step":
                self._before.append(event)
        return float(event["t"])

    def _gained(self, key: int) -> list[int]:
        return [token for new in self._until("step")["new"] if new[0] == key for token in new[1:]]

    def _gained_before(self, key: int) -> list[int]:
        """What came until the engine stood still."""
        return [token for step in self._before for new in step["new"] if new[0] == key for token in new[1:]]

    def _until(self, *what: str, patience_s: float = PATIENCE_S) -> Message:
        while (event := self._next(patience_s))["event"] not in what:
            if event["event"] == "rejected":
                raise ReplayError(f"engine: rejects a request ({event['keys'][0][1]})")
        return event

    def _next(self, patience_s: float) -> Message:
        assert self._link is not None
        until_s = time.monotonic() + patience_s
        while not self._heard:
            if time.monotonic() > until_s:
                raise ReplayError(f"engine: has said nothing for {patience_s:g} s")
            if wait_for_any([self._link], 1.0):
                self._heard += self._link.read()
        event = self._heard.pop(0)
        if event["event"] == "died" and not self._stopping:
            raise ReplayError(f"engine: died ({self._link.complaint()})")
        return event
