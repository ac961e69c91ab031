"""The scripts in papers/ and benchmarks/simulators: they run, and compute what their pages say."""

import importlib.util
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.plan import View
from tailopt.policies import resolve_policy
from tailopt.policies.units import plan_units
from tailopt.predict.prompt_distribution import prompt_distribution
from tailopt.simulate import simulate
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import Batch, sample_batches

ROOT = Path(__file__).parent.parent
CLOSED_LOOP = ROOT / "papers" / "closed_loop"


def loaded(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def closed_loop() -> ModuleType:
    return loaded("closed_loop_table", CLOSED_LOOP / "table.py")


def shape(kv_capacity_tokens: int = 10**6) -> ShapeProfile:
    return ShapeProfile(1, Affine(5e-3, 1e-4, 1e-7), 2e4, kv_capacity_tokens, max_running=64)


def test_one_request_in_flight(closed_loop: ModuleType) -> None:
    """Alone, a request prefills and then decodes at tau(1, context), whatever is counted."""
    prompt, output = 300, 40
    tau = Affine(5e-3, 1e-4, 1e-7)(1, prompt + 1 + np.arange(output))
    for steady in (True, False):
        found = closed_loop.play(shape(), closed_loop.Loop(1, prompt, output), steady=steady)
        assert found.tpot_s == pytest.approx(tau[1:].mean(), rel=1e-9)
        assert found.ttft_s == pytest.approx((prompt - 1) / 2e4 + tau[0], rel=1e-9)


def test_little(closed_loop: ModuleType) -> None:
    """In the steady state C = throughput x life, and a full cache shows in the TTFT, not in the number."""
    loop = closed_loop.Loop(16, 400, 200, spread=0.2)
    roomy = closed_loop.mean_of(shape(), loop, steady=True)
    tight = closed_loop.mean_of(shape(4_000), loop, steady=True)
    naive = float(Affine(5e-3, 1e-4, 1e-7)(16, 16 * (360 + 90)))
    assert naive < roomy.tpot_s < naive + 16 * 360 / 180 / 2e4 * 1.1
    assert (roomy.preemptions, roomy.ttft_s < 0.1 < tight.ttft_s) == (0, True)


def test_the_page_gives_the_numbers(closed_loop: ModuleType) -> None:
    """One engine, quick to compute: its lines in README.md, to half a per cent."""
    (recipe,) = (r for r in closed_loop.fitting.RECIPES if r.name == "h200-deepseek-r1-sglang")
    table = closed_loop.with_errors(list(closed_loop.rows_of(recipe)))
    parts = list(closed_loop.report(table))
    page = (CLOSED_LOOP / "README.md").read_text("utf-8")
    pattern = rf"^\| ([a-z ]+) \| {recipe.name} \| (\d+) \|(.*)\|$"
    said, found = (re.findall(pattern, text, re.MULTILINE) for text in (page, parts[0]))
    assert [line[:2] for line in said] == [line[:2] for line in found]
    assert len(said) == 3
    for (*_, page_cells), (*_, cells) in zip(said, found, strict=True):
        numbers = [[float(number) for number in re.findall(r"\d+\.\d", text)] for text in (page_cells, cells)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.5)
    in_sample = table.filter(table["fitted_on"] == "all")
    median = {name: in_sample[f"{name}_tpot"].abs().median() for name in closed_loop.PREDICTIONS}
    assert median["benchmark"] < median["steady"] < median["naive"]


def test_our_side_of_the_simulators_benchmark() -> None:
    """Steps of constant time and room for all: a request ends with the step that its length says."""
    script = loaded("simulators_run", ROOT / "benchmarks" / "simulators" / "run.py")
    case = script.Case.of(30, 3, script.ROOMY)
    found = script.tailopt_case(case, least_s=0)
    assert found["finish_s"] == pytest.approx([case.step_s * length for length in case.output_tokens])
    row = script.cells(case, found, found, limit_s=1.0)
    assert f"| {max(case.output_tokens):,} | {np.mean(case.output_tokens):,.1f} | 0 |" in row
    assert "> 1 " in script.cells(case, found | {"error": "out of time"}, found, limit_s=1.0)
    grown = script.growth_case(200, script.TIGHT, "shared")
    assert 0 < grown["use"] < 1
    assert grown["peak_mb"] >= grown["before_mb"] > 10


@pytest.fixture(scope="module")
def best_k() -> ModuleType:
    return loaded("best_k_run", ROOT / "papers" / "best_k" / "run.py")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=2, max_size=9), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_isolations_are_what_they_say(
    best_k: ModuleType, lengths: list[int], engines: int, seed: int
) -> None:
    fleet = best_k.Cell("gpqa-qwen3-max", "MoE", engines, 1, 9, 0).fleet()
    batch = Trace.of([[length] for length in lengths])
    view = View.at_start(batch, fleet, np.array(lengths, float), seed=seed)
    plain, balanced = best_k.isolations(view, balance=False), best_k.isolations(view, balance=True)
    assert [(way.k, way.pool) for way in plain] == [(way.k, way.pool) for way in balanced]
    assert {(way.k, way.pool) for way in plain[1:]} == {
        (k, t) for k in range(1, len(lengths) + 1) for t in range(1, engines)
    }
    for way in plain + balanced:
        finish_s = simulate(batch, fleet, plan_units(view, way.engine_of)).finish_s
        assert way.predicted_s == pytest.approx(finish_s.max(), rel=1e-9)
        for k in {way.k} - {0, len(lengths)}:  # nobody outside the k is longer than one of them
            used = [
                set(way.engine_of[order].tolist())
                for order in np.split(np.argsort(-batch.output_tokens), [k])
            ]
            ties = sorted(lengths)[-k] == sorted(lengths)[-k - 1]
            assert ties or not used[0] & used[1]
            assert len(used[0]) <= way.pool
            assert len(used[1]) <= engines - way.pool
    found = best_k.policies(view)
    named = [resolve_policy(f"top_k(k={way.k}, tail_engines={max(1, way.pool)})") for way in plain]
    assert found["best k, best pool"].predicted_s == pytest.approx(
        min(simulate(batch, fleet, policy(view)).makespan_s for policy in named), rel=1e-9
    )
    assert found["best k, best pool"].predicted_s <= found["best k, one tail engine"].predicted_s


def test_best_k_goes_on_where_it_was_and_gives_the_numbers_of_its_page(
    best_k: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, results = tmp_path / "cells", tmp_path / "results"
    told = ["run.py", "--out", str(out), "--results", str(results), "--groups", "3", "--curves", "dense"]
    told += ["--traces", "gpqa-qwen3-max"]
    monkeypatch.setattr(sys, "argv", [*told, "--engines", "2"])
    best_k.main()
    (first,) = out.iterdir()
    kept = first.read_bytes()
    monkeypatch.setattr(sys, "argv", [*told, "--engines", "2", "4"])
    best_k.main()
    assert first.read_bytes() == kept  # not computed again: CPU seconds would differ
    names = {"RESULTS.md", "results.json", "ecdf.svg"}
    before = {name: (results / name).read_bytes() for name in names}
    first.unlink()
    best_k.main()
    assert {name: (results / name).read_bytes() for name in names} == before
    found = json.loads(before["results.json"])["cells"]
    page = json.loads((ROOT / "papers" / "best_k" / "results.json").read_text("utf-8"))["cells"]
    for cell in found:
        assert all(ratio >= 1 for ratio in cell["ratio"]["lower_s"])
        same = [c for c in page if all(c[k] == cell[k] for k in ("trace", "curve", "engines", "seed"))]
        (of_page,) = same
        assert cell["ratio"]["lower_s"] == pytest.approx(of_page["ratio"]["lower_s"][:3], abs=2e-4)


@pytest.fixture(scope="module")
def lengths() -> ModuleType:
    return loaded("lengths", ROOT / "papers" / "not_knowing" / "lengths.py")


def test_redrawn_samples_are_those_of_the_prompt(lengths: ModuleType) -> None:
    trace = Trace.of([[3, 5, 8, 8], [20, 30, 10, 40], [1, 2, 2, 9]])
    (batch,) = sample_batches(trace, batches=1, prompts=2, samples=2, seed=3)
    drawn = lengths.redrawn(batch, 4000)
    assert drawn.shape == (4000, 4)
    for prompt, name in enumerate(batch.trace.prompt_ids):
        every = np.sort(trace.output_tokens[trace.prompt == int(name)])
        mine = drawn[:, batch.trace.prompt == prompt]
        assert mine.mean() == pytest.approx(every.mean(), rel=0.05)
        has = Counter(every.tolist())
        assert all(Counter(row) <= has for row in mine.tolist())
        assert set(mine.ravel().tolist()) == set(every.tolist())


def gpqa(prompts: int = 16) -> Batch:
    trace = load_bundled("gpqa-deepseek-reasoner")
    (batch,) = sample_batches(trace, batches=1, prompts=prompts, samples=4, seed=3)
    return batch


def test_the_varied_model_starts_at_the_predictors(lengths: ModuleType) -> None:
    batch = gpqa()
    drawn = [draw(batch, np.random.default_rng(1)) for draw in (lengths.varied, prompt_distribution)]
    np.testing.assert_array_equal(*drawn)


def test_parts_of_the_model_do_what_they_say(lengths: ModuleType) -> None:
    batch, top = gpqa(), float(gpqa().history.output_tokens.max())

    def drawn(**parts: float) -> np.ndarray:
        return lengths.varied(batch, np.random.default_rng(1), scenarios=3000, **parts)

    free = drawn(ceiling=np.inf)
    assert free.max() > top == drawn().max()
    assert drawn(ceiling=1.25).max() == np.rint(1.25 * top)
    smooth = drawn(smooth=True)
    assert (smooth <= free).all()
    assert top * 0.95 < smooth.max() <= top
    short = free < top / 3
    np.testing.assert_allclose(smooth[short], free[short], rtol=1e-3, atol=1)
    longer, logs = drawn(jumps=0.01, ceiling=np.inf) / free, np.log(free)
    assert 0.007 < (longer > 1.05).mean() < 0.013
    wide, skewed = np.log(drawn(spread=2.0, ceiling=np.inf)), np.log(drawn(skew=0.3, ceiling=np.inf))
    np.testing.assert_allclose(skewed.mean(axis=0), logs.mean(axis=0), atol=0.05)
    np.testing.assert_allclose(skewed.std(axis=0), logs.std(axis=0), rtol=0.1)
    assert (skew(skewed) - skew(logs)).min() > 0.05
    assert (wide.std(axis=0) > 1.5 * logs.std(axis=0)).all()


def skew(values: np.ndarray) -> np.ndarray:
    away = values - values.mean(axis=0)
    return (away**3).mean(axis=0) / (away**2).mean(axis=0) ** 1.5


def test_borrowed_lengths_lie_about_their_own_prompts_history(lengths: ModuleType) -> None:
    batch, names = gpqa(), lengths.OTHERS[:3]
    drawn = lengths.borrowed(batch, np.random.default_rng(0), scenarios=2000, names=names)
    again = lengths.borrowed(batch, np.random.default_rng(0), scenarios=2000, names=names)
    np.testing.assert_array_equal(drawn, again)
    top = batch.history.output_tokens.max()
    assert drawn.shape == (2000, 64)
    assert drawn.min() >= 1
    assert drawn.max() <= top
    logs, past = np.log(drawn), np.log(batch.history.output_tokens)
    for prompt in range(16):
        mine, own = batch.trace.prompt == prompt, past[batch.history_prompt == prompt]
        if np.exp(own.max()) < top / 3:  # far from the ceiling
            assert np.median(logs[:, mine]) == pytest.approx(own.mean(), abs=0.25)
        columns = logs[:, mine] - logs[:, mine].mean()
        assert columns.mean(axis=0) == pytest.approx(np.zeros(4), abs=0.05)  # exchangeable
    alike = dict(zip(names, map(lengths.lenders_of, names), strict=True))
    assert all(each.followed.shape == (len(each.alike), lengths.SAMPLES) for each in alike.values())
    assert all(abs(each.followed.mean()) < 0.05 < 0.9 < each.followed.std() < 1.4 for each in alike.values())


def test_a_batchs_own_trace_lends_nothing(lengths: ModuleType) -> None:
    batch, rng = gpqa(), np.random.default_rng
    names = (batch.trace.name, *lengths.OTHERS[:2])
    own, none = (lengths.borrowed(batch, rng(0), scenarios=9, names=asked) for asked in (names, names[1:]))
    np.testing.assert_array_equal(own, none)


def test_calibration_of_a_true_model(lengths: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the truth is drawn from the model, shares beyond a quantile are one minus it."""
    monkeypatch.syspath_prepend(str(ROOT / "papers" / "not_knowing"))
    models = loaded("not_knowing_models", ROOT / "papers" / "not_knowing" / "models.py")
    batch = gpqa(32)
    truths = lengths.varied(batch, np.random.default_rng(8), scenarios=60).astype(np.int64)
    shares = [
        models.beyond(replace(batch, trace=replace(batch.trace, output_tokens=truth)), lengths.varied)
        for truth in truths
    ]
    # the ceiling has weight, which counts as not beyond
    assert (np.abs(np.mean(shares, axis=0) - [0.5, 0.1, 0.01]) < [0.04, 0.03, 0.006]).all()
    assert models.longest(np.array([[3, 9, 4, 1]]), np.array([1, 0, 1, 0])).tolist() == [[9, 4]]


def test_how_close_one_can_come_is_the_mean_over_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "papers" / "not_knowing"))
    not_knowing = loaded("not_knowing_table", ROOT / "papers" / "not_knowing" / "table.py")
    ends = [f"{of}price, at {end}" for of in ("", "borrowed: ", "redrawn: ") for end in ("least", "most")]
    rows = [[dict(zip(ends, start + np.arange(6) / 10, strict=True))] for start in (1.0, 1.1)]
    said = ["1.050", "1.150", "1.250", "1.350", "1.450", "1.550"]
    assert re.findall(r"\d\.\d+", not_knowing.closest(rows)) == said
