"""From a table of checked rows to a Trace: prompts and samples numbered, what is missing filled in."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.errors import InputError
from tailopt.trace.trace import Trace

if TYPE_CHECKING:
    import polars as pl


def trace_of(table: "pl.DataFrame", about: Mapping[str, str]) -> Trace:
    """The trace of a table with typed columns, as :func:`tailopt.trace.rows.check` gives them.

    Only ``output_tokens`` must be there. Without ``prompt_id`` each row is a prompt of its own, called by its
    number; without ``prompt`` prompts are numbered, without ``sample`` samples are, by appearance.

    Raises:
        InputError: if the numbers of the prompts do not fit their names, or a sample appears twice.

    >>> import polars as pl
    >>> rows = pl.DataFrame({"prompt_id": ["b", "a", "b"], "output_tokens": [3, 4, 5]})
    >>> trace = trace_of(rows, {"name": "three"})
    >>> trace.prompt, trace.prompt_ids, trace.sample
    (array([0, 1, 0]), ('b', 'a'), array([0, 0, 1]))
    """
    import polars as pl

    n = len(table)
    name = about["name"]
    table = _with_prompts(table, name)
    if "sample" not in table.columns:
        group = [column for column in ("step", "prompt") if column in table.columns]
        table = table.with_columns(sample=pl.int_range(pl.len()).over(group))
    prompts = table.select("prompt", "prompt_id").unique().sort("prompt")
    if not np.array_equal(prompts["prompt"], np.arange(len(prompts))):
        raise InputError(f"{name}: prompt: expected numbers from 0 without gaps, one per prompt_id")

    def ints(column: str) -> Ints:
        return table[column].to_numpy() if column in table.columns else np.zeros(n, np.int64)

    return Trace(
        name=name,
        source=about.get("source", ""),
        prompt=ints("prompt"),
        prompt_ids=tuple(prompts["prompt_id"]),
        sample=ints("sample"),
        prompt_tokens=ints("prompt_tokens"),
        output_tokens=ints("output_tokens"),
        capped=table["capped"].to_numpy() if "capped" in table.columns else np.zeros(n, np.bool_),
        arrival_s=_arrivals(table),
        step=ints("step") if "step" in table.columns else None,
        correct=ints("correct") if "correct" in table.columns else None,
        synthetic=about.get("synthetic", "false") == "true",
        licence=about.get("licence", ""),
    )


def renumbered(table: "pl.DataFrame") -> "pl.DataFrame":
    """The table with its prompts numbered without gaps, as after rows were left out; their names stay.

    >>> import polars as pl
    >>> renumbered(pl.DataFrame({"prompt": [4, 1, 4]})).rows()
    [(1, '4'), (0, '1'), (1, '4')]
    """
    import polars as pl

    named = _with_prompts(table, "")
    return named.with_columns(prompt=pl.col("prompt").rank("dense").cast(pl.Int64) - 1)


def check_rows(table: "pl.DataFrame", files: Sequence[Path], unit: str) -> None:
    """Raise InputError with file and row if prompt numbers have gaps or several names, or a row is twice.

    The table has the columns ``file`` (an index of ``files``) and ``row`` besides those of the trace.
    """
    import polars as pl

    def first(rows: "pl.DataFrame") -> tuple[str, dict[str, Any]]:
        found = rows.row(0, named=True)
        return f"{files[found['file']]}: {unit} {found['row']}", found

    if "prompt" in table.columns:
        gaps = table.filter(pl.col("prompt") > pl.col("prompt").rank("dense").cast(pl.Int64) - 1)
        if len(gaps):
            where, found = first(gaps.sort("prompt", maintain_order=True))
            raise InputError(
                f"{where}, column 'prompt': got {found['prompt']}, "
                "expected numbers from 0 without gaps, one per prompt_id"
            )
    if {"prompt", "prompt_id"} <= set(table.columns):
        for one, other in (("prompt", "prompt_id"), ("prompt_id", "prompt")):
            others = table.filter(pl.col(other) != pl.col(other).first().over(one))
            if len(others):
                where, found = first(others)
                raise InputError(
                    f"{where}: {one} {found[one]!r} has another {other} before, {found[other]!r} here; "
                    "expected one per prompt"
                )
    key = [name for name in ("step", "prompt_id", "prompt", "sample") if name in table.columns]
    if "sample" in key and len(key) > 1:
        again = table.filter(~pl.struct(key).is_first_distinct())
        if len(again):
            where, found = first(again)
            called = found.get("prompt_id", found.get("prompt"))
            raise InputError(
                f"{where}: sample {found['sample']} of prompt {called!r} appears twice, expected once"
            )


def _with_prompts(table: "pl.DataFrame", name: str) -> "pl.DataFrame":
    import polars as pl

    number, called = "prompt" in table.columns, "prompt_id" in table.columns
    if number and called:
        return table
    if number:
        return table.with_columns(prompt_id=pl.col("prompt").cast(pl.String))
    if not called:
        rows = pl.int_range(pl.len())
        return table.with_columns(prompt=rows, prompt_id=rows.cast(pl.String))
    first = pl.col("index").min().over("prompt_id")
    return table.with_row_index().with_columns(prompt=first.rank("dense").cast(pl.Int64) - 1)


def _arrivals(table: "pl.DataFrame") -> Floats:
    """Arrival in seconds; a clock in nanoseconds is counted from the first request."""
    if "arrival_ns" in table.columns:
        moment = table["arrival_ns"].to_numpy()
        return np.asarray((moment - moment.min()) / 1e9, dtype=np.float64)
    return table["arrival_s"].to_numpy() if "arrival_s" in table.columns else np.zeros(len(table))
