"""Several kinds of engines, or caches that do not hold everything: a better plan, then prices on kinds.

    quick certificate -> local search -> queues and ends, where requests have to wait -> prices on kinds
    and search over places, in turn

The local search goes by the engines' own times where everything fits (:mod:`tailopt.oracle.local_search`).
Where requests have to wait it goes by their rows, set right by simulation
(:mod:`tailopt.oracle.mixed_search`); then order, limits and dealing are searched together
(:mod:`tailopt.oracle.mixed_queues`) and, where step times are affine and requests free, who begins with an
engine and who ends with it (:mod:`tailopt.oracle.mixed_ends`).
"""

from time import perf_counter as clock

import numpy as np

from tailopt.oracle.admission import Admission, admit, with_queues
from tailopt.oracle.alone import concave
from tailopt.oracle.bound_and_fill import first_certificate, plan_of
from tailopt.oracle.certificate import Certificate, status_of
from tailopt.oracle.local_search import local_search
from tailopt.oracle.mixed_ends import applies, ends_search
from tailopt.oracle.mixed_places import PlacesSearch, Searched
from tailopt.oracle.mixed_priced import KindsAscent, PricedKindsBound
from tailopt.oracle.mixed_queues import queue_search
from tailopt.oracle.mixed_search import crowded_search
from tailopt.oracle.problem import Problem
from tailopt.oracle.stop import Stop
from tailopt.oracle.units import Units, units_of
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

SLICES = 20  # of the local search, without a time limit
ITERATIONS, MOST_ITERATIONS = 16, 10_000  # of the prices, without a time limit and with one
STATES, MORE_STATES, MOST_STATES = 2**17, 2, 800_000  # until a trial is given up; more in the next round
PRICES_SHARE = 0.5  # of what is left of the time limit, for prices
SEARCH_SHARE, CROWDED_SHARE = 0.05, 0.05  # of the time limit
QUEUES_SHARE, SLOTS_SHARE = 0.7, 0.2  # of the time limit, where caches are full; where only slots are few
ENDS_SHARE = 0.75  # of the queues' time, that of the search by ends where it applies


def kinds(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """A certificate for any fleet; without a time limit after a fixed amount of work.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.oracle.bound_and_fill import staircase
    >>> from tailopt.plan import Fleet
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet.of(load_engine("h100-gpt-oss-120b-vllm"), "2xTP2+1xTP4")
    >>> problem = Problem(Trace.of([[100 + 70 * k for k in range(40)]]), fleet)
    >>> staircase(problem).gap > 0.1 > 0.04 > kinds(problem).gap
    True
    """
    first = first_certificate(problem, time_limit_s)
    return refined_kinds(problem, first, time_limit_s=time_limit_s, seed=seed)


def refined_kinds(
    problem: Problem, certificate: Certificate, *, time_limit_s: float | None = None, seed: int = 0
) -> Certificate:
    """A certificate at hand with a better plan and a better bound, if they are found.

    Args:
        problem: what was asked.
        certificate: what is known.
        time_limit_s: seconds to spend at most, about, those of the certificate included; None for a fixed
            amount of work. Ctrl-C ends it too, and what was found is returned.
        seed: of the searches.
    """
    if certificate.status == "optimal":
        return certificate
    proof = _begun(problem, certificate, time_limit_s, seed)
    proof.go_on(None if time_limit_s is None else proof.started + time_limit_s)
    return with_limits(problem, proof.certificate(), proof.stop)


def begun(problem: Problem, *, time_limit_s: float, seed: int) -> "Proof | None":
    """A plan and a bound that can go on from there, with a quarter of the time spent on the plan, about.

    None where the quick plan is proven, or engines are alike and nobody waits: other methods do more.
    """
    if problem.fleet.identical and not crowded(problem):
        return None
    quick = first_certificate(problem, time_limit_s)
    alone = problem.fleet.identical and not waits(problem, simulate(problem.trace, problem.fleet, quick.plan))
    if alone or quick.status == "optimal":
        return None
    return _begun(problem, quick, time_limit_s, seed)


def _begun(problem: Problem, certificate: Certificate, time_limit_s: float | None, seed: int) -> "Proof":
    started, units = clock() - certificate.wall_s, units_of(problem)
    limit_s, stop = np.inf if time_limit_s is None else time_limit_s, Stop()
    run, dealt, how = _better_plan(problem, units, certificate, limit_s, seed, stop)
    return Proof(problem, units, certificate, [run, dealt], how, started, seed, stop)


class Proof:
    """Prices on kinds and search over places in turn, first with coarse labels, later with finer ones.

    Attributes:
        run: the best plan.
        lower_s: the best bound.
        upper_s: makespan of a plan, maybe on other engines: bounds above it are worth nothing.
        started: when all began, by :func:`time.perf_counter`.
        ended: whether there is nothing more to try.
        stop: knows of Ctrl-C, after which nothing goes on.
    """

    def __init__(
        self,
        problem: Problem,
        units: Units,
        first: Certificate,
        runs: list[Run],
        how: str,
        started: float,
        seed: int,
        stop: Stop,
    ) -> None:
        self.problem, self.units, self.first, self.runs = problem, units, first, runs
        self.run, self.lower_s, self.upper_s = runs[0], first.lower_s, runs[0].makespan_s
        self.started, self.seed, self.ended, self.stop = started, seed, False, stop
        self.bound: PricedKindsBound | None = None
        self._methods = [first.method, how]
        self._ascent: KindsAscent | None = None
        self._search: PlacesSearch | None = None
        self._searched_s, self._states = 0.0, STATES

    @property
    def optimal(self) -> bool:
        """Whether nothing is open."""
        return status_of(self.lower_s, self.upper_s) == "optimal"

    def go_on(self, deadline_s: float | None, within_s: float = np.inf) -> None:
        """Until then, by :func:`time.perf_counter`; None: a fixed amount of work. So does Ctrl-C end it.

        Args:
            deadline_s: when to stop.
            within_s: makespan of a plan on any engines.
        """
        self.upper_s = min(self.upper_s, within_s)
        with self.stop:
            self.stop.check()
            if self._ascent is None and (deadline_s is None or clock() <= deadline_s):
                self._start(np.inf if deadline_s is None else deadline_s)
            while not (self.ended or self.optimal or (deadline_s is not None and clock() > deadline_s)):
                self._round(deadline_s)
                if deadline_s is None:
                    break
        self._take_prices()

    def certificate(self) -> Certificate:
        """What was found."""
        bound = self.bound or self.first.bound_argument
        return self.first.improved(bound, self.run, ", ".join(self._methods), self.started, self.seed)

    def _start(self, deadline_s: float) -> None:
        """From the plan whose first prices prove most."""
        engines = {one.plan.engine_of.tobytes(): one.plan.engine_of for one in self.runs}
        first = [members[0] for members in self.units.members]
        for engine_of in engines.values():
            ascent = KindsAscent.of(
                self.problem, self.units, engine_of[first], lower_s=self.lower_s, upper_s=self.upper_s
            )
            if ascent is None:
                self.ended = True
                return
            if len(engines) > 1 and clock() <= deadline_s:
                ascent.climb(1, deadline_s)
            if self._ascent is None or ascent.best_s > self._ascent.best_s:
                self._ascent = ascent

    def _round(self, deadline_s: float | None) -> None:
        """Prices, then a search at the best of them; finer labels next time if more states are no help."""
        ascent, now_s = self._ascent, clock()
        assert ascent is not None
        if deadline_s is None:
            ascent.climb(ITERATIONS)
        else:
            ascent.climb(MOST_ITERATIONS, now_s + PRICES_SHARE * (deadline_s - now_s))
        self._take_prices()
        if self.optimal or ascent.best is None or (deadline_s is not None and clock() > deadline_s):
            return
        if ascent.best.fills:  # a request may make the rest of an engine faster: no beginning is refuted
            self.ended = not ascent.refine()
            return
        if self._search is None or ascent.best_s > self._searched_s:
            self._search, self._searched_s = PlacesSearch(ascent.best), ascent.best_s
        found = self._searched(self._search, np.inf if deadline_s is None else deadline_s)
        self._states = min(MOST_STATES, MORE_STATES * self._states)
        if found.full or not found.lower_s > 0:
            self.ended = not ascent.refine() and (found.full or self._states == MOST_STATES)

    def _searched(self, search: PlacesSearch, deadline_s: float) -> Searched:
        found = search.narrow(self.lower_s, self.upper_s, self._states, deadline_s)
        for engine_of in found.plans:
            plan = plan_of(self.problem, self.units, engine_of)
            other = simulate(self.problem.trace, self.problem.fleet, plan)
            self.run = min(self.run, other, key=lambda one: one.makespan_s)
            self.upper_s = min(self.upper_s, self.run.makespan_s)
        if found.lower_s > self.lower_s:
            self._raise_to(search.priced.argument(found.lower_s, found.places, found.states))
            self._methods += [] if "search over places" in self._methods else ["search over places"]
        return found

    def _take_prices(self) -> None:
        """Raise the bound to what the best prices say."""
        if self._ascent is not None and self._ascent.best is not None:
            self._raise_to(self._ascent.best.argument(self._ascent.best_s))

    def _raise_to(self, bound: PricedKindsBound) -> None:
        """The argument stays as it is: what refutes its bound need not refute a lower one."""
        if bound.lower_s > self.lower_s:
            self.bound, self.lower_s = bound, min(bound.lower_s, self.upper_s)
            self._methods += [] if "prices on kinds" in self._methods else ["prices on kinds"]


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
    problem: Problem, units: Units, certificate: Certificate, limit_s: float, seed: int, stop: Stop
) -> tuple[Run, Run, str]:
    """The best plan found, one dealt by the inequalities of the bound, and how they were found.

    At Ctrl-C a search ends with what it has; between two of them, the plan of the one before is kept.
    """
    run, lower_s = simulate(problem.trace, problem.fleet, certificate.plan), certificate.lower_s
    dealt, how, end_s = run, "local search", clock() - certificate.wall_s + limit_s
    with stop:
        engine_of = local_search(
            problem,
            units,
            run.plan.engine_of[[members[0] for members in units.members]],
            lower_s=lower_s,
            time_limit_s=SEARCH_SHARE * limit_s,
            seed=seed,
            slices=SLICES if limit_s == np.inf else None,
            stop=stop,
        )
        other = simulate(problem.trace, problem.fleet, plan_of(problem, units, engine_of))
        run = dealt = min(run, other, key=lambda one: one.makespan_s)
        stop.check()
        if clock() > end_s or not waits(problem, run):
            return run, dealt, how
        deadline_s = clock() + CROWDED_SHARE * limit_s
        dealt = crowded_search(
            problem, units, run, lower_s=lower_s, deadline_s=deadline_s, seed=seed, stop=stop
        )
        run, how = dealt, "queue search" + (", ends" if applies(problem) else "")
        stop.check()
        if clock() > end_s:
            return run, dealt, how
        now_s, part = clock(), 1 - ENDS_SHARE if applies(problem) else 1.0
        share = QUEUES_SHARE if caches_fill(problem, run) else SLOTS_SHARE
        ends_s = min(end_s, now_s + share * limit_s)
        deadline_s = now_s + part * (ends_s - now_s)
        run = queue_search(problem, dealt, lower_s=lower_s, deadline_s=deadline_s, seed=seed, stop=stop)
        stop.check()
        run = ends_search(problem, run, lower_s=lower_s, deadline_s=ends_s, seed=seed, stop=stop)
    return run, dealt, how


def with_limits(problem: Problem, certificate: Certificate, stop: Stop) -> Certificate:
    """A certificate whose plan runs fewer requests together where that is faster, as it can be if a step time
    is convex in their number; as it is after Ctrl-C."""
    fleet, n = problem.fleet, problem.trace.n_requests
    lines = [
        fleet.shape_of(e).step_time.lines(min(fleet.max_running(e), n)) for e in range(len(fleet.engines))
    ]
    if certificate.status == "optimal" or stop.came or all(map(concave, lines)):
        return certificate
    started, run = clock() - certificate.wall_s, simulate(problem.trace, fleet, certificate.plan)
    other = admitted(problem, run, lower_s=certificate.lower_s, stop=stop)
    return certificate.improved(
        certificate.bound_argument, other, certificate.method, started, certificate.seed
    )


def admitted(problem: Problem, run: Run, *, lower_s: float, stop: Stop | None = None) -> Run:
    """The same dealing with better limits: the engine done last gets a better one until that fails."""
    queues: list[Admission | None] = []
    for e, engine in enumerate(run.plan.engines):
        mine = run.plan.order[run.plan.engine_of[run.plan.order] == e]
        seconds = float(run.finish_s[run.engine == e].max()) if len(mine) else 0.0
        queues.append(Admission(mine, engine.max_running, seconds, engine.limits) if len(mine) else None)
    tried: set[int] = set()
    with stop or Stop():
        while True:
            e = max(range(len(queues)), key=lambda e: 0.0 if (q := queues[e]) is None else q.seconds)
            now = queues[e]
            if now is None or now.seconds <= lower_s or e in tried:
                break
            tried.add(e)
            queues[e] = min(now, admit(problem, e, now.order), key=lambda q: q.seconds)
    other = simulate(problem.trace, problem.fleet, with_queues(problem, queues))
    return min(run, other, key=lambda one: one.makespan_s)
