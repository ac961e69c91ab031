r"""A unit alone: if step time is concave, no plan is done before an engine with only that unit would be.

Let tau(n, K) = f(n) + c K with f concave, f(0) = 0. An engine decodes the unit's requests i, among others, in
steps that hold n_1, n_2, ... of them. Any s steps hold at most min(L_i, s) tokens of request i, so with
:math:`n^*(k) = |\{i : L_i \ge k\}|` every sum of s of the n_k is at most :math:`\sum_{k \le s} n^*(k)`, with
equality of the totals: n* majorizes n. By Karamata's inequality the concave f has
:math:`\sum f(n_k) \ge \sum f(n^*(k))`: decoding all of them together from the start is the cheapest way. The
others in the batch, waiting, and preemption only add time, and the context read is c times the sum of the A_i
or more. So the largest such time over the units, with their least prefill, bounds every static plan; over
engines of different shapes, the fastest counts.
"""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Ints
from tailopt.engine.decode_time import decode_time_s
from tailopt.engine.step_time import Lines
from tailopt.oracle.problem import Problem
from tailopt.oracle.staircase import ROUNDING
from tailopt.oracle.units import Units


@dataclass(frozen=True)
class AloneBound:
    """No static plan is done before ``lower_s``: the unit of request ``request`` alone takes that long."""

    lower_s: float
    request: int


def concave(lines: Lines) -> bool:
    """Whether a step time is f(n) + c K with f concave from f(0) = 0 on.

    >>> from tailopt.engine.step_time import Affine, MaxAffine
    >>> concave(Affine(5.0, 1.0).lines(9)), concave(MaxAffine(((5.0, 0, 0), (1.0, 1.0, 0))).lines(9))
    (True, False)
    """
    rises = np.diff(lines.base_s[0])
    return lines.separable and bool(
        (np.diff(rises) <= 2.0**-50 * lines.base_s[0, -1]).all()
    )  # up to rounding


def alone_bound(problem: Problem, units: Units) -> AloneBound | None:
    """The bound from the unit that takes longest alone; None if some step time is not concave."""
    trace, fleet = problem.trace, problem.fleet
    shapes = [fleet.profile.shape(tp) for tp in dict.fromkeys(engine.tp for engine in fleet.engines)]
    if not all(concave(shape.step_time.lines(max(map(len, units.members)))) for shape in shapes):
        return None
    asked = np.arange(len(units.members)) if problem.atomic else _slow(units)
    alone_s = [
        min(
            float(decode_time_s(shape.step_time, trace.context_tokens[members], trace.output_tokens[members]))
            for shape in shapes
        )
        for members in (units.members[u] for u in asked)
    ]
    with_prefill_s = np.array(alone_s) + units.prefill_s[asked]
    slowest = int(np.argmax(with_prefill_s))
    return AloneBound(float(with_prefill_s[slowest]) * (1 - ROUNDING), int(units.members[asked[slowest]][0]))


def _slow(units: Units) -> Ints:
    """Requests by falling length, without those that read and compute no more than some before them did."""
    before = [
        np.concatenate([[-1.0], np.maximum.accumulate(load)[:-1]])
        for load in (units.context, units.prefill_s)
    ]
    return np.flatnonzero((units.context > before[0]) | (units.prefill_s > before[1]))
