"""Search over places for engines of several kinds, against brute force and slow definitions."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import concave_step_times, fleets, profile, step_times, traces
from test_mixed import CONCAVE, SLACK, two_shapes

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine, Power
from tailopt.errors import InputError
from tailopt.oracle import check_mixed_places
from tailopt.oracle.bound_and_fill import plan_of, staircase
from tailopt.oracle.brute import brute_force
from tailopt.oracle.check import check
from tailopt.oracle.check_mixed_priced import check_priced_kinds
from tailopt.oracle.lagrangian_search_kernel import FOUND, GIVEN_UP, REFUTED
from tailopt.oracle.minorant import Minorant
from tailopt.oracle.mixed_places import PlacesSearch
from tailopt.oracle.mixed_places_kernel import ranges, with_new_engines
from tailopt.oracle.mixed_priced import KindPrices, KindsAscent, PricedKindsBound
from tailopt.oracle.mixed_rows import Row
from tailopt.oracle.mixed_solve import refined_kinds
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import units_of
from tailopt.plan import Engine, Fleet
from tailopt.simulate.simulator import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples


def searched(problem: Problem, iterations: int = 6) -> tuple[PlacesSearch, float]:
    """The search at prices after a few steps, and the makespan of the plan that they started from."""
    units, certificate = units_of(problem), staircase(problem)
    engine_of = certificate.plan.engine_of[[members[0] for members in units.members]]
    ascent = KindsAscent.of(problem, units, engine_of, lower_s=0.0, upper_s=certificate.upper_s)
    assert ascent is not None
    ascent.climb(iterations)
    assert ascent.best is not None
    return PlacesSearch(ascent.best), certificate.upper_s


def proven(problem: Problem, optimum_s: float, share: float) -> None:
    """What is refuted is so, and the checker says so too; what is found is a plan."""
    search, upper_s = searched(problem)
    for trial_s in (share * upper_s, optimum_s * (1 - 1e-7), min(upper_s, optimum_s * (1 + 1e-7))):
        outcome, states, places, engine_of = search.explore(trial_s, 10_000)
        assert outcome != GIVEN_UP
        if outcome == REFUTED:
            assert trial_s <= optimum_s * SLACK
            bound = search.priced.argument(trial_s, places, states)
            assert check_priced_kinds(bound, problem) == (Fraction(trial_s), "prices on kinds and search")
        else:
            run = simulate(problem.trace, problem.fleet, plan_of(problem, units_of(problem), engine_of))
            assert run.makespan_s >= optimum_s / SLACK


@settings(max_examples=EXAMPLES // 4)
@given(
    traces(most_groups=5, most_samples=2, longest=9, prompts=6),
    two_shapes(concave_step_times()), st.booleans(), st.floats(0.5, 1.0),
)  # fmt: skip
def test_refutes_what_no_plan_on_two_shapes_attains(
    trace: Trace, fleet: Fleet, atomic: bool, share: float
) -> None:
    assume(trace.n_requests <= 6)
    problem = Problem(trace, fleet, atomic)
    proven(problem, brute_force(problem, orders=False)[0], share)


@settings(max_examples=EXAMPLES // 4)
@given(st.data(), st.floats(0.5, 1.0))
def test_refutes_what_no_plan_on_any_engines_attains(data: st.DataObject, share: float) -> None:
    """Any step time, few slots, small caches, in any order and under any limits."""
    trace = data.draw(traces(most_groups=3, most_samples=2, longest=8, prompts=6))
    assume(trace.n_requests <= 4)
    problem = Problem(trace, data.draw(fleets(trace, step_times(), most_engines=2)), data.draw(st.booleans()))
    proven(problem, brute_force(problem, orders=True)[0], share)


@settings(max_examples=EXAMPLES)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.lists(st.integers(0, 2), min_size=3, max_size=3), st.integers(0, 4), st.integers(0, 12),
)  # fmt: skip
def test_new_engines_collect_most_in_the_best_order(
    values: list[list[int]], prices: list[int], left: list[int], first: int, so_far: int
) -> None:
    prefix, count = np.cumsum([0, *prices]), np.array(left[: len(values)])

    def most(collected: int, left: tuple[int, ...]) -> int:
        best = collected
        for k, engines in enumerate(left):
            for u in range(first, 4):
                if engines and prefix[u] <= collected:
                    after = (*left[:k], engines - 1, *left[k + 1 :])
                    best = max(best, most(collected + values[k][u], after))
        return best

    found = with_new_engines(
        float(so_far),
        ranges(np.array(values, dtype=np.float64)),
        prefix.astype(np.float64),
        first,
        count,
        0.0,
    )
    assert found == most(so_far, tuple(count.tolist()))


def test_one_choice_of_engines_is_tried_once() -> None:
    """Three equal requests on two alike engines and another: three ways to go on from two to begin."""
    shapes = [ShapeProfile(tp, Affine(1.0, 0.1), 1e300, 10**6, 1000, 10**9) for tp in (1, 2)]
    problem = Problem(Trace.of([[10]] * 3), Fleet(profile(*shapes), tuple(map(Engine, (2, 1, 1))), 4))
    search, upper_s = searched(problem)
    outcome, states, places, _ = search.explore(1e-3, 100)
    assert (outcome, states, places) == (REFUTED, 0, 1)
    outcome, states, _, _ = search.explore(upper_s, 100)
    assert outcome == FOUND
    assert 2 + 2 + 2 <= states <= 2 + 3 + 3


def test_equal_requests_are_dealt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine alike on two engines of each of two kinds from the first one on, by search and checker."""
    shapes = [ShapeProfile(tp, Power(2e-3 / tp, 1e-3, 0.5, 1e-7), 1e300, 10**6, 1000, 10**9) for tp in (1, 2)]
    lengths = [2000] * 9 + [1500, 1400, 700, 650, 600, 300, 200, 100]
    fleet = Fleet(profile(*shapes), tuple(map(Engine, (1, 1, 2, 2))), 6)
    problem = Problem(Trace.of([[one] for one in lengths]), fleet, atomic=False)
    search, upper_s = searched(problem, iterations=20)
    assert search.before[:9].tolist() == [-1, *range(8)]
    assert (search.before[9:] == -1).all()
    found = search.narrow(search.priced.refuted_s(0.0), upper_s, 10_000, np.inf)
    bound = search.priced.argument(found.lower_s, found.places, found.states)
    assert bound.places > 2
    ways = {
        (i, *sorted((a, b)), *sorted((c, i - a - b - c)))
        for i in range(1, bound.places + 1)
        for a, b, c in product(range(i + 1), repeat=3)
        if a + b + c <= i
    }
    monkeypatch.setattr(check_mixed_places, "MOST_STATES", len(ways))
    assert check_priced_kinds(bound, problem) == (Fraction(found.lower_s), "prices on kinds and search")


GROUPS = Problem(
    Trace.of(np.random.default_rng(0).lognormal(7, 0.8, (16, 4)).astype(int).tolist(), prompt_tokens=20),
    Fleet(
        profile(
            *(ShapeProfile(tp, Power(4e-3, 2e-3 / tp, 0.5, 1e-9), 1e5, 10**7, 20, 8192) for tp in (1, 2))
        ),
        tuple(map(Engine, (2, 1, 1))),
        4,
    ),
    atomic=True,
)


def test_groups_stay_whole() -> None:
    """What prices on requests leave open is mostly that groups stay whole; more requests than slots."""
    first = staircase(GROUPS)
    found = refined_kinds(GROUPS, first, time_limit_s=30)
    assert check(found, GROUPS).argument == "prices on kinds and search"
    search, _ = searched(GROUPS, iterations=40)
    assert found.lower_s > search.priced.refuted_s(0.0) * 1.005
    assert found.gap < 0.005


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: replace(b, lower_s=b.lower_s * 1.002), "may pay all prices"),
        (lambda b: replace(b, places=b.places - 1), "may pay all prices"),
        (lambda b: replace(b, places=0), "may pay all prices"),
        (lambda b: replace(b, places=-1), "more requests are placed"),
        (lambda b: replace(b, places=1_000), "more requests are placed"),
    ],
)
def test_checker_refuses_a_changed_search(change, complaint: str) -> None:
    search, upper_s = searched(CONCAVE, iterations=40)
    found = search.narrow(search.priced.refuted_s(0.0), upper_s, 2_000, np.inf)
    bound = search.priced.argument(found.lower_s, found.places, found.states)
    check_priced_kinds(bound, CONCAVE)
    with pytest.raises(InputError, match=complaint):
        check_priced_kinds(change(bound), CONCAVE)


def test_engines_of_which_nothing_is_known_do_not_wrap_around() -> None:
    """Two engines, one request each, and a row that holds for no leader."""
    shape = ShapeProfile(1, Affine(1.0, 1.0), 1e15, 10**6, 1000, 10**9)
    problem = Problem(Trace.of([[10], [10]]), Fleet(profile(shape), (Engine(1),) * 2, 2))
    one = Minorant(1.0, 1.0, 0.0, 2)
    part = KindPrices((), (Row("cache", one, 1000), Row("longest", one)), (), (), ((1.0, 0.0),), 1.0, 4)
    with pytest.raises(InputError, match="may pay all prices"):
        check_priced_kinds(PricedKindsBound(29.0, (1.0, 1.0), (part,), 1e300, 2), problem)
