r"""The compiled part of :mod:`tailopt.oracle.search`: one trial makespan, by depth-first search."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tailopt.arrays import Ints
from tailopt.oracle.bisection import last_at_most

REFUTED, FOUND, GAVE_UP = 0, 1, 2

ROUNDS = 400  # exchanges after which evening out stops
MOST_PAIRED = 64  # units up to which pairs of them are exchanged too
LAST = 8  # units per engine that are placed last, to the tick
EXCHANGES = 2**13
MOST_ROOM = 2**17  # ticks on an engine up to which that is tried


@njit(cache=True, error_model="numpy")
def explore(
    opening: Ints,
    weight: Ints,
    total: Ints,
    least: Ints,
    sums: Ints,
    engines: int,
    most_states: int,
    completions: int,
    seen: Ints,
    stamp: int,
    engine_of: Ints,
) -> tuple[int, int]:
    """Look for a plan in time: units in order, each on the fullest engine first, a new one last.

    Args:
        opening: ``[u]`` room of an engine that a unit leads, its own weight included; below 0: none.
        weight, total, least, sums: of :class:`tailopt.oracle.search_bound.Items`.
        engines: how many.
        most_states: after so many states it gives up.
        completions: how many states with all engines opened are completed and evened out.
        seen: ``[slots, engines + 2]`` states refuted by this call: stamp, place and engines opened, rooms. A
            new state overwrites the old one in its slot.
        stamp: a number that no other call with this table has had, not 0.
        engine_of: ``[u]`` written: the plan, if one is found.

    Returns:
        REFUTED, FOUND or GAVE_UP, and the number of states looked at.
    """
    n = len(weight)
    if n == 0:
        return FOUND, 0
    room = np.zeros((n + 1, engines), np.int64)  # of each depth: rooms of the engines opened, falling
    label = np.zeros((n + 1, engines), np.int64)  # which engine each room belongs to
    opened = np.zeros(n + 1, np.int64)
    following = np.zeros(n + 1, np.int64)  # which engine is tried next; -1: a new one; -2: none is left
    taken = np.zeros(n, np.int64)  # engine of each unit placed
    rows = len(least) - 1
    last = n - min(LAST * engines, n // 2)
    waste = np.zeros(0, np.int64)
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
            if not fits(opening, total, least[min(depth, rows)], depth, room[depth], j, engines - j) or known(
                seen, stamp, depth, room[depth], j
            ):
                depth -= 1
                fresh = False
                continue
            if completions > 0 and j == engines and opened[depth - 1] < engines:
                completions -= 1
                engine_of[:] = taken
                if depth <= last and n > 1 and total[n] - total[last] <= MOST_ROOM:
                    if len(waste) == 0:
                        waste = wasted(weight[last:])
                    done = finish(opening, weight, engines, depth, last, waste, states, engine_of)
                else:
                    complete(weight, depth, room[depth].copy(), label[depth], engine_of)
                    done = even_out(opening, weight, engines, engine_of) <= 0
                if done:
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
        elif e == -1 and j < engines and opening[depth] >= weight[depth]:
            e = j
            left = opening[depth] - weight[depth]
            taken[depth] = j
            opened[depth + 1] = j + 1
        else:
            depth -= 1
            fresh = False
            continue
        room[depth + 1, :] = room[depth, :]
        label[depth + 1, :] = label[depth, :]
        insert(room[depth + 1], label[depth + 1], e, opened[depth + 1], left, taken[depth])
        depth += 1
        round_down(room[depth], opened[depth], sums[min(depth, rows)])
        fresh = True
    return REFUTED, states


@njit(cache=True, error_model="numpy")
def round_down(room: Ints, opened: int, sums: Ints) -> None:
    """Lower rooms to the most that units to come can fill; beyond the last of the sums that is not known."""
    for e in range(opened - 1, -1, -1):
        if room[e] >= sums[-1]:
            return
        room[e] = sums[last_at_most(sums, room[e])]


@njit(cache=True, error_model="numpy")
def least_sums(weight: Ints, rows: int, count: int) -> Ints:
    """``[rows, count]`` the least sums, each once, of any of the units i, i + 1, ...; the rest is 2**62.

    >>> least_sums(np.array([7, 5, 4]), 2, 6)[:, :5]
    array([[                  0,                   4,                   5,
                              7,                   9],
           [                  0,                   4,                   5,
                              9, 4611686018427387904]])
    """
    found = np.full((rows, count), 2**62, np.int64)
    old, new = np.full(count, 2**62, np.int64), np.full(count, 2**62, np.int64)
    old[0] = 0
    for i in range(len(weight) - 1, -1, -1):
        w = weight[i]
        if w > 0 and w < old[-1]:
            new[:] = 2**62
            p = q = 0  # merge the old ones with the old ones and this unit
            for k in range(count):
                less = min(old[p], old[q] + w)
                if less >= 2**62:
                    break
                new[k] = less
                if old[p] == less:
                    p += 1
                if old[q] + w == less:
                    q += 1
            old, new = new, old
        if i < rows:
            found[i] = old
    return found


@njit(cache=True, error_model="numpy")
def fits(opening: Ints, total: Ints, least: Ints, start: int, room: Ints, opened: int, left: int) -> bool:
    """Whether (room) can hold for the units from ``start`` on, leaders pushed as far right as it lets them.

    Args:
        opening, total: as in :func:`explore`.
        least: ``[u]`` the least weight of units ``start`` to q.
        start: the first unit not yet placed.
        room: rooms of the engines opened, falling; the first ``opened`` count.
        left: engines not yet opened.
    """
    n = len(opening)
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
        elif left == 0 or opening[place] <= 0:
            return False
        else:
            reach += opening[place]
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
def finish(
    opening: Ints, weight: Ints, engines: int, start: int, last: int, waste: Ints, seed: int, engine_of: Ints
) -> bool:
    """Place the units from ``start`` on so that those from ``last`` on fill the engines to the tick.

    They are kept back. The others go where there is most room, and are then exchanged until what stays empty
    of all rooms, each filled as well as the last units can, is no more than there is to spare. Then the
    engines are filled one after another, those with the least room first.

    Args:
        opening, weight, engines: as in :func:`explore`.
        start: the first unit not yet placed; every engine has one of those before.
        last: not before ``start``.
        waste: of rooms (:func:`wasted`).
        seed: of what is drawn.
        engine_of: ``[u]`` changed; what it says from ``start`` on does not matter.

    Returns:
        Whether all are placed, and none is late.
    """
    n = len(weight)
    leader, room = np.full(engines, n, np.int64), np.zeros(engines, np.int64)
    for u in range(last):
        if u >= start:
            engine_of[u] = np.argmax(room)
        e = engine_of[u]
        if leader[e] == n:
            leader[e] = u
            room[e] = opening[u]
        room[e] -= weight[u]
    spare = room.sum() - weight[last:].sum()
    if spare < 0 or room.max() >= len(waste):
        return False
    return suit(weight[:last], leader, waste, spare, seed, room, engine_of) and fill_up(
        weight[last:], spare, room, engine_of[last:]
    )


@njit(cache=True, error_model="numpy")
def wasted(weight: Ints) -> Ints:
    """``[sum + 1]`` ticks of a room that stay empty at least when some of the weights are put into it."""
    reached = np.zeros(weight.sum() + 1, np.bool_)
    reached[0] = True
    most = 0
    for w in weight:
        reached[w : most + w + 1] |= reached[: most + 1].copy()
        most += w
    waste = np.zeros(most + 1, np.int64)
    for s in range(1, most + 1):
        waste[s] = 0 if reached[s] else waste[s - 1] + 1
    return waste


@njit(cache=True, error_model="numpy")
def suit(weight: Ints, leader: Ints, waste: Ints, spare: int, seed: int, room: Ints, engine_of: Ints) -> bool:
    """Exchange units until no room is below 0 and no more than ``spare`` ticks are wasted.

    One unit each way, or one alone, drawn at random; what makes it worse is allowed less and less.

    Args:
        weight: ``[u]`` of the units placed.
        leader: ``[e]`` first unit of each engine; it stays, and nothing longer comes to it.
        waste: of each room (:func:`wasted`); what a room lacks counts as much.
        spare: as said.
        seed: of what is drawn.
        room: ``[e]`` changed.
        engine_of: ``[u]`` changed.
    """
    most, hot = len(waste) - 1, weight.mean() / 4
    state = np.full(1, seed, np.uint64)
    cost = np.int64(0)
    for r in room:
        cost += price(r, waste, spare)
    for step in range(EXCHANGES):
        if cost <= spare:
            return True
        u, v, other = draw(state, len(weight)), draw(state, len(weight)), draw(state, len(room))
        alone, one = draw(state, 4) == 0, engine_of[u]
        if not alone:
            other = engine_of[v]
        if one == other or u <= leader[other] or u == leader[one]:
            continue
        shift = weight[u]
        if not alone:
            if v <= leader[one] or v == leader[other]:
                continue
            shift -= weight[v]
        mine, yours = room[one] + shift, room[other] - shift
        if max(mine, yours) > most:
            continue
        rise = price(mine, waste, spare) + price(yours, waste, spare)
        rise -= price(room[one], waste, spare) + price(room[other], waste, spare)
        if rise <= hot * (1 - step / EXCHANGES) ** 3:
            cost += rise
            room[one], room[other] = mine, yours
            engine_of[u] = other
            if not alone:
                engine_of[v] = one
    return bool(cost <= spare)


@njit(cache=True, error_model="numpy")
def draw(state: NDArray[np.uint64], below: int) -> int:
    """A number below another, by a linear congruential generator; its state goes on."""
    state[0] = state[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return int(np.int64((state[0] >> np.uint64(33)) % np.uint64(below)))


@njit(cache=True, error_model="numpy")
def price(room: int, waste: Ints, spare: int) -> int:
    """Ticks of a room that stay empty; one below 0 costs more than there is to spare."""
    return waste[room] if room >= 0 else spare + 1 - room


@njit(cache=True, error_model="numpy")
def fill_up(weight: Ints, spare: int, room: Ints, engine_of: Ints) -> bool:
    """Place units so that engines are full but for ``spare`` ticks, those with the least room first.

    Args:
        weight: ``[u]`` of the units.
        spare: the sum of all rooms but that of the weights.
        room: ``[e]`` ticks.
        engine_of: ``[u]`` written.

    Returns:
        Whether all units are placed.
    """
    left = np.argsort(np.arange(len(weight)) * 0.6180339887498949 % 1.0)  # light and heavy ones in turn
    by_room = np.argsort(room)
    for e in by_room[:-1]:
        reached = np.zeros((len(left) + 1, room[e] + 1), np.bool_)
        reached[:, 0] = True
        k = 0
        while k < len(left) and not reached[k, room[e]]:
            w = weight[left[k]]
            reached[k + 1] = reached[k]
            for s in range(w, room[e] + 1):
                reached[k + 1, s] |= reached[k, s - w]
            k += 1
        s = room[e]
        while not reached[k, s]:
            s -= 1
        spare -= room[e] - s
        if spare < 0:
            return False
        stay = np.ones(len(left), np.bool_)
        for u in range(k - 1, -1, -1):
            if not reached[u, s]:
                s -= weight[left[u]]
                stay[u] = False
                engine_of[left[u]] = e
        left = left[stay]
    engine_of[left] = by_room[-1]
    return True


@njit(cache=True, error_model="numpy")
def even_out(opening: Ints, weight: Ints, engines: int, engine_of: Ints) -> int:
    """Exchange units between the engine done last and another one until none is late.

    Up to one unit each way, then up to two; leaders stay, and no engine gets a longer unit than its leader.

    Args:
        opening, weight, engines: as in :func:`explore`.
        engine_of: ``[u]`` changed; every engine has a unit.

    Returns:
        How late the last engine is: above 0, it lacks so much room.
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
            done[e] -= opening[u]
    for _ in range(ROUNDS):
        last = int(np.argmax(done))
        if done[last] <= 0:
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
