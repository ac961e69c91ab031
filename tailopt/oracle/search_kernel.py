r"""The compiled part of :mod:`tailopt.oracle.search`: one trial makespan, by depth-first search."""

import numpy as np
from numba import njit

from tailopt.arrays import Ints
from tailopt.oracle.bisection import last_at_most

REFUTED, FOUND, GAVE_UP = 0, 1, 2

ROUNDS = 400  # exchanges after which evening out stops
MOST_PAIRED = 64  # units up to which pairs of them are exchanged too


@njit(cache=True, error_model="numpy")
def explore(
    lead: Ints,
    weight: Ints,
    total: Ints,
    least: Ints,
    engines: int,
    makespan: int,
    most_states: int,
    completions: int,
    seen: Ints,
    stamp: int,
    engine_of: Ints,
) -> tuple[int, int]:
    """Look for a plan within ``makespan``: units in order, each on the fullest engine first, a new one last.

    Args:
        lead, weight, total, least: of :class:`tailopt.oracle.search_bound.Items`.
        engines: how many.
        makespan: in ticks.
        most_states: after so many states it gives up.
        completions: how many states with all engines opened are completed and evened out.
        seen: ``[slots, engines + 2]`` states refuted by this call: stamp, place and engines opened, rooms. A
            new state overwrites the old one in its slot.
        stamp: a number that no other call with this table has had, not 0.
        engine_of: ``[u]`` written: the plan, if one is found.

    Returns:
        REFUTED, FOUND or GAVE_UP, and the number of states looked at.
    """
    n = len(lead)
    if n == 0:
        return FOUND, 0
    room = np.zeros((n + 1, engines), np.int64)  # of each depth: rooms of the engines opened, falling
    label = np.zeros((n + 1, engines), np.int64)  # which engine each room belongs to
    opened = np.zeros(n + 1, np.int64)
    following = np.zeros(n + 1, np.int64)  # which engine is tried next; -1: a new one; -2: none is left
    taken = np.zeros(n, np.int64)  # engine of each unit placed
    rows = len(least) - 1
    states, depth, fresh = 0, 0, True
    while depth >= 0:
        j = opened[depth]
        if fresh:
            states += 1
            if states > most_states:
                return GAVE_UP, states
            if depth == n:
                engine_of[:] = taken
                return FOUND, states
            if not fits(
                lead, total, least[min(depth, rows)], depth, room[depth], j, engines - j, makespan
            ) or known(seen, stamp, depth, room[depth], j):
                depth -= 1
                fresh = False
                continue
            if completions > 0 and j == engines and opened[depth - 1] < engines:
                completions -= 1
                engine_of[:] = taken
                complete(weight, depth, room[depth].copy(), label[depth], engine_of)
                if even_out(lead, weight, engines, makespan, engine_of) <= makespan:
                    return FOUND, states
            following[depth] = j - 1
        e = following[depth]
        while e >= 0 and (room[depth, e] < weight[depth] or (e > 0 and room[depth, e - 1] == room[depth, e])):
            e -= 1
        following[depth] = e - 1
        if e >= 0:
            left = room[depth, e] - weight[depth]
            taken[depth] = label[depth, e]
            opened[depth + 1] = j
        elif e == -1 and j < engines and makespan - lead[depth] >= weight[depth]:
            e = j
            left = makespan - lead[depth] - weight[depth]
            taken[depth] = j
            opened[depth + 1] = j + 1
        else:
            depth -= 1
            fresh = False
            continue
        closed = least[min(depth + 1, rows), n - 1]  # a room below this holds nothing more
        room[depth + 1, :] = room[depth, :]
        label[depth + 1, :] = label[depth, :]
        insert(room[depth + 1], label[depth + 1], e, opened[depth + 1], left if left >= closed else 0,
               taken[depth])  # fmt: skip
        depth += 1
        fresh = True
    return REFUTED, states


@njit(cache=True, error_model="numpy")
def fits(
    lead: Ints, total: Ints, least: Ints, start: int, room: Ints, opened: int, left: int, makespan: int
) -> bool:
    """Whether (room) can hold for the units from ``start`` on, leaders pushed as far right as it lets them.

    Args:
        lead, total: as in :func:`explore`.
        least: ``[u]`` the least weight of units ``start`` to q.
        start: the first unit not yet placed.
        room: rooms of the engines opened, falling; the first ``opened`` count.
        left: engines not yet opened.
        makespan: in ticks.
    """
    n = len(lead)
    reach, place, used = total[start], start, 0
    while True:
        while used < opened and room[used] >= least[place]:
            reach += room[used]
            used += 1
        usable = n if used == opened else first_at_most(least, place, room[used])
        place = last_at_most(total, reach)
        if place >= n:
            return True
        if place >= usable:
            place = usable
        elif left == 0 or lead[place] >= makespan:
            return False
        else:
            reach += makespan - lead[place]
            left -= 1


@njit(cache=True, error_model="numpy")
def first_at_most(falling: Ints, start: int, bound: int) -> int:
    """The first place from ``start`` on with ``falling[place] <= bound``, or the length."""
    low, high = start, len(falling)
    while low < high:
        middle = (low + high) // 2
        if falling[middle] <= bound:
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True, error_model="numpy")
def known(seen: Ints, stamp: int, depth: int, room: Ints, opened: int) -> bool:
    """Whether this very state was refuted before; if not, it is put down (it will be, or a plan is found)."""
    engines = len(room)
    key = np.int64(depth) * np.int64(engines + 1) + np.int64(opened)
    code = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    for e in range(opened):
        code = (code ^ np.uint64(room[e])) * np.uint64(0xBF58476D1CE4E5B9)
        code ^= code >> np.uint64(29)
    slot = seen[np.int64(code % np.uint64(len(seen)))]
    if slot[0] == stamp and slot[1] == key:
        same = True
        for e in range(opened):
            if slot[2 + e] != room[e]:
                same = False
                break
        if same:
            return True
    slot[0], slot[1] = stamp, key
    for e in range(opened):
        slot[2 + e] = room[e]
    return False


@njit(cache=True, error_model="numpy")
def insert(room: Ints, label: Ints, place: int, opened: int, value: int, name: int) -> None:
    """Write an engine's new room at ``place`` and move it to where rooms fall again."""
    while place + 1 < opened and room[place + 1] > value:
        room[place], label[place] = room[place + 1], label[place + 1]
        place += 1
    while place > 0 and room[place - 1] < value:
        room[place], label[place] = room[place - 1], label[place - 1]
        place -= 1
    room[place], label[place] = value, name


@njit(cache=True, error_model="numpy")
def complete(weight: Ints, start: int, room: Ints, label: Ints, engine_of: Ints) -> None:
    """Place the units from ``start`` on, each where there is most room, be it enough or not."""
    for u in range(start, len(weight)):
        e = np.argmax(room)
        room[e] -= weight[u]
        engine_of[u] = label[e]


@njit(cache=True, error_model="numpy")
def even_out(lead: Ints, weight: Ints, engines: int, makespan: int, engine_of: Ints) -> int:
    """Exchange units between the engine done last and another one until all are done by ``makespan``.

    Up to one unit each way, then up to two; leaders stay, and no engine gets a longer unit than its leader.

    Args:
        lead, weight, engines, makespan: as in :func:`explore`.
        engine_of: ``[u]`` changed; every engine has a unit.

    Returns:
        When the last engine is done.
    """
    n = len(weight)
    leader, held = np.full(engines, n, np.int64), np.zeros(engines, np.int64)
    done = np.zeros(engines, np.int64)
    for u in range(n):
        e = engine_of[u]
        done[e] += weight[u]
        held[e] += 1
        if leader[e] == n:
            leader[e] = u
            done[e] += lead[u]
    for _ in range(ROUNDS):
        last = int(np.argmax(done))
        if done[last] <= makespan:
            break
        best, best_engine, best_shift = int(done[last]), -1, 0
        out, back = np.full(2, -1, np.int64), np.full(2, -1, np.int64)
        for most in (1, 2):
            if best_engine >= 0:
                break
            for other in range(engines):
                excess = int(done[last] - done[other])
                if excess <= 0 or (most == 2 and max(held[last], held[other]) > MOST_PAIRED):
                    continue
                give = bundles(weight, engine_of, last, leader[last], leader[other], most)
                take = bundles(weight, engine_of, other, leader[other], leader[last], most)
                q = 0  # both rise in weight: for each given, the two taken nearest to half the excess
                for p in range(len(give)):
                    while q + 1 < len(take) and take[q + 1, 0] <= give[p, 0] - excess // 2:
                        q += 1
                    for t in range(q, min(q + 2, len(take))):
                        shift = int(give[p, 0] - take[t, 0])
                        if 0 < shift < excess and max(done[last] - shift, done[other] + shift) < best:
                            best = int(max(done[last] - shift, done[other] + shift))
                            best_engine, best_shift = other, shift
                            out[:], back[:] = give[p, 1:], take[t, 1:]
        if best_engine < 0:
            break
        for unit in out[out >= 0]:
            engine_of[unit] = best_engine
        for unit in back[back >= 0]:
            engine_of[unit] = last
        moved = (out >= 0).sum() - (back >= 0).sum()
        held[last] -= moved
        held[best_engine] += moved
        done[last] -= best_shift
        done[best_engine] += best_shift
    return int(done.max())


@njit(cache=True, error_model="numpy")
def bundles(weight: Ints, engine_of: Ints, engine: int, leader: int, after: int, most: int) -> Ints:
    """``[k, 3]`` weight and units of all sets of at most ``most`` units (1 or 2), by rising weight.

    Of those on ``engine`` but its leader, and behind the unit ``after``; -1 stands for no unit.
    """
    n = len(weight)
    unit = np.empty(n, np.int64)
    count = 0
    for u in range(n - 1, max(leader, after), -1):
        if engine_of[u] == engine:
            unit[count] = u
            count += 1
    size = 1 + count + (count * (count - 1) // 2 if most == 2 else 0)
    found = np.full((size, 3), -1, np.int64)
    found[0, 0] = 0
    k = 1
    for a in range(count):
        found[k, 0], found[k, 1] = weight[unit[a]], unit[a]
        k += 1
    if most == 2:
        for a in range(count):
            for b in range(a):
                found[k, 0], found[k, 1], found[k, 2] = weight[unit[a]] + weight[unit[b]], unit[a], unit[b]
                k += 1
    return found[np.argsort(found[:, 0])]
