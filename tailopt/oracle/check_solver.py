"""Checks :class:`tailopt.oracle.solver_bound.SolverBound`, as far as anyone can.

The integer program is written down afresh: its affine terms lie below the step times, its numbers are the
exact ones rounded down, its makespan starts from a bound that is verified itself, and the digest is of these
very numbers. That no answer to it has fewer ticks is the solver's word: the argument is called "trusted".
"""

from fractions import Fraction
from hashlib import sha256

from tailopt.engine.step_time import Affine, MaxAffine
from tailopt.oracle.check_parts import (
    all_below,
    area,
    cache_busy,
    concave_rises,
    fits_alone,
    require,
    require_rays,
    units_by_length,
)
from tailopt.oracle.integer_model import MOST_CROWD_VARIABLES
from tailopt.oracle.kinds import Kind, KindTerms, kinds_of
from tailopt.oracle.problem import Problem
from tailopt.oracle.solver_bound import SolverBound

Whole = list[int]


def check_solver(bound: SolverBound, known_s: Fraction, problem: Problem) -> tuple[Fraction, str]:
    """The bound, if the program is the problem's; ``known_s`` is what the known bound was verified to be."""
    kinds, units = kinds_of(problem.fleet), units_by_length(problem)
    scale, most = Fraction(bound.ticks_per_s), 1 << bound.bits + 1
    require(len(kinds) == len(bound.kinds), "the bound is for other kinds of engines")
    require(
        scale > 0 and Fraction(bound.within_s) * scale < most, "a makespan has more ticks than allowed for"
    )
    require(Fraction(bound.known.lower_s) <= known_s, "the known bound is not proven")
    pairs = list(zip(kinds, bound.kinds, strict=True))
    for kind, terms in pairs:
        for one in terms.minorants:
            require_rays(terms.rays, one.n_max, bound.within_s, kind.max_running, [kind.shape], problem)
            require(all_below(one, [kind.shape]), "the affine function is not below the step times")
    engines = range(len(problem.fleet.engines))
    numbers = [
        repr(bound.ticks_per_s),
        [k for e in engines for k, kind in enumerate(kinds) if e in kind.engines],
        [_allowed(kind, units, problem) for kind in kinds],
        [_rows(kind, terms, units, scale, most, problem) for kind, terms in pairs],
        [_crowd(kind, units, scale, most, problem) for kind in kinds],
        max(0, int(Fraction(bound.known.lower_s) * scale) - len(units) - 1),
    ]
    digest = sha256(repr(numbers).encode()).hexdigest()
    require(digest == bound.digest, "the solver was given another program than the problem's")
    proven = min(Fraction(bound.ticks) / scale, Fraction(bound.within_s))
    return proven, f"{bound.solver} {bound.version}, trusted"


def _allowed(kind: Kind, units: list[list[int]], problem: Problem) -> list[bool]:
    return [all(fits_alone(problem, kind.shape, i) for i in members) for members in units]


def _rows(
    kind: Kind, terms: KindTerms, units: list[list[int]], scale: Fraction, most: int, problem: Problem
) -> list[tuple[Whole, Whole]]:
    """(leads, weights) in ticks: an engine's steps bounded by its longest request, its slots, its cache."""
    prompt, output = problem.trace.context_tokens.tolist(), problem.trace.output_tokens.tolist()
    longest = [max(output[i] for i in members) for members in units]
    tokens = [sum(output[i] for i in members) for members in units]
    context = [int(sum(area(prompt[i], output[i]) for i in members)) for members in units]
    busy = cache_busy(problem.trace, [problem.fleet.shape_of(e) for e in range(len(problem.fleet.engines))])
    held = [sum(busy[i] for i in members) for members in units]
    slots, cache = kind.max_running, kind.shape.kv_capacity_tokens
    rows = []
    for one in [one for one in terms.minorants if one.a_s > 0] or terms.minorants:
        a, b, c = (Fraction(term) * scale for term in (one.a_s, one.b_s, one.c_s))
        choices = [(a, b, Fraction(0))]
        if a > 0 and len(output) > slots:
            choices.append((Fraction(0), b + a / slots, Fraction(0)))
        if a > 0 and sum(prompt) + sum(output) > cache:
            choices.append((Fraction(0), b, a / cache))
        for per_step, per_token, per_cache in choices:
            lead = [min(most, int(per_step * length)) for length in longest]
            weight = [
                min(most, int(per_token * t + c * k + per_cache * h))
                for t, k, h in zip(tokens, context, held, strict=True)
            ]
            rows.append((lead, weight))
    return rows


def _crowd(
    kind: Kind, units: list[list[int]], scale: Fraction, most: int, problem: Problem
) -> tuple[list[Whole], list[Whole], Whole] | None:
    """(requests of each unit in each stretch, ticks of each stretch by requests, ticks of reading)."""
    prompt, output = problem.trace.context_tokens.tolist(), problem.trace.output_tokens.tolist()
    tau = kind.shape.step_time
    f = [Fraction(float(tau(n, 0))) for n in range(len(output) + 1)]
    lengths = sorted(set(output), reverse=True)
    crowd = [sum(tokens >= length for tokens in output) for length in lengths]
    one_piece = not isinstance(tau, MaxAffine) or len(tau.pieces) == 1
    large = sum(crowd) * len(problem.fleet.engines) > MOST_CROWD_VARIABLES
    if isinstance(tau, Affine) or not one_piece or not concave_rises(f) or large:
        return None
    c = Fraction(float(tau.lines(1).slope_s[0])) * scale
    stretches = zip(lengths, [*lengths[1:], 0], crowd, strict=True)
    return (
        [[sum(output[i] >= length for i in members) for length in lengths] for members in units],
        [
            [min(most, int(f[n] * (length - shorter) * scale)) for n in range(count + 1)]
            for length, shorter, count in stretches
        ],
        [min(most, int(c * sum(area(prompt[i], output[i]) for i in members))) for members in units],
    )
