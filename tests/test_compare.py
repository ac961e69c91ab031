"""compare: pairing, bounds, the summary's formulas, and what is the same for the same seed."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from strategies import fleets, step_times

from tailopt.cli import main
from tailopt.compare import COLUMNS, Comparison, bootstrap_interval, check_work, compare, t_interval
from tailopt.engine.catalogue import bundled_engines, load_engine
from tailopt.errors import InputError
from tailopt.plan import DROPPED, Fleet, Plan, ReviewPoint, View
from tailopt.policies import POLICIES, NamedPolicy, ignores_predictions
from tailopt.policies.uniform import uniform
from tailopt.report.machine import to_csv, to_json
from tailopt.report.terminal import comparison_report
from tailopt.simulate import simulate
from tailopt.spec import Spec
from tailopt.trace import Trace

DYNAMIC = {"shared_queue", "dyn", "split", "steal", "rebalance"}


def small_trace(seed: int, prompts: int = 8, samples: int = 4) -> Trace:
    lengths = np.random.default_rng(seed).lognormal(5, 1, (prompts, samples)).astype(int) + 1
    return Trace.of(lengths.tolist(), prompt_tokens=50)


def run(
    policies: list[str],
    predictors: list[str],
    *,
    trace: Trace | None = None,
    shape: str = "3xTP1",
    engine: str = "h100-llama-3.1-8b",
    batches: int = 4,
    samples: int = 2,
    seed: int = 0,
    atomic: bool = True,
) -> Comparison:
    fleet = Fleet.of(load_engine(engine), shape)
    trace = small_trace(0) if trace is None else trace
    return compare(
        trace,
        fleet,
        policies,
        predictors,
        batches=batches,
        prompts=5,
        samples=samples,
        seed=seed,
        atomic=atomic,
    )


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["1xTP", "3xTP", "9xTP"]),
    st.sampled_from(bundled_engines()),
    st.booleans(),
)
def test_no_policy_beats_the_bounds(seed, shape, engine, atomic):
    tp = min(load_engine(engine).shapes)
    found = run(
        list(POLICIES),
        ["truth", "noisy_truth", "prompt_mean"],
        trace=small_trace(seed),
        shape=f"{shape}{tp}",
        engine=engine,
        batches=1,
        seed=seed,
        atomic=atomic,
    )
    rows = found.rows
    assert (rows["makespan_s"] >= rows["lower_any_s"] * (1 - 1e-9)).all()
    static = rows.filter(~pl.col("policy").is_in(DYNAMIC))
    assert (static["makespan_s"] >= static["lower_s"] * (1 - 1e-9)).all()
    assert (rows["upper_s"] >= rows["lower_s"] * (1 - 1e-9)).all()


@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_no_policy_beats_the_bounds_on_any_fleet(data, atomic):
    """Any step time, mixed shapes, and caches and concurrency limits that make requests wait."""
    pairs = st.lists(st.integers(1, 40), min_size=2, max_size=2)
    trace = Trace.of(data.draw(st.lists(pairs, min_size=1, max_size=5)), prompt_tokens=3)
    fleet = data.draw(fleets(trace, step_times()))
    drawn = {"batches": 1, "prompts": trace.n_prompts, "samples": 2, "seed": 0}
    rows = compare(trace, fleet, list(POLICIES), ["truth", "noisy_truth"], **drawn, atomic=atomic).rows
    assert (rows["makespan_s"] >= rows["lower_any_s"] * (1 - 1e-9)).all()
    static = rows.filter(~pl.col("policy").is_in(DYNAMIC))
    assert (static["makespan_s"] >= static["lower_s"] * (1 - 1e-9)).all()


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.sampled_from([*POLICIES, "top_k(k=2)"]), min_size=1, max_size=4),
    st.lists(st.sampled_from(["truth", "noisy_truth", "constant", "prompt_mean"]), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_a_row_does_not_depend_on_what_else_is_compared(policies, predictors, batches, seed):
    """Pairing: batch, predictions and random order are those of the batch, whoever asks."""
    whole = run([*POLICIES, "top_k(k=2)"], ["prompt_mean", "truth", "constant", "noisy_truth"], seed=seed)
    part = run(policies, predictors, batches=batches, seed=seed)
    key = ["batch", "policy", "predictor"]
    expected = whole.rows.join(part.rows.select(key), on=key, how="semi").sort(key)
    assert part.rows.sort(key).equals(expected)


def test_rows_are_tidy():
    found = run(["lpt", "shared_queue", "lpt"], ["truth", "constant", "truth"])
    assert tuple(found.rows.columns) == COLUMNS
    cells = [("uniform", "-"), ("lpt", "truth"), ("lpt", "constant"), ("shared_queue", "-")]
    assert found.rows.select("policy", "predictor").unique(maintain_order=True).rows() == cells
    assert found.rows.height == 4 * len(cells)
    assert found.summary.select("policy", "predictor").rows() == cells
    per_batch = found.rows.group_by("batch").agg(pl.col("lower_s", "upper_s", "lower_any_s").n_unique())
    assert (per_batch.drop("batch").max_horizontal() == 1).all()
    assert found.rows["idle_share"].is_between(0, 1).all()


def test_the_baseline_stands_where_it_is_named():
    order = run(["lpt", "uniform"], ["truth"]).summary["policy"].to_list()
    assert order == ["lpt", "uniform"]


def test_the_summary_in_plain_python():
    found = run(["lpt", "top_k"], ["truth", "noisy_truth"], batches=6)
    rows = found.rows.to_dicts()
    base = {row["batch"]: row["makespan_s"] for row in rows if row["policy"] == "uniform"}
    for line in found.summary.to_dicts():
        mine = [r for r in rows if (r["policy"], r["predictor"]) == (line["policy"], line["predictor"])]
        n = len(mine)
        logs = [math.log(base[row["batch"]] / row["makespan_s"]) for row in mine]
        mean = sum(logs) / n
        half = 2.570581835636314 * math.sqrt(sum((x - mean) ** 2 for x in logs) / (n - 1) / n)  # t, 5 d.o.f.
        assert n == line["batches"] == 6
        assert line["makespan_s"] == pytest.approx(sum(row["makespan_s"] for row in mine) / n)
        assert line["over_static"] == pytest.approx(
            sum(row["makespan_s"] / row["lower_s"] for row in mine) / n
        )
        assert line["over_any"] == pytest.approx(
            sum(row["makespan_s"] / row["lower_any_s"] for row in mine) / n
        )
        assert line["idle_share"] == pytest.approx(sum(row["idle_share"] for row in mine) / n)
        assert line["speedup"] == pytest.approx(math.exp(mean))
        assert line["speedup_t_low"] == pytest.approx(math.exp(mean - half))
        assert line["speedup_t_high"] == pytest.approx(math.exp(mean + half))
        assert line["speedup_boot_low"] <= line["speedup"] <= line["speedup_boot_high"]


def test_the_same_plan_has_speed_up_one():
    line = run(["top_k(k=0)"], ["truth"]).summary.row(1, named=True)
    assert line["speedup"] == line["speedup_t_low"] == line["speedup_boot_high"] == 1.0


def test_one_batch_has_no_interval():
    for line in run(["lpt"], ["truth"], batches=1).summary.to_dicts():
        assert line["speedup_t_low"] is line["speedup_t_high"] is None
        assert line["speedup_boot_low"] is line["speedup_boot_high"] is None


def test_intervals_cover_as_they_say():
    """2000 times 12 batches with a true ratio of 1.1: the t-interval holds it 95 % of the time."""
    rng = np.random.default_rng(0)
    picks = rng.integers(12, size=(500, 12))
    logs = rng.normal(math.log(1.1), 0.2, size=(2000, 12))
    t_hits = np.mean([low <= 1.1 <= high for low, high in map(t_interval, logs)])
    boot_hits = np.mean([low <= 1.1 <= high for low, high in (bootstrap_interval(x, picks) for x in logs)])
    assert t_hits == pytest.approx(0.95, abs=0.015)
    assert boot_hits == pytest.approx(0.91, abs=0.03)  # known to be short with 12 batches


@pytest.mark.parametrize("atomic", [True, False])
def test_same_seed_same_bytes(atomic):
    first, again = (run(["best_k", "shared_queue"], ["noisy_truth"], atomic=atomic) for _ in range(2))
    assert to_json(first) == to_json(again)
    assert to_csv(first) == to_csv(again)
    other = run(["best_k", "shared_queue"], ["noisy_truth"], atomic=atomic, seed=1)
    assert to_csv(first) != to_csv(other)


def test_json_and_csv_hold_the_same_rows():
    found = run(["lpt"], ["truth"])
    document = json.loads(to_json(found))
    assert pl.DataFrame(document["rows"]).equals(found.rows)
    assert pl.read_csv(to_csv(found).encode()).equals(found.rows)
    assert [line["policy"] for line in document["summary"]] == ["uniform", "lpt"]
    assert document["trace"]["sha256"] == small_trace(0).sha256
    assert document["fleet"] == {"shape": "3xTP1", "gpus": 3}


def test_progress_counts_batches():
    calls: list[tuple[int, int]] = []
    fleet = Fleet.of(load_engine("h100-llama-3.1-8b"), "2xTP1")
    compare(
        small_trace(0), fleet, ["lpt"], ["truth"], batches=3, prompts=2, samples=2, seed=0, atomic=True,
        progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_a_function_is_a_policy_too():
    found = run([NamedPolicy(Spec("mine", uniform))], ["truth"])  # type: ignore[list-item]
    assert found.summary.row(1, named=True)["policy"] == "mine"
    assert found.summary.row(1, named=True)["speedup"] == 1.0


def test_a_policy_without_the_predictor_it_needs():
    with pytest.raises(InputError, match="policy lpt: needs predicted lengths, expected at least one"):
        run(["lpt"], [])
    assert run(["round_robin"], []).summary.height == 2


def test_a_request_that_fits_no_engine():
    trace = Trace.of([[10, 10]] * 7 + [[10, 10**9]])
    with pytest.raises(InputError, match=r"needs 1000000\d* tokens of KV cache, engine \d+ .* holds"):
        run(["lpt"], ["truth"], trace=trace, batches=20)


@ignores_predictions
def cut_off(view: View) -> Plan:
    """All but the first request may generate one token."""
    return replace(uniform(view), max_tokens=[10**6] + [1] * (view.n_requests - 1))


@ignores_predictions
def give_up(view: View) -> Plan:
    """Whatever runs after a second is given up."""
    return replace(uniform(view), deadline_s=1.0)


@ignores_predictions
def never_begin(view: View) -> Plan:
    """All is given up at once, so the makespan is 0."""
    return replace(uniform(view), deadline_s=0.0)


@ignores_predictions
def drop_one(view: View) -> Plan:
    """The longest is dropped when it is the last."""
    if view.is_start:
        return replace(uniform(view), review=(ReviewPoint("unfinished", 1),))
    return Plan(view.fleet.engines, [DROPPED], [0])


def test_a_policy_that_leaves_work_undone_is_refused() -> None:
    """Else it would be the fastest of all: output tokens are held equal."""
    trace = small_trace(0)
    longest = 0
    for policy in (cut_off, give_up, never_begin, drop_one):
        with pytest.raises(InputError) as caught:
            run([NamedPolicy(Spec("short", policy))], [], trace=trace)  # type: ignore[list-item]
        line = str(caught.value)
        assert line.startswith("policy short, batch 0: ")
        assert "requests did not get all their tokens" in line
        assert "\n" not in line
        longest = max(longest, len(line))
    assert longest < 200


def test_how_much_was_not_generated() -> None:
    trace = Trace.of([[5, 7], [9, 11]], prompt_tokens=3)
    fleet = Fleet.of(load_engine("h100-llama-3.1-8b"), "1xTP1")
    plan = Plan(fleet.engines, [0] * 4, range(4), max_tokens=[5, 6, 99, 1])
    with pytest.raises(
        InputError, match=r"policy p under truth, batch 3: 2 of 4 requests .* 11 of 32 tokens were not"
    ):
        check_work(simulate(trace, fleet, plan), trace, 3, "p", "truth")
    whole = simulate(trace, fleet, replace(plan, max_tokens=[5, 7, 9, 11]))
    check_work(whole, trace, 3, "p")
    with pytest.raises(InputError, match=r"policy p, batch 3: took 0\.0 s"):
        check_work(replace(whole, finish_s=np.zeros(4)), trace, 3, "p")


@pytest.mark.parametrize("output", ["--json", "--csv", "--quiet"])
def test_the_command_refuses_it_too(output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.py").write_text(
        "from dataclasses import replace\nfrom tailopt.policies.uniform import uniform\n"
        "def f(view): return replace(uniform(view), max_tokens=[1] * view.n_requests)\n"
    )
    spec = f"{tmp_path / 'short.py'}:f"
    with pytest.raises(SystemExit) as ended:
        main(["compare", "--policy", spec, "--predictor", "truth", "--batches", "1", output])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert f"policy {spec} under truth, batch 0: " in err
    assert "did not get all their tokens" in err


def test_a_policy_is_asked_once_at_the_start() -> None:
    asked: list[bool] = []

    @ignores_predictions
    def watch(view: View) -> Plan:
        asked.append(view.is_start)
        return (
            replace(uniform(view), review=(ReviewPoint("unfinished", 1),)) if view.is_start else uniform(view)
        )

    run([NamedPolicy(Spec("watch", watch))], [], batches=2)  # type: ignore[list-item]
    assert asked == [True, False, True, False]


def test_the_reports_show_every_shape_that_was_used() -> None:
    """The fleet is of TP1, but one policy switches to TP2."""
    found = run(["dyn(n=3, shape='1xTP2')", "steal"], [], shape="2xTP1", batches=2)
    assert found.degrees == (1, 2)
    assert set(json.loads(to_json(found))["engine"]["step_time"]) == {"TP1", "TP2"}
    console = Console(width=200, file=StringIO())
    console.print(*comparison_report(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for tp in (1, 2):
        assert f"TP{tp}: τ(n, K) = {found.fleet.profile.shape(tp).step_time}" in text
    assert run(["steal"], [], shape="2xTP1", batches=2).degrees == (1,)
