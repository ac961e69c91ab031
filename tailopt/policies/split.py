"""A tail pool that requests enter when they have proved long."""

import numpy as np

from tailopt.errors import InputError
from tailopt.plan import Plan, ReviewPoint, View
from tailopt.policies.isolation import speculating
from tailopt.policies.named import ignores_predictions
from tailopt.policies.reviewing import (
    engine_of_units,
    go_on,
    requests_of_engines,
    with_review,
)
from tailopt.policies.units import deal, fastest_alone, n_units, plan_units, shuffled_units, unit_sums


@ignores_predictions
def split(view: View, *, tokens: int = 4096, tail_engines: int = 1, speculate: str | None = None) -> Plan:
    """Deal the units over the bulk engines; one that has a request of ``tokens`` tokens moves to the tail.

    Tail engines are the ones fastest for a lone request, and stand idle until then. A unit moves to the one
    with the fewest requests. No prediction is needed: a request is long when it is long. With one engine
    nothing is split. ``speculate`` names a draft method of the engine profile for the tail engines alone.

    Source: SPLIT@L of Lin, RL Long Tail: Mid-Batch Parallel Shape Switching (2026), from two TP1 engines to
    one of TP2; the tail replica of TailSieve (Xu et al., TailSieve: Partial-Rollout-Guided Tail Routing for
    LLM Rollouts, arXiv), told by tokens generated instead of by an earlier partial rollout.

    >>> from tailopt.policies.example import example_view
    >>> plan = split(example_view([[90, 80], [10, 20], [30, 30]], engines=(1, 1, 2)), tokens=50)
    >>> bool((plan.engine_of == 2).any()), plan.review
    (False, (ReviewPoint(when='tokens', value=50.0),))
    """
    engines = len(view.fleet.engines)
    if tokens < 1:
        raise InputError(f"tokens: expected at least 1, got {tokens}")
    if tail_engines < 1 or (tail_engines >= engines and engines > 1):
        raise InputError(
            f"tail_engines: expected 1 to {max(1, engines - 1)} of {engines}, got {tail_engines}"
        )
    ranked = fastest_alone(view)
    tail, bulk = (ranked[:tail_engines], np.sort(ranked[tail_engines:])) if engines > 1 else (ranked, ranked)
    points = (ReviewPoint("tokens", tokens),) if engines > 1 else ()
    if view.is_start:
        units = shuffled_units(view)
        engine_of_unit = np.empty(n_units(view), dtype=np.int64)
        engine_of_unit[units] = deal(units, bulk)
        plan = with_review(plan_units(view, engine_of_unit), *points)
        return speculating(plan, tail if engines > 1 else tail[:0], speculate)

    engine_of_unit = engine_of_units(view)
    longest = np.zeros(n_units(view), dtype=np.int64)
    np.maximum.at(longest, view.unit, view.generated_tokens)
    size = unit_sums(view, np.ones(view.n_requests, dtype=np.int64))
    requests = requests_of_engines(view, engine_of_unit)
    for unit in np.flatnonzero((longest >= tokens) & ~np.isin(engine_of_unit, tail) & (engines > 1)):
        engine_of_unit[unit] = tail[np.argmin(requests[tail])]
        requests[engine_of_unit[unit]] += size[unit]
    return go_on(view, engine_of_unit, None, *points)
