"""Bounds below the brute-force optimum, plans above it, and a checker that believes neither."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import (
    affine_terms,
    concave_step_times,
    exact_step_times,
    fleet_of,
    fleets,
    plans,
    profile,
    step_times,
    traces,
)

from tailopt.engine.catalogue import load_engine
from tailopt.engine.decode_time import decode_time_s
from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime
from tailopt.errors import InputError
from tailopt.oracle.alone import alone_bound, concave
from tailopt.oracle.any_bound import admissible, dual_bound_s, lower_any_s
from tailopt.oracle.brute import brute_force
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.check import ARGUMENTS, check, check_any
from tailopt.oracle.minorant import minorants
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.oracle.staircase import StaircaseBound, refuted_makespan
from tailopt.oracle.units import units_of
from tailopt.plan import Engine, Fleet, Plan
from tailopt.simulate import simulate
from tailopt.trace import Trace

EXAMPLES = settings().max_examples
SLACK = 1 + 1e-9


def tiny_traces() -> st.SearchStrategy[Trace]:
    return traces(most_groups=3, most_samples=2, longest=8, prompts=6)


def bracketed(problem: Problem, *, orders: bool) -> None:
    """Solve, check, and hold both ends against brute force."""
    certificate = solve(problem)
    optimum_s, plan = brute_force(problem, orders=orders)
    assert certificate.lower_s <= optimum_s * SLACK
    assert optimum_s <= certificate.upper_s * SLACK
    assert lower_any_s(problem.trace, problem.fleet).lower_s <= optimum_s * SLACK
    assert simulate(problem.trace, problem.fleet, plan).makespan_s == pytest.approx(optimum_s, rel=1e-9)
    checked = check(certificate, problem)
    assert checked.lower_s >= certificate.lower_s
    assert checked.upper_s == pytest.approx(certificate.upper_s, rel=1e-9)


@settings(max_examples=10 * EXAMPLES)
@given(traces(most_groups=5, most_samples=1, longest=9, prompts=6), affine_terms(), st.integers(1, 3))
def test_requests_on_affine_engines(trace: Trace, terms: tuple[float, float, float], engines: int) -> None:
    bracketed(Problem(trace, fleet_of(Affine(*terms), engines)), orders=False)


@settings(max_examples=5 * EXAMPLES)
@given(traces(most_groups=5, most_samples=3, longest=9, prompts=6), affine_terms(), st.integers(1, 3))
def test_groups_on_affine_engines(trace: Trace, terms: tuple[float, float, float], engines: int) -> None:
    bracketed(Problem(trace, fleet_of(Affine(*terms), engines), atomic=True), orders=False)


@settings(max_examples=5 * EXAMPLES)
@given(
    traces(most_groups=4, most_samples=2, longest=9, prompts=6),
    concave_step_times(), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_concave_engines(trace: Trace, tau: StepTime, engines: int, atomic: bool) -> None:
    bracketed(Problem(trace, fleet_of(tau, engines), atomic), orders=False)


@settings(max_examples=EXAMPLES // 2)
@given(st.data())
def test_any_engines_with_limits_and_orders(data: st.DataObject) -> None:
    """Any step time, mixed shapes, small caches and few slots, every order and every limit tried."""
    trace = data.draw(tiny_traces())
    assume(trace.n_requests <= 4)
    fleet = data.draw(fleets(trace, step_times(), most_engines=2))
    bracketed(Problem(trace, fleet, data.draw(st.booleans())), orders=True)


@settings(max_examples=2 * EXAMPLES)
@given(st.data())
def test_no_plan_beats_the_bounds(data: st.DataObject) -> None:
    """Whatever the plan, shared queue included; larger batches than brute force can take."""
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, step_times()))
    plan = data.draw(plans(trace, fleet))
    makespan_s = simulate(trace, fleet, plan).makespan_s
    assert lower_any_s(trace, fleet).lower_s <= makespan_s * SLACK
    certificate = solve(Problem(trace, fleet, plan.atomic))
    assert certificate.lower_s <= makespan_s * SLACK
    check(certificate, Problem(trace, fleet, plan.atomic))


@given(traces(most_groups=8, longest=9, prompts=60), concave_step_times(), st.sampled_from([4.0, 1e300]))
def test_the_slowest_request_alone_is_found(trace: Trace, tau: StepTime, prefill_tokens_per_s: float) -> None:
    """Each is timed, also those that are shorter and read less than another one."""
    shape = ShapeProfile(1, tau, prefill_tokens_per_s, 10**6, 1000, block_tokens=16, prefix_caching=True)
    problem = Problem(trace, Fleet(profile(shape), (Engine(1),), 1))
    units = units_of(problem)
    alone_s = [
        float(decode_time_s(tau, trace.context_tokens[members], trace.output_tokens[members])) + prefill_s
        for members, prefill_s in zip(units.members, units.prefill_s, strict=True)
    ]
    bound = alone_bound(problem, units)
    assert bound is not None
    assert bound.lower_s == pytest.approx(max(alone_s), rel=1e-10)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=7),
    st.integers(0, 8), st.integers(1, 4),
)  # fmt: skip
def test_refuted_makespan_is_the_least_over_all_leaders(
    items: list[tuple[int, int]], a: int, engines: int
) -> None:
    """(nested) tried for every choice of leaders, one by one: the bisection finds the same makespan."""
    items.sort(reverse=True)
    length, w = np.array(items, dtype=float).T
    total = np.concatenate([[0.0], np.cumsum(w)])
    least = np.inf
    for chosen in product([False, True], repeat=len(items) - 1):
        leaders = [0, *(i + 1 for i, is_leader in enumerate(chosen) if is_leader)]
        if len(leaders) <= engines:
            ends = [*leaders[1:], len(items)]
            held = [(total[end] + a * length[leaders[: j + 1]].sum()) / (j + 1) for j, end in enumerate(ends)]
            least = min(least, max(held))
    least = max(least, (a * length + w).max())
    assert refuted_makespan(length, w, float(a), engines) == pytest.approx(least, rel=1e-9)


@given(st.data())
def test_minorants_lie_below(data: st.DataObject) -> None:
    times = data.draw(st.lists(step_times(), min_size=1, max_size=2))
    n_max = data.draw(st.integers(1, 30))
    n, context = np.meshgrid(np.arange(1, n_max + 1), [0, 1, 7, 50, 400, 10_000])
    for minorant in minorants([tau.lines(n_max) for tau in times], n_max):
        line = minorant.a_s + minorant.b_s * n + minorant.c_s * context
        assert min(minorant.a_s, minorant.b_s, minorant.c_s) >= 0
        assert all((line <= tau(n, context)).all() for tau in times)


@given(affine_terms(), st.integers(2, 40))
def test_the_minorant_of_an_affine_step_time_is_itself(terms: tuple[float, float, float], n_max: int) -> None:
    found = [(m.a_s, m.b_s, m.c_s) for m in minorants([Affine(*terms).lines(n_max)], n_max)]
    assert any(np.allclose(one, terms, rtol=1e-11) for one in found)


@given(traces(), exact_step_times(), st.floats(0, 1), st.floats(0, 2), st.floats(0, 2))
def test_any_multipliers_give_a_bound(
    trace: Trace, tau: StepTime, theta: float, mu: float, kappa: float
) -> None:
    """The dual bound holds whatever a solver proposes: here, numbers out of the air."""
    fleet = fleet_of(tau, 2, kv_capacity_tokens=5 * int((trace.prompt_tokens + trace.output_tokens).max()))
    shapes = list(fleet.profile.shapes.values())
    multipliers = admissible(trace, shapes, fleet.gpus, theta, mu, kappa)
    bound = dual_bound_s(trace, shapes, fleet.gpus, *multipliers)
    order = np.argsort(-trace.output_tokens)
    plan = Plan(fleet.engines, np.arange(trace.n_requests) % 2, order)
    assert bound <= simulate(trace, fleet, plan).makespan_s * SLACK


@given(st.data())
def test_checker_agrees_on_bounds_for_any_policy(data: st.DataObject) -> None:
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, step_times()))
    bound = lower_any_s(trace, fleet)
    lower_s, _ = check_any(bound, Problem(trace, fleet))
    assert bound.lower_s <= lower_s
    assert bound.lower_s == pytest.approx(float(lower_s), rel=1e-6)


def test_linear_program_sees_that_work_must_be_shared() -> None:
    """64 equal requests on two GPUs: the longest alone takes 400 steps, all of them 200 GPU-steps each."""
    trace = Trace.of([[400] * 64])
    fleet = fleet_of(Affine(1.0, 1.0), 2)
    bound = lower_any_s(trace, fleet)
    assert bound.alone_s == pytest.approx(800)
    assert 0.99 <= bound.lower_s / (400 * (1.0 + 32)) <= 1  # 32 on each is best, and nearly proven


CROWDED = Problem(
    Trace.of([[300, 200], [250, 50], [90, 80], [40, 30]], prompt_tokens=20),
    fleet_of(Affine(1.0, 0.125, 1 / 1024), 2, kv_capacity_tokens=700, max_running=3),
)


def test_certificate_of_a_crowded_batch() -> None:
    certificate = solve(CROWDED, method="staircase")
    assert certificate.status == "feasible"
    assert 0 < certificate.gap < 0.2
    assert check(certificate, CROWDED).argument in {"staircase", "linear program"}


def on_one_engine(certificate: Certificate) -> Plan:
    return replace(certificate.plan, engine_of=certificate.plan.engine_of * 0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: {"lower_s": c.upper_s, "status": "optimal"}, "the argument gives only"),
        (lambda c: {"upper_s": c.upper_s * 1.01}, "the plan takes"),
        (lambda c: {"plan": on_one_engine(c)}, "the plan takes"),
        (lambda c: {"plan": replace(on_one_engine(c), engines=(Engine(1),))}, "other engines"),
        (lambda c: {"plan": replace(c.plan, engine_of=c.plan.engine_of * 0 - 1)}, "not static"),
    ],
)
def test_checker_refuses_a_changed_certificate(change, complaint: str) -> None:
    certificate = solve(CROWDED, method="staircase")
    with pytest.raises(InputError, match=complaint):
        check(replace(certificate, **change(certificate)), CROWDED)


STAIRCASE = Problem(Trace.of([[300], [250], [90], [80], [70], [60]]), fleet_of(Affine(1.0, 0.5), 2))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: replace(b, lower_s=b.lower_s * 1.05), "may be done by"),
        (lambda b: replace(b, minorant=replace(b.minorant, a_s=1.01)), "not below the step times"),
        (lambda b: replace(b, minorant=replace(b.minorant, c_s=1e-6)), "not below the step times"),
        (lambda b: replace(b, rays=(), minorant=replace(b.minorant, n_max=3)), "first concurrency limit"),
        (lambda b: replace(b, weights=(1.0, 0.5, 0.0)), "not convex"),
        (lambda b: replace(b, weights=(-1.0, 0.0, 0.0)), "not convex"),
        (lambda b: replace(b, minorant=replace(b.minorant, n_max=2)), "3 requests can run together within"),
        (lambda b: replace(b, rays=(replace(b.rays[0], b_s=2.0), *b.rays[1:])), "not below the step times"),
    ],
)  # fmt: skip
def test_checker_refuses_a_changed_staircase_argument(change, complaint: str) -> None:
    certificate = solve(STAIRCASE, method="staircase")
    assert isinstance(certificate.bound_argument, StaircaseBound)
    with pytest.raises(InputError, match=complaint):
        check(replace(certificate, bound_argument=change(certificate.bound_argument)), STAIRCASE)


def test_checker_refuses_inadmissible_multipliers() -> None:
    bound = lower_any_s(CROWDED.trace, CROWDED.fleet)
    with pytest.raises(InputError, match="cost more than a step"):
        check_any(replace(bound, mu_s=1e3), CROWDED)


def test_checker_refuses_a_spread_group() -> None:
    problem = replace(STAIRCASE, trace=Trace.of([[300, 250], [90, 80]]), atomic=True)
    certificate = solve(problem)
    spread = Plan(certificate.plan.engines, [0, 1, 0, 1], certificate.plan.order)
    with pytest.raises(InputError, match="spreads a group"):
        check(replace(certificate, plan=spread), problem)


def test_checker_refuses_concavity_that_is_not_there() -> None:
    problem = Problem(Trace.of([[30, 20], [10, 5]]), fleet_of(Power(1.0, 1.0, 0.5), 2), atomic=True)
    certificate = solve(problem)
    kinked = replace(problem, fleet=fleet_of(MaxAffine(((2.0, 0, 0), (1.0, 0.75, 0))), 2))
    upper_s = simulate(kinked.trace, kinked.fleet, certificate.plan).makespan_s
    moved = replace(
        certificate, lower_s=min(certificate.lower_s, upper_s), upper_s=upper_s, status="feasible"
    )
    with pytest.raises(InputError, match=r"no function|not concave"):
        check(moved, kinked)


def test_concave() -> None:
    assert concave(Affine(0.1, 0.3).lines(256))
    assert concave(Power(0.1, 0.3, 0.7).lines(256))
    assert not concave(MaxAffine(((1.0, 0, 0), (0.5, 0.1, 0))).lines(256))


def test_certificate_must_not_call_an_open_gap_optimal() -> None:
    certificate = solve(STAIRCASE)
    fields = {name: getattr(certificate, name) for name in ("plan", "method", "bound_argument", "wall_s")}
    with pytest.raises(InputError, match=r"called optimal with a gap of 0\.5"):
        Certificate(lower_s=1.0, upper_s=1.5, status="optimal", **fields)
    with pytest.raises(InputError, match=r"lower bound 2.0 s, upper bound 1.5 s"):
        Certificate(lower_s=2.0, upper_s=1.5, status="feasible", **fields)


def test_unknown_method_is_refused() -> None:
    with pytest.raises(InputError, match="method 'magic': unknown; known: staircase"):
        solve(STAIRCASE, method="magic")


def test_more_engines_than_units() -> None:
    problem = Problem(Trace.of([[30], [20]]), fleet_of(Affine(1.0, 0.5), 5))
    certificate = solve(problem)
    assert certificate.status == "optimal"
    assert certificate.upper_s == pytest.approx(45.0)


def test_brute_force_refuses_what_is_not_tiny() -> None:
    with pytest.raises(InputError, match="too many"):
        brute_force(Problem(Trace.of([[5]] * 30), fleet_of(Affine(1.0, 0.5), 3)))


def test_a_fleet_of_two_shapes_is_bracketed() -> None:
    from strategies import profile

    from tailopt.engine.profile import ShapeProfile

    shapes = profile(
        ShapeProfile(1, Affine(10e-3, 1e-3, 1e-7), 1e4, 10**5, 64),
        ShapeProfile(2, Affine(6e-3, 0.6e-3, 1e-7), 1e4, 10**5, 64),
    )
    fleet = Fleet(shapes, (Engine(1), Engine(1), Engine(2)), 4)
    trace = Trace.of([[9000, 7000], [400, 300, 200], [100, 50]], prompt_tokens=100)
    certificate = solve(Problem(trace, fleet))
    assert certificate.gap < 0.15
    check(certificate, Problem(trace, fleet))


def test_an_argument_too_large_to_compute_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(
        Trace.of([[4], [3]]), Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1), Engine(1)), 2)
    )
    certificate = solve(problem, method="staircase")

    def overflows(*_: object) -> None:
        np.zeros(1, dtype=np.int64)[0] = 2**63

    monkeypatch.setitem(ARGUMENTS, type(certificate.bound_argument), overflows)
    with pytest.raises(InputError, match="too large to compute with"):
        check(certificate, problem)
