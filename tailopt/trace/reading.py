"""Reading and writing traces: files and folders of any known format, and bundled traces by name."""

from dataclasses import dataclass

from tailopt.trace.catalogue import load_bundled
from tailopt.trace.trace import Trace


@dataclass(frozen=True)
class ReadReport:
    """What reading a file took and what it left."""


def resolve_trace(spec: str) -> tuple[Trace, ReadReport | None]:
    """The trace at a path with the report of reading it, or a bundled trace (and None) by name."""
    return load_bundled(spec), None
