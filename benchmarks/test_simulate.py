"""The simulator: growth with the number of requests, and against its own step-by-step definition."""

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.plan import SHARED_QUEUE, Engine, Fleet, Plan
from tailopt.simulate import simulate, simulate_reference
from tailopt.trace import Trace

ENGINES = 64
ROOMY, TIGHT = 10**9, 440_000  # KV tokens of an engine: never full, and full most of the time


def fleet(engines: int, kv_capacity_tokens: int) -> Fleet:
    shape = ShapeProfile(1, Affine(6e-3, 1e-5, 5e-8), 4e4, kv_capacity_tokens, max_running=256)
    profile = EngineProfile(
        "synthetic", "none", "none", "none", "none", "0", "2026-01-01", ("made up",), "none", 1, {1: shape}
    )
    return Fleet(profile, (Engine(1),) * engines, engines)


def batch(requests: int, seed: int = 0) -> Trace:
    """Lognormal lengths, median 2,000, to 16,384 tokens."""
    drawn = np.random.default_rng(seed).lognormal(7.6, 1.0, requests)
    return Trace.of(
        [[int(length)] for length in np.clip(drawn, 1, 16_384)], prompt_tokens=128, synthetic=True
    )


@pytest.mark.parametrize("kv_capacity_tokens", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("queue", ["own", "shared"])
@pytest.mark.parametrize("requests", [10**4, 10**5, 10**6])
def test_growth(benchmark: BenchmarkFixture, requests: int, queue: str, kv_capacity_tokens: int) -> None:
    trace, machines = batch(requests), fleet(ENGINES, kv_capacity_tokens)
    own = np.arange(requests) % ENGINES if queue == "own" else np.full(requests, SHARED_QUEUE)
    plan = Plan(machines.engines, own, np.arange(requests))
    simulate(batch(10), machines, Plan(machines.engines, own[:10], np.arange(10)))  # compile
    run = benchmark.pedantic(simulate, (trace, machines, plan), rounds=3)
    benchmark.extra_info["events"] = len(run.log.engine)
    benchmark.extra_info["preemptions"] = int(run.preemptions.sum())


@pytest.mark.parametrize("simulator", [simulate, simulate_reference], ids=["kernel", "reference"])
def test_against_the_reference(benchmark: BenchmarkFixture, simulator: object) -> None:
    """256 requests of about 200 tokens on 8 engines, short enough for the reference."""
    trace = batch(256)
    trace = Trace.of([[1 + length // 16] for length in trace.output_tokens.tolist()], prompt_tokens=128)
    machines = fleet(8, ROOMY)
    plan = Plan(machines.engines, np.arange(256) % 8, np.arange(256))
    benchmark.group = "256 requests, 8 engines"
    benchmark.pedantic(simulator, (trace, machines, plan), rounds=3, warmup_rounds=1)
