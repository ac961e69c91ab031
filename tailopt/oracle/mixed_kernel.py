"""The compiled part of the priced staircase of kinds (:mod:`tailopt.oracle.mixed_priced`)."""

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints


@njit(cache=True)
def most_collected(value: Floats, count: Ints, prefix: Floats, slack: float, leaders: Ints) -> float:
    """Most that engines can collect in all, each with a leader that those before leave it.

    Args:
        value: ``[kinds, u]`` what an engine of each kind led by each unit collects; -infinity: cannot be.
        count: ``[kinds]`` engines of each kind.
        prefix: ``[u + 1]`` sums of the units' prices.
        slack: by how much those may be missed, for the rounding of sums.
        leaders: ``[m, 2]`` written: the leaders that collect it and their kinds, -1 where no engine is used.
    """
    kinds, units = value.shape
    stride = np.ones(kinds + 1, np.int64)
    for k in range(kinds):
        stride[k + 1] = stride[k] * (count[k] + 1)
    states = stride[kinds]
    most = np.full((states, units), -np.inf)  # by engines opened of each kind and the last leader
    before, by = np.full((states, units), -1, np.int64), np.full((states, units), -1, np.int64)
    best, best_state, best_unit = -np.inf, -1, -1
    for k in range(kinds):
        if count[k] > 0:
            most[stride[k], 0], by[stride[k], 0] = value[k, 0], k
    for state in range(1, states):
        richest, who = -np.inf, -1
        for u in range(units):
            if richest >= prefix[u] - slack:
                for k in range(kinds):
                    if state // stride[k] % (count[k] + 1) < count[k]:
                        after, sum_ = state + stride[k], richest + value[k, u]
                        if sum_ > most[after, u]:
                            most[after, u], before[after, u], by[after, u] = sum_, who, k
            if most[state, u] > richest:
                richest, who = most[state, u], u
        if richest > best:
            best, best_state, best_unit = richest, state, who
    leaders[:] = -1
    place = 0
    while best_state > 0 and best_unit >= 0:
        k = by[best_state, best_unit]
        leaders[place, 0], leaders[place, 1] = best_unit, k
        best_state, best_unit = best_state - stride[k], before[best_state, best_unit]
        place += 1
    return float(best)
