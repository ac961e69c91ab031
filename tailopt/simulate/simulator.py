"""``simulate``: carry out a plan on a simulated fleet, fast."""

import numpy as np

from tailopt.plan import Fleet, Plan
from tailopt.run import EngineLog, Run
from tailopt.simulate import kernel
from tailopt.simulate.batch import Batch, prepare
from tailopt.simulate.line_table import LineTable, line_table
from tailopt.trace import Trace


def simulate(trace: Trace, fleet: Fleet, plan: Plan) -> Run:
    """Carry out ``plan`` for the batch ``trace`` on ``fleet`` and say what happened to each request.

    The rules are those of :mod:`tailopt.simulate.reference`: concurrency limits, KV capacity with preemption
    of the request admitted last, own queues and the shared queue; prefill takes no time. Times agree with the
    reference to 1e-9 relative, at a cost that does not depend on the lengths.

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
    batch = prepare(trace, fleet, plan)
    n, m = trace.n_requests, len(batch.fleet.engines)
    widest = int(min(batch.max_running.max(), n))
    lines = line_table(batch.fleet, widest)
    requests, engines = _requests(trace, batch), _engines(batch, lines)
    longest_queue = int(engines["waiting"].max())
    heaps = np.empty((m, min(widest, longest_queue + 2 * len(batch.shared_member) // m + 1)), dtype=np.int64)
    log = np.empty(2 * (n + m), dtype=kernel.LOG)
    counters = np.zeros(2, dtype=np.int64)
    while True:
        code = kernel.run(
            requests, engines, heaps, log, counters, lines.base_s, lines.slope_s, lines.pieces,
            batch.shared_start, batch.shared_member,
        )  # fmt: skip
        if code == kernel.DONE:
            return _run(batch, plan, requests, log[: counters[kernel.LOG_LENGTH]])
        if code == kernel.HEAP_FULL:
            wider = np.empty((m, min(widest, 2 * heaps.shape[1])), dtype=np.int64)
            wider[:, : heaps.shape[1]] = heaps
            heaps = wider
        else:
            log = np.concatenate([log, np.empty_like(log)])


def _requests(trace: Trace, batch: Batch) -> kernel.Records:
    requests = np.zeros(trace.n_requests, dtype=kernel.REQUEST)
    requests["prompt_tokens"] = trace.prompt_tokens
    requests["output_tokens"] = requests["remaining"] = trace.output_tokens
    requests["engine"] = kernel.NONE
    for time in ("start_s", "first_token_s", "finish_s"):
        requests[time] = np.nan
    for queue in batch.queue:
        requests["wait_next"][queue[:-1]] = queue[1:]
    return requests


def _engines(batch: Batch, lines: LineTable) -> kernel.Records:
    engines = np.zeros(len(batch.fleet.engines), dtype=kernel.ENGINE)
    engines["shape"] = lines.shape
    engines["max_running"] = batch.max_running
    engines["kv_capacity_tokens"] = batch.kv_capacity_tokens
    engines["wait_head"] = [queue[0] if len(queue) else kernel.NONE for queue in batch.queue]
    engines["wait_tail"] = [queue[-1] if len(queue) else kernel.NONE for queue in batch.queue]
    engines["waiting"] = [len(queue) for queue in batch.queue]
    engines["run_tail"] = kernel.NONE
    engines["may_pull"] = True
    return engines


def _run(batch: Batch, plan: Plan, requests: kernel.Records, log: kernel.Records) -> Run:
    log = log[np.argsort(log["engine"], kind="stable")]
    columns = ("engine", "start_s", "first_token_s", "finish_s", "preemptions")
    logged = ("engine", "time_s", "running", "kv_tokens")
    return Run(
        backend="simulated",
        fleet=batch.fleet,
        plan=plan,
        output_tokens=requests["output_tokens"] - requests["remaining"],
        log=EngineLog(**{column: np.ascontiguousarray(log[column]) for column in logged}),
        **{column: np.ascontiguousarray(requests[column]) for column in columns},
    )
