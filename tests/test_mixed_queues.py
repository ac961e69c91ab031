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
from tailopt.oracle.check import check
from tailopt.oracle.mixed_queues import Queues, queue_search
from tailopt.oracle.mixed_queues_kernel import backward
from tailopt.oracle.mixed_queues_told import anneal_told, told, told_seconds
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
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
    """Of a schedule made from its end, longest first as they come: carried out to the step, or told."""
    n = len(held)
    begins, order, after = np.empty((3, n), np.int64)
    engine = held, output, int(share * cache), *terms(limit), token_s
    seconds = backward(np.arange(n), limit, *engine, np.inf, begins)
    if exact:
        return seconds
    engine = held, output, cache, *terms(limit), token_s
    found = told(np.arange(n), begins, limit, *engine, order, after)
    done = np.empty(n, np.int64)
    assert told_seconds(order, after, limit, *engine, np.inf, done) == found
    assert sorted(order.tolist()) == list(range(n))
    assert (np.diff(after) >= 0).all()
    return found


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


def simulated_s(held: Ints, output: Ints, order: Ints, after: Ints) -> float:
    """Of an engine whose cache is large, with the limits that say when to let each in."""
    finished = np.arange(len(order))
    limits = np.maximum(1, np.searchsorted(after, finished, side="right") - finished).tolist()
    engine = Engine(1, limits[0], limits=tuple((f, limits[f]) for f in range(1, len(order))))
    trace = Trace.of([[length] for length in output[order].tolist()], prompt_tokens=held[order].tolist())
    return simulate(
        trace, fleet_of(Affine(A, B, 0.0), 1), Plan.of_queues([engine], [range(len(order))])
    ).makespan_s


def without_context(n: int) -> tuple[Floats, Floats, float]:
    """Step times up to n requests, and nothing for prompts."""
    return np.where(np.arange(n + 1) > 0, A + B * np.arange(n + 1), 0.0)[None, :], np.zeros(1), 0.0


@settings(max_examples=EXAMPLES)
@given(queues, st.integers(50, 150), st.integers(1, 12))
def test_limits_make_an_engine_do_what_the_model_does(
    requests: list[tuple[int, int]], cache: int, limit: int
) -> None:
    """Where all fits, without context in the step time: to rounding. The schedule is for a smaller cache."""
    held, output = np.array(requests).T.copy()
    n = len(held)
    begins, order, after = np.zeros((3, n), np.int64)
    backward(np.arange(n), min(limit, n), held, output, cache, *without_context(n), np.inf, begins)
    said_s = told(
        np.arange(n), begins, min(limit, n), held, output, 10_000, *without_context(n), order, after
    )
    assert simulated_s(held, output, order, after) == pytest.approx(said_s)


@settings(max_examples=EXAMPLES)
@given(queues, st.integers(0, 2**32 - 1), st.booleans())
def test_any_numbers_of_finishes_make_an_engine_do_what_the_model_does(
    requests: list[tuple[int, int]], seed: int, annealed: bool
) -> None:
    """Also those that annealing comes to, on two engines of which one is looked at."""
    held, output = np.array(requests).T.copy()
    n, random = len(held), np.random.default_rng(seed)
    base_s, slope_s, token_s = without_context(n)
    orders, afters, counts = np.zeros((2, n), np.int64), np.zeros((2, n), np.int64), np.array([n, 0])
    orders[0], afters[0] = random.permutation(n), np.sort(random.integers(0, n, n))
    if annealed:
        anneal_told(
            np.arange(2), orders, afters, counts, np.ones(2), np.zeros(2, np.int64),
            np.ones((1, n), np.bool_), held[None, :], output, np.array([10_000]), np.array([n]),
            base_s[None], slope_s[None], np.array([token_s]), random.random((200, 7)), 20.0, 1.0, True,
        )  # fmt: skip
    assert sorted(np.concatenate([orders[0, : counts[0]], orders[1, : counts[1]]])) == list(range(n))
    for order, after, count in zip(orders, afters, counts.tolist(), strict=True):
        mine, mine_after, done = order[:count], after[:count], np.zeros(count, np.int64)
        assert (np.diff(mine_after) >= 0).all()
        said_s = told_seconds(
            mine, mine_after, n, held, output, 10_000, base_s, slope_s, token_s, np.inf, done
        )
        if count:
            assert (done >= output[mine]).all()
            assert simulated_s(held, output, mine, mine_after) == pytest.approx(said_s)


def test_the_model_is_close_to_the_simulator() -> None:
    tau, problem = CROWDED.fleet.profile.shape(1), crowded(1, 60_000)
    run = simulate(problem.trace, problem.fleet, staircase(problem).plan)
    assert run.preemptions.sum() > 0
    lines = tau.step_time.lines(160)
    at_once, done = np.zeros(160, np.int64), np.zeros(160, np.int64)
    said = told_seconds(
        run.plan.order, at_once, 160, problem.trace.context_tokens, problem.trace.output_tokens, 60_000,
        lines.base_s, lines.slope_s, 1 / tau.prefill_tokens_per_s, np.inf, done,
    )  # fmt: skip
    assert run.makespan_s == pytest.approx(said, rel=0.01)
    queues = Queues(problem)
    queues.take(run.plan)
    queues.tell()
    better = simulate(problem.trace, problem.fleet, queues.plan())
    assert better.makespan_s < 0.9 * run.makespan_s
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
    problem = Problem(trace, data.draw(fleets(trace, step_times(), most_engines=6)), data.draw(st.booleans()))
    run = simulate(trace, problem.fleet, staircase(problem).plan)
    found = queue_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=0)
    assert found.makespan_s <= run.makespan_s
    assert sorted(found.plan.order.tolist()) == list(range(trace.n_requests))
    if problem.atomic:
        for members in units_of(problem).members:
            assert len(set(found.plan.engine_of[members].tolist())) == 1


@pytest.mark.parametrize(("groups", "atomic"), [([60], True), ([160, 100], True), ([1, 1], False)])
def test_engines_may_be_empty(groups: list[int], atomic: bool) -> None:
    trace = Trace.of([[100 + 31 * k % 2900 for k in range(samples)] for samples in groups])
    problem = Problem(trace, crowded(8, 30_000).fleet, atomic)
    run = simulate(trace, problem.fleet, staircase(problem).plan)
    found = queue_search(problem, run, lower_s=0.0, deadline_s=np.inf, seed=0)
    assert found.makespan_s <= run.makespan_s


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("tp", [(2, 1, 1, 1), (1, 1, 1, 2)])
def test_long_requests_are_left_to_engines_that_hold_them(tp: tuple[int, ...], atomic: bool) -> None:
    small, large = (
        ShapeProfile(tp, Affine(5e-3, 1e-5, 1e-7), 1e4, cache, 1000, token_budget=10**4)
        for tp, cache in ((1, 1_400), (2, 30_000))
    )
    trace = Trace.of(
        [[1500 + 31 * k] for k in range(40)] + [[100 + 7 * k] for k in range(40)], prompt_tokens=50
    )
    problem = Problem(trace, Fleet(profile(small, large), tuple(map(Engine, tp)), sum(tp)), atomic)
    quick, found = staircase(problem), solve(problem)
    assert quick.lower_s <= found.lower_s <= found.upper_s <= quick.upper_s
    check(found, problem)
    assert (np.array(tp)[found.plan.engine_of[:40]] == 2).all()
