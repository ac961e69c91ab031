"""Text files in blocks of whole lines: CSV with a header, and JSON lines. Memory is bounded by the block.

Each block goes to polars first. Only where polars does not take it as it stands (a broken or ragged line, a
quoted field that may span lines, bytes that are not UTF-8) is it read again line by line, to tell the lines
at fault from the others.
"""

import csv
import io
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailopt.errors import InputError
from tailopt.trace.rows import ROW, Bad, Rows, text_of

if TYPE_CHECKING:
    import polars as pl

    Schema = Mapping[str, pl.DataType | type[pl.DataType]]

BLOCK_BYTES = 32 * 2**20
"""Bytes of a file that are held at a time, rounded up to whole lines."""

_SLOW_ROWS = 100_000

QUOTED_LINES = 1000
"""Lines that a quoted field may span; a quote that is open for longer was never meant to be closed."""

_BOM = b"\xef\xbb\xbf"

Block = tuple[int, bytes]


def blocks(path: Path) -> Iterator[Block]:
    """The file in blocks of whole lines, each after the number of its first line; no byte order mark."""
    line = 1
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            block += file.readline()
            yield line, block.removeprefix(_BOM) if line == 1 else block
            line += block.count(b"\n")


def csv_rows(path: Path, names: Mapping[str, str], optional: Sequence[str] = ()) -> Iterator[Rows]:
    """The rows of a CSV file with a header line, block by block.

    Args:
        path: the file; lines before the header that start with ``#`` are passed over.
        names: by column of the file, what to call it; other columns are dropped.
        optional: columns of the file that may be missing.

    Raises:
        InputError: if the header lacks a column or is none.
    """
    source = blocks(path)
    header, body = _header(path, source)
    missing = [name for name in names if name not in header and name not in optional]
    if missing:
        found = ", ".join(header) if any(header) else "nothing"
        raise InputError(f"{path}: no column {missing[0]!r}, expected {', '.join(names)}; found {found}")
    twice = [name for name in names if header.count(name) > 1]
    if twice:
        raise InputError(f"{path}: column {twice[0]!r} appears twice, expected once")
    labels = {ours: theirs for theirs, ours in names.items()}
    wanted = {ours: header.index(theirs) for theirs, ours in names.items() if theirs in header}
    for table, bad in _csv_tables(len(header), wanted, chain([body], source)):
        yield Rows(table, labels, tuple(bad))


def header_names(line: str) -> list[str] | None:
    """The names in a header line; None if it is no line of a CSV file.

    >>> header_names("a, b"), header_names("a\\rb"), header_names("x" * 10**6)
    (['a', 'b'], None, None)
    """
    try:
        return [name.strip() for name in next(csv.reader([line]), [])]
    except csv.Error:
        return None


def jsonl_rows(path: Path, schema: "Schema") -> Iterator[tuple["pl.DataFrame", list[Bad]]]:
    """The objects of a JSON lines file, block by block: the fields of ``schema`` only, and the broken lines.

    Plain values are best declared as text (``polars.String``): they are kept as they stand, for
    :func:`check`.
    """
    for line, block in blocks(path):
        table = _jsonl_fast(line, block, schema)
        yield (table, []) if table is not None else _jsonl_slow(line, block, schema)


def _header(path: Path, source: Iterator[Block]) -> tuple[list[str], Block]:
    """The names in the header line, and what follows it in its block."""
    for start, block in source:
        file = io.BytesIO(block)
        for line, raw in enumerate(file, start):
            if raw.startswith(b"#") or not raw.strip():
                continue
            try:
                names = header_names(raw.decode())
            except UnicodeDecodeError:
                raise InputError(f"{path}: line {line}: expected text in UTF-8") from None
            if names is None:
                raise InputError(f"{path}: line {line}: got {_start_of(raw)}, expected a header line")
            return names, (line + 1, file.read())
    raise InputError(f"{path}: empty, expected a header line")


def _csv_tables(
    width: int, wanted: Mapping[str, int], source: Iterator[Block]
) -> Iterator[tuple["pl.DataFrame", list[Bad]]]:
    """The wanted columns (name -> position) of ``width`` ones, and the broken lines, block by block."""
    for line, block in source:
        if b'"' in block:  # a quoted field may span lines, and blocks
            yield from _csv_slow(width, wanted, chain([(line, block)], source))
            return
        table = _csv_fast(width, wanted, line, block)
        if table is not None:
            yield table, []
        else:
            yield from _csv_slow(width, wanted, [(line, block)])


def _csv_fast(width: int, wanted: Mapping[str, int], line: int, block: bytes) -> "pl.DataFrame | None":
    """The block as polars reads it, as text; None if a line is broken, or may be too short."""
    import polars as pl

    if not block:
        return _table_of([], wanted)
    try:
        table = pl.read_csv(
            io.BytesIO(block), has_header=False, schema={str(i): pl.String for i in range(width)}
        )
    except (pl.exceptions.PolarsError, RuntimeError):
        return None
    columns = table.columns
    table = table.with_row_index(ROW, offset=line).filter(~pl.all_horizontal(pl.col(columns).is_null()))
    if table[columns[-1]].null_count():
        return None
    return table.select(ROW, *(pl.col(str(i)).alias(name) for name, i in wanted.items()))


def _csv_slow(
    width: int, wanted: Mapping[str, int], source: Iterable[Block]
) -> Iterator[tuple["pl.DataFrame", list[Bad]]]:
    """Record by record with the standard library, which takes quotes across lines."""
    rows: list[tuple[int, list[str]]] = []
    bad: list[Bad] = []
    for start, lines in _records(source):
        found, problem = _parsed(start, lines, width)
        rows += found
        bad += problem
        if len(rows) + len(bad) >= _SLOW_ROWS:
            yield _table_of(rows, wanted), bad
            rows, bad = [], []
    yield _table_of(rows, wanted), bad


def _records(source: Iterable[Block]) -> Iterator[tuple[int, list[bytes]]]:
    """The lines of each record after the number of the first: more than one while a quote is open.

    A quote that stays open for ``QUOTED_LINES`` lines, or to the end, makes a record of its line alone, so
    that one stray quote does not take the rest of the file with it.
    """
    lines = ((number, raw) for line, block in source for number, raw in enumerate(io.BytesIO(block), line))
    ahead: deque[tuple[int, bytes]] = deque()
    while True:
        first = ahead.popleft() if ahead else next(lines, None)
        if first is None:
            return
        number, raw = first
        record = [raw]
        if raw.count(b'"') % 2:
            for following in range(QUOTED_LINES):
                if following == len(ahead):
                    more = next(lines, None)
                    if more is None:
                        break
                    ahead.append(more)
                if ahead[following][1].count(b'"') % 2:
                    record += [ahead.popleft()[1] for _ in range(following + 1)]
                    break
        yield number, record


def _parsed(start: int, lines: list[bytes], width: int) -> tuple[list[tuple[int, list[str]]], list[Bad]]:
    """The rows in the lines of a record, or what is wrong with it."""
    try:
        reader = csv.reader([raw.decode() for raw in lines], strict=True)
        rows = [(start, fields) for fields in reader if fields]
    except UnicodeDecodeError:
        return [], [Bad(start, None, "other bytes", "text in UTF-8")]
    except csv.Error:
        open_quote = sum(raw.count(b'"') for raw in lines) % 2
        expected = "a closing quote" if open_quote else "fields separated by commas"
        return [], [Bad(start, None, _start_of(lines[0]), expected)]
    ragged = [
        Bad(start, None, f"{len(fields)} fields", f"{width} fields")
        for start, fields in rows
        if len(fields) != width
    ]
    return [row for row in rows if len(row[1]) == width], ragged


def _table_of(rows: list[tuple[int, list[str]]], wanted: Mapping[str, int]) -> "pl.DataFrame":
    import polars as pl

    data: dict[str, list[Any]] = {ROW: [start for start, _ in rows]}
    data |= {name: [fields[i] for _, fields in rows] for name, i in wanted.items()}
    return pl.DataFrame(data, schema={ROW: pl.Int64, **dict.fromkeys(wanted, pl.String)})


def _jsonl_fast(line: int, block: bytes, schema: "Schema") -> "pl.DataFrame | None":
    """The block as polars reads it; None if a line is broken or blank."""
    import polars as pl

    try:
        table = pl.read_ndjson(io.BytesIO(block), schema=dict(schema))
    except (pl.exceptions.PolarsError, RuntimeError):
        return None
    lines = block.count(b"\n") + (not block.endswith(b"\n"))
    return table.with_row_index(ROW, offset=line) if len(table) == lines else None


def _jsonl_slow(line: int, block: bytes, schema: "Schema") -> tuple["pl.DataFrame", list[Bad]]:
    import polars as pl

    rows: list[dict[str, Any]] = []
    bad: list[Bad] = []
    for number, raw in enumerate(io.BytesIO(block), line):
        if not raw.strip():
            continue
        try:
            value = json.loads(raw.decode())
        except UnicodeDecodeError:
            bad.append(Bad(number, None, "other bytes", "text in UTF-8"))
        except (ValueError, RecursionError):
            bad.append(Bad(number, None, _start_of(raw), "a JSON object"))
        else:
            if isinstance(value, dict):
                rows.append(
                    {ROW: number} | {name: _fit(value.get(name), kind) for name, kind in schema.items()}
                )
            else:
                bad.append(Bad(number, None, _start_of(raw), "a JSON object"))
    return pl.DataFrame(rows, schema={ROW: pl.Int64, **schema}), bad


def _start_of(raw: bytes) -> str:
    text = raw.decode(errors="replace").strip()
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _fit(value: object, kind: Any) -> Any:
    """A JSON value as the schema wants it; None where it is of another kind."""
    import polars as pl

    if value is None:
        return None
    if isinstance(kind, pl.Struct):
        fields = kind.fields
        return {f.name: _fit(value.get(f.name), f.dtype) for f in fields} if isinstance(value, dict) else None
    if isinstance(kind, pl.List):
        return [_fit(item, kind.inner) for item in value] if isinstance(value, list) else None
    return text_of(value)
