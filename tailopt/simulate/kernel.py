r"""The simulator's kernel: the schedule of :mod:`tailopt.simulate.vllm_scheduler`, from event to event.

While nobody is in prefill, nobody can be admitted, nobody finishes and the KV blocks last, an engine decodes
the same ``n`` requests step after step, and their context grows by ``n`` tokens a step. S such steps from
context K last, for :math:`\tau = f(n) + cK`,

.. math:: S\,f(n) + c\,(S K + n\,S(S-1)/2),

and for a maximum of such lines the same sum on each stretch where one line is the largest. S is known
ahead: the least finishing step in a heap, the step in which the blocks :math:`\sum_i \lceil (c_i + S) / B
\rceil` run out (c_i tokens computed, B tokens a block; only how many requests have which c_i mod B
matters), or the next arrival. All other steps are taken one by one, by the scheduler's rules, which need no
pass over the running requests either: all that decode get their token, and if the blocks do not suffice,
those admitted last go, after the free blocks have been taken. So an event costs O(log running + B),
whatever the lengths.

**Prefix cache.** The kernel keeps the block cache of :mod:`tailopt.simulate.vllm_cache` in the form that
first come, first served leaves of it: each group has one *chain* of shared blocks an engine, held by so
many requests or standing in the free queue, and each request one stretch of blocks of its own behind it. Of
both, only the number of blocks that can still be found is kept, because blocks are always lost from the
end.

All bookkeeping is in whole tokens, blocks and steps (int64); only the clocks are floating point. Requests and
engines are records of structured arrays, so that one request's fields share a cache line.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tailopt.arrays import Floats, Ints

Records = NDArray[np.void]
Record = Any  # one element of a Records array

REQUEST = np.dtype(
    [
        ("prompt_tokens", np.int64),
        ("output_tokens", np.int64),
        ("generated", np.int64),  # kept current while it does not decode
        ("computed", np.int64),  # tokens whose KV is in the cache; likewise
        ("offset", np.int64),  # while it decodes: computed - the engine's step
        ("finish_step", np.int64),  # while it decodes: the engine's step after which it is finished
        ("heap_place", np.int64),
        ("wait_next", np.int64),  # the waiting requests of its engine, a linked list
        ("run_next", np.int64),  # the running ones in the order of admission, a linked list
        ("run_previous", np.int64),
        ("shared_blocks", np.int64),  # leading blocks that it shares with its group
        ("sibling", np.int64),  # the next request of its group, a ring
        ("chain", np.int64),  # the request that first used its group's chain on its engine, or NONE
        ("engine", np.int64),
        ("stay", np.int64),  # its entry in the stays while it runs; rises in the order of admission
        ("preemptions", np.int64),
        ("arrival_s", np.float64),
        ("start_s", np.float64),
        ("first_token_s", np.float64),
        ("finish_s", np.float64),
    ],
    align=True,
)
RUN = np.dtype(  # [2 n]: what can be found of request i's own blocks, and at n + i of the chain named i
    [("blocks", np.int64), ("holders", np.int64), ("previous", np.int64), ("next", np.int64)], align=True
)
ENGINE = np.dtype(
    [
        ("shape", np.int64),
        ("max_running", np.int64),
        ("token_budget", np.int64),
        ("block_tokens", np.int64),
        ("prefix_caching", np.bool_),
        ("prefill_s", np.float64),  # per prompt token
        ("blocks", np.int64),
        ("free", np.int64),  # blocks that nobody holds
        ("blank", np.int64),  # those of them that hold nothing to be found; they are taken first
        ("queue_head", np.int64),  # the others: runs, least recently released first
        ("queue_tail", np.int64),
        ("wait_head", np.int64),
        ("wait_tail", np.int64),
        ("waiting", np.int64),
        ("waiting_blocks", np.int64),  # for the tokens of all that wait
        ("next_own", np.int64),  # the engine's own requests yet to arrive
        ("end_own", np.int64),
        ("run_tail", np.int64),
        ("running", np.int64),
        ("decoding", np.int64),  # the size of the heap
        ("prefilling", np.int64),  # the one running request that does not decode yet, the last one, or NONE
        ("next_kv", np.int64),  # tokens of those that decode after the next step
        ("steady", np.bool_),  # nobody is in prefill, and nobody can be admitted until blocks are released
        ("hungry", np.bool_),  # may pull from the shared queue
        ("step", np.int64),
        ("time_s", np.float64),
    ],
    align=True,
)
LOG = np.dtype(
    [
        ("engine", np.int64),
        ("step", np.int64),
        ("time_s", np.float64),
        ("running", np.int64),
        ("kv_tokens", np.int64),
    ],
    align=True,
)
STAY = np.dtype(
    [("request", np.int64), ("engine", np.int64), ("start_s", np.float64), ("end_s", np.float64)], align=True
)

DONE, LOG_FULL, STAYS_FULL, HEAP_FULL = 0, 1, 2, 3
NONE = -1
UNITS_PULLED, LOG_LENGTH, STAYS_LENGTH = 0, 1, 2  # places in the counters
NEVER = np.inf


@njit(cache=True, error_model="numpy")
def run(
    requests: Records,
    runs: Records,
    engines: Records,
    heaps: Ints,
    phases: Ints,
    own: Ints,
    unit_start: Ints,
    unit_member: Ints,
    unit_arrival_s: Floats,
    log: Records,
    stays: Records,
    counters: Ints,
    base_s: Floats,
    slope_s: Floats,
    pieces: Ints,
) -> int:
    """Carry the batch out from where the arrays stand.

    Returns DONE, or what was too small: the caller then copies it into a larger array and calls again.

    Args:
        requests: ``[n]`` of REQUEST.
        runs: ``[2 n]`` of RUN.
        engines: ``[m]`` of ENGINE.
        heaps: ``[m, width]`` requests that decode on each engine, a heap by finishing step.
        phases: ``[m, block_tokens]`` how many of them have which ``offset`` modulo ``block_tokens``.
        own: each engine's own requests, by arrival and then in the plan's order.
        unit_start: ``[units + 1]`` into ``unit_member``.
        unit_member: the shared queue, unit by unit.
        unit_arrival_s: ``[units]`` when all of a unit's requests have arrived, never falling.
        log: of LOG.
        stays: of STAY.
        counters: ``[3]`` units pulled from the shared queue, entries of the log, entries of the stays.
        base_s: ``[shapes, running + 1, pieces]`` step time at no context.
        slope_s: ``[shapes, pieces]`` step time per context token.
        pieces: ``[shapes]`` how many pieces are in use.
    """
    m, units = len(engines), len(unit_start) - 1
    while counters[UNITS_PULLED] < units:
        e = next_engine(engines)
        engine = engines[e]
        unit = counters[UNITS_PULLED]
        arrive(requests, engine, own, e)
        shared_s = NEVER  # when a unit arrives for which the engine has room
        if engine.hungry and has_room(engine, requests[unit_member[unit_start[unit]]]):
            if unit_arrival_s[unit] <= engine.time_s:
                for place in range(unit_start[unit], unit_start[unit + 1]):
                    enqueue(requests, engine, unit_member[place], e)
                counters[UNITS_PULLED] += 1
                continue
            shared_s = unit_arrival_s[unit]
        else:
            engine.hungry = False
        base, slope = base_s[engine.shape, :, : pieces[engine.shape]], slope_s[engine.shape]
        code = advance(
            requests, runs, engine, heaps[e], phases[e], own, log, stays, counters, base, slope, e, shared_s
        )
        if code != DONE:
            return code
    for e in range(m):
        engine = engines[e]
        base, slope = base_s[engine.shape, :, : pieces[engine.shape]], slope_s[engine.shape]
        while True:
            arrive(requests, engine, own, e)
            if engine.running + engine.waiting == 0 and engine.next_own == engine.end_own:
                break
            code = advance(
                requests, runs, engine, heaps[e], phases[e], own, log, stays, counters, base, slope, e, NEVER
            )
            if code != DONE:
                return code
    if counters[LOG_LENGTH] + m > len(log):
        return LOG_FULL
    for e in range(m):
        note(log, counters, e, engines[e], 0, 0)
    return DONE


@njit(cache=True, error_model="numpy")
def next_engine(engines: Records) -> int:
    """The engine that acts next: least time, then fewest requests, then lowest number."""
    best = 0
    for e in range(1, len(engines)):
        here, there = engines[e], engines[best]
        if here.time_s < there.time_s or (
            here.time_s == there.time_s and here.running + here.waiting < there.running + there.waiting
        ):
            best = e
    return best


@njit(cache=True, error_model="numpy")
def arrive(requests: Records, engine: Record, own: Ints, e: int) -> None:
    """Let the engine's own requests that have arrived wait."""
    while engine.next_own < engine.end_own and requests[own[engine.next_own]].arrival_s <= engine.time_s:
        enqueue(requests, engine, own[engine.next_own], e)
        engine.next_own += 1


@njit(cache=True, error_model="numpy")
def has_room(engine: Record, request: Record) -> bool:
    """Whether the engine may pull a request: a place, and blocks for it and for all that wait there."""
    need = engine.waiting_blocks + blocks_of(engine, request.prompt_tokens)
    return bool(engine.running + engine.waiting < engine.max_running and need <= engine.free)


@njit(cache=True, error_model="numpy")
def enqueue(requests: Records, engine: Record, i: int, e: int) -> None:
    """Put request i at the end of the waiting ones of engine e."""
    requests[i].engine = e
    join_chain(requests, i)
    if engine.waiting == 0:
        engine.wait_head = i
    else:
        requests[engine.wait_tail].wait_next = i
    engine.wait_tail = i
    engine.waiting += 1
    engine.waiting_blocks += blocks_of(engine, tokens_of(requests[i]))
    engine.steady = False


@njit(cache=True, error_model="numpy")
def join_chain(requests: Records, i: int) -> None:
    """Find the chain of request i's group on its engine, or start one."""
    request = requests[i]
    if request.shared_blocks == 0:
        return
    request.chain = i
    other = request.sibling
    while other != i:
        if requests[other].engine == request.engine:
            request.chain = requests[other].chain
            return
        other = requests[other].sibling


@njit(cache=True, error_model="numpy")
def tokens_of(request: Record) -> int:
    """Tokens of the prompt and generated so far, of a request that does not decode."""
    return int(request.prompt_tokens + request.generated)


@njit(cache=True, error_model="numpy")
def blocks_of(engine: Record, tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return int((tokens + engine.block_tokens - 1) // engine.block_tokens)


@njit(cache=True, error_model="numpy")
def advance(
    requests: Records,
    runs: Records,
    engine: Record,
    heap: Ints,
    phase: Ints,
    own: Ints,
    log: Records,
    stays: Records,
    counters: Ints,
    base_s: Floats,
    slope_s: Floats,
    e: int,
    shared_s: float,
) -> int:
    """Take the engine to its next event: wait for an arrival, jump, or take one step."""
    until_s = shared_s
    if engine.next_own < engine.end_own:
        until_s = min(until_s, requests[own[engine.next_own]].arrival_s)
    if engine.running + engine.waiting == 0:
        engine.time_s = max(engine.time_s, until_s)
        return DONE
    if counters[LOG_LENGTH] == len(log):
        return LOG_FULL
    if counters[STAYS_LENGTH] + min(engine.max_running, engine.waiting) > len(stays):
        return STAYS_FULL
    if min(engine.max_running, engine.running + engine.waiting) > len(heap):
        return HEAP_FULL
    steps = 0
    if engine.steady:
        steps = steps_ahead(requests, engine, heap, phase)
    if steps > 0:
        jump(runs, engine, phase, log, counters, base_s[engine.decoding], slope_s, e, steps, until_s)
    else:
        step(requests, runs, engine, heap, phase, log, stays, counters, base_s, slope_s, e)
    finish(requests, runs, engine, heap, phase, stays)
    return DONE


@njit(cache=True, error_model="numpy")
def steps_ahead(requests: Records, engine: Record, heap: Ints, phase: Ints) -> int:
    """Steps up to the next finish, or fewer if the free blocks do not last that long."""
    steps = int(requests[heap[0]].finish_step - engine.step)
    if (steps // engine.block_tokens + 1) * engine.decoding <= engine.free:
        return steps
    if blocks_taken(engine, phase, steps) <= engine.free:
        return steps
    low, high = 0, steps  # the blocks last for ``low`` steps and not for ``high``
    while high - low > 1:
        middle = (low + high) // 2
        if blocks_taken(engine, phase, middle) <= engine.free:
            low = middle
        else:
            high = middle
    return low


@njit(cache=True, error_model="numpy")
def blocks_taken(engine: Record, phase: Ints, steps: int) -> int:
    """Blocks that the requests in decode take in so many steps: one each when their tokens fill the last."""
    size = engine.block_tokens
    taken = engine.decoding * (steps // size)
    offset = (
        -engine.step
    ) % size  # of those that take one at once; each step later, of the next lower offset
    for _ in range(steps % size):
        taken += phase[offset]
        offset = offset - 1 if offset > 0 else size - 1
    return int(taken)


@njit(cache=True, error_model="numpy")
def jump(
    runs: Records,
    engine: Record,
    phase: Ints,
    log: Records,
    counters: Ints,
    base_s: Floats,
    slope_s: Floats,
    e: int,
    steps: int,
    until_s: float,
) -> None:
    """Decode with all running requests for ``steps`` steps, or to the first step that ends at ``until_s``."""
    n, kv = engine.decoding, engine.next_kv
    in_use = engine.blocks - engine.free + blocks_taken(engine, phase, 1)
    note(log, counters, e, engine, n, in_use)
    if engine.time_s + seconds(base_s, slope_s, n, kv, steps) > until_s:
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            if engine.time_s + seconds(base_s, slope_s, n, kv, middle) >= until_s:
                high = middle
            else:
                low = middle
        steps = high
    take(runs, engine, blocks_taken(engine, phase, steps))
    engine.time_s += seconds(base_s, slope_s, n, kv, steps)
    engine.step += steps
    engine.next_kv += n * steps


@njit(cache=True, error_model="numpy")
def step(
    requests: Records,
    runs: Records,
    engine: Record,
    heap: Ints,
    phase: Ints,
    log: Records,
    stays: Records,
    counters: Ints,
    base_s: Floats,
    slope_s: Floats,
    e: int,
) -> None:
    """One step by the scheduler's rules: running requests, preemption, admission, then the clock."""
    preempted = decode_or_preempt(requests, runs, engine, heap, phase, stays)
    budget = engine.token_budget - engine.decoding
    scheduled, sampling, kv = engine.decoding, engine.decoding, engine.next_kv
    fresh = 0  # requests whose prompts are complete after this step: the last ones of the list
    if engine.prefilling != NONE and budget > 0:
        i = engine.prefilling
        chunk = min(tokens_of(requests[i]) - requests[i].computed, budget)
        lacking = blocks_of(engine, requests[i].computed + chunk) - blocks_of(engine, requests[i].computed)
        if lacking > engine.free:
            preempt(requests, runs, engine, heap, phase, stays)
            preempted = True
        else:
            compute(requests, runs, engine, i, chunk)
            budget -= chunk
            scheduled += chunk
            if requests[i].computed == tokens_of(requests[i]):
                engine.prefilling = NONE
                fresh += 1
                kv += tokens_of(requests[i]) + 1
    while (
        not preempted and budget > 0 and engine.waiting > 0 and engine.running < engine.max_running
        and fits(requests, runs, engine)
    ):  # fmt: skip
        i = engine.wait_head
        admit(requests, runs, engine, stays, counters, e)
        chunk = min(tokens_of(requests[i]) - requests[i].computed, budget)
        compute(requests, runs, engine, i, chunk)
        budget -= chunk
        scheduled += chunk
        if requests[i].computed == tokens_of(requests[i]):
            fresh += 1
            kv += tokens_of(requests[i]) + 1
        else:
            engine.prefilling = i
    sampling += fresh
    blocked = engine.waiting == 0 or engine.running == engine.max_running or (
        not preempted and not fits(requests, runs, engine)
    )  # fmt: skip
    engine.steady = blocked and engine.prefilling == NONE

    note(log, counters, e, engine, engine.running, engine.blocks - engine.free)
    engine.step += 1
    engine.time_s += (scheduled - sampling) * engine.prefill_s
    if sampling > 0:
        engine.time_s += seconds(base_s[sampling], slope_s, sampling, kv, 1)
    engine.next_kv += engine.decoding
    i = engine.run_tail if engine.prefilling == NONE else requests[engine.run_tail].run_previous
    for _ in range(fresh):
        start_decode(requests, engine, heap, phase, i)
        i = requests[i].run_previous


@njit(cache=True, error_model="numpy")
def decode_or_preempt(
    requests: Records, runs: Records, engine: Record, heap: Ints, phase: Ints, stays: Records
) -> bool:
    """Blocks for the next token of all that decode; True if some had to be preempted for it.

    In running order each that needs a block takes one; when none is free, the last running requests go until
    one is. So the free blocks are all taken before the first one goes.
    """
    preempted = False
    lacking = blocks_taken(engine, phase, 1)
    while lacking > engine.free:
        lacking -= engine.free
        take(runs, engine, engine.free)
        last = requests[engine.run_tail]
        if engine.run_tail != engine.prefilling and (last.offset + engine.step) % engine.block_tokens == 0:
            lacking -= 1
        preempt(requests, runs, engine, heap, phase, stays)
        preempted = True
    take(runs, engine, lacking)
    return preempted


@njit(cache=True, error_model="numpy")
def start_decode(requests: Records, engine: Record, heap: Ints, phase: Ints, i: int) -> None:
    """A request whose tokens are all computed has gained one in the step just taken."""
    request = requests[i]
    if request.generated == 0:
        request.first_token_s = engine.time_s
    request.generated += 1
    request.offset = request.computed - engine.step
    request.finish_step = engine.step + request.output_tokens - request.generated
    phase[request.offset % engine.block_tokens] += 1
    engine.next_kv += tokens_of(request) + 1
    sift_up(requests, heap, engine.decoding, i)
    engine.decoding += 1


@njit(cache=True, error_model="numpy")
def stop_decode(requests: Records, engine: Record, heap: Ints, phase: Ints, i: int) -> None:
    """Take a request out of those that decode; what it has so far is kept."""
    request = requests[i]
    request.computed = request.offset + engine.step
    request.generated = request.computed + 1 - request.prompt_tokens
    phase[request.offset % engine.block_tokens] -= 1
    engine.next_kv -= tokens_of(request) + 1
    engine.decoding -= 1
    hole, last = request.heap_place, heap[engine.decoding]
    if hole != engine.decoding:
        sift_down(requests, heap, engine.decoding, sift_up(requests, heap, hole, last), last)


@njit(cache=True, error_model="numpy")
def finish(requests: Records, runs: Records, engine: Record, heap: Ints, phase: Ints, stays: Records) -> None:
    """Let requests that have all their tokens go, in running order."""
    if engine.decoding == 0 or requests[heap[0]].finish_step > engine.step:
        return
    done = 0  # those that are finished stand at the end of the heap's array, sorted by admission
    while engine.decoding > 0 and requests[heap[0]].finish_step == engine.step:
        i = heap[0]
        stop_decode(requests, engine, heap, phase, i)
        done += 1
        place = engine.decoding
        while place + 1 < engine.decoding + done and requests[heap[place + 1]].stay < requests[i].stay:
            heap[place] = heap[place + 1]
            place += 1
        heap[place] = i
    for place in range(engine.decoding, engine.decoding + done):
        i = heap[place]
        requests[i].finish_s = engine.time_s
        leave(requests, runs, engine, stays, i)
    engine.hungry = True
    engine.steady = engine.steady and engine.waiting == 0


@njit(cache=True, error_model="numpy")
def preempt(
    requests: Records, runs: Records, engine: Record, heap: Ints, phase: Ints, stays: Records
) -> None:
    """The request admitted last loses its blocks and waits at the very front."""
    i = engine.run_tail
    if i == engine.prefilling:
        engine.prefilling = NONE
    else:
        stop_decode(requests, engine, heap, phase, i)
    leave(requests, runs, engine, stays, i)
    requests[i].preemptions += 1
    if engine.waiting == 0:
        engine.wait_tail = i
    requests[i].wait_next = engine.wait_head
    engine.wait_head = i
    engine.waiting += 1
    engine.waiting_blocks += blocks_of(engine, tokens_of(requests[i]))


@njit(cache=True, error_model="numpy")
def leave(requests: Records, runs: Records, engine: Record, stays: Records, i: int) -> None:
    """A request runs no more: out of the list, end of its stay, and its blocks are released."""
    request = requests[i]
    before, after = request.run_previous, request.run_next
    if before != NONE:
        requests[before].run_next = after
    if after != NONE:
        requests[after].run_previous = before
    else:
        engine.run_tail = before
    engine.running -= 1
    stays[request.stay].end_s = engine.time_s
    release(requests, runs, engine, i)


@njit(cache=True, error_model="numpy")
def fits(requests: Records, runs: Records, engine: Record) -> bool:
    """Whether there are blocks for all tokens of the first in line; what it finds need not be free."""
    request = requests[engine.wait_head]
    found, standing = found_blocks(runs, request, engine.wait_head, len(requests))
    return bool(blocks_of(engine, tokens_of(request)) - found + standing <= engine.free)


@njit(cache=True, error_model="numpy")
def found_blocks(runs: Records, request: Record, i: int, n: int) -> tuple[int, int]:
    """Blocks of a waiting request that can be found, and how many of them stand in the free queue."""
    found, standing = 0, 0
    if request.chain != NONE:
        chain = runs[n + request.chain]
        found = chain.blocks
        if chain.holders == 0:
            standing = chain.blocks
    if found == request.shared_blocks:
        found += runs[i].blocks
        standing += runs[i].blocks
    return found, standing


@njit(cache=True, error_model="numpy")
def admit(requests: Records, runs: Records, engine: Record, stays: Records, counters: Ints, e: int) -> None:
    """Let the first in line run; it holds what it finds in the prefix cache."""
    n, i = len(requests), engine.wait_head
    request = requests[i]
    engine.wait_head = request.wait_next
    engine.waiting -= 1
    engine.waiting_blocks -= blocks_of(engine, tokens_of(request))
    found, _ = found_blocks(runs, request, i, n)
    if request.chain != NONE:
        chain = runs[n + request.chain]
        if chain.holders == 0 and chain.blocks > 0:
            unlink(runs, engine, n + request.chain)
            engine.free -= chain.blocks
        chain.holders += 1
    if runs[i].blocks > 0:
        unlink(runs, engine, i)
        engine.free -= runs[i].blocks
        runs[i].blocks = 0
    request.computed = found * engine.block_tokens
    request.run_previous, request.run_next = engine.run_tail, NONE
    if engine.run_tail != NONE:
        requests[engine.run_tail].run_next = i
    engine.run_tail = i
    engine.running += 1
    if np.isnan(request.start_s):
        request.start_s = engine.time_s
    request.stay = counters[STAYS_LENGTH]
    counters[STAYS_LENGTH] += 1
    stay = stays[request.stay]
    stay.request = i
    stay.engine = e
    stay.start_s = engine.time_s


@njit(cache=True, error_model="numpy")
def compute(requests: Records, runs: Records, engine: Record, i: int, chunk: int) -> None:
    """Compute the next ``chunk`` tokens of a prefill; full blocks of its chain can be found at once."""
    request = requests[i]
    before = blocks_of(engine, request.computed)
    request.computed += chunk
    take(runs, engine, blocks_of(engine, request.computed) - before)
    if request.chain != NONE:
        chain = runs[len(requests) + request.chain]
        full = min(request.computed // engine.block_tokens, request.shared_blocks)
        chain.blocks = max(chain.blocks, full)


@njit(cache=True, error_model="numpy")
def take(runs: Records, engine: Record, blocks: int) -> None:
    """Take blocks from the head of the free queue; what could be found in them is lost, last blocks first."""
    engine.free -= blocks
    blank = min(blocks, engine.blank)
    engine.blank -= blank
    blocks -= blank
    while blocks > 0:
        head = runs[engine.queue_head]
        taken = min(blocks, head.blocks)
        head.blocks -= taken
        blocks -= taken
        if head.blocks == 0:
            unlink(runs, engine, engine.queue_head)


@njit(cache=True, error_model="numpy")
def release(requests: Records, runs: Records, engine: Record, i: int) -> None:
    """A request gives its blocks back: its own that can be found to the end of the queue, then the chain."""
    n = len(requests)
    request = requests[i]
    held = blocks_of(engine, request.computed)
    full = request.computed // engine.block_tokens if engine.prefix_caching else 0
    engine.blank += held - full
    engine.free += held - full
    if full > request.shared_blocks:
        runs[i].blocks = full - request.shared_blocks
        engine.free += runs[i].blocks
        append(runs, engine, i)
    if request.chain != NONE:
        chain = runs[n + request.chain]
        chain.holders -= 1
        if chain.holders == 0 and chain.blocks > 0:
            engine.free += chain.blocks
            append(runs, engine, n + request.chain)
    request.computed = 0


@njit(cache=True, error_model="numpy")
def append(runs: Records, engine: Record, r: int) -> None:
    """Put a run at the end of the free queue."""
    runs[r].previous, runs[r].next = engine.queue_tail, NONE
    if engine.queue_tail == NONE:
        engine.queue_head = r
    else:
        runs[engine.queue_tail].next = r
    engine.queue_tail = r


@njit(cache=True, error_model="numpy")
def unlink(runs: Records, engine: Record, r: int) -> None:
    """Take a run out of the free queue."""
    before, after = runs[r].previous, runs[r].next
    if before == NONE:
        engine.queue_head = after
    else:
        runs[before].next = after
    if after == NONE:
        engine.queue_tail = before
    else:
        runs[after].previous = before


@njit(cache=True, error_model="numpy")
def sift_up(requests: Records, heap: Ints, place: int, i: int) -> int:
    """Put request i where it belongs at or above ``place``; returns where."""
    key = requests[i].finish_step
    while place > 0:
        parent = (place - 1) // 2
        other = heap[parent]
        if requests[other].finish_step <= key:
            break
        heap[place] = other
        requests[other].heap_place = place
        place = parent
    heap[place] = i
    requests[i].heap_place = place
    return place


@njit(cache=True, error_model="numpy")
def sift_down(requests: Records, heap: Ints, size: int, place: int, i: int) -> None:
    """Put request i where it belongs at or below ``place``."""
    key = requests[i].finish_step
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and requests[heap[child + 1]].finish_step < requests[heap[child]].finish_step:
            child += 1
        other = heap[child]
        if key <= requests[other].finish_step:
            break
        heap[place] = other
        requests[other].heap_place = place
        place = child
    heap[place] = i
    requests[i].heap_place = place


@njit(cache=True, error_model="numpy")
def seconds(base_s: Floats, slope_s: Floats, n: int, kv: int, steps: int) -> float:
    """Duration of ``steps`` steps of n requests, the first of which holds ``kv`` tokens."""
    if len(base_s) == 1:
        return float(steps * base_s[0] + slope_s[0] * context_sum(n, kv, steps))
    total, done = 0.0, 0
    while done < steps:
        here = kv + n * done
        top = 0
        for p in range(1, len(base_s)):
            lead = (base_s[p] + slope_s[p] * here) - (base_s[top] + slope_s[top] * here)
            if lead > 0 or (lead == 0 and slope_s[p] > slope_s[top]):
                top = p
        until = steps
        for p in range(len(base_s)):
            if slope_s[p] > slope_s[top]:
                crossing = (base_s[top] - base_s[p]) / (slope_s[p] - slope_s[top])
                until = min(until, max(done + 1, int(np.floor((crossing - kv) / n)) + 1))
        total += (until - done) * base_s[top] + slope_s[top] * context_sum(n, here, until - done)
        done = until
    return total


@njit(cache=True, error_model="numpy")
def context_sum(n: int, kv: int, steps: int) -> float:
    """Sum of kv + n k for k = 0 .. steps - 1."""
    return steps * float(kv) + n * (steps * (steps - 1.0) / 2)


@njit(cache=True, error_model="numpy")
def note(log: Records, counters: Ints, e: int, engine: Record, running: int, blocks: int) -> None:
    """Log that the next step of engine e runs so many requests, which then hold so many blocks."""
    entry = log[counters[LOG_LENGTH]]
    entry.engine = e
    entry.step = engine.step
    entry.time_s = engine.time_s
    entry.running = running
    entry.kv_tokens = blocks * engine.block_tokens
    counters[LOG_LENGTH] += 1
