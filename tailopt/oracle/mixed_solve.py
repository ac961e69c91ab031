"""Several kinds of engines, or caches that do not hold everything: a better plan, then prices on kinds.

    quick certificate -> local search -> queues and packing, where requests have to wait -> prices on kinds
    and search over places, in turn

The local search goes by the engines' own times where everything fits (:mod:`tailopt.oracle.local_search`).
Where requests have to wait it goes by their rows, set right by simulation
(:mod:`tailopt.oracle.mixed_search`); then order, limits and dealing are searched together
(:mod:`tailopt.oracle.mixed_queues`), and, where step times are affine and requests free, packed
(:mod:`tailopt.oracle.mixed_packing`).
"""

from contextlib import suppress
from dataclasses import replace
from time import perf_counter as clock

import numpy as np

from tailopt.oracle.admission import Admission, admit, with_queues
from tailopt.oracle.alone import concave
from tailopt.oracle.bound_and_fill import plan_of, staircase
from tailopt.oracle.certificate import Certificate, status_of
from tailopt.oracle.local_search import local_search
from tailopt.oracle.mixed_packing import applies, packing_search
from tailopt.oracle.mixed_places import PlacesSearch, Searched
from tailopt.oracle.mixed_priced import KindsAscent, PricedKindsBound
from tailopt.oracle.mixed_queues import queue_search
from tailopt.oracle.mixed_search import crowded_search
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import Units, units_of
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

SLICES = 20  # of the local search, without a time limit
ITERATIONS, MOST_ITERATIONS = 16, 10_000  # of the prices, without a time limit and with one
ROUNDS, MOST_ROUNDS = 1, 40  # of prices and search, without a time limit and with one
STATES, MORE_STATES = 2**17, 4  # until a trial is given up in the first round; so many times more in the next
PRICES_SHARE = 0.5  # of what is left of the time limit, for prices
SEARCH_SHARE, CROWDED_SHARE = 0.05, 0.05  # of the time limit
QUEUES_SHARE, SLOTS_SHARE = 0.7, 0.2  # of the time limit, where caches are full; where only slots are few
PACKING_SHARE = 0.75  # of the queues' time, where it applies


def kinds(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """A certificate for any fleet; without a time limit after a fixed amount of work.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Fleet
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet.of(load_engine("h100-gpt-oss-120b-vllm"), "2xTP2+1xTP4")
    >>> problem = Problem(Trace.of([[100 + 70 * k for k in range(40)]]), fleet)
    >>> staircase(problem).gap > 0.1 > 0.04 > kinds(problem).gap
    True
    """
    return refined_kinds(problem, staircase(problem), time_limit_s=time_limit_s, seed=seed)


def refined_kinds(
    problem: Problem, certificate: Certificate, *, time_limit_s: float | None = None, seed: int = 0
) -> Certificate:
    """A certificate at hand with a better plan and a better bound, if they are found.

    Args:
        problem: what was asked.
        certificate: what is known.
        time_limit_s: seconds to spend at most, about, those of the certificate included; None for a fixed
            amount of work.
        seed: of the searches.
    """
    started = clock() - certificate.wall_s
    if certificate.status == "optimal":
        return certificate
    units = units_of(problem)
    limit_s = np.inf if time_limit_s is None else time_limit_s
    run, dealt, how = _better_plan(problem, units, certificate, limit_s, seed)
    proof = _Proof(problem, units, run, certificate.lower_s, started + limit_s)
    with suppress(KeyboardInterrupt):
        proof.start([run, dealt])
        proof.go_on(ROUNDS if time_limit_s is None else MOST_ROUNDS)
    proof.take_prices()
    bound, run = proof.bound, proof.run
    method = f"{certificate.method}, {how}" + (f", {proof.method}" if bound else "")
    found = certificate.improved(bound or certificate.bound_argument, run, method, started, seed)
    return with_limits(problem, found)


class _Proof:
    """The best bound by prices on kinds, and the best plan."""

    def __init__(self, problem: Problem, units: Units, run: Run, lower_s: float, deadline_s: float) -> None:
        self.problem, self.units, self.run, self.deadline_s = problem, units, run, deadline_s
        self.lower_s = lower_s
        self.bound: PricedKindsBound | None = None
        self.method = "prices on kinds"
        self.ascent: KindsAscent | None = None

    def start(self, runs: list[Run]) -> None:
        """From the plan whose first prices prove most."""
        engines = {one.plan.engine_of.tobytes(): one.plan.engine_of for one in runs}
        first = [members[0] for members in self.units.members]
        for engine_of in engines.values():
            ascent = KindsAscent.of(
                self.problem, self.units, engine_of[first], lower_s=self.lower_s, upper_s=self.run.makespan_s
            )
            if ascent is None:
                return
            if len(engines) > 1:
                ascent.climb(1, self.deadline_s)
            if self.ascent is None or ascent.best_s > self.ascent.best_s:
                self.ascent = ascent

    def go_on(self, rounds: int) -> None:
        """Prices and search over places in turn, first with coarse labels, later with finer ones."""
        ascent, states, searched_at = self.ascent, STATES, 0.0
        if ascent is None:
            return
        iterations = ITERATIONS if rounds == ROUNDS else MOST_ITERATIONS
        search: PlacesSearch | None = None
        for _ in range(rounds):
            now_s = clock()
            ascent.climb(iterations, now_s + PRICES_SHARE * (self.deadline_s - now_s))
            if ascent.best is None:
                return
            self.take_prices()
            if clock() > self.deadline_s or self.optimal:
                return
            if search is None or ascent.best_s > searched_at:
                search, searched_at = PlacesSearch(ascent.best), ascent.best_s
            found = self._search(search, states)
            states *= MORE_STATES
            if clock() > self.deadline_s or self.optimal:
                return
            if found.full or not found.lower_s > 0:  # more states are no help
                refined = rounds > ROUNDS and ascent.refine()
                if found.full and not refined:
                    return

    @property
    def optimal(self) -> bool:
        """Whether nothing is open."""
        return status_of(self.lower_s, self.run.makespan_s) == "optimal"

    def take_prices(self) -> None:
        """Raise the bound to what the best prices say."""
        if self.ascent is not None and self.ascent.best is not None:
            self._raise_to(self.ascent.best.argument(self.ascent.best_s))

    def _search(self, search: PlacesSearch, states: int) -> Searched:
        found = search.narrow(self.lower_s, self.run.makespan_s, states, self.deadline_s)
        for engine_of in found.plans:
            plan = plan_of(self.problem, self.units, engine_of)
            other = simulate(self.problem.trace, self.problem.fleet, plan)
            self.run = min(self.run, other, key=lambda one: one.makespan_s)
        if found.lower_s > self.lower_s:
            self._raise_to(search.priced.argument(found.lower_s, found.places, found.states))
            self.method = "prices on kinds and search"
        return found

    def _raise_to(self, bound: PricedKindsBound) -> None:
        if bound.lower_s > self.lower_s:
            self.bound = replace(bound, lower_s=min(bound.lower_s, self.run.makespan_s))
            self.lower_s = self.bound.lower_s


def crowded(problem: Problem) -> bool:
    """Whether some engine can be given more than it holds at once."""
    trace, fleet = problem.trace, problem.fleet
    shapes = {fleet.shape_of(e).kv_capacity_tokens for e in range(len(fleet.engines))}
    slots = min(fleet.max_running(e) for e in range(len(fleet.engines)))
    return trace.n_requests > slots or int((trace.context_tokens + trace.output_tokens).sum()) > min(shapes)


def waits(problem: Problem, run: Run) -> bool:
    """Whether some engine of a plan has more than it can hold, and a request was preempted or began later."""
    trace, fleet = problem.trace, problem.fleet
    for e in range(len(fleet.engines)):
        mine = run.engine == e
        tokens = int((trace.context_tokens + trace.output_tokens)[mine].sum())
        if mine.sum() > fleet.max_running(e) or tokens > fleet.shape_of(e).kv_capacity_tokens:
            later = run.start_s[mine].max() > run.finish_s[mine].min()
            if later or run.preemptions[mine].any():
                return True
    return False


def caches_fill(problem: Problem, run: Run) -> bool:
    """Whether as many of some engine's requests as it runs together may need more cache than it has."""
    trace, fleet = problem.trace, problem.fleet
    need = trace.context_tokens + trace.output_tokens
    for e in range(len(fleet.engines)):
        together = np.sort(need[run.engine == e])[::-1][: fleet.max_running(e)]
        if together.sum() > fleet.shape_of(e).kv_capacity_tokens:
            return True
    return False


def _better_plan(
    problem: Problem, units: Units, certificate: Certificate, limit_s: float, seed: int
) -> tuple[Run, Run, str]:
    """The best plan found, one dealt by the inequalities of the bound, and how they were found."""
    run, lower_s = simulate(problem.trace, problem.fleet, certificate.plan), certificate.lower_s
    engine_of = local_search(
        problem,
        units,
        run.plan.engine_of[[members[0] for members in units.members]],
        lower_s=lower_s,
        time_limit_s=SEARCH_SHARE * limit_s,
        seed=seed,
        slices=SLICES if limit_s == np.inf else None,
    )
    other = simulate(problem.trace, problem.fleet, plan_of(problem, units, engine_of))
    run = min(run, other, key=lambda one: one.makespan_s)
    if not waits(problem, run):
        return run, run, "local search"
    deadline_s = clock() + CROWDED_SHARE * limit_s
    dealt = crowded_search(problem, units, run, lower_s=lower_s, deadline_s=deadline_s, seed=seed)
    now_s, part = clock(), 1 - PACKING_SHARE if applies(problem) else 1.0
    share = QUEUES_SHARE if caches_fill(problem, run) else SLOTS_SHARE
    deadline_s, packed_s = now_s + part * share * limit_s, now_s + share * limit_s
    run = queue_search(problem, dealt, lower_s=lower_s, deadline_s=deadline_s, seed=seed)
    run = packing_search(problem, run, lower_s=lower_s, deadline_s=packed_s, seed=seed)
    return run, dealt, "queue search" + (", packing" if applies(problem) else "")


def with_limits(problem: Problem, certificate: Certificate) -> Certificate:
    """A certificate whose plan runs fewer requests together where that is faster, as it can be if a step time
    is convex in their number."""
    fleet, n = problem.fleet, problem.trace.n_requests
    lines = [
        fleet.shape_of(e).step_time.lines(min(fleet.max_running(e), n)) for e in range(len(fleet.engines))
    ]
    if certificate.status == "optimal" or all(map(concave, lines)):
        return certificate
    started, run = clock() - certificate.wall_s, simulate(problem.trace, fleet, certificate.plan)
    other = admitted(problem, run, lower_s=certificate.lower_s)
    return certificate.improved(
        certificate.bound_argument, other, certificate.method, started, certificate.seed
    )


def admitted(problem: Problem, run: Run, *, lower_s: float) -> Run:
    """The same dealing with better limits: the engine done last gets a better one until that fails."""
    queues: list[Admission | None] = []
    for e, engine in enumerate(run.plan.engines):
        mine = run.plan.order[run.plan.engine_of[run.plan.order] == e]
        seconds = float(run.finish_s[run.engine == e].max()) if len(mine) else 0.0
        queues.append(Admission(mine, engine.max_running, seconds, engine.limits) if len(mine) else None)
    tried: set[int] = set()
    with suppress(KeyboardInterrupt):
        while True:
            e = max(range(len(queues)), key=lambda e: 0.0 if (q := queues[e]) is None else q.seconds)
            now = queues[e]
            if now is None or now.seconds <= lower_s or e in tried:
                break
            tried.add(e)
            queues[e] = min(now, admit(problem, e, now.order), key=lambda q: q.seconds)
    other = simulate(problem.trace, problem.fleet, with_queues(problem, queues))
    return min(run, other, key=lambda one: one.makespan_s)
