"""Least loaded by count: what a router does that sees queue lengths but knows nothing of output lengths."""

import numpy as np

from tailopt.plan import Plan, View
from tailopt.policies.named import ignores_predictions
from tailopt.policies.units import n_units, plan_units, unit_sums


@ignores_predictions
def least_loaded(view: View) -> Plan:
    """Send each unit, in the order of the batch, to the engine with the fewest requests so far.

    With groups of one size on engines without work this deals as round-robin does.

    Source: join the shortest queue (Winston, Optimality of the Shortest Line Discipline, Journal of Applied
    Probability 14, 1977).

    >>> from tailopt.policies.example import example_view
    >>> least_loaded(example_view([[9, 8, 7], [1, 2], [3, 3], [5]])).engine_of
    array([0, 0, 0, 1, 1, 1, 1, 0])
    """
    requests = np.zeros(len(view.fleet.engines))
    size = unit_sums(view, np.ones(view.n_requests, dtype=np.int64))
    engine_of_unit = np.empty(n_units(view), dtype=np.int64)
    for unit in range(n_units(view)):
        engine = int(np.argmin(requests))
        engine_of_unit[unit] = engine
        requests[engine] += size[unit]
    return plan_units(view, engine_of_unit)
