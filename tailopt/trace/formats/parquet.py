"""tailopt's own schema in Parquet (:mod:`tailopt.trace.own_schema`); name and source in its metadata."""

from collections.abc import Iterator
from pathlib import Path

from tailopt.errors import InputError
from tailopt.files import parquet_errors, whole_file
from tailopt.trace.format import Format, Tokenizer
from tailopt.trace.own_schema import NAMES, REQUIRED, about, table_of
from tailopt.trace.rows import ROW, Rows
from tailopt.trace.trace import Trace

_KEY = "tailopt."


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    import polars as pl

    not_plain = (pl.Binary, pl.Duration, pl.Object)  # they have no text to check
    with parquet_errors(path):
        found = pl.read_parquet_schema(path)
        if REQUIRED not in found:
            raise InputError(f"{path}: no column {REQUIRED!r}; found {', '.join(found)}")
        for name in NAMES:
            if name in found and (found[name].is_nested() or found[name] in not_plain):
                raise InputError(f"{path}: column {name!r}: expected plain values, got {found[name]}")
        table = pl.read_parquet(path, columns=[name for name in NAMES if name in found])
        kept = pl.read_parquet_metadata(path)
    about = {key.removeprefix(_KEY): value for key, value in kept.items() if key.startswith(_KEY)}
    yield Rows(table.with_row_index(ROW, offset=1), about=about)


def _write(trace: Trace, path: Path) -> None:
    metadata = {_KEY + key: value for key, value in about(trace).items()}
    with whole_file(path) as file:
        table_of(trace).write_parquet(file, compression="zstd", metadata=metadata)


def _detect(start: bytes) -> bool:
    return start.startswith(b"PAR1")


PARQUET = Format(
    "parquet",
    "tailopt's own schema (parquet)",
    _detect,
    _read,
    _write,
    "row",
    ".parquet",
    keeps_arrivals=True,
)
