r"""Plans with one switch, annealed: where each unit is before and after, and how many are left then.

Between two events an engine runs the same requests, so its times sum in closed form
(:func:`tailopt.simulate.kernel.seconds`). The **first phase** is walked engine by engine, from finish to
finish, longest first where slots are few; the switch comes with the finish that leaves n, when each engine
ends the step it is in. An engine that closes then sleeps, one that opens wakes when all that close are
asleep, one that is in both goes on. In the **second phase** an engine first computes the contexts that come
to it anew, unless they can be sent while others run, and then decodes what it has
(:func:`tailopt.oracle.filling.set_time_s`). What counts is

.. math:: \max_f \mathrm{done}_f + \frac{\epsilon}{m} \sum_f \mathrm{done}_f ,

and more in the cache than fits, in the first phase, makes all of it longer by its share.
A plan that is good here is carried out by the simulator, which has the last word.
"""

from heapq import heapify, heapreplace
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints
from tailopt.oracle.filling import set_time_s
from tailopt.simulate.kernel import seconds

EVEN = 0.1  # weight of the mean over the engines, beside the last one
NUMBER, AFTER = 0.06, 0.55  # proposals that change n; up to here, where units go after the switch
SWAP, NEAR = 0.6, 24  # of these, exchanges; by how many places in length partners differ, at most


class Batch(NamedTuple):
    """Requests by falling length, ``[n]`` each."""

    output: Ints
    prompt: Ints  # tokens of context at the start,
    own: Ints  # of which it alone has those,
    shared: Ints  # and with its group's samples these
    group: Ints
    unit: Ints  # that it belongs to, one engine for each


class Engines(NamedTuple):
    """The engines of one phase, ``[m]`` each, the lines of their step times by kind."""

    base_s: Floats
    slope_s: Floats
    pieces: Ints
    kind: Ints
    slots: Ints
    cache: Ints
    token_s: Floats  # to compute a token of context
    sent_s: Floats  # to send one here instead, infinity if that cannot be
    sleep_s: Floats
    wake_s: Floats
    twin: Ints  # the engine of the other phase that is the same, -1 if there is none
    fits: Bools  # ``[m, u]``, whether each unit does


@njit(cache=True, nogil=True)
def walk(
    batch: Batch,
    first: Engines,
    e: int,
    before: Ints,
    until_s: float,
    start: Ints,
    finish_s: Floats,
    seen: Ints,
) -> tuple[float, int, float]:
    """One engine from its start to the step that ends at ``until_s`` or later.

    Writes when its requests are let in, ``start`` in steps, and finish.

    Returns:
        When that step ends, steps taken by then, and the largest share of the cache in use.
    """
    mine, due = np.empty(len(batch.output), np.int64), np.empty(len(batch.output), np.int64)
    count, tokens = 0, 0
    seen[:] = 0
    for r in range(len(batch.output)):
        if before[batch.unit[r]] == e:
            mine[count], due[count], start[r] = r, batch.output[r], 0
            count += 1
            tokens += batch.own[r] + (0 if seen[batch.group[r]] else batch.shared[r])
            seen[batch.group[r]] = 1
    slots, k = first.slots[e], first.kind[e]
    order: Ints = np.arange(count - 1, -1, -1)  # by rising finish
    if count > slots:
        ends = [due[i] for i in range(slots)]
        heapify(ends)
        for i in range(slots, count):
            start[mine[i]] = ends[0]
            due[i] += ends[0]
            heapreplace(ends, due[i])
        order = np.argsort(due[:count])
    n, share = int(min(count, slots)), 0.0
    held = batch.prompt[mine[:n]].sum()  # at step 0, of those that run
    slope_s, past, now_s = first.slope_s[k, : first.pieces[k]], 0, tokens * first.token_s[e]
    waiting = n
    for i in order:
        if now_s >= until_s:
            break
        base_s = first.base_s[k, n, : first.pieces[k]]
        kv, low, high = held + n * (past + 1), 0, int(due[i]) - past
        then_s = now_s + (seconds(base_s, slope_s, n, kv, high) if high else 0.0)
        over = then_s >= until_s
        while over and high - low > 1:  # the least number of steps that are not done before
            middle = (low + high) // 2
            if now_s + seconds(base_s, slope_s, n, kv, middle) < until_s:
                low = middle
            else:
                high = middle
        if over and past + high < due[i]:
            past, now_s = past + high, now_s + seconds(base_s, slope_s, n, kv, high)
            share = max(share, (held + n * past) / first.cache[e])
            break
        past, now_s = int(due[i]), then_s
        share = max(share, (held + n * past) / first.cache[e])
        r = mine[i]
        finish_s[r] = now_s
        held -= batch.prompt[r] - start[r]
        n -= 1
        if waiting < count:
            held += batch.prompt[mine[waiting]] - past
            waiting += 1
            n += 1
    return now_s, past, share


@njit(cache=True, nogil=True)
def done_s(
    batch: Batch,
    first: Engines,
    second: Engines,
    before: Ints,
    after: Ints,
    unfinished: int,
    start: Ints,
    finish_s: Floats,
    seen: Ints,
) -> tuple[float, Floats, float]:
    """When a plan switches, when each engine is then done, and the largest share of a cache in use before.

    ``start`` and ``finish_s`` are as if nobody switched.
    """
    n, m, engines = len(batch.output), len(first.kind), len(second.kind)
    switch_s = np.partition(finish_s, n - unfinished - 1)[n - unfinished - 1]
    end_s, steps, asleep_s, share = np.empty(m), np.empty(m, np.int64), switch_s, 0.0
    same, unused = np.empty(n, np.int64), np.empty(n)
    for e in range(m):
        end_s[e], steps[e], most = walk(batch, first, e, before, switch_s, same, unused, seen)
        share = max(share, most)
        if first.twin[e] < 0:
            asleep_s = max(asleep_s, end_s[e] + first.sleep_s[e])
    then_s, sending_s = np.empty(engines), np.zeros(m)
    for f in range(engines):
        twin = second.twin[f]
        then_s[f] = max(switch_s, end_s[twin]) if twin >= 0 else asleep_s + second.wake_s[f]
    left, context = np.empty((engines, n), np.int64), np.empty((engines, n), np.int64)
    count = np.zeros(engines, np.int64)
    for r in range(n):
        e, f = before[batch.unit[r]], after[batch.unit[r]]
        gained = min(max(steps[e] - start[r], 0), batch.output[r])
        tokens, held = batch.output[r] - gained, batch.prompt[r] + gained
        if tokens == 0:
            continue
        if second.twin[f] != e or gained == 0:
            anew_s, sent_s = held * second.token_s[f], sending_s[e] + held * second.sent_s[f]
            if sent_s < anew_s:
                sending_s[e] = sent_s
            else:
                then_s[f] += anew_s
        place = count[f]
        while place > 0 and left[f, place - 1] < tokens:
            left[f, place], context[f, place] = left[f, place - 1], context[f, place - 1]
            place -= 1
        left[f, place], context[f, place] = tokens, held
        count[f] += 1
    for f in range(engines):
        if count[f]:
            k = second.kind[f]
            then_s[f] += set_time_s(left[f, : count[f]], context[f, : count[f]],
                                    second.base_s[k, :, : second.pieces[k]],
                                    second.slope_s[k, : second.pieces[k]],
                                    second.slots[f], second.cache[f])  # fmt: skip
        else:
            then_s[f] = switch_s
    return float(switch_s), then_s, share


@njit(cache=True, nogil=True)
def cost_s(
    batch: Batch,
    first: Engines,
    second: Engines,
    before: Ints,
    after: Ints,
    unfinished: int,
    start: Ints,
    finish_s: Floats,
    seen: Ints,
) -> float:
    """What counts for a plan."""
    _, then_s, share = done_s(batch, first, second, before, after, unfinished, start, finish_s, seen)
    return float(max(1.0, share) * (then_s.max() + EVEN * then_s.mean()))


@njit(cache=True, nogil=True)
def anneal(
    batch: Batch,
    first: Engines,
    second: Engines,
    before: Ints,
    after: Ints,
    unfinished: int,
    hot_s: float,
    cold_s: float,
    proposals: int,
    random: Any,
) -> tuple[int, float]:
    """Change a plan; its dealings ``before`` and ``after``, ``[u]``, become those of the best that was seen.

    Args:
        batch, first, second: what there is.
        before, after, unfinished: the plan.
        hot_s, cold_s: rise taken with probability 1/e, at the start and at the end.
        proposals: how many.
        random: generator.

    Returns:
        How many are left at the switch, and what counts for the plan.
    """
    n = len(batch.output)
    seen, finish_s, start = np.zeros(int(batch.group.max()) + 1, np.int64), np.empty(n), np.empty(n, np.int64)
    for e in range(len(first.kind)):
        walk(batch, first, e, before, np.inf, start, finish_s, seen)
    now_s = cost_s(batch, first, second, before, after, unfinished, start, finish_s, seen)
    best_s, best_before, best_after, best_unfinished = now_s, before.copy(), after.copy(), unfinished
    kept_s, kept = finish_s.copy(), start.copy()
    for turn in range(proposals):
        heat_s = hot_s * (cold_s / hot_s) ** (turn / proposals)
        what, r = random.random(), int(random.random() * n)
        u, v, was, left = batch.unit[r], -1, unfinished, unfinished
        dealt, engines = (after, second) if what < AFTER else (before, first)
        e = dealt[u]
        f = e
        if what < NUMBER:
            left += int((random.random() - 0.5) * max(4, unfinished // 4))
            if not 1 <= left < n or left == was:
                continue
        else:
            if random.random() < SWAP:
                place = r + int((random.random() - 0.5) * 2 * NEAR)
                if not 0 <= place < n:
                    continue
                v = batch.unit[place]
                f = dealt[v]
            else:
                f = int(random.random() * len(engines.kind))
            if f == e or not engines.fits[f, u] or (v >= 0 and not engines.fits[e, v]):
                continue
            dealt[u] = f
            if v >= 0:
                dealt[v] = e
            if what >= AFTER:
                kept_s[:], kept[:] = finish_s, start
                walk(batch, first, e, before, np.inf, start, finish_s, seen)
                walk(batch, first, f, before, np.inf, start, finish_s, seen)
        then_s = cost_s(batch, first, second, before, after, left, start, finish_s, seen)
        if then_s - now_s <= -heat_s * np.log(random.random() + 1e-300):
            now_s, unfinished = then_s, left
            if now_s < best_s:
                best_s, best_unfinished = now_s, unfinished
                best_before[:], best_after[:] = before, after
            continue
        if f != e:
            dealt[u] = e
            if v >= 0:
                dealt[v] = f
            if what >= AFTER:
                finish_s[:], start[:] = kept_s, kept
    before[:], after[:] = best_before, best_after
    # should one that is done by then not be quite done when this is carried out, it stays where it is
    for e in range(len(first.kind)):
        walk(batch, first, e, before, np.inf, start, finish_s, seen)
    switch_s = np.partition(finish_s, n - best_unfinished - 1)[n - best_unfinished - 1]
    over = np.ones(len(before), np.bool_)
    over[batch.unit[finish_s > switch_s]] = False
    for u in np.flatnonzero(over):
        if first.twin[before[u]] >= 0:
            after[u] = first.twin[before[u]]
    return best_unfinished, best_s
