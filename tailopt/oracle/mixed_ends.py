r"""Plans where caches are full: each request begins with its engine or ends with it, nearly.

Where a few hundred requests share an engine, linear programs over their starts find caches flat and full from
the ramp to the very last step, and nearly every request either begins at once or ends with the engine. That
is a yes or no for each request, so it can be annealed along with who is where
(:mod:`tailopt.oracle.mixed_ends_kernel`). Some begin in between, the more the longer the engine takes than
its longest request. Short requests do not end with the engine: they fill an empty cache soonest. Samples of
one prompt hold its shared blocks once, as far as they begin together or end together.

With an affine step time :math:`a + b n + c K`, an engine that holds the set S and takes s steps is done after

.. math:: a s + \sum_{i \in S} (b L_i + c A_i + p_i) + \sum_{g} q_g + o,

with p the prefill of what a request holds alone, q that of what a prompt's samples share, once for each
prompt, and o what simulation says besides. So a makespan T leaves it s(T) steps, and what is annealed is

.. math:: \sum_e \Big( \sum_b \varphi((H_{e,b} / M_e - 1)^+) + \frac{s_e}{\Delta}
          \varphi(\sum_i (L_i / s_e - 1)^+) \Big), \quad \varphi(x) = x (1 + x / \epsilon),

over points b that are :math:`\Delta` steps apart, with H the tokens in the cache. A little more than fits at
many points is less bad than much at one, which preempts; points see no peaks between them either. T is
lowered when the sum is small, and raised, when the heat is nearly gone, where it is not.

An engine is told by finishes (:attr:`tailopt.plan.Engine.limits`): what does not begin at once begins at
the last finish before it is due. That is simulated; where it preempts and is late, the cache is taken to be
smaller, elsewhere a little larger. In the end requests stay on their engines, each of which keeps the best
schedule that was simulated. Other step times and groups that stay together are left alone.
"""

from bisect import bisect_right, insort
from dataclasses import replace

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.engine.decode_time import context_read
from tailopt.engine.step_time import Affine
from tailopt.oracle.admission import Admission, with_queues
from tailopt.oracle.kinds import kinds_of
from tailopt.oracle.mixed_ends_kernel import ENGINE, REQUEST, TERM, anneal, change, steps_left
from tailopt.oracle.mixed_queues import Watch
from tailopt.oracle.problem import Problem
from tailopt.oracle.stop import Stop
from tailopt.oracle.units import shared_prefill, too_large
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

POINTS = 400  # of the profiles
SPARE = 1.05  # steps that they cover, over those of an engine with nothing to do until the first makespan
SHORT = 0.05  # of those steps, up to which requests do not end with their engine
SHARE, LEAST_SHARE = 0.97, 0.94  # of the cache that is filled, at first and at least
BLOCK_SHARE = 0.5  # of a block, that a request leaves empty
PROPOSALS = 40_000  # between two looks at the clock
ROUNDS = 24  # of them without a time limit
HEATS = 0.2, 7e-4  # rise of the sum taken with probability 1/e, at first and in the end
SETTLED = 0.5  # of the time, after which the target rises too, and plans are simulated
DEALT = 0.85  # of the time, after which requests stay where they are, and the heat no longer falls
FEW = 20_000  # proposals from then on
ENOUGH = 0.4  # a sum that counts as small, for each engine
FIRST_STEP, STEP, RISE = 0.01, 5e-4, 0.2  # of the target: down at first, down, up for what is missing
LESS, MORE = 2e-3, 1e-3  # by how much a cache is taken to be smaller or larger
LATE = 1e-3  # of the makespan, by which an engine is late


def ends_search(
    problem: Problem,
    run: Run,
    *,
    lower_s: float,
    deadline_s: float,
    seed: int,
    stop: Stop | None = None,
) -> Run:
    """The best plan found, as simulated; at least ``run``, which it is if this does not apply.

    Args:
        problem: batch and fleet.
        run: of a plan to start from, static.
        lower_s: no plan is done earlier; the search stops there.
        deadline_s: :func:`time.perf_counter` at which to stop, infinity for a fixed amount of work. So does
            Ctrl-C.
        seed: of the proposals.
        stop: told of Ctrl-C.
    """
    if not applies(problem):
        return run
    target_s, random = run.makespan_s * (1 - FIRST_STEP), np.random.default_rng(seed)
    best, kept, watch = run, list[Admission | None](), Watch(deadline_s, ROUNDS)
    with stop or Stop():
        ends = Ends(problem, run)
        m = len(ends.engines)
        while (done := watch.done()) < 1 and best.makespan_s > lower_s * (1 + 1e-9):
            settled, deal, target_s = done > SETTLED, done <= DEALT, max(target_s, lower_s)
            heat = HEATS[0] * (HEATS[1] / HEATS[0]) ** min(1.0, done / DEALT)
            missing = ends.anneal(target_s, heat, 0.0 if settled else ENOUGH * m, random, deal=deal)
            small = missing <= ENOUGH * m
            if (settled and small) or not deal or target_s == lower_s:
                queues = ends.queues(target_s)
                found = simulate(problem.trace, problem.fleet, with_queues(problem, queues))
                ends.correct(found, target_s)
                best = min(best, found, key=lambda one: one.makespan_s)
                if not deal:
                    kept = _better(kept, queues, found)
            if small:
                target_s = min(target_s, best.makespan_s) * (1 - STEP)
            elif settled and deal:
                target_s *= 1 + min(6 * STEP, RISE * missing / m / POINTS)
    if kept:
        found = simulate(problem.trace, problem.fleet, with_queues(problem, kept))
        best = min(best, found, key=lambda one: one.makespan_s)
    return best


def _better(kept: list[Admission | None], queues: list[Admission | None], run: Run) -> list[Admission | None]:
    """Of two queues for each engine, the faster one: that kept, or another one, as simulated."""
    timed = [
        None if one is None else replace(one, seconds=float(run.finish_s[one.order].max())) for one in queues
    ]
    return [
        min(old, new, key=lambda one: one.seconds) if old and new else new
        for old, new in zip(kept or timed, timed, strict=True)
    ]


def applies(problem: Problem) -> bool:
    """Whether requests are free, and every step time is affine."""
    fleet = problem.fleet
    return not problem.atomic and all(
        isinstance(tau := fleet.shape_of(e).step_time, Affine) and tau.a_s > 0
        for e in range(len(fleet.engines))
    )


class Ends:
    """Schedules of all engines; at first all requests begin at once on those of a run's plan."""

    def __init__(self, problem: Problem, run: Run) -> None:
        trace, fleet, kinds = problem.trace, problem.fleet, kinds_of(problem.fleet)
        n, m, output = trace.n_requests, len(fleet.engines), trace.output_tokens
        shared = shared_prefill(problem)
        self.problem = problem
        self.requests, self.terms = np.zeros(n, REQUEST), np.zeros((len(kinds), n), TERM)
        self.engines, self.most = np.zeros(m, ENGINE), np.zeros(m, np.int64)
        for k, kind in enumerate(kinds):
            shape, tau, mine = kind.shape, kind.shape.step_time, list(kind.engines)
            assert isinstance(tau, Affine)
            token_s, own, term = 1 / shape.prefill_tokens_per_s, trace.context_tokens - shared, self.terms[k]
            term["own"] = own + int(BLOCK_SHARE * shape.block_tokens)
            term["added_s"] = tau.b_s * output + (own - 1) * token_s
            term["added_s"] += tau.c_s * context_read(trace.context_tokens, output)
            term["once_s"], term["fits"] = shared * token_s, ~too_large(problem, shape)
            self.most[mine] = shape.kv_capacity_tokens // shape.block_tokens * shape.block_tokens
            self.engines["kind"][mine] = k
            self.engines["slots"][mine] = kind.max_running
            self.engines["step_s"][mine] = tau.a_s
        self.engines["cache"] = SHARE * self.most
        steps = max(float(output.max()), run.makespan_s / float(self.engines["step_s"].min()))
        self.every, self.least = max(1, int(np.ceil(SPARE * steps / POINTS))), int(SHORT * steps)
        self.order, r = np.argsort(-output, kind="stable"), self.requests
        for name, numbers in (
            ("length", output), ("group", trace.group), ("shared", shared), ("engine", run.plan.engine_of)
        ):  # fmt: skip
            r[name] = numbers[self.order]
        self.terms = np.take(self.terms, self.order, axis=1)
        self.samples = np.argsort(r["group"], kind="stable")
        self.first = np.searchsorted(r["group"][self.samples], np.arange(int(trace.group.max()) + 2))
        self.held, self.running = np.zeros((2, m, 2, POINTS + 2))
        self.given, self.reach = np.zeros((2, m, 2, len(self.first) - 1), np.int64)
        for i in range(n):
            change(
                r, self.terms, self.engines, self.samples, self.first, self.held, self.running, self.given,
                self.reach, self.every, i, 1,
            )  # fmt: skip

    def anneal(
        self, makespan_s: float, heat: float, enough: float, random: np.random.Generator, *, deal: bool = True
    ) -> float:
        """Change the schedules towards a makespan; returns what is left of the sum."""
        return float(
            anneal(
                self.requests, self.terms, self.engines, self.samples, self.first, self.held,
                self.running, self.given, self.reach, self.every, makespan_s, PROPOSALS if deal else FEW,
                heat, self.least, deal, enough, random,
            )
        )  # fmt: skip

    def begins(self, makespan_s: float) -> Ints:
        """``[n]``, by falling length: the step at which each begins, the last finish before it is due."""
        r, found = self.requests, np.zeros(len(self.requests), np.int64)
        steps = np.array([steps_left(one, makespan_s) for one in self.engines])
        due = np.where(r["at_end"] == 1, steps[r["engine"]] - r["length"], r["later"] * self.every)
        for e in range(len(self.engines)):
            mine = np.flatnonzero(r["engine"] == e)
            early, late = mine[due[mine] <= 0], mine[due[mine] > 0]
            finishes = [0, *np.sort(r["length"][early]).tolist()]
            for i in late[np.argsort(due[late], kind="stable")]:
                found[i] = finishes[bisect_right(finishes, due[i]) - 1]
                insort(finishes, int(found[i] + r["length"][i]))
        return found

    def queues(self, makespan_s: float) -> list[Admission | None]:
        """The schedules as queues: after each finish as many run as then began, longest admitted first."""
        begins, length, queues = self.begins(makespan_s), self.requests["length"], list[Admission | None]()
        for e in range(len(self.engines)):
            mine = np.flatnonzero(self.requests["engine"] == e)
            if not len(mine):
                queues.append(None)
                continue
            begun, ends = np.sort(begins[mine]), np.sort(begins[mine] + length[mine])
            steps = np.unique(ends)
            finished = np.searchsorted(ends, steps, side="right")
            running = np.searchsorted(begun, steps, side="right") - finished
            limits = [(int(f), int(now)) for f, now in zip(finished, running, strict=True) if now > 0]
            mine = mine[np.argsort(begins[mine], kind="stable")]
            queues.append(Admission(self.order[mine], int((begun == 0).sum()), np.nan, tuple(limits)))
        return queues

    def seconds(self, makespan_s: float) -> Floats:
        """``[m]`` of the engines, if nobody is preempted."""
        last = np.zeros(len(self.engines))
        np.maximum.at(last, self.requests["engine"], self.begins(makespan_s) + self.requests["length"])
        return np.asarray(self.engines["step_s"] * last + self.engines["load_s"] + self.engines["offset_s"])

    def correct(self, run: Run, makespan_s: float) -> None:
        """Learn from a simulation: what caches can be taken to hold and, where they hold all, the seconds."""
        said_s, caches = self.seconds(makespan_s), self.engines["cache"]
        for e, count in enumerate(self.engines["count"]):
            if count:
                mine = self.order[self.requests["engine"] == e]
                done_s = run.finish_s[mine].max()
                if run.preemptions[mine].any():
                    caches[e] *= 1 - LESS if done_s > makespan_s * (1 + LATE) else 1 + MORE
                else:
                    caches[e] *= 1 + MORE
                    self.engines["offset_s"][e] += done_s - said_s[e]
        np.clip(caches, LEAST_SHARE * self.most, self.most, out=caches)
