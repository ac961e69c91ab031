"""Runs side by side for Perfetto: what was predicted above what was measured, on one clock."""

import json
from collections.abc import Mapping
from pathlib import Path

from tailopt.files import whole_file
from tailopt.report.perfetto import Event, timeline
from tailopt.run import Run
from tailopt.trace import Trace

APART = 1000
"""Process numbers between one run and the next."""


def side_by_side(runs: Mapping[str, Run], trace: Trace) -> list[Event]:
    """The events of all runs of ``trace``, their processes named after the run that they are of.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Fleet, Plan
    >>> from tailopt.simulate import simulate
    >>> fleet, trace = Fleet.of(load_engine("h100-llama-3.1-8b"), "1xTP1"), Trace.of([[30, 50]])
    >>> run = simulate(trace, fleet, Plan.of_queues(fleet.engines, [[0, 1]]))
    >>> events = side_by_side({"predicted": run, "measured": run}, trace)
    >>> [event["args"]["name"] for event in events if event["name"] == "process_name"][::2]
    ['predicted: engine 0, TP1', 'measured: engine 0, TP1']
    """
    events = []
    for rank, (name, run) in enumerate(runs.items()):
        for event in timeline(run, trace):
            moved = event | {"pid": event["pid"] + APART * rank}
            if event["name"] == "process_name":
                moved["args"] = {"name": f"{name}: {event['args']['name']}"}
            if "id" in event:
                moved["id"] = f"{rank}.{event['id']}"
            events.append(moved)
    return events


def write_side_by_side(runs: Mapping[str, Run], trace: Trace, path: str | Path) -> None:
    """Write them, whole or not at all.

    Raises:
        InputError: if the file cannot be written.
    """
    text = json.dumps({"traceEvents": side_by_side(runs, trace), "displayTimeUnit": "ms"})
    with whole_file(path) as temporary:
        temporary.write_text(text)
