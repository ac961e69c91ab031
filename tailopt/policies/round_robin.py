"""Round-robin: the simplest request router."""

import numpy as np

from tailopt.plan import Plan, View
from tailopt.policies.named import ignores_predictions
from tailopt.policies.units import deal, n_units, plan_units


@ignores_predictions
def round_robin(view: View) -> Plan:
    """Deal the units over the engines in the order of the batch.

    Source: the usual default of request routers (nginx, vLLM's data-parallel front ends).

    >>> from tailopt.policies.example import example_view
    >>> round_robin(example_view([[90, 80], [10, 20], [30, 30]])).engine_of
    array([0, 0, 1, 1, 0, 0])
    """
    return plan_units(view, deal(np.arange(n_units(view)), np.arange(len(view.fleet.engines))))
