"""What both simulators start from: checked numbers of the batch, and the shared queue cut into units."""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Ints
from tailopt.errors import InputError
from tailopt.plan import SHARED_QUEUE, Fleet, Plan
from tailopt.trace import Trace


@dataclass(frozen=True, eq=False)
class Batch:
    """A plan about to be carried out.

    Attributes:
        fleet: the fleet with the plan's own concurrency limits.
        kv_capacity_tokens, max_running: ``[engines]``.
        queue: each engine's own requests in admission order.
        shared_member: requests in the shared queue, unit by unit, in the order of service; a unit is one
            request, or a group if the plan is atomic.
        shared_start: ``[units + 1]`` where each unit starts in ``shared_member``.
    """

    fleet: Fleet
    kv_capacity_tokens: Ints
    max_running: Ints
    queue: list[Ints]
    shared_member: Ints
    shared_start: Ints


def prepare(trace: Trace, fleet: Fleet, plan: Plan) -> Batch:
    """Check that ``plan`` can be carried out on ``fleet`` and cut its queues.

    Raises:
        InputError: if the plan is for another number of requests, a request can never fit into the KV cache
            of an engine it may run on, or requests arrive later than 0.
    """
    n = trace.n_requests
    if len(plan.engine_of) != n:
        raise InputError(f"plan: has {len(plan.engine_of)} requests, trace {trace.name!r} has {n}")
    if trace.arrival_s.any():
        raise InputError(
            f"trace {trace.name!r}: requests arrive later than 0 s; expected one batch, all at 0 s"
        )
    fleet = Fleet(fleet.profile, plan.engines, fleet.gpus)
    engines = range(len(fleet.engines))
    kv_capacity = np.array([fleet.shape_of(e).kv_capacity_tokens for e in engines], dtype=np.int64)
    _check_fit(trace, plan, kv_capacity)

    owner = plan.engine_of[plan.order]
    by_owner = np.split(
        plan.order[np.argsort(owner, kind="stable")],
        np.cumsum(np.bincount(owner - SHARED_QUEUE, minlength=len(fleet.engines) + 1))[:-1],
    )
    shared_member, shared_start = _units(by_owner[0], trace.group if plan.atomic else None)
    return Batch(
        fleet=fleet,
        kv_capacity_tokens=kv_capacity,
        max_running=np.array([fleet.max_running(e) for e in engines], dtype=np.int64),
        queue=by_owner[1:],
        shared_member=shared_member,
        shared_start=shared_start,
    )


def _check_fit(trace: Trace, plan: Plan, kv_capacity: Ints) -> None:
    need = trace.prompt_tokens + trace.output_tokens
    room = np.where(plan.engine_of == SHARED_QUEUE, kv_capacity.min(), kv_capacity[plan.engine_of])
    if (need > room).any():
        request = int(np.argmax(need > room))
        raise InputError(
            f"request {request} (prompt {trace.prompt_ids[trace.prompt[request]]!r}) needs "
            f"{need[request]} KV tokens, its engine holds {room[request]}"
        )


def _units(requests: Ints, group: Ints | None) -> tuple[Ints, Ints]:
    """Order the shared queue unit by unit and say where units start; a group stands where its first does."""
    if group is None:
        return requests, np.arange(len(requests) + 1)
    _, first, unit = np.unique(group[requests], return_index=True, return_inverse=True)
    place = first[unit]
    by_unit = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[by_unit], prepend=-1))
    return requests[by_unit], np.append(starts, len(requests))
