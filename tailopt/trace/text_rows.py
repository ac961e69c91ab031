"""Text files in blocks of whole lines: CSV with a header, and JSON lines. Memory is bounded by the block.

Each block goes to polars first. Only where polars does not take it as it stands (a broken or ragged line, a
quoted field that may span lines, bytes that are not UTF-8) is it read again line by line, to tell the lines
at fault from the others.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailopt.errors import InputError
from tailopt.trace.rows import ROW, Bad, Rows

if TYPE_CHECKING:
    import polars as pl

    Schema = Mapping[str, pl.DataType | type[pl.DataType]]

BLOCK_BYTES = 32 * 2**20
"""Bytes of a file that are held at a time, rounded up to whole lines."""

_SLOW_ROWS = 100_000
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
        InputError: if the header lacks a column, or a quote is never closed.
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
    for table, bad in _csv_tables(path, header, chain([body], source)):
        kept = table.select(ROW, *(name for name in names if name in header)).rename(names, strict=False)
        yield Rows(kept, labels, tuple(bad))


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
                names = next(csv.reader([raw.decode()]), [])
            except UnicodeDecodeError:
                raise InputError(f"{path}: line {line}: expected text in UTF-8") from None
            return [name.strip() for name in names], (line + 1, file.read())
    raise InputError(f"{path}: empty, expected a header line")


def _csv_tables(
    path: Path, header: list[str], source: Iterator[Block]
) -> Iterator[tuple["pl.DataFrame", list[Bad]]]:
    for line, block in source:
        if b'"' in block:  # a quoted field may span lines, and blocks
            yield from _csv_slow(path, header, line, chain([(line, block)], source))
            return
        table = _csv_fast(header, line, block)
        if table is not None:
            yield table, []
        else:
            yield from _csv_slow(path, header, line, [(line, block)])


def _csv_fast(header: list[str], line: int, block: bytes) -> "pl.DataFrame | None":
    """The block as polars reads it, all columns as text; None if a line is broken, or may be too short."""
    import polars as pl

    if not block:
        return pl.DataFrame(schema={ROW: pl.Int64, **dict.fromkeys(header, pl.String)})
    try:
        table = pl.read_csv(
            io.BytesIO(block),
            has_header=False,
            schema={f"{ROW} {i}": pl.String for i in range(len(header))},
        )
    except (pl.exceptions.PolarsError, RuntimeError):
        return None
    columns = table.columns
    table = table.with_row_index(ROW, offset=line).filter(~pl.all_horizontal(pl.col(columns).is_null()))
    if table[columns[-1]].null_count():
        return None
    return table.rename(dict(zip(columns, _distinct(header), strict=True)))


def _csv_slow(
    path: Path, header: list[str], line: int, source: Iterable[Block]
) -> Iterator[tuple["pl.DataFrame", list[Bad]]]:
    """Row by row with the standard library, which takes quotes across lines and says where a row starts."""
    not_utf8: set[int] = set()
    reader = csv.reader(_decoded(source, not_utf8), strict=True)
    rows: list[tuple[int, list[str]]] = []
    bad: list[Bad] = []
    while True:
        start = line + reader.line_num
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error):
                raise InputError(f"{path}: line {start}: a quote is opened and never closed") from None
            bad.append(Bad(start, None, repr(str(error)), "fields separated by commas"))
            not_utf8.clear()
            continue
        if fields is None or len(rows) + len(bad) >= _SLOW_ROWS:
            yield _table_of(rows, header), bad
            rows, bad = [], []
        if fields is None:
            return
        if not_utf8:
            bad.append(Bad(start, None, "other bytes", "text in UTF-8"))
            not_utf8.clear()
        elif fields and len(fields) != len(header):
            bad.append(Bad(start, None, f"{len(fields)} fields", f"{len(header)} fields"))
        elif fields:
            rows.append((start, fields))


def _decoded(source: Iterable[Block], not_utf8: set[int]) -> Iterator[str]:
    for line, block in source:
        for number, raw in enumerate(io.BytesIO(block), line):
            try:
                yield raw.decode()
            except UnicodeDecodeError:
                not_utf8.add(number)
                yield raw.decode(errors="replace")


def _table_of(rows: list[tuple[int, list[str]]], header: list[str]) -> "pl.DataFrame":
    import polars as pl

    columns = [[fields[i] for _, fields in rows] for i in range(len(header))]
    data: dict[str, list[Any]] = {ROW: [start for start, _ in rows]}
    data |= dict(zip(_distinct(header), columns, strict=True))
    return pl.DataFrame(data, schema={ROW: pl.Int64, **dict.fromkeys(_distinct(header), pl.String)})


def _distinct(header: list[str]) -> list[str]:
    """The names of the header, with other names for repeated ones and for one that is ``row``."""
    return [f"{ROW} {i}" if name == ROW or name in header[:i] else name for i, name in enumerate(header)]


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
    return value if isinstance(value, str) else json.dumps(value)
