r"""Engines that are told by finishes: a quick model of one, and annealing of when it lets each request in.

A plan says in which order an engine takes its requests, and how many it runs together after each finish
(:attr:`tailopt.plan.Engine.limits`). That is the same as to say, of each request in that order, **after how
many finishes** it is let in: numbers :math:`g_1 \le g_2 \le \dots`, of which those at most f are
:math:`f` plus the limit after f finishes. So a change is a small one: a request comes a few finishes earlier
or later, two of them change places, or one takes the place of another that is about as long on another
engine. :func:`told_seconds` times an engine, and :func:`anneal_told` makes such changes.

**From a schedule.** A schedule made from its end says at which step each request should begin.
:func:`told` lets each in at the last finish before, by the steps that have then been taken: a difference of
one does not add to that of the next. So each comes a little too early and holds too much; annealing makes up
for nearly all of that.

The model goes from event to event. Between two of them the same n requests run, and the KV cache they hold
grows from K by n tokens a step, so d steps take :math:`d\,\tau(n, K + n d / 2)`. Somebody is done, or the
cache is full: then the one admitted last loses its tokens and waits at the very front. Who is let in is
admitted where all its tokens fit, and computing them takes time. Against the simulator it knows neither
blocks nor how prefill is chunked; a factor for each engine makes up for that.
"""

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints
from tailopt.oracle.mixed_queues_kernel import copied, moved, step_seconds

NEVER = 1 << 60
DEALT = 0.4  # of the proposals change engines, if they may
NEAR = 12  # places or finishes, by which a small change changes
LIKE = 0.3  # how much longer or shorter a partner may be


@njit(cache=True, nogil=True)
def told(
    queue: Ints,
    begins: Ints,
    limit: int,
    held: Ints,
    output: Ints,
    cache: int,
    base_s: Floats,
    slope_s: Floats,
    token_s: float,
    order: Ints,
    after: Ints,
) -> float:
    """When the last request of a schedule is done, if its engine is told by finishes.

    Args:
        queue, begins: requests, and how many steps before the end each should begin.
        limit: how many run together at most.
        held, output, cache, base_s, slope_s, token_s: as in :func:`told_seconds`.
        order, after: ``[n]`` written: the requests in the order of admission, after how many finishes.
    """
    places = np.argsort(-begins, kind="mergesort")
    order[:] = queue[places]
    due_step = begins[places[0]] - begins[places]
    done = np.empty(len(queue), np.int64)
    return _carried_out(
        order, after, due_step, limit, held, output, cache, base_s, slope_s, token_s, np.inf, done
    )


@njit(cache=True, nogil=True)
def told_seconds(
    order: Ints,
    after: Ints,
    limit: int,
    held: Ints,
    output: Ints,
    cache: int,
    base_s: Floats,
    slope_s: Floats,
    token_s: float,
    stop_s: float,
    done: Ints,
) -> float:
    """When the last request is done; infinity if that is after ``stop_s``.

    Args:
        order: requests in the order of admission.
        after: ``[len(order)]`` never falling: after how many finishes each may be let in; if nobody runs, the
            next one is in any case.
        limit: how many run together at most.
        held, output: ``[n]`` prompt and output tokens of each request.
        cache: tokens that fit.
        base_s, slope_s: ``[pieces, n_max + 1]`` and ``[pieces]`` of the step time.
        token_s: seconds to compute a token of a prompt.
        stop_s: no matter how much later.
        done: ``[len(order)]`` written: after how many steps each is done.
    """
    if len(order) == 0:
        return 0.0
    never = np.empty(0, np.int64)
    return _carried_out(
        order, after, never, limit, held, output, cache, base_s, slope_s, token_s, stop_s, done
    )


@njit(cache=True, nogil=True)
def _carried_out(
    order: Ints,
    after: Ints,
    due_step: Ints,
    limit: int,
    held: Ints,
    output: Ints,
    cache: int,
    base_s: Floats,
    slope_s: Floats,
    token_s: float,
    stop_s: float,
    done: Ints,
) -> float:
    """As :func:`told_seconds`; with a ``due_step`` for each request, ``after`` is written and not read.

    ``by_end`` holds those that run, the first done first, from ``front`` to ``back``; ``admitted`` all that
    were, the last of them on top, also those that are done.
    """
    n, by_step = len(order), len(due_step) > 0
    by_end, end = np.empty(2 * n + 1, np.int64), np.zeros(n, np.int64)
    gained, admitted, preempted = np.zeros(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    head, due, waiting, front, back, top = 0, 0, 0, 0, 0, 0
    step, full, finished, looked, seconds = 0, 0, 0, -1, 0.0
    while True:
        following = end[by_end[front]] if back > front else NEVER
        while due < n and due - finished < limit:
            if by_step:
                if due > finished and (finished == looked or due_step[due] >= following):
                    break
                following = min(following, step + output[order[due]])
                after[due] = finished
            elif due > finished and after[due] > finished:
                break
            due += 1
        looked = finished
        while waiting > 0 or head < due:
            one = preempted[waiting - 1] if waiting > 0 else head
            tokens = held[order[one]] + gained[one]
            if back > front and full + back - front + tokens + 1 > cache:
                break
            if waiting > 0:
                waiting -= 1
            else:
                head += 1
            seconds += token_s * tokens
            full += tokens
            admitted[top] = one
            top += 1
            end[one] = step + output[order[one]] - gained[one]
            if back == len(by_end):
                copied(by_end[front:], by_end, back - front)
                front, back = 0, back - front
            place = back
            while place > front and end[by_end[place - 1]] > end[one]:
                by_end[place] = by_end[place - 1]
                place -= 1
            by_end[place] = one
            back += 1
        now = back - front
        if now == 0:
            return seconds
        steps = end[by_end[front]] - step
        room = (cache - full) // now
        overflow = now > 1 and room < steps
        if overflow:
            steps = max(0, room)
        seconds += steps * step_seconds(now, full + 0.5 * now * steps, base_s, slope_s)
        if seconds > stop_s:
            return np.inf
        step += steps
        full += now * steps
        if overflow:
            top -= 1
            while end[admitted[top]] <= step:  # done before
                top -= 1
            one = admitted[top]
            gained[one] = output[order[one]] - (end[one] - step)
            full -= held[order[one]] + gained[one]
            preempted[waiting] = one
            waiting += 1
            place = front
            while by_end[place] != one:
                place += 1
            back -= 1
            for later in range(place, back):
                by_end[later] = by_end[later + 1]
        else:
            while front < back and end[by_end[front]] == step:
                one = by_end[front]
                full -= held[order[one]] + output[order[one]]
                finished += 1
                done[one] = step
                front += 1


@njit(cache=True, nogil=True)
def anneal_told(
    engines: Ints,
    orders: Ints,
    afters: Ints,
    counts: Ints,
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
    r"""Change orders, numbers of finishes and, if ``deal``, engines; one proposal for each row of ``draws``.

    Annealing on :math:`\sum_e (T_e / T)^p`.

    Args:
        engines: those that are changed; others are not looked at.
        orders, afters, counts: ``[m, n]`` and ``[m]`` changed: requests of each engine in the order of
            admission, after how many finishes they are let in, and how many they are.
        factor, kind_of: ``[m]`` what the model's seconds are multiplied by; kind of each engine.
        fits, held: ``[kinds, n]`` whether a request fits at all; prompt tokens it holds.
        output: ``[n]``.
        cache, slots, base_s, slope_s, token_s: ``[kinds, ...]`` as in :func:`told_seconds`.
        draws: ``[proposals, 7]`` uniform in [0, 1).
        power: p.
        heat: rise of the sum that is taken with probability 1/e.
        deal: whether requests may change engines.
    """
    m, n = orders.shape
    done_s, done = np.zeros(m), np.zeros((m, n), np.int64)
    for e in engines:
        k, count = kind_of[e], counts[e]
        done_s[e] = factor[e] * told_seconds(
            orders[e, :count], afters[e, :count], slots[k], held[k], output, cache[k], base_s[k],
            slope_s[k], token_s[k], np.inf, done[e],
        )  # fmt: skip
    scale = done_s.max()
    mine, my_after, my_done = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    other, its_after, its_done = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    for draw in draws:
        which, sort, first, second, extra, third, luck = draw
        e = engines[int((which - 0.5) * 2 * len(engines))] if which >= 0.5 else np.argmax(done_s)
        count, k, f = counts[e], kind_of[e], -1
        if count == 0:
            continue
        allowed = -heat * np.log(luck + 1e-12)
        i, own, others = int(first * count), count, 0
        copied(orders[e], mine, count)
        copied(afters[e], my_after, count)
        if deal and len(engines) > 1 and sort < DEALT:
            f = engines[int(second * len(engines))]
            if f == e or not fits[kind_of[f], mine[i]]:
                continue
            others = counts[f]
            copied(orders[f], other, others)
            copied(afters[f], its_after, others)
            # a partner that is about as long, or any
            j = int(extra * others)
            if third < 0.8 and others > 0:
                j = _like(other, others, output, output[mine[i]] * (1 + LIKE * (2 * extra - 1)))
            if sort < 0.7 * DEALT and others > 0:
                if not fits[k, other[j]]:
                    continue
                one, two = mine[i], other[j]
                _replace(mine, my_after, count, i, two, done[e], output)
                _replace(other, its_after, others, j, one, done[f], output)
            else:
                _put_in(other, its_after, others, j, mine[i], done[f], output)
                _take_out(mine, my_after, count, i, done[e])
                own, others = count - 1, others + 1
        else:
            turn = (sort - DEALT) / (1 - DEALT) if deal and len(engines) > 1 else sort
            if not _changed(mine, my_after, count, i, turn, second, extra):
                continue
        budget = (done_s[e] / scale) ** power + allowed
        if f >= 0:
            budget += (done_s[f] / scale) ** power
        stop_s = scale * budget ** (1 / power)
        then_e = factor[e] * told_seconds(
            mine[:own], my_after[:own], slots[k], held[k], output, cache[k], base_s[k], slope_s[k],
            token_s[k], stop_s / factor[e], my_done,
        )  # fmt: skip
        if (then_e / scale) ** power > budget:
            continue
        if f >= 0:
            k = kind_of[f]
            then_f = factor[f] * told_seconds(
                other[:others], its_after[:others], slots[k], held[k], output, cache[k], base_s[k],
                slope_s[k], token_s[k], stop_s / factor[f], its_done,
            )  # fmt: skip
            if (then_e / scale) ** power + (then_f / scale) ** power > budget:
                continue
            copied(other, orders[f], others)
            copied(its_after, afters[f], others)
            copied(its_done, done[f], others)
            counts[f], done_s[f] = others, then_f
        copied(mine, orders[e], own)
        copied(my_after, afters[e], own)
        copied(my_done, done[e], own)
        counts[e], done_s[e] = own, then_e


@njit(cache=True, nogil=True)
def _changed(order: Ints, after: Ints, count: int, i: int, sort: float, second: float, extra: float) -> bool:
    """Change order and finishes of one engine; whether there is a change."""
    if sort < 0.6:  # one comes earlier or later
        reach = 3 if sort < 0.3 else NEAR
        then = min(max(0, after[i] + int(second * (2 * reach + 1)) - reach), count - 1)
        if then == after[i]:
            return False
        _let_in(order, after, count, i, then)
        return True
    if sort < 0.9:  # two change places
        j = int(second * count) if sort < 0.7 else i + int(second * (2 * NEAR + 1)) - NEAR
        if j < 0 or j >= count or j == i:
            return False
        order[i], order[j] = order[j], order[i]
        return True
    change = 1 if second < 0.5 else -1  # some that follow each other come together earlier or later
    last = min(count, i + 1 + int(extra * 30))
    for j in range(i, last):
        after[j] = min(max(0, after[j] + change), count - 1)
    return bool((i == 0 or after[i - 1] <= after[i]) and (last == count or after[last - 1] <= after[last]))


@njit(cache=True, nogil=True)
def _like(order: Ints, count: int, output: Ints, length: float) -> int:
    """The place of the one whose length is nearest."""
    nearest, best = 0, np.inf
    for j in range(count):
        difference = abs(output[order[j]] - length)
        if difference < best:
            nearest, best = j, difference
    return nearest


@njit(cache=True, nogil=True)
def _let_in(order: Ints, after: Ints, count: int, i: int, then: int) -> None:
    """Let the i-th in after another number of finishes, at its place among the others."""
    j = i
    while j + 1 < count and after[j + 1] < then:
        j += 1
    while j > 0 and after[j - 1] > then:
        j -= 1
    moved(order, i, j)
    moved(after, i, j)
    after[j] = then


@njit(cache=True, nogil=True)
def _replace(order: Ints, after: Ints, count: int, i: int, one: int, done: Ints, output: Ints) -> None:
    """Put one in place of the i-th, to end when that did."""
    then = after[i] + _later(done, count, done[i] - output[order[i]], done[i] - output[one])
    order[i] = one
    _let_in(order, after, count, i, max(0, then))


@njit(cache=True, nogil=True)
def _later(done: Ints, count: int, step: int, other: int) -> int:
    """How many more are done by another step."""
    more = 0
    for place in range(count):
        more += (done[place] <= other) - (done[place] <= step)
    return more


@njit(cache=True, nogil=True)
def _take_out(order: Ints, after: Ints, count: int, i: int, done: Ints) -> None:
    """Take one out; those let in at its finish or later wait for one finish less."""
    finish = _later(done, count, -1, done[i])
    moved(order, i, count - 1)
    moved(after, i, count - 1)
    for j in range(count - 1):
        if after[j] >= finish:
            after[j] -= 1


@njit(cache=True, nogil=True)
def _put_in(order: Ints, after: Ints, count: int, j: int, one: int, done: Ints, output: Ints) -> None:
    """Put one in beside the j-th, to end when that does; those let in later wait for one finish more."""
    then = 0
    if count:
        then = after[j] + _later(done, count, done[j] - output[order[j]], done[j] - output[one])
        finish = _later(done, count, -1, done[j])
        for later in range(count):
            if after[later] >= finish:
                after[later] += 1
    order[count], after[count] = one, count
    _let_in(order, after, count + 1, count, max(0, then))
