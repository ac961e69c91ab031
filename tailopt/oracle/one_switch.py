r"""One switch: the best single change of the fleet in the middle of a batch whose lengths are known.

A batch lives through a crowded phase and a sparse one, and no cut of the GPUs need be good at both. So begin
on a cut A; when no more than n requests are unfinished, go on with a cut B. Engines that are in both go on;
requests of the others, and those that the plan sends elsewhere, are moved, at what the profile says it costs:

.. math:: T(A, B, n) = t_n + \underbrace{\text{drain} + \text{sleep} + \text{wake} + \text{move}}_{
          \text{of what changes only}} + (\text{the rest on } B) , \qquad
          T^*_1 = \min \Bigl(T^*_0,\; \min_{A, B, n, \text{routings}} T(A, B, n)\Bigr) ,

with :math:`T^*_0` the best without a switch (:mod:`tailopt.oracle.shapes`). What a switch takes and gives is
the simulator's word (:mod:`tailopt.simulate`): the makespan found is that of a run.

**Lower end.** Whoever may switch once can do no more than whoever may switch at any time for nothing
(:mod:`tailopt.oracle.any_bound`, :mod:`tailopt.oracle.class_bound`), and who does not switch is not done
before the bound of the static plans: :math:`T^*_1 \ge \min(\mathrm{lower}_0, \mathrm{lower}_{\text{any}})`.
Moved requests change nothing in that argument: each of their tokens is gained in one step that holds them and
reads their context, and what is computed anew only adds time.

**Upper end.** A fleet that will be left wants balanced *work until then*, not the staircase of the whole
lengths. So the first routing is that of a batch whose responses end early: cut off where only so many are
left. Four rounds:

1. the best without a switch, a part of the time;
2. for each cut and each of a geometric series of cut-offs one run of the first phase, and for each B what
   is left filled into its engines as a staircase, longest first and into the fullest that still fits, engines
   counted from when they can begin and moves by what they cost: an estimate of T. Those of least estimate are
   simulated;
3. from the best of those, one choice after another is changed for its neighbours as long as that helps;
4. single requests, or groups, are sent to other engines, before and after the switch, as long as that helps.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints
from tailopt.engine.profile import EngineProfile
from tailopt.errors import InputError
from tailopt.oracle.any_bound import AnyBound, lower_any_s
from tailopt.oracle.class_bound import ClassBound, class_bound
from tailopt.oracle.filling import FULLEST, SOONEST, filling_by_bisection, merge, set_time_s
from tailopt.oracle.problem import Problem
from tailopt.oracle.shapes import ShapesCertificate, solve_shapes
from tailopt.oracle.units import units_of
from tailopt.plan import Engine, Fleet, Plan, ReviewPoint, View
from tailopt.run import Run
from tailopt.simulate.line_table import line_table
from tailopt.simulate.simulator import simulate, simulate_policy
from tailopt.trace import Trace

STATIC_SHARE = 0.4
"""Of the time, what the search without a switch may take."""

RATIO = 1.5  # between one cut-off of the series and the next
MOST_TRIED = 32
"""Estimated switches that are simulated."""

NEAR = 1.03  # a switch that is not estimated to be this near to the best found is left alone
FILLED = 1e-3  # relative width at which the bisection for a filling stops
POLISH = 300
"""Runs of the fourth round without a time limit."""

BEYOND = (0.0, 0.5)
"""Shares of the lengths beyond a cut-off that beginnings count on."""

POLISHED = 3
"""Ends of the third round that the fourth one starts from."""

STEPS = (1, 2, 4, 8, 16, 32)  # by which the third round changes numbers of requests


@dataclass(frozen=True)
class SwitchCost:
    """What a switch took; each part the longest over the engines, so that they add up to at most the pause.

    Attributes:
        drain_s: from the review to the end of the last step, and of sending, of an engine that closed.
        sleep_s, wake_s: of engines that closed and opened.
        move_s: until the last KV cache was there, or the moved contexts were computed anew.
        moved_requests, moved_tokens: running requests that were moved, and their context.
    """

    drain_s: float
    sleep_s: float
    wake_s: float
    move_s: float
    moved_requests: int
    moved_tokens: int


@dataclass(frozen=True, eq=False)
class SwitchCertificate:
    """The least makespan with at most one switch lies in ``[lower_s, upper_s]``.

    Attributes:
        static: of the best without a switch.
        run: of the best that was found: with one review if it switches, else of the static plan.
        bound_argument: why nobody is done earlier, however often he switches.
        wall_s: seconds it took.
        seed: of the searches.
    """

    static: ShapesCertificate
    run: Run
    bound_argument: AnyBound | ClassBound
    wall_s: float
    seed: int

    @property
    def lower_s(self) -> float:
        """Nobody who switches at most once is done earlier."""
        return min(self.static.lower_s, self.bound_argument.lower_s, self.upper_s)

    @property
    def upper_s(self) -> float:
        """Makespan of the best run."""
        return self.run.makespan_s

    @property
    def first(self) -> Fleet:
        """The engines of the beginning."""
        return self.run.fleet

    @property
    def second(self) -> Fleet | None:
        """The engines after the switch; None if there is none."""
        if not self.run.reviews:
            return None
        return Fleet(self.first.profile, self.run.reviews[0].plan.engines, self.first.gpus)

    @property
    def unfinished(self) -> int | None:
        """Unfinished requests that the switch waits for; None if there is none."""
        return int(self.run.plan.review[0].value) if self.run.reviews else None

    @property
    def switch_s(self) -> float | None:
        """When that many were left; None if there is no switch."""
        return self.run.reviews[0].time_s if self.run.reviews else None

    @property
    def cost(self) -> SwitchCost | None:
        """What the switch took; None if there is none."""
        return switch_cost(self.run) if self.run.reviews else None

    @property
    def gain(self) -> float:
        """Share of the best static makespan found that the switch saves."""
        return 1.0 - self.upper_s / self.static.upper_s

    @property
    def most_gain(self) -> float:
        """Share of the best static makespan found that no switch saves more than."""
        return 1.0 - self.lower_s / self.static.upper_s

    @property
    def sure_gain(self) -> float:
        """Share of the *bound* of all static plans that the switch saves; above 0, it beats every one."""
        return 1.0 - self.upper_s / self.static.lower_s

    @property
    def gap(self) -> float:
        """``upper_s / lower_s - 1``."""
        return self.upper_s / self.lower_s - 1.0


def with_switch_costs(
    profile: EngineProfile,
    *,
    sleep_s: float | None = None,
    wake_s: float | None = None,
    link_bytes_per_s: float | None = None,
) -> EngineProfile:
    """The profile with other costs of a switch, for all its shapes; None leaves what it has.

    >>> from tailopt.engine.catalogue import load_engine
    >>> slow = with_switch_costs(load_engine("h100-llama-3.1-8b"), sleep_s=1.5, wake_s=2)
    >>> slow.shape(4).sleep_s, slow.shape(1).wake_s
    (1.5, 2)
    """
    shapes = {
        tp: replace(
            shape,
            sleep_s=shape.sleep_s if sleep_s is None else sleep_s,
            wake_s=shape.wake_s if wake_s is None else wake_s,
        )
        for tp, shape in profile.shapes.items()
    }
    rate = profile.link_bytes_per_s if link_bytes_per_s is None else link_bytes_per_s
    return replace(profile, shapes=shapes, link_bytes_per_s=rate)


def switch_cost(run: Run) -> SwitchCost:
    """The parts of what the first switch of a run took."""
    spans, moves, profile = run.spans, run.moves, run.fleet.profile
    opened = spans.open_s > 0
    sent_s = (moves.end_s - moves.start_s)[moves.migrated]
    anew_s = np.zeros(len(run.engines))
    for target, tokens in zip(moves.target[~moves.migrated], moves.tokens[~moves.migrated], strict=True):
        if target >= 0:
            anew_s[target] += tokens / profile.shape(run.engines[target].tp).prefill_tokens_per_s
    return SwitchCost(
        drain_s=float(spans.drain_s.max()),
        sleep_s=float(spans.sleep_s.max()),
        wake_s=float(spans.wake_s[opened].max(initial=0.0)),
        move_s=max(float(sent_s.max(initial=0.0)), float(anew_s.max())),
        moved_requests=len(moves.request),
        moved_tokens=int(moves.tokens.sum()),
    )


def solve_one_switch(
    trace: Trace,
    profile: EngineProfile,
    gpus: int,
    *,
    atomic: bool,
    time_limit_s: float | None = None,
    seed: int = 0,
    topology: Sequence[int] | None = None,
    static: ShapesCertificate | None = None,
    progress: Callable[[SwitchCertificate], None] | None = None,
) -> SwitchCertificate:
    """The best plan with at most one switch over all pairs of cuts, and what no such plan beats.

    Args:
        trace: the batch.
        profile: what an engine of each degree can do, and what a switch costs.
        gpus: how many GPUs there are.
        atomic: whether the samples of a group must stay on one engine.
        time_limit_s: when to stop; None for a fixed amount of work. An interrupt (Ctrl-C) stops it too, and
            what was found is returned.
        seed: of the searches.
        topology: sizes of the groups of GPUs that no engine may straddle; None for a single group.
        static: what is known of the best without a switch on these GPUs, if it is: not searched again then.
            Its profile may have other costs of a switch.
        progress: called with what is known whenever a better run was found; what it raises on an interrupt
            stops the search too.

    Raises:
        InputError: as :func:`tailopt.oracle.shapes.solve_shapes`.

    >>> from tailopt.engine.catalogue import load_engine
    >>> trace = Trace.of([[9000, 500, 400], [800, 700, 600], [300, 200, 100]] * 8, prompt_tokens=100)
    >>> found = solve_one_switch(trace, load_engine("h100-llama-3.1-8b"), 4, atomic=False)
    >>> found.lower_s <= found.upper_s <= found.static.upper_s
    True
    """
    started = time.perf_counter()
    if time_limit_s is not None and not time_limit_s > 0:
        raise InputError(f"time limit: expected a positive number of seconds, got {time_limit_s}")
    if static is None:
        share_s = None if time_limit_s is None else STATIC_SHARE * time_limit_s
        static = solve_shapes(
            trace, profile, gpus, atomic=atomic, time_limit_s=share_s, seed=seed, topology=topology
        )
    static = _at_the_costs_of(profile, static)
    groups = (gpus,) if topology is None else tuple(topology)
    search = _Search(trace, static, groups, atomic, started, time_limit_s, seed, progress)
    try:
        search.estimate()
        search.climb()
        search.polish()
    except KeyboardInterrupt:
        pass
    return search.found()


def _at_the_costs_of(profile: EngineProfile, static: ShapesCertificate) -> ShapesCertificate:
    """The same certificate for a profile that differs in what a switch costs, if at all."""
    one, other = (with_switch_costs(of, sleep_s=0.0, wake_s=0.0) for of in (profile, static.fleet.profile))
    if dict(one.shapes) != dict(other.shapes):
        raise InputError(f"static: is of engine {other.name!r}, expected the shapes of {one.name!r}")
    cuts = {
        id(cut): replace(cut, fleet=Fleet(profile, cut.fleet.engines, cut.fleet.gpus)) for cut in static.cuts
    }
    return replace(static, cuts=tuple(cuts.values()), best=cuts[id(static.best)])


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


@dataclass(frozen=True)
class _Switch:
    """A way to switch.

    Attributes:
        first, second: cuts, by number.
        cut_off: the first routing is that of responses cut off where so many are left; 0 for whole ones.
        beyond: share of its length beyond that which still counts for a response.
        unfinished: when to switch.
        stay: requests on engines that go on stay there, else all are dealt anew.
        before, after: units that the first and the second routing send elsewhere, each with its engine.
    """

    first: int
    second: int
    cut_off: int
    unfinished: int
    beyond: float = 0.0
    stay: bool = False
    before: tuple[tuple[int, int], ...] = field(default=())
    after: tuple[tuple[int, int], ...] = field(default=())


class _Search:
    """The best run so far, and the rounds that look for a better one."""

    def __init__(
        self,
        trace: Trace,
        static: ShapesCertificate,
        groups: tuple[int, ...],
        atomic: bool,
        started: float,
        time_limit_s: float | None,
        seed: int,
        progress: Callable[[SwitchCertificate], None] | None,
    ) -> None:
        self.trace, self.static, self.groups, self.atomic = trace, static, groups, atomic
        self.started, self.seed, self.progress = started, seed, progress
        self.deadline = np.inf if time_limit_s is None else started + time_limit_s
        order = [tuple(engine.tp for engine in cut.fleet.engines) for cut in static.cuts]
        by_shape = sorted(range(len(order)), key=lambda k: order[k])  # whatever the bounds are
        self.cuts = [static.cuts[k] for k in by_shape if static.cuts[k].bound is not None]
        self.fleets = [cut.fleet for cut in self.cuts]
        self.bound: AnyBound | ClassBound = max(
            (one for one in (lower_any_s(trace, static.fleet), class_bound(trace, static.fleet)) if one),
            key=lambda one: one.lower_s,
        )
        self.run = simulate(trace, static.fleet, static.plan)
        self.unit = trace.group if atomic else np.arange(trace.n_requests)
        self.longest_first = np.argsort(-trace.output_tokens, kind="stable")
        self.routings: dict[tuple[int, int, float], Ints] = {}
        self.starts: list[_Switch] = []
        self.known: dict[_Switch, float] = {}

    def found(self) -> SwitchCertificate:
        """What is known by now."""
        wall_s = time.perf_counter() - self.started
        return SwitchCertificate(self.static, self.run, self.bound, wall_s, self.seed)

    def estimate(self) -> None:
        """Simulate the switches of least estimate; the best of each pair of cuts are starts for the climb."""
        guesses: list[tuple[float, _Switch]] = []
        half = (self.started + self.deadline) / 2 if self.deadline < np.inf else np.inf
        beginnings = [(0, 0.0), *((n, share) for share in BEYOND for n in _series(self.trace.n_requests))]
        # should the time not suffice, the cuts that are best without a switch were looked at
        for first in sorted(range(len(self.cuts)), key=lambda k: self.cuts[k].lower_s):
            for cut_off, beyond in beginnings:
                if time.perf_counter() > half:
                    break
                guesses += self._guesses(first, cut_off, beyond)
        guesses.sort(key=lambda guess: guess[0])
        for _, switch in guesses[:MOST_TRIED]:
            if self._time():
                self._try(switch)
        sizes: dict[int, _Switch] = {}
        for _, switch in guesses:
            sizes.setdefault(switch.unfinished.bit_length() // 2, switch)
        self.starts = list(sizes.values())

    def climb(self) -> None:
        """From the best of each size of what is left, change choice after choice as long as that helps."""
        for place, at in enumerate(self.starts):
            while self._time():
                better = next((one for one in self._neighbours(at) if self._try(one) < self._try(at)), None)
                if better is None:
                    break
                at = self.starts[place] = better

    def polish(self) -> None:
        """Send single units elsewhere, before and after the switch, as long as that helps."""
        rng = np.random.default_rng(self.seed)
        starts = sorted(self.starts, key=self._try)[:POLISHED]
        for turn, at in enumerate(starts):
            run = self._carry_out(at)
            if run is None:
                continue
            # what is left stays dealt as it is when the beginning changes
            review = run.reviews[0]
            after = zip(self.unit[review.request].tolist(), review.plan.engine_of.tolist(), strict=True)
            at = replace(at, after=tuple(sorted(set(after))))
            now = time.perf_counter()
            until = now + (self.deadline - now) / (len(starts) - turn)
            for _ in range(POLISH if until == np.inf else 10**9):
                if time.perf_counter() > until:
                    break
                other = self._sent_elsewhere(at, run, rng)
                if other != at and self._try(other) <= self._try(at):
                    at, run = other, self._carry_out(other) or run

    def _time(self) -> bool:
        return time.perf_counter() < self.deadline

    def _guesses(self, first: int, cut_off: int, beyond: float) -> Iterator[tuple[float, _Switch]]:
        """Estimates for switches from one beginning; what is left is watched in one run."""
        numbers = _series(self.trace.n_requests) if cut_off == 0 else _series(cut_off)[-3:]
        seen: dict[int, View] = {}
        engine_of = self._routing(first, cut_off, beyond)

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
                switch = _Switch(first, second, cut_off, unfinished, beyond)
                if second != first and unfinished:
                    within_s = NEAR * self.run.makespan_s - view.now_s
                    done_s = self._deal(view, switch, within_s)[1]
                    if done_s < np.inf:
                        yield view.now_s + done_s, switch

    def _start(self, first: int) -> View:
        return View.at_start(self.trace, self.fleets[first], atomic=self.atomic)

    def _beginning(self, first: int, engine_of: Ints, review: tuple[ReviewPoint, ...], view: View) -> Plan:
        order = np.argsort(-self.trace.output_tokens[view.request], kind="stable")
        engines = self.fleets[first].engines
        return Plan(engines, engine_of, order, atomic=self.atomic, review=review)

    def _routing(self, first: int, cut_off: int, beyond: float) -> Ints:
        """``[n]`` engine of each request at the beginning."""
        if (first, cut_off, beyond) not in self.routings:
            certificate = self.cuts[first].certificate
            if cut_off == 0 and certificate is not None:
                self.routings[first, cut_off, beyond] = certificate.plan.engine_of
            else:
                output = self.trace.output_tokens
                if cut_off:
                    there = np.sort(output)[-cut_off]
                    more = np.maximum(output - there, 0) * beyond
                    output = np.minimum(output, there) + more.astype(np.int64)
                problem = Problem(
                    replace(self.trace, output_tokens=output), self.fleets[first], atomic=self.atomic
                )
                units = units_of(problem)
                engine_of = np.empty(len(output), dtype=np.int64)
                filled = filling_by_bisection(problem, units, 0.0, FILLED, kv_share=1.0)
                for members, engine in zip(units.members, filled, strict=True):
                    engine_of[members] = engine
                self.routings[first, cut_off, beyond] = engine_of
        return self.routings[first, cut_off, beyond]

    def _try(self, switch: _Switch) -> float:
        """The makespan of a switch, which is kept if it is better; infinity if it cannot be carried out."""
        if switch not in self.known:
            run = self._carry_out(switch)
            self.known[switch] = np.inf if run is None else run.makespan_s
            if run is not None and run.makespan_s < self.run.makespan_s:
                self.run = run
                if self.progress is not None:
                    self.progress(self.found())
        return self.known[switch]

    def _carry_out(self, switch: _Switch) -> Run | None:
        """The run of a switch; None if a request does not fit where it is sent, or it never comes to it."""
        engine_of = self._sent(self._routing(switch.first, switch.cut_off, switch.beyond), switch.before)
        review = (ReviewPoint("unfinished", switch.unfinished),)

        def policy(view: View) -> Plan:
            if view.n_requests == self.trace.n_requests:
                return self._beginning(switch.first, engine_of, review, view)
            return self._deal(view, switch)[0]

        try:
            run = simulate_policy(self.trace, policy, self._start(switch.first))
        except InputError:
            return None
        return run if run.reviews else None

    def _sent(self, engine_of: Ints, elsewhere: tuple[tuple[int, int], ...]) -> Ints:
        """A routing with some units sent to other engines."""
        engine_of = engine_of.copy()
        for unit, engine in elsewhere:
            engine_of[self.unit == unit] = engine
        return engine_of

    def _deal(self, view: View, switch: _Switch, within_s: float = np.inf) -> tuple[Plan, float]:
        """What is left, dealt to the engines after the switch, and the seconds until the last is done.

        These are infinite if no filling is done ``within_s``.
        """
        request = view.request
        assert request is not None
        profile = view.fleet.profile
        left = self.trace.output_tokens[request] - view.generated_tokens
        context = view.prompt_tokens + view.generated_tokens

        # engines with the longest work left are the first to go on
        work = np.zeros(len(view.fleet.engines))
        np.maximum.at(work, view.engine[view.engine >= 0], left[view.engine >= 0])
        degrees = [engine.tp for engine in self.fleets[switch.second].engines]
        prefer = np.argsort(-work, kind="stable").tolist()
        engines, kept = meeting(view.fleet.engines, degrees, self.groups, prefer)
        fleet = Fleet(profile, engines, view.fleet.gpus)
        asleep_s = max(
            (profile.shape(e.tp).sleep_s for k, e in enumerate(view.fleet.engines) if k not in kept),
            default=0.0,
        )
        ready_s = np.array([asleep_s + profile.shape(engine.tp).wake_s for engine in engines])
        ready_s[list(kept.values())] = 0.0

        place = np.full(len(view.fleet.engines) + 1, -1)
        place[list(kept)] = list(kept.values())
        unit = np.unique(self.unit[request], return_inverse=True)[1]
        longest = np.zeros(unit.max() + 1, dtype=np.int64)
        np.maximum.at(longest, unit, left)
        order = np.lexsort((-left, unit, -longest[unit]))  # unit by unit, longest first
        starts = np.flatnonzero(np.diff(unit[order], prepend=-1))
        home = place[view.engine[order[starts]]]
        limit = int(min(len(request), max(fleet.max_running(e) for e in range(len(engines)))))
        lines = line_table(fleet, limit)
        shapes = [fleet.shape_of(e) for e in range(len(engines))]
        ends = np.append(starts, len(order))

        def fill(makespan_s: float, rule: int) -> tuple[Ints, float]:
            filled = np.full(len(starts), 0, dtype=np.int64)
            done_s = deal(
                left[order], context[order], ends, home, switch.stay,
                lines.base_s, lines.slope_s, lines.pieces, lines.shape,
                np.array([min(fleet.max_running(e), limit) for e in range(len(engines))]),
                np.array([shape.kv_capacity_tokens for shape in shapes]), ready_s,
                np.array([1 / shape.prefill_tokens_per_s for shape in shapes]), makespan_s, rule, filled,
            )  # fmt: skip
            return filled, done_s

        if within_s < np.inf:
            engine_of_unit, done_s = fill(within_s, FULLEST)
        else:
            engine_of_unit, done_s = fill(np.inf, SOONEST)
        low, high = 0.0, done_s
        while high < np.inf and high - low > FILLED * high:
            middle = (low + high) / 2
            trial, trial_s = fill(middle, FULLEST)
            if trial_s == np.inf:
                low = middle
            else:
                engine_of_unit, done_s, high = trial, trial_s, min(trial_s, middle)
        engine_of = np.empty(len(request), dtype=np.int64)
        engine_of[order] = np.repeat(engine_of_unit, np.diff(ends))
        for one, engine in switch.after:
            engine_of[self.unit[request] == one] = engine
        in_order = np.argsort(-left, kind="stable")
        return Plan(engines, engine_of, in_order, atomic=self.atomic, note=f"{len(request)} left"), done_s

    def _neighbours(self, switch: _Switch) -> Iterator[_Switch]:
        """All that differ in one choice."""
        n = self.trace.n_requests
        yield replace(switch, stay=not switch.stay)
        if switch.cut_off:
            for beyond in (*BEYOND, 0.25, 0.75, 0.95):
                if beyond != switch.beyond:
                    yield replace(switch, beyond=beyond)
        for step in STEPS:
            for sign in (1, -1):
                unfinished, cut_off = switch.unfinished + sign * step, switch.cut_off + sign * step
                if 1 <= unfinished < n:
                    yield replace(switch, unfinished=unfinished)
                    if switch.cut_off and 1 <= cut_off < n:
                        yield replace(switch, unfinished=unfinished, cut_off=cut_off)
                if switch.cut_off and 1 <= cut_off < n:
                    yield replace(switch, cut_off=cut_off)
        for cut in range(len(self.fleets)):
            if cut not in (switch.first, switch.second):
                yield replace(switch, second=cut)
                yield replace(switch, first=cut)

    def _sent_elsewhere(self, switch: _Switch, run: Run, rng: np.random.Generator) -> _Switch:
        """With one more unit, or two in exchange, sent to another engine, before or after the switch."""
        review = run.reviews[0]
        after = bool(rng.random() < 0.5)
        plan, request = (review.plan, review.request) if after else (run.plan, np.arange(len(self.unit)))
        engine_of = dict(zip(self.unit[request].tolist(), plan.engine_of.tolist(), strict=True))
        units = list(engine_of)
        # one of those on the engine that is done last
        last = int(self.unit[np.argmax(run.finish_s)])
        crowd = [one for one in units if engine_of[one] == engine_of.get(last)] or units
        one, other = crowd[rng.integers(len(crowd))], units[rng.integers(len(units))]
        if rng.random() < 0.5:
            sent = {one: engine_of[other], other: engine_of[one]}
        else:
            sent = {one: int(rng.integers(len(plan.engines)))}
        merged = tuple(sorted((dict(switch.after if after else switch.before) | sent).items()))
        return replace(switch, after=merged) if after else replace(switch, before=merged)


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


@njit(cache=True)
def deal(
    output: Ints,
    context: Ints,
    unit_start: Ints,
    home: Ints,
    stay: bool,
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
        stay: whether those with a home stay there.
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
    for turn in range(2):
        for u in range(len(unit_start) - 1):
            at_home = stay and home[u] >= 0
            if at_home != (turn == 0):
                continue
            start, end = unit_start[u], unit_start[u + 1]
            best, best_done, best_rank = -1, np.inf, np.inf
            for e in range(m):
                if at_home and e != home[u]:
                    continue
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
