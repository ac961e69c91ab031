"""``solve_stochastic``: one plan for all scenarios, and how far it is from the best one at most.

scenarios -> annealing -> plan, simulated in each -> clairvoyant bound of each -> co-location bound
"""

import time

import numpy as np

from tailopt.oracle.solve import solve
from tailopt.oracle.stochastic.certificate import StochasticCertificate
from tailopt.oracle.stochastic.colocation import ITERATIONS, colocation_bound
from tailopt.oracle.stochastic.problem import StochasticProblem
from tailopt.plan import Plan
from tailopt.policies.annealing import Outcomes, anneal, value_s


def best_plan(problem: StochasticProblem, *, time_limit_s: float | None = None, seed: int = 0) -> Plan:
    """The best plan that annealing finds; within an engine, requests longest on average first."""
    return _plan(problem, _outcomes(problem), time_limit_s, seed)


def solve_stochastic(
    problem: StochasticProblem,
    *,
    time_limit_s: float | None = None,
    seed: int = 0,
    iterations: int = ITERATIONS,
) -> StochasticCertificate:
    """Find a plan for all scenarios, and bound the value of every plan from below.

    Args:
        problem: batch, fleet and scenarios.
        time_limit_s: for the search, and again for the co-location bound; the clairvoyant bounds are quick
            and always computed.
        seed: of the search.
        iterations: of the co-location bound.

    Raises:
        InputError: if a request can never fit an engine.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Engine, Fleet
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1), Engine(1)), gpus=2)
    >>> batch = Trace.of([[1], [1], [1], [1]])
    >>> scenarios = [[900, 100, 800, 200], [100, 900, 200, 800]]  # which of a pair is long, nobody knows
    >>> found = solve_stochastic(StochasticProblem(batch, fleet, scenarios))
    >>> 0 <= found.gap < 0.01, found.price[0] >= 1
    (True, True)
    """
    started = time.perf_counter()
    outcomes = _outcomes(problem)
    plan = _plan(problem, outcomes, time_limit_s, seed)
    plan_s = time.perf_counter() - started
    makespans_s = problem.makespans_s(plan)
    upper_s = value_s(makespans_s, problem.worst)
    clairvoyant = tuple(solve(problem.scenario(s)) for s in range(problem.scenarios))
    known_s = np.array([found.lower_s for found in clairvoyant])
    bound = colocation_bound(
        problem, outcomes, known_s, makespans_s, iterations=iterations, time_limit_s=time_limit_s
    )
    lower_s = value_s(known_s, problem.worst) * (1 - 1e-12)
    if bound is None or bound.lower_s <= lower_s:
        bound = None
    else:
        lower_s = bound.lower_s
    return StochasticCertificate(
        lower_s=min(lower_s, upper_s),
        upper_s=upper_s,
        plan=plan,
        clairvoyant=clairvoyant,
        bound=bound,
        worst=problem.worst,
        plan_s=plan_s,
        wall_s=time.perf_counter() - started,
        seed=seed,
    )


def _outcomes(problem: StochasticProblem) -> Outcomes:
    return Outcomes.of(
        problem.fleet, problem.unit, problem.trace.context_tokens, problem.scenario_tokens.astype(np.float64)
    )


def _plan(problem: StochasticProblem, outcomes: Outcomes, time_limit_s: float | None, seed: int) -> Plan:
    rng = np.random.default_rng(seed)
    engine_of_unit = anneal(outcomes, rng, worst=problem.worst, time_limit_s=time_limit_s)
    longest_first = np.argsort(-problem.scenario_tokens.mean(axis=0), kind="stable")
    return Plan(problem.fleet.engines, engine_of_unit[problem.unit], longest_first, atomic=problem.atomic)
