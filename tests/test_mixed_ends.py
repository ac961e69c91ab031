"""Ends: profiles against a slow reference, moves leave no trace, plans are carried out as said."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import fleets, profile, step_times, traces

from tailopt.arrays import Floats
from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.oracle import mixed_ends
from tailopt.oracle.admission import with_queues
from tailopt.oracle.bound_and_fill import staircase
from tailopt.oracle.mixed_ends import Ends, applies, ends_search
from tailopt.oracle.mixed_ends_kernel import SOFT, penalty, steps_left
from tailopt.oracle.mixed_queues import queue_search
from tailopt.oracle.problem import Problem
from tailopt.plan import Engine, Fleet
from tailopt.run import Run
from tailopt.simulate import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples


def crowded(
    engines: int, cache: int, *, slots: int = 1000, samples: int = 2, n: int = 160
) -> tuple[Problem, Run]:
    """Lengths up to 3000, many of which have to wait; samples share the blocks of their prompts."""
    shape = ShapeProfile(1, Affine(5e-3, 1e-5, 1e-7), 1e4, cache, slots, token_budget=10**4, block_tokens=8)
    lengths = [100 + 31 * k % 2900 for k in range(n)]
    groups = [lengths[k : k + samples] for k in range(0, n, samples)]
    trace = Trace.of(groups, prompt_tokens=[50 + k % 40 for k in range(len(groups))])
    problem = Problem(trace, Fleet(profile(shape), (Engine(1),) * engines, engines))
    return problem, simulate(trace, problem.fleet, staircase(problem).plan)


def profiles(ends: Ends) -> tuple[Floats, Floats]:
    """``[m, 2, points]`` tokens held and requests that run, request by request and point by point."""
    r, points = ends.requests, ends.held.shape[2]
    held, running = np.zeros((2, *ends.held.shape))
    for e, one in enumerate(ends.engines):
        for side in (0, 1):
            mine = np.flatnonzero((r["engine"] == e) & (r["at_end"] == side))
            for b in range(points):
                late = r["length"][mine] - ends.every * (points - 1 - b)
                gained = late if side else ends.every * (b - r["later"][mine])
                runs = (gained > 0) & (gained <= r["length"][mine])
                running[e, side, b] = runs.sum()
                held[e, side, b] = (ends.terms["own"][one["kind"], mine] + gained)[runs].sum()
                held[e, side, b] += shared(r[mine[runs]])
    return held, running


def shared(requests: Any) -> int:
    """Tokens that these hold of shared blocks, once for each prompt but for those that begin in between."""
    r = requests[requests["later"] == 0]
    once = r["shared"][np.unique(r["group"], return_index=True)[1]].sum()
    return int(once + requests["shared"][requests["later"] > 0].sum())


def check_books(ends: Ends) -> None:
    held, running = profiles(ends)
    assert ends.held.tolist() == held.tolist()
    assert ends.running.tolist() == running.tolist()
    r = ends.requests
    for e, one in enumerate(ends.engines):
        mine = np.flatnonzero(r["engine"] == e)
        terms = ends.terms[one["kind"]]
        prompts = np.unique(r["group"][mine], return_index=True)[1]
        load_s = terms["added_s"][mine].sum() + terms["once_s"][mine][prompts].sum()
        assert one["count"] == len(mine)
        assert one["load_s"] == pytest.approx(load_s)
        for side in (0, 1):
            for g, prompt in enumerate(np.unique(r["group"])):
                some = mine[(r["group"][mine] == prompt) & (r["at_end"][mine] == side)]
                assert ends.given[e, side, g] == len(some)
                if r["shared"][some].any():
                    some = some[r["later"][some] == 0]
                    assert ends.reach[e, side, g] == r["length"][some].max(initial=0)


@pytest.mark.parametrize("slots", [1000, 20])
def test_moves_keep_the_books(slots: int) -> None:
    problem, run = crowded(3, 30_000, slots=slots, samples=4)
    ends = Ends(problem, run)
    check_books(ends)
    for heat in (1.0, 0.01):
        ends.anneal(0.9 * run.makespan_s, heat, 0.0, np.random.default_rng(0))
        check_books(ends)
    r = ends.requests
    assert (r["engine"] != run.plan.engine_of[ends.order]).any()
    assert 0 < r["at_end"].sum() < len(r)
    assert 0 < (r["later"] > 0).sum() < len(r)
    assert not (r["later"] * r["at_end"]).any()
    assert (r["length"][r["at_end"] == 1] >= ends.least).all()


@pytest.mark.parametrize("slots", [1000, 20])
def test_the_penalty_is_what_points_hold_too_much(slots: int) -> None:
    """Whole numbers of points, so that no point of the one profile lies between two of the other."""
    problem, run = crowded(2, 30_000, slots=slots)
    ends = Ends(problem, run)
    ends.anneal(run.makespan_s, 0.01, 0.0, np.random.default_rng(0))
    r = ends.requests
    for e, one in enumerate(ends.engines):
        last = 60
        makespan_s = last * ends.every * one["step_s"] + one["load_s"] + 1e-9
        steps = steps_left(one, makespan_s)
        assert steps == last * ends.every
        mine = np.flatnonzero(r["engine"] == e)
        held, running = np.zeros((2, last))
        for b in range(1, last + 1):
            ends_late, later = r["at_end"][mine] == 1, r["later"][mine] * ends.every
            gained = b * ends.every - np.where(ends_late, steps - r["length"][mine], later)
            runs = (gained > 0) & (gained <= r["length"][mine])
            running[b - 1] = runs.sum()
            held[b - 1] = (ends.terms["own"][0, mine] + gained)[runs].sum()
            for side in (0, 1):
                held[b - 1] += shared(r[mine[runs & (ends_late == side)]])
        full = np.maximum(held - np.floor(one["cache"]), 0) / one["cache"]
        many = np.maximum(running - one["slots"], 0) / one["slots"]
        late = np.maximum(r["length"][mine] - steps, 0).sum()
        expected = (full * (1 + full / SOFT)).sum() + 2 * many.sum() * (len(mine) > slots)
        expected += late / ends.every * (1 + late / (SOFT * steps))
        begun = mine[r["at_end"][mine] == 0]
        done = (r["later"][begun] * ends.every + r["length"][begun]) // ends.every
        expected += np.maximum(done - np.maximum(last, r["later"][begun]), 0).sum()
        found = penalty(r, ends.engines, ends.held, ends.running, ends.every, makespan_s, e)
        assert expected > 0
        assert found == pytest.approx(expected)


def test_what_fits_is_carried_out_as_said() -> None:
    problem, run = crowded(2, 60_000)
    run = queue_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=0)
    ends = Ends(problem, run)
    target_s = 1.1 * run.makespan_s
    assert ends.anneal(target_s, 0.01, 0.0, np.random.default_rng(0)) == 0
    found = simulate(problem.trace, problem.fleet, with_queues(problem, ends.queues(target_s)))
    assert not found.preemptions.any()
    assert max(ends.seconds(target_s)) == pytest.approx(found.makespan_s, rel=0.02)
    ends.correct(found, target_s)
    assert max(ends.seconds(target_s)) == pytest.approx(found.makespan_s, rel=5e-3)  # and other steps


def test_the_search_gains_and_repeats_itself() -> None:
    problem, run = crowded(2, 100_000, n=400)
    run = queue_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=3)
    found = ends_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=3)
    again = ends_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=3)
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_ends, "PROPOSALS", 300)
        found = ends_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=0)
        assert found.makespan_s <= run.makespan_s
        assert sorted(found.plan.order.tolist()) == list(range(trace.n_requests))
        if not applies(problem):
            assert found is run
            return
        ends = Ends(problem, run)
        ends.anneal(0.5 * run.makespan_s, 1.0, 0.0, np.random.default_rng(0))
        check_books(ends)
        simulate(
            trace, problem.fleet, with_queues(problem, ends.queues(0.5 * run.makespan_s))
        )  # can be carried out
