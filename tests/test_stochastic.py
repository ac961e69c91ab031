"""The stochastic oracle, its search, the scenarios it draws, and its checker."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import concave_step_times, fleet_of, step_times, traces

from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime
from tailopt.errors import InputError
from tailopt.oracle.stochastic.check import check_stochastic
from tailopt.oracle.stochastic.problem import StochasticProblem
from tailopt.oracle.stochastic.solve import best_plan, solve_stochastic
from tailopt.plan import Engine, Plan, View
from tailopt.policies import resolve_policy
from tailopt.policies.annealing import Outcomes, anneal, engine_times_s, value_s
from tailopt.predict import resolve_predictor
from tailopt.predict.prompt_distribution import prompt_distribution
from tailopt.simulate import simulate
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import Batch, sample_batches

CONCAVE = concave_step_times()
SEPARABLE = step_times().filter(lambda step_time: step_time.lines(2).separable)


@st.composite
def problems(
    draw: st.DrawFn, times: st.SearchStrategy[StepTime] = CONCAVE, most_groups: int = 5
) -> StochasticProblem:
    """Small problems with equal and unequal scenarios, groups or free samples, a mean or the worst few."""
    trace = draw(traces(most_groups=most_groups, most_samples=2))
    n = trace.n_requests
    length = st.one_of(st.integers(1, 40), st.sampled_from([1, 20, 40]))
    drawn = draw(st.lists(st.lists(length, min_size=n, max_size=n), min_size=1, max_size=4))
    fleet = fleet_of(draw(times), draw(st.integers(1, 3)))
    return StochasticProblem(
        trace, fleet, np.array(drawn), atomic=draw(st.booleans()), worst=draw(st.integers(1, len(drawn)))
    )


def outcomes_of(problem: StochasticProblem) -> Outcomes:
    tokens = problem.scenario_tokens.astype(float)
    return Outcomes.of(problem.fleet, problem.unit, problem.trace.context_tokens, tokens)


def best_by_trying_all(problem: StochasticProblem) -> float:
    units, engines = int(problem.unit.max()) + 1, problem.fleet.engines
    order = np.arange(problem.trace.n_requests)
    return min(
        value_s(problem.makespans_s(Plan(engines, np.array(of)[problem.unit], order)), problem.worst)
        for of in product(range(len(engines)), repeat=units)
    )


@settings(max_examples=40, deadline=None)
@given(problems())
def test_bound_below_every_plan_and_checked(problem: StochasticProblem) -> None:
    found = solve_stochastic(problem, iterations=120)
    if len(problem.fleet.engines) ** (int(problem.unit.max()) + 1) <= 250:
        optimum = best_by_trying_all(problem)
        assert found.lower_s <= optimum * (1 + 1e-9) <= found.upper_s * (1 + 2e-9)
    assert check_stochastic(found, problem) in ("clairvoyant", "co-location")


@settings(max_examples=60, deadline=None)
@given(problems(times=SEPARABLE, most_groups=6), st.data())
def test_engine_times_are_the_simulators(problem: StochasticProblem, data: st.DataObject) -> None:
    outcomes = outcomes_of(problem)
    engines = st.integers(0, len(problem.fleet.engines) - 1)
    engine_of = np.array(data.draw(st.lists(engines, min_size=outcomes.units, max_size=outcomes.units)))
    plan = Plan(problem.fleet.engines, engine_of[problem.unit], np.arange(problem.trace.n_requests))
    times = engine_times_s(outcomes, engine_of)
    for s in range(problem.scenarios):
        run = simulate(problem.scenario(s).trace, problem.fleet, plan)
        np.testing.assert_allclose(times[:, s], run.engine_finish_s, rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(problems(times=SEPARABLE), st.integers(0, 2**32 - 1))
def test_search_never_loses_to_its_start_and_is_reproducible(problem: StochasticProblem, seed: int) -> None:
    outcomes = outcomes_of(problem)
    start = np.random.default_rng(seed).integers(len(problem.fleet.engines), size=outcomes.units)

    def searched() -> np.ndarray:
        return anneal(outcomes, np.random.default_rng(seed), worst=problem.worst, start=start, moves=300)

    found = searched()
    assert (found == searched()).all()
    if outcomes.affine:  # other step times are searched on their nearest affine one first
        before, after = (
            value_s(engine_times_s(outcomes, of).max(axis=0), problem.worst) for of in (start, found)
        )
        assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize(
    "step_time", [Affine(6e-3, 4e-4), Power(6e-3, 4e-3, 0.5, 1e-8)], ids=["affine", "power"]
)
@pytest.mark.parametrize("worst", [0, 3])
def test_search_finds_the_best_of_small_problems(step_time: Affine | Power, worst: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(3):
        tokens = np.rint(np.exp(rng.normal(6, 1, (10, 6)))).astype(int) + 1
        problem = StochasticProblem(Trace.of([[1]] * 6), fleet_of(step_time, 3), tokens, worst=worst)
        outcomes = outcomes_of(problem)
        found = value_s(problem.makespans_s(best_plan(problem)), problem.worst)
        every = (np.array(engine_of) for engine_of in product(range(3), repeat=6))
        best = min(value_s(engine_times_s(outcomes, of).max(axis=0), problem.worst) for of in every)
        assert found == pytest.approx(best, rel=1e-9)


def real_problem(prompts: int = 12, scenarios: int = 12) -> StochasticProblem:
    (batch,) = sample_batches(
        load_bundled("gpqa-deepseek-reasoner"), batches=1, prompts=prompts, samples=4, seed=0
    )
    drawn = prompt_distribution(batch, np.random.default_rng(0), scenarios=scenarios)
    shorter = np.ceil(drawn / 100)  # the checker counts step by step
    return StochasticProblem(batch.trace, fleet_of(Affine(6.42e-3, 0.4e-3), 3), shorter, atomic=True)


def test_co_location_beats_knowing_the_scenario() -> None:
    problem = real_problem()
    found = solve_stochastic(problem, iterations=600)
    assert found.bound is not None
    assert found.lower_s > 1.01 * found.clairvoyant_s[0]
    assert check_stochastic(found, problem) == "co-location"
    assert 1 < found.price[0] <= found.price[1]


def test_checker_refuses_what_does_not_hold() -> None:
    problem = real_problem()
    found = solve_stochastic(problem, iterations=600)
    bound = found.bound
    assert bound is not None
    heavier, lighter, lopsided = 1.01 * bound.weight, bound.weight.copy(), 1.01 * bound.vectors
    lighter[0, 0] = -1e-3
    tampered = {
        "argument gives only": replace(found, lower_s=min(found.lower_s * 1.001, found.upper_s)),
        "more than": replace(found, bound=replace(bound, weight=heavier)),
        "negative": replace(found, bound=replace(bound, weight=lighter)),
        "gives only": replace(found, bound=replace(bound, vectors=lopsided)),
        "another value": replace(found, upper_s=found.upper_s * 1.001),
        "no clairvoyant": replace(found, clairvoyant=found.clairvoyant[1:]),
        "another problem": replace(found, bound=replace(bound, weight=bound.weight[:, 1:])),
    }
    for complaint, wrong in tampered.items():
        with pytest.raises(InputError, match=complaint):
            check_stochastic(wrong, problem)
    with pytest.raises(InputError):
        check_stochastic(replace(found, bound=None, lower_s=found.lower_s), problem)


def test_time_limit_and_worst_are_honoured() -> None:
    problem = real_problem()
    found = solve_stochastic(replace(problem, worst=3), time_limit_s=1e-6)
    assert found.lower_s <= found.upper_s
    assert found.upper_s >= solve_stochastic(problem, iterations=1).upper_s * 0.999


def test_unequal_engines_and_curves_without_the_bound() -> None:
    kinked = fleet_of(MaxAffine(((12e-3, 0.0, 0.0), (5e-3, 1e-3, 0.0))), 2)
    asked = StochasticProblem(Trace.of([[1], [1]]), kinked, [[5, 9]])
    assert check_stochastic(solve_stochastic(asked), asked) == "clairvoyant"
    uneven = replace(fleet_of(Affine(6e-3, 1e-3), 2), engines=(Engine(1), Engine(1, max_running=7)))
    problem = StochasticProblem(Trace.of([[1], [1], [1]]), uneven, [[5, 9, 4], [7, 8, 2]])
    found = solve_stochastic(problem)
    assert found.bound is None
    assert check_stochastic(found, problem) == "clairvoyant"


@pytest.mark.parametrize(
    ("tokens", "worst", "complaint"),
    [
        ([], 0, "at least one scenario"),
        ([[1, 2]], 0, "expected 3"),
        ([[1, 2, 0]], 0, "at least 1"),
        ([[1, 2, 3]], 2, "worst"),
    ],
)
def test_bad_problems(tokens: list[list[int]], worst: int, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        StochasticProblem(Trace.of([[1], [1], [1]]), fleet_of(Affine(1.0, 1.0), 2), tokens, worst=worst)


# ---- scenarios and the policy


def batch_of(history: Trace | None) -> Batch:
    return Batch(Trace.of([[10, 10], [10, 10], [10, 10]]), history, seed=3)


def test_scenarios_follow_the_history_and_share_a_prompts_luck() -> None:
    history = Trace.of([[100, 130, 110], [1000, 700, 900], [5000, 8000, 6000]])
    drawn = np.log(prompt_distribution(batch_of(history), np.random.default_rng(0), scenarios=4000))
    assert (np.diff(drawn.mean(axis=0)[::2]) > 1).all()
    within, across = np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1], np.corrcoef(drawn[:, 0], drawn[:, 2])[0, 1]
    assert within > 0.1 > abs(across)
    assert np.exp(drawn.max()) <= 8000.5


def test_scenarios_with_little_history() -> None:
    one = prompt_distribution(batch_of(Trace.of([[100]])), np.random.default_rng(0), scenarios=50)
    assert one.shape == (50, 6)
    assert (one >= 1).all()
    assert (one <= 100).all()
    with pytest.raises(InputError, match="leaves none to learn from"):
        prompt_distribution(batch_of(None), np.random.default_rng(0))
    with pytest.raises(InputError, match="at least 1"):
        prompt_distribution(batch_of(Trace.of([[100]])), np.random.default_rng(0), scenarios=0)


HISTORIES = st.lists(
    st.lists(st.integers(1, 10**5), min_size=1, max_size=5)
    | st.integers(1, 10**5).map(lambda length: [length] * 4),
    min_size=3,
    max_size=3,
)


@given(HISTORIES, st.integers(0, 2**32 - 1))
def test_scenarios_depend_on_the_seed_and_not_on_the_order_of_the_history(
    history: list[list[int]], seed: int
) -> None:
    def drawn(rows: list[list[int]]) -> np.ndarray:
        return prompt_distribution(batch_of(Trace.of(rows)), np.random.default_rng(seed), scenarios=30)

    found = drawn(history)
    np.testing.assert_array_equal(found, drawn(history))
    np.testing.assert_allclose(found, drawn([rows[::-1] for rows in history]), rtol=1e-6, atol=1.0)
    assert found.shape == (30, 6)
    assert found.min() >= 1
    assert found.max() <= max(map(max, history))
    assert (found == np.rint(found)).all()


@given(HISTORIES, st.sampled_from([2, 10]), st.integers(0, 2**32 - 1))
def test_scenarios_scale_with_the_history(history: list[list[int]], factor: int, seed: int) -> None:
    """As long as no length is cut at one token, only the unit of length changes."""

    def drawn(unit: int) -> np.ndarray:
        scaled = [[length * unit * 100 for length in rows] for rows in history]
        return prompt_distribution(batch_of(Trace.of(scaled)), np.random.default_rng(seed), scenarios=30)

    small, large = drawn(1), drawn(factor)
    inner = small > 1
    np.testing.assert_allclose(large[inner], factor * small[inner], rtol=1e-5, atol=factor)


def test_samples_of_a_prompt_are_exchangeable() -> None:
    history = Trace.of([[100, 130, 110, 400], [1000, 700, 900, 800], [5000, 8000, 6000, 5500]])
    logs = np.log(prompt_distribution(batch_of(history), np.random.default_rng(0), scenarios=20_000))
    first, second = logs[:, ::2], logs[:, 1::2]
    np.testing.assert_allclose(first.mean(axis=0), second.mean(axis=0), atol=0.03)
    np.testing.assert_allclose(first.std(axis=0), second.std(axis=0), rtol=0.05)
    longer = (first > second).mean(axis=0) + (first == second).mean(axis=0) / 2
    np.testing.assert_allclose(longer, 0.5, atol=0.015)


def test_histories_without_spread_are_repeated() -> None:
    """Prompts whose samples are all equal tell that lengths do not vary."""
    same = Trace.of([[100] * 4, [1000] * 4, [5000] * 4])
    drawn = prompt_distribution(batch_of(same), np.random.default_rng(0), scenarios=50)
    np.testing.assert_allclose(drawn, np.tile([100, 100, 1000, 1000, 5000, 5000], (50, 1)), atol=1)


def test_policy_takes_scenarios_from_the_predictor() -> None:
    trace = load_bundled("gpqa-gpt-5.2-xhigh")
    (batch,) = sample_batches(trace, batches=1, prompts=12, samples=4, seed=1)
    predictor = resolve_predictor("prompt_distribution(scenarios=20)")
    scenarios = predictor.scenarios(batch)
    assert scenarios is not None
    np.testing.assert_allclose(predictor(batch), scenarios.mean(axis=0))
    assert resolve_predictor("prompt_mean").scenarios(batch) is None
    view = View.at_start(
        batch.trace, fleet_of(Affine(6e-3, 4e-4), 3), predictor(batch), scenario_tokens=scenarios, atomic=True
    )
    policy = resolve_policy("sample_mean")
    plan = policy(view)
    assert (plan.engine_of == policy(view).engine_of).all()
    assert (policy(replace(view, scenario_tokens=None)).engine_of != plan.engine_of).any()
    with pytest.raises(InputError, match="worst_share"):
        resolve_policy("sample_mean(worst_share=0)")(view)
    with pytest.raises(InputError, match="scenario_tokens"):
        replace(view, scenario_tokens=scenarios[:, 1:])
