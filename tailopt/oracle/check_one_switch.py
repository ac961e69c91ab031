"""Checks :class:`tailopt.oracle.one_switch.SwitchCertificate`: the run, and the bound for any policy.

The run is carried out again from its two plans, step by step by :mod:`tailopt.simulate.reference` where
that is not too long, and must switch at most once, between engines that lie within the groups of GPUs, with
groups of requests together if they are atomic. The static part is verified by
:mod:`tailopt.oracle.check_shapes`. The argument for any policy is written out in exact rational arithmetic;
what the requests of a step can earn is counted place by place, otherwise than the solver does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tailopt.engine.profile import EngineProfile
from tailopt.oracle.any_bound import AnyBound
from tailopt.oracle.check import MOST_TOKENS, TOLERANCE, check_any
from tailopt.oracle.check_parts import area, cache_busy, require
from tailopt.oracle.check_shapes import check_shapes
from tailopt.oracle.class_bound import ClassBound
from tailopt.oracle.one_switch import SwitchCertificate
from tailopt.oracle.problem import Problem
from tailopt.plan import Fleet, Plan, View
from tailopt.simulate.reference import simulate_policy_reference
from tailopt.simulate.simulator import simulate_policy
from tailopt.trace import Trace


@dataclass(frozen=True)
class CheckedSwitch:
    """What the checker found: both ends as it computed them, and the arguments that it verified."""

    lower_s: float
    upper_s: float
    arguments: tuple[str, ...]


def check_one_switch(
    certificate: SwitchCertificate,
    trace: Trace,
    profile: EngineProfile,
    gpus: int,
    *,
    atomic: bool,
    topology: Sequence[int] | None = None,
) -> CheckedSwitch:
    """Verify a certificate; the arguments are those of ``solve_one_switch``.

    Raises:
        InputError: naming the first step that does not hold.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.oracle.one_switch import solve_one_switch
    >>> trace, profile = Trace.of([[900, 80], [70, 60]]), load_engine("h100-llama-3.1-8b")
    >>> found = solve_one_switch(trace, profile, 2, atomic=False)
    >>> check_one_switch(found, trace, profile, 2, atomic=False).arguments[-1]
    'linear program'
    """
    groups = (gpus,) if topology is None else tuple(topology)
    static = check_shapes(certificate.static, trace, profile, gpus, atomic=atomic, topology=topology)
    upper_s = _run_seconds(certificate, trace, profile, gpus, groups, atomic)
    require(
        abs(certificate.upper_s - upper_s) <= TOLERANCE * upper_s,
        f"the switch takes {upper_s} s, not {certificate.upper_s} s",
    )
    bound = certificate.bound_argument
    if isinstance(bound, AnyBound):
        anyone_s, argument = check_any(bound, Problem(trace, certificate.static.fleet, atomic))
    else:
        anyone_s, argument = check_class(bound, trace, profile, gpus), "classes of requests"
    lower_s = min(anyone_s, Fraction(static.lower_s), Fraction(certificate.upper_s))
    require(Fraction(certificate.lower_s) <= lower_s, f"the arguments give only {float(lower_s)} s")
    return CheckedSwitch(float(lower_s), upper_s, (*static.arguments, argument))


def _run_seconds(
    certificate: SwitchCertificate,
    trace: Trace,
    profile: EngineProfile,
    gpus: int,
    groups: tuple[int, ...],
    atomic: bool,
) -> float:
    """The makespan of the run's plans, carried out again."""
    run = certificate.run
    plans = [run.plan, *(review.plan for review in run.reviews)]
    require(len(plans) <= 2, "the run switches more than once")
    group_of = np.repeat(np.arange(len(groups)), groups)
    for plan in plans:
        for engine in Fleet(profile, plan.engines, gpus).engines:
            same = len({int(group_of[gpu]) for gpu in engine.gpus or ()}) == 1
            require(same, "an engine lies in two groups of GPUs")
        require(bool((plan.engine_of >= 0).all()), "a plan leaves a request to the shared queue, or drops it")
        require(plan.max_tokens is None and plan.deadline_s is None, "a plan cuts requests short")
        require(all(engine.speculation is None for engine in plan.engines), "an engine speculates")

    def policy(view: View) -> Plan:
        return plans[0] if view.n_requests == trace.n_requests else plans[1]

    carry_out = simulate_policy_reference if trace.total_output_tokens <= MOST_TOKENS else simulate_policy
    view = View.at_start(trace, Fleet(profile, plans[0].engines, gpus), atomic=atomic)
    again = carry_out(trace, policy, view)
    require(bool((again.output_tokens == trace.output_tokens).all()), "a request has not all its tokens")
    return again.makespan_s


def check_class(bound: ClassBound, trace: Trace, profile: EngineProfile, gpus: int) -> Fraction:
    """What the argument of :mod:`tailopt.oracle.class_bound` proves.

    Raises:
        InputError: if a step earns more than it costs.
    """
    shapes = [shape for tp, shape in profile.shapes.items() if tp <= gpus]
    classes = len(bound.sizes)
    require(sum(bound.sizes) == trace.n_requests and min(bound.sizes) > 0, "a request is in no class")
    require(
        len(bound.theta_of) == len(bound.nu_s) == len(bound.kappa_s) == classes,
        "a class has no share or price",
    )
    theta, cache = Fraction(bound.theta), Fraction(bound.cache_s)
    share = [Fraction(one) for one in bound.theta_of]
    nu, kappa = [Fraction(one) for one in bound.nu_s], [Fraction(one) for one in bound.kappa_s]
    require(min([theta, cache, *share, *nu, *kappa]) >= 0, "a share or price is negative")
    require(theta + sum(share) <= 1 + TOLERANCE, "the shares are more than one")
    whole = max(Fraction(1), theta + sum(share))
    for shape in shapes:
        slope = Fraction(float(shape.step_time.lines(1).slope_s.min()))
        for c in range(classes):
            most = slope * (theta * shape.tp / gpus + share[c] / bound.sizes[c])
            require(kappa[c] <= most, f"reading context earns more than it costs on TP{shape.tp}")
        for n in range(1, min(shape.max_running, trace.n_requests) + 1):
            f = Fraction(float(shape.step_time(n, 0)))
            pay = sorted(
                ((nu[c] - share[c] * f / bound.sizes[c], bound.sizes[c]) for c in range(classes)),
                reverse=True,
            )
            places, earned = n, cache * shape.kv_capacity_tokens
            for each, size in pay:
                taken = min(size, places)
                earned += taken * each
                places -= taken
            require(
                earned <= theta * shape.tp * f / gpus,
                f"a step of {n} requests on TP{shape.tp} earns more than it costs",
            )
    # by falling length, so that class c holds the sizes[c] next ones; any order would do
    order = sorted(range(trace.n_requests), key=lambda i: -int(trace.output_tokens[i]))
    total, at = cache * sum(cache_busy(trace, shapes)), 0
    for c, size in enumerate(bound.sizes):
        for i in order[at : at + size]:
            tokens = int(trace.output_tokens[i])
            total += nu[c] * tokens + kappa[c] * area(int(trace.context_tokens[i]), tokens)
        at += size
    proven: Fraction = total / whole
    require(Fraction(bound.lower_s) <= proven, f"the prices give only {float(proven)} s")
    return Fraction(bound.lower_s)
