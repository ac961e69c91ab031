"""A run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.

Chrome's trace event format: one process per engine, in it one row per slot with a slice for each stay of a
request, split into prefill and decode, and counters of running requests and KV cache; one more process whose
rows hold the requests while they wait. Times are microseconds.
"""

import heapq
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tailopt.arrays import Floats
from tailopt.files import whole_file
from tailopt.run import Run
from tailopt.trace import Trace

Event = dict[str, Any]


def write_perfetto(run: Run, trace: Trace, path: str | Path) -> None:
    """Write the timeline of ``run``, which carried out ``trace``; whole or not at all.

    Raises:
        InputError: if the file cannot be written.
    """
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps({"traceEvents": timeline(run, trace), "displayTimeUnit": "ms"}))


def file_name(batch: int, policy: str, predictor: str) -> str:
    """A file name for a run of a comparison.

    >>> file_name(0, "mine.py:rule(k=2)", "truth")
    'batch-0-mine.py-rule-k-2-truth.json'
    """
    words = re.sub(r"[^\w.]+", "-", f"batch-{batch}-{policy}-{predictor}").strip("-")
    return f"{words}.json"


def timeline(run: Run, trace: Trace) -> list[Event]:
    """The events of a run.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Fleet, Plan
    >>> from tailopt.simulate import simulate
    >>> fleet = Fleet.of(load_engine("h100-llama-3.1-8b"), "2xTP1")
    >>> trace = Trace.of([[30, 50]], prompt_tokens=100)
    >>> events = timeline(simulate(trace, fleet, Plan.of_queues(fleet.engines, [[0], [1]])), trace)
    >>> sorted({event["name"] for event in events if event["ph"] == "X"})
    ['decode', 'prefill', 'prompt 0 sample 0', 'prompt 0 sample 1']
    """
    engines = run.fleet.engines
    waiting = len(engines)
    events = [
        *(_named(e, f"engine {e}, TP{engine.tp}") for e, engine in enumerate(engines)),
        _named(waiting, "waiting"),
    ]
    names = [
        f"prompt {trace.prompt_ids[prompt]} sample {sample}"
        for prompt, sample in zip(trace.prompt, trace.sample, strict=True)
    ]
    stays = run.stays
    for e in range(len(engines)):
        mine = np.flatnonzero(stays.engine == e)
        rows = _rows(stays.start_s[mine], stays.end_s[mine])
        for stay, row in zip(mine.tolist(), rows, strict=True):
            i = int(stays.request[stay])
            start_s, end_s = float(stays.start_s[stay]), float(stays.end_s[stay])
            tokens = {
                "prompt_tokens": int(trace.prompt_tokens[i]),
                "output_tokens": int(run.output_tokens[i]),
            }
            events.append(_slice(e, row, names[i], start_s, end_s, tokens))
            first_s = float(run.first_token_s[i])
            if start_s < first_s <= end_s:
                events.append(_slice(e, row, "prefill", start_s, first_s))
                start_s = first_s
            if start_s < end_s:
                events.append(_slice(e, row, "decode", start_s, end_s))
    log = run.log
    for e, time_s, running, kv in zip(
        log.engine.tolist(), log.time_s.tolist(), log.running.tolist(), log.kv_tokens.tolist(), strict=True
    ):
        events.append(_counter(e, "running", time_s, running))
        events.append(_counter(e, "KV tokens", time_s, kv))
    events += _waits(run, trace, names, waiting)
    return events


def _waits(run: Run, trace: Trace, names: list[str], process: int) -> Iterable[Event]:
    """From arrival to the first stay, and between stays."""
    stays = run.stays
    order = np.lexsort((stays.start_s, stays.request))
    request, start_s, end_s = stays.request[order], stays.start_s[order], stays.end_s[order]
    again = np.concatenate([[False], np.diff(request) == 0])
    since_s = np.where(again, np.concatenate([[0.0], end_s[:-1]]), trace.arrival_s[request])
    waits = np.flatnonzero(start_s > since_s)
    waits = waits[np.argsort(since_s[waits], kind="stable")]
    rows = _rows(since_s[waits], start_s[waits])
    for wait, row in zip(waits.tolist(), rows, strict=True):
        name = names[int(request[wait])] + (" (preempted)" if again[wait] else "")
        yield _slice(process, row, name, float(since_s[wait]), float(start_s[wait]))


def _rows(start_s: Floats, end_s: Floats) -> list[int]:
    """A row for each interval, given by rising start: the lowest one that is free; none overlap in a row."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    rows = []
    for start, end in zip(start_s.tolist(), end_s.tolist(), strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        rows.append(row)
        heapq.heappush(busy, (end, row))
    return rows


def _named(process: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _slice(
    process: int, row: int, name: str, start_s: float, end_s: float, args: Event | None = None
) -> Event:
    event = {"ph": "X", "name": name, "pid": process, "tid": row}
    event |= {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return event | ({"args": args} if args else {})


def _counter(process: int, name: str, time_s: float, value: int) -> Event:
    return {"ph": "C", "name": name, "pid": process, "ts": time_s * 1e6, "args": {name: value}}
