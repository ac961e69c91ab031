"""General step times: the quick certificate, a local search on its plan, priced staircase, priced search.

The local search goes by estimated engine times where requests have to wait. So it runs in rounds, and in each
the engines that the simulator found slower than estimated are slower by as much. Then prices are improved and
the search at the best of them narrows what is open, in turn and with more effort each time. The best plan
that a search leads to, if it is not far off, is where the local search goes on from.
"""

from dataclasses import replace
from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Ints
from tailopt.oracle.bound_and_fill import first_certificate, plan_of
from tailopt.oracle.certificate import Certificate, status_of
from tailopt.oracle.lagrangian import Ascent, Asked, PricedBound
from tailopt.oracle.lagrangian_search import PricedSearch
from tailopt.oracle.local_search import estimated_s, local_search
from tailopt.oracle.problem import Problem
from tailopt.oracle.staircase import not_above
from tailopt.oracle.stop import Stop
from tailopt.oracle.units import units_of
from tailopt.plan import Plan
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

SLICES = (12, 6, 6)  # of the rounds of local search, if there is no time limit
SHARES = (0.1, 0.1, 0.1)  # of the time limit
POLISH_SHARE, POLISH_SLICES = 0.05, 4  # the same for the plans that a search leads to
MOST_OF = 0.5  # the units that a beginning must hold to be completed
ROUNDS, MOST_ROUNDS = 1, 40  # of prices and search, without a time limit and with one
ITERATIONS, MORE_ITERATIONS = 16, 3  # of the prices in the first round; so many times more in the next
STATES, MORE_STATES = 2**15, 4  # until a trial is given up in the first round; so many times more in the next
UNLIMITED_STATES = 2**17  # if there is no time limit
SPARE = 0.01  # of what is open, that counting requests as equal may cost
PRICES_SHARE, MORE_SHARE = 0.4, 0.9  # of what is left of the time limit, for prices; after a search in vain


def lagrangian(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """A certificate for any step time; without a time limit after a fixed amount of work."""
    first = first_certificate(problem, time_limit_s)
    return refined(problem, first, time_limit_s=time_limit_s, seed=seed)


def refined(
    problem: Problem,
    certificate: Certificate,
    *,
    time_limit_s: float | None = None,
    seed: int = 0,
    stop: Stop | None = None,
) -> Certificate:
    """A certificate at hand with a better plan and a better bound, if they are found.

    Args:
        problem: what was asked.
        certificate: what is known.
        time_limit_s: seconds to spend at most, about; None for a fixed amount of work. Ctrl-C ends it too,
            and what was found is returned.
        seed: of the local search.
        stop: told of Ctrl-C.
    """
    if certificate.status == "optimal":
        return certificate
    found = _Refined(problem, certificate, time_limit_s, seed)
    with stop or Stop() as stop:
        found.search_locally(stop)
        found.price()
    return found.certificate()


class _Refined:
    """The best plan and the best bound so far."""

    def __init__(self, problem: Problem, first: Certificate, time_limit_s: float | None, seed: int) -> None:
        self.problem, self.first, self.seed = problem, first, seed
        self.units = units_of(problem)
        self.run = simulate(problem.trace, problem.fleet, first.plan)
        self.bound: PricedBound | None = None
        self.limited = time_limit_s is not None
        self.limit_s = np.inf if time_limit_s is None else time_limit_s
        self.started = clock() - first.wall_s
        self.deadline_s = self.started + self.limit_s
        self.methods = [first.method, "local search"]

    @property
    def lower_s(self) -> float:
        """The best bound."""
        return self.first.lower_s if self.bound is None else self.bound.lower_s

    @property
    def optimal(self) -> bool:
        """Whether nothing is open."""
        return status_of(self.lower_s, self.run.makespan_s) == "optimal"

    def search_locally(self, stop: Stop) -> None:
        """Rounds of local search, the simulator correcting its estimates."""
        slowdown = np.ones(len(self.problem.fleet.engines))
        latest = self.run
        for i, (share, slices) in enumerate(zip(SHARES, SLICES, strict=True)):
            if clock() > self.deadline_s:
                break
            here = self._engine_of_units(latest.plan)
            estimated = estimated_s(self.problem, self.units, here)
            slowdown = np.where(
                estimated > 0, latest.engine_finish_s / np.maximum(estimated, 1e-300), slowdown
            )
            engine_of = local_search(
                self.problem,
                self.units,
                here,
                lower_s=self.lower_s,
                time_limit_s=share * self.limit_s,
                seed=self.seed + i,
                slices=None if self.limited else slices,
                slowdown=slowdown,
                stop=stop,
            )
            latest = self._simulated(engine_of)
            stop.check()

    def price(self) -> None:
        """Prices and search in turn."""
        if clock() > self.deadline_s:
            return
        upper_s = self.run.makespan_s
        here, first = (self._engine_of_units(plan) for plan in (self.run.plan, self.first.plan))
        asked = Asked(self.problem, self.units, here, upper_s, first, SPARE * (upper_s - self.lower_s))
        ascent = Ascent(asked)
        iterations, states = ITERATIONS, STATES if self.limited else UNLIMITED_STATES
        search, searched_at, share, given_up_s = None, 0.0, PRICES_SHARE, np.inf
        for _ in range(MOST_ROUNDS if self.limited else ROUNDS):
            now = clock()
            if now > self.deadline_s or self.optimal:
                break
            ascent.climb(iterations, now + share * (self.deadline_s - now))
            priced = ascent.best
            if priced is None:
                break
            self._raise_to(priced.argument(not_above(ascent.best_s, upper_s)), "priced staircase")
            if search is None or ascent.best_s > searched_at:  # prices may be worth nothing at first
                search = PricedSearch(priced)
                searched_at = ascent.best_s
            searched = search.narrow(self.lower_s, self.run.makespan_s, states, self.deadline_s, given_up_s)
            given_up_s = searched.given_up_s
            share = PRICES_SHARE if searched.lower_s > 0 or searched.plans else MORE_SHARE
            far = [one for one in searched.beginnings if (one >= 0).mean() > MOST_OF]
            self._polish([*searched.plans, *map(asked.completed, far)])
            if searched.lower_s > 0:
                lower_s = not_above(searched.lower_s, self.run.makespan_s)
                self._raise_to(priced.argument(lower_s, searched.places, searched.states), "priced search")
            iterations, states = MORE_ITERATIONS * iterations, MORE_STATES * states

    def _polish(self, plans: list[Ints]) -> None:
        """The local search from the best of some plans, if that is no further off than what is open."""
        runs = [self._simulated(engine_of) for engine_of in plans]
        best = min(runs, key=lambda run: run.makespan_s, default=None)
        if best is None or self.optimal or 2 * self.run.makespan_s - self.lower_s < best.makespan_s:
            return
        engine_of = local_search(
            self.problem,
            self.units,
            self._engine_of_units(best.plan),
            lower_s=self.lower_s,
            time_limit_s=min(POLISH_SHARE * self.limit_s, self.deadline_s - clock()),
            seed=self.seed + len(SLICES),
            slices=None if self.limited else POLISH_SLICES,
        )
        self._simulated(engine_of)

    def certificate(self) -> Certificate:
        """What was found."""
        bound = self.first.bound_argument if self.bound is None else self.bound
        return self.first.improved(bound, self.run, ", ".join(self.methods), self.started, self.seed)

    def _raise_to(self, bound: PricedBound, method: str) -> None:
        if bound.lower_s > self.lower_s:
            self.bound = replace(bound, lower_s=min(bound.lower_s, self.run.makespan_s))
            self.methods += [] if method in self.methods else [method]

    def _simulated(self, engine_of: Ints) -> Run:
        """What the simulator says of a plan, which is kept if it is the best."""
        problem = self.problem
        run = simulate(problem.trace, problem.fleet, plan_of(problem, self.units, engine_of))
        if run.makespan_s < self.run.makespan_s:
            self.run = run
        return run

    def _engine_of_units(self, plan: Plan) -> Ints:
        return plan.engine_of[[members[0] for members in self.units.members]]
