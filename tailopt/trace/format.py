"""What a trace format is: how to know it, how to read it, and, for our own, how to write it."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.trace.rows import Rows
from tailopt.trace.text_rows import header_names
from tailopt.trace.trace import Trace

Tokenizer = Callable[[str], int]
"""Counts the tokens of a text."""


@dataclass(frozen=True)
class Format:
    """One trace format.

    Attributes:
        name: what to call it by.
        title: one line for people.
        detect: whether a file that starts with these bytes is of this format.
        read: the raw rows of a file, in blocks; the tokenizer is for formats that hold texts.
        write: how to write a trace in it; None for formats of others.
        unit: what a row is called in errors.
        suffix: of files that are written in it.
        keeps_arrivals: True if arrival times are those of the trace; False if they are a server's clock,
            to be counted from the first request.
    """

    name: str
    title: str
    detect: Callable[[bytes], bool]
    read: Callable[[Path, Tokenizer | None], Iterator[Rows]]
    write: Callable[[Trace, Path], None] | None = None
    unit: str = "line"
    suffix: str = ""
    keeps_arrivals: bool = False


def has_header(names: Iterable[str]) -> Callable[[bytes], bool]:
    """A detector of CSV files whose header has all of these columns.

    >>> has_header(["a", "b"])(b"# remark\\nb, c, a\\n1,2,3\\n")
    True
    """

    def detect(start: bytes) -> bool:
        lines = [line for line in _text(start).split("\n") if line.strip() and not line.startswith("#")]
        return set(names) <= set(header_names(lines[0]) or ()) if lines else False

    return detect


def has_fields(names: Iterable[str]) -> Callable[[bytes], bool]:
    """A detector of JSON lines files: the first line that is an object has all of these fields.

    >>> has_fields(["a"])(b'{"a": 1, "b": 2}\\n')
    True
    """

    def detect(start: bytes) -> bool:
        return set(names) <= set(_first_object(_text(start)))

    return detect


def _text(start: bytes) -> str:
    return start.decode("utf-8-sig", errors="replace")


def _first_object(text: str) -> dict[str, Any]:
    """The first line that parses as an object: a broken first line is for the reader to report."""
    for line in text.split("\n")[:100]:
        if line.lstrip().startswith("{"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            return value if isinstance(value, dict) else {}
    return {}
