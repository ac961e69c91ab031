r"""Shapes and routing together: into which engines to cut G GPUs, and where each request goes.

A **cut** is a number of engines of each tensor-parallel degree that the profile has, at most G GPUs in all.
Where GPUs come in groups (a node, an NVLink island), each engine lies within one of them. A plan may leave an
engine empty, so a cut with room for another engine is no better than with it: only **full** cuts count.

.. math:: T^* = \min_{\text{cuts } k} T^*_k , \qquad
          \min_k \mathrm{lower}_k \;\le\; T^* \;\le\; \min_k \mathrm{upper}_k .

So the certificate is a table: for every full cut an argument that no plan on it is done before
:math:`\mathrm{lower}_k`, and for one cut a plan. Nobody need know how good the other cuts are: once
:math:`\mathrm{lower}_k` is no less than the plan at hand, cut k is **pruned**. Three rounds, each
for the cuts that the one before leaves open, the least bound first, since that one is the bound of all:

1. the bound for any policy on G GPUs (:mod:`tailopt.oracle.any_bound`), the same for all cuts, and the
   staircase of the cut's shapes (:mod:`tailopt.oracle.mixed`) from terms and weights that are computed once
   for each shape: some milliseconds a cut;
2. a plan, longest requests first and each where it is done soonest, and the best staircase of the shapes;
3. :func:`tailopt.oracle.solve.solve`. With a time limit this is repeated, with more time for each cut that is
   left; where a bound by prices on kinds can go on from where it stopped it does, for plans better than the
   best on any cut.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailopt.engine.profile import EngineProfile
from tailopt.errors import InputError
from tailopt.oracle.any_bound import lower_any_s
from tailopt.oracle.bound_and_fill import plan_of
from tailopt.oracle.certificate import OPTIMAL_GAP, BoundArgument, Certificate, Status, status_of
from tailopt.oracle.filling import soonest
from tailopt.oracle.kinds import kinds_of, terms_of
from tailopt.oracle.mixed import MOST_KINDS, MOST_STATES, KindBound, MixedBound, mixed_bound, placeable
from tailopt.oracle.mixed_solve import Proof, begun, caches_fill, with_limits
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.oracle.staircase import not_above, rounding
from tailopt.oracle.units import too_large, units_of
from tailopt.plan import Engine, Fleet, Plan
from tailopt.simulate.simulator import simulate
from tailopt.trace import Trace

MOST_CUTS = 5_000

SHARES = (0.3, 0.4, 1.0, 1.0)
"""Of the time that is left, what each repetition of the third round may take."""

LEAST_SLICE_S = 0.02

EVER_S = float(np.finfo(np.float64).max)  # a makespan that every plan is within
PRECISION = 1e-7  # relative width at which the bisection for a quick bound stops


@dataclass(frozen=True, eq=False)
class Cut:
    """One way to cut the GPUs, and what is known of it.

    Attributes:
        fleet: its engines, largest first.
        bound: why no plan on it is done before ``lower_s``; None if some request fits on none of its engines.
        certificate: of the best plan on it, None if there was no time to look for one.
    """

    fleet: Fleet
    bound: BoundArgument | None
    certificate: Certificate | None = None

    @property
    def lower_s(self) -> float:
        """No plan on this cut is done earlier; infinity if there is no plan."""
        return np.inf if self.bound is None else min(self.bound.lower_s, self.upper_s)

    @property
    def upper_s(self) -> float:
        """Makespan of the best plan found on this cut, infinity if none was."""
        return np.inf if self.certificate is None else self.certificate.upper_s


@dataclass(frozen=True, eq=False)
class ShapesCertificate:
    """The least makespan of any static plan on any cut lies in ``[lower_s, upper_s]``.

    Attributes:
        cuts: all full cuts, by rising bound.
        best: the one with the plan that attains ``upper_s``.
        wall_s: seconds it took.
        seed: of the searches.
    """

    cuts: tuple[Cut, ...]
    best: Cut
    wall_s: float
    seed: int

    @property
    def lower_s(self) -> float:
        """The least of the cuts' bounds."""
        return min(cut.lower_s for cut in self.cuts)

    @property
    def upper_s(self) -> float:
        """Makespan of the best plan."""
        return self.best.upper_s

    @property
    def fleet(self) -> Fleet:
        """The engines of the best plan."""
        return self.best.fleet

    @property
    def certificate(self) -> Certificate:
        """Of the best plan among those on its own cut."""
        assert self.best.certificate is not None
        return self.best.certificate

    @property
    def plan(self) -> Plan:
        """The best plan."""
        return self.certificate.plan

    @property
    def status(self) -> Status:
        """``"optimal"`` if the two ends meet within ``OPTIMAL_GAP``, else ``"feasible"``."""
        return status_of(self.lower_s, self.upper_s)

    @property
    def gap(self) -> float:
        """``upper_s / lower_s - 1``."""
        return self.upper_s / self.lower_s - 1.0

    def pruned(self, cut: Cut) -> bool:
        """Whether no plan on this cut is better than the one at hand."""
        return cut is not self.best and status_of(cut.lower_s, self.upper_s) == "optimal"


def solve_shapes(
    trace: Trace,
    profile: EngineProfile,
    gpus: int,
    *,
    atomic: bool,
    time_limit_s: float | None = None,
    seed: int = 0,
    topology: Sequence[int] | None = None,
    progress: Callable[[ShapesCertificate], None] | None = None,
) -> ShapesCertificate:
    """The best static plan over all cuts of the GPUs, with one certificate for shapes and routing.

    Args:
        trace: the batch.
        profile: what an engine of each degree can do.
        gpus: how many GPUs there are.
        atomic: whether the samples of a group must stay on one engine.
        time_limit_s: when to stop; None for a fixed amount of work. An interrupt (Ctrl-C) stops it too, and
            what was found is returned.
        seed: of the searches.
        topology: sizes of the groups of GPUs that no engine may straddle, in the order of their numbers; None
            for a single group.
        progress: called with what is known whenever a cut was looked at; what it raises on an interrupt
            stops the search too, as a solver may have used the interrupt to return early.

    Raises:
        InputError: if the groups are not of so many GPUs, there are more than ``MOST_CUTS`` cuts, none, or
            some request fits on no engine.

    >>> from tailopt.engine.catalogue import load_engine
    >>> trace = Trace.of([[9000, 500, 400], [800, 700, 600], [300, 200, 100]] * 8, prompt_tokens=100)
    >>> found = solve_shapes(trace, load_engine("h100-llama-3.1-8b"), 4, atomic=False)
    >>> [str(cut.fleet) for cut in found.cuts]
    ['1xTP4', '2xTP2', '1xTP2+2xTP1', '4xTP1']
    >>> str(found.fleet), found.gap < 0.01, [found.pruned(cut) for cut in found.cuts]
    ('1xTP4', True, [False, True, True, True])
    """
    started = time.perf_counter()
    if time_limit_s is not None and not time_limit_s > 0:
        raise InputError(f"time limit: expected a positive number of seconds, got {time_limit_s}")
    groups = [gpus] if topology is None else list(topology)
    fleets = [
        _fleet(profile, gpus, groups, packed) for packed in full_cuts(tuple(profile.shapes), gpus, groups)
    ]
    search = _Search(trace, fleets, atomic, started, time_limit_s, seed, progress)
    try:
        search.bound()
        search.look()
        search.solve()
    except KeyboardInterrupt:
        if search.upper_s == np.inf:
            raise
    return search.found()


def full_cuts(
    degrees: Sequence[int], gpus: int, topology: Sequence[int] | None = None
) -> list[tuple[tuple[int, ...], ...]]:
    """All cuts to which no engine can be added, each as the degrees of its engines within each group of GPUs.

    Args:
        degrees: tensor-parallel degrees of engines.
        gpus: how many GPUs there are.
        topology: sizes of groups of GPUs; None for a single group.

    Raises:
        InputError: if the groups are not of so many GPUs, there are more than ``MOST_CUTS`` cuts, or none.

    >>> full_cuts([1, 2, 4], 4)
    [((4,),), ((2, 2),), ((2, 1, 1),), ((1, 1, 1, 1),)]
    >>> full_cuts([2, 4], 6, [3, 3])
    [((2,), (2,))]
    """
    groups = [gpus] if topology is None else list(topology)
    if sum(groups) != gpus or min(groups) < 1:
        raise InputError(f"topology: expected groups of {gpus} GPUs in all, got {'+'.join(map(str, groups))}")
    falling = sorted(degrees, reverse=True)
    # a cut, as its sorted degrees -> one way to pack it; the groups are joined one after the other
    cuts: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {(): ()}
    for size in groups:
        joined: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        for cut, packed in cuts.items():
            for part in _full(falling, size):
                joined.setdefault(tuple(sorted(cut + part, reverse=True)), (*packed, part))
                if len(joined) > MOST_CUTS:
                    raise InputError(f"{gpus} GPUs: more than {MOST_CUTS} ways to cut them into engines")
        cuts = joined
    cuts.pop((), None)
    if not cuts:
        raise InputError(f"{gpus} GPUs: expected room for an engine, the smallest is TP{min(degrees)}")
    return [cuts[cut] for cut in sorted(cuts, reverse=True)]


def _full(falling: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Multisets of degrees, each falling, that leave no room for another of them."""
    if not falling:
        yield ()
        return
    degree, smaller = falling[0], falling[1:]
    for count in range(size // degree, -1, -1):
        if not smaller and count < size // degree:
            return
        for rest in _full(smaller, size - count * degree):
            yield (degree,) * count + rest


def _fleet(
    profile: EngineProfile, gpus: int, groups: Sequence[int], packed: tuple[tuple[int, ...], ...]
) -> Fleet:
    """The fleet of a cut, the GPUs of every engine within its group, largest engines first."""
    engines = []
    for first, degrees in zip(np.cumsum([0, *groups[:-1]]).tolist(), packed, strict=True):
        for degree in degrees:
            engines.append(Engine(degree, gpus=tuple(range(first, first + degree))))
            first += degree
    return Fleet(profile, tuple(sorted(engines, key=lambda engine: -engine.tp)), gpus)


class _Search:
    """What is known of each cut, and the rounds that find out more."""

    def __init__(
        self,
        trace: Trace,
        fleets: Sequence[Fleet],
        atomic: bool,
        started: float,
        time_limit_s: float | None,
        seed: int,
        progress: Callable[[ShapesCertificate], None] | None,
    ) -> None:
        self.trace, self.atomic, self.seed, self.progress = trace, atomic, seed, progress
        self.started = started
        self.deadline = np.inf if time_limit_s is None else started + time_limit_s
        self.anyone = lower_any_s(trace, fleets[0])
        self.cuts = [Cut(fleet, self.anyone if self._fits(fleet) else None) for fleet in fleets]
        self.upper_s = np.inf
        self.proofs: dict[int, Proof] = {}
        if all(cut.bound is None for cut in self.cuts):
            largest = max(fleets, key=lambda fleet: fleet.shape_of(0).kv_capacity_tokens)
            solve(Problem(trace, largest, atomic))  # says which request is too large
            raise InputError(f"{fleets[0].gpus} GPUs: no cut has an engine for every request")

    def bound(self) -> None:
        """The quick staircase of its shapes for every cut."""
        staircase = _Staircase(self.trace, self.cuts[0].fleet, self.atomic)
        for place, cut in enumerate(self.cuts):
            if self._left_s() <= 0:
                return
            quick = None if cut.bound is None else staircase.bound(cut.fleet, cut.bound.lower_s)
            if quick is not None:
                self.cuts[place] = replace(cut, bound=quick)

    def look(self) -> None:
        """A plan for every cut that is open, at least for one."""
        tried: set[int] = set()
        while (place := self._next(tried)) is not None and (self._left_s() > 0 or not tried):
            tried.add(place)
            self._learn(place, self._first(Problem(self.trace, self.cuts[place].fleet, self.atomic)))

    def solve(self) -> None:
        """The solver on every cut that may hold a better plan, the least bound first, time shared evenly."""
        for turn, share in enumerate(SHARES if self.deadline < np.inf else (1.0,)):
            tried: set[int] = set()
            until = time.perf_counter() + share * self._left_s()
            while (place := self._next(tried)) is not None:
                tried.add(place)
                if turn == 1 and self._crowded(place):
                    continue  # plans for full caches take their time all at once
                waiting = sum(self._open(other) for other in range(len(self.cuts)) if other not in tried)
                slice_s = (until - time.perf_counter()) / (1 + waiting)
                if slice_s < LEAST_SLICE_S:
                    break
                self._learn(place, self._solved(place, turn, slice_s))

    def _solved(self, place: int, turn: int, slice_s: float) -> Certificate:
        """What there is to find out about a cut within so many seconds."""
        problem, seed = Problem(self.trace, self.cuts[place].fleet, self.atomic), self.seed + turn
        if slice_s == np.inf:
            return solve(problem, seed=seed)
        started, proof = time.perf_counter(), self.proofs.get(place)
        if proof is None and turn == 0:
            proof = begun(problem, time_limit_s=slice_s, seed=seed)
        elif proof is not None and (proof.ended or self._crowded(place)):
            proof = None
        if proof is None:
            return solve(problem, time_limit_s=max(slice_s, LEAST_SLICE_S), seed=seed)
        self.proofs[place] = proof
        proof.go_on(started + slice_s, self.upper_s)
        return replace(
            with_limits(problem, proof.certificate(), proof.stop), wall_s=time.perf_counter() - started
        )

    def found(self) -> ShapesCertificate:
        """What is known by now."""
        best = min(self.cuts, key=lambda cut: cut.upper_s)
        cuts = sorted(self.cuts, key=lambda cut: cut.lower_s)
        return ShapesCertificate(tuple(cuts), best, time.perf_counter() - self.started, self.seed)

    def _fits(self, fleet: Fleet) -> bool:
        """Whether every request fits on some engine."""
        shapes = {engine.tp: fleet.profile.shape(engine.tp) for engine in fleet.engines}.values()
        problem = Problem(self.trace, fleet, self.atomic)
        return not np.logical_and.reduce([too_large(problem, shape) for shape in shapes]).any()

    def _first(self, problem: Problem) -> Certificate:
        """The plan done soonest, and the better of the shapes' staircase and the bound for any policy."""
        started = time.perf_counter()
        units = units_of(problem)
        run = simulate(problem.trace, problem.fleet, plan_of(problem, units, soonest(problem, units)))
        bounds = [self.anyone, mixed_bound(problem, units, run.makespan_s)]
        bound = max((one for one in bounds if one is not None), key=lambda one: one.lower_s)
        lower_s = not_above(bound.lower_s, run.makespan_s)
        status, wall_s = status_of(lower_s, run.makespan_s), time.perf_counter() - started
        method = "list schedule, staircase of shapes"
        return Certificate(lower_s, run.makespan_s, run.plan, status, method, bound, wall_s)

    def _learn(self, place: int, certificate: Certificate) -> None:
        """Keep the better of what was known and what a certificate says, of either end."""
        cut = self.cuts[place]
        known = cut.certificate or certificate
        plan = certificate if certificate.upper_s <= known.upper_s else known
        bounds = [cut.bound, known.bound_argument, certificate.bound_argument]
        bound = max((one for one in bounds if one is not None), key=lambda one: one.lower_s)
        lower_s = not_above(bound.lower_s, plan.upper_s)
        both = replace(
            plan, lower_s=lower_s, bound_argument=bound, status=status_of(lower_s, plan.upper_s),
            wall_s=known.wall_s + certificate.wall_s * (certificate is not known),
        )  # fmt: skip
        self.cuts[place] = Cut(cut.fleet, bound, both)
        self.upper_s = min(self.upper_s, both.upper_s)
        if self.progress is not None:
            self.progress(self.found())

    def _crowded(self, place: int) -> bool:
        """Whether the plan on a cut that prices are for fills caches."""
        proof = self.proofs.get(place)
        return proof is not None and caches_fill(proof.problem, proof.run)

    def _open(self, place: int) -> bool:
        """Whether a cut may hold a better plan, or its own is not proven to be the best on it."""
        return self.cuts[place].lower_s * (1 + OPTIMAL_GAP) < self.upper_s

    def _next(self, tried: set[int]) -> int | None:
        """The open cut of least bound that is not tried yet."""
        left = [place for place in range(len(self.cuts)) if place not in tried and self._open(place)]
        return min(left, key=lambda place: self.cuts[place].lower_s, default=None)

    def _left_s(self) -> float:
        return self.deadline - time.perf_counter()


class _Staircase:
    """:class:`tailopt.oracle.mixed.MixedBound` for many cuts of the same GPUs: one choice of terms each.

    The terms are the step times' last minorants for any concurrency, the weights count the longest requests,
    and the prices are those at which all units together cost each shape the same.
    """

    def __init__(self, trace: Trace, fleet: Fleet, atomic: bool) -> None:
        profile, self.gpus = fleet.profile, fleet.gpus
        degrees = [tp for tp in profile.shapes if tp <= self.gpus]
        one_each = Fleet(profile, tuple(map(Engine, degrees)), sum(degrees))
        units = units_of(Problem(trace, one_each, atomic))
        kinds = kinds_of(one_each)
        self.longest = units.longest.astype(np.float64)
        self.terms = dict(zip(degrees, terms_of(units, kinds, trace.n_requests, EVER_S), strict=True))
        minorants = {tp: term.minorants[-1] for tp, term in self.terms.items()}
        self.lead_s = {tp: one.a_s for tp, one in minorants.items()}
        self.weight_s = {
            tp: one.b_s * units.tokens + one.c_s * units.context for tp, one in minorants.items()
        }

    def bound(self, fleet: Fleet, known_s: float) -> MixedBound | None:
        """The bound for a cut; None if it is no better than ``known_s``, or there are too many kinds."""
        degrees = list(dict.fromkeys(engine.tp for engine in fleet.engines))
        counts = np.array([sum(engine.tp == tp for engine in fleet.engines) for tp in degrees])
        if len(degrees) > MOST_KINDS or np.prod(counts + 1.0) > MOST_STATES:
            return None
        weight_s = np.stack([self.weight_s[tp] for tp in degrees])
        lead_s = np.array([self.lead_s[tp] for tp in degrees])
        work_s = weight_s.sum(axis=1)
        prices = work_s[0] / work_s if work_s.all() else np.ones(len(degrees))

        def open_at(makespan_s: float) -> bool:
            return bool(placeable(self.longest, weight_s, lead_s, prices, counts, makespan_s))

        low, high = known_s, float(work_s.max() + self.longest[0] * lead_s.max()) * (1 + 1e-9)
        if open_at(low):
            return None
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if open_at(middle) else (middle, high)
        parts = [
            KindBound(self.terms[tp].rays, self.terms[tp].minorants[-1], float(price))
            for tp, price in zip(degrees, prices, strict=True)
        ]
        lower_s = low * (1 - rounding(len(self.longest)))
        return MixedBound(lower_s, tuple(parts), (1.0, 0.0, 0.0), EVER_S) if lower_s > known_s else None
