"""General step times: the quick certificate, a local search on its plan, and the priced staircase bound."""

from time import perf_counter as clock

import numpy as np

from tailopt.oracle.bound_and_fill import plan_of, staircase
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.lagrangian import priced_bound
from tailopt.oracle.local_search import local_search
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import units_of
from tailopt.simulate.simulator import simulate

SLICES = 20  # of the local search, if there is no time limit
ITERATIONS, MOST_ITERATIONS = 12, 1_000  # of the bound, without a time limit and with one
SEARCH_SHARE = 0.1  # of the time limit


def lagrangian(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """A certificate for any step time; without a time limit after a fixed amount of work."""
    return refined(problem, staircase(problem), time_limit_s=time_limit_s, seed=seed)


def refined(
    problem: Problem, certificate: Certificate, *, time_limit_s: float | None = None, seed: int = 0
) -> Certificate:
    """A certificate at hand with a better plan and a better bound, if they are found.

    Args:
        problem: what was asked.
        certificate: what is known.
        time_limit_s: seconds to spend at most, about; None for a fixed amount of work.
        seed: of the local search.
    """
    started = clock() - certificate.wall_s
    if certificate.status == "optimal":
        return certificate
    units = units_of(problem)
    limit_s = np.inf if time_limit_s is None else time_limit_s
    engine_of = certificate.plan.engine_of[[members[0] for members in units.members]]
    run = simulate(problem.trace, problem.fleet, certificate.plan)
    found = local_search(
        problem,
        units,
        engine_of,
        lower_s=certificate.lower_s,
        time_limit_s=SEARCH_SHARE * limit_s,
        seed=seed,
        slices=SLICES if time_limit_s is None else None,
    )
    other = simulate(problem.trace, problem.fleet, plan_of(problem, units, found))
    if other.makespan_s < run.makespan_s:
        run, engine_of = other, found
    bound = priced_bound(
        problem,
        units,
        engine_of,
        lower_s=certificate.lower_s,
        upper_s=run.makespan_s,
        iterations=ITERATIONS if time_limit_s is None else MOST_ITERATIONS,
        deadline_s=started + limit_s,
    )
    method = f"{certificate.method}, local search" + (", priced staircase" if bound else "")
    return certificate.improved(bound or certificate.bound_argument, run, method, started, seed)
