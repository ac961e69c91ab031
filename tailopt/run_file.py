"""Runs as a folder: tables as Parquet, the rest as JSON and TOML, read back equal.

====================  ==================================================================
``run.json``          backend, GPUs, the fleet it began with, and all engines that ever were
``plan.json``         the plan that was carried out at first (:mod:`tailopt.plan_file`)
``reviews.json``      when the policy was asked again, and the plans that it answered
``engine.toml``       the engine profile (:mod:`tailopt.engine.catalogue`)
``requests.parquet``  one row per request
``log.parquet``       one row per event of an engine
``stays.parquet``     one row per time that a request ran on an engine
``moves.parquet``     one row per move of a running request to another engine
``spans.parquet``     one row per engine: when it was there
====================  ==================================================================
"""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailopt.arrays import bools, floats, ints
from tailopt.engine.catalogue import read_profile, write_profile
from tailopt.errors import InputError
from tailopt.files import parquet_errors
from tailopt.plan import Fleet
from tailopt.plan_file import EngineModel, PlanModel, ReviewModel, first_error, read_plan, write_plan
from tailopt.run import EngineLog, Moves, Review, Run, Spans, Stays

REQUEST_COLUMNS = {
    "engine": pl.Int64,
    "start_s": pl.Float64,
    "first_token_s": pl.Float64,
    "finish_s": pl.Float64,
    "output_tokens": pl.Int64,
    "preemptions": pl.Int64,
    "completed": pl.Boolean,
}
LOG_COLUMNS = {
    "engine": pl.Int64,
    "step": pl.Int64,
    "time_s": pl.Float64,
    "running": pl.Int64,
    "kv_tokens": pl.Int64,
}
STAY_COLUMNS = {"request": pl.Int64, "engine": pl.Int64, "start_s": pl.Float64, "end_s": pl.Float64}


MOVE_COLUMNS = {
    "request": pl.Int64,
    "source": pl.Int64,
    "target": pl.Int64,
    "start_s": pl.Float64,
    "end_s": pl.Float64,
    "tokens": pl.Int64,
    "migrated": pl.Boolean,
}
SPAN_COLUMNS = dict.fromkeys(["open_s", "wake_s", "close_s", "drain_s", "sleep_s"], pl.Float64)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RunModel(_Model):
    """What ``run.json`` holds."""

    format: Literal["tailopt.run/1"]
    backend: str
    gpus: Annotated[int, Field(ge=1, lt=2**31)]
    fleet: Annotated[list[EngineModel], Field(min_length=1)]
    engines: Annotated[list[EngineModel], Field(min_length=1)]


class AnswerModel(_Model):
    """One review."""

    time_s: Annotated[float, Field(ge=0)]
    reason: ReviewModel
    request: list[Annotated[int, Field(ge=0)]]
    plan: PlanModel


class ReviewsModel(_Model):
    """What ``reviews.json`` holds."""

    reviews: list[AnswerModel]


def write_run(run: Run, folder: str | Path) -> None:
    """Write a run into a new folder, whole or not at all; :func:`read_run` gives an equal one back.

    Raises:
        InputError: if the folder is there already, or cannot be written.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Plan
    >>> from tailopt.simulate import simulate
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet.of(load_engine("h100-llama-3.1-8b"), "2xTP1")
    >>> run = simulate(Trace.of([[30, 50]]), fleet, Plan.of_queues(fleet.engines, [[0], [1]]))
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     write_run(run, f"{parent}/first")
    ...     read_run(f"{parent}/first").makespan_s == run.makespan_s
    True
    """
    folder = Path(folder)
    try:
        if folder.exists():
            raise InputError(f"{folder}: exists, expected a folder yet to be made")
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as parent:
            made = Path(parent) / folder.name
            made.mkdir()
            _write_files(run, made)
            shutil.move(made, folder)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a zero in the name
        raise InputError(
            f"{folder}: cannot be written ({getattr(error, 'strerror', None) or error})"
        ) from None


def _write_files(run: Run, folder: Path) -> None:
    model = RunModel(
        format="tailopt.run/1",
        backend=run.backend,
        gpus=run.fleet.gpus,
        fleet=[EngineModel.of(engine) for engine in run.fleet.engines],
        engines=[EngineModel.of(engine) for engine in run.engines],
    )
    reviews = [
        AnswerModel(
            time_s=review.time_s,
            reason=ReviewModel.of(review.reason),
            request=review.request.tolist(),
            plan=PlanModel.of(review.plan),
        )
        for review in run.reviews
    ]
    _write_model(model, folder / "run.json")
    write_plan(run.plan, folder / "plan.json")
    _write_model(ReviewsModel(reviews=reviews), folder / "reviews.json")
    write_profile(run.fleet.profile, folder / "engine.toml")
    _table(run, REQUEST_COLUMNS).write_parquet(folder / "requests.parquet")
    _table(run.log, LOG_COLUMNS).write_parquet(folder / "log.parquet")
    _table(run.stays, STAY_COLUMNS).write_parquet(folder / "stays.parquet")
    _table(run.moves, MOVE_COLUMNS).write_parquet(folder / "moves.parquet")
    _table(run.spans, SPAN_COLUMNS).write_parquet(folder / "spans.parquet")


def _write_model(model: BaseModel, path: Path) -> None:
    path.write_text(model.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")


def _table(source: Run | EngineLog | Stays | Moves | Spans, columns: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame({name: getattr(source, name) for name in columns}, schema=columns)


def read_run(folder: str | Path) -> Run:
    """Read a run from its folder.

    Raises:
        InputError: one line that names the file and what is wrong with it.
    """
    folder = Path(folder)
    model = _read_model(folder / "run.json", RunModel)
    plan = read_plan(folder / "plan.json")
    profile = read_profile(folder / "engine.toml")
    try:
        fleet = Fleet(profile, tuple(engine.engine() for engine in model.fleet), model.gpus)
        engines = tuple(engine.engine() for engine in model.engines)
        for engine in engines:
            profile.shape(engine.tp)
    except InputError as error:
        raise InputError(f"{folder / 'run.json'}: {error}") from None
    n = len(plan.engine_of)
    tables = {
        name: _read_table(folder / f"{name}.parquet", columns, rows)
        for name, columns, rows in (
            ("requests", REQUEST_COLUMNS, n),
            ("log", LOG_COLUMNS, None),
            ("stays", STAY_COLUMNS, None),
            ("moves", MOVE_COLUMNS, None),
            ("spans", SPAN_COLUMNS, len(engines)),
        )
    }
    for name, table in tables.items():
        for column, end in (("request", n), *((one, len(engines)) for one in ("engine", "source", "target"))):
            if column in table and (table[column] >= end).any():
                raise InputError(f"{folder / name}.parquet: {column}: expected 0 to {end - 1}")
    return Run(
        backend=model.backend,
        fleet=fleet,
        plan=plan,
        log=EngineLog(**tables["log"]),
        stays=Stays(**tables["stays"]),
        engines=engines,
        spans=Spans(**tables["spans"]),
        moves=Moves(**tables["moves"]),
        reviews=_read_reviews(folder / "reviews.json", n),
        **tables["requests"],
    )


M = TypeVar("M", bound=BaseModel)


def _read_model(path: Path, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(f"{path}: {first_error(error)}") from None
    except (OSError, ValueError) as error:  # ValueError: a zero in the name
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _read_reviews(path: Path, n: int) -> tuple[Review, ...]:
    reviews = []
    for index, model in enumerate(_read_model(path, ReviewsModel).reviews):
        try:
            plan = model.plan.plan()
            request = ints("request", model.request, len(plan.engine_of))
            if len(request) and request.max() >= n:
                raise InputError(f"request: expected 0 to {n - 1}, got {request.max()}")
            reviews.append(Review(model.time_s, model.reason.point(), plan, request))
        except InputError as error:
            raise InputError(f"{path}: reviews[{index}]: {error}") from None
    return tuple(reviews)


def _read_table(path: Path, columns: dict[str, Any], length: int | None) -> dict[str, Any]:
    with parquet_errors(path):
        table = pl.read_parquet(path)
    if dict(table.schema) != columns:
        raise InputError(f"{path}: expected the columns {', '.join(columns)}, got {', '.join(table.columns)}")
    return {name: _checked(f"{path}: {name}", name, table[name].to_numpy(), length) for name in columns}


def _checked(what: str, name: str, values: Any, length: int | None) -> Any:
    """A column; one that never ran has engine -1 and no times."""
    if values.dtype.kind == "b":
        return bools(what, values, length)
    if values.dtype.kind == "i":
        return ints(what, values, length, minimum=-1 if name in ("engine", "target") else 0)
    if name not in ("start_s", "first_token_s"):
        return floats(what, values, length, minimum=0)
    known = floats(what, np.nan_to_num(values, nan=0.0, posinf=np.inf), length, minimum=0)
    found = np.where(np.isnan(values), np.nan, known)
    found.flags.writeable = False
    return found
