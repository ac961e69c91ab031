"""The stochastic optimum: 64 groups of 4 on 8 engines, 200 scenarios."""

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine, Power, StepTime
from tailopt.oracle.stochastic.problem import StochasticProblem
from tailopt.oracle.stochastic.solve import best_plan, solve_stochastic
from tailopt.plan import Engine, Fleet
from tailopt.predict import resolve_predictor
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import sample_batches


def problem(step_time: StepTime) -> StochasticProblem:
    shape = ShapeProfile(1, step_time, 1e300, 10**9, max_running=1024, token_budget=10**9)  # free prefill
    profile = EngineProfile(
        name="curve", hardware="none", model="none", precision="none", engine="none", engine_version="0",
        date="2026-01-01", sources=("a curve",), licence="", kv_bytes_per_token=1, shapes={1: shape},
    )  # fmt: skip
    trace = load_bundled("gpqa-deepseek-reasoner")
    (batch,) = sample_batches(trace, batches=1, prompts=64, samples=4, seed=0)
    drawn = resolve_predictor("prompt_distribution").scenarios(batch)
    assert drawn is not None
    return StochasticProblem(
        batch.trace, Fleet(profile, (Engine(1),) * 8, 8), drawn.astype(np.int64), atomic=True
    )


@pytest.mark.parametrize(
    "step_time", [Affine(6.42e-3, 0.4e-3), Power(6e-3, 4.2e-3, 0.5)], ids=["affine", "moe"]
)
def test_plan(benchmark: BenchmarkFixture, step_time: StepTime) -> None:
    asked = problem(step_time)
    plan = benchmark.pedantic(best_plan, (asked,), rounds=3, warmup_rounds=1)
    benchmark.extra_info.update(value_s=float(asked.makespans_s(plan).mean()))


def test_certificate(benchmark: BenchmarkFixture) -> None:
    """Set OPENBLAS_NUM_THREADS=1: eigenvalues of 64 x 64 matrices gain nothing from threads."""
    found = benchmark.pedantic(solve_stochastic, (problem(Affine(6.42e-3, 0.4e-3)),), rounds=1)
    benchmark.extra_info.update(gap=found.gap, price=found.price)
