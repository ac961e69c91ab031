"""The first certificate: the best of the quick bounds, and the best of the quick fillings.

    units -> the plan done soonest -> bounds -> fillings up to the bound -> the best plan, simulated

Every filling is simulated: the certificate's upper bound is what the simulator says of its plan, with
concurrency limits and preemption. The first, longest units first and each where it is done soonest, also
limits which concurrency a better plan can reach (:func:`tailopt.oracle.minorant.reachable`).
"""

from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Ints
from tailopt.engine.step_time import Affine
from tailopt.oracle.alone import alone_bound
from tailopt.oracle.any_bound import lower_any_s
from tailopt.oracle.certificate import BoundArgument, Certificate, status_of
from tailopt.oracle.filling import filling_by_bisection, soonest
from tailopt.oracle.mixed import mixed_bound
from tailopt.oracle.mixed_filling import mixed_filling
from tailopt.oracle.problem import Problem
from tailopt.oracle.staircase import best_filling, not_above, staircase_bound
from tailopt.oracle.units import Units, lines_of, units_of
from tailopt.plan import Plan
from tailopt.simulate.simulator import simulate

KV_SHARES = (1.0, 0.97, 0.93, 0.88, 0.82, 0.75)
"""Shares of the KV cache that fillings count on; how full it can be kept depends on when requests end."""

TOLERANCE = 1e-7  # relative width at which the bisection for a filling stops
FIRST_SHARE = 0.5  # of a method's time limit, for the certificate that it begins with, if it takes so long


def staircase(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """A certificate within milliseconds, or seconds if there are thousands of requests; nothing is drawn.

    A time limit cuts the fillings short: there is one plan and its bound in any case.
    """
    started = clock()
    deadline_s = np.inf if time_limit_s is None else started + time_limit_s
    units = units_of(problem)
    plan = plan_of(problem, units, soonest(problem, units))
    run = simulate(problem.trace, problem.fleet, plan)
    bound = quick_bound(problem, units, run.makespan_s)
    shares = KV_SHARES if run.preemptions.any() else KV_SHARES[:1]
    for share in shares:
        if status_of(bound.lower_s, run.makespan_s) == "optimal" or clock() > deadline_s:
            break
        for engine_of_unit in _fillings(problem, units, bound.lower_s, share, deadline_s):
            other = simulate(problem.trace, problem.fleet, plan_of(problem, units, engine_of_unit))
            run = min(run, other, key=lambda found: found.makespan_s)
    return Certificate(
        lower_s=not_above(bound.lower_s, run.makespan_s),
        upper_s=run.makespan_s,
        plan=run.plan,
        status=status_of(bound.lower_s, run.makespan_s),
        method="staircase bound and filling",
        bound_argument=bound,
        wall_s=clock() - started,
    )


def first_certificate(problem: Problem, time_limit_s: float | None) -> Certificate:
    """What a method with this time limit begins with."""
    return staircase(problem, time_limit_s=None if time_limit_s is None else FIRST_SHARE * time_limit_s)


def quick_bound(problem: Problem, units: Units, within_s: float) -> BoundArgument:
    """The best of the bounds at hand, given a plan that is done within ``within_s``."""
    lines = lines_of(problem, min(units.max_running, problem.trace.n_requests))
    bounds: list[BoundArgument | None] = [
        staircase_bound(units, lines, len(problem.fleet.engines), within_s),
        alone_bound(problem, units),
        lower_any_s(problem.trace, problem.fleet),
        None if problem.fleet.identical else mixed_bound(problem, units, within_s),
    ]
    return max((bound for bound in bounds if bound is not None), key=lambda bound: bound.lower_s)


def _fillings(
    problem: Problem, units: Units, lower_s: float, kv_share: float, deadline_s: float
) -> list[Ints]:
    """``[u]`` engine of each unit in fillings that count on a share of the KV cache."""
    fleet = problem.fleet
    step_time = fleet.shape_of(0).step_time
    if fleet.identical and isinstance(step_time, Affine):
        return [
            best_filling(
                units.longest.astype(np.float64),
                units.tokens.astype(np.float64),
                units.context.astype(np.float64),
                units.prefill_s,
                np.array([step_time.a_s, step_time.b_s, step_time.c_s]),
                np.array([units.max_running, kv_share * units.kv_capacity_tokens]),
                len(fleet.engines),
                lower_s,
                TOLERANCE,
            )
        ]
    found = [filling_by_bisection(problem, units, lower_s, TOLERANCE, kv_share, deadline_s)]
    if all(isinstance(fleet.shape_of(e).step_time, Affine) for e in range(len(fleet.engines))):
        in_order = mixed_filling(problem, units, lower_s, TOLERANCE, kv_share, deadline_s)
        found += [] if in_order is None else [in_order]
    return found


def plan_of(problem: Problem, units: Units, engine_of_unit: Ints) -> Plan:
    """The plan that puts units on engines, longest request first within each."""
    engine_of = np.empty(problem.trace.n_requests, dtype=np.int64)
    for members, engine in zip(units.members, engine_of_unit, strict=True):
        engine_of[members] = engine
    longest_first = np.argsort(-problem.trace.output_tokens, kind="stable")
    return Plan(problem.fleet.engines, engine_of, longest_first, atomic=problem.atomic)
