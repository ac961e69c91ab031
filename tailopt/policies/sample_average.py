"""The plan that is best on average over scenarios of the lengths."""

import numpy as np

from tailopt.errors import InputError
from tailopt.plan import Plan, View
from tailopt.policies.units import longest_first, plan_units


def sample_average(view: View, *, worst_share: float = 1.0) -> Plan:
    """Minimise the mean makespan over scenarios of all lengths, by annealing.

    Scenarios come from a predictor that draws them, such as ``prompt_distribution``; one that gives a number
    for each request tells a single scenario. With ``worst_share`` below 1 the mean over that share of the
    scenarios, the worst ones, is minimised: the conditional value at risk. Scenarios are judged as if every
    engine could start all its requests at once.

    Source: sample-average approximation (Kleywegt, Shapiro, Homem-de-Mello, SIAM Journal on Optimization 12,
    2002); simulated annealing (Kirkpatrick, Gelatt, Vecchi, Science 220, 1983).

    >>> from dataclasses import replace
    >>> from tailopt.policies.example import example_view
    >>> view = example_view([[10, 10], [90, 80], [60, 60], [30, 30]])
    >>> view = replace(view, scenario_tokens=[view.predicted_tokens, 2 * view.predicted_tokens])
    >>> plan = sample_average(view)
    >>> np.bincount(plan.engine_of[[0, 4, 6]] == plan.engine_of[2]).tolist()  # all apart from the longest
    [3]
    """
    from tailopt.policies.annealing import Outcomes, anneal

    if not 0 < worst_share <= 1:
        raise InputError(f"worst_share: expected more than 0 and at most 1, got {worst_share}")
    scenarios = view.predictions()[None] if view.scenario_tokens is None else view.scenario_tokens
    left = np.maximum(1.0, np.rint(scenarios) - view.generated_tokens)
    outcomes = Outcomes.of(view.fleet, view.unit, view.prompt_tokens + view.generated_tokens, left)
    worst = max(1, round(worst_share * outcomes.scenarios))
    engine_of_unit = anneal(outcomes, np.random.default_rng(view.seed), worst=worst)
    return plan_units(view, engine_of_unit, longest_first(view), f"scenarios={outcomes.scenarios}")
