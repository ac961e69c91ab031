"""The compiled part of the search over places (:mod:`tailopt.oracle.mixed_places` has the mathematics).

Requests are sorted by falling length; arrays of kinds are padded to the largest, values by minus infinity.
"""

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints
from tailopt.oracle.lagrangian_search_kernel import (
    BLOCK,
    FOUND,
    GIVEN_UP,
    REFUTED,
    as_before,
    collectable,
    put,
)


@njit(cache=True, nogil=True)
def explore(
    kind_of: Ints,
    cost_s: Floats,
    constant_s: Floats,
    most_before: Ints,
    unit: Ints,
    before: Ints,
    price: Floats,
    prefix: Floats,
    value: Floats,
    multiplier: Floats,
    multipliers: Ints,
    start: Ints,
    rest: Floats,
    high: Floats,
    makespan_s: float,
    slack: float,
    most_states: int,
    engine_of: Ints,
) -> tuple[int, int, int]:
    """Place requests in order, depth first, and go back where the engines cannot collect all prices.

    Args:
        kind_of: ``[m]`` kind of each engine; those of one kind are beside each other.
        cost_s: ``[kinds, inequalities, n, ranks]``.
        constant_s: ``[kinds, inequalities, u]`` what an engine led by each unit takes besides.
        most_before: ``[kinds, n]`` longer requests that an engine can hold besides each; -1: not even it.
        unit: ``[n]`` unit of each request; units come in order of their first request.
        before: ``[n]`` one before that is equal to each, or -1; equal ones are units of their own.
        price: ``[n]``.
        prefix: ``[u + 1]`` sums of the units' prices.
        value: ``[kinds, u]`` what an engine led by each unit collects.
        multiplier: ``[kinds, k, inequalities]``.
        multipliers: ``[kinds]`` how many of them there are.
        start, rest, high: ``[kinds, rows, ...]`` of :func:`tailopt.oracle.lagrangian_search_kernel.rests`.
        makespan_s: the trial.
        slack: by how much prices may be missed, for the rounding of sums.
        most_states: when to give up.
        engine_of: ``[u]`` written: the plan, if one is found.

    Returns:
        REFUTED, FOUND or GIVEN_UP; how many states were looked at; after how many requests none was left.
    """
    kinds, inequalities, n, ranks = cost_s.shape
    engines, places = len(kind_of), len(start) - 2
    held = np.zeros((places + 1, engines), np.int64)
    load_s = np.zeros((places + 1, engines, inequalities))
    child, collected = np.zeros((places + 1, engines), np.int64), np.zeros((places + 1, engines))
    children, following = np.zeros(places + 1, np.int64), np.zeros(places + 1, np.int64)
    least, alone = np.empty(high.shape[3] + BLOCK), np.empty(engines)
    room, then_s, paid = np.empty(inequalities), np.empty(inequalities), np.empty(multiplier.shape[1])
    left = np.zeros(kinds, np.int64)
    richest, single = ranges(value), n == value.shape[1]
    of_kind = np.searchsorted(kind_of, np.arange(kinds))
    placed, started = np.zeros(n + 1), np.zeros(n + 1, np.int64)
    for i in range(n):
        placed[i + 1] = placed[i] + price[i]
        started[i + 1] = max(started[i], unit[i] + 1)
    enough = prefix[-1] - slack
    states, deepest, i, fresh = 0, 0, 0, True
    while i >= 0:
        if fresh:
            children[i], following[i] = 0, 0
            if i == n:
                return FOUND, states, n
            if i == places or states > most_states:
                return GIVEN_UP, states, deepest
            left[:] = 0
            for g in range(engines):  # what each engine collects if this request goes elsewhere
                alone[g] = 0.0
                if held[i, g] == 0:
                    left[kind_of[g]] += 1
                    continue
                for q in range(inequalities):
                    room[q] = makespan_s - load_s[i, g, q]
                k, row = kind_of[g], start[i + 1] + min(held[i, g], ranks)
                alone[g] = collectable(rest[k, row, : multipliers[k]], high[k, row, : multipliers[k]],
                                       multiplier[k, : multipliers[k]], room, paid, least)  # fmt: skip
            first = started[i + 1] > started[i]
            for e in range(engines):
                k, opens = kind_of[e], held[i, e] == 0
                if held[i, e] > most_before[k, i] or (not first and e != engine_of[unit[i]]):
                    continue
                if before[i] >= 0 and e < engine_of[unit[before[i]]]:
                    continue
                if (opens or single) and as_before(held[i], load_s[i], e, of_kind[k]):
                    continue
                column, in_time = min(held[i, e], ranks - 1), True
                for q in range(inequalities):
                    before_s = constant_s[k, q, unit[i]] if opens else load_s[i, e, q]
                    then_s[q] = before_s + cost_s[k, q, i, column]
                    room[q] = makespan_s - then_s[q]
                    in_time = in_time and then_s[q] <= makespan_s * (1 + 1e-12)
                if not in_time:
                    continue
                states += 1
                row = start[i + 1] + min(held[i, e] + 1, ranks)
                then = collectable(rest[k, row, : multipliers[k]], high[k, row, : multipliers[k]],
                                   multiplier[k, : multipliers[k]], room, paid, least)  # fmt: skip
                sum_ = placed[i + 1] + then
                for g in range(engines):
                    sum_ += alone[g] if g != e else 0.0
                left[k] -= opens
                sum_ = with_new_engines(sum_, richest, prefix, started[i + 1], left, slack)
                left[k] += opens
                if sum_ >= enough:
                    children[i] = put(child[i], collected[i], children[i], e, sum_)
        if following[i] == children[i]:
            i, fresh = i - 1, False
            continue
        e = child[i, following[i]]
        following[i] += 1
        k, column = kind_of[e], min(held[i, e], ranks - 1)
        held[i + 1], load_s[i + 1] = held[i], load_s[i]
        for q in range(inequalities):
            before_s = constant_s[k, q, unit[i]] if held[i, e] == 0 else load_s[i, e, q]
            load_s[i + 1, e, q] = before_s + cost_s[k, q, i, column]
        held[i + 1, e] += 1
        engine_of[unit[i]] = e
        i, fresh = i + 1, True
        deepest = max(deepest, i)
    return REFUTED, states, deepest + 1


@njit(cache=True)
def ranges(value: Floats) -> Floats:
    """``[kinds, u, u]`` the largest value from one unit to another."""
    kinds, units = value.shape
    most = np.zeros((kinds, units, units))
    for k in range(kinds):
        for first in range(units):
            best = 0.0
            for last in range(first, units):
                best = max(best, value[k, last])
                most[k, first, last] = best
    return most


@njit(cache=True)
def with_new_engines(
    so_far: float, richest: Floats, prefix: Floats, unit: int, left: Ints, slack: float
) -> float:
    """What is collected with the engines left of each kind, led by units from ``unit`` on that they leave."""
    kinds, units = len(left), richest.shape[1]
    states = 1
    for k in range(kinds):
        states *= left[k] + 1
    most = np.full(states, -np.inf)  # by engines opened of each kind
    most[0] = so_far
    for state in range(states):
        last = min(units, np.searchsorted(prefix, most[state] + slack, side="right")) - 1
        stride = 1
        for k in range(kinds):
            if state // stride % (left[k] + 1) < left[k]:
                gain = richest[k, unit, last] if unit <= last else 0.0
                most[state + stride] = max(most[state + stride], most[state] + gain)
            stride *= left[k] + 1
    return float(most[-1])
