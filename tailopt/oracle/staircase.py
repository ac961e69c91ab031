r"""The staircase: a lower bound and a filling for identical engines whose step time is affine.

Item i, sorted by falling :math:`\ell_i`, occupies an engine for :math:`w_i` seconds whatever else is there,
and an engine that holds items S is done after

.. math:: T_S = a \max_{i \in S} \ell_i + \sum_{i \in S} w_i .

The first (longest) item of each engine is its *leader*. With the leaders of m engines at sorted places
:math:`1 = p_1 < p_2 < \dots`, the items before :math:`p_{j+1}` live on engines 1..j. So if all engines are
done by T then, with W the prefix sums of w,

.. math:: W(p_{j+1} - 1) + a \sum_{r \le j} \ell_{p_r} \;\le\; j\,T \quad \text{for every } j \qquad (nested).

For a given T push each leader as far right as (nested) lets it: later leaders are shorter, which only helps
the constraints that follow. If items are left when m engines are led, no plan is done by T. Bisection on T
gives the largest T refuted, in O(m log n) a trial.

**Capacity.** If at most C requests run together and the cache holds M tokens, an engine takes at least
max(ℓ, ΣL / C, ΣA' / M) steps, with A' the token-steps of cache that a request keeps busy
(:func:`tailopt.oracle.units.cache_areas`). Any convex weights (u, v, x) of the three give a valid item again,
with P the seconds of its prefill at least,

.. math:: a' = u a, \quad w' = b L + c A + a\,(v L / C + x A' / M) + P,

so the bound is the largest over a grid of weights and over the affine minorants of the step time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints
from tailopt.engine.step_time import Lines
from tailopt.oracle.bisection import last_at_most
from tailopt.oracle.minorant import Minorant, minorants, reachable
from tailopt.oracle.units import Units

ROUNDING = 1e-11
"""Relative amount by which a bound is lowered, to be safe from the rounding of its sums."""

TERM_ROUNDING = 2.0**-52
"""The same for each item whose seconds are summed one after another."""

GRID = 4  # the weights are multiples of 1 / GRID


@dataclass(frozen=True)
class StaircaseBound:
    """Why no static plan is done before ``lower_s``: (nested) fails there.

    Attributes:
        lower_s: the bound in seconds.
        minorant: affine function below every engine's step time, up to ``minorant.n_max`` running requests.
        weights: (u, v, x): what the steps of an engine are bounded by, its longest request, slots, and cache.
        within_s: makespan of some plan; no better plan runs more than ``minorant.n_max`` requests together,
        rays: because of these (:func:`tailopt.oracle.minorant.reachable`).
    """

    lower_s: float
    minorant: Minorant
    weights: tuple[float, float, float]
    within_s: float
    rays: tuple[Minorant, ...]


def item_weights(units: Units, minorant: Minorant, weights: tuple[float, float, float]) -> Floats:
    """``[u]`` seconds w that each unit adds to its engine besides ``a u`` times the longest output."""
    _, slots, cache = weights
    per_token = minorant.b_s + minorant.a_s * slots / units.max_running
    per_cache = minorant.a_s * cache / units.kv_capacity_tokens
    decode_s = per_token * units.tokens + minorant.c_s * units.context + per_cache * units.cache
    return np.asarray(decode_s + units.prefill_s)


def staircase_bound(units: Units, lines: Sequence[Lines], engines: int, within_s: float) -> StaircaseBound:
    """The largest staircase bound over the affine minorants and the grid of weights.

    Args:
        units: what is placed.
        lines: step times of the shapes in use.
        engines: how many engines there are.
        within_s: makespan of a plan that is at hand.
    """
    longest = units.longest.astype(np.float64)
    rays, limit = reachable(lines, units, within_s)
    slots_bind = len(units.least_tokens) > units.max_running
    cache_binds = units.kv_capacity_tokens < units.most_context
    best_s, best = 0.0, None
    for minorant in minorants(lines, limit):
        for weights in step_weights(slots_bind and minorant.a_s > 0, cache_binds and minorant.a_s > 0):
            w = item_weights(units, minorant, weights)
            refuted_s = float(refuted_makespan(longest, w, minorant.a_s * weights[0], engines))
            if best is None or refuted_s > best_s:
                best_s, best = refuted_s, (minorant, weights)
    assert best is not None  # there is always a ray, hence a minorant
    lower_s = not_above(best_s * (1 - rounding(len(units.longest))), within_s)
    return StaircaseBound(lower_s, *best, within_s, tuple(rays))


def rounding(items: int) -> float:
    """Relative amount by which a bound from the sums of so many items is lowered."""
    return ROUNDING + items * TERM_ROUNDING


def not_above(lower_s: float, plan_s: float) -> float:
    """A lower bound beside a plan that is at hand: they may cross by rounding, by more is a fault of ours.

    >>> not_above(1.0 + 1e-12, 1.0)
    1.0
    """
    if lower_s > plan_s * (1 + 1e-9):
        raise AssertionError(f"lower bound {lower_s} s above a plan of {plan_s} s: please report this")
    return min(lower_s, plan_s)


def step_weights(slots: bool, cache: bool) -> list[tuple[float, float, float]]:
    """The grid of convex weights (u, v, x) of longest request, slots and cache; 0 for what cannot bind."""
    grid = range(GRID + 1)
    return [
        ((GRID - v - x) / GRID, v / GRID, x / GRID)
        for v in (grid if slots else (0,))
        for x in (grid if cache else (0,))
        if v + x <= GRID
    ]


@njit(cache=True)
def refuted_makespan(longest: Floats, weight_s: Floats, a_s: float, engines: int) -> float:
    """The largest T, within rounding, such that no plan can be done before T.

    Args:
        longest: ``[u]`` falling.
        weight_s: ``[u]`` additive seconds.
        a_s: seconds per step.
        engines: how many.
    """
    total = np.empty(len(longest) + 1)
    total[0] = 0.0
    alone = 0.0
    for i in range(len(longest)):
        total[i + 1] = total[i] + weight_s[i]
        alone = max(alone, a_s * longest[i] + weight_s[i])
    low = max(alone, (total[-1] + a_s * longest[0]) / engines)
    high = total[-1] + a_s * longest[0]
    if nested(longest, total, a_s, engines, low):
        return float(low)
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle <= low or middle >= high:
            break
        if nested(longest, total, a_s, engines, middle):
            high = middle
        else:
            low = middle
    return float(low)


@njit(cache=True)
def nested(longest: Floats, total: Floats, a_s: float, engines: int, makespan_s: float) -> bool:
    """Whether leaders can be placed so that (nested) holds; ``total`` are the prefix sums of the weights."""
    leaders_s = 0.0
    leader = 0
    for j in range(1, engines + 1):
        leaders_s += a_s * longest[leader]
        following = last_at_most(total, j * makespan_s - leaders_s)
        if following >= len(longest):
            return True
        if following <= leader:
            return False
        leader = following
    return False


@njit(cache=True)
def fill(
    longest: Floats,
    tokens: Floats,
    context: Floats,
    prefill_s: Floats,
    affine: Floats,
    capacity: Floats,
    engines: int,
    makespan_s: float,
    engine_of: Ints,
) -> float:
    """Fill engines in sorted order: the fullest one that still fits, a new one only when none fits.

    An engine is counted as done after ``a max(longest, sum L / C, sum A / M) + b sum L + c sum A + sum P``.

    Args:
        longest, tokens, context, prefill_s: ``[u]`` of the units, longest first.
        affine: (a, b, c) of the step time.
        capacity: (C, M) concurrency limit and KV capacity.
        engines: how many.
        makespan_s: none may be done later than this.
        engine_of: ``[u]`` written: engine of each unit.

    Returns:
        The time at which the last engine is done, or infinity if the units do not fit.
    """
    held_tokens, held_context, held_s = np.zeros(engines), np.zeros(engines), np.zeros(engines)
    leader, done_s = np.zeros(engines), np.zeros(engines)
    opened = 0
    for u in range(len(longest)):
        best, best_done = -1, 0.0
        for e in range(min(opened + 1, engines)):
            if e == opened and best >= 0:
                break
            all_tokens, all_context = held_tokens[e] + tokens[u], held_context[e] + context[u]
            steps = max(leader[e], longest[u], all_tokens / capacity[0], all_context / capacity[1])
            then = (
                affine[0] * steps
                + affine[1] * all_tokens
                + affine[2] * all_context
                + held_s[e]
                + prefill_s[u]
            )
            if then <= makespan_s and (best < 0 or done_s[e] > done_s[best]):
                best, best_done = e, then
        if best < 0:
            return np.inf
        if best == opened:
            opened += 1
            leader[best] = longest[u]
        held_tokens[best] += tokens[u]
        held_context[best] += context[u]
        held_s[best] += prefill_s[u]
        done_s[best] = best_done
        engine_of[u] = best
    return float(done_s.max())


@njit(cache=True)
def best_filling(
    longest: Floats,
    tokens: Floats,
    context: Floats,
    prefill_s: Floats,
    affine: Floats,
    capacity: Floats,
    engines: int,
    lower_s: float,
    tolerance: float,
) -> Ints:
    """``[u]`` engine of each unit in the best filling found by bisection on the makespan.

    Args:
        longest, tokens, context, prefill_s, affine, capacity, engines: as in :func:`fill`.
        lower_s: no plan is done earlier.
        tolerance: relative width at which the bisection stops.
    """
    trial, best = np.zeros(len(longest), np.int64), np.zeros(len(longest), np.int64)
    low, high = lower_s, lower_s
    done_s = fill(longest, tokens, context, prefill_s, affine, capacity, engines, high, trial)
    step = 1e-9
    while done_s == np.inf:  # the first tries stay close to the bound: there the filling mostly succeeds
        low = high
        high = lower_s * (1.0 + step)
        step *= 4.0
        done_s = fill(longest, tokens, context, prefill_s, affine, capacity, engines, high, trial)
    best = trial.copy()
    high = done_s
    while high - low > tolerance * high:
        middle = (low + high) / 2
        done_s = fill(longest, tokens, context, prefill_s, affine, capacity, engines, middle, trial)
        if done_s == np.inf:
            low = middle
        else:
            best = trial.copy()
            high = min(done_s, middle)
    return best
