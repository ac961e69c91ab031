"""The compiled part of the priced staircase (:mod:`tailopt.oracle.lagrangian`, which has the mathematics).

Requests are sorted by falling length. ``cost_s[q, i, r]`` is what request i adds to an engine, by minorant q,
if r longer ones are there; the last r stands for all beyond.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tailopt.arrays import Floats, Ints

Marks = NDArray[np.uint8]
"""Whether the best set takes the request, for all that :func:`layout` counts: by label, then multiplier."""


@njit(cache=True)
def layout(label: Ints, most_before: Ints, leader: Ints, classes: int, folded: bool) -> tuple[Ints, Ints]:
    """Where the marks of a request behind r longer ones begin, and of how many labels there are some.

    Args:
        label, most_before, leader, folded: as in :func:`tabulate`.
        classes: how many there are; the marks of the last one come last.

    Returns:
        ``[n, deepest + 2]`` and ``[n, deepest + 1]``, for one multiplier.
    """
    n, ranks = label.shape
    deepest = min(most_before.max(), ranks)
    start, count = np.zeros((n, deepest + 2), np.int64), np.zeros((n, deepest + 1), np.int64)
    top = np.zeros(ranks + 1, np.int64)  # the largest label reached, but for the last
    so_far = 0
    for i in range(n - 1, -1, -1):
        if folded:
            before = 0
            for r in range(1, min(most_before[i], ranks - 1) + 1):
                before += label[i, r - 1]
                top[r] = min(top[r], max(-1, classes - 1 - before))
        start[i, :] = so_far
        for r in range(0 if leader[i] >= 0 else 1, min(most_before[i], ranks) + 1):
            column, after = min(r, ranks - 1), min(r + 1, ranks)
            step = min(label[i, column], classes)
            count[i, r] = max(0, min(top[after], classes - 1 - step) + 1)
            start[i, r] = so_far
            so_far += count[i, r] + 1
            start[i, r + 1] = so_far
            top[r] = max(top[r], min(classes - 1, top[after] + step))
    return start, count


@njit(cache=True, nogil=True)
def tabulate(
    cost_s: Floats,
    label: Ints,
    most_before: Ints,
    price: Floats,
    multiplier: Floats,
    leader: Ints,
    start: Ints,
    count: Ints,
    marks: Marks,
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
        start, count: of :func:`layout`.
        marks: ``[start.max() * k]`` written, for :func:`collect`.
        table: ``[rows, k, classes + 1]`` written; the last class holds all labels from there on.
        folded: whether the last class also holds what :func:`fold` says.
    """
    n, ranks = label.shape
    k_max, last = len(multiplier), table.shape[2] - 1
    most = np.full((ranks + 1, last + 1, k_max), -np.inf)  # from request i on, if r longer ones are there
    most[:, 0, :] = 0.0
    top = np.zeros(ranks + 1, np.int64)
    first, source, gain = (
        np.empty((last + 1, k_max)),
        np.empty((last + 1, k_max)),
        np.empty((last + 1) * k_max),
    )
    table[:] = -np.inf
    for i in range(n - 1, -1, -1):
        deepest = min(most_before[i], ranks)
        if folded:
            fold(most[: min(deepest + 1, ranks) + 1], top, label[i])
        for r in range(0 if leader[i] >= 0 else 1, deepest + 1):
            column, after = min(r, ranks - 1), min(r + 1, ranks)
            step, labels_ = min(label[i, column], last), count[i, r]
            for k in range(k_max):
                gain[k] = worth_of(price[i], multiplier[k], cost_s[:, i, column])
            there = most[after]
            if r == after:
                source[: top[r] + 1], source[last] = there[: top[r] + 1], there[last]
                there = source
            if r == 0:  # if i is taken and nothing longer is there, it leads
                here = first
                here[: step + labels_], here[last] = -np.inf, -np.inf
            else:
                here = most[r]
            mark = marks[start[i, r] * k_max : start[i, r + 1] * k_max]
            take(there, here, mark, gain, step, labels_, top[after])
            top[r] = max(top[r], min(last - 1, top[after] + step))
            if r == 0:
                row = table[leader[i]]
                for k in range(k_max):
                    for b in range(step, step + labels_):
                        row[k, b] = here[b, k]
                    row[k, last] = here[last, k]


@njit(cache=True)
def worth_of(price: float, multiplier: Floats, cost_s: Floats) -> float:
    """A request's price less its cost."""
    for q in range(len(cost_s)):
        price -= multiplier[q] * cost_s[q]
    return price


@njit(cache=True, fastmath={"nnan", "nsz"})  # a maximum may be taken in any order
def take(after: Floats, here: Floats, marks: Marks, gain: Floats, step: int, labels: int, top: int) -> None:
    """Raise ``here[b]`` to ``after[b - step] + gain`` where that is more, mark it; the last b: the rest.

    Args:
        after, here: ``[classes + 1, k]``.
        marks: ``[(labels + 1) k]`` written.
        gain: its first k are given; the rest is written.
        step, labels, top: the label, how many b change, and the last label of ``after`` that is reached.
    """
    classes, k_max = here.shape
    last, size = classes - 1, labels * k_max
    for j in range(k_max, size):
        gain[j] = gain[j - k_max]
    raised, given, mark = here.ravel()[step * k_max : step * k_max + size], after.ravel()[:size], marks[:size]
    for j in range(size):
        with_it, without = given[j] + gain[j], raised[j]
        more = with_it > without
        raised[j] = with_it if more else without
        mark[j] = 1 if more else 0
    for k in range(k_max):
        best = after[last, k]
        for b in range(max(0, last - step), top + 1):
            best = max(best, after[b, k])
        more = best + gain[k] > here[last, k]
        here[last, k] = best + gain[k] if more else here[last, k]
        marks[size + k] = 1 if more else 0


@njit(cache=True)
def collect(
    label: Ints,
    most_before: Ints,
    start: Ints,
    count: Ints,
    marks: Marks,
    k_max: int,
    classes: int,
    i: int,
    b: int,
    k: int,
    times: Floats,
) -> None:
    """Add 1 to ``times`` for each request of the set that request i leads in class b at multiplier k."""
    ranks = label.shape[1]
    times[i] += 1
    b, r = max(0, b - label[i, 0]), 1
    for x in range(i + 1, len(times)):
        if r > most_before[x]:
            continue
        row, step = min(r, ranks), label[x, min(r, ranks - 1)]
        place = count[x, row] if b >= classes else b - step
        if (b >= classes or 0 <= place < count[x, row]) and marks[(start[x, row] + place) * k_max + k]:
            times[x] += 1
            b, r = max(0, b - step), r + 1


@njit(cache=True)
def fold(most: Floats, top: Ints, label: Ints) -> None:
    """Put into the last class what r requests with such labels would bring there anyway.

    Args:
        most: ``[rows, classes + 1, k]``, row r for r longer requests.
        top: ``[rows]`` the largest label of each row, but for the last; changed.
        label: ``[ranks]`` of the request at hand; those of longer ones are no less, but for rounding.
    """
    rows, classes, k_max = most.shape
    last, before = classes - 1, 0
    for r in range(1, rows):
        before += label[r - 1]
        limit = max(-1, last - 1 - before)
        for b in range(limit + 1, top[r] + 1):
            for k in range(k_max):
                most[r, last, k] = max(most[r, last, k], most[r, b, k])
                most[r, b, k] = -np.inf
        top[r] = min(top[r], limit)


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})
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
