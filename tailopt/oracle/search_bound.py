"""The argument of an exhaustive search: every way to place the units was tried, and none is done in time."""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.oracle.staircase import StaircaseBound, item_weights
from tailopt.oracle.units import Units

TICKS = 2**44
"""Ticks of the search's clock in one upper bound: sums over all engines stay far below 2**63."""

MOST_ROWS = 512  # of the table of least weights: where units are many, later ones are lighter anyway


@dataclass(frozen=True)
class SearchBound:
    """No static plan is done by ``lower_s``: :mod:`tailopt.oracle.search` refutes it for the terms' items.

    Attributes:
        lower_s: the bound in seconds.
        terms: the affine function, the weights of the three loads, and why they hold
            (:class:`tailopt.oracle.staircase.StaircaseBound`); its own ``lower_s`` is not relied upon.
        states: how many states the search had to look at.
    """

    lower_s: float
    terms: StaircaseBound
    states: int


@dataclass(frozen=True, eq=False)
class Items:
    """Units in whole ticks, rounded down, so that what is refuted in ticks is refuted in seconds.

    Attributes:
        tick_s: seconds of a tick.
        lead: ``[u]`` ticks that a unit costs an engine as its longest, falling.
        weight: ``[u]`` ticks that it adds wherever it is.
        total: ``[u + 1]`` prefix sums of the weights.
        least: ``[u, u]`` the least weight of units i to q; ``[1, u]``, of units 0 to q, if they are many.
    """

    tick_s: float
    lead: Ints
    weight: Ints
    total: Ints
    least: Ints


def items_of(units: Units, terms: StaircaseBound, upper_s: float) -> Items:
    """The items of the bound's terms, on a clock of ``TICKS`` ticks in ``upper_s``."""
    tick_s = upper_s / TICKS
    lead_s = terms.minorant.a_s * terms.weights[0] * units.longest.astype(np.float64)
    weight = _ticks(item_weights(units, terms.minorant, terms.weights), tick_s)
    return Items(
        tick_s=tick_s,
        lead=_ticks(lead_s, tick_s),
        weight=weight,
        total=np.concatenate([[0], np.cumsum(weight)]),
        least=least_of(weight),
    )


def least_of(weight: Ints) -> Ints:
    """``[u, u]`` least weight of units i to q, or ``[1, u]`` of 0 to q if ``MOST_ROWS`` are too few.

    >>> least_of(np.array([5, 7, 6]))[1]
    array([9223372036854775807,                   7,                   6])
    """
    rows = len(weight) if len(weight) <= MOST_ROWS else 1
    from_row_on = np.arange(len(weight)) >= np.arange(rows)[:, None]
    return np.minimum.accumulate(np.where(from_row_on, weight, np.iinfo(np.int64).max), axis=1)


def _ticks(seconds: Floats, tick_s: float) -> Ints:
    return np.floor(seconds / tick_s * (1 - 2.0**-48)).astype(np.int64)  # a few roundings, and then down
