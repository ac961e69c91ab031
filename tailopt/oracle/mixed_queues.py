r"""Queues where caches are full: who is where, in which order, and how many run together, all at once.

Longest first is a poor order for a full cache: all begin together, it overflows, and what is preempted is
computed again. Better is a schedule made **from its end**
(:func:`tailopt.oracle.mixed_queues_kernel.backward`): the longest end together, with the cache full; going
back they shrink, which makes room for the next longest, and the shortest are left for the beginning, where an
empty cache fills soonest if many run. An engine admits as soon as it can, not when such a schedule says, so
this is only where the search starts: annealing on

.. math:: \sum_e (T_e / T)^{p}

changes orders, limits, and engines of requests, by a model that takes some ten microseconds an engine. The
plan is simulated now and then, the model set right by a factor for each engine, and the best plan that was
simulated is kept.
"""

from contextlib import suppress
from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.oracle.admission import Admission, with_queues
from tailopt.oracle.kinds import kinds_of
from tailopt.oracle.mixed_queues_kernel import anneal_queues, backward, queue_seconds
from tailopt.oracle.mixed_rows import Loads
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import too_large
from tailopt.plan import Plan
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

POWER = 80.0  # p
PROPOSALS = 4_000  # between two simulations
ROUNDS = 6  # simulations without a time limit
HEAT, LEAST_HEAT = 5e-3, 1e-4  # rise of the sum taken with probability 1/e: at first, in the end
LIMITS = np.geomspace(0.15, 1.0, 12)  # shares of the slots that can be used, tried at first
BLOCK_SHARE = 0.5  # of a block, that a request leaves empty


def queue_search(problem: Problem, run: Run, *, lower_s: float, deadline_s: float, seed: int) -> Run:
    """The best plan found, as simulated; at least ``run``.

    Args:
        problem: batch and fleet. The groups of an atomic one stay where they are.
        run: of a plan to start from, static.
        lower_s: no plan is done earlier; the search stops there.
        deadline_s: :func:`time.perf_counter` at which to stop, infinity for a fixed amount of work. So does
            Ctrl-C.
        seed: of the proposals.
    """
    model = _Queues(problem, run)
    random = np.random.default_rng(seed)
    best, began = run, clock()
    with suppress(KeyboardInterrupt):
        model.begin()
        for turn in range(ROUNDS if deadline_s == np.inf else 2**31):
            done = (
                turn / ROUNDS if deadline_s == np.inf else (clock() - began) / max(1e-9, deadline_s - began)
            )
            if done >= 1 or best.makespan_s <= lower_s * (1 + 1e-9):
                break
            following = (turn + 1) / ROUNDS if deadline_s == np.inf else done + done / max(1, turn)
            model.anneal(random, _heat(done), _heat(min(1.0, following)))
            found = simulate(problem.trace, problem.fleet, model.plan())
            model.correct(found)
            best = min(best, found, key=lambda one: one.makespan_s)
    return best


def _heat(done: float) -> float:
    return LEAST_HEAT + (HEAT - LEAST_HEAT) * (1 - done) ** 2


class _Queues:
    """All queues, and the model that times them."""

    def __init__(self, problem: Problem, run: Run) -> None:
        trace, fleet, kinds = problem.trace, problem.fleet, kinds_of(problem.fleet)
        n, m = trace.n_requests, len(fleet.engines)
        self.problem, self.output = problem, trace.output_tokens
        self.queues, self.counts = np.zeros((m, n), np.int64), np.zeros(m, np.int64)
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
        for e in range(m):
            mine = run.plan.order[run.plan.engine_of[run.plan.order] == e]
            self.queues[e, : len(mine)], self.counts[e] = mine, len(mine)
        most = self.slots[self.kind_of]
        wanted = [
            engine.max_running or int(limit) for engine, limit in zip(run.plan.engines, most, strict=True)
        ]
        self.limits = np.minimum(np.array(wanted, dtype=np.int64), most)

    def begin(self) -> None:
        """Take the schedules made from their ends, with the best of some limits."""
        for e, k in enumerate(self.kind_of):
            mine = self.queues[e, : self.counts[e]]
            if len(mine):
                queue, _ = backward(mine, self.held[k], self.output, int(self.cache[k]), int(self.slots[k]))
                most = min(int(self.slots[k]), len(mine))
                limits = [max(1, int(share * most)) for share in LIMITS]
                self.limits[e] = min(limits, key=lambda limit: self._seconds(e, queue, limit))
                self.queues[e, : len(mine)] = queue

    def anneal(self, random: np.random.Generator, heat: float, cooler: float) -> None:
        """Change the queues."""
        anneal_queues(
            self.queues, self.counts, self.limits, self.factor, self.kind_of, self.fits, self.held,
            self.output, self.cache, self.slots, self.base_s, self.slope_s, self.token_s,
            random.random((PROPOSALS, 7)), POWER, heat, cooler, not self.problem.atomic,
        )  # fmt: skip

    def correct(self, run: Run) -> None:
        """Let the factors be what the simulator says of the queues, over what the model does."""
        for e, count in enumerate(self.counts):
            if count:
                mine = self.queues[e, :count]
                said_s = float(run.finish_s[mine].max())
                self.factor[e] = said_s / self._seconds(e, mine, int(self.limits[e]))

    def plan(self) -> Plan:
        """The queues as a plan."""
        own = self.slots[self.kind_of]
        return with_queues(
            self.problem,
            [
                Admission(self.queues[e, :count].copy(), None if limit >= most else int(limit), np.nan)
                if count
                else None
                for e, (count, limit, most) in enumerate(zip(self.counts, self.limits, own, strict=True))
            ],
        )

    def _seconds(self, e: int, queue: Ints, limit: int) -> float:
        k = int(self.kind_of[e])
        return float(
            queue_seconds(queue, limit, self.held[k], self.output, int(self.cache[k]), self.base_s[k],
                          self.slope_s[k], float(self.token_s[k]), np.inf)
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
