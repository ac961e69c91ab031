"""The scripts in papers/ and benchmarks/simulators: they run, and compute what their pages say."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine

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
