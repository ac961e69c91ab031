"""Brute force: the exact optimum of a tiny problem, by trying everything.

Engines do not influence each other under a static plan, so it suffices to know, for every set of units, how
fast one engine can decode it (over all orders of admission and all concurrency limits, each simulated), and
to try every way of dealing the units to the engines. Limits that follow finishes are tried for at most
``MOST_FOLLOWED`` requests on an engine; for more, those that stay.
"""

from collections.abc import Iterable
from functools import cache
from itertools import permutations, product

from tailopt.errors import InputError
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import units_of
from tailopt.plan import Engine, Fleet, Plan
from tailopt.simulate.reference import simulate_reference

MOST_PLANS = 200_000
MOST_FOLLOWED = 4

Limits = tuple[int, ...]  # before the first finish, after it, after the second, ...


def brute_force(problem: Problem, *, orders: bool = True) -> tuple[float, Plan]:
    """The least makespan in seconds of any static plan, and a plan that attains it; of limits see above.

    Args:
        problem: a tiny one: units to the power of engines, and the factorial of the requests, are tried.
        orders: False to admit longest first and never hold back, which is enough where everything fits at
            once and the step time is affine or concave.

    Raises:
        InputError: if there are more than ``MOST_PLANS`` ways to deal the units.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1), Engine(1)), gpus=2)
    >>> makespan_s, plan = brute_force(Problem(Trace.of([[90], [80], [20], [10]]), fleet))
    >>> sorted(int((plan.engine_of == e).sum()) for e in (0, 1))
    [1, 3]
    """
    units, engines = units_of(problem), problem.fleet.engines
    if len(engines) ** len(units.members) > MOST_PLANS:
        raise InputError(f"brute force: {len(units.members)} units on {len(engines)} engines are too many")

    @cache
    def best(engine: int, chosen: tuple[int, ...]) -> tuple[float, tuple[int, ...], Limits]:
        """Seconds, order of requests and concurrency limits of one engine for the units chosen."""
        requests = [int(i) for u in chosen for i in units.members[u]]
        n, most = max(1, len(requests)), problem.fleet.max_running(engine)
        ways: Iterable[tuple[tuple[int, ...], Limits]]
        if not orders:
            ways = product([tuple(requests)], [(min(most, n),)])
        elif n > MOST_FOLLOWED:
            ways = product(permutations(requests), [(limit,) for limit in range(1, min(most, n) + 1)])
        else:
            ways = product(
                permutations(requests), product(*(range(1, min(most, n - done) + 1) for done in range(n)))
            )
        return min((_seconds(problem, engine, order, limits), order, limits) for order, limits in ways)

    kinds: dict[tuple[int, int], int] = {}  # engines that are alike share their results
    for e, engine in enumerate(engines):
        kinds.setdefault((engine.tp, problem.fleet.max_running(e)), e)
    alike = [kinds[engine.tp, problem.fleet.max_running(e)] for e, engine in enumerate(engines)]

    def dealt(engine_of: tuple[int, ...]) -> list[tuple[float, tuple[int, ...], Limits]]:
        return [
            best(alike[e], tuple(u for u, chosen in enumerate(engine_of) if chosen == e))
            for e in range(len(engines))
        ]

    ways = product(range(len(engines)), repeat=len(units.members))
    queues = min((dealt(engine_of) for engine_of in ways), key=lambda found: max(found)[0])
    limited = [_limited(engine.tp, limits) for engine, (_, _, limits) in zip(engines, queues, strict=True)]
    plan = Plan.of_queues(limited, [order for _, order, _ in queues], atomic=problem.atomic)
    return max(queues)[0], plan


def _limited(tp: int, limits: Limits) -> Engine:
    return Engine(tp, limits[0], limits=tuple(enumerate(limits[1:], 1)))


def _seconds(problem: Problem, engine: int, order: tuple[int, ...], limits: Limits) -> float:
    """Makespan of one engine of the fleet alone, by the step-by-step reference."""
    if not order:
        return 0.0
    alone = _limited(problem.fleet.engines[engine].tp, limits)
    fleet = Fleet(problem.fleet.profile, (alone,), alone.tp)
    trace = problem.trace.take(order)
    return simulate_reference(trace, fleet, Plan.of_queues([alone], [range(len(order))])).makespan_s
