r"""A schedule made from its end, and annealing of who is on which engine by what such schedules take.

Backwards in time requests shrink: what fits when it is put in fits for good. So :func:`backward` puts the
requests of an engine in one after another, each as soon as it fits, until all have shrunk to their
beginnings. In such a schedule a request may begin at any step; what an engine that is told by finishes makes
of it is the matter of :mod:`tailopt.oracle.mixed_queues_told`.
"""

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints

NEVER = 1 << 60


@njit(cache=True, nogil=True)
def backward(
    queue: Ints,
    limit: int,
    held: Ints,
    output: Ints,
    cache: int,
    base_s: Floats,
    slope_s: Floats,
    token_s: float,
    stop_s: float,
    begins: Ints,
) -> float:
    """When the last request is done, if each could begin at any step; infinity if after ``stop_s``.

    Args:
        queue: requests in the order in which they are put in from the end.
        limit: how many run together at most.
        held, output: ``[n]`` prompt and output tokens of each request.
        cache: tokens that fit.
        base_s, slope_s: ``[pieces, n_max + 1]`` and ``[pieces]`` of the step time.
        token_s: seconds to compute a token of a prompt.
        stop_s: no matter how much later.
        begins: written: how many steps before the end each of the queue begins.
    """
    n = len(queue)
    running = np.empty(max(1, min(limit, n)), np.int64)
    head, now, step, full, following, seconds = 0, 0, 0, 0, NEVER, 0.0
    while head < n or now > 0:
        while head < n and now < len(running):
            i = queue[head]
            if now > 0 and full + held[i] + output[i] > cache:
                break
            full += held[i] + output[i]
            seconds += token_s * held[i]
            begins[head] = step + output[i]
            following = min(following, begins[head])
            running[now] = head
            now, head = now + 1, head + 1
        until = following
        if head < n and now < len(running):
            lacking = full + held[queue[head]] + output[queue[head]] - cache
            until = min(until, step + max(1, -(-lacking // now)))
        seconds += (until - step) * step_seconds(now, full - 0.5 * now * (until - step), base_s, slope_s)
        if seconds > stop_s:
            return np.inf
        full -= now * (until - step)
        step = until
        if step < following:
            continue
        kept, following = 0, NEVER
        for place in range(now):
            one = running[place]
            if begins[one] == step:
                full -= held[queue[one]]
            else:
                running[kept] = one
                following = min(following, begins[one])
                kept += 1
        now = kept
    return seconds


@njit(cache=True, nogil=True)
def step_seconds(now: int, kv_tokens: float, base_s: Floats, slope_s: Floats) -> float:
    """Of a step of so many requests that hold so many tokens."""
    tau = 0.0
    for piece in range(len(slope_s)):
        tau = max(tau, base_s[piece, now] + slope_s[piece] * kv_tokens)
    return tau


@njit(cache=True, nogil=True)
def anneal_queues(
    engines: Ints,
    queues: Ints,
    counts: Ints,
    limits: Ints,
    factor: Floats,
    kind_of: Ints,
    fits: Bools,
    held: Ints,
    output: Ints,
    cache: Ints,
    slots: Ints,
    base_s: Floats,
    slope_s: Floats,
    token_s: Floats,
    draws: Floats,
    power: float,
    heat: float,
    deal: bool,
) -> None:
    r"""Change limits and engines or, if not ``deal``, orders; one proposal for each row of ``draws``.

    Annealing on :math:`\sum_e (T_e / T)^p`.

    Args:
        engines: those that are changed; others are not looked at.
        queues, counts, limits: ``[m, n]`` and ``[m]`` changed: requests of each engine in the order in which
            they are put in from the end, how many, and how many run together at most.
        factor, kind_of: ``[m]`` what the schedule's seconds are multiplied by; kind of each engine.
        fits, held: ``[kinds, n]`` whether a request fits at all; prompt tokens it holds.
        output: ``[n]``.
        cache, slots, base_s, slope_s, token_s: ``[kinds, ...]`` as in :func:`backward`.
        draws: ``[proposals, 7]`` uniform in [0, 1).
        power: p.
        heat: rise of the sum that is taken with probability 1/e.
        deal: whether requests may change engines.
    """
    m, n = queues.shape
    done_s, begins = np.zeros(m), np.empty(n, np.int64)
    for e in engines:
        k = kind_of[e]
        done_s[e] = factor[e] * backward(
            queues[e, : counts[e]], limits[e], held[k], output, cache[k], base_s[k], slope_s[k], token_s[k],
            np.inf, begins,
        )  # fmt: skip
    scale = done_s.max()
    mine, other = np.empty(n, np.int64), np.empty(n, np.int64)
    for draw in draws:
        which, sort, first, second, extra, third, luck = draw
        e = engines[int((which - 0.5) * 2 * len(engines))] if which >= 0.5 else np.argmax(done_s)
        count, limit, k, f = counts[e], limits[e], kind_of[e], -1
        if count == 0:
            continue
        allowed = -heat * np.log(luck + 1e-12)
        i, j = int(first * count), int(second * count)
        copied(queues[e], mine, count)
        others, own = 0, count
        if sort < 0.03:
            limit = min(max(1, limit + int((second - 0.5) * max(6.0, 0.2 * limit))), slots[k])
        elif deal and len(engines) > 1:
            f = engines[int(second * len(engines))]
            others = counts[f]
            if f == e or not fits[kind_of[f], mine[i]]:
                continue
            copied(queues[f], other, others)
            place = 0
            while place < others and output[other[place]] > output[mine[i]]:
                place += 1
            if third < 0.7 and others > 0:  # swapped with one that is about as long, or with any
                near = place + int((extra - 0.5) * 12) if third < 0.5 else int(extra * others)
                place = min(max(0, near), others - 1)
                if not fits[k, other[place]]:
                    continue
                mine[i], other[place] = other[place], mine[i]
                _settle(mine, count, i, output)
                _settle(other, others, place, output)
            else:
                other[others] = mine[i]
                moved(other, others, place)
                moved(mine, i, count - 1)
                own, others = count - 1, others + 1
        elif third < 0.4:
            mine[i], mine[j] = mine[j], mine[i]
        else:
            moved(mine, i, j)
        budget = (done_s[e] / scale) ** power + allowed
        if f >= 0:
            budget += (done_s[f] / scale) ** power
        stop_s = scale * budget ** (1 / power)
        then_e = factor[e] * backward(
            mine[:own], limit, held[k], output, cache[k], base_s[k], slope_s[k], token_s[k],
            stop_s / factor[e], begins,
        )  # fmt: skip
        if (then_e / scale) ** power > budget:
            continue
        if f >= 0:
            k = kind_of[f]
            then_f = factor[f] * backward(
                other[:others], limits[f], held[k], output, cache[k], base_s[k], slope_s[k], token_s[k],
                stop_s / factor[f], begins,
            )  # fmt: skip
            if (then_e / scale) ** power + (then_f / scale) ** power > budget:
                continue
            copied(other, queues[f], others)
            counts[f], done_s[f] = others, then_f
        copied(mine, queues[e], own)
        counts[e], limits[e], done_s[e] = own, limit, then_e


@njit(cache=True, nogil=True)
def copied(source: Ints, target: Ints, count: int) -> None:
    """Copy the first so many."""
    for place in range(count):
        target[place] = source[place]


@njit(cache=True, nogil=True)
def _settle(queue: Ints, count: int, place: int, output: Ints) -> None:
    """The one at this place moves to where those before are longer, if they were sorted."""
    while place > 0 and output[queue[place - 1]] < output[queue[place]]:
        queue[place - 1], queue[place] = queue[place], queue[place - 1]
        place -= 1
    while place < count - 1 and output[queue[place + 1]] > output[queue[place]]:
        queue[place + 1], queue[place] = queue[place], queue[place + 1]
        place += 1


@njit(cache=True, nogil=True)
def moved(queue: Ints, i: int, j: int) -> None:
    """Move the i-th to place j."""
    one = queue[i]
    if i < j:
        for place in range(i, j):
            queue[place] = queue[place + 1]
    else:
        for place in range(i, j, -1):
            queue[place] = queue[place - 1]
    queue[j] = one
