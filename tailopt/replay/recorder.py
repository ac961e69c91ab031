"""The record of a replay: one JSON line per thing that happened, written when it happens.

A line is written whole and handed to the system at once, so a driver that is killed leaves a file that ends
with whole lines but for the last one, which is dropped when the file is read. The first line is the header:
the batch, the engines, the machine, the versions, the command; the lines after it are those of the ledger
(:mod:`tailopt.replay.ledger`), and ``note`` lines that change nothing; the last one says whether it is
complete. A record without a last line was cut short, and can be continued.
"""

import json
import os
import platform
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from tailopt import __version__
from tailopt.engine.schema import to_profile, to_toml
from tailopt.errors import InputError
from tailopt.plan import Fleet
from tailopt.plan_file import plan_from_json
from tailopt.replay.errors import ReplayError
from tailopt.replay.ledger import Ledger, Line
from tailopt.run import Run
from tailopt.trace import Trace

FORMAT = "tailopt.replay/1"
_BEGIN = b'{"kind":"header"'


def header(trace: Trace, fleet: Fleet, backend: str, **more: Any) -> dict[str, Any]:
    """The first line of a record: all that is needed to read it without any other file."""
    columns = {field.name: getattr(trace, field.name) for field in fields(trace)}
    return {
        "kind": "header",
        "format": FORMAT,
        "t": 0.0,
        "tailopt": __version__,
        "backend": backend,
        "trace": {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in columns.items()},
        "gpus": fleet.gpus,
        "profile": to_toml(fleet.profile),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "command": sys.argv,
        "date": utc(),
        **more,
    }


def utc() -> str:
    """The date and time now."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


class Recorder:
    """Appends lines to a file; a file that is there is continued after its last whole line.

    Raises:
        ReplayError: if the file cannot be written, such as on a full disk.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("ab", buffering=0)
            end = self._file.tell()
            whole = 0 if end == 0 else self.path.read_bytes().rfind(b"\n") + 1
            if whole < end:
                self._file.truncate(whole)
        except OSError as error:
            raise ReplayError(f"{path}: cannot be written ({error.strerror})") from None

    def write(self, line: Line) -> None:
        """Append one line."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if self._file.closed:
            raise ReplayError(f"{self.path}: cannot be written (it is closed)")
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self.close()
            raise ReplayError(f"{self.path}: cannot be written ({error.strerror})") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, eq=False)
class Record:
    """What a file holds.

    Attributes:
        head: its first line.
        trace, fleet: the batch, and what it ran on.
        lines: the others, but for the last.
        last: the last line, which says whether the replay is ``complete`` and if not, ``why``; None if it was
            cut short.
    """

    head: Line
    trace: Trace
    fleet: Fleet
    lines: tuple[Line, ...]
    last: Line | None

    def ledger(self) -> Ledger:
        """What was known at the end."""
        ledger = Ledger(self.trace, self.fleet, free=bool(self.head.get("free")))
        for line in self.lines:
            if line["kind"] != "note":
                ledger.apply(line)
        return ledger

    def run(self) -> Run:
        """The run.

        Raises:
            ReplayError: if the record is incomplete.
        """
        ledger = self.ledger()
        if not ledger.all_finished:
            left = int((~ledger.finished).sum())
            why = "it was cut short" if self.last is None else self.last["why"]
            raise ReplayError(f"record: incomplete, {left} requests are not finished ({why})")
        return ledger.run(self.head["backend"])

    def steps(self) -> Iterator[Line]:
        """The ``step`` lines."""
        return (line for line in self.lines if line["kind"] == "step")


def read_record(path: str | Path) -> Record:
    """Read a record; what a killed driver left of a line is dropped.

    Raises:
        InputError: if it is no record, or is damaged before its last line.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    lines = []
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
                raise ValueError
        except ValueError:
            raise InputError(f"{path}: line {number}: expected a JSON object with a kind") from None
        lines.append(line)
    if not lines and _BEGIN.startswith(data[: len(_BEGIN)]):
        raise InputError(f"{path}: was cut short before the first plan")
    if not lines or lines[0].get("format") != FORMAT:
        raise InputError(f"{path}: expected a record of a replay ({FORMAT})")
    head, *rest = lines
    try:
        trace = Trace(**head["trace"])
        profile = to_profile(tomllib.loads(head["profile"]), f"{path}: profile")
        first = next(line for line in rest if line["kind"] == "plan")
        fleet = Fleet(profile, plan_from_json(first["plan"]).engines, head["gpus"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: line 1: {error}") from None
    except StopIteration:
        raise InputError(f"{path}: was cut short before the first plan") from None
    last = rest.pop() if rest[-1]["kind"] == "last" else None
    # a replay that stopped and went on has a last line in the middle
    return Record(head, trace, fleet, tuple(line for line in rest if line["kind"] != "last"), last)
