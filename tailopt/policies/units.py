"""What the policies share: the units they route, how long these are, and a Plan from where they go.

A **unit** is what is routed as one (:attr:`tailopt.plan.View.unit`): a group of samples if groups are atomic,
else a single request.
"""

import numpy as np

from tailopt.arrays import Bools, Floats, Ints
from tailopt.engine.decode_time import engine_time_s
from tailopt.engine.speculation import token_time
from tailopt.plan import Fleet, Plan, View


def n_units(view: View) -> int:
    """Number of units to route."""
    return int(view.unit.max()) + 1 if view.n_requests else 0


def unit_sums(view: View, values: Ints) -> Ints:
    """``[units]`` sum of the values of each unit's requests."""
    sums = np.zeros(n_units(view), dtype=np.int64)
    np.add.at(sums, view.unit, values)
    return sums


def predicted_work(view: View) -> tuple[Ints, Ints]:
    """``[n]`` context tokens of each request now, and ``[n]`` tokens it is predicted to generate yet."""
    expected = np.rint(view.predictions()).astype(np.int64)
    return view.prompt_tokens + view.generated_tokens, np.maximum(1, expected - view.generated_tokens)


def deal(units: Ints, engines: Ints) -> Ints:
    """``[len(units)]`` engine of each unit, dealt like cards.

    >>> deal(np.arange(5), np.array([0, 3]))
    array([0, 3, 0, 3, 0])
    """
    return engines[np.arange(len(units)) % len(engines)]


def shuffled_units(view: View) -> Ints:
    """``[units]`` the units in the batch's random order, the same for every policy that asks."""
    return np.random.default_rng(view.seed).permutation(n_units(view))


def longest_first(view: View) -> Ints:
    """``[n]`` the requests by falling predicted length."""
    return np.argsort(-predicted_work(view)[1], kind="stable")


def units_longest_first(view: View) -> Ints:
    """``[units]`` the units by the falling length of their longest request, then by their falling sum."""
    tokens = predicted_work(view)[1]
    longest = np.zeros(n_units(view), dtype=np.int64)
    np.maximum.at(longest, view.unit, tokens)
    return np.lexsort((-unit_sums(view, tokens), -longest))


def fastest_alone(view: View) -> Ints:
    """``[engines]`` the engines, the one that decodes a lone request fastest first."""
    context = int(view.prompt_tokens.max(initial=0)) + 1
    fleet = view.fleet
    alone_s = [
        float(token_time(fleet.shape_of(e), engine.speculation)(1, context))
        for e, engine in enumerate(fleet.engines)
    ]
    return np.argsort(alone_s, kind="stable")


def predicted_times_s(fleet: Fleet, context: Ints, tokens: Ints, chosen: Bools) -> Floats:
    """Predicted seconds of each engine for the requests it has.

    Args:
        fleet: the engines.
        context, tokens: ``[n]`` from :func:`predicted_work`.
        chosen: ``[..., engines, n]`` which requests each engine has.

    Returns:
        ``[..., engines]`` seconds (:func:`tailopt.engine.decode_time.engine_time_s`).
    """
    seconds = np.empty(chosen.shape[:-1])
    kinds = [(one.tp, fleet.max_running(e), one.speculation) for e, one in enumerate(fleet.engines)]
    for kind in dict.fromkeys(kinds):
        same = [e for e, other in enumerate(kinds) if other == kind]
        tp, limit, speculation = kind
        shape = fleet.profile.shape(tp)
        step_time = token_time(shape, speculation)
        seconds[..., same] = engine_time_s(shape, limit, context, tokens, chosen[..., same, :], step_time)
    return seconds


def plan_units(view: View, engine_of_unit: Ints, order: Ints | None = None, note: str = "") -> Plan:
    """The plan that sends each unit where ``engine_of_unit`` says, in ``order``, or that of the batch."""
    order = np.arange(view.n_requests) if order is None else order
    return Plan(view.fleet.engines, engine_of_unit[view.unit], order, atomic=view.atomic, note=note)
