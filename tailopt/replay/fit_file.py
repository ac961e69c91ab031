"""Measured steps out of files, and a fit into an engine profile.

A file is either a record of a replay (:mod:`tailopt.replay.recorder`) or a plain table, CSV or Parquet, of
any engine's log, one row a step:

================  =======================================================================================
``running``       requests that gained a token in the step
``kv_tokens``     tokens that these held with the new ones
``other_tokens``  tokens computed besides, as prefill is (0 if the column is not there)
``seconds``       how long it took
``engine``        which engine (0 if the column is not there)
``time_s``        when it began (0 if the column is not there)
================  =======================================================================================

A record knows the shape of each engine; the steps of a table are all of one shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.errors import InputError
from tailopt.replay.fit import Fit, Steps, joined, levelled

REQUIRED = ("running", "kv_tokens", "seconds")
OPTIONAL = ("other_tokens", "engine", "time_s")


@dataclass(frozen=True)
class Measured:
    """The steps in some files, and what these say about where they were taken.

    Attributes:
        steps: tensor-parallel degree -> steps; under None those of a plain table, which does not say.
        profile: what the engines were set up to be, if a file says.
        hardware, engine, engine_version, date: of the first record; empty if there is none.
        names: of the files.
    """

    steps: Mapping[int | None, Steps]
    profile: EngineProfile | None
    hardware: str
    engine: str
    engine_version: str
    date: str
    names: tuple[str, ...]


def read_measured(paths: Sequence[str | Path], *, level: bool = False) -> Measured:
    """Read the steps of all files.

    Args:
        paths: records (JSONL) and tables (CSV, Parquet).
        level: take the pace of the machine out, file by file (:func:`tailopt.replay.fit.levelled`): for files
            with batches of like requests.

    Raises:
        InputError: a file that cannot be read or is neither, a column that is missing, no steps.
    """
    parts: dict[int | None, list[Steps]] = {}
    profile: EngineProfile | None = None
    about = {"hardware": "", "engine": "", "engine_version": "", "date": ""}
    for path in map(Path, paths):
        if path.suffix in (".csv", ".parquet"):
            parts.setdefault(None, []).append(_table(path))
            continue
        steps, its_profile, its_about = _record(path)
        for tp, some in steps.items():
            parts.setdefault(tp, []).append(some)
        profile = profile or its_profile
        about = about if about["engine"] else its_about
    if not parts:
        raise InputError(f"{', '.join(map(str, paths))}: no steps, expected some")
    steps_of = {tp: (levelled if level else joined)(some) for tp, some in parts.items()}
    return Measured(steps_of, profile, **about, names=tuple(Path(path).name for path in paths))


def fitted_profile(
    name: str, like: EngineProfile, fits: Mapping[int | None, Fit], measured: Measured
) -> EngineProfile:
    """``like`` with what was fitted: only the shapes that were measured, and where that was.

    Args:
        name: of the new profile.
        like: gives the model, precision, limits, and all that steps do not tell.
        fits: per tensor-parallel degree; None stands for the only degree that ``like`` has.
        measured: what was fitted.

    Raises:
        InputError: if ``like`` lacks a shape, or has several and the steps do not say of which they are.
    """
    shapes: dict[int, ShapeProfile] = {}
    for tp, fit in fits.items():
        if tp is None and len(like.shapes) > 1:
            known = ", ".join(f"TP{one}" for one in like.shapes)
            raise InputError(
                f"engine {like.name!r}: has {known}, expected one, or --tp to say which was measured"
            )
        shape = like.shape(next(iter(like.shapes)) if tp is None else tp)
        if shape.tp in shapes:
            raise InputError(f"TP{shape.tp}: steps of a table and of a record, expected one kind of file")
        shapes[shape.tp] = with_fit(shape, fit)
    return replace(
        like,
        name=name,
        hardware=measured.hardware or like.hardware,
        engine=measured.engine or like.engine,
        engine_version=measured.engine_version or like.engine_version,
        date=measured.date or like.date,
        sources=(f"fitted by tailopt to the steps in {', '.join(measured.names)}",),
        licence="own measurement",
        shapes=shapes,
    )


def machine_profile(name: str, profile: EngineProfile, backend: str) -> EngineProfile:
    """``profile`` as measured here and now by ``tailopt profile``."""
    import os
    import platform
    from datetime import date

    from tailopt.replay.recorder import _processor

    engine, _, version = backend.partition(" ")
    return replace(
        profile,
        name=name,
        hardware=f"{_processor() or 'unknown processor'}, {os.cpu_count()} cores",
        engine=engine,
        engine_version=version or "unknown",
        date=date.today().isoformat(),
        sources=(f"measured by tailopt profile on {platform.platform()}",),
        licence="own measurement",
    )


def write_steps(parts: Sequence[Steps], path: str | Path) -> None:
    """All steps as a table that :func:`read_measured` reads; CSV, whole or not at all."""
    import polars as pl

    from tailopt.files import whole_file

    steps = joined(parts)
    table = pl.DataFrame({name: getattr(steps, name) for name in (*REQUIRED, *OPTIONAL)})
    with whole_file(path) as temporary:
        table.write_csv(temporary)


def with_fit(shape: ShapeProfile, fit: Fit) -> ShapeProfile:
    """``shape`` with the step time, prefill rate and host time of ``fit``.

    What a step of prefill alone takes besides its tokens is the profile's ``host_s``; it cannot be more than
    what is left of any decode step.
    """
    least = float(fit.step_time.lines(shape.max_running).base_s[:, 1:].max(axis=0).min())
    return replace(
        shape,
        step_time=fit.step_time,
        prefill_tokens_per_s=fit.prefill_tokens_per_s,
        host_s=min(fit.best.form.idle_s, max(least, 0.0)),
        host_per_request_s=0.0,
        overlapped=False,
        fit=str(fit),
    )


def _record(path: Path) -> tuple[dict[int, Steps], EngineProfile, dict[str, str]]:
    """The steps of each degree in a record, but for engines that speculate: their steps mix two things."""
    from tailopt.replay.ledger import Ledger
    from tailopt.replay.recorder import read_record

    record = read_record(path)
    ledger = Ledger(record.trace, record.fleet)
    rows: dict[int, list[tuple[float, ...]]] = {}
    for line in record.lines:
        if line["kind"] == "plan":
            ledger.apply(line)
        elif line["kind"] == "step" and (line["n"] or line["P"]) and _single(line):
            number = int(line["engine"])
            engine = ledger.places[number].engine
            if engine.speculation is None:
                row = (line["n"], line["K"], line["P"], line["s"], number, line["t"])
                rows.setdefault(engine.tp, []).append(row)
    head = record.head
    name, _, version = str(head["backend"]).partition(" ")
    machine: Mapping[str, Any] = head.get("machine", {})
    about = {
        "hardware": f"{machine.get('processor') or 'unknown processor'}, {machine.get('cores', '?')} cores",
        "engine": name,
        "engine_version": version or "unknown",
        "date": str(head.get("date", ""))[:10],
    }
    columns = {tp: [np.array(column) for column in zip(*some, strict=True)] for tp, some in rows.items()}
    return {tp: Steps(*some) for tp, some in columns.items()}, record.fleet.profile, about


def _single(line: Mapping[str, Any]) -> bool:
    """Whether it is one step: over a network several may have come at once."""
    return sum(len(gained) - 1 for gained in line["new"]) <= int(line["n"])


def _table(path: Path) -> Steps:
    """The steps in a CSV or Parquet file."""
    import polars as pl

    from tailopt.files import parquet_errors

    try:
        if path.suffix == ".csv":
            table = pl.read_csv(path)
        else:
            with parquet_errors(path):
                table = pl.read_parquet(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{path}: not a table ({str(error).splitlines()[0][:100]})") from None
    missing = [column for column in REQUIRED if column not in table.columns]
    if missing:
        raise InputError(f"{path}: expected columns {', '.join(REQUIRED)}; missing: {', '.join(missing)}")
    columns = {}
    for column in (*REQUIRED, *OPTIONAL):
        if column not in table.columns:
            columns[column] = np.zeros(len(table))
            continue
        if not table[column].dtype.is_numeric() or table[column].null_count():
            raise InputError(f"{path}: column {column}: expected numbers only")
        columns[column] = table[column].to_numpy()
    try:
        return Steps(**columns)  # type: ignore[arg-type]  # made so, and checked, on construction
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
