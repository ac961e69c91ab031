"""Longest processing time first, on the time that an engine really takes."""

import numpy as np

from tailopt.plan import Plan, View
from tailopt.policies.units import (
    longest_first,
    n_units,
    plan_units,
    predicted_times_s,
    predicted_work,
    units_longest_first,
)


def lpt(view: View) -> Plan:
    """Send each unit, longest first, to the engine that is then predicted to be done first.

    The prediction is the engine's decode time with its own step time, context included
    (:func:`tailopt.engine.decode_time.engine_time_s`), so it holds for any step time and for engines of
    different shapes. A unit is as long as its longest request.

    Source: the greedy rule of Graham (SIAM Journal on Applied Mathematics 17, 1969) on a cost that is not
    additive; his ratio 4/3 - 1/(3m) does not carry over.

    >>> from tailopt.policies.example import example_view
    >>> lpt(example_view([[10, 10], [90, 80], [60, 60], [30, 30]])).engine_of
    array([1, 1, 0, 0, 1, 1, 1, 1])
    """
    context, tokens = predicted_work(view)
    chosen = np.zeros((len(view.fleet.engines), view.n_requests), dtype=np.bool_)
    members = view.members()
    engine_of_unit = np.empty(n_units(view), dtype=np.int64)
    for unit in units_longest_first(view):
        trial = chosen.copy()
        trial[:, members[unit]] = True
        engine = int(np.argmin(predicted_times_s(view.fleet, context, tokens, trial)))
        chosen[engine] = trial[engine]
        engine_of_unit[unit] = engine
    return plan_units(view, engine_of_unit, longest_first(view))
