"""Runs as a folder: tables as Parquet, the rest as JSON and TOML, read back equal.

====================  ========================================================
``run.json``          backend, GPUs, and the engines of the fleet
``plan.json``         the plan that was carried out (:mod:`tailopt.plan_file`)
``engine.toml``       the engine profile (:mod:`tailopt.engine.catalogue`)
``requests.parquet``  one row per request
``log.parquet``       one row per event of an engine
``stays.parquet``     one row per time that a request ran on an engine
====================  ========================================================
"""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailopt.arrays import floats, ints
from tailopt.engine.catalogue import read_profile, write_profile
from tailopt.errors import InputError
from tailopt.files import parquet_errors
from tailopt.plan import Engine, Fleet
from tailopt.plan_file import EngineModel, first_error, read_plan, write_plan
from tailopt.run import EngineLog, Run, Stays

REQUEST_COLUMNS = {
    "engine": pl.Int64,
    "start_s": pl.Float64,
    "first_token_s": pl.Float64,
    "finish_s": pl.Float64,
    "output_tokens": pl.Int64,
    "preemptions": pl.Int64,
}
LOG_COLUMNS = {
    "engine": pl.Int64,
    "step": pl.Int64,
    "time_s": pl.Float64,
    "running": pl.Int64,
    "kv_tokens": pl.Int64,
}
STAY_COLUMNS = {"request": pl.Int64, "engine": pl.Int64, "start_s": pl.Float64, "end_s": pl.Float64}


class RunModel(BaseModel):
    """What ``run.json`` holds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["tailopt.run/1"]
    backend: str
    gpus: Annotated[int, Field(ge=1, lt=2**31)]
    engines: Annotated[list[EngineModel], Field(min_length=1)]


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
        engines=[EngineModel(tp=engine.tp, max_running=engine.max_running) for engine in run.fleet.engines],
    )
    (folder / "run.json").write_text(model.model_dump_json(indent=2) + "\n", encoding="utf-8")
    write_plan(run.plan, folder / "plan.json")
    write_profile(run.fleet.profile, folder / "engine.toml")
    _table(run, REQUEST_COLUMNS).write_parquet(folder / "requests.parquet")
    _table(run.log, LOG_COLUMNS).write_parquet(folder / "log.parquet")
    _table(run.stays, STAY_COLUMNS).write_parquet(folder / "stays.parquet")


def _table(source: Run | EngineLog | Stays, columns: dict[str, Any]) -> pl.DataFrame:
    return pl.DataFrame({name: getattr(source, name) for name in columns}, schema=columns)


def read_run(folder: str | Path) -> Run:
    """Read a run from its folder.

    Raises:
        InputError: one line that names the file and what is wrong with it.
    """
    folder = Path(folder)
    model = _read_model(folder / "run.json")
    plan = read_plan(folder / "plan.json")
    profile = read_profile(folder / "engine.toml")
    engines = tuple(Engine(engine.tp, engine.max_running) for engine in model.engines)
    try:
        fleet = Fleet(profile, engines, model.gpus)
    except InputError as error:
        raise InputError(f"{folder / 'run.json'}: {error}") from None
    n = len(plan.engine_of)
    requests = _read_table(folder / "requests.parquet", REQUEST_COLUMNS, n)
    log = _read_table(folder / "log.parquet", LOG_COLUMNS, None)
    stays = _read_table(folder / "stays.parquet", STAY_COLUMNS, None)
    if (stays["request"] >= n).any():
        raise InputError(f"{folder / 'stays'}.parquet: request: expected 0 to {n - 1}")
    for file, table in (("requests", requests), ("log", log), ("stays", stays)):
        if (table["engine"] >= len(engines)).any():
            raise InputError(f"{folder / file}.parquet: engine: expected 0 to {len(engines) - 1}")
    return Run.without_reviews(
        backend=model.backend, fleet=fleet, plan=plan, log=EngineLog(**log), stays=Stays(**stays), **requests
    )


def _read_model(path: Path) -> RunModel:
    try:
        return RunModel.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(f"{path}: {first_error(error)}") from None
    except (OSError, ValueError) as error:  # ValueError: a zero in the name
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _read_table(path: Path, columns: dict[str, Any], length: int | None) -> dict[str, Any]:
    with parquet_errors(path):
        table = pl.read_parquet(path)
    if dict(table.schema) != columns:
        raise InputError(f"{path}: expected the columns {', '.join(columns)}, got {', '.join(table.columns)}")
    checked = {}
    for name, kind in columns.items():
        check = ints if kind == pl.Int64 else floats
        checked[name] = check(f"{path}: {name}", table[name].to_numpy(), length, minimum=0)
    return checked
