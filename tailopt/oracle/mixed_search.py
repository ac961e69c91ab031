r"""Local search for engines that cannot hold all they get: a quick model, set right by schedules.

To make a schedule from its end (:mod:`tailopt.oracle.mixed_queues`) takes twenty microseconds an engine; to
add up its rows (:mod:`tailopt.oracle.mixed_rows`) takes one. So engines are timed by the largest of their
rows, times a factor for each engine: what its last schedule takes, over what its rows say. Moves and swaps of
units between engines, by annealing on

.. math:: \sum_e (T_e / T)^{p}

with a large p, which is the makespan smoothed out, lead to another plan; its schedules are made, the factors
corrected, and so on, colder each time. The plan with the best schedules is simulated.
"""

from time import perf_counter as clock

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints
from tailopt.oracle.bound_and_fill import plan_of
from tailopt.oracle.kinds import kinds_of, terms_of
from tailopt.oracle.mixed_queues import Queues
from tailopt.oracle.mixed_rows import Limit, Loads, Row
from tailopt.oracle.problem import Problem
from tailopt.oracle.stop import Stop
from tailopt.oracle.units import Units, too_large
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

POWER = 80.0  # p
PROPOSALS = 20_000  # between two of the schedules of all engines
HEAT, AGAIN, LEAST_HEAT = (
    1.0,
    0.05,
    1e-3,
)  # rise of the sum taken with probability 1/e: first, later, at least
COOLING = 0.85  # of the heat from one simulation to the next
STARTS = 5  # head starts of the rows
ROUNDS = 16  # schedules of all engines without a time limit
PATIENCE = 12  # of them without a better plan, before going back to the best one
DAMPING = 0.5  # how far a factor follows


def crowded_search(
    problem: Problem,
    units: Units,
    run: Run,
    *,
    lower_s: float,
    deadline_s: float,
    seed: int,
    stop: Stop | None = None,
) -> Run:
    """The best plan found, as simulated; at least ``run``.

    Args:
        problem, units: what is placed where.
        run: of a plan to start from.
        lower_s: no plan is done earlier; the search stops there.
        deadline_s: :func:`time.perf_counter` at which to stop, infinity for a fixed amount of work. So does
            Ctrl-C.
        seed: of the proposals.
        stop: told of Ctrl-C.
    """
    search, queues = _Model(problem, units, run.makespan_s), Queues(problem)
    random = np.random.default_rng(seed)
    engine_of = run.plan.engine_of[[members[0] for members in units.members]]
    best, stuck, heat = engine_of.copy(), 0, HEAT
    best_s = search.correct(engine_of, queues.take(plan_of(problem, units, engine_of)), 1.0)
    with stop or Stop():
        for _ in range(ROUNDS if deadline_s == np.inf else 2**31):
            if clock() > deadline_s or best_s <= lower_s * (1 + 1e-9):
                break
            engine_of = search.moved(engine_of, random, heat)
            heat = max(LEAST_HEAT, heat * COOLING)
            seconds = queues.take(plan_of(problem, units, engine_of))
            then_s = search.correct(engine_of, seconds, DAMPING)
            stuck = stuck + 1
            if then_s < best_s:
                best, best_s, stuck = engine_of.copy(), then_s, 0
            if stuck == PATIENCE:
                engine_of, stuck, heat = best.copy(), 0, AGAIN
                search.correct(engine_of, queues.take(plan_of(problem, units, engine_of)), 1.0)
    queues.take(plan_of(problem, units, best))
    queues.tell()
    found = simulate(problem.trace, problem.fleet, queues.plan())
    return min(run, found, key=lambda one: one.makespan_s)


class _Model:
    """The rows of all engines, and what the simulator makes of them."""

    def __init__(self, problem: Problem, units: Units, upper_s: float) -> None:
        kinds, trace = kinds_of(problem.fleet), problem.trace
        unit = np.repeat(np.arange(len(units.members)), [len(members) for members in units.members])
        requests = np.concatenate(units.members)
        self.longest = units.longest
        self.kind_of = np.zeros(len(problem.fleet.engines), dtype=np.int64)
        self.factor = np.ones(len(problem.fleet.engines))
        starts = np.unique(np.geomspace(64, max(65, units.longest[0]), STARTS).astype(int)).tolist()
        every: list[list[tuple[Loads, Row]]] = []
        for k, (kind, term) in enumerate(
            zip(kinds, terms_of(units, kinds, trace.n_requests, upper_s), strict=True)
        ):
            self.kind_of[list(kind.engines)] = k
            loads = Loads.of(problem, kind, requests)
            limits: list[tuple[Limit, int]] = [("longest", 0), ("slots", 0), ("cache", 0)]
            for start in starts:
                limits += [("cache", start), ("recompute", start)]
            steep = [one for one in term.minorants if one.a_s > 0][-2:] or term.minorants[-1:]
            every.append([(loads, Row(limit, one, start)) for one in steep for limit, start in limits])
        most = max(map(len, every))
        self.added_s = np.zeros((len(kinds), most, len(units.members)))
        self.constant_s = np.full((len(kinds), most, len(units.members)), -np.inf)
        for k, rows in enumerate(every):
            for q, (loads, row) in enumerate(rows):
                self.added_s[k, q] = np.bincount(unit, loads.added_s(row), len(units.members))
                constant_s = loads.constant_s(row, self.longest)
                self.constant_s[k, q] = np.where(constant_s == np.inf, -np.inf, constant_s)
        self.fits = np.ones((len(kinds), len(units.members)), dtype=np.bool_)
        for k, kind in enumerate(kinds):
            bad = too_large(problem, kind.shape)[requests]
            self.fits[k] = np.bincount(unit, bad, len(units.members)) == 0

    def correct(self, engine_of: Ints, seconds: Floats, share: float) -> float:
        """Let the factors follow what the engines take; returns the longest."""
        for e in np.unique(engine_of).tolist():
            held, k = np.flatnonzero(engine_of == e), self.kind_of[e]
            model_s = (self.added_s[k][:, held].sum(axis=1) + self.constant_s[k][:, held[0]]).max()
            self.factor[e] += share * (seconds[e] / model_s - self.factor[e])
        return float(seconds.max())

    def moved(self, engine_of: Ints, random: np.random.Generator, heat: float) -> Ints:
        """Another plan, annealed from this one."""
        moved = engine_of.copy()
        anneal(
            self.longest, self.added_s, self.constant_s, self.fits, self.kind_of, self.factor, moved,
            random.random((PROPOSALS, 5)), heat,
        )  # fmt: skip
        return moved


@njit(cache=True)
def anneal(
    longest: Ints,
    added_s: Floats,
    constant_s: Floats,
    fits: Bools,
    kind_of: Ints,
    factor: Floats,
    engine_of: Ints,
    draws: Floats,
    heat: float,
) -> None:
    """Move and swap units between engines, one proposal for each row of ``draws``.

    Args:
        longest: ``[u]`` falling.
        added_s: ``[kinds, rows, u]`` seconds that units add to rows.
        constant_s: ``[kinds, rows, u]`` seconds besides, by the first unit that an engine holds.
        fits: ``[kinds, u]`` whether a unit can be held at all.
        kind_of, factor: ``[m]`` of the engines.
        engine_of: ``[u]`` changed.
        draws: ``[proposals, 5]`` uniform in [0, 1): which engine, unit, kind of change, partner, threshold.
        heat: rise of the sum that is taken with probability 1/e at first; it falls to nothing.
    """
    rows, units, m = added_s.shape[1], len(longest), len(kind_of)
    held = np.zeros((m, rows))
    lead = np.full(m, units)
    for u in range(units - 1, -1, -1):
        e = engine_of[u]
        held[e] += added_s[kind_of[e], :, u]
        lead[e] = u
    done_s = np.zeros(m)
    for e in range(m):
        if lead[e] < units:
            done_s[e] = factor[e] * np.max(held[e] + constant_s[kind_of[e], :, lead[e]])
    scale = done_s.max()
    for i in range(len(draws)):
        a = int(np.argmax(done_s)) if draws[i, 0] < 0.5 else -1
        u = int(draws[i, 1] * units)
        if a >= 0:
            while engine_of[u] != a:  # the next one of that engine
                u = u + 1 if u + 1 < units else 0
        a = engine_of[u]
        swap = -1
        if draws[i, 2] < 0.3:
            b = int(draws[i, 3] * m)
        else:
            swap = int(draws[i, 3] * units) if draws[i, 2] < 0.5 else u + int((draws[i, 3] - 0.5) * 60)
            if swap < 0 or swap >= units:
                continue
            b = engine_of[swap]
        if a == b or not fits[kind_of[b], u] or (swap >= 0 and not fits[kind_of[a], swap]):
            continue
        then_a = _without(engine_of, added_s, constant_s, kind_of, factor, held, lead, a, u, swap)
        then_b = _without(engine_of, added_s, constant_s, kind_of, factor, held, lead, b, swap, u)
        rise = (
            (then_a / scale) ** POWER
            + (then_b / scale) ** POWER
            - (done_s[a] / scale) ** POWER
            - (done_s[b] / scale) ** POWER
        )
        rise += 0.01 * (then_a + then_b - done_s[a] - done_s[b]) / scale
        allowed = -heat * (1 - i / len(draws)) * np.log(draws[i, 4] + 1e-12)
        if rise > allowed:
            continue
        for e, gone, comes in ((a, u, swap), (b, swap, u)):
            if gone >= 0:
                held[e] -= added_s[kind_of[e], :, gone]
            if comes >= 0:
                held[e] += added_s[kind_of[e], :, comes]
        engine_of[u] = b
        if swap >= 0:
            engine_of[swap] = a
        done_s[a], done_s[b] = then_a, then_b
        for e in (a, b):
            lead[e] = 0
            while lead[e] < units and engine_of[lead[e]] != e:
                lead[e] += 1


@njit(cache=True)
def _without(
    engine_of: Ints,
    added_s: Floats,
    constant_s: Floats,
    kind_of: Ints,
    factor: Floats,
    held: Floats,
    lead: Ints,
    e: int,
    gone: int,
    comes: int,
) -> float:
    """Seconds of an engine without one of its units, with another one; -1: none."""
    k, first = kind_of[e], lead[e]
    if gone == first:
        first += 1
        while first < len(engine_of) and engine_of[first] != e:
            first += 1
    if comes >= 0:
        first = min(first, comes)
    if first >= len(engine_of):
        return 0.0
    most = 0.0
    for q in range(held.shape[1]):
        seconds = held[e, q] + constant_s[k, q, first]
        if gone >= 0:
            seconds -= added_s[k, q, gone]
        if comes >= 0:
            seconds += added_s[k, q, comes]
        most = max(most, seconds)
    return float(factor[e] * most)
