"""Raw rows: what every format reads into, and the one place where their values are checked.

A reader yields :class:`Rows`, blocks of a polars table whose columns are named as in ``COLUMNS`` but still
hold what the file says, mostly text. :func:`check` turns them into whole numbers, truth values and seconds,
and says of each bad row where it is, what it holds and what was expected. Whether bad rows are refused or
skipped is for the caller to say.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

MOST_TOKENS = 2**31 - 1
"""Longest response or prompt that is read; anything above is taken for a broken file."""

ROW = "row"
"""Column of every raw table: where the row is in its file (a line number, or a position counted from 1)."""

LEFT_OUT = "left_out"
"""Optional column of a raw table: why the row is no response at all (a failed request), null if it is one."""


@dataclass(frozen=True)
class Bad:
    """A row that cannot be read: where, which column (None: all of it), what it holds, what was expected."""

    row: int
    column: str | None
    got: str
    expected: str

    @property
    def reason(self) -> str:
        """The kind of problem, equal for all rows that have it."""
        return f"{self.column or 'row'}: expected {self.expected}"

    def message(self, file: str, unit: str) -> str:
        """One line that names the file, the row, the column, the value and what was expected."""
        column = f", column {self.column!r}" if self.column else ""
        return f"{file}: {unit} {self.row}{column}: got {self.got}, expected {self.expected}"


@dataclass(frozen=True, eq=False)
class Rows:
    """A block of raw rows.

    Attributes:
        table: column ``row``, and any of the columns of ``COLUMNS``, as the file has them.
        labels: what the file calls a column, where it is not called as here.
        bad: rows so broken that they are not in the table.
        about: name, source, licence and synthetic, where the format keeps them.
    """

    table: "pl.DataFrame"
    labels: Mapping[str, str] = field(default_factory=dict)
    bad: tuple[Bad, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """How a raw column is read: ``parse`` makes its text a typed value, null where it is not as expected."""

    name: str
    expected: str
    parse: Callable[["pl.Expr"], "pl.Expr"]


def check(rows: Rows) -> tuple["pl.DataFrame", list[Bad], dict[str, int]]:
    """The typed table of the good rows, the bad rows, and how many rows are no responses, by reason.

    >>> import polars as pl
    >>> good, bad, _ = check(Rows(pl.DataFrame({"row": [1, 2], "output_tokens": ["7", "-1"]})))
    >>> good["output_tokens"].to_list(), bad[0].message("a.csv", "line")
    ([7], "a.csv: line 2, column 'output_tokens': got '-1', expected a whole number from 1 to 2147483647")
    """
    import polars as pl

    table, left_out = _leave_out(rows.table)
    raw = [name for name in COLUMNS if name in table.columns]
    typed = table.select(
        pl.col(ROW).cast(pl.Int64),
        *(COLUMNS[name].parse(pl.col(name).cast(pl.String)).alias(name) for name in raw),
    ).with_columns(bad=pl.coalesce(pl.when(pl.col(name).is_null()).then(pl.lit(name)) for name in raw))
    bad = [
        Bad(
            row=row,
            column=rows.labels.get(name, name),
            got=_shown(table[name][index]),
            expected=COLUMNS[name].expected,
        )
        for index, row, name in typed.with_row_index()
        .filter(pl.col("bad").is_not_null())
        .select("index", ROW, "bad")
        .iter_rows()
    ]
    good = typed.filter(pl.col("bad").is_null()).select(
        ROW, *(pl.col(name).alias(COLUMNS[name].name) for name in raw)
    )
    return good, bad, left_out


def correctness(score: "pl.Expr") -> "pl.Expr":
    """Correctness from a score or reward kept as text: exactly 1 is correct, 0 is wrong, any other unknown.

    >>> import polars as pl
    >>> scores = pl.DataFrame({"score": ["1.0", "0", "-0.5", "true", None]})
    >>> scores.select(correct=correctness(pl.col("score")))["correct"].to_list()
    [1, 0, -1, 1, -1]
    """
    import polars as pl

    value = score.replace({"true": "1", "false": "0"}).cast(pl.Float64, strict=False)
    return pl.when(value == 1).then(1).when(value == 0).then(0).otherwise(-1)


def as_text(values: Iterable[object], name: str = "") -> "pl.Series":
    """A raw column from Python values (:func:`text_of`).

    >>> as_text(["a", 1.5, True, None]).to_list()
    ['a', '1.5', 'true', None]
    """
    import polars as pl

    return pl.Series(name, [text_of(value) for value in values], dtype=pl.String)


def text_of(value: object) -> str | None:
    """A value as raw text: texts as they are, all else as JSON; None stays None.

    Half of a surrogate pair, which JSON and pickles can hold and UTF-8 cannot, is written as an escape.

    >>> text_of("a\\ud800"), text_of([1, True])
    ('a\\\\ud800', '[1, true]')
    """
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode(errors="backslashreplace").decode()


def _leave_out(table: "pl.DataFrame") -> tuple["pl.DataFrame", dict[str, int]]:
    if LEFT_OUT not in table.columns:
        return table, {}
    counts = table[LEFT_OUT].drop_nulls().value_counts()
    return table.filter(table[LEFT_OUT].is_null()), dict(counts.iter_rows())


def _shown(value: object) -> str:
    if value is None or value == "":
        return "nothing"
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _whole(least: int, most: int = 2**53 - 1) -> Callable[["pl.Expr"], "pl.Expr"]:
    def parse(text: "pl.Expr") -> "pl.Expr":
        import polars as pl

        value = text.str.strip_chars().cast(pl.Float64, strict=False)
        fits = value.is_between(least, most) & (value == value.floor())
        return pl.when(fits).then(value).cast(pl.Int64)

    return parse


def _seconds(per_second: float) -> Callable[["pl.Expr"], "pl.Expr"]:
    def parse(text: "pl.Expr") -> "pl.Expr":
        import polars as pl

        value = text.str.strip_chars().cast(pl.Float64, strict=False)
        return pl.when(value.is_finite() & (value >= 0)).then(value / per_second)

    return parse


def _utc_ns(text: "pl.Expr") -> "pl.Expr":
    import polars as pl

    moment = text.str.strip_chars().str.strip_suffix("+00:00").str.replace("T", " ", literal=True)
    return moment.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False).cast(pl.Int64)


def _truth(text: "pl.Expr") -> "pl.Expr":
    import polars as pl

    word = text.str.strip_chars().str.to_lowercase()
    return pl.when(word.is_in(["true", "1"])).then(True).when(word.is_in(["false", "0"])).then(False)


def _text(text: "pl.Expr") -> "pl.Expr":
    return text


COLUMNS = {
    "output_tokens": Column(
        "output_tokens", f"a whole number from 1 to {MOST_TOKENS}", _whole(1, MOST_TOKENS)
    ),
    "prompt_tokens": Column(
        "prompt_tokens", f"a whole number from 0 to {MOST_TOKENS}", _whole(0, MOST_TOKENS)
    ),
    "prompt": Column("prompt", "a whole number from 0 on", _whole(0)),
    "prompt_id": Column("prompt_id", "a text", _text),
    "sample": Column("sample", "a whole number from 0 on", _whole(0)),
    "capped": Column("capped", "true or false", _truth),
    "arrival_s": Column("arrival_s", "seconds from 0 on", _seconds(1)),
    "arrival_ms": Column("arrival_s", "milliseconds from 0 on", _seconds(1000)),
    "arrival_utc": Column("arrival_ns", "a time like 2023-11-16 18:15:46.6805900", _utc_ns),
    "step": Column("step", "a whole number", _whole(-(2**53) + 1)),
    "correct": Column("correct", "1, 0 or -1 (unknown)", _whole(-1, 1)),
}
"""The columns that a raw table can have besides ``row``: typed name, what is expected, how it is read."""
