"""``simulate``: carry out a plan on a simulated fleet, fast."""

import numpy as np

from tailopt.arrays import Ints
from tailopt.plan import Fleet, Plan, Policy, View
from tailopt.run import EngineLog, Run, Stays
from tailopt.simulate import kernel
from tailopt.simulate.ledger import Ledger
from tailopt.simulate.line_table import LineTable, line_table
from tailopt.simulate.reference import simulate_policy_reference, simulate_reference
from tailopt.trace import Trace


def simulate(trace: Trace, fleet: Fleet, plan: Plan) -> Run:
    """Carry out ``plan`` for the batch ``trace`` on ``fleet`` and say what happened to each request.

    The rules are those of :mod:`tailopt.simulate.reference`, which schedules each step as vLLM does. Times
    agree with it to 1e-9 relative, at a cost that grows with events and not with tokens.

    Raises:
        InputError: if the plan does not fit the trace or the fleet, or a request can never fit an engine.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Engine
    >>> fleet = Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1), Engine(1)), gpus=2)
    >>> trace = Trace.of([[30, 50], [7, 9]], prompt_tokens=100)
    >>> run = simulate(trace, fleet, Plan.of_queues(fleet.engines, [[0, 1], [2, 3]]))
    >>> run.output_tokens.tolist(), bool(run.makespan_s == run.finish_s[1])
    ([30, 50, 7, 9], True)
    """
    if plan.review or plan.deadline_s is not None:
        return simulate_reference(trace, fleet, plan)
    batch = Ledger(trace, fleet)
    orders = batch.begin(plan)
    n, m = trace.n_requests, len(batch.fleet.engines)
    max_running = np.array([batch.max_running(e) for e in range(m)])
    widest = int(min(max_running.max(), n))
    lines = line_table(batch.fleet, widest)
    queue = [orders.queue[e] for e in range(m)]
    own = np.concatenate([np.zeros(0, dtype=np.int64), *queue])
    engines = _engines(batch, lines, max_running, queue)
    requests, runs = _requests(trace, batch), np.zeros(2 * n, dtype=kernel.RUN)
    heaps = np.empty((m, min(widest, 4 * n // m + 64)), dtype=np.int64)
    phases = np.zeros((m, int(engines["block_tokens"].max())), dtype=np.int64)
    log, stays = np.empty(3 * (n + m), dtype=kernel.LOG), np.empty(2 * n + widest, dtype=kernel.STAY)
    counters = np.zeros(3, dtype=np.int64)
    while True:
        code = kernel.run(
            requests, runs, engines, heaps, phases, own, orders.unit_start, orders.unit_member,
            orders.unit_s, log, stays, counters, lines.base_s, lines.slope_s, lines.pieces,
        )  # fmt: skip
        if code == kernel.LOG_FULL:
            log = np.concatenate([log, np.empty_like(log)])
        elif code == kernel.STAYS_FULL:
            stays = np.concatenate([stays, np.empty_like(stays)])
        elif code == kernel.HEAP_FULL:
            heaps = np.concatenate([heaps, np.empty_like(heaps)], axis=1)[:, :widest].copy()
        else:
            break
    return _run(batch, requests, log[: counters[kernel.LOG_LENGTH]], stays[: counters[kernel.STAYS_LENGTH]])


def _requests(trace: Trace, batch: Ledger) -> kernel.Records:
    requests = np.zeros(trace.n_requests, dtype=kernel.REQUEST)
    requests["prompt_tokens"] = trace.context_tokens
    requests["output_tokens"] = batch.limit
    requests["arrival_s"] = trace.arrival_s
    requests["engine"] = requests["chain"] = kernel.NONE
    for time in ("start_s", "first_token_s", "finish_s"):
        requests[time] = np.nan
    block_tokens = max(batch.fleet.shape_of(e).block_tokens for e in range(len(batch.fleet.engines)))
    caching = any(batch.fleet.shape_of(e).prefix_caching for e in range(len(batch.fleet.engines)))
    requests["shared_blocks"] = batch.shared_tokens // block_tokens if caching else 0
    by_group = np.argsort(trace.group, kind="stable")
    ends = np.flatnonzero(np.diff(trace.group[by_group], append=-1))
    ring = np.append(by_group[1:], by_group[0])
    ring[ends] = by_group[np.append(0, ends[:-1] + 1)]
    requests["sibling"][by_group] = ring
    return requests


def _engines(batch: Ledger, lines: LineTable, max_running: Ints, queue: list[Ints]) -> kernel.Records:
    shapes = [batch.fleet.shape_of(e) for e in range(len(batch.fleet.engines))]
    engines = np.zeros(len(shapes), dtype=kernel.ENGINE)
    engines["shape"] = lines.shape
    engines["max_running"] = max_running
    engines["token_budget"] = [shape.token_budget for shape in shapes]
    engines["block_tokens"] = [shape.block_tokens for shape in shapes]
    engines["prefix_caching"] = [shape.prefix_caching for shape in shapes]
    engines["blocks"] = engines["free"] = engines["blank"] = [
        shape.kv_capacity_tokens // shape.block_tokens for shape in shapes
    ]
    engines["prefill_s"] = [1 / shape.prefill_tokens_per_s for shape in shapes]
    for end in ("queue_head", "queue_tail", "wait_head", "wait_tail", "run_tail", "prefilling"):
        engines[end] = kernel.NONE
    engines["end_own"] = np.cumsum([len(queue) for queue in queue])
    engines["next_own"] = engines["end_own"] - [len(queue) for queue in queue]
    engines["hungry"] = True
    return engines


def _run(batch: Ledger, requests: kernel.Records, log: kernel.Records, stays: kernel.Records) -> Run:
    log = log[np.argsort(log["engine"], kind="stable")]
    logged, stayed = (
        ("engine", "step", "time_s", "running", "kv_tokens"),
        ("request", "engine", "start_s", "end_s"),
    )
    columns = ("engine", "start_s", "first_token_s", "finish_s", "preemptions")
    return batch.run(
        "simulated",
        output_tokens=np.ascontiguousarray(requests["generated"]),
        log=EngineLog(**{name: np.ascontiguousarray(log[name]) for name in logged}),
        stays=Stays(**{name: np.ascontiguousarray(stays[name]) for name in stayed}),
        **{column: np.ascontiguousarray(requests[column]) for column in columns},
    )


def simulate_policy(trace: Trace, policy: Policy, view: View) -> Run:
    """Carry out ``policy`` for the batch ``trace``, of which ``view`` is what it may see at the start."""
    return simulate_policy_reference(trace, policy, view)
