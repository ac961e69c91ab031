"""Fillings for affine engines of different shapes: which shape opens when is tried out.

As in :mod:`tailopt.oracle.staircase`, units go longest first into the fullest engine that is still done in
time, and an engine opens only when no open one can take the unit. With several kinds the order in which
engines open matters (does the fast shape take the tail, or do the longest share a slow one?), so every
distinct order is tried, or a sample of them, each only as long as it can beat the best so far.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter as clock

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints
from tailopt.engine.step_time import Affine
from tailopt.oracle.kinds import Kind, kinds_of
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import Units

MOST_ORDERS = 64


def mixed_filling(
    problem: Problem,
    units: Units,
    lower_s: float,
    tolerance: float,
    kv_share: float,
    deadline_s: float = np.inf,
) -> Ints | None:
    """``[u]`` engines in the best filling over the orders of opening; None if some unit fits nowhere.

    Args:
        problem, units: what is placed where.
        lower_s: no plan is done earlier.
        tolerance: relative width at which the bisection stops.
        kv_share: share of the KV cache that the filling counts on.
        deadline_s: :func:`time.perf_counter` at which to stop.
    """
    kinds = kinds_of(problem.fleet)
    need = problem.trace.context_tokens + problem.trace.output_tokens - 1
    largest = [need[members].max() for members in units.members]
    load = np.array([units.longest, units.tokens, units.context, largest], dtype=np.float64)
    trial, best = np.zeros(len(units.members), dtype=np.int64), None
    high = np.inf
    for order in orders_of([len(kind.engines) for kind in kinds], MOST_ORDERS):
        if clock() > deadline_s:
            break
        engines = _engines_in(order, kinds)
        affine, capacity = _numbers(order, kinds, kv_share)
        if fill_in_order(load, affine, capacity, high * (1 - tolerance), trial) == np.inf:
            continue
        low = lower_s
        while True:
            best, high = engines[trial], _done_s(load, affine, capacity, trial)
            done_s = np.inf
            while done_s == np.inf and high - low > tolerance * high and clock() <= deadline_s:
                middle = (low + high) / 2
                done_s = fill_in_order(load, affine, capacity, middle, trial)
                if done_s == np.inf:
                    low = middle
            if done_s == np.inf:
                break
    return best


def orders_of(counts: Sequence[int], most: int) -> Iterator[list[int]]:
    """Orders in which engines of each kind can open, each kind as often as it has engines; ``most`` of them.

    >>> list(orders_of([2, 1], 9))
    [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    >>> len(list(orders_of([8, 8], 9)))
    9
    """
    total = 1
    for i, count in enumerate(np.cumsum(counts)):
        for j in range(1, counts[i] + 1):
            total = total * (int(count) - counts[i] + j) // j
    stride = max(1, -(-total // most))
    for place in range(0, total, stride):
        yield _order_at(place, list(counts), total)


def _order_at(place: int, left: list[int], total: int) -> list[int]:
    """The order at this place among all, sorted."""
    order = []
    while sum(left):
        kind = 0
        while place >= (with_it := total * left[kind] // sum(left)):  # as many orders go on with this kind
            place -= with_it
            kind += 1
        order.append(kind)
        left[kind] -= 1
        total = with_it
    return order


def _engines_in(order: list[int], kinds: Sequence[Kind]) -> Ints:
    """The fleet's engines in the order in which they open."""
    left = [iter(kind.engines) for kind in kinds]
    return np.array([next(left[kind]) for kind in order], dtype=np.int64)


def _numbers(order: list[int], kinds: Sequence[Kind], kv_share: float) -> tuple[Floats, Floats]:
    """``[m, 3]`` a, b, c and ``[m, 3]`` slots, cache and room for one request of the engines in order."""
    affine, capacity = [], []
    for kind in (kinds[k] for k in order):
        shape, tau = kind.shape, kind.shape.step_time
        assert isinstance(tau, Affine)
        affine.append([tau.a_s, tau.b_s, tau.c_s])
        cache, whole = shape.kv_capacity_tokens, shape.kv_capacity_tokens // shape.block_tokens
        room = min(kv_share * cache, whole * shape.block_tokens)
        capacity.append([kind.max_running, kv_share * cache, room])
    return np.array(affine), np.array(capacity)


def _done_s(load: Floats, affine: Floats, capacity: Floats, engine_of: Ints) -> float:
    """When the last engine is done, steps bounded as in :func:`fill_in_order`."""
    longest, tokens, context, _ = load
    ends = []
    for e in range(len(affine)):
        held = engine_of == e
        t, k = tokens[held].sum(), context[held].sum()
        steps = max(longest[held].max(initial=0.0), t / capacity[e, 0], k / capacity[e, 1])
        ends.append(affine[e, 0] * steps + affine[e, 1] * t + affine[e, 2] * k)
    return float(max(ends))


@njit(cache=True)
def fill_in_order(
    load: Floats, affine: Floats, capacity: Floats, makespan_s: float, engine_of: Ints
) -> float:
    """Fill engines that open in the order given, none done later than ``makespan_s``.

    Args:
        load: ``[4, u]`` of the units, longest first: longest output, tokens, context read, and KV tokens of
            the largest request.
        affine: ``[m, 3]`` (a, b, c) of the engines.
        capacity: ``[m, 3]`` (slots, KV capacity, room for one request: whole blocks).
        makespan_s: none may be done later.
        engine_of: ``[u]`` written: place in the order of each unit's engine.

    Returns:
        When the last engine is done, or infinity if the units do not fit.
    """
    m = len(affine)
    longest, tokens, context, largest = load
    held_tokens, held_context, leader, done_s = np.zeros(m), np.zeros(m), np.zeros(m), np.zeros(m)
    opened = 0
    for u in range(len(longest)):
        best, best_done = -1, 0.0
        for e in range(m):
            if e >= opened and best >= 0:
                break
            if largest[u] > capacity[e, 2]:
                continue
            all_tokens, all_context = held_tokens[e] + tokens[u], held_context[e] + context[u]
            steps = max(leader[e], longest[u], all_tokens / capacity[e, 0], all_context / capacity[e, 1])
            then = affine[e, 0] * steps + affine[e, 1] * all_tokens + affine[e, 2] * all_context
            if then <= makespan_s and (best < 0 or done_s[e] > done_s[best]):
                best, best_done = e, then
        if best < 0:
            return np.inf
        opened = max(opened, best + 1)
        leader[best] = max(leader[best], longest[u])
        held_tokens[best] += tokens[u]
        held_context[best] += context[u]
        done_s[best] = best_done
        engine_of[u] = best
    return float(done_s.max())
