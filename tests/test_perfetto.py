"""Timelines: every stay is a slice, nothing overlaps in a row, waiting and counters are there."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import arriving, exact_step_times, fleets, plans, profile, traces

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import StepTime
from tailopt.plan import Engine, Fleet, View
from tailopt.policies import resolve_policy
from tailopt.report.perfetto import Event, file_name, timeline, write_perfetto
from tailopt.run import Run
from tailopt.simulate import simulate, simulate_policy
from tailopt.trace import Trace


@given(st.data())
def test_slices_are_the_stays(data: st.DataObject) -> None:
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, exact_step_times()))
    plan = data.draw(plans(trace, fleet))
    trace = data.draw(arriving(trace))
    check_timeline(simulate(trace, fleet, plan), trace)


def check_timeline(run: Run, trace: Trace) -> list[Event]:
    events = timeline(run, trace)
    engines = len(run.engines)
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
    return events


SWITCHING = ["dyn(n=3, shape='1xTP2')", "dyn(n=2, shape='2xTP1')", "split(tokens=9)", "rebalance", "steal"]


def switching_fleet(step_time: StepTime, degrees: list[int], link: float | None) -> Fleet:
    shapes = [
        ShapeProfile(tp, step_time, 50.0, 4000, 3, token_budget=64, sleep_s=1.5, wake_s=2.5) for tp in (1, 2)
    ]
    known = replace(profile(*shapes), link_bytes_per_s=link)
    return Fleet(known, tuple(Engine(tp) for tp in degrees), max(2, sum(degrees)))


@given(
    traces(),
    exact_step_times(),
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3),
    st.sampled_from(SWITCHING),
    st.sampled_from([None, 10.0, 1e9]),
    st.booleans(),
    st.none() | st.floats(1, 100),
)
def test_moves_switches_and_reviews(
    trace: Trace,
    step_time: StepTime,
    degrees: list[int],
    name: str,
    link: float | None,
    atomic: bool,
    deadline_s: float | None,
) -> None:
    fleet = switching_fleet(step_time, degrees, link)
    policy = resolve_policy(name)
    view = View.at_start(trace, fleet, trace.output_tokens, atomic=atomic)
    run = simulate_policy(trace, lambda now: replace(policy(now), deadline_s=deadline_s), view)
    events = check_timeline(run, trace)
    assert sum(event["ph"] == "i" for event in events) == len(run.reviews)
    spent = dict.fromkeys(("wake", "drain", "sleep"), 0.0)
    for event in events:
        if event["ph"] == "X" and event["name"] in spent:
            spent[event["name"]] += event["dur"] / 1e6
    for kind, seconds in spent.items():
        assert np.isclose(seconds, getattr(run.spans, f"{kind}_s").sum(), atol=1e-6)
    around = {
        (event["pid"], event["tid"], event["ts"]): event["dur"]
        for event in events
        if event["ph"] == "X" and "args" in event
    }
    arrows = {phase: [event for event in events if event["ph"] == phase] for phase in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) <= len(run.moves.request)
    for start, end in zip(arrows["s"], arrows["f"], strict=True):
        assert start["id"] == end["id"]
        assert start["pid"] == run.moves.source[start["id"]]
        assert end["pid"] == run.moves.target[end["id"]]
        assert start["ts"] <= end["ts"]
        for event in (start, end):
            assert any(
                (process, row) == (event["pid"], event["tid"]) and ts <= event["ts"] <= ts + dur
                for (process, row, ts), dur in around.items()
            )
    if deadline_s is None:  # then every move arrives, unless another review sends the request on before
        arrived = {(int(r), int(e)) for r, e in zip(run.stays.request, run.stays.engine, strict=True)}
        last = {int(r): int(e) for r, e in zip(run.moves.request, run.moves.target, strict=True)}
        assert set(last.items()) <= arrived


def test_written_whole(tmp_path: Path) -> None:
    from strategies import fleet_of

    from tailopt.engine.step_time import Affine
    from tailopt.plan import Plan

    trace = Trace.of([[3, 4]])
    run = simulate(trace, fleet_of(Affine(1.0, 0.0), 1), Plan.of_queues([Engine(1)], [[0, 1]]))
    path = tmp_path / file_name(0, "lpt", "truth")
    write_perfetto(run, trace, path)
    assert json.loads(path.read_text())["traceEvents"] == timeline(run, trace)
    assert [file.name for file in tmp_path.iterdir()] == ["batch-0-lpt-truth.json"]
