r"""Moves of requests that begin with their engine, end with it or neither, and what they change, quickly.

What an engine holds at a step is the sum of what begins with it or in between, as a function of the steps
since its start, and of what ends with it, as a function of the steps until then. Neither depends on how many
steps the engine takes, which only says how the two **profiles** lie upon each other. A request that comes or
goes changes one of them at points so many steps apart. All of them are whole numbers, also where they are
floats: a move that is taken back leaves no trace, and sums are the same in any order.

The arrays that the functions here take:

- ``requests``: ``[n]`` of :data:`REQUEST`, by falling length: length in steps, prompt, tokens that are shared
  with its other samples; engine, and 1 if it ends with it, else 0 and the point at which it begins.
- ``terms``: ``[kinds, n]`` of :data:`TERM`: tokens of its prompt that a request alone holds, the seconds that
  it adds, those in which the shared tokens are computed once, whether it fits at all.
- ``engines``: ``[m]`` of :data:`ENGINE`: kind, tokens and requests that fit, how many requests it is given;
  seconds of a step whatever runs, those of the requests, and besides.
- ``samples``, ``first``: requests by prompt, and where each prompt's begin.
- ``held``, ``running``: ``[m, 2, points]`` profiles, both in the order of time: a point b is b times so many
  steps after the start, or so many times as it is from the last before the end.
- ``given``, ``reach``: ``[m, 2, prompts]`` samples that begin or end with an engine; length of the longest.
- ``every``: steps from one point to the next.
"""

from typing import Any

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints

Records = Any  # structured arrays, as compiled code reads them
TRIES = 8  # partners looked at for one that fits
SOFT = 0.02  # of a cache: an overflow that counts twice
NONE = -1

_FIELDS = ("length", "group", "shared", "engine", "at_end", "later")
REQUEST = np.dtype([(name, np.int64) for name in _FIELDS])
TERM = np.dtype([("own", np.int64), ("added_s", np.float64), ("once_s", np.float64), ("fits", np.int64)])
ENGINE = np.dtype(
    [(name, np.int64) for name in ("kind", "slots", "count")]
    + [(name, np.float64) for name in ("cache", "step_s", "load_s", "offset_s")]
)


@njit(cache=True, nogil=True)
def change(
    requests: Records,
    terms: Records,
    engines: Records,
    samples: Ints,
    first: Ints,
    held: Floats,
    running: Floats,
    given: Ints,
    reach: Ints,
    every: int,
    i: int,
    by: int,
) -> None:
    """Let a request come to its engine, ``by`` 1, or go, -1."""
    r = requests[i]
    e, side, g, length = r.engine, r.at_end, r.group, r.length
    one, term, end = engines[e], terms[engines[e].kind, i], held.shape[2]
    low, high = _points(side, 0, length, every, end)
    # at the end of step t of its own it holds own + t
    at = term.own + (length - (high - 1 - low) * every if side else every) + (r.shared if r.later else 0)
    low, high = low + r.later, high + r.later
    profile, runs = held[e, side, low:high], running[e, side, low:high]
    for b in range(high - low):
        profile[b] += by * (at + every * b)
        runs[b] += by
    given[e, side, g] += by
    one.count += by
    one.load_s += by * term.added_s
    if r.shared == 0:
        return
    if given[e, 1 - side, g] == 0 and given[e, side, g] == (by + 1) // 2:
        one.load_s += by * term.once_s
    if r.later:
        return
    others = 0
    if by > 0:
        others = reach[e, side, g]
    elif given[e, side, g] > 0:
        for place in range(first[g], first[g + 1]):
            other = requests[samples[place]]
            if other.engine == e and other.at_end == side and not other.later and samples[place] != i:
                others = max(others, other.length)
    reach[e, side, g] = max(others, length) if by > 0 else others
    if others < length:
        low, high = _points(side, others, length, every, end)
        profile = held[e, side, low:high]
        for b in range(high - low):
            profile[b] += by * r.shared


@njit(cache=True, nogil=True)
def _points(side: int, others: int, length: int, every: int, end: int) -> tuple[int, int]:
    """The first point that a request reaches and others, shorter ones, do not, and that after its last."""
    if side == 0:
        return others // every + 1, length // every + 1
    return end - 1 - (length - 1) // every, end - (0 if others == 0 else (others - 1) // every + 1)


@njit(cache=True, nogil=True)
def steps_left(one: Records, makespan_s: float) -> int:
    """How many steps an engine can take."""
    return int(max(0.0, (makespan_s - one.offset_s - one.load_s) / one.step_s))


@njit(cache=True, nogil=True)
def penalty(
    requests: Records,
    engines: Records,
    held: Floats,
    running: Floats,
    every: int,
    makespan_s: float,
    e: int,
) -> float:
    """Points by which an engine's cache and slots overflow, and by which requests are too long."""
    one, end = engines[e], held.shape[2]
    steps, late = steps_left(one, makespan_s), 0
    for r in requests:
        if r.length <= steps:
            break
        if r.engine == e:
            late += r.length - steps
    last = min(end - 2, steps // every)
    part = ((steps - last * every) * 16 // every) / 16  # of the way to the point before
    over, squares = _overflow(held[e], last, part, np.floor(one.cache))
    cost = over / one.cache + squares / one.cache**2 / SOFT
    cost += late / every * (1 + late / (SOFT * max(steps, 1))) + _sum(running[e, 0, last + 1 :])
    if one.count > one.slots:
        many, _ = _overflow(running[e], last, 0.0, float(one.slots))
        cost += 2 * many / one.slots
    return float(cost)


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def _overflow(profiles: Floats, last: int, part: float, most: float) -> tuple[float, float]:
    """What is beyond ``most``, and its squares, over all points, if the engine ends after the last."""
    end = profiles.shape[1]
    begun, ending = profiles[0, 1 : last + 1], profiles[1, end - last : end]
    before = profiles[1, end - 1 - last : end - 1]
    over, squares = 0.0, 0.0
    for b in range(last):
        x = max(0.0, begun[b] + ending[b] + part * (before[b] - ending[b]) - most)
        over += x
        squares += x * x
    return over, squares


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def _sum(numbers: Floats) -> float:
    total = 0.0
    for b in range(len(numbers)):
        total += numbers[b]
    return total


@njit(cache=True, nogil=True)
def anneal(
    requests: Records,
    terms: Records,
    engines: Records,
    samples: Ints,
    first: Ints,
    held: Floats,
    running: Floats,
    given: Ints,
    reach: Ints,
    every: int,
    makespan_s: float,
    proposals: int,
    heat: float,
    least: int,
    deal: bool,
    enough: float,
    random: Any,
) -> float:
    """Moves and swaps until little overflows and few are late; returns the penalties' sum.

    Args:
        makespan_s: when all engines should be done.
        proposals: at most.
        heat: rise of the sum that is taken with probability 1/e.
        least: shorter requests do not end with their engine.
        deal: whether requests may change engines.
        enough: a sum at which to stop.
        random: generator.
    """
    m, n = len(engines), len(requests)
    cost = np.zeros(m)
    for e in range(m):
        cost[e] = penalty(requests, engines, held, running, every, makespan_s, e)
    for t in range(proposals):
        if t % 64 == 0 and cost.sum() <= enough:
            break
        i = int(random.random() * n)
        r = requests[i]
        e, was = r.engine, r.at_end
        what, f, j, side, then, later = random.random(), e, NONE, was, r.later, 0
        if what < 0.12:  # to the other end
            side = 1 - side
        elif what < 0.135:  # to begin at another point
            last = max(0, steps_left(engines[e], makespan_s) - r.length) // every
            later = int(random.random() * (last + 1))
            if then > 0:
                later = 0 if random.random() < 0.7 else then + int(random.random() * 13) - 6
            side = 0
            if later < 0 or later > last:
                continue
        elif what < 0.28:  # to another engine
            f = int(random.random() * m)
            side = int(random.random() * 2)
            if f == e or not deal:
                continue
        elif what < 0.86:  # with one of about the same length
            by = 1 + int(random.random() ** 3 * min(n - 1, 200))
            place = i + (by if random.random() < 0.5 else -by)
            if place < 0 or place >= n:
                continue
            j = place
        else:  # to a sample of the same prompt, for one of about the same length
            low, high = first[r.group], first[r.group + 1]
            to = requests[samples[low + int(random.random() * (high - low))]].engine
            if to == e or r.shared == 0 or not deal:
                continue
            for _ in range(TRIES):
                place = i + int((random.random() - 0.5) * 80)
                if 0 <= place < n and requests[place].engine == to:
                    j = place
                    break
            if j == NONE:
                continue
        if j != NONE:
            f, side, later = requests[j].engine, requests[j].at_end, requests[j].later
            if (
                (f != e and not deal)
                or (f == e and side == was and later == then)
                or not terms[engines[e].kind, j].fits
            ):
                continue
            if was == 1 and requests[j].length < least:
                continue
        if not terms[engines[f].kind, i].fits or (side == 1 and r.length < least):
            continue
        if r.length // every + later >= held.shape[2]:
            continue
        if j != NONE and requests[j].length // every + then >= held.shape[2]:
            continue
        load_e, load_f = engines[e].load_s, engines[f].load_s
        change(requests, terms, engines, samples, first, held, running, given, reach, every, i, -1)
        if j != NONE:
            change(requests, terms, engines, samples, first, held, running, given, reach, every, j, -1)
            requests[j].engine, requests[j].at_end, requests[j].later = e, was, then
            change(requests, terms, engines, samples, first, held, running, given, reach, every, j, 1)
        requests[i].engine, requests[i].at_end, requests[i].later = f, side, later
        change(requests, terms, engines, samples, first, held, running, given, reach, every, i, 1)
        allowed = -heat * np.log(random.random() + 1e-12)
        now_e = penalty(requests, engines, held, running, every, makespan_s, e)
        rise, now_f = now_e - cost[e], 0.0
        if f != e:
            rise -= cost[f]
            if rise <= allowed:
                now_f = penalty(requests, engines, held, running, every, makespan_s, f)
                rise += now_f
        if rise <= allowed:
            cost[e] = now_e
            if f != e:
                cost[f] = now_f
            continue
        change(requests, terms, engines, samples, first, held, running, given, reach, every, i, -1)
        if j != NONE:
            change(requests, terms, engines, samples, first, held, running, given, reach, every, j, -1)
            requests[j].engine, requests[j].at_end, requests[j].later = f, side, later
            change(requests, terms, engines, samples, first, held, running, given, reach, every, j, 1)
        requests[i].engine, requests[i].at_end, requests[i].later = e, was, then
        change(requests, terms, engines, samples, first, held, running, given, reach, every, i, 1)
        engines[e].load_s, engines[f].load_s = load_e, load_f
    return float(cost.sum())
