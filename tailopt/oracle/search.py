r"""Staircase search: identical engines with an affine step time, to within a millionth and often exactly.

Take units in order of falling length. Each costs its engine w, and the first on an engine (its *leader*)
:math:`a\ell` besides (:mod:`tailopt.oracle.staircase`). *Is there a plan within T?* Depth first: place the
next unit on one of the engines opened, the fullest first, or open a new one with it. With i units placed,
engine e has :math:`r_e = T - a\ell_{\text{leader}} - \sum w` seconds of **room**, and that is all that
matters from here on: the units to come are no longer than any leader, so every engine may take them. Hence

- states with the same i and the same rooms, in whatever order, are one state, looked at once;
- a room counts for no more than the largest sum of units to come that it holds: few long requests leave a
  room of a request or two, and which sums fill that is known from a table of the least sums;
- **a bound** that knows which rooms are still of use. The units i..q weigh at least
  :math:`v_q = \min_{k \le q} w_k` each, so an engine with less room than that holds none of them, and

  .. math:: \sum_{k=i}^{q} w_k \;\le \sum_{e:\, r_e \ge v_q} r_e + \sum_{\text{new } e} (T - a\ell_{p_e})
            \quad \text{for every } q \ge i, \qquad (room)

  where :math:`p_e \le q` are the leaders of the engines opened for them. (nested) is (room) with the small
  gaps of crowded engines still counted as useful, and that is what it loses: a gap that the next unit does
  not fit into stays closed until units are small enough. Leaders are again best pushed as far right as (room)
  lets them. Between two places where a gap opens again, binary search finds the next place where a new engine
  is needed: a state costs O(m log n).

A trial T ends **refuted** (everything was tried), with a **plan**, or given up after so many states. Trials
bisect [bound, best plan], then work inwards from both ends of what was given up, with four times as many
states each time round. Some states with all engines opened are completed so that the last units fill the
engines to the tick (:func:`tailopt.oracle.search_kernel.finish`), or, where ticks are too many for that,
evened out by exchanging units.

All of it in whole **ticks**: a weight counts for its whole ticks, and weights that fit into a room are no
more ticks together than the room has whole ones. So any tick gives a valid relaxation. Where weights are
multiples of one number (:math:`b L` without context, :math:`c A` if that is all), that is the tick: rooms are
whole tokens then, nothing is lost, many states are one, and what is refuted at T is refuted up to the next
T at which some room is a token larger. Elsewhere it is 2**-44 of the makespan.

Groups are units too; there :math:`v_q` is weaker, since small groups may come early. Where slots or cache
bind, an engine has several loads; the search then works on the one item that weighs them best, a relaxation:
it raises the bound, and its plans are simulated like any others.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from tailopt.arrays import Ints
from tailopt.engine.step_time import Affine
from tailopt.oracle.bound_and_fill import first_certificate, plan_of
from tailopt.oracle.certificate import OPTIMAL_GAP, Certificate, status_of
from tailopt.oracle.lagrangian_solve import refined
from tailopt.oracle.minorant import minorants
from tailopt.oracle.mixed_solve import crowded, kinds, refined_kinds, waits, with_limits
from tailopt.oracle.problem import Problem
from tailopt.oracle.search_bound import Items, SearchBound, items_of
from tailopt.oracle.search_kernel import FOUND, REFUTED, explore
from tailopt.oracle.staircase import (
    ROUNDING,
    StaircaseBound,
    best_filling,
    item_weights,
    not_above,
    refuted_makespan,
    rounding,
    staircase_bound,
)
from tailopt.oracle.stop import Stop
from tailopt.oracle.units import Units, lines_of, units_of
from tailopt.plan import Plan
from tailopt.simulate.simulator import simulate

METHOD = "staircase search"

LONGEST = (1.0, 0.0, 0.0)  # the weights that bound an engine's steps by its longest request alone

CLOSE = 1e-7
"""Relative gap at which the search stops."""

EFFORT = 2**18
"""States looked at without a time limit: some tenths of a second, and the same result every time."""

FIRST_STATES = 2**13  # of a trial in the first round; four times as many in each that follows
FIRST_PACE = 2e5  # states a second, until it is known
SURE = 0.7  # of the time left, for a trial at the pace so far: it may be slower
PROBES = 8  # trials given up in one round
TABLE = 2**22  # numbers in the table of states seen (32 MiB)
COMPLETED_UNITS = 2**16  # units placed in all completions of one trial


def search(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """The staircase's certificate, both ends improved where engines are alike and the step time is affine.

    Args:
        problem: any; elsewhere :func:`tailopt.oracle.mixed_solve.kinds` answers if shapes are mixed or
            requests wait, and :func:`tailopt.oracle.lagrangian_solve.lagrangian` for other step times.
        time_limit_s: when to stop; None for a fixed amount of work. An interrupt (Ctrl-C) stops it too, and
            what was found is returned.
        seed: nothing is drawn.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.oracle.bound_and_fill import staircase
    >>> from tailopt.plan import Fleet
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet.of(load_engine("h200-llama-3.1-70b-fp8-vllm"), "2xTP1")
    >>> problem = Problem(Trace.of([[100 + 7 * k for k in range(60)]]), fleet)
    >>> staircase(problem).gap > 1e-5 > CLOSE >= search(problem).gap
    True
    """
    started = time.perf_counter()
    fleet = problem.fleet
    tau = fleet.shape_of(0).step_time
    if not fleet.identical:
        return kinds(problem, time_limit_s=time_limit_s, seed=seed)
    if crowded(problem) or not isinstance(tau, Affine):
        quick = first_certificate(problem, time_limit_s)
        if crowded(problem) and waits(problem, simulate(problem.trace, fleet, quick.plan)):
            return refined_kinds(problem, quick, time_limit_s=time_limit_s, seed=seed)
        if not isinstance(tau, Affine):
            stop = Stop()
            found = refined(problem, quick, time_limit_s=time_limit_s, seed=seed, stop=stop)
            return with_limits(problem, found, stop)
    units = units_of(problem)
    first, terms = _first(problem, units, tau, started, time_limit_s)
    if first.gap <= CLOSE or _done_s(units, terms, first.plan) <= first.lower_s * (1 + CLOSE):
        return first  # what is open then is what the terms do not see: preemption, the order of prefill
    items = items_of(units, terms, first.upper_s)
    bracket = _Bracket(
        items,
        len(fleet.engines),
        low_s=first.lower_s,
        high_s=first.upper_s,
        deadline=np.inf if time_limit_s is None else started + time_limit_s,
        effort=EFFORT if time_limit_s is None else 2**62,
    )
    with suppress(KeyboardInterrupt):
        bracket.narrow()
    exact = terms.weights == LONGEST  # then the plan found last is the best; else the simulator is asked
    plans = [
        plan_of(problem, units, engine_of) for engine_of in (bracket.plans[-1:] if exact else bracket.plans)
    ]
    runs = [simulate(problem.trace, fleet, plan) for plan in plans or [first.plan]]
    run = min(runs, key=lambda one: one.makespan_s)
    refuted_s = not_above(bracket.refuted_s * (1 - ROUNDING), min(first.upper_s, run.makespan_s))
    bound = SearchBound(refuted_s, terms, items.tick_s, bracket.refuted_in)
    return first.improved(bound, run, METHOD, started, seed)


def _first(
    problem: Problem, units: Units, tau: Affine, started: float, time_limit_s: float | None
) -> tuple[Certificate, StaircaseBound]:
    """A certificate to start from, and the staircase bound with the terms that the search refutes.

    Where slots and cache do not bind, the step time itself gives the terms, no other quick bound is higher,
    and no other filling as good: that saves most of the time of a batch that they settle.
    """
    fleet = problem.fleet
    lines = lines_of(problem, min(units.max_running, problem.trace.n_requests))
    terms = staircase_bound(units, lines, len(fleet.engines), np.inf)
    own = max(minorants(lines, terms.minorant.n_max), key=lambda one: one.a_s)
    longest, tokens, context = (
        one.astype(np.float64) for one in (units.longest, units.tokens, units.context)
    )
    weight_s = item_weights(units, own, LONGEST)
    own_s = refuted_makespan(longest, weight_s, own.a_s, len(fleet.engines))
    own_s *= 1 - rounding(len(longest))
    if own_s < terms.lower_s * (1 - ROUNDING):
        first = first_certificate(problem, time_limit_s)
        return first, replace(terms, within_s=first.upper_s)
    engine_of = best_filling(
        longest, tokens, context, units.prefill_s, np.array([tau.a_s, tau.b_s, tau.c_s]),
        np.array([units.max_running, units.kv_capacity_tokens], dtype=np.float64),
        len(fleet.engines), own_s, CLOSE,
    )  # fmt: skip
    run = simulate(problem.trace, fleet, plan_of(problem, units, engine_of))
    lower_s = not_above(own_s, run.makespan_s)
    terms = StaircaseBound(lower_s, own, LONGEST, run.makespan_s, ())
    status = status_of(lower_s, run.makespan_s)
    wall_s = time.perf_counter() - started
    return Certificate(lower_s, run.makespan_s, run.plan, status, METHOD, terms, wall_s), terms


def _done_s(units: Units, terms: StaircaseBound, plan: Plan) -> float:
    """When the last engine is done by the terms alone: no bound from them can be higher."""
    engine_of = plan.engine_of[[members[0] for members in units.members]]
    weight_s = item_weights(units, terms.minorant, terms.weights)
    lead_s = terms.minorant.a_s * terms.weights[0] * units.longest
    return max(
        float(weight_s[engine_of == e].sum() + lead_s[engine_of == e].max(initial=0.0))
        for e in range(len(plan.engines))
    )


@dataclass
class _Bracket:
    """What is known of the least makespan of the items: at least ``low_s``, at most ``high_s``.

    Attributes:
        items, engines: what is placed, on how many engines.
        low_s, high_s: as said; the first ones come from elsewhere.
        deadline: when to stop (:func:`time.perf_counter`).
        effort: after how many states to stop.
        refuted_s: all makespans below it were refuted here, and
        refuted_in: the states that this took.
        plans: ``[u]`` engines of the units, each plan better than the one before.
        states, spent_s: looked at so far, and the seconds that this took.
    """

    items: Items
    engines: int
    low_s: float
    high_s: float
    deadline: float
    effort: int
    refuted_s: float = 0.0
    refuted_in: int = 0
    plans: list[Ints] = field(default_factory=list)
    states: int = 0
    spent_s: float = 0.0

    def narrow(self) -> None:
        """Try makespans in between until the bracket is narrow, or time or effort is spent.

        The last one tried says whether the best plan is optimal.
        """
        seen = np.zeros((TABLE // (self.engines + 2), self.engines + 2), dtype=np.int64)
        most_states, trials = FIRST_STATES, 0
        while not self._within(CLOSE):
            given_up: list[tuple[float, float]] = []
            while not self._within(CLOSE) and len(given_up) < PROBES:
                middle_s = self._between(given_up)
                if middle_s is None:
                    break
                allowed = min(most_states, self._affordable())
                if allowed < 1:
                    return
                trials += 1
                rooms = self.items.rooms(middle_s)
                if not self._try(rooms, allowed, seen, trials):
                    given_up.append((self.items.before_s(rooms), self.items.after_s(rooms)))
            most_states *= 4
        allowed = min(most_states, self._affordable())
        if not self._within(OPTIMAL_GAP) and allowed > 0:
            self._try(self.items.rooms(self.high_s * (1 - OPTIMAL_GAP / 2)), allowed, seen, trials + 1)

    def _within(self, gap: float) -> bool:
        """Whether the two ends are so close, relatively."""
        return self.high_s <= self.low_s * (1 + gap)

    def _between(self, given_up: list[tuple[float, float]]) -> float | None:
        """A makespan in the middle of the wider end that is neither refuted, attained nor given up.

        Args:
            given_up: makespans from the one to below the other are the same to the items.
        """
        inside = [one for one in given_up if self.low_s < one[1] and one[0] < self.high_s]
        first_s = min((first for first, _ in inside), default=self.high_s)
        last_s = max((last for _, last in inside), default=self.low_s)
        below_s, above_s = first_s - self.low_s, self.high_s - last_s
        if max(below_s, above_s) <= OPTIMAL_GAP * self.low_s:
            return None
        return self.low_s + below_s / 2 if below_s >= above_s else last_s + above_s / 2

    def _affordable(self) -> int:
        """States that there is time for, at the pace so far."""
        left_s = self.deadline - time.perf_counter()
        pace = self.states / self.spent_s if self.states else FIRST_PACE
        return int(min(self.effort - self.states, SURE * max(0.0, left_s) * pace))

    def _try(self, rooms: Ints, most_states: int, seen: Ints, trial: int) -> bool:
        """Refute the makespans with such rooms, or find a plan that fits into them; False if neither."""
        items = self.items
        engine_of = np.empty(len(rooms), dtype=np.int64)
        started = time.perf_counter()
        outcome, states = explore(
            rooms, items.weight, items.total, items.least, items.sums, self.engines,
            most_states, COMPLETED_UNITS // len(rooms), seen, trial, engine_of,
        )  # fmt: skip
        self.states += states
        self.spent_s += time.perf_counter() - started
        if outcome == REFUTED:
            self.refuted_in = states
            self.refuted_s = items.after_s(rooms)
            self.low_s = max(self.low_s, self.refuted_s)
        elif outcome == FOUND:
            self.high_s = min(self.high_s, items.done_s(engine_of, self.engines))
            self.plans.append(engine_of)
        return outcome in (REFUTED, FOUND)
