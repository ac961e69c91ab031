r"""Plans where caches are full, packed: requests begin at any finish, and the makespan is squeezed.

Schedules made from their ends, longest first (:mod:`tailopt.oracle.mixed_queues`), leave six per cent of the
caches empty, and know nothing of samples that share their prompt's blocks while they run together. Here a
request may begin whenever another one on its engine is done, which the engine can be told
(:attr:`tailopt.plan.Engine.limits`): schedules are forests (:mod:`tailopt.oracle.mixed_packing_kernel`), and
those whose caches never overflow are carried out to the step.

With an affine step time :math:`a + b n + c K`, an engine that holds the set S and takes s steps is done after

.. math:: a s + \sum_{i \in S} (b L_i + c A_i + p_i) + \sum_{g} q_g + o,

with p the prefill of what a request holds alone, q that of what a prompt's samples share, once for each
prompt, and o what simulation says besides. So a makespan T leaves it s(T) steps, and annealing on

.. math:: \sum_e \Big( \sum_b (H_{e,b} / M_e - 1)^+ + w \sum_i (d_i - s_e(T))^+ / \Delta \Big),

over points b that are :math:`\Delta` steps apart, with H the tokens in the cache and d the steps at which
requests are done, moves requests, with those that follow them, to other finishes, and swaps requests of one
engine or of two. When the sum is about zero, the plan is simulated and T lowered. The heat is low, so that
what is known of good sets is kept. Other step times and groups that stay together are left alone.
"""

from contextlib import suppress
from time import perf_counter as clock

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.engine.decode_time import context_read
from tailopt.engine.step_time import Affine
from tailopt.oracle.admission import Admission, with_queues
from tailopt.oracle.kinds import kinds_of
from tailopt.oracle.mixed_packing_kernel import (
    ENGINE,
    NONE,
    REQUEST,
    TERM,
    anneal,
    begin_all,
    follow,
    latest,
)
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import shared_prefill, too_large
from tailopt.plan import Fleet, Plan
from tailopt.run import Run
from tailopt.simulate.simulator import simulate

POINTS = 512  # of the profiles
MOST_POINTS = 30_000_000  # of all prompts on all engines: 240 MB
SPARE = 1.3  # steps that they cover, over those of the slowest engine
SHARE = 0.99  # of the cache that is filled: points see no peaks between them
BLOCK_SHARE = 0.5  # of a block, that a request leaves empty
PROPOSALS = 20_000  # between two looks at the clock
ROUNDS = 12  # of them without a time limit
HEAT, LEAST_HEAT = (
    6e-3,
    6e-4,
)  # rise of the sum taken with probability 1/e: at first and in the end of a round
WEIGHT = 1.0  # w
ENOUGH = 0.1  # a sum that counts as zero
STEP = 5e-4  # by how much the makespan is lowered, relative


def packing_search(problem: Problem, run: Run, *, lower_s: float, deadline_s: float, seed: int) -> Run:
    """The best plan found, as simulated; at least ``run``, which it is if this does not apply.

    Args:
        problem: batch and fleet.
        run: of a plan to start from, static.
        lower_s: no plan is done earlier; the search stops there.
        deadline_s: :func:`time.perf_counter` at which to stop, infinity for a fixed amount of work. So does
            Ctrl-C.
        seed: of the proposals.
    """
    if not applies(problem):
        return run
    best, target_s, random = run, run.makespan_s * (1 - STEP), np.random.default_rng(seed)
    with suppress(KeyboardInterrupt):
        forests = Forests(problem, run.plan)
        for _ in range(ROUNDS if deadline_s == np.inf else 2**31):
            if clock() > deadline_s or best.makespan_s <= lower_s * (1 + 1e-9):
                break
            if forests.anneal(target_s, random) > ENOUGH:
                continue
            found = simulate(problem.trace, problem.fleet, forests.plan())
            forests.correct(found)
            best = min(best, found, key=lambda one: one.makespan_s)
            target_s = min(target_s, best.makespan_s) * (1 - STEP)
    return best


def applies(problem: Problem) -> bool:
    """Whether requests are free, every step time is affine, and the profiles are not too large."""
    fleet = problem.fleet
    if len(fleet.engines) * (int(_sharing(problem).max()) + 1) * POINTS > MOST_POINTS:
        return False
    return not problem.atomic and all(
        isinstance(tau := fleet.shape_of(e).step_time, Affine) and tau.a_s > 0
        for e in range(len(fleet.engines))
    )


def _sharing(problem: Problem) -> Ints:
    """``[n]`` prompts whose samples share tokens, from 1 on; 0 for requests that share none."""
    shares = shared_prefill(problem) > 0
    group = np.zeros(len(shares), np.int64)
    group[shares] = 1 + np.unique(problem.trace.group[shares], return_inverse=True)[1]
    return group


class Forests:
    """Schedules of all engines, at first those of a plan, as far as nobody is preempted."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        trace, fleet, kinds = problem.trace, problem.fleet, kinds_of(problem.fleet)
        n, m, output = trace.n_requests, len(fleet.engines), trace.output_tokens
        shared, group = shared_prefill(problem), _sharing(problem)
        self.problem = problem
        self.requests, self.terms = np.zeros(n, REQUEST), np.zeros((len(kinds), n), TERM)
        self.engines = np.zeros(m, ENGINE)
        for k, kind in enumerate(kinds):
            shape, tau, mine = kind.shape, kind.shape.step_time, list(kind.engines)
            assert isinstance(tau, Affine)
            token_s, own, term = 1 / shape.prefill_tokens_per_s, trace.context_tokens - shared, self.terms[k]
            term["own"] = own + int(BLOCK_SHARE * shape.block_tokens)
            term["added_s"] = tau.b_s * output + (own - 1) * token_s
            term["added_s"] += tau.c_s * context_read(trace.context_tokens, output)
            term["once_s"], term["fits"] = shared * token_s, ~too_large(problem, shape)
            blocks = shape.kv_capacity_tokens // shape.block_tokens
            self.engines["kind"][mine] = k
            self.engines["cache"][mine] = int(SHARE * blocks * shape.block_tokens)
            self.engines["slots"][mine] = kind.max_running
            self.engines["step_s"][mine] = tau.a_s
        self.members, self.ends = np.zeros((2, m, n), np.int64)
        begin, parent = np.zeros(n, np.int64), np.full(n, NONE)
        planned = Fleet(fleet.profile, plan.engines, fleet.gpus)
        for e, one in enumerate(self.engines):
            queue = plan.order[plan.engine_of[plan.order] == e]
            limits = np.zeros(n + 1, np.int64)
            for finished, running in planned.limits(e):
                limits[finished:] = running
            follow(queue, limits, trace.context_tokens, output, int(one["cache"]), begin, parent)
            self.members[e, : len(queue)], one["count"] = queue, len(queue)
        self.every = max(1, int(np.ceil(SPARE * (begin + output).max() / POINTS)))
        self.order = np.argsort(-output, kind="stable")
        self.samples, groups = np.argsort(group, kind="stable"), int(group.max()) + 1
        self.first = np.searchsorted(group[self.samples], np.arange(groups + 1))
        r = self.requests
        r["length"], r["group"], r["shared"], r["engine"] = output, group, shared, plan.engine_of
        r["begin"], r["parent"], r["rank"][self.order] = begin, parent, np.arange(n)
        r["child"] = r["left"] = r["right"] = NONE
        self.held, self.running = np.zeros((2, m, POINTS + 2), np.int64)
        self.copies = np.zeros((m, groups, POINTS + 2), np.int64)
        self.given = np.zeros((m, groups), np.int64)
        begin_all(
            r,
            self.terms,
            self.engines,
            self.members,
            self.ends,
            self.held,
            self.running,
            self.copies,
            self.given,
            self.every,
        )

    def anneal(self, makespan_s: float, random: np.random.Generator) -> float:
        """Change the schedules towards a makespan; returns what is left of the sum."""
        return float(
            anneal(
                self.requests, self.terms, self.engines, self.order, self.samples, self.first, self.members,
                self.ends, self.held, self.running, self.copies, self.given, self.every, makespan_s,
                PROPOSALS, HEAT, LEAST_HEAT, WEIGHT, random, ENOUGH,
            )
        )  # fmt: skip

    def correct(self, run: Run) -> None:
        """Let the seconds be what the simulator says."""
        for e, (seconds, one) in enumerate(zip(self.seconds(), self.engines, strict=True)):
            if one["count"]:
                one["offset_s"] += run.finish_s[self.members[e, : one["count"]]].max() - seconds

    def seconds(self) -> Floats:
        """``[m]`` of the engines."""
        last = np.array(
            [latest(ends, one["count"]) for ends, one in zip(self.ends, self.engines, strict=True)]
        )
        return np.asarray(self.engines["step_s"] * last + self.engines["load_s"] + self.engines["offset_s"])

    def plan(self) -> Plan:
        """The schedules as a plan: after each finish as many run as then began."""
        queues: list[Admission | None] = []
        for e, count in enumerate(self.engines["count"]):
            if not count:
                queues.append(None)
                continue
            mine = self.members[e, :count]
            r = self.requests[mine]
            mine = mine[np.lexsort((r["group"], r["begin"]))]
            begins, ends = np.sort(r["begin"]), np.sort(r["begin"] + r["length"])
            steps = np.unique(ends)
            finished = np.searchsorted(ends, steps, side="right")
            running = np.searchsorted(begins, steps, side="right") - finished
            limits = [(int(f), int(r)) for f, r in zip(finished, running, strict=True) if r > 0]
            queues.append(Admission(mine, int((begins == 0).sum()), np.nan, tuple(limits)))
        return with_queues(self.problem, queues)
