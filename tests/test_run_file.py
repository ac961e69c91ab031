"""Runs as folders: round trip of any simulated run, and every way a folder can be wrong."""

import json
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.engine.catalogue import bundled_engines, load_engine
from tailopt.engine.schema import to_toml
from tailopt.errors import InputError
from tailopt.plan import Fleet, View
from tailopt.policies import POLICIES, resolve_policy
from tailopt.run import EngineLog, Run, Stays
from tailopt.run_file import read_run, write_run
from tailopt.simulate import simulate
from tailopt.trace import Trace


def assert_equal(one: Run, other: Run) -> None:
    assert (one.backend, one.fleet.engines, one.fleet.gpus) == (
        other.backend,
        other.fleet.engines,
        other.fleet.gpus,
    )
    assert to_toml(one.fleet.profile) == to_toml(other.fleet.profile)
    assert (one.plan.engines, one.plan.atomic, one.plan.note) == (
        other.plan.engines,
        other.plan.atomic,
        other.plan.note,
    )
    assert np.array_equal(one.plan.engine_of, other.plan.engine_of)
    assert np.array_equal(one.plan.order, other.plan.order)
    arrays = [(one, other, field.name) for field in fields(Run)[3:] if field.name not in ("log", "stays")]
    arrays += [(one.log, other.log, field.name) for field in fields(EngineLog)]
    arrays += [(one.stays, other.stays, field.name) for field in fields(Stays)]
    for left, right, name in arrays:
        assert getattr(left, name).dtype == getattr(right, name).dtype, name
        assert np.array_equal(getattr(left, name), getattr(right, name)), name


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=4), min_size=1, max_size=6),
    st.sampled_from(list(POLICIES)),
    st.sampled_from(bundled_engines()),
    st.integers(1, 3),
)
def test_round_trip(groups, policy, engine, engines):
    trace = Trace.of(groups, prompt_tokens=20)
    profile = load_engine(engine)
    fleet = Fleet.of(profile, f"{engines}xTP{min(profile.shapes)}")
    plan = resolve_policy(policy)(View.at_start(trace, fleet, trace.output_tokens))
    run = simulate(trace, fleet, plan)
    with TemporaryDirectory() as parent:
        write_run(run, Path(parent) / "run")
        assert_equal(read_run(Path(parent) / "run"), run)
        assert [path.name for path in Path(parent).iterdir()] == ["run"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    trace = Trace.of([[30, 50], [7, 9]])
    fleet = Fleet.of(load_engine("h100-llama-3.1-8b"), "2xTP1")
    plan = resolve_policy("round_robin")(View.at_start(trace, fleet))
    write_run(simulate(trace, fleet, plan), tmp_path / "run")
    return tmp_path / "run"


def test_nothing_is_overwritten_or_left_half_done(folder):
    run = read_run(folder)
    with pytest.raises(InputError, match="exists, expected a folder yet to be made"):
        write_run(run, folder)
    with pytest.raises(InputError, match="cannot be written"):
        write_run(run, folder.parent / "no" / "such")
    broken = Run(**{**{field.name: getattr(run, field.name) for field in fields(Run)}, "start_s": ["x"] * 4})
    with pytest.raises(Exception, match=r".+"):
        write_run(broken, folder.parent / "other")
    assert [path.name for path in folder.parent.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "name", ["run.json", "plan.json", "engine.toml", "requests.parquet", "log.parquet", "stays.parquet"]
)
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00 nonsense", b"{}"])
def test_missing_or_broken_files_are_one_line_that_names_them(folder, name, content):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        read_run(folder)
    assert str(folder / name) in str(error.value)
    assert "\n" not in str(error.value)


def edited(folder: Path, **changes: object) -> None:
    document = json.loads((folder / "run.json").read_text()) | changes
    (folder / "run.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 1}, "fleet: 2 engines need 2 GPUs, there are 1"),
        ({"gpus": 0}, "gpus: Input should be greater than or equal to 1"),
        ({"engines": [{"tp": 3}], "gpus": 3}, "has no TP3"),
        ({"engines": [{"tp": 1}]}, "requests.parquet: engine: expected 0 to 0"),
        ({"format": "tailopt.run/9"}, "format: Input should be 'tailopt.run/1'"),
    ],
)
def test_documents_that_do_not_fit(folder, changes, message):
    edited(folder, **changes)
    with pytest.raises(InputError) as error:
        read_run(folder)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pl.col("finish_s") * np.nan, r"finish_s\[0\]: expected a finite number"),
        (-pl.col("output_tokens"), r"output_tokens\[0\]: expected at least 0"),
        (pl.col("engine").cast(pl.Float64), "expected the columns engine, start_s"),
        (pl.lit(1).alias("more"), "expected the columns engine, start_s"),
    ],
)
def test_tables_that_do_not_fit(folder, change, message):
    path = folder / "requests.parquet"
    pl.read_parquet(path).with_columns(change).write_parquet(path)
    with pytest.raises(InputError, match=f"requests.parquet: {message}"):
        read_run(folder)
    pl.read_parquet(folder / "log.parquet")


def test_a_table_of_another_batch(folder):
    path = folder / "requests.parquet"
    pl.read_parquet(path).head(3).write_parquet(path)
    with pytest.raises(InputError, match="expected 4 values, got 3"):
        read_run(folder)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_names_that_no_folder_has(tmp_path: Path, name: str) -> None:
    trace, fleet = Trace.of([[3, 4]]), Fleet.of(load_engine("h100-llama-3.1-8b"), "1xTP1")
    run = simulate(trace, fleet, resolve_policy("uniform")(View.at_start(trace, fleet)))
    with pytest.raises(InputError, match="cannot be written"):
        write_run(run, tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        read_run(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_damaged_tables(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace, fleet = Trace.of([[3, 4]]), Fleet.of(load_engine("h100-llama-3.1-8b"), "1xTP1")
    write_run(
        simulate(trace, fleet, resolve_policy("uniform")(View.at_start(trace, fleet))), tmp_path / "run"
    )
    table = tmp_path / "run" / "requests.parquet"
    whole, refused = table.read_bytes(), 0
    for at in range(4, len(whole) - 8, 5):
        table.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        try:
            read_run(tmp_path / "run")  # may well be readable
        except InputError:
            refused += 1
    assert refused > 50
    assert capfd.readouterr().err == ""
