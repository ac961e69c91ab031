"""Certificates where caches are full, and for engines of different shapes: gap after a time limit.

Crowded batches are whole traces, their prompts drawn with replacement; mixed ones are drawn as a rollout
would. ``extra_info`` holds the median and the worst gap of the quick certificate and of ``solve`` on the same
batches in the same run, and the share within 1 and 2 percent. ``TAILOPT_BATCHES`` sets how many are drawn
(default 3).

``python benchmarks/test_capacity.py [ENGINE ...]`` prints a row for each batch; there
the limit, ``TAILOPT_SECONDS``, is one of processor seconds, the same on a busy machine.
"""

import os
import sys
import time

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tailopt.engine.catalogue import load_engine
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.plan import Fleet
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import bootstrap, sample_batches

BATCHES = int(os.environ.get("TAILOPT_BATCHES", "3"))

CROWDED = [  # trace, engine, shape, seconds
    ("gpqa-deepseek-reasoner", "h100-llama-3.1-8b", "8xTP1", 10),
    ("gpqa-deepseek-reasoner", "h100-qwen3-32b-vllm", "8xTP2", 10),
]
MIXED = [  # trace, engine, shape, prompts, samples, seconds
    ("gpqa-deepseek-reasoner", "h100-gpt-oss-120b-vllm", "4xTP2+2xTP4", 64, 4, 10),
    ("gpqa-deepseek-reasoner", "h100-gpt-oss-120b-vllm", "4xTP2+1xTP4", 64, 8, 10),
    ("gpqa-gpt-5-high", "h100-qwen3-235b-fp8-trtllm", "2xTP4+1xTP8", 64, 4, 10),
    ("gpqa-deepseek-reasoner", "h100-qwen3-235b-fp8-trtllm", "2xTP4", 64, 4, 10),
    ("gpqa-deepseek-reasoner", "h100-llama-3.1-8b", "4xTP1+1xTP4", 64, 4, 10),
    ("gpqa-deepseek-reasoner", "h100-llama-3.1-8b", "2xTP2+1xTP4", 64, 4, 10),
    ("gpqa-claude-opus-4-5", "a100-llama-7b", "4xTP1+1xTP4", 64, 4, 10),
]


@pytest.mark.parametrize(("trace", "engine", "shape", "seconds"), CROWDED)
def test_crowded(benchmark: BenchmarkFixture, trace: str, engine: str, shape: str, seconds: int) -> None:
    whole = load_bundled(trace)
    measure(benchmark, [bootstrap(whole, seed=seed) for seed in range(BATCHES)], engine, shape, seconds)


@pytest.mark.parametrize(("trace", "engine", "shape", "prompts", "samples", "seconds"), MIXED)
def test_mixed_shapes(
    benchmark: BenchmarkFixture, trace: str, engine: str, shape: str, prompts: int, samples: int, seconds: int
) -> None:
    drawn = sample_batches(load_bundled(trace), batches=BATCHES, prompts=prompts, samples=samples, seed=0)
    measure(benchmark, [batch.trace for batch in drawn], engine, shape, seconds)


def measure(benchmark: BenchmarkFixture, batches: list[Trace], engine: str, shape: str, seconds: int) -> None:
    fleet = Fleet.of(load_engine(engine), shape)
    problems = [Problem(batch, fleet) for batch in batches]
    solve(problems[0], time_limit_s=0.1)  # compiled
    quick = [solve(problem, method="staircase").gap for problem in problems]

    def all_batches() -> tuple[list[float], list[float]]:
        gaps, walls = [], []
        for problem in problems:
            started = time.perf_counter()
            gaps.append(solve(problem, time_limit_s=seconds).gap)
            walls.append(time.perf_counter() - started)
        return gaps, walls

    gaps, walls = benchmark.pedantic(all_batches, rounds=1)
    benchmark.extra_info.update(
        batches=len(problems),
        quick_median=float(np.median(quick)),
        quick_worst=max(quick),
        median=float(np.median(gaps)),
        worst=max(gaps),
        within_1_percent=float(np.mean(np.array(gaps) <= 1e-2)),
        within_2_percent=float(np.mean(np.array(gaps) <= 2e-2)),
        slowest_s=max(walls),
    )
    assert all(after <= before for after, before in zip(gaps, quick, strict=True))


def main() -> None:
    vars(time)["perf_counter"] = time.process_time
    for trace, engine, shape, _ in CROWDED:
        whole = load_bundled(trace)
        drawn = {"whole": whole, **{f"seed {seed}": bootstrap(whole, seed=seed) for seed in range(BATCHES)}}
        table(trace, engine, shape, drawn)
    for trace, engine, shape, prompts, samples, _ in MIXED:
        some = sample_batches(load_bundled(trace), batches=BATCHES, prompts=prompts, samples=samples, seed=0)
        table(trace, engine, shape, {f"batch {i}": batch.trace for i, batch in enumerate(some)})


def table(trace: str, engine: str, shape: str, batches: dict[str, Trace]) -> None:
    if sys.argv[1:] and engine not in sys.argv[1:]:
        return
    limit_s, fleet = float(os.environ.get("TAILOPT_SECONDS", "10")), Fleet.of(load_engine(engine), shape)
    solve(Problem(next(iter(batches.values())), fleet), time_limit_s=0.1)  # compiled
    for name, module in list(sys.modules.items()):
        if name.startswith("tailopt.oracle") and hasattr(module, "clock"):
            vars(module)["clock"] = time.process_time
    for name, batch in batches.items():
        problem, started = Problem(batch, fleet), time.process_time()
        found = solve(problem, time_limit_s=limit_s)
        print(
            f"{trace} {engine} {shape} {name:8} {found.lower_s:8.2f} .. {found.upper_s:8.2f} s, gap "
            f"{found.gap:.2%} (quick {solve(problem, method='staircase').gap:.1%}), "
            f"{time.process_time() - started:.1f} processor seconds",
            flush=True,
        )


if __name__ == "__main__":
    main()
