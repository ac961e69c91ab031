r"""Checks :class:`tailopt.oracle.partition.PartitionBound` by another program than the one that found it.

The least seconds of every set are summed request by request in whole multiples of one power of two, so
without rounding. The sets that engine e can have done **before** the bound are a family :math:`F_e`; the
batch can be dealt out if a union of one set of each family is everything. The unions are counted by the
transform :math:`\zeta F(S) = |\{R \in F : R \subseteq S\}|`, which turns "union of a pair" into a product.
"""

from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tailopt.engine.step_time import MaxAffine
from tailopt.oracle.check_parts import (
    all_below,
    area,
    cache_busy,
    concave_rises,
    require,
    require_rays,
    units_by_length,
)
from tailopt.oracle.kinds import Kind, KindTerms, kinds_of
from tailopt.oracle.partition import PartitionBound
from tailopt.oracle.problem import Problem

MOST_UNITS = 18

Whole = NDArray[np.object_]


def check_partition(bound: PartitionBound, problem: Problem) -> tuple[Fraction, str]:
    """The bound, if the units cannot be dealt to the engines so that all are done before it."""
    units = units_by_length(problem)
    require(len(units) <= MOST_UNITS, f"{len(units)} units are too many for sets of them to be listed")
    kinds = kinds_of(problem.fleet)
    require(len(kinds) == len(bound.kinds), "the bound is for other kinds of engines")
    lower_s = Fraction(bound.lower_s)
    covered = np.zeros(1 << len(units), dtype=np.bool_)
    covered[0] = True
    for kind, terms in zip(kinds, bound.kinds, strict=True):
        for one in terms.minorants:
            require_rays(terms.rays, one.n_max, bound.within_s, kind.max_running, [kind.shape], problem)
            require(all_below(one, [kind.shape]), "the affine function is not below the step times")
        done = _done_before(lower_s, kind, terms, units, problem)
        for _ in kind.engines:
            covered = _unions(covered, done)
    require(not covered[-1], f"a plan may be done by {bound.lower_s} s")
    return min(lower_s, Fraction(bound.within_s)), "partition"


def _done_before(
    makespan: Fraction, kind: Kind, terms: KindTerms, units: list[list[int]], problem: Problem
) -> NDArray[np.bool_]:
    """``[2^u]`` whether nothing shows that an engine of this kind needs ``makespan`` for the set."""
    held = _Sets(units, problem)
    done = np.ones(len(held.tokens), dtype=np.bool_)
    together = _together(kind, held)
    if together is not None:
        done &= _less(together[0], makespan * together[1])
    for one in terms.minorants:
        a, b, c = (Fraction(term) for term in (one.a_s, one.b_s, one.c_s))
        scale = max(term.denominator for term in (a, b, c))  # doubles: denominators are powers of two
        slots, cache = kind.max_running, kind.shape.kv_capacity_tokens
        steps = np.maximum(held.longest * (slots * cache), held.tokens * cache)
        steps = np.maximum(steps, held.cache * slots)
        rest = int(b * scale) * held.tokens + int(c * scale) * held.context
        done &= _less(int(a * scale) * steps + slots * cache * rest, makespan * scale * slots * cache)
    size = kind.shape.block_tokens
    room = kind.shape.kv_capacity_tokens // size * size
    return done & np.array(held.largest <= room, dtype=np.bool_)


class _Sets:
    """Sums over the requests of every set of units, as whole numbers without limit of size."""

    def __init__(self, units: list[list[int]], problem: Problem) -> None:
        trace = problem.trace
        self.units, self.n = units, trace.n_requests
        self.prompt, self.output = trace.context_tokens.tolist(), trace.output_tokens.tolist()
        self.area = [int(area(p, length)) for p, length in zip(self.prompt, self.output, strict=True)]
        self.holds = [(np.arange(1 << len(units)) >> u & 1).astype(np.bool_) for u in range(len(units))]
        busy = cache_busy(
            problem.trace, [problem.fleet.shape_of(e) for e in range(len(problem.fleet.engines))]
        )
        zeros = np.zeros((5, 1 << len(units)), dtype=object)
        self.longest, self.largest, self.tokens, self.context, self.cache = zeros
        for members, holds in zip(units, self.holds, strict=True):
            self.longest[holds] = np.maximum(self.longest[holds], max(self.output[i] for i in members))
            need = max(self.prompt[i] + self.output[i] - 1 for i in members)
            self.largest[holds] = np.maximum(self.largest[holds], need)
            self.tokens[holds] += sum(self.output[i] for i in members)
            self.context[holds] += sum(self.area[i] for i in members)
            self.cache[holds] += sum(busy[i] for i in members)


def _together(kind: Kind, held: _Sets) -> tuple[Whole, int] | None:
    """Seconds of every set started together, times a power of two, and that power; None if not concave."""
    tau = kind.shape.step_time
    f = [Fraction(float(tau(n, 0))) for n in range(held.n + 1)]
    rises = [after - before for before, after in pairwise(f)]
    if isinstance(tau, MaxAffine) and len(tau.pieces) > 1:
        return None
    if not concave_rises(f):
        return None
    c = Fraction(float(tau.lines(1).slope_s[0]))
    scale = max(value.denominator for value in (*rises, c))
    rise = np.array([int(value * scale) for value in rises], dtype=object)
    running = np.zeros(len(held.tokens), dtype=np.int64)
    seconds = int(c * scale) * held.context
    for i, u in sorted(
        ((i, u) for u, members in enumerate(held.units) for i in members),
        key=lambda one: -held.output[one[0]],
    ):
        holds = held.holds[u]
        seconds[holds] += held.output[i] * rise[running[holds]]
        running[holds] += 1
    return seconds, scale


def _less(seconds: Whole, limit: Fraction) -> NDArray[np.bool_]:
    return np.array(seconds < limit, dtype=np.bool_)


def _unions(left: NDArray[np.bool_], right: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which sets are the union of a set of ``left`` and one of ``right``."""
    pairs = _subsets(left.astype(np.int64), 1) * _subsets(right.astype(np.int64), 1)
    return np.asarray(_subsets(pairs, -1) > 0)


def _subsets(count: NDArray[np.int64], sign: int) -> NDArray[np.int64]:
    """Sums over the subsets of every set (sign 1), or what such sums were made of (sign -1)."""
    bits = len(count).bit_length() - 1
    cube = count.reshape((2,) * bits).copy()
    for axis in range(bits):
        upper, lower = np.moveaxis(cube, axis, 0)[1], np.moveaxis(cube, axis, 0)[0]
        upper += sign * lower
    return cube.reshape(-1)
