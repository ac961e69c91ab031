"""The compiled part of the priced search (:mod:`tailopt.oracle.lagrangian_search` has the mathematics).

Requests are sorted by falling length; ``cost_s[q, i, r]`` is what request i adds to an engine, by minorant q,
if r longer ones are there, as in :mod:`tailopt.oracle.lagrangian_kernel`.
"""

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints
from tailopt.oracle.lagrangian_kernel import fold, take, worth_of

REFUTED, FOUND, GIVEN_UP = 0, 1, 2

BLOCK = 16
"""Classes of which it is known together what they are worth at most."""


@njit(cache=True, nogil=True)
def rests(
    cost_s: Floats,
    label: Ints,
    most_before: Ints,
    price: Floats,
    multiplier: Floats,
    start: Ints,
    rest: Floats,
) -> None:
    """Most that requests from i on are worth to an engine with r longer ones, less their time, by label.

    Args:
        cost_s, label, most_before, price, multiplier: as in
            :func:`tailopt.oracle.lagrangian_kernel.tabulate`.
        start: ``[places + 2]`` where the rows of each i = 0 .. places start, one for each r.
        rest: ``[rows, k, classes + 1]`` written; row ``start[i] + r`` is that of i and r.
    """
    n, ranks = label.shape
    k_max, last = len(multiplier), rest.shape[2] - 1
    most = np.full((ranks + 1, last + 1, k_max), -np.inf)
    most[:, 0, :] = 0.0
    top = np.zeros(ranks + 1, np.int64)  # the largest label reached, but for the last
    source, gain = np.empty((last + 1, k_max)), np.empty((last + 1) * k_max)
    marks = np.empty((last + 1) * k_max, np.uint8)
    places = len(start) - 2
    if n <= places:
        write(most, rest[start[n] : start[n + 1]])
    for i in range(n - 1, -1, -1):
        deepest = min(most_before[i], ranks)
        fold(most[: min(deepest + 1, ranks) + 1], top, label[i])
        for r in range(1, deepest + 1):
            column, after = min(r, ranks - 1), min(r + 1, ranks)
            step = min(label[i, column], last)
            labels = max(0, min(top[after], last - 1 - step) + 1)
            for k in range(k_max):
                gain[k] = worth_of(price[i], multiplier[k], cost_s[:, i, column])
            there = most[after]
            if r == after:
                source[: top[r] + 1], source[last] = there[: top[r] + 1], there[last]
                there = source
            take(there, most[r], marks, gain, step, labels, top[after])
            top[r] = max(top[r], min(last - 1, top[after] + step))
        if i <= places:
            write(most, rest[start[i] : start[i + 1]])


@njit(cache=True)
def write(most: Floats, rows: Floats) -> None:
    """Rows of ``most``, by multiplier and then by label."""
    for r in range(len(rows)):
        for k in range(rows.shape[1]):
            rows[r, k] = most[r, :, k]


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})  # a maximum may be taken in any order
def highest(rest: Floats, high: Floats) -> None:
    """``[rows, k, blocks]`` the highest value in each block of classes."""
    rows, k_max, classes = rest.shape
    for row in range(rows):
        for k in range(k_max):
            for block in range(high.shape[2]):
                best = -np.inf
                for b in range(block * BLOCK, min(classes, (block + 1) * BLOCK)):
                    best = max(best, rest[row, k, b])
                high[row, k, block] = best


@njit(cache=True, fastmath={"nnan", "nsz"})
def collectable(
    rest: Floats, high: Floats, multiplier: Floats, room_s: Floats, paid: Floats, least: Floats
) -> float:
    """Most that an engine with so much room (for each minorant) collects by a row of :func:`rests`.

    A block of classes is looked at only if its highest values say that it may have the most.

    Args:
        rest, high: the row, and its part of :func:`highest`.
        multiplier, room_s: ``[k, minorants]`` and ``[minorants]``.
        paid, least: ``[k]`` and ``[blocks + BLOCK]``, overwritten.
    """
    k_max, classes = rest.shape
    blocks = high.shape[1]
    for k in range(k_max):
        paid[k] = 0.0
        for q in range(len(room_s)):
            paid[k] += multiplier[k, q] * room_s[q]
    richest, most = 0, -np.inf
    for block in range(blocks):
        least[block] = np.inf
    for k in range(k_max):
        for block in range(blocks):
            least[block] = min(least[block], high[k, block] + paid[k])
    for block in range(blocks):
        if least[block] > most:
            richest, most = block, least[block]
    best = 0.0
    for turn in range(-1, blocks):
        block = richest if turn < 0 else turn
        if least[block] <= best or turn == richest:
            continue
        begin, size = block * BLOCK, min(BLOCK, classes - block * BLOCK)
        of_block = least[blocks : blocks + size]
        of_block[:] = np.inf
        for k in range(k_max):
            values = rest[k, begin : begin + size]
            for b in range(size):
                then = values[b] + paid[k]
                of_block[b] = then if then < of_block[b] else of_block[b]
        for b in range(size):
            best = max(best, of_block[b])
    return best


@njit(cache=True, nogil=True)
def explore(
    cost_s: Floats,
    unit: Ints,
    before: Ints,
    price: Floats,
    prefix: Floats,
    value: Floats,
    multiplier: Floats,
    start: Ints,
    rest: Floats,
    high: Floats,
    engines: int,
    makespan_s: float,
    slack: float,
    most_states: int,
    engine_of: Ints,
) -> tuple[int, int, int]:
    """Place requests in order, depth first, and go back where the engines cannot collect all prices.

    Args:
        cost_s, price, multiplier, start, rest: as in :func:`rests`; it has the rows for the requests that are
            placed at most.
        high: of :func:`highest`.
        unit: ``[n]`` unit of each request; units come in order of their first request.
        before: ``[n]`` one before that is equal to each, or -1; equal ones are units of their own.
        prefix: ``[u + 1]`` sums of the units' prices.
        value: ``[u]`` what an engine led by each unit collects.
        engines: how many.
        makespan_s: the trial.
        slack: by how much prices may be missed, for the rounding of sums.
        most_states: when to give up.
        engine_of: ``[u]`` written: the plan, if one is found, else the longest beginning, and -1 beyond.

    Returns:
        REFUTED, FOUND or GIVEN_UP; how many states were looked at; after how many requests none was left.
    """
    minorants, n, ranks = cost_s.shape
    places = len(start) - 2
    held = np.zeros((places + 1, engines), np.int64)
    load_s = np.zeros((places + 1, engines, minorants))
    opened = np.zeros(places + 1, np.int64)
    child, room = np.zeros((places + 1, engines), np.int64), np.empty(minorants)
    collected = np.zeros((places + 1, engines))
    children, following = np.zeros(places + 1, np.int64), np.zeros(places + 1, np.int64)
    least, alone = np.empty(high.shape[2] + BLOCK), np.empty(engines)
    paid = np.empty(len(multiplier))
    placed = np.zeros(n + 1)
    for i in range(n):
        placed[i + 1] = placed[i] + price[i]
    enough = prefix[-1] - slack
    started = np.zeros(n + 1, np.int64)  # units of which a request comes before
    for i in range(n):
        started[i + 1] = max(started[i], unit[i] + 1)
    states, deepest, i, fresh = 0, 0, 0, True
    longest = np.full(len(value), -1)
    while i >= 0:
        if fresh:
            children[i], following[i] = 0, 0
            if i == n:
                return FOUND, states, n
            if i == places or states > most_states:
                engine_of[:] = longest
                return GIVEN_UP, states, deepest
            first = started[i + 1] > started[i]
            for g in range(opened[i]):  # what each engine collects if this request goes elsewhere
                for q in range(minorants):
                    room[q] = makespan_s - load_s[i, g, q]
                row = start[i + 1] + min(held[i, g], ranks)
                alone[g] = collectable(rest[row], high[row], multiplier, room, paid, least)
            for e in range(min(opened[i] + 1, engines) if first else engines):
                if not first and e != engine_of[unit[i]]:
                    continue
                if before[i] >= 0 and e < engine_of[unit[before[i]]]:
                    continue
                if n == len(value) and e < opened[i] and as_before(held[i], load_s[i], e):
                    continue
                column, fits = min(held[i, e], ranks - 1), True
                for q in range(minorants):
                    if load_s[i, e, q] + cost_s[q, i, column] > makespan_s * (1 + 1e-12):
                        fits = False
                if not fits:
                    continue
                states += 1
                now_open = max(opened[i], e + 1)
                for q in range(minorants):
                    room[q] = makespan_s - load_s[i, e, q] - cost_s[q, i, column]
                row = start[i + 1] + min(held[i, e] + 1, ranks)
                sum_ = placed[i + 1] + collectable(rest[row], high[row], multiplier, room, paid, least)
                for g in range(opened[i]):
                    sum_ += alone[g] if g != e else 0.0
                sum_ = with_new_engines(sum_, value, prefix, started[i + 1], engines - now_open, slack)
                if sum_ >= enough:
                    children[i] = put(child[i], collected[i], children[i], e, sum_)
        if following[i] == children[i]:
            i, fresh = i - 1, False
            continue
        e = child[i, following[i]]
        following[i] += 1
        held[i + 1], load_s[i + 1], opened[i + 1] = held[i], load_s[i], max(opened[i], e + 1)
        column = min(held[i, e], ranks - 1)
        held[i + 1, e] += 1
        for q in range(minorants):
            load_s[i + 1, e, q] += cost_s[q, i, column]
        engine_of[unit[i]] = e
        i, fresh = i + 1, True
        if i > deepest:
            deepest, longest[: started[i]] = i, engine_of[: started[i]]
    return REFUTED, states, deepest + 1


@njit(cache=True)
def put(child: Ints, collected: Floats, children: int, e: int, sum_: float) -> int:
    """One child more, before those that collect less; how many there are now."""
    at = children
    while at > 0 and collected[at - 1] < sum_:
        collected[at], child[at] = collected[at - 1], child[at - 1]
        at -= 1
    collected[at], child[at] = sum_, e
    return children + 1


@njit(cache=True)
def as_before(held: Ints, load_s: Floats, e: int, first: int = 0) -> bool:
    """Whether an engine before engine e, from ``first`` on, holds as many and is equally late."""
    found = False
    for g in range(first, e):
        found |= held[g] == held[e] and (load_s[g] == load_s[e]).all()
    return found


@njit(cache=True)
def with_new_engines(
    so_far: float, value: Floats, prefix: Floats, unit: int, engines: int, slack: float
) -> float:
    """What is collected with so many engines more, led by units from ``unit`` on that those before leave."""
    best = 0.0
    for _ in range(engines):
        while unit < len(value) and prefix[unit] <= so_far + slack:
            best = max(best, value[unit])
            unit += 1
        so_far += best
    return so_far
