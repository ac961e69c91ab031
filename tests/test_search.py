"""The staircase search against brute force, its checker, and what may interrupt it."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import affine_terms, fleet_of, fleets, traces

from tailopt.engine.step_time import Affine, Power
from tailopt.errors import InputError
from tailopt.oracle import check_search, search
from tailopt.oracle.bound_and_fill import staircase
from tailopt.oracle.brute import brute_force
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.check import check
from tailopt.oracle.problem import Problem
from tailopt.oracle.search_bound import SearchBound, items_of, least_of
from tailopt.oracle.search_kernel import (
    FOUND,
    GAVE_UP,
    REFUTED,
    even_out,
    explore,
    finish,
    least_sums,
    wasted,
)
from tailopt.oracle.solve import solve
from tailopt.oracle.staircase import staircase_bound
from tailopt.oracle.units import lines_of, units_of
from tailopt.trace import Trace

EXAMPLES = settings().max_examples
SLACK = 1 + 1e-9
MANY = 10**6


def arrays(items: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    lead, weight = np.array(sorted(items, reverse=True), dtype=np.int64).T.copy()
    return lead, weight


def explored(
    lead: np.ndarray, weight: np.ndarray, engines: int, asked: int, most: int, completions: int, slots: int
) -> tuple[int, np.ndarray]:
    """What the search says of a makespan, and the plan that it left."""
    total, least = np.concatenate([[0], np.cumsum(weight)]), least_of(weight)
    engine_of = np.zeros(len(lead), dtype=np.int64)
    seen = np.zeros((slots, engines + 2), dtype=np.int64)
    sums = least_sums(weight, len(weight), 8)
    outcome, _ = explore(
        asked - lead, weight, total, least, sums, engines, most, completions, seen, 1, engine_of
    )
    return outcome, engine_of


def makespan(lead: np.ndarray, weight: np.ndarray, engine_of: np.ndarray) -> int:
    return max(int(lead[engine_of == e].max() + weight[engine_of == e].sum()) for e in np.unique(engine_of))


def least_makespan(lead: np.ndarray, weight: np.ndarray, engines: int) -> int:
    ways = product(range(engines), repeat=len(lead))
    return min(makespan(lead, weight, np.array(way)) for way in ways)


def tiny_items(most: int = 6) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(lead, weight), free or as groups would have them; ties and weights of zero are common."""
    size = st.one_of(st.integers(0, 12), st.sampled_from([0, 4, 5]))
    return st.lists(st.tuples(size, size), min_size=1, max_size=most)


@settings(max_examples=20 * EXAMPLES)
@given(tiny_items(), st.integers(1, 3), st.integers(-3, 3), st.sampled_from([0, 3]))
def test_every_makespan_is_refuted_or_attained(
    items: list[tuple[int, int]], engines: int, off: int, completions: int
) -> None:
    """Exhaustive: FOUND from the least makespan on, REFUTED below it."""
    lead, weight = arrays(items)
    optimum = least_makespan(lead, weight, engines)
    asked = optimum + off
    assume(asked >= 0)
    outcome, engine_of = explored(lead, weight, engines, asked, MANY, completions, 3)  # states get lost
    assert outcome == (FOUND if asked >= optimum else REFUTED)
    if outcome == FOUND:
        assert makespan(lead, weight, engine_of) <= asked


def test_a_search_that_may_not_look_gives_up() -> None:
    lead, weight = arrays([(9, 5), (8, 5), (7, 5), (6, 5), (5, 4), (4, 3)])
    assert explored(lead, weight, 2, 25, 2, 0, 8)[0] == GAVE_UP


@given(tiny_items(8), st.integers(1, 4), st.data())
def test_evening_out_shortens_and_keeps_leaders(
    items: list[tuple[int, int]], engines: int, data: st.DataObject
) -> None:
    lead, weight = arrays(items)
    assume(len(lead) >= engines)
    before = np.array(
        [*range(engines), *(data.draw(st.integers(0, engines - 1)) for _ in range(len(lead) - engines))]
    )
    after = before.copy()
    last = even_out(-lead, weight, engines, after)
    assert last == makespan(lead, weight, after) <= makespan(lead, weight, before)
    assert (after[:engines] == before[:engines]).all()


@given(traces(), affine_terms(), st.integers(1, 3), st.booleans())
def test_items_are_never_heavier_than_the_units(
    trace: Trace, terms: tuple[float, float, float], engines: int, atomic: bool
) -> None:
    problem = Problem(trace, fleet_of(Affine(*terms), engines), atomic)
    units = units_of(problem)
    bound = staircase_bound(units, lines_of(problem, trace.n_requests), engines, np.inf)
    items = items_of(units, bound, 7.3 * bound.lower_s)
    exact = bound.minorant
    tick, asked_s = Fraction(items.tick_s), 3.1 * bound.lower_s
    coarse = items.tick_s in (exact.b_s, exact.c_s)
    rooms = items.rooms(asked_s)
    for u, room in enumerate(rooms.tolist()):
        lead = Fraction(exact.a_s) * Fraction(bound.weights[0]) * int(units.longest[u])
        weight = Fraction(exact.b_s) * int(units.tokens[u]) + Fraction(exact.c_s) * int(units.context[u])
        lost = weight / tick - int(items.weight[u])
        assert 0 <= lost <= (Fraction(1, 10**9) if coarse else 2)
        assert room - 1 <= (Fraction(asked_s) - lead) / tick < room + 1
    assert items.before_s(rooms) <= asked_s * SLACK
    assert items.after_s(rooms) >= asked_s / SLACK


def test_a_tick_is_a_token_where_that_is_all_that_counts() -> None:
    """Then rooms are whole tokens, and so are the steps from one makespan to the next."""
    problem = Problem(Trace.of([[7], [5], [5], [4]]), fleet_of(Affine(10e-3, 2e-3), 2))
    bound = staircase_bound(units_of(problem), lines_of(problem, 4), 2, np.inf)
    items = items_of(units_of(problem), bound, 1.0)
    assert items.tick_s == pytest.approx(2e-3)
    assert items.weight.tolist() == [7, 5, 5, 4]
    assert items.rooms(0.0839).tolist() == [6, 16, 16, 21]
    assert items.after_s(items.rooms(0.0839)) == pytest.approx(0.084)
    context = Problem(problem.trace, fleet_of(Affine(10e-3, 0.0, 1e-3), 2))
    bound = staircase_bound(units_of(context), lines_of(context, 4), 2, np.inf)
    assert items_of(units_of(context), bound, 1.0).weight.tolist() == units_of(context).context.tolist()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_least_sums_are_all_sums_as_far_as_they_go(weights: list[int], count: int) -> None:
    weight = np.array(weights, dtype=np.int64)
    found = least_sums(weight, len(weight), count)
    for place in range(len(weight)):
        sums = {sum(some) for k in range(len(weight)) for some in combinations(weights[place:], k)}
        sums.add(sum(weights[place:]))
        expected = [*sorted(sums)[:count], *[2**62] * count][:count]
        assert found[place].tolist() == expected
    sums = {sum(some) for k in range(len(weight) + 1) for some in combinations(weights, k)}
    assert wasted(weight).tolist() == [
        room - max(one for one in sums if one <= room) for room in range(sum(weights) + 1)
    ]


@given(st.data(), st.integers(2, 4), st.integers(4, 10))
def test_finishing_fills_engines_to_the_tick(data: st.DataObject, engines: int, units: int) -> None:
    """Rooms that a plan leaves nothing of; what is said to be placed is in time, and leaders stay."""
    lead = np.array(sorted(data.draw(st.lists(st.integers(0, 9), min_size=units, max_size=units)))[::-1])
    weight = np.array(data.draw(st.lists(st.integers(1, 9), min_size=units, max_size=units)))
    start = min(engines, units // 2)
    last = data.draw(st.integers(start, units - 1))
    hidden = np.array([*range(start), *(data.draw(st.integers(0, start - 1)) for _ in range(units - start))])
    asked = makespan(lead, weight, hidden) + data.draw(st.integers(0, 3))
    engine_of = np.where(np.arange(units) < start, hidden, -1)
    waste = wasted(weight[last:])
    if finish(asked - lead, weight, start, start, last, waste, data.draw(st.integers(0, 9)), engine_of):
        assert makespan(lead, weight, engine_of) <= asked
        assert (engine_of[:start] == hidden[:start]).all()


def test_finishing_finds_the_one_token_that_is_left() -> None:
    """Forty requests that fill four engines to the token, which exchanges of one or two miss."""
    rng = np.random.default_rng(0)
    weight = np.sort(rng.integers(100, 3000, 40))[::-1].copy()
    weight[-1] += 4 - weight.sum() % 4
    rooms = np.full(40, weight.sum() // 4)
    engine_of = np.arange(40) % 4
    waste = wasted(weight[8:])
    assert finish(rooms, weight, 4, 4, 8, waste, 1, engine_of)
    assert [weight[engine_of == e].sum() for e in range(4)] == [weight.sum() // 4] * 4


def bracketed(problem: Problem, *, orders: bool) -> Certificate:
    """Search, check, and hold both ends against brute force and the staircase's certificate."""
    certificate = solve(problem, method="search")
    optimum_s, _ = brute_force(problem, orders=orders)
    assert certificate.lower_s <= optimum_s * SLACK
    assert optimum_s <= certificate.upper_s * SLACK
    first = staircase(problem)
    assert certificate.lower_s >= first.lower_s / SLACK
    assert certificate.upper_s <= first.upper_s * SLACK
    assert check(certificate, problem).lower_s >= certificate.lower_s
    return certificate


@settings(max_examples=10 * EXAMPLES)
@given(traces(most_groups=5, most_samples=1, longest=9, prompts=6), affine_terms(), st.integers(1, 4))
def test_requests_are_solved(trace: Trace, terms: tuple[float, float, float], engines: int) -> None:
    assert bracketed(Problem(trace, fleet_of(Affine(*terms), engines)), orders=False).gap <= search.CLOSE * 2


@settings(max_examples=5 * EXAMPLES)
@given(traces(most_groups=6, most_samples=3, longest=9, prompts=6), affine_terms(), st.integers(1, 3))
def test_groups_are_solved(trace: Trace, terms: tuple[float, float, float], engines: int) -> None:
    problem = Problem(trace, fleet_of(Affine(*terms), engines), atomic=True)
    assert bracketed(problem, orders=False).gap <= search.CLOSE * 2


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_crowded_engines_are_bracketed(data: st.DataObject) -> None:
    """Small caches and few slots, every order and every limit tried."""
    trace = data.draw(traces(most_groups=3, most_samples=2, longest=8, prompts=6))
    assume(trace.n_requests <= 4)
    fleet = data.draw(fleets(trace, affine_terms().map(lambda terms: Affine(*terms)), most_engines=2))
    bracketed(Problem(trace, fleet, data.draw(st.booleans())), orders=True)


def lognormal(n: int, engines: int, seed: int = 0, *, per_token_s: float = 2e-3) -> Problem:
    length = np.minimum(np.random.default_rng(seed).lognormal(7.6, 1.0, n), 16384).astype(int)
    return Problem(Trace.of([[one] for one in length]), fleet_of(Affine(10e-3, per_token_s), engines))


OPEN = lognormal(100, 4, 0)
SMALL = lognormal(9, 2, 38)


def test_the_search_closes_what_bound_and_filling_leave_open() -> None:
    first, last = staircase(OPEN), solve(OPEN)
    assert first.gap > 1e-3
    assert last.gap <= search.CLOSE
    assert last.lower_s > first.lower_s
    assert last.upper_s < first.upper_s
    assert check(last, OPEN).argument == "search"


def test_what_is_exhausted_is_called_optimal() -> None:
    assert solve(SMALL).status == "optimal"


def test_the_same_without_a_time_limit() -> None:
    one, other = (solve(lognormal(256, 8, 1)) for _ in range(2))
    assert (one.lower_s, one.upper_s, one.bound_argument) == (
        other.lower_s,
        other.upper_s,
        other.bound_argument,
    )
    assert (one.plan.engine_of == other.plan.engine_of).all()


def test_more_time_is_never_worse() -> None:
    problem = lognormal(512, 8, 2)
    gaps = [solve(problem, time_limit_s=limit).gap for limit in (1e-6, 2.0)]
    assert gaps[0] <= staircase(problem).gap * SLACK
    assert gaps[1] < gaps[0] / 10


def test_an_interrupt_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def interrupted(*arguments):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return explore(*arguments)

    monkeypatch.setattr(search, "explore", interrupted)
    certificate = solve(OPEN)
    assert next(calls) == 4
    assert search.CLOSE < certificate.gap < staircase(OPEN).gap
    check(certificate, OPEN)


def test_other_step_times_get_the_staircase() -> None:
    problem = Problem(Trace.of([[90], [80], [20], [10]]), fleet_of(Power(1.0, 1.0, 0.5), 2))
    assert solve(problem, method="search").method == staircase(problem).method


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: replace(b, lower_s=b.lower_s * (1 + 1e-6)), "may be done by"),
        (lambda b: replace(b, tick_s=0.0), "no tick"),
        (lambda b: replace(b, tick_s=b.lower_s), "may be done by"),
        (lambda b: replace(b, terms=replace(b.terms, weights=(1.0, 0.1, 0.0))), "not convex"),
        (
            lambda b: replace(b, terms=replace(b.terms, minorant=replace(b.terms.minorant, a_s=0.011))),
            "not below the step times",
        ),
        (
            lambda b: replace(b, terms=replace(b.terms, minorant=replace(b.terms.minorant, n_max=8))),
            "first concurrency limit",
        ),
    ],
)  # fmt: skip
def test_checker_refuses_a_changed_argument(change, complaint: str) -> None:
    certificate = solve(SMALL)
    assert isinstance(certificate.bound_argument, SearchBound)
    with pytest.raises(InputError, match=complaint):
        check(replace(certificate, bound_argument=change(certificate.bound_argument)), SMALL)


def test_checker_says_what_it_could_not_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_search, "MOST_STATES", 10)
    with pytest.raises(InputError, match=r"not verified: more than 10 states \(the search reports \d+\)"):
        check(solve(OPEN), OPEN)
