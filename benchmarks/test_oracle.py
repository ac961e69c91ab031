"""The oracle on batches of the bundled default trace."""

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tailopt.engine.catalogue import load_engine
from tailopt.engine.step_time import Affine
from tailopt.oracle.any_bound import lower_any_s
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.oracle.staircase import best_filling, staircase_bound
from tailopt.oracle.units import lines_of, units_of
from tailopt.plan import Engine, Fleet
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import sample_batches

SIZES = [(32, 8), (64, 8)]


def problem(
    prompts: int, samples: int, *, atomic: bool, engine: str = "h100-llama-3.1-8b", tp: int = 1
) -> Problem:
    trace = load_bundled("gpqa-deepseek-reasoner")
    (batch,) = sample_batches(trace, batches=1, prompts=prompts, samples=samples, seed=0)
    return Problem(batch.trace, Fleet(load_engine(engine), (Engine(tp),) * 8, 8 * tp), atomic)


@pytest.mark.parametrize("engines", [8])
@pytest.mark.parametrize(("prompts", "samples"), SIZES)
def test_staircase_bound_and_filling(
    benchmark: BenchmarkFixture, prompts: int, samples: int, engines: int
) -> None:
    """Free requests: the bound, and the filling that bisection finds, from sorted units on."""
    asked = problem(prompts, samples, atomic=False)
    units, lines = units_of(asked), lines_of(asked, asked.trace.n_requests)
    tau = asked.fleet.shape_of(0).step_time
    assert isinstance(tau, Affine)

    def both() -> None:
        bound = staircase_bound(units, lines, engines, within_s=np.inf)
        best_filling(
            units.longest.astype(float),
            units.tokens.astype(float),
            units.context.astype(float),
            units.prefill_s,
            np.array([tau.a_s, tau.b_s, tau.c_s]),
            np.array([units.max_running, units.kv_capacity_tokens], dtype=float),
            engines,
            bound.lower_s,
            1e-7,
        )

    benchmark.pedantic(both, rounds=50, warmup_rounds=1)


@pytest.mark.parametrize("atomic", [True, False], ids=["groups", "free"])
@pytest.mark.parametrize(
    ("engine", "tp"), [("h100-llama-3.1-8b", 1), ("h100-gpt-oss-120b-vllm", 2), ("a100-llama-7b", 1)]
)
def test_solve(benchmark: BenchmarkFixture, engine: str, tp: int, atomic: bool) -> None:
    asked = problem(64, 8, atomic=atomic, engine=engine, tp=tp)
    found = benchmark.pedantic(solve, (asked,), rounds=5, warmup_rounds=1)
    benchmark.extra_info.update(gap=found.gap, status=found.status)


def test_lower_any(benchmark: BenchmarkFixture) -> None:
    asked = problem(64, 8, atomic=False)
    benchmark.pedantic(lower_any_s, (asked.trace, asked.fleet), rounds=10, warmup_rounds=1)
