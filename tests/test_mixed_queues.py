"""Queues where caches are full: the model against closed forms and the simulator; the search improves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import fleet_of, fleets, step_times, traces

from tailopt.arrays import Ints
from tailopt.engine.step_time import Affine
from tailopt.oracle.bound_and_fill import staircase
from tailopt.oracle.mixed_queues import queue_search
from tailopt.oracle.mixed_queues_kernel import backward, queue_seconds
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import units_of
from tailopt.simulate import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples
A, B, C = 3e-3, 2e-4, 5e-7

CROWDED = Problem(
    Trace.of([[100 + 31 * k % 2900] for k in range(160)], prompt_tokens=50),
    fleet_of(Affine(5e-3, 0.0, 1e-7), 2, kv_capacity_tokens=30_000),
)

queues = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=12)


def seconds(held: Ints, output: Ints, cache: int, limit: int, token_s: float = 0.0) -> float:
    n = np.arange(limit + 1)
    base_s, slope_s = np.where(n > 0, A + B * n, 0.0)[None, :], np.array([C])
    return queue_seconds(np.arange(len(held)), limit, held, output, cache, base_s, slope_s, token_s, np.inf)


@settings(max_examples=EXAMPLES)
@given(queues)
def test_what_fits_at_once_takes_what_the_closed_form_says(requests: list[tuple[int, int]]) -> None:
    held, output = np.array(requests).T.copy()
    n = len(held)
    # before its k-th token a request holds p + k - 1; the model takes the middle of p .. p + L
    context = (held * output + output * output / 2).sum()
    expected = A * output.max() + B * output.sum() + C * context + 0.25 * held.sum()
    assert seconds(held, output, 10_000, n, 0.25) == pytest.approx(expected)


@settings(max_examples=EXAMPLES)
@given(queues, st.integers(1, 4))
def test_limits_deal_requests_to_slots(requests: list[tuple[int, int]], limit: int) -> None:
    held, output = np.array(requests).T.copy()
    free = np.zeros(limit, dtype=np.int64)
    for length in output:  # each to the slot that is free first
        free[np.argmin(free)] += length
    steps = int(free.max())
    context = (held * output + output * output / 2).sum()
    expected = A * steps + B * output.sum() + C * context
    assert seconds(held, output, 10_000, limit) == pytest.approx(expected)


@settings(max_examples=EXAMPLES)
@given(queues, st.integers(50, 150), st.integers(1, 12))
def test_full_caches_only_cost_time(requests: list[tuple[int, int]], cache: int, limit: int) -> None:
    held, output = np.array(requests).T.copy()
    found = seconds(held, output, cache, limit, 1e-3)
    area = (held * output + output * (output - 1) / 2).sum()
    least = A * max(output.max(), area / cache) + B * output.sum() + C * area + 1e-3 * held.sum()
    assert least * (1 - 1e-12) <= found < np.inf


@settings(max_examples=EXAMPLES)
@given(queues, st.integers(49, 150), st.integers(1, 12))
def test_schedules_from_the_end_never_overflow(
    requests: list[tuple[int, int]], cache: int, limit: int
) -> None:
    held, output = np.array(requests).T.copy()
    order, begins = backward(np.arange(len(held)), held, output, cache, limit)
    assert sorted(order.tolist()) == list(range(len(held)))
    assert (np.diff(begins) <= 0).all()
    assert (begins >= output[order]).all()
    for now in range(int(begins[0])):  # steps before the end, at the end of a step
        runs = (begins > now) & (begins - output[order] <= now)
        assert (held[order] + begins - now)[runs].sum() <= cache
        assert runs.sum() <= limit


def test_the_model_is_close_to_the_simulator() -> None:
    tau = CROWDED.fleet.profile.shape(1)
    problem = Problem(CROWDED.trace, fleet_of(Affine(5e-3, 0.0, 1e-7), 1, kv_capacity_tokens=60_000))
    run = simulate(problem.trace, problem.fleet, staircase(problem).plan)
    assert run.preemptions.sum() > 0
    lines = tau.step_time.lines(160)
    said = queue_seconds(
        run.plan.order, 160, problem.trace.context_tokens + 8, problem.trace.output_tokens, 60_000,
        lines.base_s, lines.slope_s, 1 / tau.prefill_tokens_per_s, np.inf,
    )  # fmt: skip
    assert said == pytest.approx(run.makespan_s, rel=0.1)


def test_the_search_is_better_than_longest_first_and_repeats_itself() -> None:
    run = simulate(CROWDED.trace, CROWDED.fleet, staircase(CROWDED).plan)
    found = queue_search(CROWDED, run, lower_s=0.0, deadline_s=np.inf, seed=3)
    again = queue_search(CROWDED, run, lower_s=0.0, deadline_s=np.inf, seed=3)
    assert found.makespan_s < 0.98 * run.makespan_s
    assert found.makespan_s == again.makespan_s
    assert found.plan.order.tolist() == again.plan.order.tolist()
    assert simulate(CROWDED.trace, CROWDED.fleet, found.plan).makespan_s == found.makespan_s


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(st.data())
def test_any_fleet_gets_a_plan_no_worse_and_whole_groups(data: st.DataObject) -> None:
    trace = data.draw(traces(most_groups=4, most_samples=3, longest=9, prompts=6))
    problem = Problem(trace, data.draw(fleets(trace, step_times(), most_engines=3)), data.draw(st.booleans()))
    run = simulate(trace, problem.fleet, staircase(problem).plan)
    found = queue_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=0)
    assert found.makespan_s <= run.makespan_s
    assert sorted(found.plan.order.tolist()) == list(range(trace.n_requests))
    if problem.atomic:
        for members in units_of(problem).members:
            assert len(set(found.plan.engine_of[members].tolist())) == 1
