r"""Priced staircase: a lower bound for any step time, by prices on requests.

**One engine.** Let :math:`\tau(n, K) \ge g(n) + c K` for the n that can run together, with g concave and
g(0) = 0. An engine that decodes a set S, in whatever order and under whatever limits, takes at least

.. math:: T(S) = \sum_j L_{(j)}\, (g(j) - g(j-1)) + c \sum_{i \in S} A_i ,

its longest request first (majorization, as in :mod:`tailopt.oracle.alone`): the request that comes j-th by
falling length costs its length times the j-th *rise* of g. To this comes what its context takes, and its part
of the prefill that no plan saves (:func:`tailopt.oracle.units.least_prefill`). There can be several such
functions, as the pieces of a convex step time are, and each gives a T(S).

**Prompts.** An engine that holds any of a prompt's samples computes the tokens that these share, once. Let
sample i of prompt g pay for a share :math:`\theta_i \ge 0` of their seconds :math:`s_g`, where those of all
its samples sum to 1 at most. A set S pays :math:`\sum_{i \in S \cap g} \theta_i s_g \le s_g` for each prompt
that it has some of, so T(S) may count it, whatever the shares; and each function may have its own. Even ones
say that a prompt is computed somewhere; those that sum to 1 over what one engine of the plan at hand holds
say all that it computes.

**All engines.** Give request i a price :math:`u_i \ge 0` and let V(p) be at least the prices that an engine
done by T can collect if unit p is its *leader*, the first of its units by falling length. Units before the
(j+1)-th leader live on engines 1..j, so with the prefix sums U of the units' prices, a plan done by T has

.. math:: U(p_{j+1}) \le \sum_{r \le j} V(p_r) \quad \text{for every } j, \qquad p_{m+1} = \text{all} .

The most that j leaders can collect is found leader by leader (the more collected the better for all that
follows); if m of them cannot pay for all units, T is refuted. The prices u = w on an affine step time give
the staircase bound of :mod:`tailopt.oracle.staircase`. On a concave one no affine function will do: the long
requests run few together, at steep rises, and the short ones in crowds, at flat rises, and the prices say
what each is worth.

**One leader.** V(p) is a knapsack over sets. Sort them into classes by any additive *label*, and in each
class take the best of several multipliers :math:`\lambda \ge 0`:

.. math:: V(p) = \max_b \min_\lambda \Big[\lambda T + \max_{S \text{ in class } b} \sum_{i \in S}
          (u_i - \lambda\, t_{i, \text{rank of } i \text{ in } S}) \Big] ,

valid whatever the labels and the multipliers. The inner maximum is a dynamic program over (request by falling
length, rank, label). The label is roughly the time of the set in units of a grid: sets of a class then take
about equally long, which matters, since by concavity a multiplier alone would rather take everything or
nothing. The program does not depend on T, so T is bisected on its table.

**Equal requests** need not be told apart (:mod:`tailopt.oracle.lagrangian_alike`). Those of one length may
all count with the least prompt among them: T(S) falls by no more than they differ.

**Prices** start from a linear program where all functions are lines (:mod:`tailopt.oracle.lagrangian_start`),
else from what each request costs in the plan at hand, and follow the subgradient: a request that the engines
of the best leaders leave out should cost more, one that several take less.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.engine.decode_time import context_read
from tailopt.engine.step_time import Lines
from tailopt.oracle.lagrangian_alike import classes, least_of_class, mean_of_class
from tailopt.oracle.lagrangian_kernel import Marks, collect, layout, most_collected, tabulate, worth
from tailopt.oracle.lagrangian_minorant import (
    ConcaveMinorant,
    SwitchedMinorant,
    bent_minorants,
    concave_minorants,
    parts_of,
    ray_minorants,
    switched_minorants,
)
from tailopt.oracle.lagrangian_start import starts
from tailopt.oracle.minorant import SHRINK
from tailopt.oracle.problem import Problem
from tailopt.oracle.side_by_side import halves, side_by_side
from tailopt.oracle.units import Units, lines_of, shared_prefill

Minorant = ConcaveMinorant | SwitchedMinorant

MARGIN = 1e-9
"""Share of all prices by which a plan must fail to pay, to be safe from the rounding of sums."""

CLOSE = 3e-10  # share of the makespan at hand at which the bound is as good as equal
PRECISION, OPEN_PRECISION = 1e-7, 2e-3  # width at which a bisection stops, of the bound or of what is open
WORK = 80_000_000  # additions in one dynamic program, which decide how fine the labels are
LEVELS, LEAST_LEVEL, MOST_LEVEL = 12, 0.7, 8.0  # multipliers, in units of all prices over all engines' time
MANY, FINE, FEW_LEVELS = 4, 16, 4  # with more minorants or fewer classes, fewer multipliers for each
FIRST_SHARE, LEAST_TARGET = 0.5, 2e-3  # shares of the open gap at which the subgradient is taken
PATIENCE, LEAST_GAIN = 8, 1e-6  # steps that gain less than this share before the step is halved
LEAST_SHARE = 1e-6  # of the first rise, that a request costs at least in the first prices
LEAST_CHANGE = 0.2  # no price falls further in one step
FEWEST_CLASSES, MOST_CLASSES = 6, 400
BEYOND = 1.1  # labels are told apart up to this share of the makespan of the plan at hand
MOST_MINORANTS, LEAST_COVERED = 8, 1e-4  # if no request waits; share of the plan's seconds that one more adds
MOST_WITH_OTHER = 5  # with those of another plan
SMOOTH, SMOOTH_STEPS = 0.02, 8  # share of the requests that move together at first; steps until half as many
GOLDEN = 0.6180339887498949
AGREED = 1e-9  # of a label


@dataclass(frozen=True)
class PricedBound:
    """No static plan is done before ``lower_s``: engines done by then cannot pay the prices.

    Or they cannot wherever the first requests go: :mod:`tailopt.oracle.lagrangian_search`.

    Attributes:
        lower_s: the bound in seconds.
        minorants: functions below every engine's step time.
        prices: price of each request of the batch, in its order.
        multipliers: for each class the best of these is taken; one number for each minorant.
        label_s: the grid of the labels, in seconds of the first minorant.
        classes: labels from here on are one class.
        places: how many of the longest requests are placed, in all ways that may pay; 0 if none need be.
        states: how many ways to place some of them were looked at.
        shares: for each minorant the share of its prompt's shared tokens that each request pays for; those of
            one prompt sum to 1 at most. Empty if nobody pays for them.
        alike: class of each request; those of a class are equally long, and all count with its least prompt
            and least prefill. Empty if each is a class.
    """

    lower_s: float
    minorants: tuple[ConcaveMinorant | SwitchedMinorant, ...]
    prices: tuple[float, ...]
    multipliers: tuple[tuple[float, ...], ...]
    label_s: float
    classes: int
    places: int = 0
    states: int = 0
    shares: tuple[tuple[float, ...], ...] = ()
    alike: tuple[int, ...] = ()


def labels(cost_s: Floats, label_s: float) -> Ints:
    """``[n, ranks]`` label of each request at each rank: its cost on the grid, rounded.

    Up or down by rank, evenly spread, so that the label of a set of many short requests is still about right;
    and up by a hair, so that who computes costs in another order, as a checker does, has the same label where
    they are on the grid.

    >>> labels(np.array([[2.5, 0.5, 0.5, 0.5]]), 1.0)
    array([[2, 1, 0, 1]])
    """
    shift = GOLDEN * np.arange(cost_s.shape[1]) % 1.0 + AGREED
    return np.asarray(np.floor(cost_s / label_s + shift).astype(np.int64))


class Ascent:
    """Prices on their way up: those looked at last, and the best so far.

    Attributes:
        asked: what is bounded.
        best: the prices with the best bound; None before the first.
        best_s: that bound.
    """

    def __init__(self, asked: "Asked") -> None:
        self.asked = asked
        self.best: Priced | None = None
        self.best_s = 0.0
        self._at: Priced | None = None
        self._share, self._stuck, self._steps = FIRST_SHARE, 0, 0

    def climb(self, iterations: int, deadline_s: float = np.inf) -> None:
        """So many dynamic programs more, unless the deadline (:func:`time.perf_counter`) comes first."""
        for _ in range(iterations):
            if clock() > deadline_s or self.best_s >= self.asked.upper_s * (1 - CLOSE):
                break
            if self._at is None:
                for prices, relative in self.asked.first_prices():
                    self._look(self.asked.evaluate(prices, relative))
                self._at = self.best
            else:
                self._look(self.asked.evaluate(self._at.moved(), self._at.relative))

    def _look(self, found: "Priced") -> None:
        refuted_s = found.refuted_s(self.best_s)
        self._at, before = found, self.best
        self._stuck = 0 if refuted_s > self.best_s * (1 + LEAST_GAIN) else self._stuck + 1
        if self.best is None or refuted_s > self.best_s:
            self.best, self.best_s = found, refuted_s
        found.aim(self.best_s + self._share * (self.asked.upper_s - self.best_s), self._width())
        if before is not None:
            (found if before is self.best else before).release()
        self._steps += 1
        if self._stuck > PATIENCE:
            self._at, self._stuck = self.best, 0
            self._share = self._share / 2 if self._share > LEAST_TARGET else FIRST_SHARE

    def _width(self) -> int:
        """How many neighbours by length move together: many at first."""
        return int(len(self.asked.unit) * SMOOTH / (1 + self._steps / SMOOTH_STEPS))


def priced_bound(
    problem: Problem,
    units: Units,
    engine_of: Ints,
    *,
    lower_s: float,
    upper_s: float,
    iterations: int,
    deadline_s: float = np.inf,
) -> PricedBound | None:
    """The best bound above ``lower_s`` that the subgradient of the prices leads to; None if there is none.

    Args:
        problem, units: what is placed where.
        engine_of: ``[u]`` engines of a plan, from which the first prices come.
        lower_s: a bound at hand.
        upper_s: makespan of a plan at hand; the bound stays below it.
        iterations: dynamic programs to solve at most.
        deadline_s: :func:`time.perf_counter` at which to stop. So does Ctrl-C; what was found is returned.
    """
    ascent = Ascent(Asked(problem, units, engine_of, upper_s))
    with suppress(KeyboardInterrupt):
        ascent.climb(iterations, deadline_s)
    if ascent.best is None or ascent.best_s <= lower_s:
        return None
    return ascent.best.argument(ascent.best_s)


class Asked:
    """A problem's arrays, requests by falling length.

    The minorants are those that say most of the plan at hand, and a few that say more of another: those of a
    well balanced plan alone say little of leaders that it does not have.

    Args:
        problem, units: what is placed where.
        engine_of: ``[u]`` engines of the plan at hand.
        upper_s: its makespan.
        other: ``[u]`` engines of another plan.
        spare_s: seconds an engine, in the mean, that the bound may lose for requests that are alike.
    """

    def __init__(
        self,
        problem: Problem,
        units: Units,
        engine_of: Ints,
        upper_s: float,
        other: Ints | None = None,
        spare_s: float = 0.0,
    ) -> None:
        trace, engines = problem.trace, range(len(problem.fleet.engines))
        unit = np.repeat(np.arange(len(units.members)), [len(members) for members in units.members])
        requests = np.concatenate(units.members)
        order = np.lexsort((unit, -trace.output_tokens[requests]))
        self.requests, self.unit = requests[order], unit[order]
        self.engine_of, self.engines, self.upper_s = engine_of[self.unit], len(engines), upper_s
        self.length = trace.output_tokens[self.requests]
        self.leader = np.full(len(self.unit), -1, dtype=np.int64)
        self.first = np.unique(self.unit, return_index=True)[1]
        self.leader[self.first] = np.arange(len(self.first))

        n_max = min(units.max_running, len(self.unit))
        members = np.array([len(one) for one in units.members])
        self.prompt = trace.context_tokens[self.requests]
        self.prefill_s = (units.prefill_s / members)[self.unit]
        self.group, self.shared_s = trace.group[self.requests], self._shared_s(problem)
        lines = lines_of(problem, n_max)
        alike = concave_minorants(lines, n_max, self._steps(n_max))
        self.minorants, self.shares = self._binding(alike, lines, n_max, self.engine_of)
        if other is not None:
            self._add(*self._binding(alike, lines, n_max, other[self.unit]))
        self.mixes = np.eye(len(self.minorants))
        self.parts = [[self._part(*part) for part in parts_of(minorant)] for minorant in self.minorants]
        ranks = max(len(part.rises) for parts in self.parts for part in parts)
        context_s = np.array([sum(part.context_s for part in parts) for parts in self.parts])
        paid_s = self.prefill_s + self.shares * self.shared_s
        self.alike = np.arange(len(self.unit))
        if len(self.first) == len(self.unit):
            self.alike = classes(self.length, context_s, paid_s, spare_s * self.engines)
        self.fixed_s = least_of_class(context_s, self.alike) + least_of_class(paid_s, self.alike)
        self.cost_s = np.array(
            [sum(part.length[:, None] * _padded(part.rises, ranks) for part in parts) for parts in self.parts]
        )
        self.cost_s += self.fixed_s[:, :, None]
        self.most_before = self._most_before()
        states = int(self._states())
        self.starts = starts(self.cost_s, upper_s) if ranks <= 2 else []
        fine = WORK // (states * len(self.mixes) * LEVELS) >= FINE and len(self.mixes) <= MANY
        self.levels = LEVELS if fine else FEW_LEVELS
        most = max((len(start.multipliers) for start in self.starts), default=len(self.mixes) * self.levels)
        self.classes = min(MOST_CLASSES, max(FEWEST_CLASSES, WORK // (states * most)))
        self.label_s = BEYOND * upper_s / self.classes
        self.label = labels(self.cost_s[0], self.label_s)
        self.spare: list[Floats] = []
        self.layout = layout(self.label, self.most_before, self.leader, self.classes, True)
        self.marks = np.zeros(self.layout[0].max() * (1 + len(self.mixes) + most), np.uint8)

    def _part(self, minorant: ConcaveMinorant, first: int, last: int | None) -> "_Part":
        """What the steps of each request cost for which a function holds."""
        from_, to = (
            np.minimum(self.length, end) for end in (first, self.length.max() if last is None else last)
        )
        context = context_read(self.prompt, to) - context_read(self.prompt, from_)
        return _Part(
            np.array(minorant.rises_s), to - from_, np.asarray(minorant.c_s * context, dtype=np.float64)
        )

    def _add(self, minorants: list[Minorant], shares: Floats) -> None:
        """Those of another plan, while there are few."""
        for minorant, of_minorant in zip(minorants, shares, strict=True):
            if minorant not in self.minorants and len(self.minorants) < MOST_WITH_OTHER:
                self.minorants.append(minorant)
                self.shares = np.vstack([self.shares, of_minorant])

    def _binding(
        self, alike: list[ConcaveMinorant], lines: Sequence[Lines], n_max: int, engine_of: Ints
    ) -> tuple[list[Minorant], Floats]:
        """The minorants that say most of the engines of a plan, and shares of prompts with each.

        Where requests have to wait, the one that says most of such engines.
        """
        held = np.bincount(engine_of, minlength=self.engines)
        together: list[Minorant] = [*alike, *switched_minorants(alike, int(self.length.max()))]
        shares = self._shares(engine_of)
        shared_s = self._shared_in_plan(shares, engine_of)
        seconds = self._seconds_in_plan(together, engine_of)[:, :, None] + shared_s[:, None, :]
        seconds = seconds.reshape(self.engines, -1)[held <= n_max]
        covered: Floats = np.zeros(len(seconds))
        binding: list[Minorant] = []
        of_binding: list[Floats] = []
        for _ in range(MOST_MINORANTS):
            then = np.maximum(seconds, covered[:, None])
            best = int(then.sum(axis=0).argmax())
            if then[:, best].sum() <= covered.sum() * (1 + LEAST_COVERED):
                break
            binding.append(together[best // len(shares)])
            of_binding.append(shares[best % len(shares)])
            covered = then[:, best]
        if (held > n_max).any():
            waiting: list[Minorant] = [*alike, *ray_minorants(lines, n_max), *bent_minorants(alike, n_max)]
            seconds = self._seconds_in_plan(waiting, engine_of)[held > n_max]
            best = int(seconds.sum(axis=0).argmax())
            if waiting[best] not in binding:
                binding.append(waiting[best])
                of_binding.append(shares[0])
        return binding, np.array(of_binding)

    def _shared_s(self, problem: Problem) -> Floats:
        """``[n]`` seconds in which an engine computes what each request shares with its prompt."""
        if problem.atomic:
            return np.zeros(len(self.unit))
        shapes = [problem.fleet.shape_of(e) for e in range(self.engines)]
        per_token = 1 / max(shape.prefill_tokens_per_s for shape in shapes)
        return np.asarray(per_token * shared_prefill(problem)[self.requests])

    def _shares(self, engine_of: Ints) -> Floats:
        """``[k, n]`` shares of prompts: even ones, and for each engine those among the samples it holds."""
        even: Floats = SHRINK / np.bincount(self.group)[self.group]
        if not self.shared_s.any():
            return even[None]
        found = [even]
        for e in range(self.engines):
            mine = engine_of == e
            here = np.bincount(self.group[mine], minlength=int(self.group.max()) + 1)[self.group]
            found.append(np.where(here > 0, SHRINK * mine / np.maximum(here, 1), even))
        return np.array(found)

    def _shared_in_plan(self, shares: Floats, engine_of: Ints) -> Floats:
        """``[m, k]`` seconds of shared tokens that a plan's engines compute, by each way to share them."""
        seconds = shares * self.shared_s
        return np.stack([np.bincount(engine_of, one, self.engines) for one in seconds], axis=1)

    def _seconds_by_all(self, engine_of: Ints) -> Floats:
        """``[m, minorants]`` seconds of a plan's engines by each minorant in use, with its shares."""
        return self._seconds_in_plan(self.minorants, engine_of) + self._shared_in_plan(self.shares, engine_of)

    def seconds_of(self, engine_of_unit: Ints) -> float:
        """Makespan of a plan by the minorants."""
        return float(self._seconds_by_all(engine_of_unit[self.unit]).max())

    def completed(self, engine_of_unit: Ints) -> Ints:
        """A beginning (-1: unit not placed) as a plan: the next request where it is done first."""
        engine_of = engine_of_unit.copy()
        held, load_s = np.zeros(self.engines, np.int64), np.zeros((len(self.minorants), self.engines))
        for i, unit in enumerate(self.unit):
            then_s = load_s + self.cost_s[:, i, np.minimum(held, self.cost_s.shape[2] - 1)]
            if engine_of[unit] < 0:
                engine_of[unit] = then_s.max(axis=0).argmin()
            e = engine_of[unit]
            load_s[:, e] = then_s[:, e]
            held[e] += 1
        return engine_of

    def _seconds_in_plan(self, minorants: Sequence[Minorant], engine_of: Ints) -> Floats:
        """``[m, minorants]`` seconds of a plan's engines by each minorant, shared tokens left out."""
        seconds = np.zeros((self.engines, len(minorants)))
        for q, minorant in enumerate(minorants):
            for part in (self._part(*one) for one in parts_of(minorant)):
                for e in range(self.engines):
                    mine = engine_of == e
                    seconds[e, q] += part.length[mine] @ _padded(part.rises, int(mine.sum()))
                    seconds[e, q] += part.context_s[mine].sum()
        return seconds + np.bincount(engine_of, self.prefill_s, self.engines)[:, None]

    def _steps(self, n_max: int) -> Floats:
        """``[n_max + 1]`` steps that the plan's engines take with so many requests, if none waits."""
        steps = np.zeros(n_max + 1)
        for e in range(self.engines):
            mine = self.length[self.engine_of == e]
            crowd = np.minimum(np.arange(1, len(mine) + 1), n_max)
            np.add.at(steps, crowd, -np.diff(mine, append=0))
        return steps

    def _states(self) -> float:
        """Pairs of a request and a rank in the dynamic program, each by the share of labels that is left."""
        rank = np.arange(self.cost_s.shape[2] + 1)
        left = 1 - self._least_s(self.parts[0], rank) / (BEYOND * self.upper_s)
        return float(np.where(rank <= self.most_before[:, None], np.maximum(left, 0.0), 0.0).sum())

    def _least_s(self, parts: list["_Part"], count: Ints) -> Floats:
        """``[n, ...]`` least seconds of so many requests at least as long as each request."""
        most = int(count.max())
        total = np.zeros(np.broadcast_shapes((len(self.length), 1), count.shape))
        for part in parts:
            total += part.length[:, None] * np.append(0.0, np.cumsum(_padded(part.rises, most)))[count]
        return total

    def _most_before(self) -> Ints:
        """``[n]`` longer requests that an engine done by ``upper_s`` can hold besides each request."""
        low, high = np.zeros(len(self.unit), dtype=np.int64), np.arange(len(self.unit))
        while (low < high).any():
            middle = (low + high + 1) // 2
            need_s = np.max([self._least_s(parts, middle[:, None] + 1)[:, 0] for parts in self.parts], axis=0)
            fits = need_s <= self.upper_s * (1 + 1e-9)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return low

    def first_prices(self) -> list[tuple[Floats, Floats | None]]:
        """Prices to start from, with multipliers that go with them if they are known, in units of a level."""
        if self.starts:
            return [(one.prices, one.multipliers / self._level_s(one.prices)) for one in self.starts]
        return [(prices, None) for prices in self._in_plan()]

    def _level_s(self, prices: Floats) -> float:
        """All prices over all engines' time."""
        return float(prices.sum() / (self.engines * self.upper_s))

    def _in_plan(self) -> list[Floats]:
        """What a request costs in the plan at hand, by what binds there."""
        alike = [self._costs_in_plan([q] * self.engines) for q in range(len(self.minorants))]
        if len(alike) == 1:
            return alike
        binding = self._seconds_by_all(self.engine_of).argmax(axis=1)
        return [self._costs_in_plan(binding.tolist()), *alike, np.mean(alike, axis=0)]

    def _costs_in_plan(self, minorant_of: list[int]) -> Floats:
        r"""What each request costs an engine, on the engine where that is least.

        On engine e a request of length L costs :math:`\phi_e(L)`, the last rise of its minorant at each of
        its steps, and what is fixed. Engines are weighted so that each values its neighbour's longest request
        as the neighbour does: the longer an engine's requests the fewer it holds and the dearer its steps.
        """
        ends = np.unique(self.length)  # rising
        at = np.searchsorted(ends, self.length)
        cheapest, before, scale = np.full(len(self.length), np.inf), None, 1.0
        by_leader = np.unique(self.engine_of, return_index=True)
        for e in by_leader[0][np.argsort(by_leader[1])]:
            mine = np.sort(self.length[self.engine_of == e])
            crowd = np.maximum(1, len(mine) - np.searchsorted(mine, ends))
            phi = np.zeros(len(ends))
            for (_, first, last), part in zip(
                parts_of(self.minorants[minorant_of[e]]), self.parts[minorant_of[e]], strict=True
            ):
                rises = np.maximum(part.rises, LEAST_SHARE * part.rises[0])  # a price of nothing never moves
                steps = np.diff(np.clip(ends, first, last), prepend=first)
                phi += np.cumsum(steps * rises[np.minimum(crowd, len(rises)) - 1])
            cost_s = phi[at] + self.fixed_s[minorant_of[e]]
            if before is not None:
                longest = int(np.argmax(self.engine_of == e))
                scale *= before[longest] / cost_s[longest]
            cheapest, before = np.minimum(cheapest, scale * cost_s), cost_s
        return cheapest

    def evaluate(self, prices: Floats, relative: Floats | None = None) -> "Priced":
        """The dynamic program at these prices and multipliers; None: each minorant's, at all levels."""
        prices, level_s = mean_of_class(prices, self.alike), self._level_s(prices)
        if relative is None:
            levels = level_s * np.geomspace(LEAST_LEVEL, MOST_LEVEL, self.levels)
            levels = np.append(levels, min(1.0, MOST_LEVEL * level_s))  # 1: as prices start, first engine
            multipliers = (levels[:, None, None] * self.mixes).reshape(-1, len(self.minorants))
        else:
            multipliers = level_s * relative
        multipliers = np.concatenate([np.zeros((1, len(self.minorants))), multipliers])
        shape = len(self.first), len(multipliers), self.classes + 1
        table = self.spare.pop() if self.spare else np.empty(0)
        if table.shape != shape:
            table = np.empty(shape)
        numbers = int(self.layout[0].max()) * len(multipliers)
        parts = halves(len(multipliers), numbers)
        side_by_side([partial(self._tabulate, prices, multipliers, part, table) for part in parts])
        return Priced(self, prices, relative, multipliers, parts, table)

    def _tabulate(self, prices: Floats, multipliers: Floats, part: slice, table: Floats) -> None:
        """The dynamic program for part of the multipliers."""
        tabulate(self.cost_s, self.label, self.most_before, prices, multipliers[part], self.leader,
                 *self.layout, self.marks_of(part), table[:, part], True)  # fmt: skip

    def marks_of(self, part: slice) -> Marks:
        """Where the marks of part of the multipliers are."""
        size = int(self.layout[0].max())
        return self.marks[part.start * size : part.stop * size]


@dataclass(frozen=True, eq=False)
class _Part:
    """What the steps cost for which a function holds: its rises, and each request's steps and context."""

    rises: Floats
    length: Ints
    context_s: Floats


class Priced:
    """Prices, and what their dynamic program says."""

    def __init__(
        self,
        asked: Asked,
        prices: Floats,
        relative: Floats | None,
        multipliers: Floats,
        parts: list[slice],
        table: Floats,
    ) -> None:
        self.asked, self.prices, self.relative = asked, prices, relative
        self.multipliers, self.parts, self.table = multipliers, parts, table
        self.multiplier_sum = multipliers.sum(axis=1)
        self.prefix = np.concatenate([[0.0], np.cumsum(np.bincount(asked.unit, prices))])
        units = len(asked.first)
        self.value, self.label, self.chosen = (
            np.empty(units),
            np.empty(units, np.int64),
            np.empty(units, np.int64),
        )
        self.leaders = np.empty(asked.engines, np.int64)
        self.move = np.zeros(0)

    def surplus(self, makespan_s: float) -> float:
        """What engines done by then can collect at most, over the sum of all prices; negative: not enough."""
        rows = halves(len(self.value), self.table.size)
        side_by_side([partial(self._worth, makespan_s, part) for part in rows])
        slack = MARGIN * float(self.prefix[-1])
        collected = most_collected(self.value, self.prefix, slack, self.leaders)
        return collected - (float(self.prefix[-1]) - slack)

    def _worth(self, makespan_s: float, rows: slice) -> None:
        worth(self.table[rows], self.multiplier_sum, makespan_s,
              self.value[rows], self.label[rows], self.chosen[rows])  # fmt: skip

    def refuted_s(self, known_s: float) -> float:
        """The largest makespan that bisection finds refuted; 0 if ``known_s`` is not."""
        low, high = known_s, self.asked.upper_s
        if self.surplus(low) >= 0:
            return 0.0
        while high - low > max(PRECISION * high, OPEN_PRECISION * (self.asked.upper_s - low)):
            middle = (low + high) / 2
            if self.surplus(middle) < 0:
                low = middle
            else:
                high = middle
        return low

    def aim(self, makespan_s: float, width: int) -> None:
        """Fix the subgradient of the surplus at a makespan, while the dynamic program is the last one."""
        asked, surplus = self.asked, self.surplus(makespan_s)
        times = np.full(len(self.prices), -1.0)
        for leader in self.leaders[self.leaders >= 0]:
            k = int(self.chosen[leader])
            part = next(part for part in self.parts if k < part.stop)
            collect(asked.label, asked.most_before, *asked.layout, asked.marks_of(part),
                    part.stop - part.start, asked.classes, int(asked.first[leader]), int(self.label[leader]),
                    k - part.start, times)  # fmt: skip
        scaled = times * self.prices
        move = smoothed(scaled, width)
        self.move = max(0.0, surplus) / max(float(scaled @ move), 1e-300) * move

    def release(self) -> None:
        """Give the dynamic program's table back, for the next one; prices and subgradient stay."""
        self.asked.spare.append(self.table)
        del self.table

    def moved(self) -> Floats:
        """Prices a step along it, long enough to use the surplus up."""
        prices = np.asarray(self.prices * np.maximum(1 - self.move, LEAST_CHANGE))
        return prices if self.relative is None else prices * (self.prices.sum() / prices.sum())

    def argument(self, lower_s: float, places: int = 0, states: int = 0) -> PricedBound:
        """The bound, with all that proves it."""
        asked = self.asked
        prices, shares = np.empty(len(self.prices)), np.empty(asked.shares.shape)
        prices[asked.requests], shares[:, asked.requests] = self.prices, asked.shares
        alike = np.empty(len(self.prices), dtype=np.int64)
        alike[asked.requests] = asked.requests[asked.alike]
        return PricedBound(
            lower_s,
            tuple(asked.minorants),
            tuple(prices.tolist()),
            tuple(tuple(one) for one in self.multipliers.tolist()),
            asked.label_s,
            asked.classes,
            places,
            states,
            tuple(tuple(one.tolist()) for one in shares) if asked.shared_s.any() else (),
            tuple(alike.tolist()) if (np.diff(np.sort(alike)) == 0).any() else (),
        )


def smoothed(values: Floats, width: int) -> Floats:
    """Means over so many neighbours on either side, twice: a matrix with no negative eigenvalue.

    >>> smoothed(np.array([0.0, 0.0, 9.0, 0.0, 0.0]), 1)
    array([1.5, 2. , 3. , 2. , 1.5])
    """
    if width == 0:
        return values
    kernel = np.ones(2 * width + 1)
    inside = np.convolve(np.ones(len(values)), kernel, "same")
    once = np.convolve(values / inside, kernel, "same")
    return np.asarray(np.convolve(once, kernel, "same") / inside)


def _padded(rises: Floats | tuple[float, ...], ranks: int) -> Floats:
    """The first ``ranks`` rises; the last one goes on."""
    return np.asarray(rises, dtype=np.float64)[np.minimum(np.arange(ranks), len(rises) - 1)]
