"""Longest processing time first, on a load that adds up."""

import numpy as np

from tailopt.plan import Plan, View
from tailopt.policies.units import longest_first, plan_units, predicted_work, unit_sums


def lpt_additive(view: View) -> Plan:
    """Send each unit, most predicted tokens first, to the engine with the fewest predicted tokens.

    An engine of four GPUs counts as four times as fast as one of a single GPU.

    Source: Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics 17, 1969.
    Its ratio 4/3 - 1/(3m) on m identical machines holds for additive loads only. An engine's time is not
    additive, it also grows with its longest request, so no ratio holds here.

    >>> from tailopt.policies.example import example_view
    >>> lpt_additive(example_view([[10, 10], [90, 80], [60, 60], [30, 30]])).engine_of
    array([0, 0, 0, 0, 1, 1, 1, 1])
    """
    tokens = unit_sums(view, predicted_work(view)[1])
    gpus = np.array([engine.tp for engine in view.fleet.engines])
    load = np.zeros(len(gpus))
    engine_of_unit = np.empty(len(tokens), dtype=np.int64)
    for unit in np.argsort(-tokens, kind="stable"):
        engine = int(np.argmin((load + tokens[unit]) / gpus))
        engine_of_unit[unit] = engine
        load[engine] += tokens[unit]
    return plan_units(view, engine_of_unit, longest_first(view))
