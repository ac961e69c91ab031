r"""The definition of the simulator, written to be read: every engine takes one step after another.

A batch starts at time 0. Each engine has a clock of its own and repeats **steps**. In a step, each of its
``n`` running requests gains one token; the step lasts :math:`\tau(n, K)` seconds, where ``K`` is the KV cache
that the running requests hold with the new token in it, so request i reads ``prompt_tokens + k`` tokens of
context at its k-th step. Prompts are not computed on the clock: prefill takes no time here.

Between two steps an engine, in this order,

1. lets finished requests go;
2. **preempts**: while the next step would need more KV cache than there is, the request admitted last loses
   its cache and goes to the front of the engine's queue; its tokens are kept and it goes on from there later;
3. **admits** from its own queue, first come first served in plan order, while fewer than ``max_running``
   run and the next step's KV cache has room for the first in line. Nobody overtakes.

An engine looks at the **shared queue** at time 0 and whenever one of its requests has finished, if its own
queue is empty: it pulls one unit (a request, or a whole group if the plan is atomic) if it can admit the
unit's first request at once. Of several engines that act at the same instant, the one with the fewest
requests goes first (then the lower number), one unit at a time.

If all requests of an engine start together and nothing is preempted, it is done after

.. math:: T = \sum_{k \ge 1} \tau(n(k), K(k)), \quad n(k) = |\{i : L_i \ge k\}|, \quad
          K(k) = \sum_{i : L_i \ge k} (p_i + k).
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tailopt.engine.step_time import StepTime
from tailopt.plan import Fleet, Plan
from tailopt.run import EngineLog, Run
from tailopt.simulate.batch import prepare
from tailopt.trace import Trace


@dataclass
class _Engine:
    number: int
    step_time: StepTime
    kv_capacity_tokens: int
    max_running: int
    waiting: deque[int]
    running: list[int] = field(default_factory=list)  # in the order of admission
    time_s: float = 0.0
    may_pull: bool = True

    def key(self) -> tuple[float, int, int]:
        return (self.time_s, len(self.running) + len(self.waiting), self.number)


def simulate_reference(trace: Trace, fleet: Fleet, plan: Plan) -> Run:
    """Carry out ``plan`` step by step, as :func:`tailopt.simulate.simulate` does, but slowly."""
    batch = prepare(trace, fleet, plan)
    n = trace.n_requests
    prompt, output = trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    generated = [0] * n
    ran_on, preemptions = [-1] * n, [0] * n
    start_s, first_token_s, finish_s = [np.nan] * n, [np.nan] * n, [np.nan] * n
    log: list[tuple[int, float, int, int]] = []
    shared = deque(
        batch.shared_member[start:end].tolist() for start, end in pairwise(batch.shared_start.tolist())
    )
    engines = [
        _Engine(
            e,
            batch.fleet.shape_of(e).step_time,
            int(batch.kv_capacity_tokens[e]),
            int(batch.max_running[e]),
            deque(batch.queue[e].tolist()),
        )
        for e in range(len(batch.fleet.engines))
    ]

    def next_kv(requests: list[int]) -> int:
        return sum(prompt[i] + generated[i] + 1 for i in requests)

    def has_room(engine: _Engine, request: int) -> bool:
        fits = next_kv([*engine.running, request]) <= engine.kv_capacity_tokens
        return fits and len(engine.running) < engine.max_running

    def admit(engine: _Engine) -> None:
        while engine.waiting and has_room(engine, engine.waiting[0]):
            request = engine.waiting.popleft()
            engine.running.append(request)
            ran_on[request] = engine.number
            if np.isnan(start_s[request]):
                start_s[request] = engine.time_s

    def step(engine: _Engine) -> bool:
        """One decode step; True if a request finished or was preempted."""
        engine.time_s += float(engine.step_time(len(engine.running), next_kv(engine.running)))
        for request in engine.running:
            generated[request] += 1
            if generated[request] == 1:
                first_token_s[request] = engine.time_s
        done = [i for i in engine.running if generated[i] == output[i]]
        for request in done:
            finish_s[request] = engine.time_s
            engine.running.remove(request)
        engine.may_pull = bool(done)
        preempted = False
        while next_kv(engine.running) > engine.kv_capacity_tokens:
            request = engine.running.pop()
            engine.waiting.appendleft(request)
            preemptions[request] += 1
            preempted = True
        admit(engine)
        return bool(done) or preempted

    for engine in engines:
        admit(engine)
    fresh = {engine.number for engine in engines}  # engines whose running set changed since they were logged
    active = list(engines)
    while active:
        engine = min(active, key=_Engine.key)
        if engine.may_pull and not engine.waiting and shared and has_room(engine, shared[0][0]):
            engine.waiting.extend(shared.popleft())
            admit(engine)
            continue
        engine.may_pull = False
        if engine.number in fresh:
            log.append((engine.number, engine.time_s, len(engine.running), next_kv(engine.running)))
            fresh.discard(engine.number)
        if not engine.running:
            active.remove(engine)
        elif step(engine):
            fresh.add(engine.number)

    log.sort(key=lambda event: event[0])
    engine_column, time_column, running_column, kv_column = zip(*log, strict=True)
    return Run(
        backend="simulated, step by step",
        fleet=batch.fleet,
        plan=plan,
        engine=np.array(ran_on),
        start_s=np.array(start_s),
        first_token_s=np.array(first_token_s),
        finish_s=np.array(finish_s),
        output_tokens=np.array(generated),
        preemptions=np.array(preemptions),
        log=EngineLog(
            np.array(engine_column), np.array(time_column), np.array(running_column), np.array(kv_column)
        ),
    )
