"""tailopt's own schema in CSV (:mod:`tailopt.trace.own_schema`); name and source in ``#`` lines."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tailopt.files import whole_file
from tailopt.trace.format import Format, Tokenizer, has_header
from tailopt.trace.own_schema import NAMES, REQUIRED, about, table_of
from tailopt.trace.rows import Rows
from tailopt.trace.text_rows import csv_rows
from tailopt.trace.trace import Trace


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    about = _about(path)
    names = {name: name for name in NAMES}
    for rows in csv_rows(path, names, optional=[name for name in NAMES if name != REQUIRED]):
        yield replace(rows, about=about)


def _about(path: Path) -> dict[str, str]:
    """The ``# key: value`` lines at the start of the file; a value may be a JSON string."""
    found: dict[str, str] = {}
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            if not line.startswith("#"):
                break
            key, colon, value = line.removeprefix("#").partition(":")
            if colon:
                found[key.strip().lower()] = _value(value.strip())
    return found


def _value(text: str) -> str:
    try:
        return str(json.loads(text)) if text.startswith('"') else text
    except ValueError:
        return text


def _write(trace: Trace, path: Path) -> None:
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        for key, value in about(trace).items():
            file.write(f"# {key}: {json.dumps(value, ensure_ascii=False)}\n")
        table_of(trace).write_csv(file)


CSV = Format(
    "csv",
    "tailopt's own schema (csv)",
    has_header([REQUIRED]),
    _read,
    _write,
    suffix=".csv",
    keeps_arrivals=True,
)
