r"""The best switch found: when, from which cut to which, and where each request goes before and after.

A fleet that will be left wants balanced *work until then*, not the staircase of the whole lengths. So the
first routing to start from is that of a batch whose responses end early: cut off where only so many are left.

1. For each cut and each of a geometric series of cut-offs one run of the first phase, and for each B what is
   left filled into its engines as a staircase, longest first and into the fullest that still fits, engines
   counted from when they can begin and moves by what they cost: an estimate of T. Those of least estimate are
   simulated.
2. From the best of each pair of cuts, who is where before and after, and n, are annealed
   (:mod:`tailopt.oracle.one_switch_kernel`), each time for fewer of them and longer.
"""

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints
from tailopt.errors import InputError
from tailopt.oracle.filling import FULLEST, SOONEST, filling_by_bisection, merge, set_time_s
from tailopt.oracle.one_switch_kernel import Batch, Engines, anneal
from tailopt.oracle.problem import Problem
from tailopt.oracle.shapes import ShapesCertificate
from tailopt.oracle.units import shared_prefill, too_large, units_of
from tailopt.plan import Engine, Fleet, Plan, ReviewPoint, View
from tailopt.run import Run
from tailopt.simulate.line_table import line_table
from tailopt.simulate.simulator import simulate, simulate_policy
from tailopt.trace import Trace

RATIO = 1.5  # between one cut-off of the series and the next
LEAST_CUT_OFF = 1 / 16  # of the requests
BEYOND = 0.5  # share of the lengths beyond a cut-off that beginnings count on
NEAR = 1.1  # a switch that is not estimated to be this near to the best found is left alone
FILLED = 1e-3  # relative width at which the bisection for a filling stops
ESTIMATES_SHARE = 0.3  # of the time that is left
STARTS = 6, 2, 1, 0  # switches of each size that are annealed, turn by turn; in the end the best
SIZES = 16, 64, 160  # requests left: few to many
HOT, COLD = 1e-3, 5e-6  # rise of the makespan, as a share, taken with probability 1/e
PROPOSALS = 8_000  # for each, without a time limit
SLICE_S, MOST = 0.2, 1_000_000  # between two looks at the clock: seconds, and proposals at most


@dataclass(frozen=True)
class Switch:
    """A way to switch.

    Attributes:
        first, second: cuts, by number.
        cut_off: the first routing is that of responses cut off where so many are left; 0 for whole ones.
        unfinished: when to switch.
    """

    first: int
    second: int
    cut_off: int
    unfinished: int


@dataclass(frozen=True, eq=False)
class Dealt:
    """A switch with all that belongs to it.

    Attributes:
        first: cut, by number.
        engines: after the switch.
        before, after: ``[u]`` engine of each unit, in the first and in the second phase.
        unfinished: when to switch.
    """

    first: int
    engines: tuple[Engine, ...]
    before: Ints
    after: Ints
    unfinished: int


class SwitchSearch:
    """The best run so far, and the rounds that look for a better one."""

    def __init__(
        self,
        trace: Trace,
        static: ShapesCertificate,
        groups: tuple[int, ...],
        atomic: bool,
        deadline: float,
        seed: int,
        better: Callable[[Run], None],
    ) -> None:
        self.trace, self.groups, self.atomic = trace, groups, atomic
        self.deadline, self.seed, self.better = deadline, seed, better
        order = [tuple(engine.tp for engine in cut.fleet.engines) for cut in static.cuts]
        by_shape = sorted(range(len(order)), key=lambda k: order[k])  # whatever the bounds are
        self.cuts = [static.cuts[k] for k in by_shape if static.cuts[k].bound is not None]
        self.fleets = [cut.fleet for cut in self.cuts]
        self.run = simulate(trace, static.fleet, static.plan)
        self.unit = trace.group if atomic else np.arange(trace.n_requests)
        self.routings: dict[tuple[int, int], Ints] = {}
        self.starts: list[tuple[float, Dealt]] = []
        self.pace = 100  # proposals between two looks at the clock

    def estimate(self) -> None:
        """Simulate the switches of least estimate, one for each size and pair of cuts: to start from."""
        guesses: list[tuple[float, Switch]] = []
        now, n = time.perf_counter(), self.trace.n_requests
        until = now + ESTIMATES_SHARE * (self.deadline - now)
        beginnings = [0, *(left for left in _series(n) if left >= LEAST_CUT_OFF * n)]
        # should the time not suffice, the cuts that are best without a switch were looked at
        for first in sorted(range(len(self.cuts)), key=lambda k: self.cuts[k].lower_s):
            for cut_off in beginnings:
                if time.perf_counter() > until:
                    break
                guesses += self._guesses(first, cut_off, until)
        guesses.sort(key=lambda guess: guess[0])
        unlike: dict[tuple[int, int, int], Switch] = {}
        for _, switch in guesses:
            unlike.setdefault((_size(switch.unfinished), switch.first, switch.second), switch)
        switches = list(unlike.values())
        for place in _first_of_each_size([one.unfinished for one in switches], STARTS[0]):
            if time.perf_counter() > self.deadline:
                break
            run, first = self._run(switches[place]), switches[place].first
            if run is not None:
                self.starts.append((run.makespan_s, self._dealt(first, run)))

    def anneal(self) -> None:
        """Change who is where, and how many are left at the switch, from ever fewer starts and longer."""
        random = np.random.default_rng(self.seed)
        for turn, most in enumerate(STARTS):
            self.starts.sort(key=lambda start: start[0])
            places = _first_of_each_size([dealt.unfinished for _, dealt in self.starts], most)
            self.starts = [self.starts[place] for place in places] if most else self.starts[:1]
            until = time.perf_counter() + (self.deadline - time.perf_counter()) / (len(STARTS) - turn)
            for place, (_, dealt) in enumerate(self.starts):
                now = time.perf_counter()
                share_s = (until - now) / (len(self.starts) - place)
                if share_s <= 0:
                    break
                other = self._annealed(dealt, now + share_s, random)
                self.starts[place] = min(self.starts[place], other, key=lambda one: one[0])

    def _annealed(self, dealt: Dealt, until: float, random: np.random.Generator) -> tuple[float, Dealt]:
        """What becomes of a start, and its makespan as simulated."""
        batch, first, second = self._arrays(dealt)
        before, after, unfinished = dealt.before.copy(), dealt.after.copy(), dealt.unfinished
        started, hot_s, cold_s = time.perf_counter(), HOT * self.run.makespan_s, COLD * self.run.makespan_s
        done, proposals = 0.0, PROPOSALS if until == np.inf else self.pace
        while done < 1:
            at = time.perf_counter()
            last = until == np.inf or at + SLICE_S >= until
            then = 1.0 if last else (at + SLICE_S - started) / (until - started)
            unfinished, _ = anneal(
                batch, first, second, before, after, unfinished, hot_s * (cold_s / hot_s) ** done,
                hot_s * (cold_s / hot_s) ** then, proposals, random,
            )  # fmt: skip
            if until < np.inf:
                took_s = max(time.perf_counter() - at, 1e-6)
                self.pace = proposals = int(
                    np.clip(proposals * SLICE_S / took_s, 10, min(10 * proposals, MOST))
                )
            done = then
        found = replace(dealt, before=before, after=after, unfinished=unfinished)
        return self._carry_out(found), found

    def _guesses(self, first: int, cut_off: int, until: float) -> Iterator[tuple[float, Switch]]:
        """Estimates for switches from one beginning; what is left is watched in one run."""
        numbers = _series(self.trace.n_requests) if cut_off == 0 else _series(cut_off)[-3:]
        seen: dict[int, View] = {}
        engine_of = self._routing(first, cut_off)

        def watch(view: View) -> Plan:
            points = tuple(ReviewPoint("unfinished", n) for n in numbers if n < view.n_requests)
            if view.n_requests < self.trace.n_requests:
                seen[min((n for n in numbers if n >= view.n_requests), default=0)] = view
            return self._beginning(first, engine_of[view.request], points, view)

        try:
            simulate_policy(self.trace, watch, self._start(first))
        except InputError:  # a request that does not fit where it was sent
            return
        for unfinished, view in seen.items():
            for second in range(len(self.fleets)):
                if time.perf_counter() > until:
                    return
                switch = Switch(first, second, cut_off, unfinished)
                if second != first and unfinished:
                    within_s = NEAR * self.run.makespan_s - view.now_s
                    done_s = self._deal(view, second, within_s)[1]
                    if done_s < np.inf:
                        yield view.now_s + done_s, switch

    def _start(self, first: int) -> View:
        return View.at_start(self.trace, self.fleets[first], atomic=self.atomic)

    def _beginning(self, first: int, engine_of: Ints, review: tuple[ReviewPoint, ...], view: View) -> Plan:
        order = np.argsort(-self.trace.output_tokens[view.request], kind="stable")
        engines = self.fleets[first].engines
        return Plan(engines, engine_of, order, atomic=self.atomic, review=review)

    def _routing(self, first: int, cut_off: int) -> Ints:
        """``[n]`` engine of each request at the beginning."""
        if (first, cut_off) not in self.routings:
            certificate = self.cuts[first].certificate
            if cut_off == 0 and certificate is not None:
                self.routings[first, cut_off] = certificate.plan.engine_of
            else:
                output = self.trace.output_tokens
                if cut_off:
                    there = np.sort(output)[-cut_off]
                    more = np.maximum(output - there, 0) * BEYOND
                    output = np.minimum(output, there) + more.astype(np.int64)
                problem = Problem(
                    replace(self.trace, output_tokens=output), self.fleets[first], atomic=self.atomic
                )
                units = units_of(problem)
                engine_of = np.empty(len(output), dtype=np.int64)
                filled = filling_by_bisection(problem, units, 0.0, FILLED, kv_share=1.0)
                for members, engine in zip(units.members, filled, strict=True):
                    engine_of[members] = engine
                self.routings[first, cut_off] = engine_of
        return self.routings[first, cut_off]

    def _run(self, switch: Switch) -> Run | None:
        """The run of a switch; None if a request does not fit where it is sent, or it never comes to it."""
        before = self._routing(switch.first, switch.cut_off)
        return self._simulated(
            switch.first, before, switch.unfinished, lambda view: self._deal(view, switch.second)[0]
        )

    def _carry_out(self, dealt: Dealt) -> float:
        """The makespan; infinity if a request does not fit where it is sent, or there is no switch."""

        def then(view: View) -> Plan:
            order = np.argsort(view.generated_tokens - self.trace.output_tokens[view.request], kind="stable")
            return self._after(view, dealt.engines, dealt.after[self.unit[view.request]], order)

        run = self._simulated(dealt.first, dealt.before[self.unit], dealt.unfinished, then)
        return np.inf if run is None else run.makespan_s

    def _simulated(
        self, first: int, before: Ints, unfinished: int, then: Callable[[View], Plan]
    ) -> Run | None:
        """One run, which is kept if it is the best."""
        review = (ReviewPoint("unfinished", unfinished),)

        def policy(view: View) -> Plan:
            at_start = view.n_requests == self.trace.n_requests
            return self._beginning(first, before, review, view) if at_start else then(view)

        try:
            run = simulate_policy(self.trace, policy, self._start(first))
        except InputError:
            return None
        if not run.reviews:
            return None
        if run.makespan_s < self.run.makespan_s:
            self.run = run
            self.better(run)
        return run

    def _dealt(self, first: int, run: Run) -> Dealt:
        """What a run did, by units; those finished before are sent where they were, or could be."""
        review, engines = run.reviews[0], self.fleets[first].engines
        before, after = np.zeros((2, int(self.unit.max()) + 1), np.int64)
        before[self.unit] = run.plan.engine_of
        place = np.array([_same(engine, review.plan.engines) for engine in engines])
        largest = int(np.argmax([engine.tp for engine in review.plan.engines]))
        after[:] = np.where(place[before] < 0, largest, place[before])
        after[self.unit[review.request]] = review.plan.engine_of
        return Dealt(first, review.plan.engines, before, after, int(run.plan.review[0].value))

    def _arrays(self, dealt: Dealt) -> tuple[Batch, Engines, Engines]:
        """As the compiled code takes them."""
        trace, fleet = self.trace, self.fleets[dealt.first]
        order = np.argsort(-trace.output_tokens, kind="stable")
        shared = shared_prefill(Problem(trace, fleet, self.atomic))[order]
        context = trace.context_tokens[order]
        batch = Batch(
            trace.output_tokens[order], context, context - shared, shared, trace.group[order],
            self.unit[order],
        )  # fmt: skip
        first = self._engines(fleet, dealt.engines)
        second = self._engines(Fleet(fleet.profile, dealt.engines, fleet.gpus), fleet.engines)
        return batch, first, second

    def _engines(self, fleet: Fleet, others: tuple[Engine, ...]) -> Engines:
        profile, n = fleet.profile, self.trace.n_requests
        shapes = [fleet.shape_of(e) for e in range(len(fleet.engines))]
        slots = np.array([fleet.max_running(e) for e in range(len(shapes))])
        lines, units = line_table(fleet, int(min(n, slots.max()))), int(self.unit.max()) + 1
        problem, fits = Problem(self.trace, fleet, self.atomic), np.ones((len(shapes), units), np.bool_)
        for e, shape in enumerate(shapes):
            fits[e, self.unit[too_large(problem, shape)]] = False
        twin = np.array([_same(engine, others) for engine in fleet.engines])
        wake_s, rate = np.array([shape.wake_s for shape in shapes]), profile.link_bytes_per_s
        sent_s = np.full(len(shapes), np.inf)
        if rate is not None:
            sent_s[twin >= 0] = profile.kv_bytes_per_token / rate  # others sleep when most requests go
        return Engines(
            lines.base_s, lines.slope_s, lines.pieces, lines.shape, slots,
            np.array([shape.kv_capacity_tokens for shape in shapes]),
            np.array([1 / shape.prefill_tokens_per_s for shape in shapes]),
            sent_s, np.array([shape.sleep_s for shape in shapes]), wake_s, twin, fits,
        )  # fmt: skip

    def _deal(self, view: View, second: int, within_s: float = np.inf) -> tuple[Plan, float]:
        """What is left, dealt to the engines after the switch, and the seconds until the last is done.

        These are infinite if no filling is done ``within_s``.
        """
        left, now = self.trace.output_tokens[view.request] - view.generated_tokens, view.fleet.engines
        # engines with the longest work left are the first to go on
        work = np.zeros(len(now))
        np.maximum.at(work, view.engine[view.engine >= 0], left[view.engine >= 0])
        degrees = [engine.tp for engine in self.fleets[second].engines]
        engines, kept = meeting(now, degrees, self.groups, np.argsort(-work, kind="stable").tolist())
        engine_of, done_s = self._fill(view, left, engines, kept, within_s)
        return self._after(view, engines, engine_of, np.argsort(-left, kind="stable")), done_s

    def _after(self, view: View, engines: tuple[Engine, ...], engine_of: Ints, order: Ints) -> Plan:
        return Plan(engines, engine_of, order, atomic=self.atomic, note=f"{view.n_requests} left")

    def _fill(
        self,
        view: View,
        left: Ints,
        engines: tuple[Engine, ...],
        kept: dict[int, int],
        within_s: float,
    ) -> tuple[Ints, float]:
        """The least staircase of what is left on these engines, of which some go on, and when it is done."""
        now, profile = view.fleet.engines, view.fleet.profile
        fleet, context = Fleet(profile, engines, view.fleet.gpus), view.prompt_tokens + view.generated_tokens
        shapes = [fleet.shape_of(e) for e in range(len(engines))]
        asleep_s = max((profile.shape(e.tp).sleep_s for k, e in enumerate(now) if k not in kept), default=0.0)
        ready_s = np.array([asleep_s + shape.wake_s for shape in shapes])
        ready_s[list(kept.values())] = 0.0

        place = np.full(len(now) + 1, -1)
        place[list(kept)] = list(kept.values())
        unit = np.unique(self.unit[view.request], return_inverse=True)[1]
        longest = np.zeros(unit.max() + 1, dtype=np.int64)
        np.maximum.at(longest, unit, left)
        order = np.lexsort((-left, unit, -longest[unit]))  # unit by unit, longest first
        starts = np.flatnonzero(np.diff(unit[order], prepend=-1))
        home, ends = place[view.engine[order[starts]]], np.append(starts, len(order))
        running = np.array([fleet.max_running(e) for e in range(len(engines))])
        limit = int(min(len(left), running.max()))
        lines = line_table(fleet, limit)
        given = (
            left[order], context[order], ends, home, lines.base_s, lines.slope_s, lines.pieces,
            lines.shape, np.minimum(running, limit),
            np.array([shape.kv_capacity_tokens for shape in shapes]), ready_s,
            np.array([1 / shape.prefill_tokens_per_s for shape in shapes]),
        )  # fmt: skip
        filled = np.zeros(len(starts), dtype=np.int64)
        high = deal(*given, within_s, SOONEST if within_s == np.inf else FULLEST, filled)
        low, trial = 0.0, filled.copy()
        while high < np.inf and high - low > FILLED * high:
            middle = (low + high) / 2
            done_s = deal(*given, middle, FULLEST, trial)
            if done_s == np.inf:
                low = middle
            else:
                filled, high = trial.copy(), min(done_s, middle)
        engine_of = np.empty(len(left), dtype=np.int64)
        engine_of[order] = np.repeat(filled, np.diff(ends))
        return engine_of, high


def _same(engine: Engine, others: Sequence[Engine]) -> int:
    """Which of the others is the same, -1 if none is."""
    return next((place for place, other in enumerate(others) if engine.same_as(other)), -1)


def _size(unfinished: int) -> int:
    """Which of the ``SIZES`` a number of requests is."""
    return bisect_right(SIZES, unfinished)


def _first_of_each_size(unfinished: list[int], most: int) -> list[int]:
    """Places of the first so many of each size."""
    places = defaultdict[int, list[int]](list)
    for place, n in enumerate(unfinished):
        places[_size(n)].append(place)
    return sorted(place for own in places.values() for place in own[:most])


def _series(most: int) -> list[int]:
    """Whole numbers from 1 up to below ``most``, each at most ``RATIO`` times the one before.

    >>> _series(9)
    [1, 2, 3, 5, 8]
    """
    numbers, one = [], 1
    while one < most:
        numbers.append(one)
        one = max(one + 1, int(np.ceil(one * RATIO)))
    return numbers


def meeting(
    now: Sequence[Engine], degrees: Sequence[int], groups: Sequence[int], prefer: Sequence[int]
) -> tuple[tuple[Engine, ...], dict[int, int]]:
    """Engines of these degrees, of which as many as can are among those there are now.

    Args:
        now: placed engines.
        degrees: of the engines wanted; they can be packed into the groups.
        groups: sizes of the groups of GPUs that no engine may straddle.
        prefer: positions in ``now``, those first that are to go on before others of their degree.

    Returns:
        The engines, and for those of ``now`` that go on their position among them.

    >>> now = [Engine(2, gpus=(0, 1)), Engine(1, gpus=(2,)), Engine(1, gpus=(3,))]
    >>> engines, kept = meeting(now, [2, 2], [4], [0, 1, 2])
    >>> [engine.gpus for engine in engines], kept
    ([(0, 1), (2, 3)], {0: 0})
    """
    wanted = Counter(degrees)
    going: list[int] = []
    for e in prefer:
        if wanted[now[e].tp] and now[e].gpus is not None:
            wanted[now[e].tp] -= 1
            going.append(e)
    while True:
        free = _free(groups, [gpu for e in going for gpu in now[e].gpus or ()])
        left = sorted(wanted.elements(), reverse=True)
        placed = _pack(left, free)
        if placed is not None:
            break
        wanted[now[going[-1]].tp] += 1
        going.pop()
    return (*(now[e] for e in going), *placed), {e: place for place, e in enumerate(going)}


def _free(groups: Sequence[int], taken: Sequence[int]) -> list[list[int]]:
    """The GPUs of each group that are not taken."""
    starts = np.cumsum([0, *groups[:-1]]).tolist()
    return [
        sorted(set(range(start, start + size)) - set(taken))
        for start, size in zip(starts, groups, strict=True)
    ]


def _pack(degrees: Sequence[int], free: list[list[int]]) -> list[Engine] | None:
    """Engines, largest first, each within a group of free GPUs; None if they cannot be packed."""
    if not degrees:
        return []
    tried = set()
    for group, gpus in enumerate(free):
        if len(gpus) >= degrees[0] and len(gpus) not in tried:
            tried.add(len(gpus))
            left = [*free[:group], gpus[degrees[0] :], *free[group + 1 :]]
            rest = _pack(degrees[1:], left)
            if rest is not None:
                return [Engine(degrees[0], gpus=tuple(gpus[: degrees[0]])), *rest]
    return None


@njit(cache=True)
def deal(
    output: Ints,
    context: Ints,
    unit_start: Ints,
    home: Ints,
    base_s: Floats,
    slope_s: Floats,
    pieces: Ints,
    shape: Ints,
    max_running: Ints,
    kv_capacity_tokens: Ints,
    ready_s: Floats,
    token_s: Floats,
    makespan_s: float,
    rule: int,
    engine_of: Ints,
) -> float:
    """Deal what is left of a batch to engines in the order given, each unit within ``makespan_s``.

    Args:
        output, context: ``[n]`` tokens left and tokens held, unit by unit, longest first within a unit.
        unit_start: ``[u + 1]`` where units start.
        home: ``[u]`` the engine that each is on already, -1 for none of these.
        base_s, slope_s, pieces, shape, max_running, kv_capacity_tokens: as for
            :func:`tailopt.oracle.filling.fill_any`.
        ready_s: ``[m]`` when each engine can begin.
        token_s: ``[m]`` seconds to compute a token of context anew.
        makespan_s: no engine may be done later.
        rule: FULLEST, which opens an engine only when no open one fits, or SOONEST.
        engine_of: ``[u]`` written.

    Returns:
        When the last engine is done, or infinity if some unit fits nowhere.
    """
    m, n = len(shape), len(output)
    held_output, held_context = np.empty((m, n), np.int64), np.empty((m, n), np.int64)
    held, done_s, begin_s = np.zeros(m, np.int64), np.zeros(m), ready_s.copy()
    merged_output, merged_context = np.empty(n, np.int64), np.empty(n, np.int64)
    for u in range(len(unit_start) - 1):
        start, end = unit_start[u], unit_start[u + 1]
        best, best_done, best_rank = -1, np.inf, np.inf
        for e in range(m):
            size = held[e] + end - start
            merge(held_output[e, : held[e]], held_context[e, : held[e]], output[start:end],
                  context[start:end], merged_output, merged_context)  # fmt: skip
            lines = base_s[shape[e], :, : pieces[shape[e]]], slope_s[shape[e], : pieces[shape[e]]]
            moved_s = 0.0 if home[u] == e else token_s[e] * context[start:end].sum()
            then = begin_s[e] + moved_s + set_time_s(
                merged_output[:size], merged_context[:size], lines[0], lines[1],
                max_running[e], kv_capacity_tokens[e],
            )  # fmt: skip
            rank = then if rule == SOONEST or held[e] == 0 else -1.0 - done_s[e]
            if then <= makespan_s and rank < best_rank:
                best, best_done, best_rank = e, then, rank
        if best < 0:
            return np.inf
        size = held[best] + end - start
        merge(held_output[best, : held[best]], held_context[best, : held[best]], output[start:end],
              context[start:end], merged_output, merged_context)  # fmt: skip
        held_output[best, :size], held_context[best, :size] = merged_output[:size], merged_context[:size]
        if home[u] != best:
            begin_s[best] += token_s[best] * context[start:end].sum()
        held[best], done_s[best], engine_of[u] = size, best_done, best
    return float(done_s.max())
