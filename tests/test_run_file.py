"""Runs as folders: round trip of any simulated run, and every way a folder can be wrong."""

import json
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.engine.catalogue import bundled_engines, load_engine
from tailopt.engine.profile import Draft
from tailopt.engine.schema import to_toml
from tailopt.engine.speculation import Speculation
from tailopt.errors import InputError
from tailopt.plan import DROPPED, Engine, Fleet, Plan, ReviewPoint, View
from tailopt.policies import POLICIES, resolve_policy
from tailopt.run import EngineLog, Moves, Review, Run, Spans, Stays
from tailopt.run_file import read_run, write_run
from tailopt.simulate import simulate, simulate_policy
from tailopt.trace import Trace


def assert_equal(one: object, other: object) -> None:
    """Equal field by field, arrays and nested dataclasses included."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(one, Run | Plan | Review | EngineLog | Stays | Moves | Spans):
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, Fleet):
        assert (one.engines, one.gpus) == (other.engines, other.gpus)
        assert to_toml(one.profile) == to_toml(other.profile)
    else:
        assert one == other


def whole(draw: st.DrawFn, k: int, most: int) -> np.ndarray:
    return np.array(draw(st.lists(st.integers(0, most), min_size=k, max_size=k)), dtype=np.int64)


def seconds(draw: st.DrawFn, k: int) -> np.ndarray:
    return np.array(draw(st.lists(st.floats(0, 1e9), min_size=k, max_size=k)), dtype=np.float64)


def flags(draw: st.DrawFn, k: int) -> np.ndarray:
    return np.array(draw(st.lists(st.booleans(), min_size=k, max_size=k)), dtype=np.bool_)


DRAFTING = replace(load_engine("h100-llama-3.1-8b"), link_bytes_per_s=1e9)
DRAFTING = replace(
    DRAFTING,
    shapes={
        tp: replace(shape, drafts=(Draft("ngram", 0.3),), wake_s=2.0) for tp, shape in DRAFTING.shapes.items()
    },
)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any run, whether or not an engine could have run it: with switches, moves, drops and reviews."""
    n = draw(st.integers(1, 5))
    kinds = [
        Engine(1), Engine(2, 8, None, None, "priority"), Engine(1, None, None, Speculation("ngram", 3, 0.5)),
    ]  # fmt: skip
    first = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    fleet = Fleet(DRAFTING, tuple(first), 8)
    later = draw(st.lists(st.sampled_from([Engine(2, None, (6, 7)), Engine(1, 3, (0,))]), max_size=2))
    engines = (*fleet.engines, *later)
    m = len(engines)
    reviews = []
    for time_s in draw(st.lists(st.floats(0, 1e6), max_size=2)):
        left = draw(st.lists(st.integers(0, n - 1), max_size=n, unique=True))
        to = draw(st.lists(st.integers(DROPPED, m - 1), min_size=len(left), max_size=len(left)))
        plan = Plan(engines, to, np.arange(len(left)), review=(ReviewPoint("idle"),), move="migrate")
        reviews.append(Review(time_s, ReviewPoint("tokens", 7), plan, np.array(left, dtype=np.int64)))
    k = draw(st.integers(0, 4))
    never = flags(draw, n)  # given up before they ran
    return Run(
        backend=draw(st.text(max_size=5)),
        fleet=fleet,
        plan=Plan(fleet.engines, whole(draw, n, len(first) - 1), np.arange(n), deadline_s=5.0),
        engine=np.where(never, -1, whole(draw, n, m - 1)),
        start_s=np.where(never, np.nan, seconds(draw, n)),
        first_token_s=np.where(never, np.nan, seconds(draw, n)),
        finish_s=seconds(draw, n),
        output_tokens=whole(draw, n, 2**40),
        preemptions=whole(draw, n, 9),
        log=EngineLog(
            whole(draw, k, m - 1), whole(draw, k, 9), seconds(draw, k), whole(draw, k, 9), whole(draw, k, 99)
        ),
        stays=Stays(whole(draw, k, n - 1), whole(draw, k, m - 1), seconds(draw, k), seconds(draw, k)),
        engines=engines,
        spans=Spans(*(seconds(draw, m) for _ in range(5))),
        completed=flags(draw, n),
        moves=Moves(
            whole(draw, k, n - 1), whole(draw, k, m - 1), whole(draw, k, m) - 1, seconds(draw, k),
            seconds(draw, k), whole(draw, k, 2**40), flags(draw, k),
        ),
        reviews=tuple(reviews),
    )  # fmt: skip


@given(runs())
def test_any_run_round_trips(run: Run) -> None:
    with TemporaryDirectory() as parent:
        write_run(run, Path(parent) / "run")
        assert_equal(read_run(Path(parent) / "run"), run)


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
    run = simulate_policy(trace, resolve_policy(policy), View.at_start(trace, fleet, trace.output_tokens))
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
    "name",
    ["run.json", "plan.json", "reviews.json", "engine.toml"]
    + [f"{table}.parquet" for table in ("requests", "log", "stays", "moves", "spans")],
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
        ({"fleet": [{"tp": 3}], "gpus": 3}, "has no TP3"),
        ({"engines": [{"tp": 3}]}, "has no TP3"),
        ({"engines": [{"tp": 1}]}, "spans.parquet: open_s: expected 1 values, got 2"),
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
        (pl.col("start_s") + np.inf, r"start_s\[0\]: expected a finite number, got inf"),
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


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("requests", pl.lit(2, pl.Int64).alias("engine"), "requests.parquet: engine: expected 0 to 1"),
        ("stays", pl.lit(4, pl.Int64).alias("request"), "stays.parquet: request: expected 0 to 3"),
        ("log", pl.lit(7, pl.Int64).alias("engine"), "log.parquet: engine: expected 0 to 1"),
        ("moves", pl.lit(2, pl.Int64).alias("target"), "moves.parquet: target: expected 0 to 1"),
        ("moves", pl.lit(4, pl.Int64).alias("request"), "moves.parquet: request: expected 0 to 3"),
    ],
)
def test_numbers_of_nobody(folder: Path, file: str, change: pl.Expr, message: str) -> None:
    path = folder / f"{file}.parquet"
    table = pl.read_parquet(path)
    if not len(table):
        row = [0, 0, 1, 1.0, 2.0, 30, False]
        table = pl.DataFrame([row], schema=table.schema, orient="row")
        table.write_parquet(path)
        read_run(folder)
    table.with_columns(change).write_parquet(path)
    with pytest.raises(InputError, match=message):
        read_run(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request": [0, 9]}, "reviews[0]: request: expected 0 to 3, got 9"),
        ({"request": [0]}, "reviews[0]: request: expected 2 values, got 1"),
        ({"time_s": -1.0}, "reviews[0].time_s: Input should be greater than or equal to 0, got -1.0"),
        ({"reason": {"when": "soon"}}, "reviews[0].reason.when: Input should be 'unfinished', 'tokens'"),
    ],
)
def test_reviews_that_do_not_fit(folder: Path, change: dict[str, object], message: str) -> None:
    plan = {"format": "tailopt.plan/1", "engines": [{"tp": 1}], "engine_of": [0, -2], "order": [1, 0]}
    good = {"time_s": 1, "reason": {"when": "idle"}, "request": [0, 3], "plan": plan}
    (folder / "reviews.json").write_text(json.dumps({"reviews": [good]}))
    assert read_run(folder).reviews[0].request.tolist() == [0, 3]
    (folder / "reviews.json").write_text(json.dumps({"reviews": [good | change]}))
    with pytest.raises(InputError) as error:
        read_run(folder)
    assert str(folder / "reviews.json") in str(error.value)
    assert message in str(error.value)


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
