"""A shared queue: no routing at all, engines pull when they have room."""

from dataclasses import replace

import numpy as np

from tailopt.errors import InputError
from tailopt.plan import SHARED_QUEUE, Plan, View
from tailopt.policies.named import ignores_predictions


@ignores_predictions
def shared_queue(view: View, *, max_running: int | None = None) -> Plan:
    """Leave all units in one queue, in the order of the batch; an engine with room pulls the next.

    Pulling balances only what waits: if all engines together can run the whole batch at once, everything is
    pulled at time 0, evenly by count. ``max_running`` lowers the requests that an engine runs together, which
    makes some wait.

    Source: list scheduling (Graham, Bounds for Certain Multiprocessing Anomalies, Bell System Technical
    Journal 45, 1966).

    >>> from tailopt.policies.example import example_view
    >>> plan = shared_queue(example_view([[90, 80], [10, 20]]), max_running=2)
    >>> plan.engine_of, [engine.max_running for engine in plan.engines]
    (array([-1, -1, -1, -1]), [2, 2])
    """
    if max_running is not None and max_running < 1:
        raise InputError(f"max_running: expected at least 1, got {max_running}")
    limits = [view.fleet.max_running(e) for e in range(len(view.fleet.engines))]
    engines = tuple(
        replace(engine, max_running=min(limit, max_running or limit), limits=())
        for engine, limit in zip(view.fleet.engines, limits, strict=True)
    )
    n = view.n_requests
    return Plan(engines, np.full(n, SHARED_QUEUE), np.arange(n), atomic=view.atomic)
