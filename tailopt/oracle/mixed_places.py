r"""Search over places for engines of different kinds: prices rule out nearly all ways to place the longest.

As :mod:`tailopt.oracle.lagrangian_search`, at the prices of :mod:`tailopt.oracle.mixed_priced`: requests are
placed one by one, longest first, each on an engine that is open or on a new one; a request whose unit has
begun follows it, so units stay whole. Engines of one kind are alike until they open, so of the empty ones of
a kind only the first is tried. An engine of kind k that holds r requests and has used :math:`t_q` of T in
inequality q, its leader's constant included, collects of the requests from i on at most

.. math:: F_{k,i}(r, t) = \max_b \min_\lambda \Big[\sum_q \lambda_q (T - t_q) + \max_{S \text{ in class } b,\,
          S \ge i} \sum_{x \in S} \big(u_x - \sum_q \lambda_q\, t_{q,\, x,\, r + \text{rank of } x}\big) \Big]

(where a row does not hold for the leader, :math:`t_q = -\infty`), and what engines that are still empty
collect is found over the numbers of them opened by kind, the more collected before the better. If all this
does not pay for all units no plan done by T begins that way. When no beginning is left T is refuted. Requests
that cost every kind the same, and engines of a kind that are equal so far, are not told apart
(:mod:`tailopt.oracle.lagrangian_alike`).
"""

from dataclasses import dataclass
from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Ints
from tailopt.oracle.lagrangian_alike import one_before
from tailopt.oracle.lagrangian_search import MOST_TRIALS, Trials
from tailopt.oracle.lagrangian_search_kernel import BLOCK, FOUND, REFUTED, highest, rests
from tailopt.oracle.mixed_places_kernel import explore
from tailopt.oracle.mixed_priced import MARGIN, Evaluated

TABLE_BYTES = 240_000_000  # of the rows F, which decide how many requests can be placed
FIRST_PACE, LEAST_TIMED = 1e5, 1_000  # states a second, until a trial with so many says how fast it goes
NOWHERE_S = 1e30  # stands for infinity


@dataclass
class Searched:
    """What a search found out.

    Attributes:
        lower_s: refuted; 0 if nothing was.
        places, states: requests placed and states looked at when it was.
        plans: ``[u]`` engines of plans that the inequalities say are done in time, the best one last.
        full: whether a trial was given up because no more requests can be placed.
    """

    lower_s: float
    places: int
    states: int
    plans: list[Ints]
    full: bool


class PlacesSearch:
    """Trials at some prices, in whose inequalities no request makes an engine faster."""

    def __init__(self, priced: Evaluated) -> None:
        asked, programs = priced.asked, priced.programs
        self.priced, self.asked, self.pace = priced, asked, FIRST_PACE
        n, kinds = len(asked.unit), len(programs)
        q_max = max(len(one.used) for one in programs)
        ranks = max(one.cost_s.shape[2] for one in programs)
        k_max = max(len(one.multipliers) for one in programs)
        classes = max(one.classes for one in programs) + 1
        longer = np.minimum(ranks, np.max([one.most_before for one in programs], axis=0) + 1)  # with itself
        self.start = row_starts(longer, TABLE_BYTES // (8 * k_max * classes * kinds))
        rows = int(self.start[-1])
        self.cost_s, self.constant_s = (
            np.zeros((kinds, q_max, n, ranks)),
            np.zeros((kinds, q_max, len(asked.first))),
        )
        self.multiplier = np.zeros((kinds, k_max, q_max))
        self.most_before = np.array([one.most_before for one in programs])
        self.rest = np.full((kinds, rows, k_max, classes), -np.inf)
        self.high = np.empty((kinds, rows, k_max, -(-classes // BLOCK)))
        for k, one in enumerate(programs):
            used, own = len(one.used), one.cost_s.shape[2]
            column = np.minimum(np.arange(ranks), own - 1)
            self.cost_s[k, :used] = one.cost_s[:, :, column]
            constant_s = one.side.constants_s(asked.lower_s)[one.used]
            self.constant_s[k, :used] = np.where(constant_s == np.inf, -NOWHERE_S, constant_s)
            self.multiplier[k, : len(one.multipliers), :used] = one.multipliers
            rest = np.empty((rows, len(one.multipliers), one.classes + 1))
            rests(np.ascontiguousarray(one.cost_s[:, :, column]), one.label[:, column], one.most_before,
                  priced.prices, one.multipliers, self.start, rest)  # fmt: skip
            self.rest[k, :, : len(one.multipliers), : one.classes + 1] = rest
            highest(self.rest[k], self.high[k])
        self.before = one_before(self._alike())
        self.multipliers = np.array([len(one.multipliers) for one in programs])
        self.kind_of = np.repeat(np.arange(kinds), asked.counts)
        engines = [e for one in programs for e in one.side.kind.engines]
        self.engines = np.array(engines, dtype=np.int64)  # in the fleet, kind by kind

    def _alike(self) -> Ints:
        """``[n]`` class of each request: those that cost every kind the same, if none stays with others.

        They are of one length: then an engine holds as many longer ones besides each, if it fits at all.
        """
        n = self.cost_s.shape[2]
        if len(self.asked.first) < n:
            return np.arange(n)
        costs = np.concatenate([
            np.moveaxis(self.cost_s, 2, 0).reshape(n, -1), np.moveaxis(self.constant_s, 2, 0).reshape(n, -1),
            self.asked.output[:, None], (self.most_before < 0).T,
        ], axis=1)  # fmt: skip
        return np.asarray(np.unique(costs, axis=0, return_inverse=True)[1].reshape(n))

    def explore(self, makespan_s: float, most_states: int) -> tuple[int, int, int, Ints]:
        """Whether a makespan is refuted, a plan found, or it was given up; states, places, and the plan."""
        priced, asked = self.priced, self.asked
        priced.surplus(makespan_s)
        engine_of = np.zeros(len(asked.first), dtype=np.int64)
        outcome, states, places = explore(
            self.kind_of, self.cost_s, self.constant_s, self.most_before, asked.unit, self.before,
            priced.prices, priced.prefix, priced.value, self.multiplier, self.multipliers, self.start,
            self.rest, self.high, makespan_s, MARGIN * float(priced.prefix[-1]), most_states, engine_of,
        )  # fmt: skip
        return outcome, states, places, self.engines[engine_of]

    def narrow(self, lower_s: float, upper_s: float, most_states: int, deadline_s: float) -> Searched:
        """Refute what can be refuted, and find what can be found, between a bound and a plan at hand.

        Args:
            lower_s, upper_s: the bound and the plan's makespan.
            most_states: after which a trial is given up.
            deadline_s: :func:`time.perf_counter` at which to stop.
        """
        searched, trials = Searched(0.0, 0, 0, [], False), Trials(lower_s, upper_s)
        for _ in range(MOST_TRIALS):
            allowed = min(most_states, max(0.0, deadline_s - clock()) * self.pace)
            if trials.over or allowed < 1:
                break
            started, trial_s = clock(), trials.next_s
            outcome, states, places, engine_of = self.explore(trial_s, int(allowed))
            if states > LEAST_TIMED:
                self.pace = states / max(clock() - started, 1e-9)
            if outcome == FOUND:
                searched.plans.append(engine_of)
                trials.found(trial_s)
            elif outcome == REFUTED:
                searched.lower_s, searched.places, searched.states = trial_s, places, states
                trials.refuted()
            else:
                searched.full |= states <= allowed
                trials.gave_up()
        return searched


def row_starts(longer: Ints, most_rows: int) -> Ints:
    """``[places + 2]`` where the rows of requests 0 .. places start: one each for 0 .. r longer ones.

    Args:
        longer: ``[n]`` how many an engine can hold, the request included.
        most_rows: in all.

    >>> row_starts(np.array([1, 2, 2, 2]), 10)
    array([0, 1, 3, 6, 9])
    """
    held = np.append(0, np.maximum.accumulate(longer))
    ends = np.cumsum(np.minimum(np.arange(len(held)), held) + 1)
    fit = max(2, int(np.searchsorted(ends, most_rows, side="right")))
    return np.concatenate([[0], ends[:fit]])
