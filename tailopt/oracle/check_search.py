r"""Checks :class:`tailopt.oracle.search_bound.SearchBound` by another program than the one that found it.

Breadth first, with all states of one place in two arrays: rooms of the engines (falling) and how many are
opened. A place has the children of the one before, each state once, without those that (room) of
:mod:`tailopt.oracle.search` rules out. If some place has none, no plan is done by the bound. Weights and the
room that an engine has for them are counted in whole ticks of the bound, rounded down from exact fractions:
weights w, of r seconds of room at most, are together at most r, and their ticks no more than those of r.
A room counts for the largest sum of units to come that it holds.
"""

from fractions import Fraction
from math import floor

import numpy as np

from tailopt.arrays import Bools, Ints
from tailopt.errors import InputError
from tailopt.oracle.check_parts import require, staircase_items
from tailopt.oracle.problem import Problem
from tailopt.oracle.search_bound import SearchBound

MOST_STATES = 10_000_000
"""States after which the checker says that it could not verify the bound."""

MOST_TICKS = 2**45
"""In the bound, at most: sums over all engines must stay below 2**63."""

MOST_SUMS = 2**11
"""Sums of the units to come that are known; a room beyond the last counts as it is."""

MOST_PLACES = 512
"""Units up to which these sums are made for every place; beyond, those of all units serve for all."""

HUGE = np.iinfo(np.int64).max


def check_search(bound: SearchBound, problem: Problem) -> tuple[Fraction, str]:
    """The bound, if every way to place the units runs out of room before all are placed.

    Raises:
        InputError: if one does not, or there are more than ``MOST_STATES`` states.
    """
    items, a = staircase_items(bound.terms, problem)
    lower_s = Fraction(bound.lower_s)
    require(0 < bound.lower_s <= MOST_TICKS * bound.tick_s < float("inf"), "the search's tick is no tick")
    tick = Fraction(bound.tick_s)
    opening = np.array([max(-1, floor((lower_s - a * longest) / tick)) for longest, _ in items])
    weights = [floor(w / tick) for _, w in items]
    require(sum(weights) < 2**62, "the search's tick is too small")
    weight = np.array(weights)
    total = np.concatenate([[0], np.cumsum(weight)])

    sums = _sums(weight)
    rooms = np.zeros((1, len(problem.fleet.engines)), dtype=np.int64)
    opened = np.zeros(1, dtype=np.int64)
    states = 0
    for place in range(len(items)):
        least = np.minimum.accumulate(np.concatenate([np.full(place, HUGE), weight[place:]]))
        open_ = _may_fit(place, rooms, opened, opening, total, least)
        rooms, opened = _children(rooms[open_], opened[open_], opening[place], weight[place])
        rooms, opened = _counted(rooms, opened, sums[min(place + 1, len(sums) - 1)])
        if len(rooms) == 0:
            return min(lower_s, Fraction(bound.terms.within_s)), "search"
        states += len(rooms)
        require(
            states <= MOST_STATES,
            f"not verified: more than {MOST_STATES} states (the search reports {bound.states})",
        )
    raise InputError(f"certificate: a plan may be done by {bound.lower_s} s")


def _children(rooms: Ints, opened: Ints, opening: int, weight: int) -> tuple[Ints, Ints]:
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
    can = (opened < engines) & (opening >= weight)
    child = rooms[can]
    child[np.arange(len(child)), opened[can]] = opening - weight
    after.append(child)
    count.append(opened[can] + 1)
    return np.concatenate(after), np.concatenate(count)


def _counted(rooms: Ints, opened: Ints, sums: Ints) -> tuple[Ints, Ints]:
    """The states with what their rooms count for, each once."""
    counted = sums[np.searchsorted(sums, rooms, side="right") - 1]
    if len(sums) == MOST_SUMS:
        counted = np.where(rooms < sums[-1], counted, rooms)
    states = np.column_stack([opened, -np.sort(-counted, axis=1)])
    states = states[np.lexsort(states.T)]
    new = np.ones(len(states), dtype=np.bool_)
    new[1:] = (states[1:] != states[:-1]).any(axis=1)
    return states[new, 1:], states[new, 0]


def _sums(weight: Ints) -> list[Ints]:
    """The least sums of the units from each place on, rising, each once."""
    found = [np.zeros(1, dtype=np.int64)]
    for w in weight[::-1]:
        found.append(np.unique(np.concatenate([found[-1], found[-1] + w]))[:MOST_SUMS])
        if len(weight) > MOST_PLACES:
            found = found[-1:]
    return found[::-1]


def _may_fit(start: int, rooms: Ints, opened: Ints, opening: Ints, total: Ints, least: Ints) -> Bools:
    """``[states]`` whether (room) can hold for the units from ``start`` on."""
    n, engines = len(opening), rooms.shape[1]
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
        reach = np.where(opens, reach + opening[at], reach)
        new = new + opens
        kept = ~done & (opened[one] + new <= engines) & ~(opens & (opening[at] <= 0))
        one, place, reach, used, new = one[kept], place[kept], reach[kept], used[kept], new[kept]
    return fits
