"""Order and limit of one engine: no worse than longest first, no better than brute force or the bound."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import fleet_of, fleets, plans, step_times, traces

from tailopt.engine.step_time import Affine, MaxAffine
from tailopt.errors import InputError
from tailopt.oracle.admission import admit, timed, with_queues
from tailopt.oracle.bound_and_fill import staircase
from tailopt.oracle.check import check
from tailopt.oracle.mixed_search import crowded_search
from tailopt.oracle.mixed_solve import admitted, kinds, waits
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.oracle.units import units_of
from tailopt.simulate import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples
SLACK = 1 + 1e-9

CROWDED = Problem(
    Trace.of([[400 + 9 * k] for k in range(120)], prompt_tokens=50),
    fleet_of(Affine(5e-3, 1e-4, 1e-7), 2, kv_capacity_tokens=15_000),
)


@settings(max_examples=EXAMPLES // 2)
@given(st.data())
def test_between_the_best_of_all_and_longest_first(data: st.DataObject) -> None:
    trace = data.draw(traces(most_groups=4, most_samples=1, longest=9, prompts=6))
    problem = Problem(trace, data.draw(fleets(trace, step_times(), most_engines=1)))
    everything = np.arange(trace.n_requests)
    longest_first = np.argsort(-trace.output_tokens, kind="stable")
    found = admit(problem, 0, everything)
    best_s = min(
        timed(problem, 0, np.array(order), limit)[0]
        for order in permutations(everything.tolist())
        for limit in range(1, len(everything) + 1)
    )
    assert found.seconds <= timed(problem, 0, longest_first, None)[0] * SLACK
    assert best_s <= found.seconds * SLACK
    assert sorted(found.order.tolist()) == everything.tolist()


@settings(max_examples=EXAMPLES // 4)
@given(st.data())
def test_one_engine_is_certified(data: st.DataObject) -> None:
    """The rows of one engine are a bound on every order and limit, by the general argument."""
    trace = data.draw(traces(most_groups=4, most_samples=2, longest=9, prompts=6))
    assume(trace.n_requests <= 4)
    problem = Problem(trace, data.draw(fleets(trace, step_times(), most_engines=1)))
    certificate = kinds(problem, time_limit_s=0.05)
    check(certificate, problem)
    best_s = min(
        timed(problem, 0, np.array(order), limit)[0]
        for order in permutations(range(trace.n_requests))
        for limit in range(1, trace.n_requests + 1)
    )
    assert certificate.lower_s <= best_s * SLACK
    assert best_s <= certificate.upper_s * SLACK


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(st.data())
def test_no_limits_that_follow_finishes_beat_the_bounds(data: st.DataObject) -> None:
    """Every argument is about any admission, so it holds however the limits change."""
    trace = data.draw(traces(most_groups=4, most_samples=2, longest=9, prompts=6))
    problem = Problem(trace, data.draw(fleets(trace, step_times(), most_engines=2)))
    certificates = [staircase(problem), kinds(problem, time_limit_s=0.05), solve(problem, time_limit_s=0.05)]
    for certificate in certificates:
        check(certificate, problem)
    for _ in range(20):
        plan = data.draw(plans(trace, problem.fleet, shared=False))
        seconds = simulate(trace, problem.fleet, replace(plan, atomic=False)).makespan_s
        for certificate in certificates:
            assert certificate.lower_s <= seconds * SLACK


def test_a_plan_with_limits_that_follow_finishes_is_checked_as_it_is() -> None:
    problem = slow_prefill(100.0)
    certificate = solve(problem)
    assert any(engine.limits for engine in certificate.plan.engines)
    check(certificate, problem)
    engines = tuple(replace(engine, limits=()) for engine in certificate.plan.engines)
    other = replace(certificate, plan=replace(certificate.plan, engines=engines))
    with pytest.raises(InputError, match="the plan takes"):
        check(other, problem)


def test_a_convex_step_time_is_faster_in_turns() -> None:
    """Beyond the kink each request costs a second a step: better eight together than all sixteen."""
    tau = MaxAffine(((1.0, 0.0, 0.0), (-31.0, 4.0, 0.0)))
    problem = Problem(Trace.of([[50] * 16]), fleet_of(tau, 1))
    found = admit(problem, 0, np.arange(16))
    assert found.max_running == 8
    assert found.seconds < 0.2 * timed(problem, 0, np.arange(16), None)[0]
    assert solve(problem).upper_s == pytest.approx(found.seconds)


def slow_prefill(prefill_tokens_per_s: float) -> Problem:
    shape = replace(CROWDED.fleet.profile.shape(1), prefill_tokens_per_s=prefill_tokens_per_s)
    profile = replace(CROWDED.fleet.profile, shapes={1: shape})
    return replace(CROWDED, fleet=replace(CROWDED.fleet, profile=profile))


def test_a_limit_avoids_recompute() -> None:
    problem = slow_prefill(100.0)
    requests = np.arange(60)
    found = admit(problem, 0, requests)
    seconds, _, preempted = timed(problem, 0, np.argsort(-problem.trace.output_tokens[requests]), None)
    assert preempted > 0
    assert found.max_running is not None
    assert found.seconds < 0.9 * seconds


def test_the_plan_of_queues_takes_as_long_as_they_say() -> None:
    halves = np.arange(0, 120, 2), np.arange(1, 120, 2)
    queues = [admit(CROWDED, e, half) for e, half in enumerate(halves)]
    run = simulate(CROWDED.trace, CROWDED.fleet, with_queues(CROWDED, queues))
    assert run.makespan_s == pytest.approx(max(queue.seconds for queue in queues), rel=1e-12)


def test_crowded_search_and_admission_only_improve() -> None:
    first = staircase(CROWDED)
    run = simulate(CROWDED.trace, CROWDED.fleet, first.plan)
    assert waits(CROWDED, run)
    found = crowded_search(CROWDED, units_of(CROWDED), run, lower_s=0.0, deadline_s=np.inf, seed=3)
    again = crowded_search(CROWDED, units_of(CROWDED), run, lower_s=0.0, deadline_s=np.inf, seed=3)
    assert found.plan.engine_of.tolist() == again.plan.engine_of.tolist()
    better = admitted(CROWDED, found, lower_s=0.0)
    assert better.makespan_s <= found.makespan_s <= run.makespan_s
    certificate = solve(CROWDED)
    assert certificate.gap < first.gap
    check(certificate, CROWDED)
