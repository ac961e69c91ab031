r"""Admission: in which order one engine takes its requests, and how many it may run together.

Where the requests of an engine do not all fit at once, both matter. An engine admits whenever a slot and the
blocks for the prompt are free; when the cache is full, it preempts the request admitted last, which computes
its tokens again later. Longest first is the natural order: it leaves the short ones for the end; better ones
are looked for in :mod:`tailopt.oracle.mixed_queues`. The limit ``max_running`` trades the time in which the
cache fills against recompute; and where the step time is convex in the number of requests, fewer together can
be faster by itself.

All this is judged by the simulator. What no order and no limit can beat is known too, from
:mod:`tailopt.oracle.mixed_rows`: with one engine the priced staircase is the largest of its rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.oracle.problem import Problem
from tailopt.plan import Engine, Fleet, Plan
from tailopt.simulate.simulator import simulate

LIMITS = 10  # concurrency limits of the first round
ROUNDS = 3  # in which the limits between the best one's neighbours are tried
FEWEST = 0.2  # of what the engine runs without a limit, the lowest limit of the first round


@dataclass(frozen=True, eq=False)
class Admission:
    """A queue for one engine.

    Attributes:
        order: the engine's requests in the order of admission.
        max_running: requests that it runs together at most; None for the engine's own limit.
        seconds: when the last one is done, simulated.
        limits: what ``max_running`` is after so many have finished (:attr:`tailopt.plan.Engine.limits`).
    """

    order: Ints
    max_running: int | None
    seconds: float
    limits: tuple[tuple[int, int], ...] = ()


def admit(problem: Problem, engine: int, requests: Ints) -> Admission:
    """The best concurrency limit found for requests taken longest first.

    Args:
        problem: batch and fleet.
        engine: which engine of the fleet.
        requests: those it holds, at least one.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet.of(load_engine("a100-llama-13b"), "1xTP1")
    >>> problem = Problem(Trace.of([[9_000 + 50 * k for k in range(40)]]), fleet)
    >>> found = admit(problem, 0, np.arange(40))
    >>> found.seconds <= timed(problem, 0, found.order, None)[0]
    True
    """
    output = problem.trace.output_tokens[requests]
    order = requests[np.argsort(-output, kind="stable")]
    seconds, most, preempted = timed(problem, engine, order, None)
    best = Admission(order, None, seconds)
    if not preempted and most == len(order) and _concave(problem, engine):
        return best
    return _limited(problem, engine, best, most)


def timed(problem: Problem, engine: int, order: Ints, limit: int | None) -> tuple[float, int, int]:
    """Seconds of one engine for a queue, most requests that ran together, how often one was preempted."""
    fleet = problem.fleet
    own = fleet.max_running(engine)
    alone = Engine(fleet.engines[engine].tp, own if limit is None else min(limit, own))
    run = simulate(
        problem.trace.take(order),
        Fleet(fleet.profile, (alone,), alone.tp),
        Plan.of_queues((alone,), [range(len(order))]),
    )
    return run.makespan_s, int(run.log.running.max()), int(run.preemptions.sum())


def with_queues(problem: Problem, queues: Sequence[Admission | None], note: str = "") -> Plan:
    """The plan of all engines' queues; None for an engine that gets nothing."""
    engines = [
        engine
        if queue is None or (queue.max_running is None and not queue.limits)
        else Engine(engine.tp, queue.max_running, limits=queue.limits)
        for engine, queue in zip(problem.fleet.engines, queues, strict=True)
    ]
    orders = [np.zeros(0, np.int64) if queue is None else queue.order for queue in queues]
    return Plan.of_queues(engines, orders, atomic=problem.atomic, note=note)


def _limited(problem: Problem, engine: int, best: Admission, most: int) -> Admission:
    low, high = max(1, int(FEWEST * most)), most
    tried: dict[int, float] = {most: best.seconds}
    for _ in range(ROUNDS):
        for limit in _between(low, high):
            if limit not in tried:
                tried[limit] = timed(problem, engine, best.order, limit)[0]
                if tried[limit] < best.seconds:
                    best = Admission(best.order, limit, tried[limit])
        known = sorted(tried)
        place = known.index(best.max_running or most)
        low, high = known[max(0, place - 1)], known[min(len(known) - 1, place + 1)]
    return best


def _between(low: int, high: int) -> Iterator[int]:
    spread: Floats = np.geomspace(low, high, LIMITS)
    yield from np.unique(spread.round().astype(np.int64)).tolist()


def _concave(problem: Problem, engine: int) -> bool:
    rises = np.diff(problem.fleet.shape_of(engine).step_time.lines(problem.fleet.max_running(engine)).base_s)
    return bool((np.diff(rises, axis=1) <= 1e-12 * np.abs(rises).max()).all()) and len(rises) == 1
