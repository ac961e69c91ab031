r"""The definition of the simulator, written to be read: every engine takes one step after another.

What a step computes is decided by :mod:`tailopt.simulate.vllm_scheduler`, the rules of vLLM's V1 scheduler:
running requests first, chunked prefill within a token budget, KV cache in blocks, preemption, prefix cache;
under priorities, a request's is its place in the order of the plan in force. What happens between two plans
is told in :mod:`tailopt.simulate.ledger`. This module adds time and several engines.

**Time.** A step in which n requests gain a token, and which computes P tokens besides, lasts

.. math:: \tau(n, K) + P / \text{prefill rate} \quad \text{seconds},

where K counts the tokens that the n requests have with one new one each, and each of them has one computed
token (the last) that is not among the P. So a request takes part in L steps with context p + 1 .. p + L for
its p prompt and L output tokens, the first of them at the end of its prefill. :math:`\tau(0, \cdot)` is what
the host takes for a step without such requests.

**Speculation** (:mod:`tailopt.engine.speculation`). An engine has a token clock c. In a step with n requests
that gain tokens, each that decodes gains :math:`\lfloor c + g(n) \rfloor - \lfloor c \rfloor` tokens, g(n)
being the expected number and c growing by it; but never more than it lacks. One that ends its prefill, be it
anew, gains one. So in the long run every request gains what is expected, and nothing is drawn. The context
of the drafts is part of :math:`\tau`. Without speculation g = 1. A simplification: :math:`\tau` of n requests
is that of n which draft, although those that end their prefill have no drafts to verify.

**Arrivals.** An engine takes notice of a request in the first step that begins at its arrival or later; an
engine with nothing to do waits for the next arrival.

**Concurrency limits** (:attr:`tailopt.plan.Engine.limits`) may follow the number of requests that have
finished on the engine since the plan took effect. Those that end in one step are counted together, before the
next step lets anybody in; those that run already go on.

**Shared queue.** When a plan takes effect, and from each finish of one of its requests on, an engine may pull
the first unit in line (a request, or a whole group if the plan is atomic), until one is there for which it
has no room: a unit needs a place within ``max_running``, counting those that run and wait there, and free
blocks for the tokens of its first request and of all that wait.

**Order.** Steps end before others begin at the same instant. Of several engines that act at the same
instant, the one with the fewest requests goes first (then the lower number), one unit at a time. Times that
are equal up to rounding are the same instant (:mod:`tailopt.simulate.instants`), wherever two are compared.

**Review points.** Steps end in the order of time, so the crossing of a review point has a time t*: the end of
the step that finishes a request or passes a number of tokens; the turn of an engine that finds nothing to do;
a time, or the deadline. Of what happens at t*, all steps end, but none begins, before a point is taken as
crossed; only for an engine with nothing to do, all others begin theirs. Then each engine ends the step it is
in, and the review is made; an engine between two steps stands at t*. Points that those last steps cross are
seen in the review and are no others. Of several that are crossed at once, the plan's first is named.

If nobody waits, prefill costs nothing, and all fits into budget and cache, an engine is done after

.. math:: T = \sum_{k \ge 1} \tau(n(k), K(k)), \quad n(k) = |\{i : L_i \ge k\}|, \quad
          K(k) = \sum_{i : L_i \ge k} (p_i + k).
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tailopt.arrays import Ints
from tailopt.drive import State, drive, follow
from tailopt.engine.profile import ShapeProfile
from tailopt.engine.speculation import TOKEN, Decoding
from tailopt.plan import Engine, Fleet, Plan, Policy, View
from tailopt.run import EngineLog, Run, Stays
from tailopt.simulate.instants import by, later
from tailopt.simulate.ledger import NOWHERE, Ledger, Orders, Snapshot
from tailopt.simulate.vllm_scheduler import Limits, Request, Scheduler
from tailopt.trace import Trace


def simulate_reference(trace: Trace, fleet: Fleet, plan: Plan) -> Run:
    """Carry out ``plan`` step by step, as :func:`tailopt.simulate.simulate` does, but slowly."""
    return follow(ReferenceBackend(trace, fleet), plan)


def simulate_policy_reference(trace: Trace, policy: Policy, view: View) -> Run:
    """Carry out ``policy`` step by step, as :func:`tailopt.simulate.simulate_policy` does, but slowly."""
    return drive(ReferenceBackend(trace, view.fleet), policy, view)


@dataclass
class _Engine:
    """One engine; ``time_s`` is when it acts next: ends its step if it is in one, else begins one."""

    number: int
    spec: Engine
    shape: ShapeProfile
    decoding: Decoding
    limits: deque[tuple[int, int]]  # yet to come: requests finished under the plan in force, running
    blocks: int
    time_s: float
    scheduler: Scheduler = field(init=False)
    sampling: tuple[int, ...] | None = None  # of the step it is in
    gains: dict[int, int] = field(default_factory=dict)
    arriving: deque[int] = field(default_factory=deque)  # its own requests yet to arrive
    ready_s: float = field(init=False)  # end of its last step
    steps: int = 0
    tokens: int = 0  # the token clock, in units of 1 / TOKEN
    finished: int = 0  # under the plan in force
    hungry: bool = True  # may pull from the shared queue
    done: bool = False  # has nothing to do, and nothing to wait for
    rests: bool = False  # its last entry in the log says that nothing runs

    def __post_init__(self) -> None:
        self.ready_s = self.time_s
        self.scheduler = Scheduler(
            Limits(
                blocks=self.blocks + 1,
                block_tokens=self.shape.block_tokens,
                max_running=max(running for _, running in self.limits),
                token_budget=self.shape.token_budget,
                policy=self.spec.scheduling,
                prefix_caching=self.shape.prefix_caching,
                lookahead=self.decoding.lookahead,
            )
        )

    @property
    def in_step(self) -> bool:
        return self.sampling is not None

    def limit(self) -> None:
        """Run no more together than the last limit that has been reached says."""
        while self.limits and self.limits[0][0] <= self.finished:
            self.scheduler.limit_running(self.limits.popleft()[1])

    def key(self) -> tuple[bool, int, int]:
        return (not self.in_step, self.scheduler.unfinished, self.number)


class ReferenceBackend:
    """A batch carried out step by step; a :class:`tailopt.drive.Backend`."""

    def __init__(self, trace: Trace, fleet: Fleet) -> None:
        n = trace.n_requests
        self.trace, self.ledger = trace, Ledger(trace, fleet)
        self.prompt, self.group = trace.context_tokens.tolist(), trace.group.tolist()
        self.engines: list[_Engine] = []
        self.units: deque[tuple[list[int], float]] = deque()  # the shared queue: members, when they are there
        self.here = [NOWHERE] * n  # the engine where each request runs or waits
        self.ran_on, self.preemptions, self.generated = [NOWHERE] * n, [0] * n, [0] * n
        self.start_s, self.first_token_s, self.finish_s = [np.nan] * n, [np.nan] * n, [np.nan] * n
        self.running_since: dict[int, float] = {}
        self.log: list[tuple[int, int, float, int, int]] = []
        self.stays: list[tuple[int, int, float, float]] = []
        self.now_s = 0.0

    def start(self, plan: Plan) -> None:
        """Begin with this plan."""
        self._follow(self.ledger.begin(plan))

    def change(self, plan: Plan, request: Ints) -> None:
        """Go on with this plan for the unfinished requests."""
        for engine in self.engines:
            engine.arriving.clear()
            for i in list(engine.scheduler.waiting):
                engine.scheduler.abort(i)
        for i in range(self.trace.n_requests):
            if i not in self.running_since:
                self.here[i] = NOWHERE
        self.units.clear()
        self._follow(self.ledger.change(plan, request))

    def until_review(self) -> State | None:
        """Take steps until a review point is crossed; None when all requests are over."""
        while np.isnan(self.finish_s).any():
            engine = self._next()
            if self._crossed(engine):
                return self._review()
            assert engine is not None
            self.now_s = max(self.now_s, engine.time_s)
            if engine.in_step:
                self._end_step(engine)
            else:
                self._act(engine)
        return None

    def run(self) -> Run:
        """What happened."""
        for engine in self.engines:
            self._rest(engine)
        self.log.sort(key=lambda event: event[:2])
        who = [np.array([stay[k] for stay in self.stays], dtype=np.int64) for k in (0, 1)]
        when = [np.array([stay[k] for stay in self.stays], dtype=np.float64) for k in (2, 3)]
        return self.ledger.run(
            "simulated, step by step",
            engine=np.array(self.ran_on),
            start_s=np.array(self.start_s),
            first_token_s=np.array(self.first_token_s),
            finish_s=np.array(self.finish_s),
            output_tokens=np.array(self.generated),
            preemptions=np.array(self.preemptions),
            log=EngineLog(*(np.array(column) for column in zip(*self.log, strict=True))),
            stays=Stays(who[0], who[1], when[0], when[1]),
        )

    def _follow(self, orders: Orders) -> None:
        ledger = self.ledger
        leaving = set(orders.leaving.tolist())
        for engine in self.engines:
            for i in [i for i in engine.scheduler.running if i in leaving]:
                engine.scheduler.abort(i)
                self._leave(engine, i)
                self.here[i] = NOWHERE
        for i, time_s in zip(orders.over.tolist(), orders.over_s.tolist(), strict=True):
            self.finish_s[i] = time_s
        for e in orders.opened:
            shape = ledger.profile.shape(ledger.engines[e].tp)
            blocks = shape.kv_capacity_tokens // shape.block_tokens
            spec, decoding = ledger.engines[e], ledger.decoding(e)
            limits = deque(ledger.limits(e))
            self.engines.append(_Engine(e, spec, shape, decoding, limits, blocks, ledger.open_s[e]))
        for member, unit_s in zip(pairwise(orders.unit_start.tolist()), orders.unit_s.tolist(), strict=True):
            self.units.append((orders.unit_member[slice(*member)].tolist(), unit_s))
        for engine in self.engines:
            engine.done = engine.number not in ledger.current
        for e in ledger.current:
            engine = self.engines[e]
            engine.finished, engine.limits = 0, deque(ledger.limits(e))
            engine.limit()
            for i in engine.scheduler.running:
                engine.scheduler.prioritize(i, int(ledger.position[i]))
            engine.arriving.extend(orders.queue[e].tolist())
            for i in engine.arriving:
                self.here[i] = e
            engine.hungry = True
            engine.done = not (engine.scheduler.unfinished or engine.arriving or self.units)
        self.passed = [False] * len(ledger.watch.tokens)
        self.idle = False

    def _next(self) -> _Engine | None:
        """The engine that acts next."""
        first_s = min((e.time_s for e in self.engines if not e.done), default=np.inf)
        first = (e for e in self.engines if not e.done and by(e.time_s, first_s))
        return min(first, key=_Engine.key, default=None)

    def _crossed(self, engine: _Engine | None) -> bool:
        """Whether a review is due before ``engine`` acts."""
        watch, left = self.ledger.watch, sum(np.isnan(self.finish_s))
        next_s = np.inf if engine is None else engine.time_s
        begins = engine is None or not engine.in_step
        if (any(self.passed) or left <= watch.unfinished) and (later(next_s, self.now_s) or begins):
            return True
        if self.idle and later(next_s, self.now_s):
            return True
        if by(watch.time_s, next_s) and (begins or later(next_s, watch.time_s)):
            self.now_s = watch.time_s
            return True
        return False

    def _review(self) -> State | None:
        left = int(sum(np.isnan(self.finish_s)))
        reason = self.ledger.reason(self.now_s, left, self.passed, self.idle)
        assert reason is not None
        for engine in self.engines:
            if engine.in_step:
                self._end_step(engine)
            else:
                engine.time_s = max(self.now_s, engine.ready_s)
        if not np.isnan(self.finish_s).any():
            return None
        computed = [0] * self.trace.n_requests
        for i in self.running_since:
            computed[i] = self.engines[self.here[i]].scheduler.computed(i)
        seen = Snapshot(
            clock_s=np.array([engine.time_s for engine in self.engines]),
            engine=np.array(self.here),
            running=np.array([i in self.running_since for i in range(self.trace.n_requests)]),
            generated=np.array(self.generated),
            computed=np.array(computed),
            finished=~np.isnan(self.finish_s),
        )
        return self.ledger.review(self.now_s, reason, seen)

    def _act(self, engine: _Engine) -> None:
        """Let requests in; then begin a step, or wait, or be done."""
        available_s = self.ledger.available_s
        while engine.arriving and by(available_s[engine.arriving[0]], engine.time_s):
            self._submit(engine, engine.arriving.popleft())
        shared_s = np.inf  # when a unit arrives that this engine may pull
        if self.units and engine.hungry:
            members, arrived = self.units[0]
            if not by(arrived, engine.time_s):
                shared_s = arrived
            elif self._has_room(engine, members[0]):
                self.units.popleft()
                for i in members:
                    self._submit(engine, i)
                return
            else:
                engine.hungry = False
        if engine.scheduler.unfinished:
            self._begin_step(engine)
            return
        self._rest(engine)
        engine.time_s = min([shared_s, *(available_s[i] for i in list(engine.arriving)[:1])])
        engine.done = engine.time_s == np.inf
        self.idle = self.idle or (engine.done and self.ledger.watch.idle)

    def _has_room(self, engine: _Engine, i: int) -> bool:
        scheduler, blocks_of = engine.scheduler, engine.scheduler.limits.blocks_of
        waiting = sum(blocks_of(self.prompt[j] + self.generated[j]) for j in scheduler.waiting)
        fits = waiting + blocks_of(self.prompt[i] + self.generated[i]) <= scheduler.free_blocks
        return fits and scheduler.unfinished < scheduler.limits.max_running

    def _submit(self, engine: _Engine, i: int) -> None:
        ledger, tokens = self.ledger, self.prompt[i] + self.generated[i]
        self.here[i] = engine.number
        engine.scheduler.add(
            Request(
                number=i,
                prompt_tokens=tokens,
                group=self.group[i],
                shared_tokens=int(ledger.shared_tokens[i]),
                priority=int(ledger.position[i]),
                kv_tokens=tokens - 1 if ledger.kv_sent_to[i] == engine.number else 0,
            )
        )

    def _begin_step(self, engine: _Engine) -> None:
        if later(engine.time_s, engine.ready_s):
            self._rest(engine)
        scheduler, decoding = engine.scheduler, engine.decoding
        decision = scheduler.schedule()
        for i in decision.preempted:
            self.preemptions[i] += 1
            self._leave(engine, i)
        for i in decision.admitted:
            self.running_since[i] = engine.time_s
            self.ran_on[i] = engine.number
            self.ledger.kv_sent_to[i] = NOWHERE
            if np.isnan(self.start_s[i]):
                self.start_s[i] = engine.time_s
        in_use = scheduler.cache.blocks - scheduler.free_blocks
        running = len(scheduler.running)
        self.log.append(
            (engine.number, engine.steps, engine.time_s, running, in_use * engine.shape.block_tokens)
        )
        engine.rests = False

        sampling = decision.sampling
        decoded = [i for i in sampling if scheduler.drafts(i)]
        prefill = sum(chunk.tokens for i, chunk in decision.chunks.items() if i not in decoded)
        prefill -= len(sampling) - len(decoded)
        context = sum(self.prompt[i] + self.generated[i] + 1 for i in sampling)
        engine.time_s += prefill / engine.shape.prefill_tokens_per_s
        engine.time_s += decoding.seconds(len(sampling), context)

        gain = 1
        if sampling:
            before, engine.tokens = engine.tokens, engine.tokens + int(decoding.tokens[len(sampling)])
            gain = engine.tokens // TOKEN - before // TOKEN
        lacking = {i: int(self.ledger.limit[i]) - self.generated[i] for i in sampling}
        engine.sampling = sampling
        engine.gains = {i: min(lacking[i], gain if i in decoded else 1) for i in sampling}

    def _end_step(self, engine: _Engine) -> None:
        assert engine.sampling is not None
        engine.steps += 1
        engine.ready_s = engine.time_s
        for i in engine.sampling:
            before, self.generated[i] = self.generated[i], self.generated[i] + engine.gains[i]
            if before == 0 < self.generated[i]:
                self.first_token_s[i] = engine.time_s
            if self.generated[i] < self.ledger.limit[i]:
                for k, value in enumerate(self.ledger.watch.tokens):
                    self.passed[k] = self.passed[k] or before < value <= self.generated[i]
        over = [i for i in engine.sampling if self.generated[i] == self.ledger.limit[i]]
        for i in over:
            self.finish_s[i] = engine.time_s
            self._leave(engine, i)
        engine.finished += len(over)
        engine.limit()
        engine.hungry = engine.hungry or bool(over)
        engine.scheduler.update(over, engine.gains)
        engine.sampling = None

    def _leave(self, engine: _Engine, i: int) -> None:
        self.stays.append((i, engine.number, self.running_since.pop(i), engine.time_s))

    def _rest(self, engine: _Engine) -> None:
        """Say in the log that nothing runs from the end of the last step on."""
        if not engine.rests:
            self.log.append((engine.number, engine.steps, engine.ready_s, 0, 0))
        engine.rests = True
