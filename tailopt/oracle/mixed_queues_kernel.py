r"""A schedule made from its end, a quick model of an engine that carries it out, and annealing of all queues.

**From the end.** Backwards in time requests shrink: what fits when it is put in fits for good. So
:func:`backward` puts the requests of an engine in one after another, each as soon as it fits, until all have
shrunk to their beginnings.

**Carried out.** In such a schedule a request may begin at any step; an engine, told by finishes
(:attr:`tailopt.plan.Engine.limits`), lets one in only when another is done. :func:`carry_out` lets each in at
the last finish before it should begin, by the steps that have then been taken: a difference of one does not
add to that of the next. It writes down how many were to run after each finish, which is all that a plan has
to say. What a request begins too early it holds too much, so the schedule is made for a share of the cache.

The model goes from event to event. Between two of them the same n requests run, and the KV cache they hold
grows from K by n tokens a step, so d steps take :math:`d\,\tau(n, K + n d / 2)`. Somebody is done, or the
cache is full: then the one admitted last loses its tokens and waits at the very front. Who is let in is
admitted where all its tokens fit, and computing them takes time. Against the simulator it knows neither
blocks nor how prefill is chunked; a factor for each engine makes up for that.
"""

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints

NEVER = 1 << 60
SPARE = 1.005  # an exact schedule that takes so much longer is not carried out earlier
LEAST_SHARE, MOST_SHARE = 0.8, 3.0  # of the cache, for which a schedule is made
DEALT = 0.95  # of the proposals, those that are not for the order from the end; all if schedules are exact


@njit(cache=True)
def queue_seconds(
    queue: Ints,
    limit: int,
    share: float,
    held: Ints,
    output: Ints,
    cache: int,
    base_s: Floats,
    slope_s: Floats,
    token_s: float,
    stop_s: float,
    exact: bool,
) -> float:
    """When the last request is done; infinity if that is after ``stop_s``.

    Args:
        queue: requests in the order in which they are put in from the end.
        limit: how many run together at most.
        share: of the cache, for which the schedule is made.
        held, output: ``[n]`` prompt and output tokens of each request.
        cache: tokens that fit.
        base_s, slope_s: ``[pieces, n_max + 1]`` and ``[pieces]`` of the step time.
        token_s: seconds to compute a token of a prompt.
        stop_s: no matter how much later.
        exact: whether each could begin when the schedule says, rather than when another is done.
    """
    if len(queue) == 0:
        return 0.0
    begins, together = np.empty(len(queue), np.int64), np.empty(len(queue) + 1, np.int64)
    until_s = stop_s if exact else stop_s * SPARE
    seconds = backward(
        queue, limit, held, output, int(share * cache), base_s, slope_s, token_s, until_s, begins
    )
    if exact or seconds == np.inf:
        return seconds
    return carry_out(
        queue, begins, limit, held, output, cache, base_s, slope_s, token_s, stop_s, together
    )  # fmt: skip


@njit(cache=True)
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
    """When the last request is done, if each could begin exactly so many steps before as is written."""
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
        seconds += (until - step) * _step_seconds(now, full - 0.5 * now * (until - step), base_s, slope_s)
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


@njit(cache=True)
def carry_out(
    queue: Ints,
    begins: Ints,
    limit: int,
    held: Ints,
    output: Ints,
    cache: int,
    base_s: Floats,
    slope_s: Floats,
    token_s: float,
    stop_s: float,
    together: Ints,
) -> float:
    """When the last request is done, as :func:`queue_seconds`, of a schedule that is told by finishes.

    Writes ``[n + 1]`` how many may run together after so many finishes; 0 stands for what it was before.
    """
    n = len(queue)
    order = np.argsort(-begins, kind="mergesort")
    total = begins[order[0]]
    running, end, began = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    gained, preempted = np.zeros(n, np.int64), np.empty(n, np.int64)
    head, due, waiting, now, step, full, finished, seconds = 0, 0, 0, 0, 0, 0, 0, 0.0
    following = NEVER  # step at which the next one is done
    together[:] = 0
    while True:
        while due < n and due - finished < limit:
            if due > finished and total - begins[order[due]] >= following:
                break
            following = min(following, step + output[queue[order[due]]])
            due += 1
        together[finished] = due - finished
        while waiting > 0 or head < due:
            one = preempted[waiting - 1] if waiting > 0 else order[head]
            i = queue[one]
            tokens = held[i] + gained[one]
            if now > 0 and full + now + tokens + 1 > cache:
                break
            if waiting > 0:
                waiting -= 1
            else:
                head += 1
            seconds += token_s * tokens
            full += tokens
            running[now], end[now], began[now] = one, step + output[i] - gained[one], step - gained[one]
            now += 1
        if now == 0:
            return seconds
        following = end[0]
        for place in range(1, now):
            following = min(following, end[place])
        steps = following - step
        room = (cache - full) // now
        overflow = now > 1 and room < steps
        if overflow:
            steps = max(0, room)
        seconds += steps * _step_seconds(now, full + 0.5 * now * steps, base_s, slope_s)
        if seconds > stop_s:
            return np.inf
        step += steps
        full += now * steps
        if overflow:
            now -= 1
            one = running[now]
            gained[one] = step - began[now]
            full -= held[queue[one]] + gained[one]
            preempted[waiting] = one
            waiting += 1
        kept, following = 0, NEVER
        for place in range(now):
            one = running[place]
            if end[place] == step and not overflow:
                full -= held[queue[one]] + output[queue[one]]
                finished += 1
            else:
                running[kept], end[kept], began[kept] = one, end[place], began[place]
                following = min(following, end[kept])
                kept += 1
        now = kept


@njit(cache=True)
def _step_seconds(now: int, kv_tokens: float, base_s: Floats, slope_s: Floats) -> float:
    """Of a step of so many requests that hold so many tokens."""
    tau = 0.0
    for piece in range(len(slope_s)):
        tau = max(tau, base_s[piece, now] + slope_s[piece] * kv_tokens)
    return tau


@njit(cache=True)
def anneal_queues(
    queues: Ints,
    counts: Ints,
    limits: Ints,
    shares: Floats,
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
    exact: bool,
) -> None:
    r"""Change orders, limits, shares and, if ``deal``, engines; one proposal for each row of ``draws``.

    Annealing on :math:`\sum_e (T_e / T)^p`.

    Args:
        queues, counts, limits, shares: ``[m, n]`` and ``[m]`` changed: requests of each engine in the order
            in which they are put in from the end, how many, how many run together at most, and the share of
            the cache.
        factor, kind_of: ``[m]`` what the model's seconds are multiplied by; kind of each engine.
        fits, held: ``[kinds, n]`` whether a request fits at all; prompt tokens it holds.
        output: ``[n]``.
        cache, slots, base_s, slope_s, token_s: ``[kinds, ...]`` as in :func:`queue_seconds`.
        draws: ``[proposals, 7]`` uniform in [0, 1).
        power: p.
        heat, cooler: rise of the sum that is taken with probability 1/e, at first and in the end.
        deal: whether requests may change engines.
        exact: as in :func:`queue_seconds`.
    """
    m, n = queues.shape
    done_s = np.zeros(m)
    for e in range(m):
        k = kind_of[e]
        done_s[e] = factor[e] * queue_seconds(
            queues[e, : counts[e]], limits[e], shares[e], held[k], output, cache[k], base_s[k], slope_s[k],
            token_s[k], np.inf, exact,
        )  # fmt: skip
    scale = done_s.max()
    mine, other = np.empty(n, np.int64), np.empty(n, np.int64)
    for t in range(len(draws)):
        which, sort, first, second, extra, third, luck = draws[t]
        e = int(np.argmax(done_s)) if which < 0.5 else int((which - 0.5) * 2 * m)
        count, limit, share, k, f = counts[e], limits[e], shares[e], kind_of[e], -1
        if count == 0:
            continue
        allowed = -(heat + (cooler - heat) * t / len(draws)) * np.log(luck + 1e-12)
        i, j = int(first * count), int(second * count)
        _copy(queues[e], mine, count)
        others, own = 0, count
        if sort < 0.03:
            limit = min(max(1, limit + int((second - 0.5) * max(6.0, 0.2 * limit))), slots[k])
        elif sort < 0.06 and not exact:
            share = min(max(LEAST_SHARE, share * (0.97 + 0.06 * second)), MOST_SHARE)
        elif deal and m > 1 and (exact or sort < DEALT):
            f = int(second * m)
            others = counts[f]
            if f == e or not fits[kind_of[f], mine[i]]:
                continue
            _copy(queues[f], other, others)
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
                _move(other, others, place)
                _move(mine, i, count - 1)
                own, others = count - 1, others + 1
        elif third < 0.4:
            mine[i], mine[j] = mine[j], mine[i]
        else:
            _move(mine, i, j)
        budget = (done_s[e] / scale) ** power + allowed
        if f >= 0:
            budget += (done_s[f] / scale) ** power
        stop_s = scale * budget ** (1 / power)
        then_e, then_f = 0.0, 0.0
        for engine, queue, length, most, part in (
            (e, mine, own, limit, share),
            (f, other, others, limits[f], shares[f]),
        ):
            if length == 0:
                continue
            k = kind_of[engine]
            seconds = factor[engine] * queue_seconds(
                queue[:length], most, part, held[k], output, cache[k], base_s[k], slope_s[k], token_s[k],
                stop_s / factor[engine], exact,
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
        counts[e], limits[e], shares[e], done_s[e] = own, limit, share, then_e


@njit(cache=True)
def _copy(source: Ints, target: Ints, count: int) -> None:
    """The first so many."""
    for place in range(count):
        target[place] = source[place]


@njit(cache=True)
def _settle(queue: Ints, count: int, place: int, output: Ints) -> None:
    """The one at this place moves to where those before are longer, if they were sorted."""
    while place > 0 and output[queue[place - 1]] < output[queue[place]]:
        queue[place - 1], queue[place] = queue[place], queue[place - 1]
        place -= 1
    while place < count - 1 and output[queue[place + 1]] > output[queue[place]]:
        queue[place + 1], queue[place] = queue[place], queue[place + 1]
        place += 1


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
