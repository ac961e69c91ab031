"""The compiled part of the priced staircase (:mod:`tailopt.oracle.lagrangian`, which has the mathematics).

Requests are sorted by falling length. ``cost_s[q, i, r]`` is what request i adds to an engine, by minorant q,
if r longer ones are there; the last r stands for all beyond.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tailopt.arrays import Floats, Ints

Taken = NDArray[np.uint32]
"""``[n, ranks + 1, classes + 1]`` for each multiplier one bit: whether the best set takes the request."""


@njit(cache=True)
def tabulate(
    cost_s: Floats,
    label: Ints,
    most_before: Ints,
    price: Floats,
    multiplier: Floats,
    leader: Ints,
    taken: Taken,
    table: Floats,
    folded: bool = False,
) -> None:
    """Most that an engine collects, less its time at each multiplier, by its leader and the label of its set.

    Args:
        cost_s: ``[minorants, n, ranks]``.
        label: ``[n, ranks]``, at least 0.
        most_before: ``[n]`` how many longer requests an engine can hold besides this one.
        price: ``[n]``.
        multiplier: ``[k, minorants]``.
        leader: ``[n]`` row of the table that a set led by this request goes to, or -1 if it cannot lead.
        taken: written, for :func:`collect`.
        table: ``[rows, k, classes + 1]`` written; the last class holds all labels from there on.
        folded: whether the last class also holds what :func:`fold` says.
    """
    minorants, n, ranks = cost_s.shape
    k_max, last = len(multiplier), table.shape[2] - 1
    most = np.full((ranks + 1, k_max, last + 1), -np.inf)  # from request i on, if r longer ones are there
    most[:, :, 0] = 0.0
    top = np.zeros(ranks + 1, np.int64)  # the largest label reached, but for the last
    table[:] = -np.inf
    for i in range(n - 1, -1, -1):
        deepest = min(most_before[i], ranks)
        if folded:
            fold(most[: min(deepest + 1, ranks) + 1], top, label[i])
        for r in range(deepest + 1):
            column, after = min(r, ranks - 1), min(r + 1, ranks)
            if r == 0 and leader[i] < 0:
                continue
            step = min(label[i, column], last)
            # if i is taken and nothing longer is there, it leads
            here = most[r] if r > 0 else table[leader[i]]
            there = most[after].copy() if r == after else most[after]
            marks = taken[i, r]
            marks[:] = 0
            for k in range(k_max):
                gain = price[i]
                for q in range(minorants):
                    gain -= multiplier[k, q] * cost_s[q, i, column]
                take(there[k], here[k], marks, gain, step, top[after], 1 << k)
            top[r] = max(top[r], min(last - 1, top[after] + step))


@njit(cache=True)
def fold(most: Floats, top: Ints, label: Ints) -> None:
    """Put into the last class what r requests with such labels would bring there anyway.

    Args:
        most: ``[rows, k, classes + 1]``, row r for r longer requests.
        top: ``[rows]`` the largest label of each row, but for the last; changed.
        label: ``[ranks]`` of the request at hand; those of longer ones are no less, but for rounding.
    """
    rows, k_max, classes = most.shape
    last, before = classes - 1, 0
    for r in range(1, rows):
        before += label[r - 1]
        limit = max(-1, last - 1 - before)
        for b in range(limit + 1, top[r] + 1):
            for k in range(k_max):
                most[r, k, last] = max(most[r, k, last], most[r, k, b])
                most[r, k, b] = -np.inf
        top[r] = min(top[r], limit)


@njit(cache=True, fastmath={"nnan", "nsz"})  # a maximum may be taken in any order
def take(
    after: Floats, here: Floats, marks: NDArray[np.uint32], gain: float, step: int, top: int, bit: int
) -> None:
    """Raise ``here[b]`` to ``after[b - step] + gain`` where that is more, mark it; the last b: the rest."""
    last = len(here) - 1
    flag = np.uint32(bit)
    none = np.uint32(0)
    count = max(0, min(top, last - 1 - step) + 1)
    raised, mark = here[step : step + count], marks[step : step + count]
    for b in range(count):
        with_it, without = after[b] + gain, raised[b]
        more = with_it > without
        raised[b] = with_it if more else without
        mark[b] |= flag if more else none
    best = after[last]
    for b in range(max(0, last - step), top + 1):
        best = max(best, after[b])
    if best + gain > here[last]:
        here[last] = best + gain
        marks[last] |= flag


@njit(cache=True, fastmath={"nnan", "nsz"})
def worth(
    table: Floats, multiplier_sum: Floats, makespan_s: float, value: Floats, label: Ints, chosen: Ints
) -> None:
    """What an engine done by ``makespan_s`` collects at most, by its leader.

    Args:
        table: of :func:`tabulate`.
        multiplier_sum: ``[k]`` over the minorants.
        value: ``[rows]`` written; minus infinity if the leader alone takes longer.
        label, chosen: ``[rows]`` written: the class and the multiplier that decide.
    """
    rows, k_max, classes = table.shape
    least = np.empty(classes)
    for row in range(rows):
        value[row], label[row], chosen[row] = -np.inf, -1, -1
        least[:] = np.inf
        for k in range(k_max):
            paid = multiplier_sum[k] * makespan_s
            for b in range(classes):
                then = table[row, k, b] + paid
                least[b] = then if then < least[b] else least[b]
        for b in range(classes):
            if least[b] > value[row]:
                value[row], label[row] = least[b], b
        if label[row] < 0:
            continue
        for k in range(k_max):
            if table[row, k, label[row]] + multiplier_sum[k] * makespan_s == value[row]:
                chosen[row] = k
                break


@njit(cache=True)
def most_collected(value: Floats, prefix: Floats, slack: float, leaders: Ints) -> float:
    """Most that engines can collect in all, each with a leader that those before leave it.

    Args:
        value: ``[u]`` what the engine led by each unit collects.
        prefix: ``[u + 1]`` sums of the units' prices.
        slack: by how much those may be missed, for the rounding of sums.
        leaders: ``[m]`` written: the leaders that collect it, -1 where an engine is not used.
    """
    m, units = len(leaders), len(value)
    so_far, before = np.full((m, units), -np.inf), np.full((m, units), -1, np.int64)
    so_far[0, 0] = value[0]
    best, engine, unit = value[0], 0, 0
    for e in range(1, m):
        most, who = -np.inf, -1
        for u in range(1, units):
            if so_far[e - 1, u - 1] > most:
                most, who = so_far[e - 1, u - 1], u - 1
            if most >= prefix[u] - slack:
                so_far[e, u], before[e, u] = most + value[u], who
                if so_far[e, u] > best:
                    best, engine, unit = so_far[e, u], e, u
    leaders[:] = -1
    for e in range(engine, -1, -1):
        leaders[e], unit = unit, before[e, unit]
    return float(best)


@njit(cache=True)
def collect(label: Ints, most_before: Ints, taken: Taken, i: int, b: int, k: int, times: Floats) -> None:
    """Add 1 to ``times`` for each request of the set that request i leads in class b at multiplier k."""
    ranks, last = label.shape[1], taken.shape[2] - 1
    times[i] += 1
    b, r = max(0, b - label[i, 0]), 1
    for x in range(i + 1, len(times)):
        if r <= most_before[x] and taken[x, min(r, ranks), min(b, last)] >> k & 1:
            times[x] += 1
            b, r = max(0, b - label[x, min(r, ranks - 1)]), r + 1
