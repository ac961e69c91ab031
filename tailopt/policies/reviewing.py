"""What policies share that are asked again while the batch runs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tailopt.arrays import Bools, Floats, Ints
from tailopt.plan import SHARED_QUEUE, Plan, ReviewPoint, View
from tailopt.policies.units import n_units, predicted_times_s, predicted_work


def with_review(plan: Plan, *points: ReviewPoint) -> Plan:
    """The same plan with these review points."""
    return replace(plan, review=points)


def engine_of_units(view: View) -> Ints:
    """``[units]`` where each unit is now, -1 if no engine has pulled it yet."""
    engine = np.full(n_units(view), SHARED_QUEUE)
    np.maximum.at(engine, view.unit, view.engine)
    return engine


def running_units(view: View) -> Bools:
    """``[units]`` whether a request of the unit is being decoded."""
    running = np.zeros(n_units(view), dtype=np.bool_)
    running[view.unit[view.running]] = True
    return running


def requests_of_engines(view: View, engine_of_unit: Ints) -> Ints:
    """``[engines]`` requests that each engine has when the units are there."""
    engine = engine_of_unit[view.unit]
    return np.bincount(engine[engine >= 0], minlength=len(view.fleet.engines))


def seconds_of_engines(view: View, engine_of_unit: Ints) -> Floats:
    """``[engines]`` predicted seconds that each engine still decodes when the units are there."""
    context, tokens = predicted_work(view)
    chosen = engine_of_unit[view.unit] == np.arange(len(view.fleet.engines))[:, None]
    return predicted_times_s(view.fleet, context, tokens, chosen)


def move_seconds(view: View, moved: Bools, target: int) -> Floats:
    r"""``[...]`` seconds until engine ``target`` can go on with the moved requests.

    Those that run are computed anew, :math:`\sum \text{context} / \text{prefill rate}`, or their KV cache is
    sent, :math:`\sum (\text{latency} + \text{context} \cdot \text{bytes} / \text{link rate})`, whichever is
    less. Those that wait are computed once in any case.

    Args:
        view: where they run now.
        moved: ``[..., n]`` which requests move.
        target: an engine of the fleet.
    """
    profile, shape = view.fleet.profile, view.fleet.shape_of(target)
    context = np.where(view.running, view.prompt_tokens + view.generated_tokens, 0)
    tokens, requests = moved @ context, moved @ view.running.astype(np.int64)
    anew_s = tokens / shape.prefill_tokens_per_s
    if profile.link_bytes_per_s is None:
        return np.asarray(anew_s)
    sent_s = (
        requests * profile.link_latency_s + tokens * profile.kv_bytes_per_token / profile.link_bytes_per_s
    )
    return np.minimum(anew_s, sent_s)


def go_on(view: View, engine_of_unit: Ints, order: Ints | None, *points: ReviewPoint) -> Plan:
    """The plan for a fleet that stays as it is, each unit where ``engine_of_unit`` says."""
    order = np.arange(view.n_requests) if order is None else order
    return Plan(
        view.fleet.engines, engine_of_unit[view.unit], order, atomic=view.atomic, review=tuple(points)
    )


def members_of(view: View, units: Sequence[int] | Ints) -> Bools:
    """``[n]`` which requests belong to these units."""
    return np.isin(view.unit, units)
