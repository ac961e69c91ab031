r"""An independent checker: re-derives both ends of a certificate from the problem and the plan alone.

It shares no code with the solver: it evaluates the step time itself, adds in exact rational arithmetic
(:class:`fractions.Fraction`), and carries the plan out itself.

**Upper end.** The plan is admissible (every request once, groups together, the fleet's engines), and carrying
it out takes ``upper_s``, engine by engine: step by step by :mod:`tailopt.simulate.reference`, or, where that
takes too long (``MOST_TOKENS``), by the simulator that is tested to be equal to it.

**Lower end**, by the argument that the certificate names:

- *staircase*: the affine function lies below every step time in use, for each concurrency from 1 up to the
  limit, at no context, at the crossings of the step time's pieces, and in slope; each concurrency limit
  follows from the one before; (nested) fails at ``lower_s`` for every placement of leaders.
- *search*: at ``lower_s``, breadth first, every state that (room) leaves open has none after it;
- *staircase of shapes*: the same for each kind of engine, with prices between kinds;
- *prices*: engines done by ``lower_s`` cannot pay the prices of all requests, whoever leads them;
- *prices on kinds*: the same for each kind of engine, with the rows of its capacity;
- *partition*: no way to deal the units to the engines has all least seconds below ``lower_s``;
- *trusted*: a solver's word about an integer program that is the problem's, which is all that is verified;
- *alone*: the step time is concave, and the unit alone takes ``lower_s``.
- *any*: the longest request alone, or the dual multipliers, give ``lower_s`` when the sums of
  :mod:`tailopt.oracle.any_bound` are written out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from tailopt.engine.step_time import MaxAffine, StepTime
from tailopt.errors import InputError
from tailopt.oracle.alone import AloneBound
from tailopt.oracle.any_bound import AnyBound
from tailopt.oracle.certificate import BoundArgument, Certificate
from tailopt.oracle.check_general import check_priced
from tailopt.oracle.check_mixed import check_mixed
from tailopt.oracle.check_mixed_priced import check_priced_kinds
from tailopt.oracle.check_partition import check_partition
from tailopt.oracle.check_parts import (
    area,
    cache_busy,
    concave_rises,
    prefill_seconds,
    require,
    staircase_items,
)
from tailopt.oracle.check_search import check_search
from tailopt.oracle.check_solver import check_solver
from tailopt.oracle.lagrangian import PricedBound
from tailopt.oracle.mixed import MixedBound
from tailopt.oracle.mixed_priced import PricedKindsBound
from tailopt.oracle.partition import PartitionBound
from tailopt.oracle.problem import Problem
from tailopt.oracle.search_bound import SearchBound
from tailopt.oracle.solver_bound import SolverBound
from tailopt.oracle.staircase import StaircaseBound
from tailopt.plan import Fleet, Plan
from tailopt.simulate.reference import simulate_reference
from tailopt.simulate.simulator import simulate

MOST_TOKENS = 50_000
"""Output tokens of an engine up to which its plan is stepped through, beyond it the simulator is asked."""

TOLERANCE = Fraction(1, 10**9)
"""Relative difference allowed where a sum of doubles is compared with its exact value."""


@dataclass(frozen=True)
class Checked:
    """What the checker found: both ends as it computed them, and the argument it verified."""

    lower_s: float
    upper_s: float
    argument: str


def check(certificate: Certificate, problem: Problem) -> Checked:
    """Verify a certificate.

    Raises:
        InputError: naming the first step that does not hold.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.oracle.solve import solve
    >>> from tailopt.plan import Engine
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1), Engine(1)), gpus=2)
    >>> problem = Problem(Trace.of([[90], [80], [70]]), fleet)
    >>> check(solve(problem), problem).argument
    'staircase'
    """
    upper_s = _plan_seconds(certificate.plan, problem)
    require(
        abs(Fraction(certificate.upper_s) - upper_s) <= TOLERANCE * upper_s,
        f"the plan takes {float(upper_s)} s, not {certificate.upper_s} s",
    )
    bound = certificate.bound_argument
    require(0 < bound.lower_s < float("inf"), f"the argument's bound is {bound.lower_s} s")
    lower_s, argument = verified(bound, problem)
    require(Fraction(certificate.lower_s) <= lower_s, f"the argument gives only {float(lower_s)} s")
    return Checked(float(lower_s), float(upper_s), argument)


def verified(bound: BoundArgument, problem: Problem) -> tuple[Fraction, str]:
    """What an argument proves, and its name.

    Raises:
        InputError: naming the first step that does not hold.
    """
    try:
        return ARGUMENTS[type(bound)](bound, problem)
    except OverflowError as error:
        raise InputError("the argument's numbers are too large to compute with") from error


# ---- upper end


def _plan_seconds(plan: Plan, problem: Problem) -> Fraction:
    trace, fleet = problem.trace, problem.fleet
    require(len(plan.engine_of) == trace.n_requests, "the plan is for another number of requests")
    require(sorted(plan.order.tolist()) == list(range(trace.n_requests)), "the order is no permutation")
    require([e.tp for e in plan.engines] == [e.tp for e in fleet.engines], "the plan has other engines")
    require(bool((plan.engine_of >= 0).all()), "the plan is not static")
    if problem.atomic:
        used = {(int(g), int(e)) for g, e in zip(trace.group, plan.engine_of, strict=True)}
        require(len(used) == len({g for g, _ in used}), "the plan spreads a group over several engines")
    planned = Fleet(fleet.profile, plan.engines, fleet.gpus)
    finish = [Fraction(0)]
    for e in range(len(plan.engines)):
        require(planned.max_running(e) <= fleet.max_running(e), "the plan lifts a concurrency limit")
        queue = [int(i) for i in plan.order if plan.engine_of[i] == e]
        if queue:
            finish.append(_engine_seconds(queue, planned, e, problem))
    return max(finish)


def _engine_seconds(queue: list[int], fleet: Fleet, e: int, problem: Problem) -> Fraction:
    trace = problem.trace.take(queue)
    alone = Fleet(fleet.profile, (replace(fleet.engines[e], gpus=None),), fleet.engines[e].tp)
    plan = Plan.of_queues(alone.engines, [range(len(queue))])
    stepwise = trace.total_output_tokens <= MOST_TOKENS
    return Fraction((simulate_reference if stepwise else simulate)(trace, alone, plan).makespan_s)


def _steps(prompt: list[int], output: list[int]) -> tuple[list[int], list[int]]:
    """n(k) and K(k) for k = 1 .. max L of requests that start together."""
    finishing: dict[int, list[int]] = {}
    for p, length in zip(prompt, output, strict=True):
        finishing.setdefault(length, []).append(p)
    n, prompts, running, context = len(output), sum(prompt), [], []
    for k in range(1, max(output) + 1):
        running.append(n)
        context.append(prompts + n * k)
        for p in finishing.get(k, ()):
            n, prompts = n - 1, prompts - p
    return running, context


def _exact_sum(seconds: Iterable[float]) -> Fraction:
    return sum((Fraction(float(second)) for second in seconds), Fraction(0))


# ---- lower end: staircase


def _staircase(bound: StaircaseBound, problem: Problem) -> tuple[Fraction, str]:
    items, a = staircase_items(bound, problem)
    lower_s = Fraction(bound.lower_s)
    require(
        _refuted(items, a, len(problem.fleet.engines), lower_s), f"a plan may be done by {bound.lower_s} s"
    )
    return min(lower_s, Fraction(bound.within_s)), "staircase"


def _refuted(items: list[tuple[Fraction, Fraction]], a: Fraction, engines: int, makespan: Fraction) -> bool:
    """Whether no placement of leaders satisfies (nested) of :mod:`tailopt.oracle.staircase`."""
    if any(a * longest + w > makespan for longest, w in items):
        return True
    leaders, held, i = Fraction(0), Fraction(0), 0
    for j in range(1, engines + 1):
        leaders += a * items[i][0]
        while i < len(items) and held + items[i][1] + leaders <= j * makespan:
            held += items[i][1]
            i += 1
        if i == len(items):
            return False
    return True


# ---- lower end: a unit alone, and any policy


def _alone(bound: AloneBound, problem: Problem) -> tuple[Fraction, str]:
    trace, fleet = problem.trace, problem.fleet
    unit = (
        trace.group == trace.group[bound.request]
        if problem.atomic
        else np.arange(trace.n_requests) == bound.request
    )
    running, context = _steps(trace.context_tokens[unit].tolist(), trace.output_tokens[unit].tolist())
    shapes = {fleet.shape_of(e) for e in range(len(fleet.engines))}
    for shape in shapes:
        at = [Fraction(float(shape.step_time(n, 0))) for n in range(running[0] + 1)]
        require(
            not isinstance(shape.step_time, MaxAffine) or len(shape.step_time.pieces) == 1,
            "a step time is no function f(n) + c K",
        )
        require(
            concave_rises(at),
            "a step time is not concave",
        )
    prefill_s = prefill_seconds(problem, [np.flatnonzero(unit).tolist()])[0]
    return prefill_s + min(_exact_sum(shape.step_time(running, context)) for shape in shapes), "alone"


def check_any(bound: AnyBound, problem: Problem) -> tuple[Fraction, str]:
    """Value and name of the argument of a bound on any policy, computed afresh.

    Raises:
        InputError: if the multipliers are not admissible.
    """
    trace, gpus = problem.trace, problem.fleet.gpus
    shapes = [shape for tp, shape in problem.fleet.profile.shapes.items() if tp <= gpus]
    longest = max(range(trace.n_requests), key=lambda i: (trace.output_tokens[i], trace.context_tokens[i]))
    prompt, output = int(trace.context_tokens[longest]), int(trace.output_tokens[longest])
    context = prompt + np.arange(1, output + 1)
    alone = _exact_sum(np.min([shape.step_time(1, context) for shape in shapes], axis=0))
    theta, mu, kappa = Fraction(bound.theta), Fraction(bound.mu_s), Fraction(bound.kappa_s)
    require(0 <= theta <= 1 and mu >= 0 and kappa >= 0, "the multipliers are not admissible")
    least = None
    for shape in shapes:
        for n in range(1, min(shape.max_running, trace.n_requests) + 1):
            base = Fraction(float(shape.step_time(n, 0)))
            left = (1 - theta) / gpus * shape.tp * base - mu * n - kappa * shape.kv_capacity_tokens
            require(left >= 0, f"the multipliers cost more than a step of {n} requests on TP{shape.tp}")
            least = theta * base + left if least is None else min(least, theta * base + left)
    assert least is not None
    areas = [
        area(int(p), int(tokens)) for p, tokens in zip(trace.context_tokens, trace.output_tokens, strict=True)
    ]
    slopes = [(_slope(shape.step_time), shape.tp) for shape in shapes]
    dual: Fraction = (
        mu * int(trace.output_tokens.sum())
        + kappa * sum(cache_busy(trace, shapes))
        + least * output
        + theta
        * min(slope for slope, _ in slopes)
        * area(int(trace.context_tokens[int(np.argmax(trace.output_tokens))]), output)
        + (1 - theta) / gpus * min(tp * slope for slope, tp in slopes) * sum(areas, Fraction(0))
    )
    return max((alone, "longest request alone"), (dual, "linear program"))


def _slope(step_time: StepTime) -> Fraction:
    """Least rise per context token."""
    return Fraction(float(step_time.lines(1).slope_s.min()))


def _solver(bound: SolverBound, problem: Problem) -> tuple[Fraction, str]:
    known_s, _ = verified(bound.known, problem)
    return check_solver(bound, known_s, problem)


ARGUMENTS: dict[type, Callable[[Any, Problem], tuple[Fraction, str]]] = {
    StaircaseBound: _staircase,
    SearchBound: check_search,
    AloneBound: _alone,
    AnyBound: check_any,
    MixedBound: check_mixed,
    PartitionBound: check_partition,
    SolverBound: _solver,
    PricedBound: check_priced,
    PricedKindsBound: check_priced_kinds,
}
"""For each kind of argument, the function that computes what it proves, and names what was verified."""
