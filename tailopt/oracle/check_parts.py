"""What the checkers of all bound arguments share: exact arithmetic on a problem's own numbers."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import MaxAffine, StepTime
from tailopt.errors import InputError
from tailopt.oracle.minorant import Minorant
from tailopt.oracle.problem import Problem
from tailopt.oracle.staircase import StaircaseBound
from tailopt.trace import Trace

ULPS = Fraction(1, 2**50)
"""Relative rounding of one difference of step times, forgiven where concavity is checked."""


def require(holds: bool, complaint: str) -> None:
    """Raise InputError with the complaint unless a step of a proof holds."""
    if not holds:
        raise InputError(f"certificate: {complaint}")


def concave_rises(seconds: Sequence[Fraction]) -> bool:
    """Whether the differences of step times for 0, 1, ... requests never rise, up to rounding."""
    rises = [after - before for before, after in pairwise(seconds)]
    return all(later <= rise + ULPS * seconds[-1] for rise, later in pairwise(rises))


def area(prompt: int, output: int) -> Fraction:
    """Context tokens that a request reads in its life."""
    return Fraction(prompt * output + output * (output + 1) // 2)


def cache_busy(trace: Trace, shapes: Sequence[ShapeProfile]) -> list[int]:
    """Token-steps of KV cache that each request keeps busy at least, the shared blocks split by its group."""
    held, _ = held_prompt_tokens(trace, shapes)
    return [
        output * (output - 1) // 2 + output * tokens
        for output, tokens in zip(trace.output_tokens.tolist(), held, strict=True)
    ]


def held_prompt_tokens(trace: Trace, shapes: Sequence[ShapeProfile]) -> tuple[list[int], list[int]]:
    """Tokens of its prompt that each request holds at least, and those in blocks that its group shares."""
    block = max(shape.block_tokens for shape in shapes)
    caching = any(shape.prefix_caching for shape in shapes)
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(trace.group.tolist()):
        groups.setdefault(group, []).append(int(trace.context_tokens[i]))
    held, shares = [], []
    for i, group in enumerate(trace.group.tolist()):
        prompts = groups[group]
        shared = (min(prompts) - 1) // block * block if caching and len(prompts) > 1 else 0
        held.append(int(trace.context_tokens[i]) - shared + shared // len(prompts))
        shares.append(shared)
    return held, shares


def prefill_seconds(problem: Problem, units: list[list[int]]) -> list[Fraction]:
    """Seconds of the prompt tokens that each unit computes at least: shared ones once, then each its own."""
    trace, fleet = problem.trace, problem.fleet
    shapes = [fleet.shape_of(e) for e in range(len(fleet.engines))]
    block = max(shape.block_tokens for shape in shapes)
    caching = any(shape.prefix_caching for shape in shapes)
    rate = max(Fraction(shape.prefill_tokens_per_s) for shape in shapes)
    prompt, group = trace.context_tokens.tolist(), trace.group.tolist()
    least: dict[int, list[int]] = {}
    for i, tokens in enumerate(prompt):
        least.setdefault(group[i], []).append(tokens)
    seconds = []
    for unit in units:
        siblings = least[group[unit[0]]]
        shared = (min(siblings) - 1) // block * block if caching and len(siblings) > 1 else 0
        tokens = sum(prompt[i] - shared - 1 for i in unit) + (shared if problem.atomic else 0)
        seconds.append(Fraction(tokens) / rate)
    return seconds


def fits_alone(problem: Problem, shape: ShapeProfile, request: int) -> bool:
    """Whether a request's tokens but the last fit into the whole blocks of a shape's KV cache."""
    prompt, output = problem.trace.context_tokens[request], problem.trace.output_tokens[request]
    return int(prompt + output - 1) <= shape.kv_capacity_tokens // shape.block_tokens * shape.block_tokens


def units_by_length(problem: Problem) -> list[list[int]]:
    """The requests of each unit; units by falling longest request, then by falling tokens."""
    trace = problem.trace
    output = trace.output_tokens.tolist()
    units: dict[int, list[int]] = {}
    for i in range(trace.n_requests):
        units.setdefault(int(trace.group[i]) if problem.atomic else i, []).append(i)

    def rank(unit: int) -> tuple[int, int, int]:
        outputs = [output[i] for i in units[unit]]
        return -max(outputs), -sum(outputs), unit

    return [units[unit] for unit in sorted(units, key=rank)]


def require_rays(
    rays: Sequence[Minorant],
    n_max: int,
    within_s: float,
    slots: int,
    shapes: list[ShapeProfile],
    problem: Problem,
) -> None:
    """No engine runs more than ``n_max`` requests together in a plan within ``within_s``, each ray shows."""
    trace = problem.trace
    length = sorted(Fraction(int(tokens)) for tokens in trace.output_tokens)
    areas = sorted(
        area(int(p), int(tokens)) for p, tokens in zip(trace.context_tokens, trace.output_tokens, strict=True)
    )
    limits = [*(ray.n_max for ray in rays), n_max]
    require(limits[0] == min(slots, trace.n_requests), "the first concurrency limit is not the fleet's")
    for ray, limit in zip(rays, limits[1:], strict=True):
        require(all_below(ray, shapes), f"the ray for {ray.n_max} requests is not below the step times")
        tokens, context = sum(length[: limit + 1]), sum(areas[: limit + 1])
        require(
            Fraction(ray.b_s) * tokens + Fraction(ray.c_s) * context > Fraction(within_s),
            f"{limit + 1} requests can run together within {within_s} s",
        )


def staircase_items(
    bound: StaircaseBound, problem: Problem
) -> tuple[list[tuple[Fraction, Fraction]], Fraction]:
    """(longest, w) of each unit, falling, and a: every engine takes at least ``a max(longest) + sum(w)``.

    Raises:
        InputError: if the affine function or the weights of the bound do not show this.
    """
    trace, fleet = problem.trace, problem.fleet
    engines = range(len(fleet.engines))
    shapes = [fleet.shape_of(e) for e in engines]
    slots = max(fleet.max_running(e) for e in engines)
    cache = max(shape.kv_capacity_tokens for shape in shapes)
    length = [Fraction(int(tokens)) for tokens in trace.output_tokens]
    areas = [
        area(int(p), int(tokens)) for p, tokens in zip(trace.context_tokens, trace.output_tokens, strict=True)
    ]

    require_rays(bound.rays, bound.minorant.n_max, bound.within_s, slots, shapes, problem)
    require(all_below(bound.minorant, shapes), "the affine function is not below the step times")

    a, b, c = (Fraction(term) for term in (bound.minorant.a_s, bound.minorant.b_s, bound.minorant.c_s))
    u, v, x = (Fraction(weight) for weight in bound.weights)
    require(min(u, v, x) >= 0 and u + v + x <= 1, "the weights are not convex")
    per_token, per_cache = b + a * v / slots, a * x / cache
    busy, units = cache_busy(trace, shapes), units_by_length(problem)
    items = [
        (
            max(length[i] for i in members),
            prefill_s
            + sum((per_token * length[i] + c * areas[i] + per_cache * busy[i] for i in members), Fraction(0)),
        )
        for members, prefill_s in zip(units, prefill_seconds(problem, units), strict=True)
    ]
    return sorted(items, reverse=True), a * u


def all_below(minorant: Minorant, shapes: list[ShapeProfile]) -> bool:
    """Whether a, b, c >= 0 and the function lies below all step times for n = 1 .. n_max and K >= 0."""
    if min(minorant.a_s, minorant.b_s, minorant.c_s) < 0:
        return False
    a, b, c = Fraction(minorant.a_s), Fraction(minorant.b_s), Fraction(minorant.c_s)
    return all(
        line_below(a + b * n, c, shape.step_time, n)
        for shape in set(shapes)
        for n in range(1, minorant.n_max + 1)
    )


def line_below(flat: Fraction, slope: Fraction, step_time: StepTime, n: int) -> bool:
    """Whether ``flat + slope K`` is below the step time of n requests for all K >= 0.

    For one n a step time is convex in K: a line between the contexts tried, and beyond the last one.
    """
    contexts = [0.0, *_crossings(step_time, n)]
    seconds = [Fraction(float(one)) for one in step_time(n, np.array(contexts))]
    steepest = Fraction(float(step_time.lines(1).slope_s.max()))
    return slope <= steepest and all(
        flat + slope * Fraction(context) <= one for context, one in zip(contexts, seconds, strict=True)
    )


def _crossings(step_time: StepTime, n: int) -> list[float]:
    """Contexts at which two pieces of a step time meet."""
    if not isinstance(step_time, MaxAffine):
        return []
    lines = [(a + b * n, c) for a, b, c in step_time.pieces]
    return [
        (high - low) / (steep - flat)
        for high, flat in lines
        for low, steep in lines
        if steep > flat and high > low
    ]
