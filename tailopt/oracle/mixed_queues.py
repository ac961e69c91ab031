r"""Queues where caches are full: who is where, in which order, and how many run together, all at once.

Longest first is a poor order for a full cache: all begin together, it overflows, and what is preempted is
computed again. Better is a schedule made **from its end**: the longest end together, with the cache full;
going back they shrink, which makes room for the next longest, and the shortest are left for the beginning,
where an empty cache fills soonest if many run. Limits that follow the finished requests make an engine keep
to it (:mod:`tailopt.oracle.mixed_queues_kernel`), and then hardly anybody is preempted. Such a schedule
follows from the set of requests, so annealing on

.. math:: \sum_e (T_e / T)^{p}

changes engines of requests; at first by what the schedules would take if they could be carried out to the
step, then by a model of an engine that is told by finishes, in some ten microseconds an engine; then also by
the order in which requests are put in from the end, the share of the cache, and how many run at most. The
plan is simulated now and then, the model set right by a factor for each engine, and the best plan that was
simulated is kept.
"""

from contextlib import suppress
from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.oracle.admission import Admission, with_queues
from tailopt.oracle.kinds import kinds_of
from tailopt.oracle.mixed_queues_kernel import anneal_queues, backward, carry_out, queue_seconds
from tailopt.oracle.mixed_rows import Loads
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import too_large
from tailopt.plan import Plan
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

POWER = 80.0  # p
PROPOSALS = 4_000  # between two simulations
ROUNDS = 6  # simulations without a time limit
HEAT, LEAST_HEAT = 1e-2, 1e-4  # rise of the sum taken with probability 1/e: at first, in the end
EXACT_SHARE = 0.55  # of the time, in which schedules are taken to be carried out to the step
LIMITS = np.geomspace(0.15, 1.0, 12)  # shares of the slots that can be used, tried at first
SHARES = (1.0, 0.99, 0.975, 0.95, 0.92, 0.88, 1.03, 1.1, 1.3)  # of the cache, tried at first
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
    model = Queues(problem)
    random = np.random.default_rng(seed)
    best, began = run, clock()
    with suppress(KeyboardInterrupt):
        model.take(run.plan)
        for turn in range(ROUNDS if deadline_s == np.inf else 2**31):
            done = (
                turn / ROUNDS if deadline_s == np.inf else (clock() - began) / max(1e-9, deadline_s - began)
            )
            if done >= 1 or best.makespan_s <= lower_s * (1 + 1e-9):
                break
            following = (turn + 1) / ROUNDS if deadline_s == np.inf else done + done / max(1, turn)
            model.exact = done < EXACT_SHARE
            model.anneal(random, _heat(done), _heat(min(1.0, following)))
            if model.exact:
                continue
            found = simulate(problem.trace, problem.fleet, model.plan())
            model.correct(found)
            best = min(best, found, key=lambda one: one.makespan_s)
    return best


def _heat(done: float) -> float:
    return float(HEAT * (LEAST_HEAT / HEAT) ** done)


class Queues:
    """All queues, and the model that times them."""

    def __init__(self, problem: Problem) -> None:
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
        self.limits, self.shares = self.slots[self.kind_of], np.ones(m)
        self.exact = False  # whether the model takes schedules to be carried out to the step

    def take(self, plan: Plan) -> Floats:
        """Take a plan's engines, with schedules made from their ends, longest first, the best of some.

        Returns ``[m]`` the seconds of each engine, if they could be carried out to the step.
        """
        seconds = np.zeros(len(self.kind_of))
        for e, k in enumerate(self.kind_of):
            mine = np.flatnonzero(plan.engine_of == e)
            mine = mine[np.argsort(-self.output[mine], kind="stable")]
            self.queues[e, : len(mine)], self.counts[e] = mine, len(mine)
            if len(mine):
                most = min(int(self.slots[k]), len(mine))
                limits = np.unique(np.maximum(1, (LIMITS * most).astype(np.int64))).tolist()
                tried = [self._seconds(e, mine, limit, 1.0, exact=True) for limit in limits]
                self.limits[e], seconds[e] = limits[int(np.argmin(tried))], min(tried)
        return seconds

    def share(self) -> None:
        """Give each schedule the best of some shares of the cache."""
        for e, count in enumerate(self.counts):
            if count:
                mine, limit = self.queues[e, :count], int(self.limits[e])
                self.shares[e] = min(SHARES, key=lambda share: self._seconds(e, mine, limit, share))

    def anneal(self, random: np.random.Generator, heat: float, cooler: float) -> None:
        """Change the queues."""
        anneal_queues(
            self.queues, self.counts, self.limits, self.shares, self.factor, self.kind_of, self.fits,
            self.held, self.output, self.cache, self.slots, self.base_s, self.slope_s, self.token_s,
            random.random((PROPOSALS, 7)), POWER, heat, cooler, not self.problem.atomic, self.exact,
        )  # fmt: skip

    def correct(self, run: Run) -> None:
        """Let the factors be what the simulator says of the queues, over what the model does."""
        for e, count in enumerate(self.counts):
            if count:
                mine = self.queues[e, :count]
                said_s = float(run.finish_s[mine].max())
                model_s = self._seconds(e, mine, int(self.limits[e]), float(self.shares[e]), exact=self.exact)
                self.factor[e] = said_s / model_s

    def plan(self) -> Plan:
        """The queues as a plan."""
        queues = [self._admission(e) if count else None for e, count in enumerate(self.counts)]
        return with_queues(self.problem, queues)

    def _admission(self, e: int) -> Admission:
        k, mine = int(self.kind_of[e]), self.queues[e, : self.counts[e]]
        begins, together = np.empty(len(mine), np.int64), np.empty(len(mine) + 1, np.int64)
        limit = int(self.limits[e])
        held, output, cache, base_s, slope_s, token_s = self._engine(k)
        part, never_s = int(self.shares[e] * cache), np.inf
        backward(mine, limit, held, output, part, base_s, slope_s, token_s, never_s, begins)
        carry_out(
            mine, begins, limit, held, output, cache, base_s, slope_s, token_s, never_s, together
        )  # fmt: skip
        order = mine[np.argsort(-begins, kind="stable")]
        changes = [f for f in np.flatnonzero(together[:-1]).tolist() if f]
        steps = [(f, int(together[f])) for f in changes]
        return Admission(order, int(together[0]), np.nan, tuple(steps))

    def _seconds(self, e: int, queue: Ints, limit: int, share: float, *, exact: bool = False) -> float:
        return float(queue_seconds(queue, limit, share, *self._engine(int(self.kind_of[e])), np.inf, exact))

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
