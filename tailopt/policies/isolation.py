"""Tail isolation: the longest units on tail engines of their own, the rest dealt over the others."""

import numpy as np

from tailopt.arrays import Ints
from tailopt.plan import View
from tailopt.policies.units import deal, fastest_alone, shuffled_units, units_longest_first


def isolate(view: View, k: int, tail_engines: int) -> Ints:
    """``[units]`` engine of each unit when the ``k`` longest go to the ``tail_engines`` fastest engines.

    Within each pool units are dealt: the tail from the longest on, the rest in the batch's random order, so
    ``k = 0`` with no tail engine is uniform routing.
    """
    tail = units_longest_first(view)[:k]
    shuffled = shuffled_units(view)
    rest = shuffled[~np.isin(shuffled, tail)]
    engines = fastest_alone(view)
    engine_of_unit = np.empty(len(shuffled), dtype=np.int64)
    engine_of_unit[tail] = deal(tail, engines[:tail_engines])
    engine_of_unit[rest] = deal(rest, np.sort(engines[tail_engines:]))
    return engine_of_unit
