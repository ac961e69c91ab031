r"""The definition of the simulator, written to be read: every engine takes one step after another.

What a step computes is decided by :mod:`tailopt.simulate.vllm_scheduler`, the rules of vLLM's V1 scheduler:
running requests first, chunked prefill within a token budget, KV cache in blocks, preemption of the request
admitted last, prefix cache. This module adds time and several engines.

**Time.** A step in which n requests gain a token, and which computes P tokens besides, lasts

.. math:: \tau(n, K) + P / \text{prefill rate} \quad \text{seconds},

where K counts the tokens that the n requests have with the new ones, and each of them has one computed token
(the last) that is not among the P. So a request takes part in L steps with context p + 1 .. p + L for its p
prompt and L output tokens, the first of them at the end of its prefill.

**Arrivals.** An engine takes notice of a request in the first step that begins at its arrival or later; an
engine with nothing to do waits for the next arrival.

**Shared queue.** At time 0, and from each finish of one of its requests on, an engine may pull the first unit
in line (a request, or a whole group if the plan is atomic), until it has no room: a unit needs a place within
``max_running``, counting those that run and wait there, and free blocks for the prompt of its first request
and for the tokens of all that wait. Of several engines that act at the same instant, the one with the fewest
requests goes first (then the lower number), one unit at a time.

If nobody waits, prefill costs nothing, and all fits into budget and cache, an engine is done after

.. math:: T = \sum_{k \ge 1} \tau(n(k), K(k)), \quad n(k) = |\{i : L_i \ge k\}|, \quad
          K(k) = \sum_{i : L_i \ge k} (p_i + k).
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tailopt.engine.profile import ShapeProfile
from tailopt.plan import Fleet, Plan
from tailopt.run import EngineLog, Run, Stays
from tailopt.simulate.batch import prepare
from tailopt.simulate.vllm_scheduler import Limits, Request, Scheduler
from tailopt.trace import Trace


@dataclass
class _Engine:
    number: int
    shape: ShapeProfile
    limits: Limits
    arriving: deque[int]  # its own requests yet to arrive
    scheduler: Scheduler = field(init=False)
    time_s: float = 0.0
    steps: int = 0
    hungry: bool = True

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)

    def key(self) -> tuple[float, int, int]:
        return (self.time_s, self.scheduler.unfinished, self.number)


def simulate_reference(trace: Trace, fleet: Fleet, plan: Plan) -> Run:
    """Carry out ``plan`` step by step, as :func:`tailopt.simulate.simulate` does, but slowly."""
    batch = prepare(trace, fleet, plan)
    n = trace.n_requests
    prompt, output = trace.context_tokens.tolist(), trace.output_tokens.tolist()
    arrival_s = trace.arrival_s.tolist()
    ran_on, preemptions, generated = [-1] * n, [0] * n, [0] * n
    start_s, first_token_s, finish_s = [np.nan] * n, [np.nan] * n, [np.nan] * n
    log: list[tuple[int, int, float, int, int]] = []
    stays: list[tuple[int, int, float, float]] = []
    running_since: dict[int, float] = {}
    units = deque(
        (batch.shared_member[start:end].tolist(), arrived)
        for (start, end), arrived in zip(
            pairwise(batch.shared_start.tolist()), batch.shared_arrival_s.tolist(), strict=True
        )
    )
    engines = []
    for e in range(len(batch.fleet.engines)):
        shape = batch.fleet.shape_of(e)
        limits = Limits(
            blocks=int(batch.blocks[e]) + 1,
            block_tokens=shape.block_tokens,
            max_running=int(batch.max_running[e]),
            token_budget=shape.token_budget,
            prefix_caching=shape.prefix_caching,
        )
        engines.append(_Engine(e, shape, limits, deque(batch.queue[e].tolist())))

    def submit(engine: _Engine, request: int) -> None:
        ran_on[request] = engine.number
        shared = int(batch.shared_tokens[request])
        group = int(trace.group[request])
        engine.scheduler.add(Request(request, prompt[request], group=group, shared_tokens=shared))

    def has_room(engine: _Engine, request: int) -> bool:
        scheduler, limits = engine.scheduler, engine.limits
        waiting = sum(limits.blocks_of(prompt[i] + generated[i]) for i in scheduler.waiting)
        fits = waiting + limits.blocks_of(prompt[request]) <= scheduler.free_blocks
        return fits and scheduler.unfinished < limits.max_running

    def leave(engine: _Engine, request: int) -> None:
        stays.append((request, engine.number, running_since.pop(request), engine.time_s))

    def take_step(engine: _Engine) -> None:
        decision = engine.scheduler.schedule()
        for request in decision.preempted:
            preemptions[request] += 1
            leave(engine, request)
        for request in decision.admitted:
            running_since[request] = engine.time_s
            if np.isnan(start_s[request]):
                start_s[request] = engine.time_s
        in_use = engine.scheduler.cache.blocks - engine.scheduler.free_blocks
        running = len(engine.scheduler.running)
        log.append((engine.number, engine.steps, engine.time_s, running, in_use * engine.limits.block_tokens))

        sampling = decision.sampling
        computed = sum(chunk.tokens for chunk in decision.chunks.values())
        context = sum(prompt[i] + generated[i] + 1 for i in sampling)
        engine.time_s += (computed - len(sampling)) / engine.shape.prefill_tokens_per_s
        engine.time_s += float(engine.shape.step_time(len(sampling), context))
        engine.steps += 1
        for request in sampling:
            generated[request] += 1
            if generated[request] == 1:
                first_token_s[request] = engine.time_s
        done = [i for i in sampling if generated[i] == output[i]]
        for request in done:
            finish_s[request] = engine.time_s
            leave(engine, request)
        engine.hungry = engine.hungry or bool(done)
        engine.scheduler.update(done)

    active = list(engines)
    while active:
        engine = min(active, key=_Engine.key)
        while engine.arriving and arrival_s[engine.arriving[0]] <= engine.time_s:
            submit(engine, engine.arriving.popleft())
        shared_s = np.inf  # when a unit arrives for which this engine has room
        if units and engine.hungry:
            members, arrived = units[0]
            engine.hungry = has_room(engine, members[0])
            if engine.hungry and arrived <= engine.time_s:
                units.popleft()
                for request in members:
                    submit(engine, request)
                continue
            shared_s = arrived if engine.hungry else np.inf
        if engine.scheduler.unfinished:
            take_step(engine)
        else:
            next_s = min([shared_s, *(arrival_s[i] for i in list(engine.arriving)[:1])])
            if next_s == np.inf:
                log.append((engine.number, engine.steps, engine.time_s, 0, 0))
                active.remove(engine)
            else:
                engine.time_s = next_s

    log.sort(key=lambda event: event[:2])
    return Run.without_reviews(
        backend="simulated, step by step",
        fleet=batch.fleet,
        plan=plan,
        engine=np.array(ran_on),
        start_s=np.array(start_s),
        first_token_s=np.array(first_token_s),
        finish_s=np.array(finish_s),
        output_tokens=np.array(generated),
        preemptions=np.array(preemptions),
        log=EngineLog(*(np.array(column) for column in zip(*log, strict=True))),
        stays=Stays(*(np.array(column) for column in zip(*stays, strict=True))),
    )
