r"""The staircase for engines of different shapes: a lower bound for any mix of affine kinds.

An engine of kind k that holds a set S of units takes at least :math:`a_k \max_S \ell + \sum_S w_{k,u}`.
Give each kind a **price** :math:`y_k \ge 0`, which weighs its seconds against another's. With leaders at
sorted places :math:`p_1 = 1 < p_2 < \dots` on engines of kinds :math:`k_1, k_2, \dots`, the units before
:math:`p_{j+1}` live on the first j engines, each on one of the kinds O opened by then. So if all are done
by T,

.. math:: \sum_{u < p_{j+1}} \min_{k \in O} y_k w_{k,u} + \sum_{r \le j} y_{k_r} a_{k_r} \ell_{p_r}
          \;\le\; T \sum_{r \le j} y_{k_r} \quad \text{for every } j,

where the minimum is over kinds on which u alone is done by T. For a fixed order of kinds, pushing each
leader as far right as this lets it is best for all that follows, as in :mod:`tailopt.oracle.staircase`.
Between orders that opened the same number of each kind, the one with the least priced leader seconds is
best: its next leader can stand furthest right. So a table over the numbers of engines opened by kind
decides whether T is refuted, in O(prod(m_k + 1) log n). The prices are free: any give a bound, and a
pattern search looks for good ones. With one kind the bound is the staircase's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints
from tailopt.oracle.kinds import Kind, kinds_of, terms_of
from tailopt.oracle.minorant import Minorant
from tailopt.oracle.problem import Problem
from tailopt.oracle.staircase import not_above, rounding, step_weights
from tailopt.oracle.units import Units

MOST_KINDS = 6
MOST_STATES = 100_000
STEPS = (4.0, 2.0, 1.4, 1.2, 1.1, 1.05, 1.02, 1.01, 1.003, 1.001)
"""Factors by which the pattern search changes a price, one after the other."""


@dataclass(frozen=True)
class KindBound:
    """What the bound takes from one kind: see :class:`tailopt.oracle.kinds.KindTerms`; its price."""

    rays: tuple[Minorant, ...]
    minorant: Minorant
    price: float


@dataclass(frozen=True)
class MixedBound:
    """Why no static plan is done before ``lower_s``.

    Attributes:
        lower_s: the bound in seconds.
        kinds: one for each kind of the fleet, in its order.
        weights: (u, v, x): what the steps of an engine are bounded by, its longest request, slots, and cache.
        within_s: makespan of some plan, which the rays are about.
    """

    lower_s: float
    kinds: tuple[KindBound, ...]
    weights: tuple[float, float, float]
    within_s: float


@dataclass(frozen=True)
class _Choice:
    minorants: tuple[Minorant, ...]
    prices: tuple[float, ...]
    weights: tuple[float, float, float]


def mixed_bound(problem: Problem, units: Units, within_s: float) -> MixedBound | None:
    """The best bound of this form that a pattern search finds; None for too many kinds of engines.

    Args:
        problem: batch and fleet.
        units: what is placed.
        within_s: makespan of a plan that is at hand.
    """
    kinds = kinds_of(problem.fleet)
    counts = np.array([len(kind.engines) for kind in kinds], dtype=np.int64)
    if len(kinds) > MOST_KINDS or np.prod(counts + 1.0) > MOST_STATES:
        return None
    terms = terms_of(units, kinds, problem.trace.n_requests, within_s)
    search = _Search(units, kinds, counts)
    choices = [_Choice(tuple(term.minorants[-1] for term in terms), (1.0,) * len(kinds), (1.0, 0.0, 0.0))]
    best = search.natural_prices(choices[0])
    best_s = search.refuted_s(best, 0.0)

    def improve(candidate: _Choice) -> None:
        nonlocal best, best_s
        found_s = search.refuted_s(candidate, best_s)
        if found_s > best_s:
            best, best_s = candidate, found_s

    for _ in range(2):
        for k, term in enumerate(terms):
            for minorant in term.minorants:
                changed = tuple(minorant if i == k else one for i, one in enumerate(best.minorants))
                improve(search.natural_prices(replace(best, minorants=changed)))
                improve(replace(best, minorants=changed))
        for weights in step_weights(*search.binding):
            improve(replace(best, weights=weights))
        for factor in STEPS:
            for k in range(1, len(kinds)):
                for change in (factor, 1 / factor):
                    moved = tuple(y * change if i == k else y for i, y in enumerate(best.prices))
                    improve(replace(best, prices=moved))
    lower_s = not_above(best_s * (1 - rounding(len(units.longest))), within_s)
    parts = zip(terms, best.minorants, best.prices, strict=True)
    return MixedBound(lower_s, tuple(KindBound(t.rays, m, y) for t, m, y in parts), best.weights, within_s)


class _Search:
    """Bisection on T for a choice of minorants, prices and weights."""

    def __init__(self, units: Units, kinds: Sequence[Kind], counts: Ints) -> None:
        self.units, self.kinds, self.counts = units, kinds, counts
        self.longest = units.longest.astype(np.float64)
        self.binding = (
            len(units.least_tokens) > min(kind.max_running for kind in kinds),
            min(kind.shape.kv_capacity_tokens for kind in kinds) < units.most_context,
        )

    def natural_prices(self, choice: _Choice) -> _Choice:
        """The choice with prices at which all units together cost each kind the same."""
        work = self._weights_s(choice).sum(axis=1)
        work = np.maximum(work, 1e-9 * work.max()) if work.any() else np.ones_like(work)
        return replace(choice, prices=tuple((work[0] / work).tolist()))

    def refuted_s(self, choice: _Choice, known_s: float) -> float:
        """The largest T, within rounding, refuted by this choice; ``known_s`` if that is no less."""
        w, prices = self._weights_s(choice), np.array(choice.prices)
        lead_s = choice.weights[0] * np.array([one.a_s for one in choice.minorants])
        low = known_s
        if placeable(self.longest, w, lead_s, prices, self.counts, low * (1 + 1e-9)):
            return known_s
        high = float(max(w.sum(axis=1)) + self.longest[0] * max(lead_s)) * (1 + 1e-9)
        while high - low > 1e-13 * high:
            middle = (low + high) / 2
            if middle <= low or middle >= high:
                break
            if placeable(self.longest, w, lead_s, prices, self.counts, middle):
                high = middle
            else:
                low = middle
        return low

    def _weights_s(self, choice: _Choice) -> Floats:
        """``[kinds, u]`` seconds that each unit adds besides the leader's."""
        rows = [
            kind_weights(self.units, kind, minorant, choice.weights)
            for kind, minorant in zip(self.kinds, choice.minorants, strict=True)
        ]
        return np.stack(rows)


def kind_weights(units: Units, kind: Kind, minorant: Minorant, weights: tuple[float, float, float]) -> Floats:
    """``[u]`` seconds w that each unit adds to an engine of this kind, besides ``a u`` times the longest."""
    _, slots, cache = weights
    per_token = minorant.b_s + minorant.a_s * slots / kind.max_running
    per_cache = minorant.a_s * cache / kind.shape.kv_capacity_tokens
    return np.asarray(per_token * units.tokens + minorant.c_s * units.context + per_cache * units.cache)


@njit(cache=True)
def placeable(
    longest: Floats, weight_s: Floats, lead_s: Floats, price: Floats, count: Ints, makespan_s: float
) -> bool:
    """Whether leaders can be placed so that the module's inequalities hold.

    Args:
        longest: ``[u]`` falling.
        weight_s: ``[kinds, u]`` additive seconds.
        lead_s, price, count: ``[kinds]`` seconds per step of the leader, price, number of engines.
        makespan_s: the T on trial.
    """
    kinds, n = weight_s.shape
    alone = np.empty((kinds, n), np.bool_)
    for k in range(kinds):
        for u in range(n):
            alone[k, u] = lead_s[k] * longest[u] + weight_s[k, u] <= makespan_s
    held = _prefixes(weight_s, price, alone)
    stride = np.ones(kinds + 1, np.int64)
    for k in range(kinds):
        stride[k + 1] = stride[k] * (count[k] + 1)
    leaders_s = np.full(stride[kinds], np.inf)  # least priced leader seconds, by engines opened of each kind
    leaders_s[0] = 0.0
    for state in range(stride[kinds]):
        if leaders_s[state] == np.inf:
            continue
        opened, prices = 0, 0.0
        for k in range(kinds):
            of_kind = state // stride[k] % (count[k] + 1)
            prices += of_kind * price[k]
            opened |= (of_kind > 0) << k
        following = 0
        if opened:
            room = prices * makespan_s - leaders_s[state]
            following = np.searchsorted(held[opened], room, side="right") - 1
        if following >= n:
            return True
        for k in range(kinds):
            if state // stride[k] % (count[k] + 1) < count[k]:
                leader = following
                while leader >= 0 and not alone[k, leader]:
                    leader -= 1
                if leader >= 0:
                    then = leaders_s[state] + price[k] * lead_s[k] * longest[leader]
                    after = state + stride[k]
                    leaders_s[after] = min(leaders_s[after], then)
    return False


@njit(cache=True)
def _prefixes(weight_s: Floats, price: Floats, alone: Bools) -> Floats:
    """``[sets of kinds, u + 1]`` prefix sums of the least priced weight over the kinds in each set."""
    kinds, n = weight_s.shape
    held = np.zeros((1 << kinds, n + 1))
    for opened in range(1, 1 << kinds):
        for u in range(n):
            least = np.inf
            for k in range(kinds):
                if opened >> k & 1 and alone[k, u]:
                    least = min(least, price[k] * weight_s[k, u])
            held[opened, u + 1] = held[opened, u] + least
    return held
