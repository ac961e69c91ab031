r"""Admission: in which order one engine takes its requests, and how many it may run together.

Where the requests of an engine do not all fit at once, both matter. An engine admits whenever a slot and the
blocks for the prompt are free; when the cache is full, it preempts the request admitted last, which computes
its tokens again later. Longest first is the natural order: it leaves the short ones for the end. The limit
``max_running`` trades the time in which the cache fills against recompute; and where the step time is convex
in the number of requests, fewer together can be faster by itself.

All this is judged by the simulator. What no order and no limit can beat is known too, from
:mod:`tailopt.oracle.mixed_rows`: with one engine the priced staircase is the largest of its rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.oracle.problem import Problem
from tailopt.plan import Engine, Fleet, Plan
from tailopt.simulate.simulator import simulate

LIMITS = 10  # concurrency limits of the first round
ROUNDS = 3  # in which the limits between the best one's neighbours are tried
FEWEST = 0.2  # of what the engine runs without a limit, the lowest limit of the first round
MOVED = 0.25  # of the queue at most is moved at once in a change of the order
COOLING = 2e-3  # share of the time by which a worse order may be taken at first
MOVES = 100  # changes of an order without a time limit


@dataclass(frozen=True, eq=False)
class Admission:
    """A queue for one engine.

    Attributes:
        order: the engine's requests in the order of admission.
        max_running: requests that it runs together at most; None for the engine's own limit.
        seconds: when the last one is done, simulated.
    """

    order: Ints
    max_running: int | None
    seconds: float


def admit(problem: Problem, engine: int, requests: Ints, *, deadline_s: float = np.inf) -> Admission:
    """The best concurrency limit found for requests taken longest first.

    Args:
        problem: batch and fleet.
        engine: which engine of the fleet.
        requests: those it holds, at least one.
        deadline_s: :func:`time.perf_counter` at which to stop.

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
    return _limited(problem, engine, best, most, deadline_s)


def improve(
    problem: Problem, engine: int, start: Admission, *, goal_s: float, deadline_s: float, seed: int
) -> Admission:
    """Annealing of an order and its limit: requests, swaps and stretches of the queue are moved.

    Args:
        problem, engine: as in :func:`admit`.
        start: where it begins; the result is no worse.
        goal_s: good enough.
        deadline_s: :func:`time.perf_counter` at which to stop; infinity for a fixed number of changes.
        seed: of the changes.
    """
    random = np.random.default_rng(seed)
    best = now = start
    began = clock()
    for move in range(MOVES if deadline_s == np.inf else 2**31):
        done = move / MOVES if deadline_s == np.inf else (clock() - began) / max(1e-9, deadline_s - began)
        if done >= 1 or best.seconds <= goal_s:
            break
        order, limit = _changed(now, random)
        seconds, *_ = timed(problem, engine, order, limit)
        if seconds < now.seconds * (1 - COOLING * (1 - done) ** 2 * np.log(random.random() + 1e-12)):
            now = Admission(order, limit, seconds)
            best = min(best, now, key=lambda one: one.seconds)
    return best


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
        engine if queue is None or queue.max_running is None else Engine(engine.tp, queue.max_running)
        for engine, queue in zip(problem.fleet.engines, queues, strict=True)
    ]
    orders = [np.zeros(0, np.int64) if queue is None else queue.order for queue in queues]
    return Plan.of_queues(engines, orders, atomic=problem.atomic, note=note)


def _limited(problem: Problem, engine: int, best: Admission, most: int, deadline_s: float) -> Admission:
    low, high = max(1, int(FEWEST * most)), most
    tried: dict[int, float] = {most: best.seconds}
    for _ in range(ROUNDS):
        for limit in _between(low, high):
            if limit not in tried and clock() < deadline_s:
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


def _changed(now: Admission, random: np.random.Generator) -> tuple[Ints, int | None]:
    n, limit, order = len(now.order), now.max_running, now.order
    kind = random.random()
    if kind < 0.15 or n < 3:
        factor = np.exp(random.normal(0, 0.1))
        return order, int(np.clip(round((limit or n) * factor), 1, n))
    if kind < 0.35:
        swapped = order.copy()
        i, j = random.integers(n, size=2)
        swapped[i], swapped[j] = order[j], order[i]
        return swapped, limit
    size = 1 if kind < 0.8 else int(random.integers(1, max(2, int(MOVED * n))))
    start = int(random.integers(n - size + 1))
    rest = np.delete(order, slice(start, start + size))
    return np.insert(rest, int(random.integers(len(rest) + 1)), order[start : start + size]), limit
