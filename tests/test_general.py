"""General step times: priced staircase and local search, against brute force and slow definitions."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import concave_step_times, fleet_of, fleets, profile, step_times, traces

from tailopt.engine.decode_time import decode_time_s
from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime, Table
from tailopt.errors import InputError
from tailopt.oracle.bound_and_fill import plan_of, staircase
from tailopt.oracle.brute import brute_force
from tailopt.oracle.check import check
from tailopt.oracle.check_general import check_priced
from tailopt.oracle.lagrangian import Ascent, Asked, PricedBound, labels, priced_bound
from tailopt.oracle.lagrangian_kernel import collect, layout, most_collected, tabulate, worth
from tailopt.oracle.lagrangian_minorant import (
    ConcaveMinorant,
    SwitchedMinorant,
    bent_minorants,
    concave_minorants,
    ray_minorants,
    switched_minorants,
)
from tailopt.oracle.lagrangian_search import MOST_TRIALS, NEAR, PROBES, PricedSearch, Trials
from tailopt.oracle.lagrangian_search_kernel import FOUND, GIVEN_UP, REFUTED
from tailopt.oracle.local_search import local_search
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.oracle.units import units_of
from tailopt.plan import Engine, Fleet, Plan
from tailopt.simulate import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples
SLACK = 1 + 1e-9


def priced(problem: Problem, iterations: int = 4) -> PricedBound | None:
    """The priced staircase alone: whatever it finds, however weak."""
    units = units_of(problem)
    certificate = staircase(problem)
    engine_of = certificate.plan.engine_of[[members[0] for members in units.members]]
    return priced_bound(
        problem, units, engine_of, lower_s=0.0, upper_s=certificate.upper_s, iterations=iterations
    )


def below_the_optimum(problem: Problem, *, orders: bool) -> None:
    bound = priced(problem)
    if bound is not None:
        below(bound, problem, brute_force(problem, orders=orders)[0])


def below(bound: PricedBound, problem: Problem, optimum_s: float) -> None:
    assert bound.lower_s <= optimum_s * SLACK
    lower_s, argument = check_priced(bound, problem)
    assert float(lower_s) == bound.lower_s
    assert argument == "prices"


@settings(max_examples=2 * EXAMPLES)
@given(
    traces(most_groups=5, most_samples=2, longest=9, prompts=6),
    concave_step_times(), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_concave_engines(trace: Trace, tau: StepTime, engines: int, atomic: bool) -> None:
    assume(trace.n_requests <= 6)
    below_the_optimum(Problem(trace, fleet_of(tau, engines), atomic), orders=False)


@settings(max_examples=EXAMPLES // 2)
@given(st.data())
def test_any_engines_with_limits_and_orders(data: st.DataObject) -> None:
    """Stepped, interpolated and kinked, mixed shapes, few slots, small caches: every order is tried."""
    trace = data.draw(traces(most_groups=3, most_samples=2, longest=8, prompts=6))
    assume(trace.n_requests <= 4)
    fleet = data.draw(fleets(trace, step_times(), most_engines=2))
    below_the_optimum(Problem(trace, fleet, data.draw(st.booleans())), orders=True)


@settings(max_examples=EXAMPLES)
@given(traces(), concave_step_times(), st.integers(1, 4), st.booleans(), st.data())
def test_no_plan_beats_the_prices(
    trace: Trace, tau: StepTime, engines: int, atomic: bool, data: st.DataObject
) -> None:
    """Larger batches than brute force can take."""
    problem = Problem(trace, fleet_of(tau, engines), atomic)
    unit = trace.group if atomic else np.arange(trace.n_requests)
    size = int(unit.max()) + 1
    engine_of = np.array(
        data.draw(st.lists(st.integers(0, engines - 1), min_size=size, max_size=size)), dtype=np.int64
    )
    plan = Plan(problem.fleet.engines, engine_of[unit], np.argsort(-trace.output_tokens), atomic=atomic)
    bound = priced(problem, iterations=8)
    if bound is not None:
        assert bound.lower_s <= simulate(trace, problem.fleet, plan).makespan_s * SLACK
        check_priced(bound, problem)


@given(st.data())
def test_concave_minorants_lie_below(data: st.DataObject) -> None:
    times = data.draw(st.lists(step_times(), min_size=1, max_size=2))
    n_max = data.draw(st.integers(1, 40))
    steps = np.array(data.draw(st.lists(st.integers(0, 50), min_size=n_max + 1, max_size=n_max + 1)), float)
    lines = [tau.lines(n_max) for tau in times]
    n, context = np.meshgrid(np.arange(1, n_max + 1), [0, 1, 7, 50, 400, 10_000])
    for minorant in concave_minorants(lines, n_max, steps) + ray_minorants(lines, n_max):
        rises = np.array(minorant.rises_s)
        assert (np.diff(rises) <= 0).all()
        assert rises[-1] >= 0
        g = np.cumsum(rises[np.minimum(np.arange(n_max), len(rises) - 1)])
        assert all((g[n - 1] + minorant.c_s * context <= tau(n, context)).all() for tau in times)


@given(concave_step_times(), st.integers(2, 60))
def test_the_minorant_of_a_concave_step_time_is_itself(tau: StepTime, n_max: int) -> None:
    (minorant,) = concave_minorants([tau.lines(n_max)], n_max, np.ones(n_max + 1))
    rises = np.array(minorant.rises_s)
    g = np.cumsum(rises[np.minimum(np.arange(n_max), len(rises) - 1)])
    assert g == pytest.approx(tau(np.arange(1, n_max + 1), 0), rel=1e-9)


def test_the_minorant_of_a_padded_table_touches_its_corners() -> None:
    padded = Table([1, 8, 16, 24], [1.0, 3.0, 4.0, 4.5], padded=True)
    (minorant,) = concave_minorants([padded.lines(24)], 24, np.ones(25))
    g = np.cumsum([*minorant.rises_s, *(minorant.rises_s[-1],) * 24])[:24]
    assert g[[7, 15, 23]] == pytest.approx([3.0, 4.0, 4.5], rel=0.02)
    assert (g <= padded(np.arange(1, 25), 0)).all()


@settings(max_examples=EXAMPLES)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=7),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.sampled_from([1, 3, 40]),
    st.integers(1, 60),
)  # fmt: skip
def test_an_engine_collects_at_most_its_worth(
    items: list[tuple[int, int]], falls: list[int], classes: int, makespan: int
) -> None:
    """Every set within the makespan, by its leader: the table's worth is at least its prices.

    With fine labels and a multiplier that excludes what takes longer it is the best set's prices.
    """
    items.sort(reverse=True)
    length, price = np.array(items, dtype=float).T
    n = len(items)
    rises = np.cumsum(falls[::-1])[::-1].astype(float) + 1.0
    cost = length[:, None] * rises[None, :]
    label = np.minimum(labels(cost, 1.0), 10**6) if classes == 40 else labels(cost, 7.0)
    last = 2_500 if classes == 40 else classes
    multiplier = np.array([[0.0], [0.3], [1.0], [4.0], [1e6]])
    table = np.empty((n, 5, last + 1))
    most_before = np.arange(n)
    start, count = layout(label, most_before, np.arange(n), last, False)
    marks = np.zeros(start.max() * len(multiplier), np.uint8)
    tabulate(cost[None], label, most_before, price, multiplier, np.arange(n), start, count, marks, table)
    value, chosen_label, chosen = np.empty(n), np.empty(n, np.int64), np.empty(n, np.int64)
    worth(table, multiplier.sum(axis=1), float(makespan), value, chosen_label, chosen)
    for leader in range(n):
        best = -np.inf
        for size in range(n - leader):
            for others in combinations(range(leader + 1, n), size):
                chosen_set = [leader, *others]
                seconds = sum(cost[i, min(rank, len(rises) - 1)] for rank, i in enumerate(chosen_set))
                if seconds <= makespan:
                    best = max(best, price[chosen_set].sum())
        assert value[leader] >= best - 1e-9
        if classes == 40:  # whole costs: a label is the time itself
            exact = best if np.isfinite(best) else -1.0
            assert value[leader] <= max(exact, 0.0) + 1e-6 or not np.isfinite(best)
        if 0 <= chosen_label[leader] < last:  # the set that is said to be worth it is; beyond, it is near
            times, k = np.zeros(n), int(chosen[leader])
            collect(label, most_before, start, count, marks, len(multiplier), last,
                    leader, int(chosen_label[leader]), k, times)  # fmt: skip
            members = np.flatnonzero(times)
            ranks = np.minimum(np.arange(len(members)), len(rises) - 1)
            seconds = cost[members, ranks].sum()
            there = table[leader, k, chosen_label[leader]]
            assert members[0] == leader
            assert np.isclose(price[members].sum() - multiplier[k, 0] * seconds, there, rtol=1e-9, atol=1e-6)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=6), st.integers(1, 4)
)  # fmt: skip
def test_most_collected_over_all_leaders(units: list[tuple[int, int]], engines: int) -> None:
    value, price = np.array(units, dtype=float).T
    prefix = np.concatenate([[0.0], np.cumsum(price)])
    best = -np.inf
    for chosen in product([False, True], repeat=len(units) - 1):
        leaders = [0, *(u + 1 for u, leads in enumerate(chosen) if leads)]
        paid = np.cumsum(value[leaders])
        if len(leaders) <= engines and all(
            paid[j] >= prefix[leaders[j + 1]] for j in range(len(leaders) - 1)
        ):
            best = max(best, paid[-1])
    found = np.empty(engines, np.int64)
    assert most_collected(value, prefix, 1e-9, found) == best
    used = found[found >= 0]
    assert value[used].sum() == best
    assert (np.diff(used) > 0).all()


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_local_search_never_loses(data: st.DataObject) -> None:
    trace = data.draw(traces())
    problem = Problem(
        trace, fleet_of(data.draw(step_times()), data.draw(st.integers(1, 3))), data.draw(st.booleans())
    )
    units = units_of(problem)
    size = len(units.members)
    start = np.array(
        data.draw(st.lists(st.integers(0, len(problem.fleet.engines) - 1), min_size=size, max_size=size))
    )
    first = local_search(problem, units, start, lower_s=0.0, time_limit_s=60, seed=1, slices=3)
    again = local_search(problem, units, start, lower_s=0.0, time_limit_s=60, seed=1, slices=3)
    assert (first == again).all()
    before, after = (
        simulate(trace, problem.fleet, plan_of(problem, units, engine_of)).makespan_s
        for engine_of in (start, first)
    )
    assert after <= before * SLACK


@given(traces(most_groups=5, most_samples=1, longest=9), concave_step_times(), st.integers(2, 3))
def test_local_search_finds_tiny_optima(trace: Trace, tau: StepTime, engines: int) -> None:
    problem = Problem(trace, fleet_of(tau, engines))
    units = units_of(problem)
    start = np.zeros(len(units.members), dtype=np.int64)
    found = local_search(problem, units, start, lower_s=0.0, time_limit_s=60, slices=20)
    makespan_s = simulate(trace, problem.fleet, plan_of(problem, units, found)).makespan_s
    assert makespan_s <= brute_force(problem, orders=False)[0] * 1.02


kinks = st.builds(
    lambda a, b, c, less, more_b, more_c: MaxAffine(
        ((a, b, c), (max(0.0, a - less), b + more_b, c + more_c))
    ),
    *(st.floats(0.1, 2), st.floats(0, 0.5), st.floats(0, 0.05)),
    *(st.floats(0, 2), st.floats(0, 1), st.floats(0, 0.3)),
)


@settings(max_examples=EXAMPLES // 2)
@given(traces(most_groups=3, most_samples=2, longest=9, prompts=6), kinks, st.integers(1, 2), st.data())
def test_no_order_beats_a_minorant_that_switches(
    trace: Trace, tau: StepTime, engines: int, data: st.DataObject
) -> None:
    """Two pieces, any switch between them, one engine's own limit: every split and every order is tried."""
    assume(trace.n_requests <= 4)
    problem = Problem(trace, fleet_of(tau, engines))
    units, n = units_of(problem), trace.n_requests
    alike = concave_minorants([tau.lines(n)], n, np.ones(n + 1))
    switched = switched_minorants(alike, int(trace.output_tokens.max()))
    assume(switched)
    position = [members[0] for members in units.members]
    certificate = staircase(problem)
    asked = Asked(problem, units, certificate.plan.engine_of[position], certificate.upper_s)
    one = data.draw(st.sampled_from(switched))
    optimum_s, plan = brute_force(problem, orders=True)
    run = simulate(trace, problem.fleet, plan)
    seconds = asked._seconds_in_plan([one], plan.engine_of[position][asked.unit])[:, 0]
    assert (seconds <= run.engine_finish_s * SLACK + 1e-12).all()
    bound = priced(problem)
    if bound is not None:
        below(bound, problem, optimum_s)


def test_the_linear_program_says_more_than_steps_from_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prices and multipliers, as they are, against several steps from what requests cost in the plan."""
    from tailopt.oracle import lagrangian

    tau = MaxAffine(((12e-3, 1e-5, 1e-8), (8e-3, 3e-5, 9e-8)))
    lengths = np.random.default_rng(8).lognormal(9, 0.6, 150).astype(int)
    problem = Problem(Trace.of([[int(one)] for one in lengths]), fleet_of(tau, 4))
    units, quick = units_of(problem), staircase(problem)
    engine_of = quick.plan.engine_of[[members[0] for members in units.members]]
    first = Ascent(Asked(problem, units, engine_of, quick.upper_s))
    monkeypatch.setattr(lagrangian, "starts", lambda cost_s, makespan_s: [])
    from_plan = Ascent(Asked(problem, units, engine_of, quick.upper_s))
    first.climb(1)
    assert first.best is not None
    assert check_priced(first.best.argument(first.best_s), problem) == (Fraction(first.best_s), "prices")
    from_plan.climb(6)
    assert first.best_s > from_plan.best_s


def test_a_switch_is_verified_and_used() -> None:
    """Few requests with long contexts: an engine is on the flat piece at first and on the steep one later."""
    tau = MaxAffine(((12e-3, 1e-5, 1e-8), (8e-3, 3e-5, 9e-8)))
    kinked = Problem(Trace.of([[int(one)] for one in np.linspace(2e4, 4e4, 24)]), fleet_of(tau, 3))
    bound = priced(kinked, iterations=12)
    assert bound is not None
    assert any(isinstance(one, SwitchedMinorant) for one in bound.minorants)
    assert check_priced(bound, kinked) == (Fraction(bound.lower_s), "prices")
    place = next(q for q, one in enumerate(bound.minorants) if isinstance(one, SwitchedMinorant))
    switched = bound.minorants[place]
    for change, complaint in (
        (replace(switched, early=switched.late, late=switched.early), "less steep after its switch"),
        (replace(switched, steps=-1), "before the first step"),
        (replace(switched, late=replace(switched.late, c_s=2 * switched.late.c_s)), "not below"),
        (replace(switched, late=replace(switched.late, rises_s=(8e-3, 2e-5, 1e-5))), "no line"),
    ):
        minorants = [*bound.minorants]
        minorants[place] = change
        with pytest.raises(InputError, match=complaint):
            check_priced(replace(bound, minorants=tuple(minorants)), kinked)


def caching(tau: StepTime, engines: int, prefill_tokens_per_s: float) -> Fleet:
    """Engines that compute what samples of a prompt share once."""
    fleet = fleet_of(tau, engines)
    shape = replace(
        fleet.shape_of(0), prefill_tokens_per_s=prefill_tokens_per_s, prefix_caching=True, block_tokens=4
    )
    return Fleet(profile(shape), fleet.engines, engines)


@settings(max_examples=EXAMPLES)
@given(
    traces(most_groups=3, most_samples=4, longest=8, prompts=60), concave_step_times(), st.integers(1, 3),
    st.booleans(), st.data(),
)  # fmt: skip
def test_no_plan_beats_shares_of_prompts(
    trace: Trace, tau: StepTime, engines: int, atomic: bool, data: st.DataObject
) -> None:
    """Prefill is most of the work, and what samples of a prompt share most of that."""
    assume(trace.n_requests <= 6)
    problem = Problem(trace, caching(tau, engines, 16.0), atomic)
    below_the_optimum(problem, orders=False)
    units = units_of(problem)
    plans = st.lists(st.integers(0, engines - 1), min_size=len(units.members), max_size=len(units.members))
    asked = Asked(problem, units, np.array(data.draw(plans)), staircase(problem).upper_s)
    other = np.array(data.draw(plans))
    run = simulate(trace, problem.fleet, plan_of(problem, units, other))
    assert (asked._seconds_by_all(other[asked.unit]) <= run.engine_finish_s[:, None] * SLACK + 1e-12).all()


def test_shares_of_prompts_are_verified_and_used() -> None:
    groups = np.maximum(1, np.random.default_rng(3).normal(300, 120, (8, 6))).astype(int).tolist()
    trace = Trace.of(groups, prompt_tokens=[400] * 8)
    shared = Problem(trace, caching(Affine(10e-3, 1e-4), 3, 8_000.0))
    bound = priced(shared, iterations=20)
    assert bound is not None
    assert check_priced(bound, shared) == (Fraction(bound.lower_s), "prices")
    free = priced(Problem(trace, caching(Affine(10e-3, 1e-4), 3, 1e300)), iterations=20)
    assert free is not None
    assert free.lower_s < bound.lower_s
    with pytest.raises(InputError, match="may pay all prices"):
        check_priced(replace(bound, shares=()), shared)
    for change, complaint in (
        (lambda one: (1.0,) * len(one), "more than their prompt"),
        (lambda one: (-1e-9, *one[1:]), "no shares"),
        (lambda one: (float("nan"), *one[1:]), "no shares"),
        (lambda one: one[1:], "not one for each"),
    ):
        with pytest.raises(InputError, match=complaint):
            check_priced(replace(bound, shares=tuple(change(one) for one in bound.shares)), shared)
    with pytest.raises(InputError, match="paid for already"):
        check_priced(bound, replace(shared, atomic=True))


@given(concave_step_times(), st.integers(2, 40))
def test_bent_minorants_lie_below(tau: StepTime, n_max: int) -> None:
    (concave,) = concave_minorants([tau.lines(n_max)], n_max, np.ones(n_max + 1))
    for minorant in bent_minorants([concave], n_max):
        rises = np.array(minorant.rises_s)
        assert (np.diff(rises) <= 0).all()
        assert rises[-1] >= concave.rises_s[-1] * (1 - 1e-9)
        g = np.cumsum(rises[np.minimum(np.arange(n_max), len(rises) - 1)])
        assert (g <= tau(np.arange(1, n_max + 1), 0)).all()


def lognormal(n: int, seed: int) -> Trace:
    lengths = np.minimum(np.ceil(np.random.default_rng(seed).lognormal(7.6, 1.0, n)), 16_384).astype(int)
    return Trace.of([[int(length)] for length in lengths])


CONCAVE = Problem(lognormal(100, seed=4), fleet_of(Power(2e-3, 1e-3, 0.55), 4))


def test_prices_beat_every_chord() -> None:
    """100 requests on 4 engines, mixture-of-experts curve: the affine minorants leave 12 % open."""
    before, after = staircase(CONCAVE), solve(CONCAVE, method="lagrangian")
    assert isinstance(after.bound_argument, PricedBound)
    assert before.gap > 0.1
    assert after.gap < 0.01
    assert check(after, CONCAVE).argument.startswith("prices")


def test_the_same_seed_gives_the_same_certificate() -> None:
    first, second = (solve(CONCAVE, method="lagrangian", seed=3) for _ in range(2))
    assert first.lower_s == second.lower_s
    assert first.bound_argument == second.bound_argument
    assert (first.plan.engine_of == second.plan.engine_of).all()


def test_a_time_limit_keeps_the_best() -> None:
    certificate = solve(CONCAVE, method="lagrangian", time_limit_s=1e-3)
    assert certificate.lower_s >= staircase(CONCAVE).lower_s
    check(certificate, CONCAVE)


def test_an_interrupt_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailopt.oracle import lagrangian

    moved = lagrangian.Priced.moved
    calls = []

    def interrupted(self: lagrangian.Priced) -> np.ndarray:
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return moved(self)

    monkeypatch.setattr(lagrangian.Priced, "moved", interrupted)
    bound = priced(CONCAVE, iterations=50)
    assert bound is not None
    assert len(calls) == 3
    check_priced(bound, CONCAVE)


def with_rises(bound: PricedBound, rises_s: tuple[float, ...]) -> PricedBound:
    return replace(bound, minorants=(replace(bound.minorants[0], rises_s=rises_s),))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: replace(b, lower_s=b.lower_s * 1.01), "may pay all prices"),
        (lambda b: replace(b, prices=b.prices[1:]), "another number of requests"),
        (lambda b: replace(b, prices=(-1.0, *b.prices[1:])), "no prices"),
        (lambda b: replace(b, prices=b.prices[::-1]), "may pay all prices"),
        (lambda b: replace(b, multipliers=b.multipliers[:1]), "may pay all prices"),
        (lambda b: replace(b, multipliers=((-1.0,), *b.multipliers)), "multipliers are not one"),
        (lambda b: replace(b, minorants=()), "no function"),
        (lambda b: replace(b, label_s=0.0), "no grid"),
        (lambda b: replace(b, classes=0), "no grid"),
        (lambda b: replace(b, minorants=(replace(b.minorants[0], c_s=1e-9),)), "not below the step times"),
        (lambda b: with_rises(b, tuple(1.001 * r for r in b.minorants[0].rises_s)), "not below"),
        (lambda b: with_rises(b, b.minorants[0].rises_s[::-1]), "not concave"),
    ],
)  # fmt: skip
def test_checker_refuses_a_changed_argument(change, complaint: str) -> None:
    bound = priced(CONCAVE)
    assert bound is not None
    with pytest.raises(InputError, match=complaint):
        check_priced(change(bound), CONCAVE)


@pytest.mark.parametrize(
    "tau",
    [
        Table([1, 8, 16, 32, 64, 100], np.array([3.0, 6, 8, 11, 15, 18]) * 1e-3, padded=True),
        Table([1, 8, 16, 32, 64, 100], np.array([3.0, 6, 8, 11, 15, 18]) * 1e-3),
        Power(2e-3, 1e-3, 0.5, 1e-8),
    ],
    ids=["padded", "interpolated", "concave with context"],
)
@pytest.mark.parametrize("atomic", [False, True], ids=["free", "groups"])
def test_every_kind_of_step_time_is_certified(tau: StepTime, atomic: bool) -> None:
    lengths = lognormal(96, seed=2).output_tokens.reshape(24, 4).tolist()
    problem = Problem(Trace.of(lengths, prompt_tokens=50), fleet_of(tau, 4), atomic)
    before, after = staircase(problem), solve(problem, method="lagrangian")
    assert after.lower_s >= before.lower_s
    assert after.upper_s <= before.upper_s
    assert after.gap < (0.2 if atomic or getattr(tau, "padded", False) else 0.06)
    check(after, problem)


def test_pieces_that_differ_in_context_are_mixed() -> None:
    """A kink: short batches run on the flat piece and long ones on the steep one, on engines of one fleet."""
    kinked = Problem(CONCAVE.trace, fleet_of(MaxAffine(((3e-3, 0.0, 1e-8), (1e-3, 2e-4, 2e-8))), 4))
    bound = priced(kinked, iterations=8)
    assert bound is not None
    assert len(bound.minorants) == 2
    assert check_priced(bound, kinked) == (Fraction(bound.lower_s), "prices")
    steep = solve(Problem(CONCAVE.trace, fleet_of(Affine(1e-3, 2e-4, 2e-8), 4)))
    assert steep.upper_s < bound.lower_s < staircase(kinked).upper_s
    check(solve(kinked, method="lagrangian"), kinked)


def searched(problem: Problem, iterations: int = 6, spare_s: float = 0.0) -> tuple[PricedSearch, float]:
    """The search at prices after a few steps, and the makespan of the plan that they started from."""
    units, certificate = units_of(problem), staircase(problem)
    engine_of = certificate.plan.engine_of[[members[0] for members in units.members]]
    ascent = Ascent(Asked(problem, units, engine_of, certificate.upper_s, spare_s=spare_s))
    ascent.climb(iterations)
    assert ascent.best is not None
    return PricedSearch(ascent.best), certificate.upper_s


@settings(max_examples=EXAMPLES)
@given(
    traces(most_groups=5, most_samples=2, longest=9, prompts=6),
    concave_step_times(), st.integers(1, 3), st.booleans(), st.floats(0.5, 1.0),
    st.sampled_from([0.0, 1e-3, 1.0, 1e9]),
)  # fmt: skip
def test_search_refutes_what_no_plan_attains(
    trace: Trace, tau: StepTime, engines: int, atomic: bool, share: float, spare_s: float
) -> None:
    assume(trace.n_requests <= 6)
    problem = Problem(trace, fleet_of(tau, engines), atomic)
    search, upper_s = searched(problem, spare_s=spare_s)
    optimum_s, _ = brute_force(problem, orders=False)
    for trial_s in (share * upper_s, optimum_s * (1 - 1e-7), optimum_s * (1 + 1e-7)):
        outcome, states, places, engine_of = search.explore(trial_s, 10_000)
        assert outcome != GIVEN_UP
        if outcome == REFUTED:
            assert trial_s <= optimum_s * SLACK
            bound = search.priced.argument(trial_s, places, states)
            assert check_priced(bound, problem) == (Fraction(trial_s), "prices and search")
        else:
            plan = plan_of(problem, units_of(problem), engine_of)
            assert search.asked.seconds_of(engine_of) <= trial_s * SLACK + spare_s * engines
            assert simulate(trace, problem.fleet, plan).makespan_s >= optimum_s / SLACK


@settings(max_examples=EXAMPLES // 2)
@given(st.data())
def test_search_on_any_engines(data: st.DataObject) -> None:
    """What is refuted where step times are no concave function, slots few and caches small."""
    trace = data.draw(traces(most_groups=3, most_samples=2, longest=8, prompts=6))
    assume(trace.n_requests <= 4)
    problem = Problem(trace, data.draw(fleets(trace, step_times(), most_engines=2)), data.draw(st.booleans()))
    search, upper_s = searched(problem)
    found = search.narrow(0.0, upper_s, 10_000, np.inf)
    optimum_s, _ = brute_force(problem)
    assert found.lower_s <= optimum_s * SLACK
    if found.lower_s > 0:
        check_priced(search.priced.argument(found.lower_s, found.places, found.states), problem)


def test_search_proves_what_prices_leave_open() -> None:
    bound = priced(CONCAVE, iterations=40)
    assert bound is not None
    certificate = solve(CONCAVE, method="lagrangian", time_limit_s=20)
    assert bound.lower_s < certificate.upper_s * (1 - 1e-4)
    assert certificate.gap <= 1e-4
    assert check(certificate, CONCAVE).argument == "prices and search"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: replace(b, lower_s=b.lower_s * 1.01), "may pay all prices"),
        (lambda b: replace(b, places=b.places - 1), "may pay all prices"),
        (lambda b: replace(b, places=-1), "more requests are placed"),
        (lambda b: replace(b, places=1_000), "more requests are placed"),
        (lambda b: replace(b, prices=b.prices[::-1]), "may pay all prices"),
        (lambda b: replace(b, multipliers=((1e9,), *b.multipliers)), "multipliers are too large"),
    ],
)  # fmt: skip
def test_checker_refuses_a_changed_search(change, complaint: str) -> None:
    search, upper_s = searched(CONCAVE, iterations=40)
    found = search.narrow(0.0, upper_s, 5_000, np.inf)
    bound = search.priced.argument(found.lower_s, found.places, found.states)
    check_priced(bound, CONCAVE)
    with pytest.raises(InputError, match=complaint):
        check_priced(change(bound), CONCAVE)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_trials_close_in(refutable: float, unknown: float, better: float) -> None:
    """What can be refuted ends at one makespan and what can be found begins at another."""
    least_s = 1.0 + refutable
    found_s = least_s + unknown * (2.0 - least_s)
    trials, gave_up = Trials(1.0, 2.0), 0
    for _ in range(MOST_TRIALS):
        if trials.over:
            break
        trial_s = trials.next_s
        assert trials.lower_s <= trial_s <= trials.upper_s
        if trial_s < least_s:
            trials.refuted()
        elif trial_s >= found_s:
            trials.found(found_s + better * (trial_s - found_s))
        else:
            trials.gave_up()
            gave_up += 1
    assert trials.over
    assert trials.lower_s <= least_s
    assert trials.plan_s >= found_s
    if gave_up == 0:
        assert trials.plan_s - trials.lower_s <= 1e-7 * trials.plan_s
    elif gave_up < PROBES:
        assert trials.upper_s - trials.lower_s <= max(2e-7, NEAR * (trials.plan_s - trials.lower_s))


def test_one_choice_of_engines_is_tried_once() -> None:
    """Three equal requests on two alike engines: two ways to begin, and a third request either way."""
    problem = Problem(Trace.of([[10], [10], [10]]), fleet_of(Affine(1.0, 0.1), 2))
    search, _ = searched(problem)
    outcome, states, places, _ = search.explore(1e-3, 100)
    assert (outcome, states, places) == (REFUTED, 0, 1)
    outcome, states, _, _ = search.explore(100.0, 100)
    assert outcome == FOUND
    assert states == 1 + 2 + 2


CAPPED = Problem(
    Trace.of([[2000] * 9 + [1500, 1400, 700, 650, 600, 300, 200, 100]], prompt_tokens=0),
    fleet_of(Power(2e-3, 1e-3, 0.5, 1e-7), 4),
    atomic=False,
)


def test_equal_requests_are_dealt_once() -> None:
    """Nine alike on four engines, whatever follows: a state for each way to write 1 to 9 as such a sum."""
    search, upper_s = searched(CAPPED)
    search.start = search.start[: 9 + 2]  # gives up there
    ways = sum(
        len({tuple(sorted(w)) for w in product(range(n + 1), repeat=4) if sum(w) == n}) for n in range(1, 10)
    )
    outcome, states, places, beginning = search.explore(10 * upper_s, 10**6)
    assert (outcome, places, (beginning >= 0).sum()) == (GIVEN_UP, 9, 9)
    assert states <= ways
    assert not (np.diff(beginning[:9]) < 0).any()


def test_requests_that_differ_by_their_prompts_count_as_equal() -> None:
    prompts = np.random.default_rng(0).integers(50, 150, CAPPED.trace.n_requests)
    problem = Problem(replace(CAPPED.trace, prompt_tokens=prompts), CAPPED.fleet, atomic=False)
    search, upper_s = searched(problem, iterations=20, spare_s=1.0)
    found = search.narrow(0.0, upper_s, 10**5, np.inf)
    bound = search.priced.argument(found.lower_s, found.places, found.states)
    assert sorted(bound.alike) != sorted(range(17))
    check_priced(bound, problem)
    apart, _ = searched(problem, iterations=20)
    assert apart.priced.argument(1.0).alike == ()
    states = [one.explore(found.lower_s, 10**6)[1] for one in (search, apart)]
    assert states[0] < states[1]
    for change, complaint in (
        (lambda b: replace(b, alike=b.alike[1:]), "another number of requests"),
        (lambda b: replace(b, alike=(b.alike[-1], *b.alike[1:])), "not equally long"),
        (lambda b: replace(b, lower_s=1.01 * upper_s), "may pay all prices"),
    ):
        with pytest.raises(InputError, match=complaint):
            check_priced(change(bound), problem)
    pairs = Trace.of([[9, 9], [9, 9]])
    bound = PricedBound(1.0, (ConcaveMinorant((1e-9,), 0.0),), (1.0,) * 4, ((0.0,),), 1.0, 4, alike=(0,) * 4)
    with pytest.raises(InputError, match="stay together"):
        check_priced(bound, Problem(pairs, CAPPED.fleet, atomic=True))


@pytest.mark.parametrize("spare_s", [0.0, 0.003, 0.02, 0.2])
def test_equal_requests_cost_no_more_than_may_be_spared(spare_s: float) -> None:
    """Short prompts of one sample each, and a long one of eight: as dear, by prefill or by context."""
    shape = ShapeProfile(1, Power(2e-3, 1e-3, 0.5, 1e-8), 2e4, 10**7, 1000, 10**9, 16, prefix_caching=True)
    prompts = [*range(505, 513), 1792, 10]
    trace = Trace.of([*[[1000]] * 8, [1000] * 8, [300]], prompt_tokens=prompts)
    problem = Problem(trace, Fleet(profile(shape), (Engine(1),) * 2, 2), atomic=False)
    units, certificate = units_of(problem), staircase(problem)
    here = certificate.plan.engine_of[[members[0] for members in units.members]]
    asked, apart = (
        Asked(problem, units, here, certificate.upper_s, spare_s=one / 2) for one in (spare_s, 0.0)
    )
    lost_s = (apart.fixed_s - asked.fixed_s).sum(axis=1)
    assert (lost_s >= 0).all()
    assert lost_s.max() <= spare_s * SLACK
    if spare_s > 0:
        assert len(set(asked.alike)) < len(set(apart.alike))


@given(traces(), concave_step_times(), st.integers(1, 4), st.booleans(), st.data())
def test_a_beginning_is_completed(
    trace: Trace, tau: StepTime, engines: int, atomic: bool, data: st.DataObject
) -> None:
    problem = Problem(trace, fleet_of(tau, engines), atomic)
    units, certificate = units_of(problem), staircase(problem)
    here = certificate.plan.engine_of[[members[0] for members in units.members]]
    asked = Asked(problem, units, here, certificate.upper_s)
    begun = data.draw(st.integers(0, len(here)))
    beginning = np.where(np.arange(len(here)) < begun, here, -1)
    plan = asked.completed(beginning)
    assert (plan[:begun] == here[:begun]).all()
    assert ((plan >= 0) & (plan < engines)).all()


def test_an_affine_step_time_is_as_good_as_by_the_staircase() -> None:
    problem = Problem(lognormal(60, seed=4), fleet_of(Affine(4e-3, 2e-4), 3))
    bound = priced(problem, iterations=6)
    assert bound is not None
    assert bound.lower_s >= 0.99 * staircase(problem).lower_s


def test_a_set_costs_its_lengths_times_the_rises() -> None:
    """The formula under everything: T(S) = sum of L_(j) (f(j) - f(j - 1)) + c sum of A."""
    tau = Power(2e-3, 1e-3, 0.5, 1e-7)
    trace = lognormal(30, seed=5)
    length = np.sort(trace.output_tokens)[::-1]
    rises = np.diff(tau(np.arange(31), 0))
    area = length * (length + 1) // 2
    expected = float(length @ rises) + 1e-7 * float(area.sum())
    assert float(decode_time_s(tau, 0 * length, length)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("max_running", [1, 2, 64])
def test_first_prices_that_are_worth_nothing(max_running: int) -> None:
    """A step of two is a thousand times as long as one alone: the search begins all the same."""
    jump = Table(np.array([1, 3, 10]), np.array([0.001, 1.001, 1.001]), padded=True)
    trace = Trace.of([[1], [1, 1]], prompt_tokens=[0, 0])
    problem = Problem(trace, fleet_of(jump, 2, kv_capacity_tokens=3, max_running=max_running), False)
    certificate = solve(problem, method="lagrangian")
    check(certificate, problem)
    assert certificate.lower_s <= brute_force(problem)[0] * (1 + 1e-9)


@pytest.mark.parametrize("lower_s", [21.0, 200.0, 2_000.0])
def test_engines_that_collect_much_do_not_wrap_around(lower_s: float) -> None:
    """Ten engines, a request each: every engine is said to collect fifteen times all prices."""
    problem = Problem(Trace.of([[10]] * 10), fleet_of(Affine(1.0, 1.0), 10))
    line, prices = ConcaveMinorant((2.0, 1.0), 0.0), (1.0,) * 10
    bound = PricedBound(lower_s, (line,), prices, ((15 * 10 / lower_s,),), 1.0, 4, places=1)
    with pytest.raises(InputError, match="may pay all prices"):
        check_priced(bound, problem)
