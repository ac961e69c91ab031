"""Moving requests while they run, where the model says that it pays."""

import numpy as np

from tailopt.arrays import Ints
from tailopt.errors import InputError
from tailopt.plan import Plan, ReviewPoint, View
from tailopt.policies.lpt import lpt
from tailopt.policies.reviewing import (
    engine_of_units,
    go_on,
    move_seconds,
    seconds_of_engines,
    with_review,
)
from tailopt.policies.uniform import uniform
from tailopt.policies.units import longest_first, predicted_times_s, predicted_work, units_longest_first

IDLE = ReviewPoint("idle")

STARTS = {"uniform": uniform, "lpt": lpt}

MOST_TRIALS = 32
"""Numbers of units that are tried for one idle engine."""


def rebalance(view: View, *, start: str = "lpt") -> Plan:
    """Start with ``lpt`` or ``uniform``; an idle engine takes the longest units of the engine done last.

    How many, the model says: with T the predicted seconds of the last engine and of the idle one after the k
    units predicted longest have moved, and S_k what their move costs, k is where

        max(T_last(k), S_k + T_idle(k))

    is least, if that is less than T_last(0). S_k is the context of those that run over the prefill rate of
    the idle engine, or their KV cache over the link, whichever is less; what waits moves for nothing. So both
    sides are known before anything moves.

    Source: the rule that a move must save more than it costs, as for requests in Llumnix (Sun et al., OSDI
    2024) and for shapes in Seesaw (Su et al., MLSys 2025); here on predicted makespans.

    >>> from tailopt.policies.example import example_view
    >>> rebalance(example_view([[90, 80], [10, 20]])).review
    (ReviewPoint(when='idle', value=0.0),)
    """
    if start not in STARTS:
        raise InputError(f"start: expected {' or '.join(STARTS)}, got {start!r:.60}")
    if view.is_start:
        return with_review(STARTS[start](view), IDLE)
    view.predictions()
    engine_of_unit = engine_of_units(view)
    for idle in np.setdiff1d(np.arange(len(view.fleet.engines)), engine_of_unit):
        last = int(np.argmax(seconds_of_engines(view, engine_of_unit)))
        engine_of_unit[_worth_moving(view, engine_of_unit, last, int(idle))] = idle
    return go_on(view, engine_of_unit, longest_first(view), IDLE)


def _worth_moving(view: View, engine_of_unit: Ints, last: int, idle: int) -> Ints:
    """The units that go from engine ``last`` to the idle one, none if no number of them pays."""
    ranked = units_longest_first(view)
    mine: Ints = ranked[engine_of_unit[ranked] == last]
    numbers = np.unique(np.geomspace(1, max(1, len(mine)), MOST_TRIALS).astype(np.int64))
    rank = np.full(len(ranked), len(ranked))
    rank[mine] = np.arange(len(mine))
    here = engine_of_unit[view.unit] == last
    moved = here & (rank[view.unit] < numbers[:, None])

    context, tokens = predicted_work(view)
    chosen = np.zeros((len(numbers) + 1, len(view.fleet.engines), view.n_requests), dtype=np.bool_)
    chosen[0, last] = here
    chosen[1:, last], chosen[1:, idle] = here & ~moved, moved
    seconds = predicted_times_s(view.fleet, context, tokens, chosen)
    then_s = np.maximum(seconds[1:, last], move_seconds(view, moved, idle) + seconds[1:, idle])
    best = int(np.argmin(then_s))
    return mine[: numbers[best] if then_s[best] < seconds[0, last] else 0]
