r"""Priced search: where the longest requests go is tried out, and the prices rule out nearly all of it.

What the prices of :mod:`tailopt.oracle.lagrangian` leave open is mostly the few engines with the few longest
requests: there it matters which ones sit together, and on average over such choices the prices must be right.
So the requests are placed one by one, longest first, in all ways, each on an engine that is open or on a new
one. An engine is then known by two things, how many it holds and how long these take, and of a plan done by T
the unplaced requests i, i+1, ... are worth to an engine that holds r and has the room :math:`\rho = T - t`

.. math:: F_i(r, \rho) = \max_b \min_\lambda \Big[\lambda \rho + \max_{S \text{ in class } b,\, S \ge i}
          \sum_{x \in S} (u_x - \lambda\, t_{x,\, r + \text{rank of } x \text{ in } S}) \Big]

at most: rows of the same dynamic program. If the prices placed, those :math:`F_i` of the engines open, and
what new engines led by unplaced units collect do not pay for everything, no plan done by T begins that way.
When no beginning is left, T is refuted; a beginning that is a whole plan is a better plan. Mostly some dozens
of beginnings, of some dozens of requests, decide. Equal requests, and engines that are equal so far, are not
told apart (:mod:`tailopt.oracle.lagrangian_alike`).

Trials go first to the plan at hand, within rounding: if that is refuted it is optimal. Then half-way to the
bound if a plan was found (by the minorants: the engines may be slower than these), much closer to it if the
trial was given up after so many states. It is tried again with more states when the prices are better, from a
little beyond where it was given up, and further beyond as long as trials are refuted, half-way to the last
one given up at most. The longest beginning of a trial given up is often nearly a plan, and made one.
"""

from dataclasses import dataclass
from functools import partial
from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.oracle.certificate import OPTIMAL_GAP
from tailopt.oracle.lagrangian import MARGIN, Priced
from tailopt.oracle.lagrangian_alike import one_before
from tailopt.oracle.lagrangian_search_kernel import (
    BLOCK,
    FOUND,
    GIVEN_UP,
    REFUTED,
    explore,
    highest,
    rests,
)
from tailopt.oracle.side_by_side import WORTH_IT, cores, halves, side_by_side

TABLE_BYTES, WHOLE_BYTES = 80_000_000, 250_000_000  # of the rows F; if those of all requests fit
PROBES, MOST_TRIALS = 5, 60  # trials given up, and trials in all, in one search
CLOSER, FURTHER = 4.0, 4.0  # how many times closer to the bound, or further from it, the next trial is
FIRST_PACE = 3e5  # states a second, until it is known
LEAST_TIMED = 1_000  # states from which on a trial says how fast it goes
WIDTH = 1e-7  # share of the makespan at which two trials are one
NEAR = 0.01  # share of what is open at which a trial is too close to one that was given up

Trial = tuple[int, int, int, Ints]
"""Whether a makespan is refuted, a plan found, or it was given up; states, places, and the plan."""


@dataclass
class Searched:
    """What a search found out.

    Attributes:
        lower_s: refuted; 0 if nothing was.
        places, states: requests placed and states looked at when it was.
        plans: ``[u]`` engines of plans that the minorants say are done in time, the best one last.
        given_up_s: least makespan at which a trial was given up; infinity if none was.
        beginnings: ``[u]`` engines of the longest beginnings in trials given up, -1 for units beyond.
    """

    lower_s: float
    places: int
    states: int
    plans: list[Ints]
    given_up_s: float
    beginnings: list[Ints]


class Trials:
    """Which makespan is tried next, between a bound and a plan at hand: half-way, unless told otherwise."""

    def __init__(self, lower_s: float, upper_s: float) -> None:
        self.lower_s = lower_s
        self.upper_s = self.plan_s = upper_s  # below a trial that was given up, and of the best plan
        self.last_s = upper_s * (1 - OPTIMAL_GAP / 2)
        self.next_s = (lower_s + upper_s) / 2
        self._given_up = 0

    @property
    def closer_s(self) -> float:
        """What is tried if the next trial is given up."""
        return self.lower_s + (self.next_s - self.lower_s) / CLOSER

    @property
    def over(self) -> bool:
        """Whether enough trials were given up, or what is left is narrow."""
        near_s = NEAR * (self.plan_s - self.lower_s) if self.upper_s < self.plan_s else 0.0
        narrow = self.upper_s - self.lower_s <= max(WIDTH * self.upper_s, near_s)
        return narrow or self._given_up == PROBES

    def found(self, plan_s: float) -> None:
        """A plan, done by then."""
        self.upper_s = self.plan_s = min(self.next_s, plan_s)
        self.next_s = (self.lower_s + self.upper_s) / 2

    def refuted(self) -> None:
        """There is none."""
        further_s = self.next_s + FURTHER * (self.next_s - self.lower_s)
        self.lower_s, middle_s = self.next_s, (self.next_s + self.upper_s) / 2
        self.next_s = min(self.last_s if self.upper_s > self.last_s else middle_s, further_s)

    def gave_up(self) -> None:
        """Nobody knows."""
        self.upper_s, self.next_s = self.next_s, self.closer_s
        self._given_up += 1


class PricedSearch:
    """Trials at some prices."""

    def __init__(self, priced: Priced) -> None:
        asked = priced.asked
        self.priced, self.asked, self.pace = priced, asked, FIRST_PACE
        self.before = one_before(asked.alike)
        row_bytes = 8 * len(priced.multipliers) * (asked.classes + 1)
        n, ranks = len(asked.length), asked.cost_s.shape[2]
        self.start = row_starts(n, ranks, WHOLE_BYTES // row_bytes)
        if len(self.start) < n + 2:
            self.start = row_starts(n, ranks, TABLE_BYTES // row_bytes)
        self.rest: Floats = np.empty((self.start[-1], len(priced.multipliers), asked.classes + 1))
        rows, k_max, classes = self.rest.shape
        self.high: Floats = np.empty((rows, k_max, -(-classes // BLOCK)))
        side_by_side([partial(self._rests, part) for part in halves(k_max, self.rest.size)])
        side_by_side(
            [partial(highest, self.rest[part], self.high[part]) for part in halves(rows, self.rest.size)]
        )

    def _rests(self, part: slice) -> None:
        asked, priced = self.asked, self.priced
        rests(asked.cost_s, asked.label, asked.most_before, priced.prices, priced.multipliers[part],
              self.start, self.rest[:, part])  # fmt: skip

    def explore(self, makespan_s: float, most_states: int) -> Trial:
        """Whether a makespan is refuted, a plan found, or it was given up; states, places, and the plan."""
        self.priced.surplus(makespan_s)
        return self._explore(makespan_s, most_states, self.priced.value.copy())

    def _explore(self, makespan_s: float, most_states: int, value: Floats) -> Trial:
        asked, priced = self.asked, self.priced
        engine_of = np.zeros(len(asked.first), dtype=np.int64)
        outcome, states, places = explore(
            asked.cost_s, asked.unit, self.before, priced.prices, priced.prefix, value, priced.multipliers,
            self.start, self.rest, self.high, asked.engines, makespan_s, MARGIN * float(priced.prefix[-1]),
            most_states, engine_of,
        )  # fmt: skip
        return outcome, states, places, engine_of

    def _with_next(self, makespan_s: float, next_s: float, most_states: int) -> tuple[Trial, Trial | None]:
        """A trial, and the one that follows if it is given up, if there is a core for it."""
        if cores() < 2 or self.priced.table.size < WORTH_IT:
            return self.explore(makespan_s, most_states), None
        work = []
        for one_s in (makespan_s, next_s):
            self.priced.surplus(one_s)
            work.append(partial(self._explore, one_s, most_states, self.priced.value.copy()))
        first, second = side_by_side(work)
        return first, second

    def narrow(
        self, lower_s: float, upper_s: float, most_states: int, deadline_s: float, given_up_s: float = np.inf
    ) -> Searched:
        """Refute what can be refuted, and find what can be found, between a bound and a plan at hand.

        Args:
            lower_s, upper_s: the bound and the plan's makespan.
            most_states: after which a trial is given up.
            deadline_s: :func:`time.perf_counter` at which to stop.
            given_up_s: what the search before had to give up.
        """
        searched = Searched(0.0, 0, 0, [], np.inf, [])
        trials = Trials(lower_s, upper_s)
        least_s = (upper_s - lower_s) / CLOSER**PROBES
        trials.next_s = min(trials.last_s, lower_s + FURTHER * max(least_s, given_up_s - lower_s))
        ahead: Trial | None = None
        for _ in range(MOST_TRIALS):
            allowed = min(most_states, max(0.0, deadline_s - clock()) * self.pace)
            if trials.over or allowed < 1:
                break
            started, trial_s = clock(), trials.next_s
            if ahead is not None:
                (outcome, states, places, engine_of), ahead = ahead, None
            else:
                trial, ahead = self._with_next(trial_s, trials.closer_s, int(allowed))
                outcome, states, places, engine_of = trial
                if states > LEAST_TIMED:
                    self.pace = states / (clock() - started)
            if outcome != GIVEN_UP:
                ahead = None
            if outcome == FOUND:
                searched.plans.append(engine_of)
                trials.found(self.asked.seconds_of(engine_of))
            elif outcome == REFUTED:
                searched.lower_s, searched.places, searched.states = trial_s, places, states
                trials.refuted()
            else:
                searched.given_up_s = trial_s
                searched.beginnings.append(engine_of)
                trials.gave_up()
        return searched


def row_starts(n: int, ranks: int, most_rows: int) -> Ints:
    """``[places + 2]`` where the rows of requests 0 .. places start: one each for 0 .. i longer ones.

    >>> row_starts(9, 2, 10)
    array([0, 1, 3, 6, 9])
    """
    ends = np.cumsum(np.minimum(np.arange(n + 1), ranks) + 1)
    fit = max(2, int(np.searchsorted(ends, most_rows, side="right")))
    return np.concatenate([[0], ends[:fit]])
