"""Time and gap of the oracle's methods beside general solvers and number partitioning, in one run.

    .venv/bin/pip install -e '.[solvers]' prtpy
    .venv/bin/python benchmarks/peers.py --seconds 10

- *plain CP-SAT*: the integer program as anyone would write it: assignment booleans, a variable for each
  engine's longest request, no bound that is known and no plan to start from;
- the methods of ``solve``: those with solvers start from the staircase bound and its filling;
- *prtpy*: Karmarkar-Karp and MULTIFIT of that package, on seconds that add up (a of the step time ignored);
- *token KK*: k-way largest differencing on token sums, from its definition: what training frameworks balance
  sequence lengths with. Token sums are its own objective: "loads" is the largest token sum over the mean.

"plan" is the gap to the best lower bound that any method of the row proved, "proven" that to the method's
own. Approximation ratios known for number partitioning hold for loads that add up, which these do not.
"""

import argparse
import heapq
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np

from tailopt.arrays import Ints
from tailopt.engine.catalogue import load_engine
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.oracle.bound_and_fill import plan_of
from tailopt.oracle.dp import MOST_UNITS
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import METHODS, solve
from tailopt.oracle.units import units_of
from tailopt.plan import Engine, Fleet
from tailopt.simulate import simulate
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import sample_batches


def instances() -> Iterator[tuple[str, Problem]]:
    """Batches that discriminate: the longest request alone is not what takes longest."""
    yield "15 x 3", Problem(lognormal(15, 1), affine_fleet(3, 1.4e-3))
    yield "256 x 4", Problem(lognormal(256, 1), affine_fleet(4, 1.4e-3))
    yield "512 x 8", Problem(lognormal(512, 1), affine_fleet(8, 1.4e-3))
    yield "64 groups of 8 x 8", Problem(lognormal(512, 8), affine_fleet(8, 0.35e-3), atomic=True)
    (batch,) = sample_batches(
        load_bundled("gpqa-deepseek-reasoner"), batches=1, prompts=32, samples=8, seed=1
    )
    mixed = Fleet.of(load_engine("h100-llama-3.1-8b"), "4xTP1+1xTP4")
    yield "GPQA, 256 x (4 TP1 + 1 TP4)", Problem(batch.trace, mixed)


def lognormal(requests: int, group: int) -> Trace:
    """Lognormal(7.6, 1.0) lengths capped at 16,384."""
    lengths = np.random.default_rng(0).lognormal(7.6, 1.0, (requests // group, group))
    return Trace.of(np.clip(lengths, 1, 16_384).astype(int).tolist(), synthetic=True)


def affine_fleet(engines: int, b_s: float) -> Fleet:
    """Identical engines with a = 10 ms and no limits."""
    shape = ShapeProfile(1, Affine(10e-3, b_s), 1e300, 10**9, 10**6, token_budget=10**9)
    profile = EngineProfile(
        "affine", "-", "-", "-", "-", "-", "2026-01-01", ("a round number",), "-", 1, {1: shape}
    )
    return Fleet(profile, (Engine(1),) * engines, engines)


def largest_differencing(weights: Ints, bins: int) -> Ints:
    """``[n]`` bin of each item: k-way Karmarkar-Karp.

    Each item starts as a partition of its own, with its weight in one bin and nothing in the others. The two
    partitions whose sums are spread widest are merged, the largest bin of one with the smallest of the other,
    until one is left.

    >>> np.bincount(largest_differencing(np.array([8, 7, 6, 5, 4]), 2), [8, 7, 6, 5, 4]).tolist()
    [16.0, 14.0]
    """
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for i, weight in enumerate(weights.tolist()):
        sums: list[tuple[int, list[int]]] = [(weight, [i])] + [(0, []) for _ in range(bins - 1)]
        heapq.heappush(heap, (-weight, i, sums))
    serial = len(weights)
    while len(heap) > 1:
        (_, _, left), (_, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + c, b + d) for (a, b), (c, d) in zip(left, right[::-1], strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    bin_of = np.empty(len(weights), dtype=np.int64)
    for e, (_, items) in enumerate(heap[0][2]):
        bin_of[items] = e
    return bin_of


def prtpy_bins(algorithm: str, weights: Ints, bins: int) -> Ints:
    """``[n]`` bin of each item, by an algorithm of prtpy."""
    import prtpy

    items = {i: int(weight) for i, weight in enumerate(weights)}
    function = getattr(prtpy.partitioning, algorithm)
    parts = prtpy.partition(algorithm=function, numbins=bins, items=items, outputtype=prtpy.out.Partition)
    bin_of = np.empty(len(weights), dtype=np.int64)
    for e, part in enumerate(parts):
        bin_of[list(part)] = e
    return bin_of


def plain_cpsat(problem: Problem, seconds: float) -> tuple[float, Ints]:
    """Lower bound in seconds and engine of each unit, from assignment booleans alone; affine engines."""
    from ortools.sat.python import cp_model

    units, scale = units_of(problem), 1e6
    engines = range(len(problem.fleet.engines))
    taus = [problem.fleet.shape_of(e).step_time for e in engines]
    model = cp_model.CpModel()
    horizon = int(scale * 1e5)
    makespan = model.new_int_var(0, horizon, "")
    x = [[model.new_bool_var("") for _ in engines] for _ in units.members]
    for row in x:
        model.add_exactly_one(row)
    for e, tau in enumerate(taus):
        assert isinstance(tau, Affine)
        steps = model.new_int_var(0, int(units.longest[0]), "")
        for u, row in enumerate(x):
            model.add(steps >= int(units.longest[u])).only_enforce_if(row[e])
        own = (scale * (tau.b_s * units.tokens + tau.c_s * units.context)).astype(np.int64).tolist()
        load = cp_model.LinearExpr.weighted_sum([row[e] for row in x], own)
        model.add(int(scale * tau.a_s) * steps + load <= makespan)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    answer = solver.solve(model)
    if answer not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return 0.0, np.zeros(len(x), dtype=np.int64)
    engine_of = np.array([[solver.value(one) for one in row].index(1) for row in x], dtype=np.int64)
    return solver.best_objective_bound / scale, engine_of


def row_of(problem: Problem, seconds: float) -> list[tuple[str, float, float, float | None, float]]:
    """(method, seconds, makespan, own bound, largest token sum over mean) of every method that applies."""
    units = units_of(problem)
    engines = len(problem.fleet.engines)
    found = []

    def note(name: str, wall_s: float, engine_of: Ints, lower_s: float | None) -> None:
        run = simulate(problem.trace, problem.fleet, plan_of(problem, units, engine_of))
        sums = np.bincount(engine_of, units.tokens, minlength=engines)
        found.append((name, wall_s, run.makespan_s, lower_s, float(sums.max() / sums.mean())))

    def timed(function: Callable[[], Ints]) -> tuple[float, Ints]:
        started = time.perf_counter()
        answer = function()
        return time.perf_counter() - started, answer

    for method in METHODS:
        if method == "dp" and len(units.members) > MOST_UNITS:
            continue
        certificate = solve(problem, method=method, time_limit_s=seconds)
        first = [members[0] for members in units.members]
        note(method, certificate.wall_s, certificate.plan.engine_of[first], certificate.lower_s)
    started = time.perf_counter()
    lower_s, engine_of = plain_cpsat(problem, seconds)
    note("plain CP-SAT", time.perf_counter() - started, engine_of, lower_s)
    if problem.fleet.identical:
        tau = problem.fleet.shape_of(0).step_time
        assert isinstance(tau, Affine)
        own = (1e6 * (tau.b_s * units.tokens + tau.c_s * units.context)).astype(np.int64)
        note("token KK", *timed(lambda: largest_differencing(units.tokens, engines)), None)
        if find_spec("prtpy") is not None:
            for algorithm in ("kk", "multifit"):
                note(f"prtpy {algorithm}", *timed(lambda a=algorithm: prtpy_bins(a, own, engines)), None)  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="the oracle's methods beside their peers")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of each method")
    parser.add_argument("--only", default="", help="instances whose name holds this")
    given = parser.parse_args()
    for name, problem in instances():
        if given.only not in name:
            continue
        solve(problem, method="staircase")  # compiled code is made before anything is timed
        found = row_of(problem, given.seconds)
        best_s = max(lower_s for *_, lower_s, _ in found if lower_s is not None)
        print(f"\n{name}\n{'method':14} {'seconds':>8} {'plan':>9} {'proven':>9} {'loads':>7}")
        for method, wall_s, upper_s, lower_s, loads in found:
            proven = "" if lower_s is None else f"{upper_s / max(lower_s, 1e-9) - 1:9.1e}"
            print(
                f"{method:14} {wall_s:8.2f} {max(0.0, upper_s / best_s - 1):9.1e} {proven:>9} {loads:7.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
