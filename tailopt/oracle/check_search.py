r"""Checks :class:`tailopt.oracle.search_bound.SearchBound` by another program than the one that found it.

Breadth first, with all states of one place in two arrays: rooms of the engines (falling) and how many are
opened. A place has the children of the one before, each state once, without those that (room) of
:mod:`tailopt.oracle.search` rules out. If some place has none, no plan is done by the bound. Items are
counted in whole multiples of a power of two, rounded down from exact fractions.
"""

from fractions import Fraction
from math import floor, frexp

import numpy as np

from tailopt.arrays import Bools, Ints
from tailopt.errors import InputError
from tailopt.oracle.check_parts import require, staircase_items
from tailopt.oracle.problem import Problem
from tailopt.oracle.search_bound import SearchBound

MOST_STATES = 10_000_000
"""States after which the checker says that it could not verify the bound."""

BITS = 44

HUGE = np.iinfo(np.int64).max


def check_search(bound: SearchBound, problem: Problem) -> tuple[Fraction, str]:
    """The bound, if every way to place the units runs out of room before all are placed.

    Raises:
        InputError: if one does not, or there are more than ``MOST_STATES`` states.
    """
    items, a = staircase_items(bound.terms, problem)
    lower_s = Fraction(bound.lower_s)
    tick = Fraction(2) ** (frexp(bound.lower_s)[1] - BITS)
    makespan = floor(lower_s / tick)
    lead = np.array([floor(a * longest / tick) for longest, _ in items])
    weight = np.array([floor(w / tick) for _, w in items])
    total = np.concatenate([[0], np.cumsum(weight)])

    rooms = np.zeros((1, len(problem.fleet.engines)), dtype=np.int64)
    opened = np.zeros(1, dtype=np.int64)
    states = 0
    for place in range(len(items)):
        least = np.minimum.accumulate(np.concatenate([np.full(place, HUGE), weight[place:]]))
        smallest = int(weight[place + 1 :].min(initial=makespan))
        open_ = _may_fit(place, rooms, opened, lead, total, least, makespan)
        rooms, opened = _children(rooms[open_], opened[open_], lead[place], weight[place], smallest, makespan)
        if len(rooms) == 0:
            return min(lower_s, Fraction(bound.terms.within_s)), "search"
        states += len(rooms)
        require(
            states <= MOST_STATES,
            f"not verified: more than {MOST_STATES} states (the search reports {bound.states})",
        )
    raise InputError(f"certificate: a plan may be done by {bound.lower_s} s")


def _children(
    rooms: Ints, opened: Ints, lead: int, weight: int, smallest: int, makespan: int
) -> tuple[Ints, Ints]:
    """The states after one more unit: on any engine that has room, and on a new one."""
    engines = rooms.shape[1]
    after, count = [rooms[:0]], [opened[:0]]
    for e in range(engines):
        can = (e < opened) & (rooms[:, e] >= weight)
        if e > 0:
            can &= rooms[:, e] != rooms[:, e - 1]
        child = rooms[can]
        child[:, e] -= weight
        after.append(child)
        count.append(opened[can])
    can = (opened < engines) & (makespan - lead >= weight)
    child = rooms[can]
    child[np.arange(len(child)), opened[can]] = makespan - lead - weight
    after.append(child)
    count.append(opened[can] + 1)
    all_rooms = np.concatenate(after)
    all_rooms[all_rooms < smallest] = 0
    states = np.column_stack([np.concatenate(count), -np.sort(-all_rooms, axis=1)])
    states = states[np.lexsort(states.T)]
    new = np.ones(len(states), dtype=np.bool_)
    new[1:] = (states[1:] != states[:-1]).any(axis=1)
    return states[new, 1:], states[new, 0]


def _may_fit(
    start: int, rooms: Ints, opened: Ints, lead: Ints, total: Ints, least: Ints, makespan: int
) -> Bools:
    """``[states]`` whether (room) can hold for the units from ``start`` on."""
    n, engines = len(lead), rooms.shape[1]
    padded = np.column_stack([rooms, np.full(len(rooms), -1)])
    fits = np.zeros(len(rooms), dtype=np.bool_)
    one = np.arange(len(rooms))  # the states not decided yet, and for each of them:
    place, reach = np.full(len(rooms), start), np.full(len(rooms), total[start])
    used, new = np.zeros(len(rooms), dtype=np.int64), np.zeros(len(rooms), dtype=np.int64)
    while len(one):
        waiting = used < opened[one]
        gap = padded[one, used]
        enters = waiting & (gap >= least[place])
        reach = np.where(enters, reach + gap, reach)
        used = used + enters
        usable = np.where(waiting, np.searchsorted(-least, -gap), n)
        stop = np.searchsorted(total, reach, side="right") - 1
        done = ~enters & (stop >= n)
        fits[one[done]] = True
        skips = ~enters & ~done & (stop >= usable)
        opens = ~enters & ~done & ~skips
        at = np.minimum(stop, n - 1)
        place = np.where(skips, usable, np.where(opens, at, place))
        reach = np.where(opens, reach + makespan - lead[at], reach)
        new = new + opens
        kept = ~done & (opened[one] + new <= engines) & ~(opens & (lead[at] >= makespan))
        one, place, reach, used, new = one[kept], place[kept], reach[kept], used[kept], new[kept]
    return fits
