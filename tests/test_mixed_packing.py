"""Packing: profiles against a slow reference, moves leave no trace, plans are carried out as said."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import fleets, profile, step_times, traces

from tailopt.arrays import Ints
from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.oracle.bound_and_fill import staircase
from tailopt.oracle.mixed_packing import Forests, applies, packing_search
from tailopt.oracle.mixed_packing_kernel import NONE, follows, put, take
from tailopt.oracle.mixed_queues import queue_search
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import shared_prefill
from tailopt.plan import Engine, Fleet
from tailopt.simulate import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples


def crowded(engines: int, cache: int, *, slots: int = 1000, samples: int = 2) -> Problem:
    """Lengths up to 3000, many of which have to wait; samples share the blocks of their prompts."""
    shape = ShapeProfile(1, Affine(5e-3, 1e-5, 1e-7), 1e4, cache, slots, token_budget=10**4, block_tokens=8)
    lengths = [100 + 31 * k % 2900 for k in range(160)]
    groups = [lengths[k : k + samples] for k in range(0, 160, samples)]
    trace = Trace.of(groups, prompt_tokens=[50 + k % 40 for k in range(len(groups))])
    return Problem(trace, Fleet(profile(shape), (Engine(1),) * engines, engines))


def profiles(forests: Forests) -> tuple[Ints, Ints]:
    """``[m, points]`` tokens held and requests that run, request by request and step by step."""
    r, points = forests.requests, forests.held.shape[1]
    held, running = np.zeros((2, len(forests.engines), points), np.int64)
    for b in range(points):
        step = b * forests.every
        runs = (r["begin"] < step) & (step <= r["begin"] + r["length"])
        for e, one in enumerate(forests.engines):
            mine = np.flatnonzero(runs & (r["engine"] == e))
            running[e, b] = len(mine)
            held[e, b] = (forests.terms["own"][one["kind"], mine] + step - r["begin"][mine]).sum()
            held[e, b] += sum(r["shared"][r["group"] == g].max() for g in np.unique(r["group"][mine]))
    return held, running


@settings(max_examples=EXAMPLES)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(0, 9), st.booleans()), min_size=1),
    st.integers(1, 9),
    st.integers(10, 100),
)
def test_a_profile_is_the_sum_of_its_requests(
    requests: list[tuple[int, int, int, bool]], every: int, cache: int
) -> None:
    """Of two prompts, whose shared tokens, 7 and 0, count once while any sample runs."""
    points = 100 // every + 2
    held, copies, over = np.zeros(points, np.int64), np.zeros((2, points), np.int64), 0
    for begin, length, own, alike in requests:
        over += put(held, copies[int(alike)], begin, length, own, 7 * alike, every, cache)
    expected, shares = np.zeros(points, np.int64), np.zeros(points, bool)
    for begin, length, own, alike in requests:
        for b in range(points):
            if begin < b * every <= begin + length:
                expected[b] += own + b * every - begin
                shares[b] |= alike
    expected += 7 * shares
    assert held.tolist() == expected.tolist()
    assert over == np.maximum(expected - cache, 0).sum()
    for begin, length, own, alike in reversed(requests):
        over += take(held, copies[int(alike)], begin, length, own, 7 * alike, every, cache)
    assert over == 0
    assert not held.any()
    assert not copies.any()


@pytest.mark.parametrize("slots", [1000, 20])
def test_moves_keep_the_books(slots: int) -> None:
    problem = crowded(3, 30_000, slots=slots)
    run = simulate(problem.trace, problem.fleet, staircase(problem).plan)
    forests = Forests(problem, run.plan)
    forests.anneal(0.9 * run.makespan_s, np.random.default_rng(0))
    assert (forests.requests["engine"] != run.plan.engine_of).any()
    held, running = profiles(forests)
    assert forests.held.tolist() == held.tolist()
    if slots == 20:
        assert forests.running.tolist() == running.tolist()
    r = forests.requests
    for i, one in enumerate(r):
        parent = one["parent"]
        assert one["begin"] == (0 if parent == NONE else r["begin"][parent] + r["length"][parent])
        assert parent == NONE or (r["engine"][parent] == one["engine"] and not follows(r, parent, i))
    for e, engine in enumerate(forests.engines):
        mine = np.flatnonzero(r["engine"] == e)
        assert sorted(forests.members[e, : engine["count"]].tolist()) == mine.tolist()
        terms = forests.terms[engine["kind"]]
        prompts = np.unique(r["group"][mine], return_index=True)[1]
        load_s = terms["added_s"][mine].sum() + terms["once_s"][mine][prompts].sum()
        assert engine["load_s"] == pytest.approx(load_s)
        overflow = np.maximum(held[e] - engine["cache"], 0).sum()
        many = np.maximum(running[e] - engine["slots"], 0).sum()
        assert engine["over"] == overflow + many * (2 * engine["cache"] // engine["slots"])


def test_what_fits_is_carried_out_as_said() -> None:
    problem = crowded(2, 30_000)
    run = simulate(problem.trace, problem.fleet, staircase(problem).plan)
    found = queue_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=0)
    forests = Forests(problem, found.plan)
    said = simulate(problem.trace, problem.fleet, forests.plan())
    assert max(forests.seconds()) == pytest.approx(said.makespan_s, rel=0.02)
    forests.correct(said)
    assert max(forests.seconds()) == pytest.approx(said.makespan_s)


def test_the_search_gains_and_repeats_itself() -> None:
    problem = crowded(2, 30_000)
    run = simulate(problem.trace, problem.fleet, staircase(problem).plan)
    run = queue_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=3)
    found = packing_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=3)
    again = packing_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=3)
    assert found.makespan_s < run.makespan_s
    assert found.plan.order.tolist() == again.plan.order.tolist()
    assert found.plan.engines == again.plan.engines
    assert simulate(problem.trace, problem.fleet, found.plan).makespan_s == found.makespan_s


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(st.data())
def test_any_fleet_gets_a_plan_no_worse(data: st.DataObject) -> None:
    trace = data.draw(traces(most_groups=4, most_samples=3, longest=9, prompts=6))
    problem = Problem(trace, data.draw(fleets(trace, step_times(), most_engines=3)), data.draw(st.booleans()))
    run = simulate(trace, problem.fleet, staircase(problem).plan)
    found = packing_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=0)
    if not applies(problem):
        assert found is run
    assert found.makespan_s <= run.makespan_s
    assert sorted(found.plan.order.tolist()) == list(range(trace.n_requests))
    if applies(problem):
        forests = Forests(problem, run.plan)
        forests.anneal(0.5 * run.makespan_s, np.random.default_rng(0))
        held, _ = profiles(forests)
        assert forests.held.tolist() == held.tolist()
        assert (shared_prefill(problem) == forests.requests["shared"]).all()
        simulate(trace, problem.fleet, forests.plan())  # can be carried out
