"""An independent checker of stochastic certificates, in exact rational arithmetic.

It shares no code with the search or the bound. **Upper end:** the plan, simulated step by step in each
scenario, has the value claimed. **Lower end:** each clairvoyant certificate stands by itself
(:mod:`tailopt.oracle.check`); the co-location bound is the sum that
:mod:`tailopt.oracle.stochastic.colocation` proves, written out: the weights are admissible, the step time
is concave, and (engine) and (share) added up give the bound.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np

from tailopt.engine.step_time import MaxAffine
from tailopt.oracle.certificate import status_of
from tailopt.oracle.check import TOLERANCE, check
from tailopt.oracle.check_parts import area, concave_rises, require
from tailopt.oracle.stochastic.certificate import StochasticCertificate
from tailopt.oracle.stochastic.colocation import CoLocationBound
from tailopt.oracle.stochastic.problem import StochasticProblem


def check_stochastic(certificate: StochasticCertificate, problem: StochasticProblem) -> str:
    """Verify a certificate; the name of the argument that proves its lower end.

    Raises:
        InputError: naming the first step that does not hold.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.oracle.stochastic.solve import solve_stochastic
    >>> from tailopt.plan import Engine, Fleet
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1), Engine(1)), gpus=2)
    >>> problem = StochasticProblem(Trace.of([[1], [1], [1]]), fleet, [[90, 10, 80], [10, 90, 80]])
    >>> check_stochastic(solve_stochastic(problem), problem) in ("clairvoyant", "co-location")
    True
    """
    require(certificate.worst == problem.worst, "it counts another number of scenarios")
    require(len(certificate.clairvoyant) == problem.scenarios, "a scenario has no clairvoyant bound")
    known, makespans = [], []
    simulated_s = problem.makespans_s(certificate.plan)
    for s, clairvoyant in enumerate(certificate.clairvoyant):
        asked, upper_s = problem.scenario(s), float(simulated_s[s])
        check(clairvoyant, asked)
        status = status_of(clairvoyant.lower_s, upper_s)
        checked = check(replace(clairvoyant, upper_s=upper_s, plan=certificate.plan, status=status), asked)
        known.append(Fraction(clairvoyant.lower_s))
        makespans.append(Fraction(checked.upper_s))
    value = _mean_of_worst(makespans, problem.worst)
    require(abs(Fraction(certificate.upper_s) - value) <= TOLERANCE * value, "the plan has another value")
    if certificate.bound is None:
        lower, argument = _mean_of_worst(known, problem.worst), "clairvoyant"
    else:
        lower, argument = _co_location(certificate.bound, problem, known), "co-location"
    require(Fraction(certificate.lower_s) <= lower, f"the argument gives only {float(lower)} s")
    return argument


def _mean_of_worst(seconds: list[Fraction], worst: int) -> Fraction:
    return sum(sorted(seconds)[len(seconds) - worst :], Fraction(0)) / worst


def _co_location(bound: CoLocationBound, problem: StochasticProblem, known: list[Fraction]) -> Fraction:
    unit = problem.unit.tolist()
    units, scenarios = max(unit) + 1, problem.scenarios
    shape = problem.fleet.shape_of(0)
    require(problem.fleet.identical, "the engines differ")
    single = not isinstance(shape.step_time, MaxAffine) or len(shape.step_time.pieces) == 1
    require(single, "a step time is no function f(n) + c K")
    f = [Fraction(float(shape.step_time(n, 0))) for n in range(len(unit) + 1)]
    require(concave_rises(f), "the step time is not concave")
    require(
        bound.weight.shape == (scenarios, units)
        and bound.clairvoyant_weight.shape == (scenarios,)
        and bound.vectors.ndim == 2
        and bound.vectors.shape[1] == units
        and bool(np.isfinite(bound.vectors).all() and np.isfinite(bound.weight).all()),
        "the weights are for another problem",
    )
    require(bool((bound.weight >= 0).all() and (bound.clairvoyant_weight >= 0).all()), "a weight is negative")

    slope = Fraction(float(shape.step_time.lines(1).slope_s[0]))
    value, total = Fraction(0), Fraction(0)
    pairs = [[Fraction(0)] * units for _ in range(units)]
    for s in range(scenarios):
        weights = {i: Fraction(float(bound.weight[s, i])) for i in np.flatnonzero(bound.weight[s]).tolist()}
        kappa = Fraction(float(bound.clairvoyant_weight[s]))
        share = sum(weights.values(), kappa)
        require(share * problem.worst <= 1, f"scenario {s} weighs more than its probability")
        total += share
        value += kappa * known[s]
        if not weights:
            continue
        read = [Fraction(0)] * units
        for r, u in enumerate(unit):
            read[u] += slope * area(int(problem.trace.context_tokens[r]), int(problem.scenario_tokens[s, r]))
        for i, weight in weights.items():
            alone, added = _engine(i, problem.scenario_tokens[s].tolist(), unit, f)
            value += weight * (alone + read[i])
            for j in range(units):
                if j != i:
                    pairs[i][j] += weight * (added[j] + read[j])
    require(total <= 1, "the weights add up to more than 1")
    vectors = [[Fraction(float(entry)) for entry in vector] for vector in bound.vectors]
    for i in range(units):
        for j in range(i):
            shared = sum((vector[i] * vector[j] for vector in vectors), Fraction(0))
            value += min(Fraction(0), pairs[i][j] + pairs[j][i] - 2 * shared)
    for vector in vectors:
        value += sum(vector, Fraction(0)) ** 2 / len(problem.fleet.engines) - sum(
            (entry**2 for entry in vector), Fraction(0)
        )
    return value


def _engine(i: int, tokens: list[int], unit: list[int], f: list[Fraction]) -> tuple[Fraction, list[Fraction]]:
    """t of unit i and g of every other unit, without context, level by level of the lengths."""
    alone, added = Fraction(0), [Fraction(0)] * (max(unit) + 1)
    past = 0
    for level in sorted(set(tokens)):
        running = [unit[r] for r in range(len(tokens)) if tokens[r] >= level]
        own = running.count(i)
        alone += (level - past) * f[own]
        if len(running) > own:
            rise = (level - past) * (f[len(running)] - f[own]) / (len(running) - own)
            for j in running:
                if j != i:
                    added[j] += rise
        past = level
    return alone, added
