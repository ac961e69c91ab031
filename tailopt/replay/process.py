"""Engines in processes of their own, spoken to in JSON lines (:mod:`tailopt.replay.worker`)."""

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any, Protocol

from tailopt.replay.errors import ReplayError

Message = dict[str, Any]


class Link(Protocol):
    """One engine as the driver sees it: commands go in, events come out (as of the worker)."""

    def send(self, message: Message) -> None:
        """Give a command; nothing happens if the engine is gone."""
        ...

    def fileno(self) -> int:
        """What to wait on."""
        ...

    def read(self) -> list[Message]:
        """The events that are there; the last one ever is ``{"event": "died"}``."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def complaint(self) -> str:
        """The last thing that it said on its way out."""
        ...


class WorkerProcess:
    """A worker that was started with a command."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # for as long as this lives
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.said,
                env=os.environ | (environment or {}),
                start_new_session=True,  # Ctrl-C is for the driver
            )
        except OSError as error:
            self.said.close()
            raise ReplayError(f"{command[0]}: cannot be started ({error.strerror})") from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout
        os.set_blocking(self._out.fileno(), False)
        self._rest, self._over, self._words = b"", False, ""

    def send(self, message: Message) -> None:
        """Give a command."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # it died; reading says so
            self._in.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            self._in.flush()

    def fileno(self) -> int:
        """Its standard output."""
        return self._out.fileno()

    def read(self) -> list[Message]:
        """Whole lines only: what a dying worker left of a line does not count."""
        if self._over:
            return []
        while (chunk := self._out.read(1 << 20)) is not None:
            self._rest += chunk
            if not chunk:
                self._over = True
                break
        *lines, self._rest = self._rest.split(b"\n")
        events: list[Message] = []
        try:
            for line in lines:
                events.append(json.loads(line))
        except ValueError:
            self._over = True  # from here on it makes no sense: as good as dead
        return [*events, {"event": "died", "t": time.monotonic()}] if self._over else events

    def kill(self) -> None:
        """SIGKILL to it and to what it started."""
        if self.said.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self.complaint()
        self.said.close()
        self._out.close()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._over = True

    def complaint(self) -> str:
        """The last line of its standard error."""
        if not self.said.closed:
            self.said.seek(0)
            lines = self.said.read()[-4000:].decode(errors="replace").strip().splitlines()
            code = self.process.poll()
            ended = "ended" if code is None or code >= 0 else f"killed by signal {-code}"
            self._words = lines[-1].strip() if lines else ended
        return self._words


def wait_for_any(links: Sequence[Link], timeout_s: float | None) -> list[Link]:
    """The links that have something to say, after at most so many seconds."""
    with selectors.DefaultSelector() as selector:
        for link in links:
            selector.register(link.fileno(), selectors.EVENT_READ, link)
        return [key.data for key, _ in selector.select(timeout_s)]


def wait_for_event(link: Link, what: str, patience_s: float) -> None:
    """Let an engine work until it reports ``what``; events before that are dropped.

    Raises:
        ReplayError: if it dies, or says nothing of the kind for so long.
    """
    end_s = time.monotonic() + patience_s
    while (left_s := end_s - time.monotonic()) > 0:
        if not wait_for_any([link], left_s):
            continue
        events = [event["event"] for event in link.read()]
        if what in events:
            return
        if "died" in events:
            link.kill()
            raise ReplayError(f"an engine died ({link.complaint()})")
    link.kill()
    raise ReplayError(f"an engine: not {what} after {patience_s:.0f} s")
