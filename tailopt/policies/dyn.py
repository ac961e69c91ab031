"""One switch of shapes: a crowded-phase fleet first, another one for the tail."""

from collections import Counter
from dataclasses import replace

import numpy as np

from tailopt.errors import InputError
from tailopt.plan import Engine, Fleet, Plan, ReviewPoint, View
from tailopt.policies.named import ignores_predictions
from tailopt.policies.reviewing import engine_of_units, go_on, with_review
from tailopt.policies.uniform import uniform
from tailopt.policies.units import unit_sums


@ignores_predictions
def dyn(view: View, *, n: int = 32, shape: str | None = None) -> Plan:
    """Run uniformly on the fleet; when n requests are left, switch all GPUs to another shape.

    ``shape`` is written as for ``--shape``; by default it is one engine of the highest degree that the
    profile has and the GPUs can hold. An engine that the new shape has as well goes on with its requests; the
    others are dealt to the engines with the fewest. Without more than n requests there is no switch.

    Source: DYN@n of Lin, RL Long Tail: Mid-Batch Parallel Shape Switching (2026), where the tail on DP4 is
    cancelled and resubmitted to a prewarmed TP4 engine; it lost to the mixed shape 2xTP2 there.

    >>> from tailopt.policies.example import example_view
    >>> dyn(example_view([[90, 80], [10, 20]]), n=1, shape="1xTP1").review
    (ReviewPoint(when='unfinished', value=1.0),)
    """
    if n < 1:
        raise InputError(f"n: expected at least 1, got {n}")
    fleet = view.fleet
    target = Fleet.of(fleet.profile, shape or _highest(fleet), fleet.gpus)
    switched = Counter(engine.tp for engine in fleet.engines) == Counter(e.tp for e in target.engines)
    if view.is_start:
        return uniform(view) if switched else with_review(uniform(view), ReviewPoint("unfinished", n))
    if switched:
        return go_on(view, engine_of_units(view), None)
    return _switch(view, target)


def _highest(fleet: Fleet) -> str:
    return f"1xTP{max(tp for tp in fleet.profile.shapes if tp <= fleet.gpus)}"


def _switch(view: View, target: Fleet) -> Plan:
    """The target's engines, those that are there already with their requests."""
    kept: list[int] = []
    opened: list[Engine] = []
    for engine in target.engines:
        same = [e for e, old in enumerate(view.fleet.engines) if old.tp == engine.tp and e not in kept]
        if same:
            kept.append(same[0])
        else:
            opened.append(replace(engine, gpus=None))
    engines = (*(view.fleet.engines[e] for e in kept), *opened)

    size = unit_sums(view, np.ones(view.n_requests, dtype=np.int64))
    before = engine_of_units(view)
    engine_of_unit = np.array([kept.index(e) if e in kept else -1 for e in before.tolist()], dtype=np.int64)
    requests = np.zeros(len(engines), dtype=np.int64)
    np.add.at(requests, engine_of_unit[engine_of_unit >= 0], size[engine_of_unit >= 0])
    for unit in np.flatnonzero(engine_of_unit < 0):
        engine_of_unit[unit] = np.argmin(requests)
        requests[engine_of_unit[unit]] += size[unit]
    n = view.n_requests
    return Plan(engines, engine_of_unit[view.unit], np.arange(n), atomic=view.atomic, note=f"{n} left")
