"""Uniform group routing: what rollout systems do by default, and the baseline of every comparison."""

import numpy as np

from tailopt.plan import Plan, View
from tailopt.policies.named import ignores_predictions
from tailopt.policies.units import deal, plan_units, shuffled_units


@ignores_predictions
def uniform(view: View) -> Plan:
    """Deal the units evenly by count over the engines, in a random order.

    Source: the baseline of TailSieve (Xu et al., TailSieve: Partial-Rollout-Guided Tail Routing for LLM
    Rollouts, arXiv), where whole prompt groups go to the replicas evenly by count.

    >>> from tailopt.policies.example import example_view
    >>> np.bincount(uniform(example_view([[90, 80], [10, 20], [30, 30]])).engine_of)
    array([4, 2])
    """
    units = shuffled_units(view)
    engine_of_unit = np.empty_like(units)
    engine_of_unit[units] = deal(units, np.arange(len(view.fleet.engines)))
    return plan_units(view, engine_of_unit)
