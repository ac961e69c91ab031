"""Top-k isolation with k and the size of the tail pool chosen by the predicted makespan."""

from collections.abc import Sequence

import numpy as np

from tailopt.plan import Plan, View
from tailopt.policies.isolation import Isolation
from tailopt.policies.units import longest_first, n_units, plan_units, predicted_times_s, predicted_work

GRID = 64
"""Numbers of isolated units tried at first, for each size of the tail pool."""


def best_k(view: View) -> Plan:
    """Isolate the k longest units on t tail engines, with the k and t of least predicted makespan.

    Every t is tried, and every k if there are at most ``GRID`` units; k = 0 is uniform routing. With more
    units, k runs over a grid that is finer at small k, and is then refined around the best.

    Source: TailSieve (Xu et al., TailSieve: Partial-Rollout-Guided Tail Routing for LLM Rollouts, arXiv),
    which compares the best k with the exact optimum, and also adapts the number of tail replicas.

    >>> from tailopt.policies.example import example_view
    >>> plan = best_k(example_view([[10, 10], [90, 80], [20, 20], [30, 30]]))
    >>> plan.engine_of, plan.note
    (array([1, 1, 0, 0, 1, 1, 1, 1]), 'k=1, tail_engines=1')
    """
    units, engines = n_units(view), len(view.fleet.engines)
    grid = np.unique(np.rint(units * np.linspace(0, 1, GRID + 1) ** 2).astype(np.int64))
    ks = np.arange(1, units + 1) if units <= GRID else grid[1:]
    isolation = Isolation.of(view)
    best = _best(view, isolation, [(0, 0)])
    for tail_engines in range(1, engines):
        best = min(best, _best(view, isolation, [(int(k), tail_engines) for k in ks]))
    _, k, tail_engines = best
    if k and units > GRID:
        place = int(np.searchsorted(ks, k))
        around = range(int(ks[max(0, place - 1)]), int(ks[min(len(ks) - 1, place + 1)]) + 1)
        best = min(best, _best(view, isolation, [(k, tail_engines) for k in around]))
    _, k, tail_engines = best
    engine_of_unit = isolation.engine_of_unit(k, tail_engines)
    return plan_units(view, engine_of_unit, longest_first(view), f"k={k}, tail_engines={tail_engines}")


def _best(view: View, isolation: Isolation, choices: Sequence[tuple[int, int]]) -> tuple[float, int, int]:
    """Least predicted makespan, and the k and number of tail engines that attain it."""
    context, tokens = predicted_work(view)
    engine_of = np.stack([isolation.engine_of_unit(*choice)[view.unit] for choice in choices])
    chosen = engine_of[:, None, :] == np.arange(len(view.fleet.engines))[:, None]
    makespans_s = predicted_times_s(view.fleet, context, tokens, chosen).max(axis=-1)
    least = int(np.argmin(makespans_s))
    return float(makespans_s[least]), *choices[least]
