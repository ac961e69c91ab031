"""A run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.

Chrome's trace event format: one process per engine, in it one row per slot with a slice for each stay of a
request, split into prefill and decode, and counters of running requests and KV cache; one more process whose
rows hold the requests while they wait. Where the fleet changed, an engine has one more row for when it woke,
drained and went to sleep. A move is an arrow between two stays, a review an instant in all rows. Times are
microseconds.
"""

import heapq
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.files import whole_file
from tailopt.run import Run, Spans
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
    engines = run.engines
    waiting = len(engines)
    events = [
        *(_named(e, f"engine {e}, TP{engine.tp}") for e, engine in enumerate(engines)),
        _named(waiting, "waiting"),
    ]
    names = [
        f"prompt {trace.prompt_ids[prompt]} sample {sample}"
        for prompt, sample in zip(trace.prompt, trace.sample, strict=True)
    ]
    stays, row_of = run.stays, np.zeros(len(run.stays.request), dtype=np.int64)
    for e in range(len(engines)):
        mine = np.flatnonzero(stays.engine == e)
        mine = mine[np.argsort(stays.start_s[mine], kind="stable")]
        rows = _rows(stays.start_s[mine], stays.end_s[mine])
        row_of[mine] = rows
        events += _switches(run.spans, e, max(rows, default=-1) + 1)
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
    events += _arrows(run, row_of)
    for review in run.reviews:
        why = f"{review.reason.when} {review.reason.value:g}" if review.reason.value else review.reason.when
        events.append(
            {
                "ph": "i",
                "s": "g",
                "name": f"review: {why}",
                "pid": waiting,
                "tid": 0,
                "ts": review.time_s * 1e6,
            }
            | {"args": {"unfinished": len(review.request), "note": review.plan.note}}
        )
    return events


def _switches(spans: Spans, engine: int, row: int) -> Iterable[Event]:
    """When an engine woke, drained and went to sleep, in a row of their own."""
    open_s, close_s = float(spans.open_s[engine]), float(spans.close_s[engine])
    wake_s, drain_s = float(spans.wake_s[engine]), float(spans.drain_s[engine])
    sleep_s = float(spans.sleep_s[engine])
    for name, start_s, end_s in (
        ("wake", open_s - wake_s, open_s),
        ("drain", close_s - drain_s, close_s),
        ("sleep", close_s, close_s + sleep_s),
    ):
        if end_s > start_s:
            yield _slice(engine, row, name, start_s, end_s)


def _arrows(run: Run, row_of: Ints) -> Iterable[Event]:
    """From the stay that each move ended to the next one of its request, if that is at the target."""
    stays, moves = run.stays, run.moves
    order = np.lexsort((stays.end_s, stays.start_s, stays.request))
    begin, end = (np.searchsorted(stays.request[order], moves.request, side) for side in ("left", "right"))
    for move, left_s in enumerate(moves.start_s.tolist()):
        own = order[begin[move] : end[move]].tolist()
        before = [
            stay for stay in own if stays.start_s[stay] < left_s and stays.engine[stay] == moves.source[move]
        ]
        after = [stay for stay in own if stays.start_s[stay] >= left_s]
        if not before or not after or stays.engine[after[0]] != moves.target[move]:
            continue
        how = "sent" if moves.migrated[move] else "computed anew"
        args = {"tokens": int(moves.tokens[move]), "seconds": float(moves.end_s[move] - left_s)}
        for phase, stay in (("s", before[-1]), ("f", after[0])):
            start_us, end_us = float(stays.start_s[stay]) * 1e6, float(stays.end_s[stay]) * 1e6
            inside = min(1.0, (end_us - start_us) / 2)  # an arrow hangs on the slice around it
            event = {"ph": phase, "cat": "move", "name": f"move, {how}", "id": move}
            event |= {"pid": int(stays.engine[stay]), "tid": int(row_of[stay])}
            event |= {"ts": end_us - inside if phase == "s" else start_us + inside, "args": args}
            yield event | ({"bp": "e"} if phase == "f" else {})


def _waits(run: Run, trace: Trace, names: list[str], process: int) -> Iterable[Event]:
    """From arrival to the first stay, between stays, and until a request that waits is given up."""
    stays, n = run.stays, trace.n_requests
    request = np.concatenate([stays.request, np.arange(n)])
    start_s = np.concatenate([stays.start_s, run.finish_s])
    end_s = np.concatenate([stays.end_s, run.finish_s])
    order = np.lexsort((np.arange(len(request)), end_s, start_s, request))
    request, start_s, end_s = request[order], start_s[order], end_s[order]
    again = np.concatenate([[False], np.diff(request) == 0])
    since_s = np.where(again, np.concatenate([[0.0], end_s[:-1]]), trace.arrival_s[request])
    moved = set(zip(run.moves.request.tolist(), run.moves.start_s.tolist(), strict=True))
    waits = np.flatnonzero(start_s > since_s)
    waits = waits[np.argsort(since_s[waits], kind="stable")]
    rows = _rows(since_s[waits], start_s[waits])
    for wait, row in zip(waits.tolist(), rows, strict=True):
        i, since = int(request[wait]), float(since_s[wait])
        why = " (moved)" if (i, since) in moved else " (preempted)"
        yield _slice(process, row, names[i] + (why if again[wait] else ""), since, float(start_s[wait]))


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
