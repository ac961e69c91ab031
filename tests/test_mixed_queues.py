"""Queues where caches are full: the model against closed forms and the simulator; the search improves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import fleet_of, fleets, profile, step_times, traces

from tailopt.arrays import Floats, Ints
from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.oracle.bound_and_fill import staircase
from tailopt.oracle.mixed_queues import Queues, queue_search
from tailopt.oracle.mixed_queues_kernel import backward, carry_out, queue_seconds
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import units_of
from tailopt.plan import Engine, Fleet, Plan
from tailopt.simulate import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples
A, B, C = 3e-3, 2e-4, 5e-7


def crowded(engines: int, cache: int) -> Problem:
    """Lengths up to 3000, many of which have to wait; a token is computed again in 0.1 ms."""
    shape = ShapeProfile(
        1, Affine(5e-3, 0.0, 1e-7), 1e4, cache, 1000, token_budget=10**4, block_tokens=1, prefix_caching=False
    )
    trace = Trace.of([[100 + 31 * k % 2900] for k in range(160)], prompt_tokens=50)
    return Problem(trace, Fleet(profile(shape), (Engine(1),) * engines, engines))


CROWDED = crowded(2, 30_000)

queues = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=12)


def seconds(
    held: Ints,
    output: Ints,
    cache: int,
    limit: int,
    token_s: float = 0.0,
    *,
    share: float = 1.0,
    exact: bool = False,
) -> float:
    return queue_seconds(
        np.arange(len(held)), limit, share, held, output, cache, *terms(limit), token_s, np.inf, exact
    )


def terms(limit: int) -> tuple[Floats, Floats]:
    n = np.arange(limit + 1)
    return np.where(n > 0, A + B * n, 0.0)[None, :], np.array([C])


@settings(max_examples=EXAMPLES)
@given(queues, st.booleans())
def test_what_fits_at_once_takes_what_the_closed_form_says(
    requests: list[tuple[int, int]], exact: bool
) -> None:
    held, output = np.array(requests).T.copy()
    n = len(held)
    # from its end: the shorter begin later, and all end together
    context = (held * output + output * output / 2).sum()
    expected = A * output.max() + B * output.sum() + C * context + 0.25 * held.sum()
    found = seconds(held, output, 10_000, n, 0.25, exact=exact)
    if exact:
        assert found == pytest.approx(expected)
    else:  # each is let in at a finish at the latest, and before it is due
        assert found <= expected * (1 + 1e-12) + A * output.sum()


@settings(max_examples=EXAMPLES)
@given(queues, st.integers(50, 150), st.integers(1, 12), st.sampled_from([1.0, 0.8]))
def test_full_caches_only_cost_time(
    requests: list[tuple[int, int]], cache: int, limit: int, share: float
) -> None:
    held, output = np.array(requests).T.copy()
    area = (held * output + output * (output - 1) / 2).sum()
    least = A * max(output.max(), area / cache) + B * output.sum() + C * area + 1e-3 * held.sum()
    for exact in (False, True):
        found = seconds(held, output, cache, limit, 1e-3, share=share, exact=exact)
        assert least * (1 - 1e-12) <= found < np.inf


@settings(max_examples=EXAMPLES)
@given(queues, st.integers(49, 150), st.integers(1, 12))
def test_schedules_from_the_end_never_overflow(
    requests: list[tuple[int, int]], cache: int, limit: int
) -> None:
    held, output = np.array(requests).T.copy()
    begins = np.zeros(len(held), np.int64)
    backward(np.arange(len(held)), limit, held, output, cache, *terms(limit), 0.0, np.inf, begins)
    assert (begins >= output).all()
    for now in range(int(begins.max())):  # steps before the end, at the end of a step
        runs = (begins > now) & (begins - output <= now)
        assert (held + begins - now)[runs].sum() <= cache
        assert runs.sum() <= limit


@settings(max_examples=EXAMPLES)
@given(queues, st.integers(50, 150), st.integers(1, 12))
def test_limits_make_an_engine_do_what_the_model_does(
    requests: list[tuple[int, int]], cache: int, limit: int
) -> None:
    """Where all fits, without context in the step time: to rounding. The schedule is for a smaller cache."""
    held, output = np.array(requests).T.copy()
    n = len(held)
    begins, together = np.zeros(n, np.int64), np.zeros(n + 1, np.int64)
    base_s, queue = np.where(np.arange(n + 1) > 0, A + B * np.arange(n + 1), 0.0)[None, :], np.arange(n)
    times = base_s, np.zeros(1), 0.0, np.inf
    backward(queue, min(limit, n), held, output, cache, *times, begins)
    said_s = carry_out(queue, begins, min(limit, n), held, output, 10_000, *times, together)
    assert together[0] >= 1
    assert (together <= limit).all()
    changes = tuple((f, int(together[f])) for f in range(1, n) if together[f])
    order = np.argsort(-begins, kind="stable")
    engine = Engine(1, int(together[0]), limits=changes)
    trace = Trace.of([[length] for length in output[order].tolist()], prompt_tokens=held[order].tolist())
    run = simulate(trace, fleet_of(Affine(A, B, 0.0), 1), Plan.of_queues([engine], [range(n)]))
    assert run.makespan_s == pytest.approx(said_s)


def test_the_model_is_close_to_the_simulator() -> None:
    tau, problem = CROWDED.fleet.profile.shape(1), crowded(1, 60_000)
    run = simulate(problem.trace, problem.fleet, staircase(problem).plan)
    assert run.preemptions.sum() > 0
    lines = tau.step_time.lines(160)
    said = queue_seconds(
        run.plan.order, 160, 1.0, problem.trace.context_tokens, problem.trace.output_tokens, 60_000,
        lines.base_s, lines.slope_s, 1 / tau.prefill_tokens_per_s, np.inf, False,
    )  # fmt: skip
    queues = Queues(problem)
    queues.take(run.plan)
    found = simulate(problem.trace, problem.fleet, queues.plan())
    assert found.makespan_s == pytest.approx(said, rel=0.01)
    queues.share()
    better = simulate(problem.trace, problem.fleet, queues.plan())
    assert better.makespan_s < found.makespan_s < 0.9 * run.makespan_s
    assert better.preemptions.sum() < 0.1 * run.preemptions.sum()


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
