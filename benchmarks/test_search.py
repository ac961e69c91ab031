"""The staircase search with its fixed amount of work, on batches that bound and filling leave open."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from search_table import CURVES, GROUPED, fleet_of, free

from tailopt.oracle.problem import Problem
from tailopt.oracle.search import search
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import sample_batches


@pytest.mark.parametrize(("requests", "engines"), [(100, 4), (512, 8), (4096, 16)])
@pytest.mark.parametrize("curve", CURVES)
def test_free_requests(benchmark: BenchmarkFixture, requests: int, engines: int, curve: str) -> None:
    problem = Problem(free(requests, 0, True, []), fleet_of(CURVES[curve], engines))
    found = benchmark.pedantic(search, (problem,), rounds=3, warmup_rounds=1)
    benchmark.extra_info.update(gap=found.gap, status=found.status)


@pytest.mark.parametrize("curve", CURVES)
def test_groups(benchmark: BenchmarkFixture, curve: str) -> None:
    (batch,) = sample_batches(load_bundled(GROUPED[1]), batches=1, prompts=64, samples=8, seed=0)
    problem = Problem(batch.trace, fleet_of(CURVES[curve], 8), atomic=True)
    found = benchmark.pedantic(search, (problem,), rounds=3, warmup_rounds=1)
    benchmark.extra_info.update(gap=found.gap, status=found.status)
