r"""Moves of requests in schedules that are told by finishes, and what they change, in a few microseconds.

The schedule of an engine is a **forest**: a request begins with the engine, or when another one, its parent,
is done. So an engine that is told by finishes carries it out to the step. Profiles hold, for every so many
steps, the tokens in the cache and the requests that run; of a prompt's shared blocks one copy while any of
its samples runs. All of them are whole numbers: a move that is taken back leaves no trace.

The arrays that the functions here take:

- ``requests``: ``[n]`` of :data:`REQUEST`: length in steps, prompt, tokens that are shared with its other
  samples, place by falling length; engine, step before the first, parent, first child, neighbours among the
  parent's children, place among the engine's members.
- ``terms``: ``[kinds, n]`` of :data:`TERM`: tokens of its prompt that a request alone holds, the seconds that
  it adds, those in which the shared tokens are computed once, whether it fits at all.
- ``engines``: ``[m]`` of :data:`ENGINE`: kind, tokens and requests that fit, how many requests it is given,
  by how many tokens its points overflow; seconds of a step whatever runs, those of the requests, and besides.
- ``members``, ``ends``: ``[m, n]`` requests of each engine and their last steps.
- ``held``, ``running``: ``[m, points]`` profiles; ``copies``: ``[m, prompts, points]`` samples that run;
  ``given``: ``[m, prompts]`` samples that the engine is given.
- ``every``: steps from one point to the next. ``todo``: ``[n]`` working memory.
"""

from typing import Any

import numpy as np
from numba import njit

from tailopt.arrays import Ints

Records = Any  # structured arrays, as compiled code reads them
TRIES = 8  # members looked at for one that finishes, or is as long, as wanted
NONE = -1

_LINKS = ("length", "group", "shared", "engine", "begin", "parent", "child", "left", "right", "place", "rank")
REQUEST = np.dtype([(name, np.int64) for name in _LINKS])
TERM = np.dtype([("own", np.int64), ("added_s", np.float64), ("once_s", np.float64), ("fits", np.int64)])
ENGINE = np.dtype(
    [(name, np.int64) for name in ("kind", "cache", "slots", "count", "over")]
    + [(name, np.float64) for name in ("step_s", "load_s", "offset_s")]
)


@njit(cache=True, nogil=True)
def put(
    held: Ints, copies: Ints, begin: int, length: int, own: int, shared: int, every: int, cache: int
) -> int:
    """Add a request to a profile; returns by how much the overflow grows.

    Args:
        held, copies: ``[b]`` tokens, and samples of its prompt that run, at every so many steps; changed.
        begin, length: step before its first, and how many it takes.
        own, shared: tokens of its prompt that it holds by itself, and with other samples.
        every: steps between two points of the profile.
        cache: tokens that fit.
    """
    over, base = 0, own - begin
    for b in range(begin // every + 1, (begin + length) // every + 1):
        old = held[b]
        new = old + base + b * every
        if copies[b] == 0:
            new += shared
        over += max(new - cache, 0) - max(old - cache, 0)
        held[b] = new
        copies[b] += 1
    return over


@njit(cache=True, nogil=True)
def take(
    held: Ints, copies: Ints, begin: int, length: int, own: int, shared: int, every: int, cache: int
) -> int:
    """Take a request out of a profile, the reverse of :func:`put`."""
    over, base = 0, own - begin
    for b in range(begin // every + 1, (begin + length) // every + 1):
        copies[b] -= 1
        old = held[b]
        new = old - base - b * every
        if copies[b] == 0:
            new -= shared
        over += max(new - cache, 0) - max(old - cache, 0)
        held[b] = new
    return over


@njit(cache=True, nogil=True)
def _count(running: Ints, begin: int, length: int, by: int, every: int, slots: int) -> int:
    """Change how many run; returns by how much they get too many."""
    over = 0
    for b in range(begin // every + 1, (begin + length) // every + 1):
        old = running[b]
        over += max(old + by - slots, 0) - max(old - slots, 0)
        running[b] = old + by
    return over


@njit(cache=True, nogil=True)
def _enter(
    requests: Records,
    terms: Records,
    engines: Records,
    ends: Ints,
    held: Ints,
    running: Ints,
    copies: Ints,
    every: int,
    i: int,
) -> None:
    r = requests[i]
    e, begin, length = r.engine, r.begin, r.length
    one = engines[e]
    own = terms[one.kind, i].own
    over = put(held[e], copies[e, r.group], begin, length, own, r.shared, every, one.cache)
    ends[e, r.place] = begin + length
    if one.slots < len(requests):
        over += _count(running[e], begin, length, 1, every, one.slots) * (2 * one.cache // one.slots)
    one.over += over


@njit(cache=True, nogil=True)
def _leave(
    requests: Records,
    terms: Records,
    engines: Records,
    held: Ints,
    running: Ints,
    copies: Ints,
    every: int,
    i: int,
) -> None:
    r = requests[i]
    e, begin, length = r.engine, r.begin, r.length
    one = engines[e]
    own = terms[one.kind, i].own
    over = take(held[e], copies[e, r.group], begin, length, own, r.shared, every, one.cache)
    if one.slots < len(requests):
        over += _count(running[e], begin, length, -1, every, one.slots) * (2 * one.cache // one.slots)
    one.over += over


@njit(cache=True, nogil=True)
def link(requests: Records, i: int, parent: int) -> None:
    """Let a request begin when another one is done, or with the engine."""
    r = requests[i]
    r.parent = parent
    r.left = NONE
    r.right = NONE
    if parent != NONE:
        follower = requests[parent].child
        requests[parent].child = i
        r.right = follower
        if follower != NONE:
            requests[follower].left = i


@njit(cache=True, nogil=True)
def _unlink(requests: Records, i: int) -> None:
    r = requests[i]
    if r.parent != NONE:
        if r.left == NONE:
            requests[r.parent].child = r.right
        else:
            requests[r.left].right = r.right
        if r.right != NONE:
            requests[r.right].left = r.left


@njit(cache=True, nogil=True)
def _shift(
    requests: Records,
    terms: Records,
    engines: Records,
    ends: Ints,
    held: Ints,
    running: Ints,
    copies: Ints,
    every: int,
    i: int,
    by: int,
    todo: Ints,
) -> bool:
    """Let a request and all that follow it begin later; False if that is beyond the profile."""
    if by == 0:
        return True
    horizon = (held.shape[1] - 1) * every
    todo[0] = i
    done, count, latest = 0, 1, 0
    while done < count:
        r = requests[todo[done]]
        latest = max(latest, r.begin + r.length)
        follower = r.child
        while follower != NONE:
            todo[count] = follower
            count += 1
            follower = requests[follower].right
        done += 1
    if latest + by > horizon:
        return False
    for place in range(count):
        one = todo[place]
        _leave(requests, terms, engines, held, running, copies, every, one)
        requests[one].begin += by
        _enter(requests, terms, engines, ends, held, running, copies, every, one)
    return True


@njit(cache=True, nogil=True)
def follows(requests: Records, i: int, before: int) -> bool:
    """Whether request i is another one, or begins after it along the forest."""
    while i != NONE and i != before:
        i = requests[i].parent
    return i != NONE


@njit(cache=True, nogil=True)
def _reattach(
    requests: Records,
    terms: Records,
    engines: Records,
    ends: Ints,
    held: Ints,
    running: Ints,
    copies: Ints,
    every: int,
    i: int,
    parent: int,
    todo: Ints,
) -> bool:
    """Let a request, with those that follow it, begin when another one is done."""
    begin = 0 if parent == NONE else requests[parent].begin + requests[parent].length
    by = begin - requests[i].begin
    if not _shift(requests, terms, engines, ends, held, running, copies, every, i, by, todo):
        return False
    _unlink(requests, i)
    link(requests, i, parent)
    return True


@njit(cache=True, nogil=True)
def _gives(requests: Records, terms: Records, engines: Records, given: Ints, e: int, i: int) -> None:
    """An engine's load without a request."""
    g, one = requests[i].group, engines[e]
    given[e, g] -= 1
    one.load_s -= terms[one.kind, i].added_s
    if given[e, g] == 0:
        one.load_s -= terms[one.kind, i].once_s


@njit(cache=True, nogil=True)
def _gets(requests: Records, terms: Records, engines: Records, given: Ints, e: int, i: int) -> None:
    """An engine's load with a request."""
    g, one = requests[i].group, engines[e]
    one.load_s += terms[one.kind, i].added_s
    if given[e, g] == 0:
        one.load_s += terms[one.kind, i].once_s
    given[e, g] += 1


@njit(cache=True, nogil=True)
def _swap(
    requests: Records,
    terms: Records,
    engines: Records,
    members: Ints,
    ends: Ints,
    held: Ints,
    running: Ints,
    copies: Ints,
    given: Ints,
    every: int,
    i: int,
    j: int,
    todo: Ints,
) -> None:
    """Two requests, none of which follows the other, change places; their followers stay where they are."""
    a, b = requests[i], requests[j]
    e, f = a.engine, b.engine
    _leave(requests, terms, engines, held, running, copies, every, i)
    _leave(requests, terms, engines, held, running, copies, every, j)
    before_i, before_j = a.parent, b.parent
    _unlink(requests, i)
    _unlink(requests, j)
    follower = a.child
    while follower != NONE:
        requests[follower].parent = j
        follower = requests[follower].right
    follower = b.child
    while follower != NONE:
        requests[follower].parent = i
        follower = requests[follower].right
    child, begin = a.child, a.begin
    a.child, a.begin = b.child, b.begin
    b.child, b.begin = child, begin
    link(requests, i, before_j)
    link(requests, j, before_i)
    if e != f:
        _gives(requests, terms, engines, given, e, i)
        _gives(requests, terms, engines, given, f, j)
        _gets(requests, terms, engines, given, e, j)
        _gets(requests, terms, engines, given, f, i)
        members[e, a.place] = j
        members[f, b.place] = i
        place = a.place
        a.place = b.place
        b.place = place
        a.engine = f
        b.engine = e
    _enter(requests, terms, engines, ends, held, running, copies, every, i)
    _enter(requests, terms, engines, ends, held, running, copies, every, j)
    if a.length != b.length:
        for one in (i, j):
            end, follower = requests[one].begin + requests[one].length, requests[one].child
            while follower != NONE:
                by = end - requests[follower].begin
                _shift(requests, terms, engines, ends, held, running, copies, every, follower, by, todo)
                follower = requests[follower].right


@njit(cache=True, nogil=True)
def _transfer(
    requests: Records,
    terms: Records,
    engines: Records,
    members: Ints,
    ends: Ints,
    held: Ints,
    running: Ints,
    copies: Ints,
    given: Ints,
    every: int,
    i: int,
    f: int,
    parent: int,
) -> None:
    """A request that nobody follows goes to another engine, where it begins when another one is done."""
    r = requests[i]
    e = r.engine
    _leave(requests, terms, engines, held, running, copies, every, i)
    _unlink(requests, i)
    _gives(requests, terms, engines, given, e, i)
    engines[e].count -= 1
    last = members[e, engines[e].count]
    members[e, r.place] = last
    ends[e, r.place] = ends[e, engines[e].count]
    requests[last].place = r.place
    members[f, engines[f].count] = i
    r.place = engines[f].count
    engines[f].count += 1
    r.engine = f
    _gets(requests, terms, engines, given, f, i)
    r.begin = 0 if parent == NONE else requests[parent].begin + requests[parent].length
    link(requests, i, parent)
    _enter(requests, terms, engines, ends, held, running, copies, every, i)


@njit(cache=True, nogil=True)
def latest(ends: Ints, count: int) -> int:
    """The last step of an engine."""
    last = 0
    for place in range(count):
        last = max(last, ends[place])
    return last


@njit(cache=True, nogil=True)
def penalty(one: Records, ends: Ints, every: int, makespan_s: float, weight: float) -> float:
    """Points by which an engine's cache overflows, and by which requests are too late, each weighed."""
    last = np.int64((makespan_s - one.offset_s - one.load_s) / one.step_s)
    late = 0
    for place in range(one.count):
        late += max(ends[place] - last, 0)
    return float(one.over / one.cache + weight * late / every)


@njit(cache=True, nogil=True)
def _done_about(
    requests: Records, members: Ints, ends: Ints, count: int, step: int, without: int, random: Any
) -> int:
    """One of some members done about then that do not follow a request; or none, if that is nearer."""
    found, miss = NONE, step
    for _ in range(TRIES):
        place = int(random.random() * count)
        far = abs(ends[place] - step)
        if far < miss and (without == NONE or not follows(requests, members[place], without)):
            found, miss = members[place], far
    return found


@njit(cache=True, nogil=True)
def anneal(
    requests: Records,
    terms: Records,
    engines: Records,
    order: Ints,
    samples: Ints,
    first: Ints,
    members: Ints,
    ends: Ints,
    held: Ints,
    running: Ints,
    copies: Ints,
    given: Ints,
    every: int,
    makespan_s: float,
    proposals: int,
    heat: float,
    cooler: float,
    weight: float,
    random: Any,
    enough: float,
) -> float:
    """Moves and swaps until nothing overflows and nobody is late; returns the penalties' sum."""
    m, n = len(engines), len(requests)
    todo, cost = np.empty(n, np.int64), np.zeros(m)
    horizon = (held.shape[1] - 1) * every
    for e in range(m):
        cost[e] = penalty(engines[e], ends[e], every, makespan_s, weight)
    for t in range(proposals):
        total = cost.sum()
        if total <= enough:
            break
        x, e = random.random() * total, 0
        while e < m - 1 and x > cost[e]:
            x -= cost[e]
            e += 1
        if random.random() < 0.2:
            e = int(random.random() * m)
        count = engines[e].count
        if count == 0:
            continue
        i = members[e, int(random.random() * count)]
        r = requests[i]
        what, f, j, parent, was = random.random(), e, NONE, NONE, r.parent
        overflows = engines[e].over > 0.3 * cost[e] * engines[e].cache
        if not overflows:
            what = 0.3 + 0.7 * what
        kind = 0
        if what < 0.25:  # with its followers to another time
            step = r.begin + int((random.random() - 0.5) * 20 * every)
            if random.random() < 0.4:
                step = int(random.random() * horizon * 0.8)
            parent = _done_about(requests, members[e], ends[e], count, max(0, step), i, random)
            if parent == was:
                continue
        elif what < 0.45:  # with another one of the engine
            kind = 1
            miss = n
            for _ in range(1 if random.random() < 0.5 else TRIES):
                one = members[e, int(random.random() * count)]
                far = abs(requests[one].rank - r.rank)
                if one != i and far < miss:
                    j, miss = one, far
        elif what < 0.75:  # with one of about the same length, anywhere
            kind = 1
            by = int((random.random() - 0.5) * 40)
            if not overflows:
                by = int(random.random() ** 2 * 60)
            place = r.rank + by
            if place < 0 or place >= n:
                continue
            j = order[place]
        elif what < 0.93:  # to a sample of the same prompt, for one of about the same length
            kind = 1
            low, high = first[r.group], first[r.group + 1]
            one = samples[low + int(random.random() * (high - low))]
            if one == i:
                continue
            like = requests[one]
            f = like.engine
            for _ in range(TRIES):
                place = r.rank + int((random.random() - 0.5) * 80)
                if 0 <= place < n:
                    other = order[place]
                    o = requests[other]
                    if (
                        other != one
                        and other != i
                        and o.engine == f
                        and o.begin < like.begin + like.length
                        and like.begin < o.begin + o.length
                    ):
                        j = other
                        break
        else:  # to another engine
            kind = 2
            f = int(random.random() * m)
            if f == e or r.child != NONE or not terms[engines[f].kind, i].fits:
                continue
            most = engines[f].count
            last = latest(ends[f], most)
            if last + r.length > horizon:
                continue
            if most > 0:
                step = int(random.random() * max(1, last - r.length))
                parent = _done_about(requests, members[f], ends[f], most, step, NONE, random)
        if kind == 1:
            if j in (NONE, i):
                continue
            f = requests[j].engine
            if e == f:
                if follows(requests, i, j) or follows(requests, j, i):
                    continue
            elif not terms[engines[f].kind, i].fits or not terms[engines[e].kind, j].fits:
                continue
            by = abs(r.length - requests[j].length)
            if max(latest(ends[e], count), latest(ends[f], engines[f].count)) + by > horizon:
                continue
        load_e, load_f = engines[e].load_s, engines[f].load_s
        if kind == 0:
            if not _reattach(requests, terms, engines, ends, held, running, copies, every, i, parent, todo):
                continue
        elif kind == 1:
            _swap(requests, terms, engines, members, ends, held, running, copies, given, every, i, j, todo)
        else:
            _transfer(
                requests, terms, engines, members, ends, held, running, copies, given, every, i, f, parent
            )
        now_e = penalty(engines[e], ends[e], every, makespan_s, weight)
        rise, now_f = now_e - cost[e], 0.0
        if f != e:
            now_f = penalty(engines[f], ends[f], every, makespan_s, weight)
            rise += now_f - cost[f]
        if rise <= -(heat + (cooler - heat) * t / proposals) * np.log(random.random() + 1e-12):
            cost[e] = now_e
            if f != e:
                cost[f] = now_f
            continue
        if kind == 0:
            _reattach(requests, terms, engines, ends, held, running, copies, every, i, was, todo)
        elif kind == 1:
            _swap(requests, terms, engines, members, ends, held, running, copies, given, every, i, j, todo)
        else:
            _transfer(requests, terms, engines, members, ends, held, running, copies, given, every, i, e, was)
        engines[e].load_s = load_e
        engines[f].load_s = load_f
    return float(cost.sum())


@njit(cache=True, nogil=True)
def begin_all(
    requests: Records,
    terms: Records,
    engines: Records,
    members: Ints,
    ends: Ints,
    held: Ints,
    running: Ints,
    copies: Ints,
    given: Ints,
    every: int,
) -> None:
    """Write the links, profiles and loads of forests from engines, parents and members."""
    for e in range(len(engines)):
        for place in range(engines[e].count):
            i = members[e, place]
            requests[i].place = place
            link(requests, i, requests[i].parent)
            _gets(requests, terms, engines, given, e, i)
            _enter(requests, terms, engines, ends, held, running, copies, every, i)


@njit(cache=True, nogil=True)
def follow(
    queue: Ints, limits: Ints, tokens: Ints, output: Ints, cache: int, begin: Ints, parent: Ints
) -> None:
    """When requests begin, in steps, and after whom, on an engine that preempts nobody.

    Args:
        queue: requests in the order of admission.
        limits: ``[n + 1]`` how many run at most after so many finishes.
        tokens: ``[n]`` prompt tokens.
        output: ``[n]``.
        cache: tokens that fit.
        begin, parent: ``[n]`` written.
    """
    n = len(queue)
    alive, end = np.empty(n, np.int64), np.empty(n, np.int64)
    head, now, step, finished, full, last = 0, 0, 0, 0, 0, NONE
    while head < n or now > 0:
        while head < n and now < limits[finished]:
            i = queue[head]
            if now > 0 and full + tokens[i] + 1 + now > cache:
                break
            full += tokens[i]
            begin[i], parent[i] = step, last
            alive[now], end[now] = i, step + output[i]
            now, head = now + 1, head + 1
        following = end[0]
        for place in range(1, now):
            following = min(following, end[place])
        full += now * (following - step)
        step = following
        kept = 0
        for place in range(now):
            i = alive[place]
            if end[place] == step:
                full -= tokens[i] + output[i]
                finished, last = finished + 1, i
            else:
                alive[kept], end[kept] = i, end[place]
                kept += 1
        now = kept
