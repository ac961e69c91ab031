r"""A quick model of one engine's queue, and annealing of all queues at once.

The model goes from event to event. Between two of them the same n requests run, and the KV cache they hold
grows from K by n tokens a step, so d steps take :math:`d\,\tau(n, K + n d / 2)`. Somebody is done, or the
cache is full: then the one admitted last loses its tokens and waits at the very front. The head of the queue
is admitted where a slot is free and all its tokens fit, and computing them takes time. Against the simulator
it knows neither blocks nor how prefill is chunked; a factor for each engine makes up for that.
"""

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints


@njit(cache=True)
def queue_seconds(
    queue: Ints,
    limit: int,
    held: Ints,
    output: Ints,
    cache: int,
    base_s: Floats,
    slope_s: Floats,
    token_s: float,
    stop_s: float,
) -> float:
    """When the last request is done; infinity if that is after ``stop_s``.

    Args:
        queue: requests in the order of admission.
        limit: how many run together at most.
        held, output: ``[n]`` prompt and output tokens of each request.
        cache: tokens that fit.
        base_s, slope_s: ``[pieces, n_max + 1]`` and ``[pieces]`` of the step time.
        token_s: seconds to compute a token of a prompt.
        stop_s: no matter how much later.
    """
    n = len(queue)
    gained = np.zeros(len(output), np.int64)
    running, end, began = np.empty(limit, np.int64), np.empty(limit, np.int64), np.empty(limit, np.int64)
    preempted = np.empty(n, np.int64)
    head, waiting, now, step, full, seconds = 0, 0, 0, 0, 0, 0.0
    while True:
        while now < limit and (waiting > 0 or head < n):
            i = preempted[waiting - 1] if waiting > 0 else queue[head]
            tokens = held[i] + gained[i]
            if now > 0 and full + now + tokens + 1 > cache:
                break
            if waiting > 0:
                waiting -= 1
            else:
                head += 1
            seconds += token_s * tokens
            full += tokens
            running[now], end[now], began[now] = i, step + output[i] - gained[i], step - gained[i]
            now += 1
        if now == 0:
            return seconds
        last = end[0]
        for place in range(1, now):
            last = min(last, end[place])
        steps = last - step
        room = (cache - full) // now
        overflow = now > 1 and room < steps
        if overflow:
            steps = max(0, room)
        middle = full + 0.5 * now * steps
        tau = 0.0
        for piece in range(len(slope_s)):
            tau = max(tau, base_s[piece, now] + slope_s[piece] * middle)
        seconds += steps * tau
        if seconds > stop_s:
            return np.inf
        step += steps
        full += now * steps
        if overflow:
            now -= 1
            i = running[now]
            gained[i] = step - began[now]
            full -= held[i] + gained[i]
            preempted[waiting] = i
            waiting += 1
        else:
            kept = 0
            for place in range(now):
                i = running[place]
                if end[place] == step:
                    full -= held[i] + output[i]
                else:
                    running[kept], end[kept], began[kept] = i, end[place], began[place]
                    kept += 1
            now = kept


@njit(cache=True)
def backward(queue: Ints, held: Ints, output: Ints, cache: int, limit: int) -> tuple[Ints, Ints]:
    """The queue by the starts of a schedule made from its end, and how many steps before it each starts.

    Backwards requests shrink, so what fits when it is put in fits for good. The longest end together, with
    the cache full; short ones are left for the beginning, where the cache fills. Arguments as in
    :func:`queue_seconds`.
    """
    n = len(queue)
    order = queue[np.argsort(-output[queue], kind="mergesort")]
    begins = np.zeros(n, np.int64)
    running = np.empty(max(1, min(limit, n)), np.int64)
    head, now, step, full = 0, 0, 0, 0
    while head < n or now > 0:
        while head < n and now < len(running):
            i = order[head]
            if now > 0 and full + held[i] + output[i] > cache:
                break
            full += held[i] + output[i]
            begins[head] = step + output[i]
            running[now] = head
            now, head = now + 1, head + 1
        following = begins[running[0]]
        for place in range(1, now):
            following = min(following, begins[running[place]])
        if head < n and now < len(running):
            lacking = full + held[order[head]] + output[order[head]] - cache
            following = min(following, step + max(1, -(-lacking // now)))
        full -= now * (following - step)
        step = following
        kept = 0
        for place in range(now):
            if begins[running[place]] == step:
                full -= held[order[running[place]]]
            else:
                running[kept] = running[place]
                kept += 1
        now = kept
    by_start = np.argsort(-begins, kind="mergesort")
    return order[by_start], begins[by_start]


@njit(cache=True)
def anneal_queues(
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
    cooler: float,
    deal: bool,
) -> None:
    r"""Change orders, limits and, if ``deal``, engines; one proposal for each row of ``draws``.

    Annealing on :math:`\sum_e (T_e / T)^p`.

    Args:
        queues, counts, limits: ``[m, n]``, ``[m]``, ``[m]`` changed: requests of each engine in order, how
            many, and how many run together at most.
        factor, kind_of: ``[m]`` what the model's seconds are multiplied by; kind of each engine.
        fits, held: ``[kinds, n]`` whether a request fits at all; prompt tokens it holds.
        output: ``[n]``.
        cache, slots, base_s, slope_s, token_s: ``[kinds, ...]`` as in :func:`queue_seconds`.
        draws: ``[proposals, 7]`` uniform in [0, 1).
        power: p.
        heat, cooler: rise of the sum that is taken with probability 1/e, at first and in the end.
        deal: whether requests may change engines.
    """
    m, n = queues.shape
    done_s = np.zeros(m)
    for e in range(m):
        k = kind_of[e]
        done_s[e] = factor[e] * queue_seconds(
            queues[e, : counts[e]], limits[e], held[k], output, cache[k], base_s[k], slope_s[k], token_s[k],
            np.inf,
        )  # fmt: skip
    scale = done_s.max()
    mine, other = np.empty(n, np.int64), np.empty(n, np.int64)
    for t in range(len(draws)):
        which, sort, first, second, extra, third, luck = draws[t]
        e = int(np.argmax(done_s)) if which < 0.5 else int((which - 0.5) * 2 * m)
        count, limit, k, f = counts[e], limits[e], kind_of[e], -1
        if count == 0:
            continue
        allowed = -(heat + (cooler - heat) * t / len(draws)) * np.log(luck + 1e-12)
        i, j = int(first * count), int(second * count)
        _copy(queues[e], mine, count)
        others, own = 0, count
        if sort < 0.1:
            limit = min(max(1, limit + int((second - 0.5) * max(6.0, 0.2 * limit))), slots[k])
        elif deal and m > 1 and sort < 0.45:
            f = int(second * m)
            others = counts[f]
            if f == e or not fits[kind_of[f], mine[i]]:
                continue
            _copy(queues[f], other, others)
            if sort < 0.35 and others > 0:  # swapped with one that is about as long, if there is one nearby
                place = int(extra * others)
                for near in range(place, min(others, place + int(third * 12))):
                    if abs(output[other[near]] - output[mine[i]]) < abs(
                        output[other[place]] - output[mine[i]]
                    ):
                        place = near
                if not fits[k, other[place]]:
                    continue
                mine[i], other[place] = other[place], mine[i]
            else:
                other[others] = mine[i]
                _move(other, others, int(extra * (others + 1)))
                _move(mine, i, count - 1)
                own, others = count - 1, others + 1
        elif sort < 0.65:
            mine[i], mine[j] = mine[j], mine[i]
        elif sort < 0.9:
            _move(mine, i, j)
        else:
            _turn(mine, i, min(count, i + 2 + int(extra * count) // 4))
        budget = (done_s[e] / scale) ** power + allowed
        if f >= 0:
            budget += (done_s[f] / scale) ** power
        stop_s = scale * budget ** (1 / power)
        then_e, then_f = 0.0, 0.0
        for engine, queue, length, most in ((e, mine, own, limit), (f, other, others, limits[f])):
            if length == 0:
                continue
            k = kind_of[engine]
            seconds = factor[engine] * queue_seconds(
                queue[:length], most, held[k], output, cache[k], base_s[k], slope_s[k], token_s[k],
                stop_s / factor[engine],
            )  # fmt: skip
            if engine == e:
                then_e = seconds
            else:
                then_f = seconds
            if seconds == np.inf:
                break
        if (then_e / scale) ** power + (then_f / scale) ** power > budget:
            continue
        if f >= 0:
            _copy(other, queues[f], others)
            counts[f], done_s[f] = others, then_f
        _copy(mine, queues[e], own)
        counts[e], limits[e], done_s[e] = own, limit, then_e


@njit(cache=True)
def _copy(source: Ints, target: Ints, count: int) -> None:
    """The first so many."""
    for place in range(count):
        target[place] = source[place]


@njit(cache=True)
def _turn(queue: Ints, start: int, end: int) -> None:
    """A stretch of the queue the other way round."""
    while start < end - 1:
        queue[start], queue[end - 1] = queue[end - 1], queue[start]
        start, end = start + 1, end - 1


@njit(cache=True)
def _move(queue: Ints, i: int, j: int) -> None:
    """The i-th moves to place j."""
    moved = queue[i]
    if i < j:
        for place in range(i, j):
            queue[place] = queue[place + 1]
    else:
        for place in range(i, j, -1):
            queue[place] = queue[place - 1]
    queue[j] = moved
