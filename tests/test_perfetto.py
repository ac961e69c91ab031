"""Timelines: every stay is a slice, nothing overlaps in a row, waiting and counters are there."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import arriving, exact_step_times, fleets, plans, traces

from tailopt.report.perfetto import file_name, timeline, write_perfetto
from tailopt.simulate import simulate


@given(st.data())
def test_slices_are_the_stays(data: st.DataObject) -> None:
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, exact_step_times()))
    plan = data.draw(plans(trace, fleet))
    trace = data.draw(arriving(trace))
    run = simulate(trace, fleet, plan)
    events = timeline(run, trace)
    engines = len(fleet.engines)
    slices = [event for event in events if event["ph"] == "X"]
    stays = [event for event in slices if event["pid"] < engines and "args" in event]
    assert len(stays) == len(run.stays.request)
    spent = sum(event["dur"] for event in stays)
    assert np.isclose(spent, 1e6 * (run.stays.end_s - run.stays.start_s).sum(), rtol=1e-9)
    parts = sum(event["dur"] for event in slices if event["name"] in ("prefill", "decode"))
    assert np.isclose(parts, spent, rtol=1e-9)
    waited = sum(event["dur"] for event in slices if event["pid"] == engines)
    in_system = (run.finish_s - trace.arrival_s).sum()
    assert np.isclose(waited + spent, 1e6 * in_system, rtol=1e-9)
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices:
        if event["name"] not in ("prefill", "decode"):
            rows.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for intervals in rows.values():
        intervals.sort()
        assert all(end <= start * (1 + 1e-12) for (_, end), (start, _) in pairwise(intervals))
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "running"]
    assert max(event["args"]["running"] for event in counters) == run.log.running.max()


def test_written_whole(tmp_path: Path) -> None:
    from strategies import fleet_of

    from tailopt.engine.step_time import Affine
    from tailopt.plan import Engine, Plan
    from tailopt.trace import Trace

    trace = Trace.of([[3, 4]])
    run = simulate(trace, fleet_of(Affine(1.0, 0.0), 1), Plan.of_queues([Engine(1)], [[0, 1]]))
    path = tmp_path / file_name(0, "lpt", "truth")
    write_perfetto(run, trace, path)
    assert json.loads(path.read_text())["traceEvents"] == timeline(run, trace)
    assert [file.name for file in tmp_path.iterdir()] == ["batch-0-lpt-truth.json"]
