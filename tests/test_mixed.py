"""Engines of several kinds and full caches: prices on kinds, against brute force and slow definitions."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import affine_terms, concave_step_times, fleet_of, fleets, plans, profile, step_times, traces

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime, Table
from tailopt.errors import InputError
from tailopt.oracle.bound_and_fill import staircase
from tailopt.oracle.brute import brute_force
from tailopt.oracle.check import check
from tailopt.oracle.check_mixed_priced import check_priced_kinds
from tailopt.oracle.kinds import kinds_of
from tailopt.oracle.lagrangian_minorant import ConcaveMinorant, concave_minorants
from tailopt.oracle.minorant import Minorant
from tailopt.oracle.mixed_kernel import most_collected
from tailopt.oracle.mixed_priced import KindPrices, KindsAscent, PricedKindsBound
from tailopt.oracle.mixed_rows import Crowd, Loads, Row
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.oracle.units import units_of
from tailopt.plan import Engine, Fleet
from tailopt.simulate import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples
SLACK = 1 + 1e-9


def priced(problem: Problem, iterations: int = 5) -> PricedKindsBound | None:
    """The prices alone: whatever they find, however weak."""
    certificate = staircase(problem)
    units = units_of(problem)
    engine_of = certificate.plan.engine_of[[members[0] for members in units.members]]
    ascent = KindsAscent.of(problem, units, engine_of, lower_s=0.0, upper_s=certificate.upper_s)
    assert ascent is not None
    ascent.climb(iterations)
    return ascent.best.argument(ascent.best_s) if ascent.best and ascent.best_s > 0 else None


def verified(bound: PricedKindsBound, problem: Problem) -> float:
    lower_s, argument = check_priced_kinds(bound, problem)
    assert float(lower_s) == bound.lower_s
    assert argument == "prices on kinds"
    return bound.lower_s


@settings(max_examples=EXAMPLES // 2)
@given(st.data())
def test_below_the_best_of_all_orders_and_limits(data: st.DataObject) -> None:
    """Any step time, mixed shapes, few slots, small caches, shared prompts."""
    trace = data.draw(traces(most_groups=3, most_samples=2, longest=8, prompts=6))
    assume(trace.n_requests <= 4)
    fleet = data.draw(fleets(trace, step_times(), most_engines=2))
    problem = Problem(trace, fleet, data.draw(st.booleans()))
    bound = priced(problem)
    if bound is not None:
        optimum_s, _ = brute_force(problem, orders=True)
        assert verified(bound, problem) <= optimum_s * SLACK


@st.composite
def two_shapes(draw: st.DrawFn, times: st.SearchStrategy[StepTime]) -> Fleet:
    shapes = [ShapeProfile(tp, draw(times), 1e300, 10**6, 1000, 10**9) for tp in (1, 2)]
    degrees = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3))
    return Fleet(profile(*shapes), tuple(map(Engine, degrees)), sum(degrees))


@settings(max_examples=EXAMPLES // 2)
@given(
    traces(most_groups=5, most_samples=2, longest=9, prompts=6),
    two_shapes(st.one_of(concave_step_times(), affine_terms().map(lambda terms: Affine(*terms)))),
    st.booleans(),
)
def test_below_the_best_of_two_shapes(trace: Trace, fleet: Fleet, atomic: bool) -> None:
    assume(trace.n_requests <= 6)
    problem = Problem(trace, fleet, atomic)
    bound = priced(problem)
    if bound is not None:
        optimum_s, _ = brute_force(problem, orders=False)
        assert verified(bound, problem) <= optimum_s * SLACK


@settings(max_examples=EXAMPLES // 2)
@given(st.data())
def test_no_plan_beats_the_prices(data: st.DataObject) -> None:
    """Any order, limits, preemption and recompute: more requests than brute force can take."""
    trace = data.draw(traces(most_groups=6, most_samples=4, longest=60))
    fleet = data.draw(
        fleets(trace, step_times(), prefill_tokens_per_s=data.draw(st.sampled_from([4.0, 1e3])))
    )
    plan = data.draw(plans(trace, fleet, shared=False))
    atomic = all(len(set(plan.engine_of[trace.group == g])) == 1 for g in set(trace.group.tolist()))
    problem = Problem(trace, fleet, atomic)
    bound = priced(problem, iterations=6)
    if bound is not None:
        assert verified(bound, problem) <= simulate(trace, fleet, plan).makespan_s * SLACK


# ---- rows


@settings(max_examples=EXAMPLES)
@given(st.data(), affine_terms())
def test_no_schedule_beats_a_row(data: st.DataObject, terms: tuple[float, float, float]) -> None:
    """One engine with an affine step time: every head start that its longest request allows."""
    trace = data.draw(traces(most_groups=5, most_samples=3, longest=30))
    rate = data.draw(st.sampled_from([2.0, 64.0, 1e4]))
    fleet = data.draw(fleets(trace, st.just(Affine(*terms)), most_engines=1, prefill_tokens_per_s=rate))
    plan = data.draw(plans(trace, fleet, shared=False))
    makespan_s = simulate(trace, fleet, plan).makespan_s
    problem, (kind,) = Problem(trace, fleet), kinds_of(fleet)
    loads = Loads.of(problem, kind, np.arange(trace.n_requests))
    longest = trace.output_tokens.max()
    minorant = Minorant(*terms, trace.n_requests)
    for limit, start in product(("longest", "slots", "cache", "recompute"), range(int(longest) + 1)):
        row = Row(limit, minorant, start)
        seconds = loads.added_s(row).sum() + loads.constant_s(row, np.array([longest]))[0]
        assert seconds <= makespan_s * SLACK, (limit, start)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_no_schedule_beats_a_crowd(data: st.DataObject) -> None:
    """One engine with a concave step time, divided at every rank; what requests add, token by token.

    Tokens get something back while the cache fills, or nothing; the constant is whole if requests fill it.
    """
    trace = data.draw(traces(most_groups=5, most_samples=3, longest=30))
    rate = data.draw(st.sampled_from([2.0, 64.0, 1e4]))
    fleet = data.draw(fleets(trace, concave_step_times(), most_engines=1, prefill_tokens_per_s=rate))
    plan = data.draw(plans(trace, fleet, shared=False))
    makespan_s = simulate(trace, fleet, plan).makespan_s
    problem, (kind,), n = Problem(trace, fleet), kinds_of(fleet), trace.n_requests
    loads = Loads.of(problem, kind, np.argsort(-trace.output_tokens, kind="stable"))
    n_max, filled = min(kind.max_running, n), (loads.held + loads.output).sum() >= loads.cache
    shares = data.draw(st.lists(st.floats(0.0, 1.5), min_size=2, max_size=2))
    for below in concave_minorants([kind.shape.step_time.lines(n_max)], n_max, np.ones(n_max + 1)):
        for ranks, share in product(range(1, len(below.rises_s) + 1), [0.0, *shares]):
            crowd = Crowd(below, ranks, share * below.rises_s[ranks - 1])
            added_s = loads.crowd_s(crowd)
            slow_s = [slow_crowd_s(loads, crowd, i) for i in range(n)]
            assert added_s == pytest.approx(slow_s, rel=1e-9, abs=1e-9 * makespan_s)
            by_rank = [crowd.longest_s[min(i, ranks - 1)] for i in range(n)]
            seconds = loads.output @ by_rank + added_s.sum()
            constant_s = crowd.filling_s * loads.cache / 2
            lowered_s = loads.filled_s(crowd, added_s, makespan_s)[0]
            assert seconds + (lowered_s if lowered_s < np.inf else 0.0) <= makespan_s * SLACK or filled
            assert seconds + constant_s <= makespan_s * SLACK or not filled, (ranks, share)
            assert lowered_s <= constant_s or lowered_s == np.inf


def slow_crowd_s(loads: Loads, crowd: Crowd, i: int) -> float:
    """By its definition: the least of f of as many as would fill the cache, and of the lines of all n."""
    rises, seconds = crowd.shared_s, crowd.below.c_s * loads.context[i] + loads.prefill_s[i]

    def f(together: float) -> float:
        whole = int(together)
        beyond = sum(rises[:whole]) + max(0, whole - len(rises)) * rises[-1]
        return beyond + (together - whole) * rises[min(whole, len(rises) - 1)]

    few = [
        n
        for n in range(1, min(loads.kind.max_running, len(loads.output)) + 1)
        if f(n) - n * (f(n + 1) - f(n)) < n * crowd.filling_s
    ]
    for held in range(int(loads.held[i]), int(loads.held[i] + loads.output[i])):
        each_s = f(loads.cache / held) * held / loads.cache if held else 0.0
        lines_s = [f(n) / n - crowd.filling_s * (1 - n * held / loads.cache) for n in few]
        seconds += min([each_s, *lines_s])
    return float(seconds - crowd.filling_s * loads.held[i])


def test_a_crowd_shares_a_full_cache() -> None:
    """A cache for four requests of one token each: a step of four takes f(4), and each a quarter of it."""
    tau = Power(0.0, 1.0, 0.5)
    problem = Problem(Trace.of([[1]] * 8, prompt_tokens=1), fleet_of(tau, 1, kv_capacity_tokens=4))
    (kind,) = kinds_of(problem.fleet)
    below = ConcaveMinorant(tuple(np.diff(np.sqrt(np.arange(5)))), 0.0)
    added_s = Loads.of(problem, kind, np.arange(8)).crowd_s(Crowd(below, 1))
    shared = [min(rise, below.rises_s[0]) for rise in below.rises_s]
    assert added_s == pytest.approx([sum(shared) / 4] * 8)


def test_a_head_start_counts_the_empty_cache() -> None:
    """Four requests of 100 tokens, 200 tokens of cache: full after 50 steps, from then on two run at most."""
    problem = Problem(
        Trace.of([[100]] * 4, prompt_tokens=1), fleet_of(Affine(1.0, 0.0), 1, kv_capacity_tokens=200)
    )
    (kind,) = kinds_of(problem.fleet)
    loads = Loads.of(problem, kind, np.arange(4))
    steps = [
        loads.added_s(row).sum() + loads.constant_s(row, np.array([100]))[0]
        for row in (Row("cache", Minorant(1.0, 0.0, 0.0, 4), start) for start in (0, 50))
    ]
    assert steps[0] == pytest.approx(4 * 5050 / 200)
    assert steps[1] == pytest.approx(50 + 4 * sum(range(51, 101)) / 200)
    assert steps[1] > steps[0]


# ---- leaders


@given(st.data(), st.integers(1, 4), st.lists(st.integers(1, 2), min_size=1, max_size=2))
def test_most_collected_is_the_most_of_all_leaders(
    data: st.DataObject, units: int, counts: list[int]
) -> None:
    numbers = st.lists(st.integers(-3, 9), min_size=units, max_size=units)
    value = np.array([data.draw(numbers) for _ in counts], dtype=float)
    price = np.array(data.draw(st.lists(st.integers(0, 6), min_size=units, max_size=units)), dtype=float)
    prefix = np.concatenate([[0.0], np.cumsum(price)])
    best = -np.inf
    for m in range(1, min(sum(counts), units) + 1):
        for rest in combinations(range(1, units), m - 1):
            for kinds in product(range(len(counts)), repeat=m):
                if any(kinds.count(k) > count for k, count in enumerate(counts)):
                    continue
                held, allowed = 0.0, True
                for unit, k in zip((0, *rest), kinds, strict=True):
                    allowed = allowed and held >= prefix[unit]
                    held += value[k, unit]
                best = max(best, held) if allowed else best
    leaders = np.empty((sum(counts), 2), dtype=np.int64)
    assert most_collected(value, np.array(counts), prefix, 0.0, leaders) == best
    used = leaders[leaders[:, 0] >= 0]
    assert sum(value[k, unit] for unit, k in used) == best


# ---- real sizes

SHAPES = profile(
    ShapeProfile(1, Power(3e-3, 1e-3, 0.6, 5e-9), 4e4, 10**6, 128),
    ShapeProfile(2, Power(2e-3, 6e-4, 0.6, 3e-9), 7e4, 2 * 10**6, 128),
)


def lognormal(requests: int, seed: int) -> Trace:
    lengths = np.random.default_rng(seed).lognormal(7, 1, (requests, 1)).astype(int)
    return Trace.of(np.clip(lengths, 1, 16_384).tolist(), prompt_tokens=100)


CONCAVE = Problem(lognormal(120, 0), Fleet.of(SHAPES, "3xTP1+1xTP2"))


def concave_bound() -> PricedKindsBound:
    bound = priced(CONCAVE, iterations=20)
    assert bound is not None
    return bound


def test_two_concave_shapes_are_nearly_closed() -> None:
    first = staircase(CONCAVE)
    assert first.gap > 0.1
    assert first.upper_s / concave_bound().lower_s - 1 < 0.05


def with_kind(bound: PricedKindsBound, **changes) -> PricedKindsBound:
    return replace(bound, kinds=(replace(bound.kinds[0], **changes), *bound.kinds[1:]))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: replace(b, lower_s=b.lower_s * 1.01), "may pay all prices"),
        (lambda b: replace(b, kinds=b.kinds[:1]), "other kinds of engines"),
        (lambda b: replace(b, prices=b.prices[1:]), "another number of requests"),
        (lambda b: replace(b, prices=(-1.0, *b.prices[1:])), "no prices"),
        (lambda b: replace(b, kinds=b.kinds[::-1]), "not below the step times|may pay"),
        (lambda b: with_kind(b, classes=0), "no grid"),
        (lambda b: with_kind(b, multipliers=((-1.0,),)), "negative"),
        (lambda b: with_kind(b, multipliers=((1.0, 2.0),)), "one for each inequality"),
        (lambda b: with_kind(b, concave=tuple(steeper(one, 1.01) for one in b.kinds[0].concave)),
         "not below the step times"),
        (lambda b: with_kind(b, concave=tuple(rising(one) for one in b.kinds[0].concave)), "not concave"),
    ],
)  # fmt: skip
def test_checker_refuses_changed_prices(change, complaint: str) -> None:
    bound = concave_bound()
    verified(bound, CONCAVE)
    with pytest.raises(InputError, match=complaint):
        check_priced_kinds(change(bound), CONCAVE)


def steeper(one, factor: float):
    return replace(one, rises_s=tuple(rise * factor for rise in one.rises_s))


def rising(one):
    return replace(one, rises_s=one.rises_s[::-1])


LONG = Trace.of([[2_000 + 26 * k] for k in range(80)], prompt_tokens=100)
CROWDED = Problem(LONG, fleet_of(Affine(5e-3, 1e-5, 1e-9), 2, kv_capacity_tokens=40_000))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda r: replace(r, head_start=-1), "head start is negative"),
        (lambda r: replace(r, limit="nothing"), "no known sort"),
        (lambda r: replace(r, minorant=replace(r.minorant, a_s=r.minorant.a_s * 1.01)), "not below"),
        (lambda r: replace(r, minorant=replace(r.minorant, n_max=1)), "concurrency limit|can run together"),
    ],
)
def test_checker_refuses_changed_rows(change, complaint: str) -> None:
    bound = priced(CROWDED)
    assert bound is not None
    assert {row.limit for row in bound.kinds[0].rows} & {"cache", "recompute"}
    verified(bound, CROWDED)
    with pytest.raises(InputError, match=complaint):
        check_priced_kinds(with_kind(bound, rows=tuple(map(change, bound.kinds[0].rows))), CROWDED)


MANY = Problem(LONG, fleet_of(Power(4e-3, 2e-3, 0.4, 1e-9), 2, kv_capacity_tokens=40_000))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: replace(c, ranks=0), "divided at no rank"),
        (lambda c: replace(c, ranks=81), "divided at no rank"),
        (lambda c: replace(c, filling_s=-1e-9), "negative or too large"),
        (lambda c: replace(c, filling_s=np.nan), "negative or too large"),
        (lambda c: replace(c, below=steeper(c.below, 1.01)), "not below the step times"),
        (lambda c: replace(c, below=rising(c.below)), "not concave"),
    ],
)
def test_checker_refuses_changed_crowds(change, complaint: str) -> None:
    bound = priced(MANY)
    assert bound is not None
    assert bound.kinds[0].crowds
    verified(bound, MANY)
    with pytest.raises(InputError, match=complaint):
        check_priced_kinds(with_kind(bound, crowds=tuple(map(change, bound.kinds[0].crowds))), MANY)


def test_full_caches_raise_the_bound() -> None:
    """More than the staircase with slots and cache does."""
    first, bound = staircase(CROWDED), priced(CROWDED)
    assert bound is not None
    assert bound.lower_s > 1.005 * first.bound_argument.lower_s


@pytest.mark.parametrize(
    ("multiplier", "label_s"),
    [(2.0**power, 1e9) for power in range(-16, 900, 61)] + [(np.inf, 1e9), (np.nan, 1e9), (1e-3, 1e-300)],
)
def test_numbers_too_large_to_compute_with_prove_nothing(multiplier: float, label_s: float) -> None:
    """One request takes 10 s, and no multiplier of a row that has a whole cache to spare makes it 1000 s."""
    shape = ShapeProfile(1, Affine(1.0, 0.0), 1.0, 100_000, 10, token_budget=100, block_tokens=1,
                         prefix_caching=False)  # fmt: skip
    problem = Problem(Trace.of([[10]], prompt_tokens=1), Fleet(profile(shape), (Engine(1),), 1))
    row = Row("recompute", Minorant(0.0, 0.0, 0.0, 1), 0)
    for price in (1.0, 1e-3, 1e300):
        part = KindPrices((), (row,), (), (), ((0.0,), (multiplier,)), label_s, 1)
        with pytest.raises(InputError):
            check_priced_kinds(PricedKindsBound(1000.0, (price,), (part,), 1e9), problem)


def test_a_row_with_a_cache_to_spare_does_not_wrap_around() -> None:
    """Multipliers such that 2^63 is all but reached, if only the makespan is thought of."""
    shape = ShapeProfile(1, Affine(1.0, 0.0), 1.0, 100_000, 10, token_budget=100, block_tokens=1,
                         prefix_caching=False)  # fmt: skip
    problem = Problem(Trace.of([[10]], prompt_tokens=1), Fleet(profile(shape), (Engine(1),), 1))
    row = Row("recompute", Minorant(0.0, 0.0, 0.0, 1), 0)
    multiplier = float((2**63 - 2**54) * 16 / (2**60 * 101_000))
    part = KindPrices((), (row,), (), (), ((0.0,), (multiplier,)), 1e9, 1)
    with pytest.raises(InputError):
        check_priced_kinds(PricedKindsBound(1000.0, (1.0,), (part,), 1e9), problem)


@pytest.mark.parametrize(("prompt", "engine"), [(95, {0, 1}), (96, {0, 1}), (97, {1}), (99, {1}), (100, {1})])
def test_the_last_block_of_a_cache_is_no_room_unless_it_is_whole(prompt: int, engine: set[int]) -> None:
    """A cache of 100 tokens in blocks of 16 holds 96; what does not fit goes to the larger engine."""
    small, large = (
        ShapeProfile(tp, Affine(1e-3, 0.0), 1e6, cache, 1, token_budget=1000, block_tokens=16)
        for tp, cache in ((1, 100), (2, 1000))
    )
    problem = Problem(
        Trace.of([[1]] * 4, prompt_tokens=[prompt] * 4),
        Fleet(profile(small, large), (Engine(1), Engine(2)), 3),
    )
    certificate = staircase(problem)
    assert set(certificate.plan.engine_of) == engine
    check(certificate, problem)


def test_functions_that_the_prices_do_not_use_are_not_needed_to_check_them() -> None:
    """A kind has functions of several widths, and the bound needs the narrow one alone."""
    padded = Table([1, 3, 10], [6.75, 8.75, 8.75], 0.0, padded=True)
    larger = MaxAffine(((7.0, 0.875, 0.0390625), (-0.5, 0.5625, 0.0)))
    shapes = [
        ShapeProfile(tp, tau, 64.0, 30, 1000, budget, block_tokens=1, prefix_caching=False)
        for tp, tau, budget in ((1, padded, 1000), (2, larger, 10_000))
    ]
    fleet = Fleet(profile(*shapes), (Engine(1), Engine(2)), 3)
    problem = Problem(Trace.of([[1], [1], [1], [3], [23], [28]]), fleet)
    certificate = solve(problem)
    assert isinstance(certificate.bound_argument, PricedKindsBound)
    assert check(certificate, problem).lower_s == certificate.lower_s > 190


@pytest.mark.parametrize("back", [0.5, 4.5, 5.0, 7.5, 1e3])
def test_what_tokens_get_back_does_not_wrap_around(back: float) -> None:
    """A row that holds for no leader, and requests that are said to make an engine much faster."""
    shape = ShapeProfile(1, Power(1.0, 1.0, 0.5, 0.0), 1e15, 150, 1000, 10**9, 1, prefix_caching=False)
    problem = Problem(Trace.of([[10]] * 3, prompt_tokens=100), Fleet(profile(shape), (Engine(1),) * 2, 2))
    lower_s = 100 * staircase(problem).upper_s
    crowd = Crowd(ConcaveMinorant((2.0, 0.3, 0.3), 0.0), 1, back * lower_s / 100)
    row = Row("cache", Minorant(1.0, 0.0, 0.0, 3), 1000)
    part = KindPrices((), (row,), (crowd,), (), ((1.0, 1.0),), 1.0, 4)
    with pytest.raises(InputError, match="may pay all prices"):
        check_priced_kinds(PricedKindsBound(lower_s, (1e-3,) * 3, (part,), 1e300), problem)
