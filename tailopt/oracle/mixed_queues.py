r"""Queues where caches are full: who is where, in which order, and how many run together, all at once.

Longest first is a poor order for a full cache: all begin together, it overflows, and what is preempted is
computed again. Better is a schedule made **from its end** (:mod:`tailopt.oracle.mixed_queues_kernel`): the
longest end together, with the cache full; going back they shrink, which makes room for the next longest, and
the shortest are left for the beginning, where an empty cache fills soonest if many run. It follows from the
set of requests, so annealing on

.. math:: \sum_e (T_e / T)^{p}

first changes engines of requests, by what the schedules would take if they could be carried out to the step.
Limits that follow the finished requests make an engine keep to its schedule nearly, and then hardly anybody
is preempted; annealing goes on with each request's place in the order, after how many finishes it is let in,
and its engine (:mod:`tailopt.oracle.mixed_queues_told`). That is simulated now and then, the model set right
by a factor for each engine, and the best plan that was simulated is kept.

The power p rises: at first the sum of all seconds matters, in the end the last engine alone. Two cores share
the work, in a way that does not depend on how many there are: the sum is one over engines, so halves of them,
drawn anew each time, are annealed side by side; where there are few, two searches are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.oracle.admission import Admission, with_queues
from tailopt.oracle.kinds import kinds_of
from tailopt.oracle.mixed_queues_kernel import anneal_queues, backward
from tailopt.oracle.mixed_queues_told import anneal_told, told, told_seconds
from tailopt.oracle.mixed_rows import Loads
from tailopt.oracle.problem import Problem
from tailopt.oracle.side_by_side import side_by_side
from tailopt.oracle.stop import Stop
from tailopt.oracle.units import too_large
from tailopt.plan import Plan
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

PROPOSALS, LEAST_PROPOSALS = 4_000, 16  # between two looks at the clock
QUICK = 300  # requests on an engine up to which there are so many; each takes their square in time
ROUNDS = 6  # of so many, without a time limit
EXACT_SHARE = 0.4  # of the time, in which schedules are taken to be carried out to the step
SIDES = 2  # threads
MANY = 4  # engines that are divided in halves


@dataclass(frozen=True)
class Cooling:
    """From the first to the last: p, and the rise of T, as a share, that is taken with probability 1/e."""

    powers: tuple[float, float]
    heats: tuple[float, float]

    def at(self, done: float) -> tuple[float, float]:
        """p and the heat when so much is done, the heat that of the sum."""
        power, heat = (first * (last / first) ** done for first, last in (self.powers, self.heats))
        return power, heat * power


EXACT = Cooling((50.0, 300.0), (2e-4, 1e-5))
TOLD = Cooling((80.0, 600.0), (1e-4, 1e-6))
LIMITS = np.geomspace(0.15, 1.0, 12)  # shares of the slots that can be used, tried at first
SHARES = (1.0, 0.99, 0.975, 0.95, 0.92, 0.88, 1.03, 1.1, 1.3)  # of the cache, for which schedules are made
BLOCK_SHARE = 0.5  # of a block, that a request leaves empty


def queue_search(
    problem: Problem,
    run: Run,
    *,
    lower_s: float,
    deadline_s: float,
    seed: int,
    stop: Stop | None = None,
) -> Run:
    """The best plan found, as simulated; at least ``run``.

    Args:
        problem: batch and fleet. The groups of an atomic one stay where they are.
        run: of a plan to start from, static.
        lower_s: no plan is done earlier; the search stops there.
        deadline_s: :func:`time.perf_counter` at which to stop, infinity for a fixed amount of work. So does
            Ctrl-C.
        seed: of the proposals.
        stop: told of Ctrl-C.
    """
    randoms = np.random.default_rng(seed).spawn(SIDES if len(problem.fleet.engines) < MANY else 1)
    chains = [Queues(problem) for _ in randoms]
    best, watch = run, Watch(deadline_s, ROUNDS)
    with stop or Stop():
        for one in chains:
            one.take(run.plan)
        while (done := watch.done()) < 1 and best.makespan_s > lower_s * (1 + 1e-9):
            exact = done < EXACT_SHARE
            part = done / EXACT_SHARE if exact else (done - EXACT_SHARE) / (1 - EXACT_SHARE)
            if not exact and not chains[0].told:
                for one in chains:
                    one.tell()
            power, heat = (EXACT if exact else TOLD).at(part)
            jobs = [one.jobs(random, power, heat) for one, random in zip(chains, randoms, strict=True)]
            side_by_side([job for some in jobs for job in some])
            for one in () if exact else chains:
                found = simulate(problem.trace, problem.fleet, one.plan())
                one.correct(found)
                best = min(best, found, key=lambda run: run.makespan_s)
    return best


class Watch:
    """How much of the time is over or, without a time limit, of so many rounds."""

    def __init__(self, deadline_s: float, most: int) -> None:
        self.began, self.deadline_s, self.rounds, self.most = clock(), deadline_s, 0, most

    def done(self) -> float:
        """A share; each time it is asked for is a round."""
        self.rounds += 1
        if self.deadline_s == np.inf:
            return (self.rounds - 1) / self.most
        return (clock() - self.began) / max(1e-9, self.deadline_s - self.began)


class Queues:
    """All queues, and the model that times them."""

    def __init__(self, problem: Problem) -> None:
        trace, fleet, kinds = problem.trace, problem.fleet, kinds_of(problem.fleet)
        n, m = trace.n_requests, len(fleet.engines)
        self.problem, self.output = problem, trace.output_tokens
        self.queues, self.counts = np.zeros((m, n), np.int64), np.zeros(m, np.int64)
        self.after = np.zeros((m, n), np.int64)
        self.kind_of, self.factor = np.zeros(m, np.int64), np.ones(m)
        for k, kind in enumerate(kinds):
            self.kind_of[list(kind.engines)] = k
        loads = [Loads.of(problem, kind, np.arange(n)) for kind in kinds]
        held = [
            (one.held if problem.atomic else trace.context_tokens)
            + int(BLOCK_SHARE * kind.shape.block_tokens)
            for one, kind in zip(loads, kinds, strict=True)
        ]
        self.held = np.array(held, dtype=np.int64)
        self.fits = np.array([~too_large(problem, kind.shape) for kind in kinds])
        self.cache = np.array([one.cache for one in loads], dtype=np.int64)
        self.slots = np.array([min(kind.max_running, n) for kind in kinds], dtype=np.int64)
        self.base_s, self.slope_s = _padded_lines(problem, self.slots.tolist())
        self.token_s = np.array([1 / kind.shape.prefill_tokens_per_s for kind in kinds])
        self.limits = self.slots[self.kind_of]
        self.told = False  # whether queues are told by finishes, rather than orders from the end

    def take(self, plan: Plan) -> Floats:
        """Take a plan's engines, with schedules made from their ends, longest first, the best of some.

        Returns ``[m]`` the seconds of each engine, if they could be carried out to the step.
        """
        seconds, self.told = np.zeros(len(self.kind_of)), False
        for e, k in enumerate(self.kind_of):
            mine = np.flatnonzero(plan.engine_of == e)
            mine = mine[np.argsort(-self.output[mine], kind="stable")]
            self.queues[e, : len(mine)], self.counts[e] = mine, len(mine)
            if len(mine):
                most = min(int(self.slots[k]), len(mine))
                limits = np.unique(np.maximum(1, (LIMITS * most).astype(np.int64))).tolist()
                begins = np.empty(len(mine), np.int64)
                tried = [self._schedule(e, limit, 1.0, begins) for limit in limits]
                self.limits[e], seconds[e] = limits[int(np.argmin(tried))], min(tried)
        return seconds

    def tell(self) -> None:
        """Let queues be told by finishes, each by the schedule for the best of some shares of the cache."""
        for e, count in enumerate(self.counts):
            if count:
                begins, order, after = np.empty((3, count), np.int64)
                k, limit, best_s = int(self.kind_of[e]), int(self.limits[e]), np.inf
                for share in SHARES:
                    self._schedule(e, limit, share, begins)
                    seconds = told(self.queues[e, :count], begins, limit, *self._engine(k), order, after)
                    if seconds < best_s:
                        best_s, best = seconds, (order.copy(), after.copy())
                self.queues[e, :count], self.after[e, :count] = best
        self.told = True

    def jobs(self, random: np.random.Generator, power: float, heat: float) -> list[Callable[[], None]]:
        """Functions that change the queues, each those of other engines, so that they may run at once."""
        m = len(self.counts)
        parts = np.array_split(random.permutation(m), SIDES) if m >= MANY else [np.arange(m)]
        parts = [part for part in parts if self.counts[part].any()]
        slower = max(1.0, float(self.counts.max()) / QUICK) ** 2
        proposals = max(LEAST_PROPOSALS, int(PROPOSALS / slower))
        state = (self.after, self.counts) if self.told else (self.counts, self.limits)
        kernel: Callable[..., None] = anneal_told if self.told else anneal_queues
        return [
            partial(
                kernel, part, self.queues, *state, self.factor, self.kind_of, self.fits, self.held,
                self.output, self.cache, self.slots, self.base_s, self.slope_s, self.token_s,
                random.random((proposals, 7)), power, heat, not self.problem.atomic,
            )
            for part in parts
        ]  # fmt: skip

    def correct(self, run: Run) -> None:
        """Let the factors be what the simulator says of the queues, over what the model does."""
        for e, count in enumerate(self.counts):
            if count:
                k, mine = int(self.kind_of[e]), self.queues[e, :count]
                model_s = told_seconds(
                    mine, self.after[e, :count], int(self.slots[k]), *self._engine(k), np.inf,
                    np.empty(count, np.int64),
                )  # fmt: skip
                self.factor[e] = float(run.finish_s[mine].max()) / model_s

    def plan(self) -> Plan:
        """The queues, told by finishes, as a plan."""
        queues = [self._admission(e) if count else None for e, count in enumerate(self.counts)]
        return with_queues(self.problem, queues)

    def _admission(self, e: int) -> Admission:
        count = int(self.counts[e])
        finished = np.arange(count)
        let_in = np.searchsorted(self.after[e, :count], finished, side="right")
        limits = np.maximum(1, let_in - finished).tolist()
        changes = [(f, limits[f]) for f in range(1, count) if limits[f] != limits[f - 1]]
        return Admission(self.queues[e, :count].copy(), limits[0], np.nan, tuple(changes))

    def _schedule(self, e: int, limit: int, share: float, begins: Ints) -> float:
        """Seconds of an engine whose schedule is made from its end; writes when each request begins."""
        held, output, cache, base_s, slope_s, token_s = self._engine(int(self.kind_of[e]))
        queue, part = self.queues[e, : len(begins)], int(share * cache)
        return float(backward(queue, limit, held, output, part, base_s, slope_s, token_s, np.inf, begins))

    def _engine(self, k: int) -> tuple[Ints, Ints, int, Floats, Floats, float]:
        """What the model is told of a kind."""
        return (
            self.held[k], self.output, int(self.cache[k]), self.base_s[k], self.slope_s[k],
            float(self.token_s[k]),
        )  # fmt: skip


def _padded_lines(problem: Problem, slots: list[int]) -> tuple[Floats, Floats]:
    """``[kinds, pieces, n_max + 1]`` and ``[kinds, pieces]``: step times; pieces that fill up are zero."""
    kinds = kinds_of(problem.fleet)
    lines = [kind.shape.step_time.lines(most) for kind, most in zip(kinds, slots, strict=True)]
    pieces, n_max = max(len(one.slope_s) for one in lines), max(slots)
    base_s, slope_s = np.zeros((len(kinds), pieces, n_max + 1)), np.zeros((len(kinds), pieces))
    for k, one in enumerate(lines):
        base_s[k, : len(one.slope_s), : one.n_max + 1] = one.base_s
        slope_s[k, : len(one.slope_s)] = one.slope_s
    return base_s, slope_s
