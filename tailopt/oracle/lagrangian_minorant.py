r"""Concave minorants: concave functions below a step time, for bounds that no affine one would give.

A concave g with g(0) = 0 is given by its *rises* g(n) - g(n - 1), which never rise themselves. If f is not
concave there is no greatest concave function below it, and one is chosen for the plan at hand: with h(n) the
steps that its engines take with n requests, the g that maximizes :math:`\sum_n h(n) g(n)`. As
:math:`g(n) = \sum_k s_k \min(n, k)` with :math:`s_k \ge 0` this is a small linear program. A solver proposes
s, and g is then shrunk until it lies below f, so that it does whatever the solver did.

Where the step time is the larger of two lines, the flatter one holds while the context is small: in the first
steps of an engine. Count with the flat line :math:`a + b n + c K` up to step k* and with the steep one
:math:`a' + b' n + c' K` beyond, :math:`b \le b', c \le c'`. A request is at its k-th token in the engine's
k-th step or later, so its tokens cost no less than if it had started first of all, and the steps of the
longest request cost what their constants say, however the others are admitted:

.. math:: T(S) \ge \sum_{k \le L_{(1)}} a_k + \sum_{i \in S} \sum_{k \le L_i} b_k + c_k (p_i + k) .

That is once more a sum over requests, in which the first one also pays for the constants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats
from tailopt.engine.step_time import Lines
from tailopt.oracle.minorant import SHRINK, separable_minorants

FLAT = 2.0**-40  # share of the first rise by which rises that are one may differ
SWITCHES = 60  # numbers of early steps that are tried
BENDS = 14  # places where the functions of a fleet that cannot run all its requests together are bent
MOST_CORNERS = 48  # of a g that the linear program chooses


@dataclass(frozen=True)
class ConcaveMinorant:
    """``tau(n, K) >= g(n) + c_s K`` for all n that can run together, K >= 0.

    Attributes:
        rises_s: g(1), g(2) - g(1), ... in seconds, never rising; beyond the last one it goes on.
        c_s: seconds per context token.
    """

    rises_s: tuple[float, ...]
    c_s: float


@dataclass(frozen=True)
class SwitchedMinorant:
    """One line below the step time in an engine's first steps, a steeper one in all that follow.

    Attributes:
        early, late: lines below the step time; both rise no more steeply early than late, in the number of
            requests and in their context.
        steps: how many steps are early.
    """

    early: ConcaveMinorant
    late: ConcaveMinorant
    steps: int


Part = tuple[ConcaveMinorant, int, int | None]
"""A function, and the steps of an engine before the first for which it holds, and up to the last."""


def parts_of(minorant: ConcaveMinorant | SwitchedMinorant) -> list[Part]:
    """What lies below the step time when; None for no last step."""
    if isinstance(minorant, ConcaveMinorant):
        return [(minorant, 0, None)]
    return [(minorant.early, 0, minorant.steps), (minorant.late, minorant.steps, None)]


def switched_minorants(lines: Sequence[ConcaveMinorant], longest: int) -> list[SwitchedMinorant]:
    """Each two lines of which one is steeper, with the switch after some number of steps.

    >>> flat, steep = ConcaveMinorant((3.0, 1.0), 0.0), ConcaveMinorant((4.0, 2.0), 0.1)
    >>> {(one.early is flat, one.late is steep) for one in switched_minorants([steep, flat], 100)}
    {(True, True)}
    """
    straight = [line for line in lines if len(set(line.rises_s[1:])) <= 1]
    after = np.unique(np.linspace(0, longest, SWITCHES + 2)[1:-1].round().astype(np.int64)).tolist()
    return [
        SwitchedMinorant(early, late, steps)
        for early in straight
        for late in straight
        if early != late and early.c_s <= late.c_s and early.rises_s[:2][-1] <= late.rises_s[:2][-1]
        for steps in after
    ]


def concave_minorants(lines: Sequence[Lines], n_max: int, steps: Floats) -> list[ConcaveMinorant]:
    """Concave functions below all the step times given, up to ``n_max`` requests.

    Args:
        lines: step times of the shapes in use; a minorant lies below every one of them.
        n_max: concurrency up to which it must.
        steps: ``[n_max + 1]`` steps that the engines of a plan take with 0, 1, ... requests.

    >>> from tailopt.engine.step_time import Power, Table
    >>> (minorant,) = concave_minorants([Power(4.0, 1.0, 0.5).lines(4)], 4, np.ones(5))
    >>> [round(rise, 6) for rise in minorant.rises_s]
    [5.0, 0.414214, 0.317837, 0.267949]
    >>> padded = Table([1, 4, 8], [1.0, 2.0, 3.0], padded=True).lines(8)
    >>> [round(rise, 6) for rise in concave_minorants([padded], 8, np.ones(9))[0].rises_s[3:5]]
    [0.333333, 0.333333]
    """
    found = []
    for base_s, slope_s in separable_minorants(lines, n_max):
        if base_s[0] <= 0:
            continue  # a piece that matters only with context
        rises_s = np.diff(base_s, prepend=0.0)
        falling = np.minimum.accumulate(rises_s)
        if not (rises_s - falling <= 2.0**-50 * base_s[-1]).all():
            falling = _chosen(base_s, steps[1:])
        falling = falling * (SHRINK * min(1.0, float((base_s / np.cumsum(falling)).min())))
        same = falling - falling[-1] <= FLAT * falling[0]  # a line's rises are equal but for rounding
        last = int(np.argmax(same))
        falling[last:] = falling[-1]
        found.append(ConcaveMinorant(tuple(falling[: last + 1].tolist()), SHRINK * slope_s))
    return list(dict.fromkeys(found))


def ray_minorants(lines: Sequence[Lines], n_max: int) -> list[ConcaveMinorant]:
    """Rays from the origin below all the step times: the least time per token, however requests queue."""
    n = np.arange(1, n_max + 1)
    found = [(float((base_s / n).min()), slope_s) for base_s, slope_s in separable_minorants(lines, n_max)]
    rays = [ConcaveMinorant((SHRINK * b_s,), SHRINK * slope_s) for b_s, slope_s in found if b_s > 0]
    return list(dict.fromkeys(rays))


def bent_minorants(minorants: Sequence[ConcaveMinorant], n_max: int) -> list[ConcaveMinorant]:
    """Concave functions below those given up to ``n_max`` requests, and rising more steeply beyond.

    Where more requests share an engine than it runs together, those beyond cost the last rise, and that of a
    concave function is its least. So it is followed up to k requests, then along the chord to ``n_max``.

    >>> [bent] = bent_minorants([ConcaveMinorant((4.0, 2.0, 1.0, 0.0), 0.0)], 4)[1:2]
    >>> [round(rise, 6) for rise in bent.rises_s]
    [4.0, 1.0]
    """
    found = []
    for minorant in minorants:
        rises = np.array(minorant.rises_s)[np.minimum(np.arange(n_max), len(minorant.rises_s) - 1)]
        flat = np.concatenate([[0.0], np.cumsum(rises)])
        for k in np.unique(np.geomspace(1, n_max, BENDS).astype(np.int64)) - 1:
            chord = min((flat[-1] - flat[k]) / (n_max - k), rises[max(0, k - 1)])
            rises_s = SHRINK * np.append(rises[:k], chord)
            found.append(ConcaveMinorant(tuple(rises_s.tolist()), minorant.c_s))
    return found


def _chosen(base_s: Floats, steps: Floats) -> Floats:
    """Rises of the concave function below ``base_s`` with the largest sum, weighted by ``steps``."""
    from scipy.optimize import linprog

    n = np.arange(1, len(base_s) + 1)
    corners = np.unique(np.geomspace(1, len(base_s), MOST_CORNERS).round().astype(np.int64))
    kinks = np.minimum(n[:, None], corners)
    solved = linprog(-(steps @ kinks), A_ub=kinks, b_ub=base_s, bounds=(0, None), method="highs")
    share = np.zeros(len(corners)) if solved.x is None else np.maximum(solved.x, 0.0)
    if not share.any():
        share[-1] = 1.0  # the ray
    by_corner = np.cumsum(share[::-1])[::-1]
    return np.asarray(by_corner[np.searchsorted(corners, n)])
