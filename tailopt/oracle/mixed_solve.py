"""Several kinds of engines, or caches that do not hold everything: a better plan, then prices on kinds.

    quick certificate -> local search -> queues and ends, where requests have to wait -> prices on kinds

The local search goes by the engines' own times where everything fits (:mod:`tailopt.oracle.local_search`).
Where requests have to wait it goes by their rows, set right by simulation
(:mod:`tailopt.oracle.mixed_search`); then order, limits and dealing are searched together
(:mod:`tailopt.oracle.mixed_queues`) and, where step times are affine and requests free, who begins with an
engine and who ends with it (:mod:`tailopt.oracle.mixed_ends`).
"""

from contextlib import suppress
from time import perf_counter as clock

import numpy as np

from tailopt.oracle.admission import Admission, admit, with_queues
from tailopt.oracle.alone import concave
from tailopt.oracle.bound_and_fill import plan_of, staircase
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.local_search import local_search
from tailopt.oracle.mixed_ends import applies, ends_search
from tailopt.oracle.mixed_priced import PricedKindsBound, priced_kinds_bound
from tailopt.oracle.mixed_queues import queue_search
from tailopt.oracle.mixed_search import crowded_search
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import Units, units_of
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

SLICES = 20  # of the local search, without a time limit
ITERATIONS, MOST_ITERATIONS = 16, 10_000  # of the bound, without a time limit and with one
SEARCH_SHARE, CROWDED_SHARE, QUEUES_SHARE = 0.05, 0.05, 0.7  # of the time limit
ENDS_SHARE = 0.75  # of the queues' time, that of the search by ends where it applies


def kinds(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """A certificate for any fleet; without a time limit after a fixed amount of work.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Fleet
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet.of(load_engine("h100-gpt-oss-120b-vllm"), "2xTP2+1xTP4")
    >>> problem = Problem(Trace.of([[100 + 70 * k for k in range(40)]]), fleet)
    >>> staircase(problem).gap > 0.1 > 0.04 > kinds(problem).gap
    True
    """
    return refined_kinds(problem, staircase(problem), time_limit_s=time_limit_s, seed=seed)


def refined_kinds(
    problem: Problem, certificate: Certificate, *, time_limit_s: float | None = None, seed: int = 0
) -> Certificate:
    """A certificate at hand with a better plan and a better bound, if they are found.

    Args:
        problem: what was asked.
        certificate: what is known.
        time_limit_s: seconds to spend at most, about, those of the certificate included; None for a fixed
            amount of work.
        seed: of the searches.
    """
    started = clock() - certificate.wall_s
    if certificate.status == "optimal":
        return certificate
    units = units_of(problem)
    limit_s = np.inf if time_limit_s is None else time_limit_s
    run, dealt, how = _better_plan(problem, units, certificate, limit_s, seed)
    bound = _bound(
        problem,
        units,
        [run, dealt],
        lower_s=certificate.lower_s,
        upper_s=run.makespan_s,
        iterations=ITERATIONS if time_limit_s is None else MOST_ITERATIONS,
        deadline_s=started + limit_s,
    )
    method = f"{certificate.method}, {how}" + (", prices on kinds" if bound else "")
    found = certificate.improved(bound or certificate.bound_argument, run, method, started, seed)
    return with_limits(problem, found)


def _bound(
    problem: Problem,
    units: Units,
    runs: list[Run],
    *,
    lower_s: float,
    upper_s: float,
    iterations: int,
    deadline_s: float,
) -> PricedKindsBound | None:
    """Prices on kinds, the first of which come from the plan whose first prices prove most."""
    first = [members[0] for members in units.members]
    best: PricedKindsBound | None = None
    dealt = runs[0].plan.engine_of[first]
    if len(runs) > 1 and (runs[0].plan.engine_of != runs[1].plan.engine_of).any():
        for one in runs:
            if clock() > deadline_s:
                break
            engine_of = one.plan.engine_of[first]
            found = priced_kinds_bound(
                problem, units, engine_of, lower_s=lower_s, upper_s=upper_s, iterations=1,
                deadline_s=deadline_s,
            )  # fmt: skip
            if found is not None and (best is None or found.lower_s > best.lower_s):
                best, dealt = found, engine_of
    found = priced_kinds_bound(
        problem, units, dealt, lower_s=lower_s, upper_s=upper_s, iterations=iterations, deadline_s=deadline_s
    )
    return found if best is None or (found is not None and found.lower_s >= best.lower_s) else best


def crowded(problem: Problem) -> bool:
    """Whether some engine can be given more than it holds at once."""
    trace, fleet = problem.trace, problem.fleet
    shapes = {fleet.shape_of(e).kv_capacity_tokens for e in range(len(fleet.engines))}
    slots = min(fleet.max_running(e) for e in range(len(fleet.engines)))
    return trace.n_requests > slots or int((trace.context_tokens + trace.output_tokens).sum()) > min(shapes)


def waits(problem: Problem, run: Run) -> bool:
    """Whether some engine of a plan has more than it can hold, and a request was preempted or began later."""
    trace, fleet = problem.trace, problem.fleet
    for e in range(len(fleet.engines)):
        mine = run.engine == e
        tokens = int((trace.context_tokens + trace.output_tokens)[mine].sum())
        if mine.sum() > fleet.max_running(e) or tokens > fleet.shape_of(e).kv_capacity_tokens:
            later = run.start_s[mine].max() > run.finish_s[mine].min()
            if later or run.preemptions[mine].any():
                return True
    return False


def _better_plan(
    problem: Problem, units: Units, certificate: Certificate, limit_s: float, seed: int
) -> tuple[Run, Run, str]:
    """The best plan found, one dealt by the inequalities of the bound, and how they were found."""
    run, lower_s = simulate(problem.trace, problem.fleet, certificate.plan), certificate.lower_s
    engine_of = local_search(
        problem,
        units,
        run.plan.engine_of[[members[0] for members in units.members]],
        lower_s=lower_s,
        time_limit_s=SEARCH_SHARE * limit_s,
        seed=seed,
        slices=SLICES if limit_s == np.inf else None,
    )
    other = simulate(problem.trace, problem.fleet, plan_of(problem, units, engine_of))
    run = min(run, other, key=lambda one: one.makespan_s)
    if not waits(problem, run):
        return run, run, "local search"
    deadline_s = clock() + CROWDED_SHARE * limit_s
    dealt = crowded_search(problem, units, run, lower_s=lower_s, deadline_s=deadline_s, seed=seed)
    now_s, part = clock(), 1 - ENDS_SHARE if applies(problem) else 1.0
    deadline_s, ends_s = now_s + part * QUEUES_SHARE * limit_s, now_s + QUEUES_SHARE * limit_s
    run = queue_search(problem, dealt, lower_s=lower_s, deadline_s=deadline_s, seed=seed)
    run = ends_search(problem, run, lower_s=lower_s, deadline_s=ends_s, seed=seed)
    return run, dealt, "queue search" + (", ends" if applies(problem) else "")


def with_limits(problem: Problem, certificate: Certificate) -> Certificate:
    """A certificate whose plan runs fewer requests together where that is faster, as it can be if a step time
    is convex in their number."""
    fleet, n = problem.fleet, problem.trace.n_requests
    lines = [
        fleet.shape_of(e).step_time.lines(min(fleet.max_running(e), n)) for e in range(len(fleet.engines))
    ]
    if certificate.status == "optimal" or all(map(concave, lines)):
        return certificate
    started, run = clock() - certificate.wall_s, simulate(problem.trace, fleet, certificate.plan)
    other = admitted(problem, run, lower_s=certificate.lower_s)
    return certificate.improved(
        certificate.bound_argument, other, certificate.method, started, certificate.seed
    )


def admitted(problem: Problem, run: Run, *, lower_s: float) -> Run:
    """The same dealing with better limits: the engine done last gets a better one until that fails."""
    queues: list[Admission | None] = []
    for e, engine in enumerate(run.plan.engines):
        mine = run.plan.order[run.plan.engine_of[run.plan.order] == e]
        seconds = float(run.finish_s[run.engine == e].max()) if len(mine) else 0.0
        queues.append(Admission(mine, engine.max_running, seconds, engine.limits) if len(mine) else None)
    tried: set[int] = set()
    with suppress(KeyboardInterrupt):
        while True:
            e = max(range(len(queues)), key=lambda e: 0.0 if (q := queues[e]) is None else q.seconds)
            now = queues[e]
            if now is None or now.seconds <= lower_s or e in tried:
                break
            tried.add(e)
            queues[e] = min(now, admit(problem, e, now.order), key=lambda q: q.seconds)
    other = simulate(problem.trace, problem.fleet, with_queues(problem, queues))
    return min(run, other, key=lambda one: one.makespan_s)
