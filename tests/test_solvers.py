"""One suite over every method of ``solve``: bounds below the brute-force optimum, plans above it, checked."""

from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import (
    affine_terms,
    concave_step_times,
    fleet_of,
    fleets,
    plans,
    profile,
    step_times,
    traces,
)

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, StepTime, Table
from tailopt.errors import InputError
from tailopt.oracle.brute import brute_force
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.check import check
from tailopt.oracle.dp import MOST_UNITS, best_partition, dp, least_seconds
from tailopt.oracle.integer_model import in_opening_order
from tailopt.oracle.kinds import kinds_of, terms_of
from tailopt.oracle.mixed import MixedBound, mixed_bound, placeable
from tailopt.oracle.partition import PartitionBound
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import METHODS, solve
from tailopt.oracle.solver_bound import Question, SolverBound
from tailopt.oracle.staircase import refuted_makespan
from tailopt.oracle.units import units_of
from tailopt.plan import Engine, Fleet
from tailopt.simulate import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples
SLACK = 1 + 1e-9

WITH_ORTOOLS = ("cpsat", "highs", "scip")
QUICK = tuple(method for method in METHODS if method not in WITH_ORTOOLS)
EXACT = ("dp", "cpsat")  # proven optimal on tiny cases of concave step times where everything fits
needs_ortools = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-tools is an extra")


def hold(problem: Problem, methods: tuple[str, ...], *, orders: bool, exact: tuple[str, ...] = ()) -> None:
    """Every method's certificate is checked and held against brute force; some must meet it."""
    optimum_s, _ = brute_force(problem, orders=orders)
    for method in methods:
        certificate = solve(problem, method=method, time_limit_s=5 if method in WITH_ORTOOLS else 0.02)
        assert certificate.lower_s <= optimum_s * SLACK, method
        assert optimum_s <= certificate.upper_s * SLACK, method
        checked = check(certificate, problem)
        assert checked.lower_s >= certificate.lower_s, method
        assert checked.upper_s == pytest.approx(certificate.upper_s, rel=1e-9)
        if method in exact:
            assert certificate.status == "optimal", method
            assert certificate.upper_s == pytest.approx(optimum_s, rel=1e-9), method


def tiny(most: int, samples: int = 1) -> st.SearchStrategy[Trace]:
    """One request and equal lengths are common; often fewer requests than engines."""
    return traces(most_groups=most, most_samples=samples, longest=9, prompts=6)


@st.composite
def shapes_that_fit(draw: st.DrawFn, times: st.SearchStrategy[StepTime], most_engines: int = 3) -> Fleet:
    """Up to three engines of one or two shapes, on which everything fits at once."""
    shapes = [ShapeProfile(tp, draw(times), 1e300, 10**6, 1000, 10**9) for tp in (1, 2)]
    degrees = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=most_engines))
    return Fleet(profile(*shapes), tuple(map(Engine, degrees)), sum(degrees))


def affine_times() -> st.SearchStrategy[StepTime]:
    """Zero context cost and zero cost per request included."""
    return affine_terms().map(lambda terms: Affine(*terms))


@st.composite
def any_problem(draw: st.DrawFn) -> Problem:
    """Any step time, mixed shapes, small caches and few slots; every order and limit is tried."""
    trace = draw(traces(most_groups=3, most_samples=2, longest=8, prompts=6))
    assume(trace.n_requests <= 4)
    return Problem(trace, draw(fleets(trace, step_times(), most_engines=2)), draw(st.booleans()))


@settings(max_examples=2 * EXAMPLES)
@given(tiny(6), shapes_that_fit(affine_times()))
def test_requests_on_affine_shapes(trace: Trace, fleet: Fleet) -> None:
    hold(Problem(trace, fleet), QUICK, orders=False, exact=EXACT)


@settings(max_examples=2 * EXAMPLES)
@given(tiny(4, 3), shapes_that_fit(concave_step_times()), st.booleans())
def test_requests_and_groups_on_concave_shapes(trace: Trace, fleet: Fleet, atomic: bool) -> None:
    assume(atomic or trace.n_requests <= 7)
    hold(Problem(trace, fleet, atomic), QUICK, orders=False, exact=EXACT)


@settings(max_examples=EXAMPLES // 2)
@given(any_problem())
def test_anything_with_limits_and_orders(problem: Problem) -> None:
    hold(problem, QUICK, orders=True)


@needs_ortools
@settings(max_examples=EXAMPLES // 5)
@given(tiny(6), shapes_that_fit(affine_times()))
def test_solvers_on_affine_shapes(trace: Trace, fleet: Fleet) -> None:
    hold(Problem(trace, fleet), WITH_ORTOOLS, orders=False, exact=EXACT)


@needs_ortools
@settings(max_examples=EXAMPLES // 5)
@given(tiny(4, 3), shapes_that_fit(concave_step_times()), st.booleans())
def test_solvers_on_concave_shapes(trace: Trace, fleet: Fleet, atomic: bool) -> None:
    assume(atomic or trace.n_requests <= 7)
    hold(Problem(trace, fleet, atomic), WITH_ORTOOLS, orders=False, exact=EXACT)


@needs_ortools
@settings(max_examples=EXAMPLES // 5)
@given(any_problem())
def test_solvers_with_limits_and_orders(problem: Problem) -> None:
    hold(problem, WITH_ORTOOLS, orders=True)


@pytest.mark.parametrize("method", [*QUICK, *(pytest.param(m, marks=needs_ortools) for m in WITH_ORTOOLS)])
def test_huge_lengths_scale(method: str) -> None:
    """Without context a hundred thousand times the lengths take a hundred thousand times as long."""
    lengths, factor = [9, 8, 7, 7, 5, 2], 100_000
    fleet = fleet_of(Affine(0.5, 0.25), 2, kv_capacity_tokens=10**12)
    optimum_s, _ = brute_force(Problem(Trace.of([lengths]), fleet), orders=False)
    certificate = solve(Problem(Trace.of([[factor * length for length in lengths]]), fleet), method=method)
    assert certificate.lower_s <= factor * optimum_s * SLACK
    assert factor * optimum_s <= certificate.upper_s * SLACK
    if method in EXACT:
        assert certificate.status == "optimal"


@pytest.mark.parametrize("method", [*QUICK, *(pytest.param(m, marks=needs_ortools) for m in WITH_ORTOOLS)])
def test_the_same_seed_gives_the_same(method: str) -> None:
    problem = Problem(Trace.of([[90, 70], [60, 50], [50, 40], [30, 5]], prompt_tokens=9), fleet_of(TAU, 3))
    one, two = (solve(problem, method=method, seed=7) for _ in range(2))
    assert (one.lower_s, one.upper_s, one.status) == (two.lower_s, two.upper_s, two.status)
    assert one.plan.engine_of.tolist() == two.plan.engine_of.tolist()


TAU = Affine(1.0, 0.5, 1 / 1024)


# ---- dynamic programming


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_best_partition_is_the_best_of_all(data: st.DataObject, units: int, engines: int) -> None:
    """Against every way to deal the units, for seconds that need not even grow with the set."""
    numbers = st.lists(st.integers(1, 20), min_size=1 << units, max_size=1 << units)
    seconds = np.array(data.draw(st.lists(numbers, min_size=2, max_size=2)), dtype=float)
    seconds[:, 0] = 0.0
    kind_of = np.array(data.draw(st.lists(st.integers(0, 1), min_size=engines, max_size=engines)))

    def makespan(engine_of: tuple[int, ...]) -> float:
        sets = [sum(1 << u for u in range(units) if engine_of[u] == e) for e in range(engines)]
        return max(seconds[k, s] for k, s in zip(kind_of, sets, strict=True))

    found_s, engine_of = best_partition(seconds, kind_of)
    assert found_s == min(map(makespan, product(range(engines), repeat=units)))
    assert found_s == makespan(tuple(engine_of))


@given(st.data(), step_times(), st.booleans())
def test_no_order_beats_the_least_seconds(data: st.DataObject, tau: StepTime, atomic: bool) -> None:
    trace = data.draw(tiny(3, 2))
    least = int((trace.prompt_tokens + trace.output_tokens).max())
    fleet = fleet_of(
        tau,
        1,
        kv_capacity_tokens=data.draw(st.integers(least, 3 * least)),
        max_running=data.draw(st.integers(1, 5)),
    )
    plan = data.draw(plans(trace, fleet, shared=False))
    makespan_s = simulate(trace, fleet, plan).makespan_s
    problem = Problem(trace, fleet, atomic)
    units, (kind,) = units_of(problem), kinds_of(fleet)
    (terms,) = terms_of(units, [kind], trace.n_requests, makespan_s)
    assert least_seconds(problem, units, kind, terms)[-1] <= makespan_s * SLACK


def test_dp_refuses_what_is_not_small() -> None:
    with pytest.raises(InputError, match=rf"{MOST_UNITS + 1} units, expected at most {MOST_UNITS}"):
        dp(Problem(Trace.of([[5] * (MOST_UNITS + 1)]), fleet_of(TAU, 2)))


def test_dp_is_exact_on_fourteen_groups_and_three_shapes() -> None:
    shapes = profile(
        *(
            ShapeProfile(tp, Affine(0.1 / tp + 0.02, 0.02 / tp + 0.001), 1e300, 10**6, 1000)
            for tp in (1, 2, 4)
        )
    )
    lengths = np.random.default_rng(1).lognormal(5, 1, (14, 4)).astype(int) + 1
    problem = Problem(Trace.of(lengths.tolist()), Fleet.of(shapes, "2xTP1+1xTP2+1xTP4"), atomic=True)
    assert solve(problem, method="staircase").gap > 1e-3
    certificate = solve(problem, method="dp")
    assert certificate.status == "optimal"
    assert check(certificate, problem).argument == "partition"


# ---- staircase of shapes


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=9),
    st.integers(0, 8), st.integers(1, 4), st.sampled_from([0.25, 1.0, 3.0]),
)  # fmt: skip
def test_of_one_kind_it_is_the_staircase(
    items: list[tuple[int, int]], a: int, engines: int, price: float
) -> None:
    items.sort(reverse=True)
    longest, w = np.array(items, dtype=float).T
    refuted_s = refuted_makespan(longest, w, float(a), engines)
    kind = np.array([float(a)]), np.array([price]), np.array([engines])
    assert not placeable(longest, w[None], *kind, refuted_s * (1 - 1e-6))
    assert placeable(longest, w[None], *kind, refuted_s * (1 + 1e-6))


@given(st.data(), st.integers(1, 6), st.integers(1, 3))
def test_any_prices_give_a_bound(data: st.DataObject, units: int, engines: int) -> None:
    """Whatever the prices, a makespan that some dealing attains is never refuted."""
    draw = data.draw
    longest = np.sort(draw(st.lists(st.integers(1, 20), min_size=units, max_size=units)))[::-1].astype(float)
    weights = st.lists(st.integers(0, 20), min_size=units, max_size=units)
    w = np.array([draw(weights), draw(weights)], dtype=float)
    lead = np.array(draw(st.tuples(st.integers(0, 8), st.integers(0, 8))), dtype=float)
    price = np.array(draw(st.tuples(*2 * [st.sampled_from([0.0, 0.25, 1.0, 2.0, 7.0])])))
    kind_of = draw(st.lists(st.integers(0, 1), min_size=engines, max_size=engines))
    engine_of = np.array(draw(st.lists(st.integers(0, engines - 1), min_size=units, max_size=units)))
    held = [np.flatnonzero(engine_of == e) for e in range(engines)]
    makespan = max(
        lead[k] * longest[units].max(initial=0) + w[k, units].sum()
        for k, units in zip(kind_of, held, strict=True)
    )
    assert placeable(longest, w, lead, price, np.bincount(kind_of, minlength=2), makespan)


TWO_SHAPES = profile(
    ShapeProfile(1, Affine(10e-3, 1e-3, 1e-7), 1e300, 10**6, 500, 10**9),
    ShapeProfile(4, Affine(4e-3, 0.4e-3, 3e-8), 1e300, 10**6, 500, 10**9),
)


def lognormal(requests: int, group: int, seed: int) -> Trace:
    lengths = np.random.default_rng(seed).lognormal(7, 1, (requests // group, group)).astype(int)
    return Trace.of(np.clip(lengths, 1, 16_384).tolist(), prompt_tokens=100)


def test_two_shapes_are_nearly_closed() -> None:
    """Beyond a handful of engines: nine of two shapes, 576 requests."""
    problem = Problem(lognormal(576, 1, 0), Fleet.of(TWO_SHAPES, "7xTP1+2xTP4"))
    certificate = solve(problem, method="staircase")
    assert isinstance(certificate.bound_argument, MixedBound)
    assert certificate.gap < 0.02
    assert check(certificate, problem).argument == "staircase of shapes"


# ---- integer program


@needs_ortools
@given(st.data(), tiny(4, 3), shapes_that_fit(affine_times()), st.booleans())
def test_ticks_are_seconds_rounded_down(
    data: st.DataObject, trace: Trace, fleet: Fleet, atomic: bool
) -> None:
    """For plans as good as the one at hand, the program's makespan is the simulator's, less a tick a unit."""
    problem = Problem(trace, fleet, atomic)
    first = solve(problem, method="staircase")
    question = Question.of(problem, first, 40)
    units, engines = len(question.units.members), len(fleet.engines)
    engine_of_unit = np.array(
        data.draw(st.lists(st.integers(0, engines - 1), min_size=units, max_size=units))
    )
    engine_of = np.empty(trace.n_requests, dtype=np.int64)
    for members, e in zip(question.units.members, engine_of_unit, strict=True):
        engine_of[members] = e
    order = np.argsort(-trace.output_tokens, kind="stable")
    plan = replace(first.plan, engine_of=engine_of, order=order)
    seconds = max(simulate(trace, fleet, plan).makespan_s, first.bound_argument.lower_s)
    model = question.model
    ticks = model.makespan(engine_of_unit)
    assert model.makespan(in_opening_order(model, engine_of_unit)) == ticks
    exact, at_hand = seconds * model.ticks_per_s, first.upper_s * model.ticks_per_s
    assert min(ticks, at_hand) <= exact * SLACK
    assert seconds > first.upper_s or exact * (1 - 1e-9) - units - 2 <= ticks
    assert question.read(
        [[int(e == engine) for e in range(engines)] for engine in engine_of_unit], int
    ).tolist() == (engine_of_unit.tolist())


@needs_ortools
@pytest.mark.parametrize("method", WITH_ORTOOLS)
def test_a_time_out_keeps_what_was_found(method: str) -> None:
    problem = Problem(lognormal(512, 1, 1), Fleet.of(TWO_SHAPES, "6xTP1+1xTP4"))
    first = solve(problem, method="staircase")
    certificate = solve(problem, method=method, time_limit_s=0.3)
    assert first.lower_s <= certificate.lower_s <= certificate.upper_s <= first.upper_s
    check(certificate, problem)


@needs_ortools
def test_both_formulations_prove_the_same() -> None:
    from tailopt.oracle.cpsat import cpsat

    problem = Problem(lognormal(96, 8, 2), fleet_of(Affine(10e-3, 2e-3), 3), atomic=True)
    certificates = [cpsat(problem, formulation=one, time_limit_s=30) for one in ("leader", "longest")]
    assert [c.status for c in certificates] == ["optimal", "optimal"]
    assert certificates[0].upper_s == pytest.approx(certificates[1].upper_s, rel=1e-9)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("ortools.sat.python.cp_model", "ortools.math_opt.python.mathopt"):
        monkeypatch.setitem(sys.modules, module, None)
    for method in WITH_ORTOOLS:
        with pytest.raises(InputError, match=r"needs OR-tools: pip install 'tailopt\[solvers\]'"):
            solve(Problem(Trace.of([[5]]), fleet_of(TAU, 1)), method=method)


def test_a_time_limit_must_be_positive() -> None:
    with pytest.raises(InputError, match="time limit: expected a positive number of seconds, got -1"):
        solve(Problem(Trace.of([[5]]), fleet_of(TAU, 1)), time_limit_s=-1)


# ---- arguments that were tampered with

GROUPS = Problem(lognormal(96, 8, 2), fleet_of(Affine(10e-3, 2e-3), 4), atomic=True)
SHAPES = Problem(lognormal(96, 8, 4), Fleet.of(TWO_SHAPES, "2xTP1+1xTP4"), atomic=True)


def with_argument(problem: Problem, bound: MixedBound | PartitionBound | SolverBound) -> Certificate:
    """A certificate that claims as much as an argument does."""
    first = solve(problem, method="staircase")
    lower_s = min(bound.lower_s, first.upper_s)
    return replace(first, lower_s=lower_s, bound_argument=bound, status=status(lower_s, first.upper_s))


def status(lower_s: float, upper_s: float) -> str:
    return "optimal" if upper_s <= lower_s * SLACK else "feasible"


def raised(bound, factor: float):
    return replace(bound, lower_s=bound.lower_s * factor)


def steeper(one):
    return replace(one, a_s=one.a_s * 1.01)


def steeper_kind(bound):
    first = bound.kinds[0]
    return replace(bound, kinds=(replace(first, minorant=steeper(first.minorant)), *bound.kinds[1:]))


def steeper_terms(bound):
    terms = bound.kinds[0]
    return replace(
        bound, kinds=(replace(terms, minorants=tuple(map(steeper, terms.minorants))), *bound.kinds[1:])
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: raised(b, 1.01), "may be done by"),
        (lambda b: replace(b, kinds=b.kinds[:1]), "other kinds of engines"),
        (lambda b: replace(b, weights=(1.0, 0.5, 0.0)), "not convex"),
        (lambda b: replace(b, kinds=(replace(b.kinds[0], price=-1.0), b.kinds[1])), "price is negative"),
        (steeper_kind, "not below the step times"),
        (lambda b: replace(b, kinds=b.kinds[::-1]), "not below the step times|concurrency limit"),
    ],
)  # fmt: skip
def test_checker_refuses_a_changed_staircase_of_shapes(change, complaint: str) -> None:
    bound = mixed_bound(SHAPES, units_of(SHAPES), solve(SHAPES, method="staircase").upper_s)
    assert bound is not None
    check(with_argument(SHAPES, bound), SHAPES)
    with pytest.raises(InputError, match=complaint):
        check(with_argument(SHAPES, change(bound)), SHAPES)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: raised(b, 1 + 1e-6), "may be done by"),
        (lambda b: replace(b, kinds=b.kinds[:1]), "other kinds of engines"),
        (steeper_terms, "not below the step times"),
    ],
)
def test_checker_refuses_a_changed_partition(change, complaint: str) -> None:
    certificate = solve(SHAPES, method="dp")
    bound = certificate.bound_argument
    assert isinstance(bound, PartitionBound)
    changed = change(bound)
    claimed = min(changed.lower_s, certificate.upper_s)
    with pytest.raises(InputError, match=complaint):
        check(replace(certificate, bound_argument=changed, lower_s=claimed), SHAPES)


@needs_ortools
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: replace(b, digest="0" * 64), "another program"),
        (lambda b: replace(b, ticks=b.ticks // 2), "gives only"),
        (lambda b: replace(b, ticks_per_s=b.ticks_per_s / 2), "another program"),
        (lambda b: replace(b, bits=3), "more ticks than allowed for"),
        (lambda b: replace(b, known=raised(b.known, 1.001)), "may be done by|another program"),
        (steeper_terms, "not below the step times"),
    ],
)
def test_checker_refuses_a_changed_program(change, complaint: str) -> None:
    certificate = solve(GROUPS, method="cpsat")
    bound = certificate.bound_argument
    assert isinstance(bound, SolverBound)
    assert "trusted" in check(certificate, GROUPS).argument
    with pytest.raises(InputError, match=complaint):
        check(replace(certificate, bound_argument=change(bound)), GROUPS)


@pytest.mark.parametrize(
    "tau", [MaxAffine(((12e-3, 0, 0), (5e-3, 1e-3, 0))), Table([1, 8, 16], [1, 2, 4], padded=True)]
)
def test_curves_that_are_not_concave_leave_an_honest_gap(tau: StepTime) -> None:
    problem = Problem(lognormal(10, 1, 5), fleet_of(tau, 2))
    certificate = solve(problem, method="dp")
    assert certificate.lower_s < certificate.upper_s
    check(certificate, problem)
