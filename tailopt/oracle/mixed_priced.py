r"""Priced staircase of kinds: a lower bound for engines of any shapes, any step times, and full caches.

Prices on requests and a staircase of leaders, as in :mod:`tailopt.oracle.lagrangian`, where every **kind** of
engine (:mod:`tailopt.oracle.kinds`) collects for itself. What an engine of kind k, led by unit p and done by
T, is known to satisfy are inequalities q of two sorts, each of which reads "a constant for the leader, and
something for each request, are at most T":

- **rows** (:mod:`tailopt.oracle.mixed_rows`), where the something is fixed: the affine step time with the
  longest request, with slots, with the cache, with recompute;
- **concave** functions below the kind's step time, where it depends on how many longer requests are there
  (where requests may wait for a slot, bent ones too: :mod:`tailopt.oracle.lagrangian_minorant`), and
  **crowds**, which divide such a function between the longest requests and the cache (same module).

Both hold for any order of admission and any limits, also those that follow finishes.

Let :math:`V_k(p)` be at least the prices that such an engine can collect,

.. math:: V_k(p) = \max_b \min_\lambda \Big[ \sum_q \lambda_q (T - \text{const}_q(p))
          + \max_{S \text{ in class } b} \sum_{i \in S} \big(u_i - \sum_q \lambda_q\,
          t_{q, i, \text{rank of } i \text{ in } S}\big) \Big] ,

for any labels that sort sets into classes and any multipliers :math:`\lambda \ge 0`. Units before the next
leader live on the engines opened so far, so with :math:`U` the prefix sums of the units' prices, a plan done
by T has leaders :math:`p_1 < p_2 < \dots` on engines of kinds :math:`k_1, k_2, \dots` with

.. math:: U(p_{j+1}) \le \sum_{r \le j} V_{k_r}(p_r) \quad \text{for every } j .

A table over the numbers of engines opened by kind, and the last leader, says whether there are any.

**Prices and multipliers** come from a linear program: the plan at hand, its leaders kept, its concave
functions replaced by their tangents, its requests dealt in fractions. Its dual values are the multipliers of
each engine; the price of a request is what it costs on the engine where that is least. The leaders that
collect most at these prices give the next linear program. From the best of them the prices follow the
subgradient towards a makespan, a share of the open gap above the best one refuted: the open gap is mostly not
the prices' to close, so the share falls while steps gain nothing, and grows when they do. Where that ends,
multipliers are added for the inequalities that the sets which collect most violate most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter as clock
from typing import Any

import numpy as np

from tailopt.arrays import Bools, Floats, Ints
from tailopt.oracle.kinds import Kind, KindTerms, kinds_of, terms_of
from tailopt.oracle.lagrangian import labels, smoothed
from tailopt.oracle.lagrangian_kernel import collect, layout, tabulate, worth
from tailopt.oracle.lagrangian_minorant import ConcaveMinorant, bent_minorants, concave_minorants
from tailopt.oracle.minorant import Minorant
from tailopt.oracle.mixed_kernel import most_collected
from tailopt.oracle.mixed_rows import Crowd, Loads, Row
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import Units, too_large

MARGIN = 1e-9
"""Share of all prices by which a plan must fail to pay, to be safe from the rounding of sums."""

MOST_STATES = 5_000  # numbers of engines opened by kind
MOST_MULTIPLIERS = 16
WORK = 25_000_000  # additions in the dynamic programs of one evaluation, which decide how fine labels are
FINER, MOST_WORK = 8, 200_000_000  # how many times as many when prices are stuck, and up to how many
FEWEST_CLASSES, MOST_CLASSES, FINER_CLASSES = 4, 120, 400
BEYOND = 1.1  # labels are told apart up to this share of the makespan of the plan at hand
BUCKETS = 160  # of requests of nearly equal length, in the linear program
PRECISION = 1e-10  # relative width at which a bisection stops
CLOSE = 3e-10  # share of the makespan at hand at which the bound is as good as equal
LOWER = 0.7  # factor of a new multiplier that is tried beside it
LEVELS = (1.0, 0.7, 1.5, 3.0)  # factors of the linear program's multipliers that are tried beside them
HEAD_STARTS = (0.7, 1.0, 1.4)  # in units of the steps after which the cache of an engine is full
MOST_STARTS = 6
CROWD_RANKS = (1, 2, 4, 10, 25)  # at which a concave function is divided between the longest and the cache
FILLING = 1.3  # what a token gets back in an empty cache, over what a full one makes others pay for it
PATIENCE = 50  # evaluations in a row, or half of all allowed, that gain less than
NOTABLE = 1e-3  # of the open gap, after which the bound is as good as it gets
RENEWED = 15  # evaluations in a row that gain less, after which other multipliers are tried
BEYOND_S = 0.5  # seconds by which an evaluation may end after the limit
STARTS = 3  # linear programs with the leaders that the one before led to
MOST_OWN = 7  # multipliers of a kind that the linear program gives
FEW = 4  # inequalities that stand in where it gives none
LEAST_SUM = 1e-2  # of the multipliers times the makespan, that all prices come to
LEAST_SHARE = 1e-6  # of the first rise, that a request costs at least in the first prices
FARTHEST, NEAREST = 0.5, 0.003  # shares of the open gap at which the subgradient is taken
FARTHER, NEARER = 1.5, 0.8  # what a step that gains makes of that share, and one that does not
ASTRAY = 5  # steps in a row that gain nothing, after which the best prices are taken up again
SMOOTH, SMOOTH_STEPS = 0.02, 8  # share of the requests that move together at first; steps until half as many
LEAST_CHANGE = 0.2  # no price falls further in one step
USED = 1e-9  # share of the multipliers below which an inequality is not worth keeping


@dataclass(frozen=True)
class KindPrices:
    """What the bound takes from one kind of engines.

    Attributes:
        rays: why no plan within the known makespan runs more than the minorants' ``n_max`` on one engine.
        rows, crowds, concave: the inequalities.
        multipliers: each one number for each row, then for each crowd, then for each concave function.
        label_s: the grid of the labels, in seconds of the first inequality.
        classes: labels from here on are one class.
    """

    rays: tuple[Minorant, ...]
    rows: tuple[Row, ...]
    crowds: tuple[Crowd, ...]
    concave: tuple[ConcaveMinorant, ...]
    multipliers: tuple[tuple[float, ...], ...]
    label_s: float
    classes: int


@dataclass(frozen=True)
class PricedKindsBound:
    """No static plan is done before ``lower_s``: engines done by then cannot pay the prices.

    Or they cannot wherever the first requests go: :mod:`tailopt.oracle.mixed_places`.

    Attributes:
        lower_s: the bound in seconds.
        prices: price of each request of the batch, in its order.
        kinds: one for each kind of the fleet, in its order.
        within_s: makespan of some plan, which the rays are about.
        places: how many of the longest requests are placed, in all ways that may pay; 0 if none need be.
        states: how many ways to place some of them were looked at.
    """

    lower_s: float
    prices: tuple[float, ...]
    kinds: tuple[KindPrices, ...]
    within_s: float
    places: int = 0
    states: int = 0


class KindsAscent:
    """Prices on their way up: those looked at last, and the best so far.

    Attributes:
        asked: what is bounded.
        best: the prices with the best bound; None before the first.
    """

    def __init__(self, asked: "Asked") -> None:
        self.asked = asked
        self.best: Evaluated | None = None
        self._at: Evaluated | None = None
        self._pace, self._fruitless, self._looks = _Pace(), 0, 0

    @classmethod
    def of(
        cls, problem: Problem, units: Units, engine_of: Ints, *, lower_s: float, upper_s: float
    ) -> "KindsAscent | None":
        """From a plan's prices; None for too many numbers of engines by kind.

        Args:
            problem, units: what is placed where.
            engine_of: ``[u]`` engines of a plan, from which the first prices come.
            lower_s: a bound at hand.
            upper_s: makespan of a plan at hand; the bound stays below it.
        """
        kinds = kinds_of(problem.fleet)
        if np.prod([len(kind.engines) + 1.0 for kind in kinds]) > MOST_STATES:
            return None
        return cls(Asked(problem, units, kinds, engine_of, lower_s, upper_s))

    @property
    def best_s(self) -> float:
        """The best bound, or the one known before."""
        return self.asked.lower_s

    def climb(self, iterations: int, deadline_s: float = np.inf) -> None:
        """So many evaluations more, unless the deadline (:func:`time.perf_counter`) comes first.

        Or until the prices are as good as they get.
        """
        self._fruitless, patience, now_s = 0, max(1, min(PATIENCE, iterations // 2)), clock()
        if self.best is not None and now_s > deadline_s:
            return
        for _ in range(iterations):
            self._look(self._next())
            before_s, now_s = now_s, clock()  # the next evaluation takes as long as this one
            late = now_s + max(0.0, now_s - before_s - BEYOND_S) > deadline_s
            if late or self._fruitless >= patience or self.best_s >= self.asked.upper_s * (1 - CLOSE):
                break

    def refine(self) -> bool:
        """Go on with finer labels, if they are not as fine as they get."""
        if self.best is None or self.asked.work >= MOST_WORK:
            return False
        self.asked.work *= FINER
        self._look(self.asked.evaluate(self.best.prices, self.best.finer()))
        return True

    def _next(self) -> "Evaluated":
        """From the linear program with the plan's leaders, then with its own, then along the subgradient.

        Now and then with other multipliers, where that gains nothing.
        """
        asked, at, best = self.asked, self._at, self.best
        if at is None or best is None:
            return asked.evaluate(*asked.start(asked.plan_leaders()))
        if self._looks <= STARTS:
            again = self._looks == 1 and asked.fills  # now that a bound is known, for engines done by then
            return asked.evaluate(*asked.start(asked.plan_leaders() if again else at.leaders_at(self.best_s)))
        if self._fruitless % RENEWED == RENEWED - 1:
            self._pace = _Pace(FARTHEST / 5, -RENEWED)
            return best.renewed(self.best_s)
        at = best if self._looks == STARTS + 1 or self._pace.lost else at
        target_s = self.best_s + self._pace.share * (asked.upper_s - self.best_s)
        return asked.evaluate(at.moved(target_s, self._width()), at.programs)

    def _look(self, found: "Evaluated") -> None:
        asked, before_s = self.asked, self.best_s
        refuted_s, trying = found.refuted_s(before_s), self._looks < STARTS
        gained = trying or refuted_s > before_s + NOTABLE * (asked.upper_s - before_s)
        self._fruitless = 0 if gained else self._fruitless + 1
        if self.best is None or refuted_s > before_s:
            self.best, asked.lower_s = found, max(before_s, refuted_s)
            self._pace.gained()
        elif self._looks > STARTS:
            self._pace.failed()
        self._at, self._looks = found, self._looks + 1

    def _width(self) -> int:
        """How many neighbours by length move together: many at first."""
        return int(len(self.asked.unit) * SMOOTH / (1 + (self._looks - STARTS) / SMOOTH_STEPS))


@dataclass
class _Pace:
    """Which share of the open gap the subgradient aims at, and for how many steps it has gained nothing."""

    share: float = FARTHEST
    astray: int = 0

    def gained(self) -> None:
        self.share, self.astray = min(FARTHEST, self.share * FARTHER), 0

    def failed(self) -> None:
        self.share, self.astray = max(NEAREST, self.share * NEARER), self.astray + 1

    @property
    def lost(self) -> bool:
        """Whether to take up the best prices again."""
        return self.astray > 0 and self.astray % ASTRAY == ASTRAY - 1


@dataclass(frozen=True, eq=False)
class _Led:
    """An engine that opens with a unit, and requests that it may hold, by their places."""

    kind: int
    unit: int
    mine: Ints


class _Side:
    """One kind's inequalities, over requests by falling length."""

    def __init__(self, asked: "Asked", kind: Kind, terms: KindTerms) -> None:
        trace = asked.problem.trace
        self.kind, self.rays = kind, terms.rays
        self.loads = Loads.of(asked.problem, kind, asked.requests)
        self.n_max = min(kind.max_running, trace.n_requests)
        self.fits = ~too_large(asked.problem, kind.shape)[asked.requests]
        lines = kind.shape.step_time.lines(self.n_max)
        straight = lines.separable and bool(
            (np.abs(np.diff(lines.base_s[0, 1:], 2)) <= 2.0**-50 * lines.base_s[0, -1]).all()
        )
        self.concave = [] if straight else concave_minorants([lines], self.n_max, asked.steps(kind))
        if trace.n_requests > kind.max_running:
            self.concave = [*bent_minorants(self.concave, self.n_max), *self.concave]
        self.rows = list(self._rows(terms.minorants, asked))
        cached = self.loads.cache < int((trace.context_tokens + trace.output_tokens).sum())
        self.crowds = [
            crowd
            for one in self.concave
            for ranks in CROWD_RANKS
            if cached and ranks <= len(one.rises_s)
            for crowd in dict.fromkeys(
                (Crowd(one, ranks), Crowd(one, ranks, FILLING * _shared_by(one, ranks, self.n_max)))
            )
        ]
        by_rank = [*(one.longest_s for one in self.crowds), *(one.rises_s for one in self.concave)]
        ranks = max(map(len, by_rank), default=1)
        self.ranks = np.array([len(rises) for rises in by_rank], dtype=np.int64)
        self.rises = np.array([_padded(rises, ranks) for rises in by_rank]).reshape(-1, ranks)
        self.fixed_s = [self.loads.crowd_s(one) for one in self.crowds]
        self.fixed_s += [one.c_s * self.loads.context + self.loads.prefill_s for one in self.concave]
        self.flat_s = np.array([self.loads.added_s(row) for row in self.rows]).reshape(-1, len(self.fits))
        self.first = asked.first

    def _rows(self, minorants: Sequence[Minorant], asked: "Asked") -> Iterator[Row]:
        trace, kind = asked.problem.trace, self.kind
        slots = trace.n_requests > kind.max_running
        cache = int((trace.context_tokens + trace.output_tokens).sum()) > self.loads.cache
        starts = asked.head_starts(kind, self.loads) if cache else []
        for one in minorants:
            if not self.concave:
                yield Row("longest", one)
            if one.a_s > 0:
                for start in (0, *starts):
                    if slots:
                        yield Row("slots", one, start)
                    if cache:
                        yield Row("cache", one, start)
                    if cache and start > 1:
                        yield Row("recompute", one, start)

    def constants_s(self, by_s: float) -> Floats:
        """``[q, u]`` constants of the inequalities by leader, for engines done by then or later."""
        loads, first = self.loads, self.first
        flat = [loads.constant_s(row, loads.output[first]) for row in self.rows]
        crowds = [
            loads.filled_s(crowd, added_s, by_s)[first]
            for crowd, added_s in zip(self.crowds, self.fixed_s, strict=False)
        ]
        return np.array([*flat, *crowds, *np.zeros((len(self.concave), len(first)))])

    def most_before(self, upper_s: float, chosen: Ints) -> Ints:
        """``[n]`` longer requests that an engine done by ``upper_s`` can hold besides each; -1: not it.

        By the ``chosen`` rows of ``rises``, as a checker is told of no others.
        """
        n = len(self.fits)
        most = np.arange(n)
        for rise in self.rises[chosen]:
            seconds = np.cumsum(_padded(tuple(rise), n))
            fitting = np.searchsorted(seconds, upper_s * (1 + 1e-9) / self.loads.output, side="right") - 1
            most = np.minimum(most, fitting)
        return np.where(self.fits, most, -1)

    def seconds(self, mine: Ints) -> Floats:
        """``[q]`` what an engine that holds these takes at least, besides the constants."""
        by_rank = np.minimum(np.arange(len(mine)), self.rises.shape[1] - 1)
        ranked_s = self.rises[:, by_rank] @ self.loads.output[mine]
        fixed_s = np.array([one[mine].sum() for one in self.fixed_s])
        return np.concatenate([self.flat_s[:, mine].sum(axis=1), ranked_s + fixed_s])

    def tangents(self, mine: Ints) -> tuple[Floats, Floats]:
        """``[q, n]`` seconds of each request as the engine of ``mine`` charges it, ``[q]`` constants."""
        output = self.loads.output
        ends = np.unique(output)
        together = np.maximum(1, len(mine) - np.searchsorted(np.sort(output[mine]), ends))
        added, constants = list(self.flat_s), [0.0] * len(self.flat_s)
        for rise, fixed_s in zip(self.rises, self.fixed_s, strict=True):
            steps_s = (
                np.diff(ends, prepend=0)
                * np.maximum(rise, LEAST_SHARE * rise[0])[np.minimum(together, len(rise)) - 1]
            )
            phi = np.cumsum(steps_s)[np.searchsorted(ends, output)]
            full = float(np.sort(output[mine])[::-1] @ _padded(tuple(rise), max(len(mine), 1))[: len(mine)])
            added.append(phi + fixed_s)
            constants.append(full - float(phi[mine].sum()))
        return np.array(added), np.array(constants)


class _Program:
    """One kind's dynamic program: the inequalities that its multipliers use, and the labels."""

    def __init__(self, asked: "Asked", side: _Side, multipliers: Floats) -> None:
        self.side, self.multipliers_of_all = side, multipliers
        self.used = np.flatnonzero(multipliers.max(axis=0) > 0)
        self.multipliers = multipliers[:, self.used]
        self.total = self.multipliers.sum(axis=1)
        flat = len(side.rows)
        by_rank = self.used[self.used >= flat] - flat
        self.most_before = side.most_before(asked.upper_s, by_rank)
        self.leader = np.where(self.most_before >= 0, asked.leader, -1)
        ranks = int(side.ranks[by_rank].max(initial=1))
        n = len(side.fits)
        cost_s = np.empty((len(self.used), n, ranks))
        for place, q in enumerate(self.used):
            if q < flat:
                cost_s[place] = side.flat_s[q][:, None]
            else:
                by_rank_s = side.loads.output[:, None] * side.rises[q - flat, :ranks]
                cost_s[place] = by_rank_s + side.fixed_s[q - flat][:, None]
        self.cost_s = cost_s
        states = int((np.minimum(self.most_before, ranks) + 1).sum())
        work = asked.work // max(1, len(asked.sides) * states * len(multipliers))
        most = MOST_CLASSES if asked.work == WORK else FINER_CLASSES
        self.classes = int(min(most, max(FEWEST_CLASSES, work)))
        self.label_s = BEYOND * asked.upper_s / self.classes
        self.label = labels(np.maximum(cost_s[-1], 0.0), self.label_s)
        self.layout = layout(self.label, self.most_before, self.leader, self.classes, False)
        self.marks = np.zeros(self.layout[0].max() * len(multipliers), np.uint8)
        constant_s = side.constants_s(asked.lower_s)[self.used]
        self.less = np.zeros((len(asked.first), len(multipliers)))
        for multiplier, constant in zip(self.multipliers.T, constant_s, strict=True):
            taking = multiplier > 0
            self.less[:, taking] += constant[:, None] * multiplier[taking]

    def table(self, asked: "Asked", prices: Floats) -> Floats:
        """``[units, multipliers, classes + 1]`` what an engine collects less its time, by its leader."""
        table = np.empty((len(asked.first), len(self.multipliers), self.classes + 1))
        tabulate(
            self.cost_s,
            self.label,
            self.most_before,
            prices,
            self.multipliers,
            self.leader,
            *self.layout,
            self.marks,
            table,
        )
        never = table == -np.inf
        table -= self.less[:, :, None]
        table[np.broadcast_to(self.less[:, :, None] == np.inf, table.shape)] = np.inf
        table[never] = -np.inf
        return table

    def argument(self) -> KindPrices:
        """What the bound takes from this kind."""
        side, used = self.side, set(self.used.tolist())
        flat, whole = len(side.rows), len(side.rows) + len(side.crowds)
        return KindPrices(
            side.rays,
            tuple(row for q, row in enumerate(side.rows) if q in used),
            tuple(one for q, one in enumerate(side.crowds, flat) if q in used),
            tuple(one for q, one in enumerate(side.concave, whole) if q in used),
            tuple(tuple(one) for one in self.multipliers.tolist()),
            self.label_s,
            self.classes,
        )


class Asked:
    """A problem's arrays, requests by falling length, and the inequalities of its kinds."""

    def __init__(
        self,
        problem: Problem,
        units: Units,
        kinds: Sequence[Kind],
        engine_of: Ints,
        lower_s: float,
        upper_s: float,
    ) -> None:
        trace = problem.trace
        unit = np.repeat(np.arange(len(units.members)), [len(members) for members in units.members])
        requests = np.concatenate(units.members)
        order = np.lexsort((unit, -trace.output_tokens[requests]))
        self.problem, self.lower_s, self.upper_s, self.work = problem, lower_s, upper_s, WORK
        self.requests, self.unit = requests[order], unit[order]
        self.output = trace.output_tokens[self.requests]
        self.engine_of = engine_of[self.unit]
        self.leader = np.full(len(self.unit), -1, dtype=np.int64)
        self.first = np.unique(self.unit, return_index=True)[1]
        self.leader[self.first] = np.arange(len(self.first))
        self.counts = np.array([len(kind.engines) for kind in kinds], dtype=np.int64)
        terms = terms_of(units, kinds, trace.n_requests, upper_s)
        self.sides = [_Side(self, kind, term) for kind, term in zip(kinds, terms, strict=True)]
        self.fills = any(crowd.filling_s for side in self.sides for crowd in side.crowds)

    def steps(self, kind: Kind) -> Floats:
        """``[n + 1]`` steps that the plan's engines of a kind take with 0, 1, ... requests."""
        n_max = min(kind.max_running, len(self.output))
        steps = np.zeros(n_max + 1)
        for e in kind.engines:
            mine = self.output[self.engine_of == e]
            np.add.at(steps, np.minimum(np.arange(1, len(mine) + 1), n_max), -np.diff(mine, append=0))
        return steps if steps.any() else np.ones(n_max + 1)

    def head_starts(self, kind: Kind, loads: Loads) -> list[int]:
        """Steps about which the caches of the plan's engines are full, if all requests start at once."""
        found: set[int] = set()
        ladder = np.unique(np.geomspace(16, max(17, self.output[0]), 200).astype(np.int64))
        for e in kind.engines:
            mine = np.flatnonzero(self.engine_of == e)
            output, held = self.output[mine], loads.held[mine]
            for steps in ladder:
                if ((held + steps) * (output > steps)).sum() > loads.cache:
                    found |= {int(share * steps) for share in HEAD_STARTS}
                    break
        rising = np.array(sorted(found), dtype=np.int64)
        return (
            rising[np.unique(np.linspace(0, len(rising) - 1, MOST_STARTS).astype(int))].tolist()
            if found
            else []
        )

    def plan_leaders(self) -> list[_Led]:
        """The plan's engines."""
        led = []
        for k, side in enumerate(self.sides):
            for e in side.kind.engines:
                mine = np.flatnonzero(self.engine_of == e)
                led.append(_Led(k, int(self.unit[mine[0]]) if len(mine) else len(self.first) - 1, mine))
        return led

    def start(self, engines: Sequence[_Led]) -> tuple[Floats, list[_Program]]:
        """Prices, and each kind's program with its multipliers, by the linear program for given leaders."""
        n = len(self.output)
        bucket = np.arange(n) * BUCKETS // n if n > BUCKETS else np.arange(n)
        count = int(bucket[-1]) + 1
        shortest = np.zeros(count, dtype=np.int64)
        shortest[bucket] = self.output  # the last, shortest one of each stays
        parts, costs = [], []
        known_s = [side.constants_s(self.lower_s) for side in self.sides]
        for led in engines:
            side = self.sides[led.kind]
            seconds, constants = side.tangents(led.mine)
            costs.append(seconds)
            parts.append(
                _Part(
                    np.array([np.bincount(bucket, one, count) for one in seconds]),
                    constants + known_s[led.kind][:, led.unit],
                    (shortest <= self.output[self.first[led.unit]])
                    & (np.bincount(bucket, ~side.fits, count) == 0),
                )
            )
        duals = _fractions(parts, self.upper_s)
        prices = np.full(n, np.inf)
        multipliers: list[list[Floats]] = [[] for _ in self.sides]
        for led, dual, seconds in zip(engines, duals, costs, strict=True):
            if dual.any():
                multipliers[led.kind].append(dual)
                may = self.sides[led.kind].fits & (np.arange(n) >= self.first[led.unit])
                prices = np.minimum(prices, np.where(may, dual @ seconds, np.inf))
        dearest = np.max(prices, where=np.isfinite(prices), initial=0.0)
        prices = np.maximum(np.where(np.isfinite(prices), prices, dearest), 0.0)
        # the longest request leads in any case: its price says nothing, but keeps all of them from vanishing
        prices[0] += max(0.0, LEAST_SUM * self.upper_s * sum(map(np.sum, duals)) - float(prices.sum()))
        level = float(prices.sum()) / (len(self.problem.fleet.engines) * self.upper_s)
        return prices, [
            _Program(self, side, _levels(found, len(known), level))
            for side, known, found in zip(self.sides, known_s, multipliers, strict=True)
        ]

    def evaluate(self, prices: Floats, programs: list[_Program]) -> "Evaluated":
        """The dynamic programs at these prices."""
        return Evaluated(self, prices, programs)


class Evaluated:
    """Prices, and what their dynamic programs say."""

    def __init__(self, asked: Asked, prices: Floats, programs: list[_Program]) -> None:
        self.asked, self.prices, self.programs = asked, prices, programs
        self.tables = [program.table(asked, prices) for program in programs]
        self.prefix = np.concatenate([[0.0], np.cumsum(np.bincount(asked.unit, prices))])
        shape = (len(programs), len(asked.first))
        self.value = np.empty(shape)
        self.label, self.chosen = np.empty(shape, np.int64), np.empty(shape, np.int64)
        self.leaders = np.empty((int(asked.counts.sum()), 2), np.int64)

    def surplus(self, makespan_s: float) -> float:
        """What engines done by then can collect at most, over the sum of all prices; negative: not enough."""
        for k, (table, program) in enumerate(zip(self.tables, self.programs, strict=True)):
            worth(table, program.total, makespan_s, self.value[k], self.label[k], self.chosen[k])
        slack = MARGIN * float(self.prefix[-1])
        collected = most_collected(self.value, self.asked.counts, self.prefix, slack, self.leaders)
        return collected - (float(self.prefix[-1]) - slack)

    def refuted_s(self, known_s: float) -> float:
        """The largest makespan that bisection finds refuted."""
        low, high = known_s, self.asked.upper_s
        if self.surplus(low) >= 0:
            low, high = 0.0, known_s
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            if self.surplus(middle) < 0:
                low = middle
            else:
                high = middle
        return low

    def leaders_at(self, makespan_s: float) -> list[_Led]:
        """The leaders that collect most at a makespan, with their sets; engines left over stay empty."""
        asked = self.asked
        self.surplus(makespan_s)
        left, led = asked.counts.copy(), []
        for leader, k in self.leaders[self.leaders[:, 0] >= 0]:
            times = np.zeros(len(self.prices))
            self._collect(int(leader), int(k), times)
            left[k] -= 1
            led.append(_Led(int(k), int(leader), np.flatnonzero(times)))
        last = len(asked.first) - 1
        return led + [
            _Led(k, last, np.array([asked.first[last]])) for k, m in enumerate(left) for _ in range(m)
        ]

    @property
    def fills(self) -> bool:
        """Whether an inequality in use lets tokens get something back, so that requests may make it fall."""
        return any(crowd.filling_s > 0 for one in self.programs for crowd in one.argument().crowds)

    def finer(self) -> list[_Program]:
        """The programs with as fine labels as they may have now."""
        return [_Program(self.asked, one.side, one.multipliers_of_all) for one in self.programs]

    def moved(self, target_s: float, width: int) -> Floats:
        """Prices a step along the subgradient of the surplus at a makespan, long enough to use it up."""
        surplus = self.surplus(target_s)
        times = np.full(len(self.prices), -1.0)
        for leader, k in self.leaders[self.leaders[:, 0] >= 0]:
            self._collect(int(leader), int(k), times)
        scaled = times * self.prices
        move = smoothed(scaled, width)
        step = max(0.0, surplus) / max(float(scaled @ move), 1e-300)
        return np.asarray(self.prices * np.maximum(1 - step * move, LEAST_CHANGE))

    def renewed(self, makespan_s: float) -> "Evaluated":
        """The same prices with more multipliers: of what the sets that collect most violate most."""
        asked, led, programs = self.asked, self.leaders_at(makespan_s), []
        for k, (side, program) in enumerate(zip(asked.sides, self.programs, strict=True)):
            given = np.zeros((len(program.multipliers), len(side.rows) + len(side.ranks)))
            given[:, program.used] = program.multipliers
            constants_s = side.constants_s(asked.lower_s)
            mine = [one for one in led if one.kind == k and self.chosen[k, one.unit] >= 0]
            used = given[[self.chosen[k, one.unit] for one in mine]]
            worst = np.zeros_like(used)
            for one, row, new in zip(mine, used, worst, strict=True):
                seconds = side.seconds(one.mine) + constants_s[:, one.unit]
                violated = np.argmax(np.where(np.isfinite(seconds), seconds, 0.0))
                new[violated] = row.sum() or program.total.max()
            some = np.concatenate([given[:1], used, worst, (used + worst) / 2, LOWER * worst, given])
            first = np.sort(np.unique(some, axis=0, return_index=True)[1])
            programs.append(_Program(asked, side, some[first[:MOST_MULTIPLIERS]]))
        return asked.evaluate(self.prices, programs)

    def _collect(self, leader: int, k: int, times: Floats) -> None:
        program = self.programs[k]
        collect(program.label, program.most_before, *program.layout, program.marks, len(program.multipliers),
                program.classes, int(self.asked.first[leader]), int(self.label[k, leader]),
                int(self.chosen[k, leader]), times)  # fmt: skip

    def argument(self, lower_s: float, places: int = 0, states: int = 0) -> PricedKindsBound:
        """The bound, with all that proves it."""
        prices = np.empty(len(self.prices))
        prices[self.asked.requests] = self.prices
        kinds = tuple(program.argument() for program in self.programs)
        return PricedKindsBound(lower_s, tuple(prices.tolist()), kinds, self.asked.upper_s, places, states)


def _levels(found: Sequence[Floats], inequalities: int, level: float) -> Floats:
    """``[k, q]`` multipliers for a kind: none, those that the linear program found, and some multiples."""
    none = np.zeros((1, inequalities))
    if not found:
        found = [level * one for one in np.eye(inequalities)[-FEW:]]
    own = np.unique(np.array(found), axis=0)
    own = own[np.unique(np.linspace(0, len(own) - 1, MOST_OWN).astype(int))]
    own = own * (own > USED * own.max())
    room = (MOST_MULTIPLIERS - 1) // len(LEVELS)
    some = own[np.unique(np.linspace(0, len(own) - 1, room).astype(int))]
    return np.concatenate([none, own, *(share * some for share in LEVELS[1:])])[:MOST_MULTIPLIERS]


def _shared_by(one: ConcaveMinorant, ranks: int, together: int) -> float:
    """What each of so many requests pays for a step of theirs, shared evenly, besides the last one's rise."""
    rises = np.minimum(_padded(one.rises_s, together), one.rises_s[ranks - 1])
    return max(0.0, float(rises.mean() - rises[-1]))


def _padded(rises: tuple[float, ...], ranks: int) -> Floats:
    """The first ``ranks`` rises; the last one goes on."""
    return np.array([*rises[:ranks], *(rises[-1],) * (ranks - len(rises))])


@dataclass(frozen=True, eq=False)
class _Part:
    """One engine of the linear program: seconds by inequality and bucket, constants, what it may hold."""

    added_s: Floats
    constant_s: Floats
    allowed: Bools


def _fractions(parts: Sequence[_Part], upper_s: float) -> list[Floats]:
    """Dual values of each engine's inequalities, when buckets are dealt in fractions."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    allowed = np.array([part.allowed for part in parts])
    last = int(allowed.sum())  # the variable that is the makespan, in units of ``upper_s``
    variable = np.full(allowed.shape, -1)
    variable[allowed] = np.arange(last)
    rows, limits = [], []
    for part, columns in zip(parts, variable, strict=True):
        holds = np.isfinite(part.constant_s)
        row = np.zeros((int(holds.sum()), last + 1))
        row[:, columns[part.allowed]] = part.added_s[holds][:, part.allowed] / upper_s
        row[:, last] = -1.0
        rows.append(csr_array(row))
        limits.append(-part.constant_s[holds] / upper_s)
    engine, bucket = np.nonzero(allowed)
    dealt = csr_array((np.ones(last), (bucket, variable[engine, bucket])), shape=(allowed.shape[1], last + 1))
    solved = linprog(
        np.append(np.zeros(last), 1.0),
        A_ub=_stacked(rows),
        b_ub=np.concatenate(limits),
        A_eq=dealt,
        b_eq=np.ones(allowed.shape[1]),
        bounds=[*[(0, None)] * last, (None, None)],
        method="highs",
    )
    duals = [np.zeros(len(part.constant_s)) for part in parts]
    if solved.x is None:
        return duals
    values = np.split(
        np.maximum(0.0, -solved.ineqlin.marginals), np.cumsum([len(one) for one in limits])[:-1]
    )
    for dual, part, value in zip(duals, parts, values, strict=True):
        dual[np.isfinite(part.constant_s)] = value
    return duals


def _stacked(rows: list[Any]) -> Any:
    from scipy.sparse import vstack

    return vstack(rows, format="csr")
