r"""Affine minorants: lines below a step time, which turn bounds for affine step times into bounds for any.

If :math:`\tau(n, K) \ge a + b n + c K` for all reachable n >= 1 and K >= 0, an engine that takes s steps is
busy for

.. math:: T = \sum_{\text{steps}} \tau \;\ge\; a s + b \sum_i L_i + c \sum_i A_i .

A step time is a maximum of lines in K for each n (:class:`tailopt.engine.step_time.Lines`), so f(n) + c K
lies below it if f is one piece and c its slope, or if f is the highest piece at K = 0 and c the least slope.
The edges of the lower convex hull of f over n = 1 .. n_max are the best affine functions below f, and the ray
from the origin along it is the best one with a = 0. A concave f has a single edge, the chord: the fewer
requests can run together, the better it is (:func:`reachable`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tailopt.arrays import Floats
from tailopt.engine.step_time import Lines
from tailopt.oracle.units import Units

SHRINK = 1 - 1e-12  # keeps a minorant below its step time in spite of rounding
MOST_EDGES = 6


@dataclass(frozen=True)
class Minorant:
    """``tau(n, K) >= a_s + b_s n + c_s K`` for 1 <= n <= n_max and K >= 0, with a, b, c >= 0."""

    a_s: float
    b_s: float
    c_s: float
    n_max: int


def minorants(lines: Sequence[Lines], n_max: int) -> list[Minorant]:
    """Affine functions below all the step times given, the ray first; each is the tightest somewhere.

    Args:
        lines: step times of the shapes in use; a minorant lies below every one of them.
        n_max: concurrency up to which it must hold.

    >>> from tailopt.engine.step_time import Power
    >>> ray, chord = minorants([Power(4.0, 1.0, 0.5).lines(9)], 9)
    >>> round(ray.b_s, 6), round(chord.a_s, 6), round(chord.b_s, 6)  # 7/9, and the chord from 5 to 7
    (0.777778, 4.75, 0.25)
    """
    found = []
    for base, slope in separable_minorants(lines, n_max):
        n = np.arange(1, n_max + 1)
        edges = [(0.0, float((base / n).min()))]
        edges += _hull_edges(base)
        kept = [(a, b) for a, b in edges if a >= 0 and b >= 0]
        found += [Minorant(SHRINK * a, SHRINK * b, SHRINK * slope, n_max) for a, b in kept]
    return list(dict.fromkeys(found))


def reachable(lines: Sequence[Lines], units: Units, makespan_s: float) -> tuple[list[Minorant], int]:
    """How many requests can run together at most in a plan within ``makespan_s``, and the rays that show it.

    The fleet's own limit is n_0. If at most n_k run together, a ray (0, b, c) below the step times on
    1 .. n_k says that an engine with n requests needs at least b (sum of their L) + c (sum of their A), least
    for the n shortest. Where that exceeds ``makespan_s``, n cannot run together: so n_{k+1} < n, and the next
    ray is steeper. Ray k of the list is valid up to n_k; the number returned is the last n_k.

    >>> from tailopt.engine.step_time import Affine
    >>> from tailopt.oracle.units import Units
    >>> nine, none = np.full(8, 9), np.zeros(8)
    >>> units = Units(nine, nine, none, none, none, [], np.cumsum(nine), none, 72, 100, 1000)
    >>> rays, limit = reachable([Affine(1.0, 1.0).lines(8)], units, makespan_s=9 * 1.2 * 5)
    >>> [ray.n_max for ray in rays], limit
    ([8], 5)
    """
    rays: list[Minorant] = []
    limit = min(units.max_running, len(units.least_tokens))
    while True:
        candidates = [ray for ray in minorants(lines, limit) if ray.a_s == 0]
        fits = [
            int(np.searchsorted(least_seconds(ray, units), makespan_s, side="right")) for ray in candidates
        ]
        if not 1 <= min(fits) < limit:
            return rays, limit
        rays.append(candidates[int(np.argmin(fits))])
        limit = min(fits)


def least_seconds(ray: Minorant, units: Units) -> Floats:
    """``[n]`` seconds that an engine with 1, 2, ... n requests needs at least, whichever they are."""
    return np.asarray(SHRINK * (ray.b_s * units.least_tokens + ray.c_s * units.least_context))


def separable_minorants(lines: Sequence[Lines], n_max: int) -> list[tuple[Floats, float]]:
    """Pairs (f(1..n_max), c) with tau >= f(n) + c K for every shape."""
    per_shape = []
    for line in lines:
        choices = [(base, float(slope)) for base, slope in zip(line.base_s, line.slope_s, strict=True)]
        if len(choices) > 1:
            choices.append((line.base_s.max(axis=0), float(line.slope_s.min())))
        per_shape.append([(base[1 : n_max + 1], slope) for base, slope in choices])
    merged = per_shape[0]
    for choices in per_shape[1:]:
        merged = [(np.minimum(f, g), min(c, d)) for f, c in merged for g, d in choices]
    return merged


def _hull_edges(base: Floats) -> list[tuple[float, float]]:
    """(a, b) of the edges of the lower convex hull of the points (n, base[n - 1]), at most MOST_EDGES."""
    hull: list[int] = []
    for n in range(len(base)):
        while len(hull) > 1 and _turns_down(base, hull[-2], hull[-1], n):
            hull.pop()
        hull.append(n)
    edges = []
    for left, right in pairwise(hull):
        b = float(base[right] - base[left]) / (right - left)
        edges.append((float(np.min(base - b * np.arange(1, len(base) + 1))), b))
    if not edges:
        edges = [(float(base[0]), 0.0)]
    keep = np.unique(np.linspace(0, len(edges) - 1, MOST_EDGES).round().astype(int))
    return [edges[i] for i in keep]


def _turns_down(base: Floats, left: int, middle: int, right: int) -> bool:
    rise = (base[right] - base[left]) * (middle - left)
    return bool((base[middle] - base[left]) * (right - left) >= rise * (1 - 1e-9))  # collinear up to rounding
