"""Fits of step times: known ones are found again, under noise and outliers; too little is refused."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.arrays import Floats, Ints
from tailopt.cli import app
from tailopt.engine.catalogue import load_engine, read_profile
from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime, Table
from tailopt.errors import InputError
from tailopt.replay.fit import Steps, condense, fit_steps, joined, levelled
from tailopt.replay.fit_forms import KINDS, Points, fit_padded, fit_table, weighted_median

PREFILL = 20_000.0
ALONE_S = 1e-3
"""What a step of prefill alone takes besides its tokens."""


def steps_of(
    tau: StepTime,
    rng: np.random.Generator,
    *,
    noise: float = 0.03,
    outliers: float = 0.03,
    most: int = 64,
    batches: int = 4,
) -> Steps:
    """Steps as batches of an engine make them: one prompt after the other, then requests end one by one."""
    rows: list[tuple[int, int, int]] = []
    for size in [*rng.integers(most // 2, most + 1, batches).tolist(), most]:
        lengths = np.minimum(rng.lognormal(5.0, 1.0, size).astype(int) + 1, 1500)
        prompts = rng.integers(20, 400, size)
        rows += [(i, int(prompts[:i].sum()) + i, int(prompts[i])) for i in range(size)]
        for k in range(1, int(lengths.max()) + 1):
            left = lengths >= k
            rows.append((int(left.sum()), int((prompts[left] + k).sum()), 0))
    n, kv, prefill = (np.array(column) for column in zip(*rows, strict=True))
    seconds = tau(n, kv) + prefill / PREFILL + np.where(n == 0, ALONE_S, 0.0)
    seconds = seconds * np.exp(rng.normal(0, noise, len(n)))
    late = rng.random(len(n)) < outliers
    return Steps.of(n, kv, prefill, np.where(late, seconds * rng.uniform(1.5, 6, len(n)), seconds))


milli = st.floats(1, 10).map(lambda ms: ms * 1e-3)
contexts = st.floats(1e-7, 1e-6)


@st.composite
def curves(draw: st.DrawFn, grid: tuple[int, ...], *, padded: bool) -> Table:
    rises = [0.0, *(draw(st.floats(0, 0.3)) for _ in grid[1:])]
    return Table(list(grid), draw(milli) * (1 + np.cumsum(rises)), draw(contexts), padded)


step_times = {
    "affine": st.builds(Affine, milli, st.floats(2e-5, 5e-4), contexts),
    "power": st.builds(Power, milli, st.floats(2e-4, 1e-3), st.floats(0.3, 0.7), contexts),
    "max_affine": st.builds(
        lambda floor, kink, b, c: MaxAffine(((floor, 0.0, c), (floor - kink * b, b, c))),
        st.floats(5e-3, 20e-3),
        st.integers(8, 30),
        st.floats(2e-4, 5e-4),
        contexts,
    ),
    "table": curves((1, 2, 4, 8, 16, 32, 64), padded=False),
    "padded": curves((1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64), padded=True),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_each_kind_is_found_again(kind: str, data: st.DataObject, seed: int) -> None:
    """Noise 3 %, a step in 33 late by up to sixfold; tau is found within the range of what was measured."""
    tau = data.draw(step_times[kind])
    fit = fit_steps(steps_of(tau, np.random.default_rng(seed), batches=24), kinds=[kind])
    for most, context in ((60, 100), (60, 300), (12, 1000)):
        n = np.arange(1, most + 1)
        off = np.abs(fit.step_time(n, n * context) / tau(n, n * context) - 1)
        assert off.mean() < 0.02
        assert np.sort(off)[-4] < 0.05  # where exactly a table steps may be off by a request or two
    assert fit.prefill_tokens_per_s == pytest.approx(PREFILL, rel=0.1)
    assert fit.best.form.idle_s == pytest.approx(ALONE_S, rel=1.5)


@settings(max_examples=20)
@given(
    tau=st.builds(Affine, st.floats(4e-3, 10e-3), st.floats(1e-4, 5e-4), st.floats(1e-7, 1e-6)),
    paces=st.lists(st.floats(0.8, 1.25), min_size=4, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_levelled_batches_have_one_pace(tau: Affine, paces: list[float], seed: int) -> None:
    """Each batch runs empty at its own pace; what is left is tau times one number, and the sum of seconds."""
    rng = np.random.default_rng(seed)
    parts, usual = [], []
    for pace in paces:
        lengths = np.sort(np.minimum(rng.lognormal(4, 1, 24).astype(int) + 1, 600))
        step = np.arange(lengths[-1])
        n = 24 - np.searchsorted(lengths, step, side="right")
        kv = np.array([lengths[lengths > at].size * (at + 1) for at in step])
        usual.append(np.asarray(tau(n, kv)))
        parts.append(Steps.of(n, kv, 0 * n, pace * usual[-1] * rng.normal(1, 0.02, len(n))))
    probes = Steps.of([1] * 30, np.arange(100, 3100, 100), [0] * 30, np.full(30, 1.0))  # no pace of its own
    found = levelled([*parts, probes])
    assert found.seconds.sum() == pytest.approx(joined([*parts, probes]).seconds.sum(), rel=1e-12)
    assert (found.seconds[-30:] == 1.0).all()
    ends = np.cumsum([0, *map(len, parts)])
    left = [found.seconds[a:b].sum() / one.sum() for a, b, one in zip(ends, ends[1:], usual, strict=False)]
    assert np.ptp(left) < 0.02 * np.mean(left)
    assert np.min(left) > np.min(paces) * 0.97
    assert np.max(left) < np.max(paces) * 1.03


@settings(max_examples=5)
@given(tau=step_times["affine"], seed=st.integers(0, 2**32))
def test_affine_terms_are_found_again(tau: Affine, seed: int) -> None:
    fitted = fit_steps(steps_of(tau, np.random.default_rng(seed)), kinds=["affine"]).step_time
    assert isinstance(fitted, Affine)
    at = 32, 32 * 300  # in shares of a step there
    step_s = float(tau(*at))
    assert abs(fitted.a_s - tau.a_s) < 0.02 * step_s
    assert abs(fitted.b_s - tau.b_s) * at[0] < 0.03 * step_s
    assert abs(fitted.c_s - tau.c_s) * at[1] < 0.03 * step_s


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_every_kind_is_exact(kind: str) -> None:
    tau: StepTime = {
        "affine": Affine(6e-3, 1.5e-4, 5e-7),
        "power": Power(4e-3, 8e-4, 0.5, 3e-7),
        "max_affine": MaxAffine(((9e-3, 0, 2e-7), (3e-3, 3e-4, 4e-7))),
        "table": Table([1, 2, 4, 8, 16, 32, 64], [5e-3, 5.2e-3, 6e-3, 6.2e-3, 9e-3, 9.5e-3, 15e-3], 3e-7),
        "padded": Table([1, 2, 4, 8, 24, 40, 64], [5e-3, 5.2e-3, 6e-3, 7e-3, 9e-3, 12e-3, 15e-3], 3e-7, True),
    }[kind]
    steps = steps_of(tau, np.random.default_rng(3), noise=0, outliers=0)
    fit = fit_steps(steps)
    assert fit.best.kind == kind, str(fit)
    some = steps.running > 0
    predicted = fit.step_time(steps.running[some], steps.kv_tokens[some])
    assert np.allclose(predicted, tau(steps.running[some], steps.kv_tokens[some]), rtol=3e-3)
    assert fit.total_ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "tau"),
    [
        ("affine", Affine(6e-3, 1.5e-4, 5e-7)),
        ("power", Power(4e-3, 8e-4, 0.5, 3e-7)),
        ("max_affine", MaxAffine(((9e-3, 0, 2e-7), (3e-3, 3e-4, 4e-7)))),
        ("table", Table([1, 2, 4, 8, 16, 32, 64], [5e-3, 5e-3, 6e-3, 6e-3, 9e-3, 9e-3, 15e-3], 3e-7)),
        ("padded", Table([1, 8, 16, 32, 48, 64], [5e-3, 6e-3, 8e-3, 11e-3, 13e-3, 15e-3], 3e-7, True)),
    ],
)
def test_the_right_kind_is_chosen_under_noise(kind: str, tau: StepTime) -> None:
    for seed in range(2):
        fit = fit_steps(steps_of(tau, np.random.default_rng(seed)))
        assert fit.best.kind == kind, str(fit)
        assert [one.kind for one in fit.kinds] == list(KINDS)
        least = min(one.error for one in fit.kinds)
        assert all(one.excess == pytest.approx(one.error - least, abs=1e-12) for one in fit.kinds)


def test_outliers_hardly_move_a_fit() -> None:
    tau = Affine(6e-3, 1.5e-4, 5e-7)
    clean, disturbed = (
        fit_steps(steps_of(tau, np.random.default_rng(1), outliers=share), kinds=["affine"]).step_time
        for share in (0.0, 0.1)
    )
    assert float(disturbed(32, 9600)) == pytest.approx(float(clean(32, 9600)), rel=0.02)


def test_the_total_can_be_matched() -> None:
    steps = steps_of(Affine(6e-3, 1.5e-4, 5e-7), np.random.default_rng(1), outliers=0.1)
    usual, matched = (fit_steps(steps, kinds=["table"], match_total=match) for match in (False, True))
    assert usual.total_ratio > 1.1
    predicted = np.where(
        steps.running > 0,
        matched.step_time(steps.running, steps.kv_tokens),
        matched.best.form.idle_s,
    )
    predicted = predicted + steps.other_tokens / matched.prefill_tokens_per_s
    assert predicted.sum() == pytest.approx(steps.seconds.sum(), rel=1e-9)
    for kind in KINDS:
        fit = fit_steps(steps, kinds=[kind], match_total=True)
        at = fit_steps(steps, kinds=[kind])
        assert float(fit.step_time(9, 999)) == pytest.approx(
            at.total_ratio * float(at.step_time(9, 999)), rel=1e-9
        )


def test_a_given_prefill_rate_leaves_prefill_out() -> None:
    steps = steps_of(Affine(6e-3, 1.5e-4, 5e-7), np.random.default_rng(1))
    wrong = Steps.of(
        steps.running, steps.kv_tokens, steps.other_tokens, steps.seconds + 7 * (steps.other_tokens > 0)
    )
    first, second = (fit_steps(one, prefill_tokens_per_s=1e4, kinds=["affine"]) for one in (steps, wrong))
    assert first == second
    assert first.prefill_given
    assert first.prefill_tokens_per_s == 1e4


def test_condensed_points_are_medians_of_like_steps() -> None:
    """Against the definition, cell by cell."""
    steps = steps_of(Affine(6e-3, 1.5e-4, 5e-7), np.random.default_rng(1), batches=1, most=8)
    points = condense(steps)

    def key(i: int) -> tuple[int, int, int]:
        context = max(steps.kv_tokens[i] / max(steps.running[i], 1), 1.0)
        fine = np.log(1.02)
        return (
            int(steps.running[i]),
            int(np.floor(np.log(context) / fine)),
            int(np.ceil(np.log1p(steps.other_tokens[i]) / fine)),
        )

    cells = {
        k: list(members) for k, members in itertools.groupby(sorted(range(len(steps)), key=key), key=key)
    }
    assert len(points) == len(cells)
    for i, members in enumerate(cells[k] for k in sorted(cells)):
        m = len(members)
        assert points.seconds[i] == pytest.approx(np.median(steps.seconds[members]))
        assert points.kv_tokens[i] == pytest.approx(steps.kv_tokens[members].mean())
        assert points.weight[i] == pytest.approx(m / (1 + m / 10))


@given(
    st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 9)), min_size=1, max_size=20),
)
def test_weighted_median(pairs: list[tuple[float, int]]) -> None:
    values, weight = np.array([v for v, _ in pairs]), np.array([float(w) for _, w in pairs])
    median = weighted_median(values, weight)
    assert weight[values < median].sum() <= weight.sum() / 2
    assert weight[values > median].sum() <= weight.sum() / 2


@given(st.integers(2, 40), st.integers(0, 2**32))
@settings(max_examples=50)
def test_tables_never_fall_whatever_is_measured(most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = rng.integers(1, most + 1, 60)
    n[:2] = 1, most
    kv = n * rng.integers(10, 1000, 60).astype(float)
    points = Points(n, kv, rng.integers(0, 3, 60) * 50.0, rng.lognormal(-5, 1, 60), np.ones(60))
    for fit in (fit_table, fit_padded):
        table = fit(points).step_time  # construction refuses seconds that fall
        assert isinstance(table, Table)
        assert table.c_s >= 0


def refused(steps: Callable[[], Steps], *words: str, **options: float) -> None:
    with pytest.raises(InputError) as error:
        fit_steps(steps(), **options)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words), str(error.value)


def grid(n: Ints, context: Ints) -> tuple[Ints, Floats]:
    running, per = (part.reshape(-1) for part in np.meshgrid(n, context))
    return running, (running * per).astype(np.float64)


def test_too_little_is_refused() -> None:
    n, kv = grid(np.array([1, 2, 4, 8]), np.arange(100, 1100, 100))
    seconds = 5e-3 + 1e-4 * n + 1e-7 * kv
    zero = 0 * n
    refused(lambda: Steps.of(n[:9], kv[:9], zero[:9], seconds[:9]), "9 steps", "at least 20")
    refused(lambda: Steps.of(n, kv, zero, seconds), "no step has prefill")
    two = n <= 2
    few = Steps.of(n[two], kv[two], zero[two], seconds[two])
    refused(lambda: few, "1, 2 running requests", "at least 3", prefill_tokens_per_s=1e4)
    same = np.tile(100.0 * n, 1)
    refused(lambda: Steps.of(n, same, zero, seconds), "context", prefill_tokens_per_s=1e4)
    refused(lambda: Steps.of(n, kv, zero, seconds), "positive number", prefill_tokens_per_s=-1.0)
    with pytest.raises(InputError, match="expected one of affine"):
        fit_steps(few, kinds=["cubic"])
    for bad, words in (
        (lambda: Steps.of([1], [5], [0], [0.0]), "positive time"),
        (lambda: Steps.of([3], [2], [0], [1.0]), "at least one token"),
        (lambda: Steps.of([0], [0], [0], [1.0]), "running request or other tokens"),
        (lambda: Steps.of([1, 2], [5], [0], [1.0]), "expected 2 values"),
        (lambda: Steps.of([1], [5], [0], [np.nan]), "finite"),
    ):
        with pytest.raises(InputError, match=words):
            bad()


# ---- files and the command ------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    steps = steps_of(Affine(6e-3, 1.5e-4, 5e-7), np.random.default_rng(1))
    frame = pl.DataFrame(
        {name: getattr(steps, name) for name in ("running", "kv_tokens", "other_tokens", "seconds")}
    )
    frame.write_csv(tmp_path / "steps.csv")
    frame.write_parquet(tmp_path / "steps.parquet")
    return tmp_path / "steps.csv"


def fit_command(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        app(["fit", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_a_table_becomes_a_profile(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.toml"
    like = ("--like", "h100-llama-3.1-8b", "--tp", "1")
    assert fit_command(table, "--out", out, "--kind", "affine", "--kind", "power", *like) == 0
    assert "affine *" in capsys.readouterr().out
    profile, base = read_profile(out), load_engine("h100-llama-3.1-8b")
    assert profile.name == "mine"
    assert list(profile.shapes) == [1]
    shape = profile.shape(1)
    assert shape.kv_capacity_tokens == base.shape(1).kv_capacity_tokens
    assert float(shape.step_time(32, 9600)) == pytest.approx(6e-3 + 4.8e-3 + 4.8e-3, rel=0.02)
    assert shape.host_s == pytest.approx(ALONE_S, rel=0.5)
    assert "held out" in shape.fit
    assert profile.sources == ("fitted by tailopt to the steps in steps.csv",)
    assert fit_command(table, "--out", out, *like) == 2
    assert "exists" in capsys.readouterr().err
    parquet = table.with_suffix(".parquet")
    both = ("--kind", "affine", "--force")
    assert fit_command(parquet, "--out", tmp_path / "too.toml", *both, *like, "--name", "mine") == 0
    assert read_profile(tmp_path / "too.toml").shape(1).step_time == shape.step_time


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "missing: running, kv_tokens, seconds"),
        ("running,kv_tokens,seconds\n1,x,1\n", "column kv_tokens"),
        ("running,kv_tokens,seconds\n1,9,-1\n", "steps: seconds[0]"),
        ("running,kv_tokens,seconds\n1,9,0.1\n", "1 steps"),
        ("", "not a table"),
    ],
)
def test_bad_tables_are_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text(text)
    assert fit_command(tmp_path / "bad.csv") == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_what_is_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text(json.dumps({"kind": "header"}) + "\n")
    assert fit_command(tmp_path / "run.jsonl") == 2
    assert "expected a record of a replay" in capsys.readouterr().err
    assert fit_command(tmp_path / "nowhere.csv") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_table_of_one_of_several_shapes_must_say_which(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = ("--like", "h200-llama-3.1-70b-fp8-vllm", "--kind", "affine")
    assert fit_command(table, "--out", tmp_path / "x.toml", *several) == 2
    assert "--tp" in capsys.readouterr().err
