"""What the kernel and the reference start from: a plan checked against batch and fleet, cut into queues."""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.errors import InputError
from tailopt.plan import SHARED_QUEUE, Fleet, Plan
from tailopt.trace import Trace


@dataclass(frozen=True, eq=False)
class Batch:
    """A plan about to be carried out.

    Attributes:
        fleet: the fleet with the plan's own concurrency limits.
        blocks: ``[m]`` KV blocks of each engine.
        max_running: ``[m]`` concurrency limit of each engine.
        shared_tokens: ``[n]`` leading tokens of each request whose blocks its group shares.
        queue: each engine's own requests by arrival, then in the plan's order.
        shared_member: requests in the shared queue, unit by unit, in the order of service; a unit is one
            request, or a group if the plan is atomic.
        shared_start: ``[units + 1]`` where each unit starts in ``shared_member``.
        shared_arrival_s: ``[units]`` when all requests of a unit have arrived, never falling.
    """

    fleet: Fleet
    blocks: Ints
    max_running: Ints
    shared_tokens: Ints
    queue: list[Ints]
    shared_member: Ints
    shared_start: Ints
    shared_arrival_s: Floats


def prepare(trace: Trace, fleet: Fleet, plan: Plan) -> Batch:
    """Check that ``plan`` can be carried out on ``fleet`` and cut its queues.

    Raises: InputError: if the plan is for another number of requests, or a request can never fit into the
    KV cache of an engine it may run on.
    """
    n = trace.n_requests
    if len(plan.engine_of) != n:
        raise InputError(f"plan: has {len(plan.engine_of)} requests, trace {trace.name!r} has {n}")
    fleet = Fleet(fleet.profile, plan.engines, fleet.gpus)
    shapes = [fleet.shape_of(e) for e in range(len(fleet.engines))]
    blocks = np.array([shape.kv_capacity_tokens // shape.block_tokens for shape in shapes], dtype=np.int64)
    block_tokens = np.array([shape.block_tokens for shape in shapes], dtype=np.int64)
    _check_fit(trace, plan, fleet, blocks * block_tokens)

    by_arrival = plan.order[np.argsort(trace.arrival_s[plan.order], kind="stable")]
    owner = plan.engine_of[by_arrival]
    by_owner = np.split(
        by_arrival[np.argsort(owner, kind="stable")],
        np.cumsum(np.bincount(owner - SHARED_QUEUE, minlength=len(shapes) + 1))[:-1],
    )
    member, start, arrival_s = _units(by_owner[0], trace, atomic=plan.atomic)
    return Batch(
        fleet=fleet,
        blocks=blocks,
        max_running=np.array([fleet.max_running(e) for e in range(len(shapes))], dtype=np.int64),
        shared_tokens=shared_tokens(trace, int(block_tokens.max())),
        queue=by_owner[1:],
        shared_member=member,
        shared_start=start,
        shared_arrival_s=arrival_s,
    )


def _check_fit(trace: Trace, plan: Plan, fleet: Fleet, kv_tokens: Ints) -> None:
    """The KV of a request's last token is never computed: prompt and output need one token less of cache."""
    need = trace.context_tokens + trace.output_tokens - 1
    runs_on = np.where(plan.engine_of == SHARED_QUEUE, np.argmin(kv_tokens), plan.engine_of)
    too_large = need > kv_tokens[runs_on]
    if too_large.any():
        request = int(np.argmax(too_large))
        engine = int(runs_on[request])
        raise InputError(
            f"request {request} (prompt {trace.prompt_ids[trace.prompt[request]]!r}) needs "
            f"{need[request]} tokens of KV cache, engine {engine} (TP{fleet.engines[engine].tp} of "
            f"{fleet.profile.name}) holds {kv_tokens[engine]}; give it more GPUs, or shorter responses"
        )


def shared_tokens(trace: Trace, block_tokens: int) -> Ints:
    """``[n]`` tokens in the full blocks that a prompt shares with its other samples, 0 if it has none.

    A sample computes its prompt's last token, hence the block that ends with it, itself in any case. All
    engines of a profile have blocks of one size in practice; where not, the largest counts.
    """
    shared = (trace.context_tokens - 1) // block_tokens * block_tokens
    group_size = np.bincount(trace.group)[trace.group]
    return np.where(group_size > 1, _least_of_group(trace, shared), 0)


def _least_of_group(trace: Trace, values: Ints) -> Ints:
    least = np.full(int(trace.group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, trace.group, values)
    return least[trace.group]


def _units(requests: Ints, trace: Trace, *, atomic: bool) -> tuple[Ints, Ints, Floats]:
    """The shared queue unit by unit, where units start, and when they are there.

    A group stands where its first request stands; a unit is there when its last request is.
    """
    if not atomic or not len(requests):
        return requests, np.arange(len(requests) + 1), trace.arrival_s[requests]
    _, first, unit = np.unique(trace.group[requests], return_index=True, return_inverse=True)
    arrival_s = np.zeros(len(first))
    np.maximum.at(arrival_s, unit, trace.arrival_s[requests])
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.lexsort((first, arrival_s))] = np.arange(len(first))
    by_unit = np.argsort(rank[unit], kind="stable")
    starts = np.flatnonzero(np.diff(rank[unit][by_unit], prepend=-1))
    return requests[by_unit], np.append(starts, len(requests)), np.sort(arrival_s)
