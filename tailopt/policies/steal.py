"""Work stealing: an engine that runs dry takes what waits elsewhere."""

import numpy as np

from tailopt.plan import Plan, ReviewPoint, View
from tailopt.policies.named import ignores_predictions
from tailopt.policies.reviewing import engine_of_units, go_on, running_units, with_review
from tailopt.policies.uniform import uniform
from tailopt.policies.units import unit_sums

IDLE = ReviewPoint("idle")


@ignores_predictions
def steal(view: View) -> Plan:
    """Start uniformly; an engine with nothing to do takes half of the waiting units of where most wait.

    Nothing that runs is moved, so nothing is computed twice; where the whole batch runs at once from the
    start, nothing waits and this is ``uniform``.

    Source: work stealing (Blumofe and Leiserson, Scheduling Multithreaded Computations by Work Stealing,
    Journal of the ACM 46, 1999); half of the queue at once as Hendler and Shavit, Non-blocking Steal-half
    Work Queues, PODC 2002.

    >>> from tailopt.policies.example import example_view
    >>> steal(example_view([[90, 80], [10, 20]])).review
    (ReviewPoint(when='idle', value=0.0),)
    """
    if view.is_start:
        return with_review(uniform(view), IDLE)
    engine_of_unit = engine_of_units(view)
    waits = ~running_units(view)
    size = unit_sums(view, np.ones(view.n_requests, dtype=np.int64))
    engines = np.arange(len(view.fleet.engines))
    for idle in np.setdiff1d(engines, engine_of_unit):
        waiting = np.array([size[waits & (engine_of_unit == e)].sum() for e in engines])
        victim = int(np.argmax(waiting))
        taken = np.flatnonzero(waits & (engine_of_unit == victim))
        engine_of_unit[taken[len(taken) // 2 :]] = idle
    return go_on(view, engine_of_unit, None, IDLE)
