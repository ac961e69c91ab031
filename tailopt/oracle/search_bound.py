"""The argument of an exhaustive search: every way to place the units was tried, and none is done in time."""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.oracle.search_kernel import least_sums
from tailopt.oracle.staircase import StaircaseBound, item_weights
from tailopt.oracle.units import Units

TICKS = 2**44
"""Ticks in one upper bound, unless all weights are multiples of something: sums over all engines stay far
below 2**63."""

LOST = 1e-12
"""Part of the upper bound that the weights of all units may lose where a coarser tick is chosen."""

SLACK = 2.0**-48
"""Part of the makespan by which rooms are rounded up: more than the rounding of three operations."""

SUMS = 2**11
"""Sums of weights that are known of the units from each place on."""

MOST_ROWS = 512  # of the table of least weights: where units are many, later ones are lighter anyway


@dataclass(frozen=True)
class SearchBound:
    """No static plan is done by ``lower_s``: :mod:`tailopt.oracle.search` refutes it for the terms' items.

    Attributes:
        lower_s: the bound in seconds.
        terms: the affine function, the weights of the three loads, and why they hold
            (:class:`tailopt.oracle.staircase.StaircaseBound`); its own ``lower_s`` is not relied upon.
        tick_s: seconds in whose whole multiples weights and rooms are counted, rounded down.
        states: how many states the search had to look at.
    """

    lower_s: float
    terms: StaircaseBound
    tick_s: float
    states: int


@dataclass(frozen=True, eq=False)
class Items:
    """Units with their weights in whole ticks, rounded down, so that what is refuted in ticks is refuted.

    Attributes:
        tick_s: seconds of a tick.
        lead_s: ``[u]`` seconds that a unit costs an engine as its longest, falling.
        weight: ``[u]`` ticks that it adds wherever it is.
        total: ``[u + 1]`` prefix sums of the weights.
        least: ``[u, u]`` the least weight of units i to q; ``[1, u]``, of units 0 to q, if they are many.
        sums: ``[u, k]`` the least sums of units i, i + 1, ...; ``[1, k]`` of all, if they are many.
    """

    tick_s: float
    lead_s: Floats
    weight: Ints
    total: Ints
    least: Ints
    sums: Ints

    def rooms(self, makespan_s: float) -> Ints:
        """``[u]`` ticks that an engine led by each unit has for weights until then, never too few."""
        ticks = (makespan_s - self.lead_s) / self.tick_s
        return np.floor(ticks + SLACK * makespan_s / self.tick_s).astype(np.int64)

    def before_s(self, rooms: Ints) -> float:
        """The latest time at which an engine with such rooms can be done."""
        return float((self.lead_s + self.tick_s * rooms).max())

    def after_s(self, rooms: Ints) -> float:
        """The first time at which an engine can be done that needs more room than these."""
        return float((self.lead_s + self.tick_s * (rooms + 1)).min())

    def done_s(self, engine_of: Ints, engines: int) -> float:
        """Seconds until the last engine of a plan is done."""
        lead_s, held = np.zeros(engines), np.zeros(engines, dtype=np.int64)
        np.maximum.at(lead_s, engine_of, self.lead_s)
        np.add.at(held, engine_of, self.weight)
        return float((lead_s + self.tick_s * held).max())


def items_of(units: Units, terms: StaircaseBound, upper_s: float) -> Items:
    """The items of the bound's terms.

    A tick is what a token costs, or a token of context, if that is all that weights are made of: makespans
    are discrete then, and rooms are few. Otherwise it is so small that it does not matter.
    """
    lead_s = terms.minorant.a_s * terms.weights[0] * units.longest.astype(np.float64)
    weight_s = item_weights(units, terms.minorant, terms.weights)
    tick_s = upper_s / TICKS
    weight = np.floor(weight_s / tick_s * (1 - SLACK)).astype(np.int64)
    for per_load_s, load in ((terms.minorant.b_s, units.tokens), (terms.minorant.c_s, units.context)):
        lost_s = np.abs(weight_s - per_load_s * load).sum()
        if per_load_s >= tick_s and lost_s <= LOST * upper_s:
            tick_s, weight = per_load_s, load
            break
    total = np.concatenate([[0], np.cumsum(weight)])
    least = least_of(weight)
    return Items(tick_s, lead_s, weight, total, least, least_sums(weight, len(least), SUMS))


def least_of(weight: Ints) -> Ints:
    """``[u, u]`` least weight of units i to q, or ``[1, u]`` of 0 to q if ``MOST_ROWS`` are too few.

    >>> least_of(np.array([5, 7, 6]))[1]
    array([9223372036854775807,                   7,                   6])
    """
    rows = len(weight) if len(weight) <= MOST_ROWS else 1
    from_row_on = np.arange(len(weight)) >= np.arange(rows)[:, None]
    return np.minimum.accumulate(np.where(from_row_on, weight, np.iinfo(np.int64).max), axis=1)
