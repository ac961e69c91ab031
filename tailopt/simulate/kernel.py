r"""The simulator's kernel: the schedule of :mod:`tailopt.simulate.vllm_scheduler`, from event to event.

While nobody is in prefill, nobody can be admitted, nobody finishes and the KV blocks last, an engine decodes
the same ``n`` requests step after step, and their context grows by ``n`` tokens a step. S such steps from
context K last, for :math:`\tau = f(n) + cK`,

.. math:: S\,f(n) + c\,(S K + n\,S(S-1)/2),

and for a maximum of such lines the same sum on each stretch where one line is the largest. With speculation,
g tokens a step on a clock at c, the context of step s is :math:`K + n (\lfloor c + s g \rfloor - \lfloor c
\rfloor)`, and the sum of such floors is found as in Euclid's algorithm. S is known ahead: the least of the
requests' own events in a heap, the step in which the blocks :math:`\sum_i \lceil (c_i + D) / B \rceil` run
out (c_i tokens computed, D tokens further, B tokens a block; only how many requests have which c_i mod B
matters), or the next arrival. All other steps are taken one by one, by the scheduler's rules, which need no
pass over the running requests either: all that decode get their tokens, and if the blocks do not suffice,
those admitted last go, after the free blocks have been taken; if nobody is in prefill, that step is already
the first of the next jump. So an event costs O(log running + B), whatever the lengths. Only where blocks run
out under priorities or speculation do requests take their blocks one by one.

**Several engines** meet in the shared queue and in review points; then the earliest acts first. A step or
jump is begun, and ended in its turn. When a review point is crossed, a pending jump is cut after the first
step that ends then or later, which bisection finds. Engines that share nothing run one after the other.

**Prefix cache.** The kernel keeps the block cache of :mod:`tailopt.simulate.vllm_cache` in the form that the
rules leave of it: each group has one *chain* of shared blocks an engine, held by so many requests or
standing in the free queue, and each request one stretch of blocks of its own behind it. Of both, only the
number of blocks that can still be found is kept, because blocks are always lost from the end. Under
priorities a request may be preempted after its last token has filled a block; that one is not found when it
comes back, and stays in the queue as a *leftover*, a second copy.

All bookkeeping is in whole tokens, blocks and steps (int64); only the clocks are floating point, and times
that are equal up to rounding are one instant (:mod:`tailopt.simulate.instants`). This is one
module because compiled code is cached by file.
"""

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.compiled import compiled, inlined
from tailopt.engine.speculation import TOKEN
from tailopt.simulate.instants import SLACK
from tailopt.simulate.records import (
    DONE,
    HEAP_FULL,
    IDLE,
    LOG_FULL,
    NEVER,
    NONE,
    PAGES,
    PASSED,
    REVIEW,
    RUNS_FULL,
    RUNS_LENGTH,
    STAYS_FULL,
    STAYS_LENGTH,
    UNFINISHED,
    UNITS_PULLED,
    Record,
    Records,
)

PAGE = 64
"""Entries on a page of the log; here, as the compiled code is kept while this file stays the same."""


@compiled
def run(
    requests: Records,
    available_s: Floats,
    shared_tokens: Ints,
    runs: Records,
    engines: Records,
    heaps: Records,
    phases: Ints,
    chains: Ints,
    own: Ints,
    unit_start: Ints,
    unit_member: Ints,
    unit_s: Floats,
    log: Records,
    stays: Records,
    counters: Ints,
    clock: Floats,
    marks: Ints,
    passed: Ints,
    watch: Floats,
    base_s: Floats,
    slope_s: Floats,
    pieces: Ints,
    tokens: Ints,
) -> int:
    """Carry the plan out from where the arrays stand.

    Returns DONE, or REVIEW if a review point is crossed, or what was too small: the caller then copies it
    into a larger array and calls again.

    Args:
        requests: ``[n]`` of REQUEST.
        available_s: ``[n]`` from when each can be admitted.
        shared_tokens: ``[n]`` leading tokens in blocks that it shares with its group.
        runs: of RUN.
        engines: ``[m]`` of ENGINE.
        heaps: ``[m, width]`` of ENTRY: requests that decode on each engine, a heap by when they are due.
        phases: ``[m, block_tokens]`` how many of them have which ``offset`` modulo ``block_tokens``.
        chains: ``[groups]`` the first of each group's runs.
        own: each engine's own requests, by arrival and then in the plan's order.
        unit_start: ``[units + 1]`` into ``unit_member``.
        unit_member: the shared queue, unit by unit.
        unit_s: ``[units]`` when all of a unit's requests have arrived, never falling.
        log: of LOG.
        stays: of STAY.
        counters: ``[COUNTERS]``.
        clock: ``[1]`` the time.
        marks: numbers of tokens that requests are watched for, rising.
        passed: for each of them, 1 if a request has passed it.
        watch: unfinished requests to stop at, 0 for none; 1 to stop for an engine without work; time to stop.
        base_s: ``[kinds, running + 1, pieces]`` step time at no context.
        slope_s: ``[kinds, pieces]`` step time per context token.
        pieces: ``[kinds]`` how many pieces are in use.
        tokens: ``[kinds, running + 1]`` what each request gains in a step, in units of 1 / TOKEN.
    """
    units = len(unit_start) - 1
    watched = watch[0] > 0 or watch[1] > 0 or watch[2] < NEVER or len(marks) > 0
    while counters[UNFINISHED] > 0 and (watched or counters[UNITS_PULLED] < units):
        e = next_engine(engines)
        next_s = engines[e].time_s if e != NONE else NEVER
        begins = e == NONE or not engines[e].in_step
        if watched:
            crossed = counters[PASSED] > 0 or counters[UNFINISHED] <= watch[0]
            if crossed and (next_s > clock[0] * SLACK or begins):
                return REVIEW
            if counters[IDLE] > 0 and next_s > clock[0] * SLACK:
                return REVIEW
            if watch[2] <= next_s * SLACK and (begins or next_s > watch[2] * SLACK):
                clock[0] = watch[2]
                return REVIEW
        clock[0] = max(clock[0], next_s)
        engine = engines[e]
        if begins:
            kind = engine.kind
            code = act(
                requests, available_s, shared_tokens, runs, engine, heaps[e], phases[e], chains, own,
                unit_start, unit_member, unit_s, log, stays, counters, marks, watch[1] > 0,
                base_s[kind, :, : pieces[kind]], slope_s[kind], tokens[kind], e,
            )  # fmt: skip
            if code != DONE:
                return code
        if engine.in_step and (not begins or not watched):
            end(requests, runs, engine, heaps[e], phases[e], stays, counters, marks, passed)
    for e in range(len(engines)):
        engine, heap, phase = engines[e], heaps[e], phases[e]
        kind = engine.kind
        base, slope, rates = base_s[kind, :, : pieces[kind]], slope_s[kind], tokens[kind]
        while not engine.done:
            code = act(
                requests, available_s, shared_tokens, runs, engine, heap, phase, chains, own,
                unit_start, unit_member, unit_s, log, stays, counters, marks, False, base, slope, rates, e,
            )  # fmt: skip
            if code != DONE:
                return code
            if engine.in_step:
                end(requests, runs, engine, heap, phase, stays, counters, marks, passed)
    return DONE


@compiled
def next_engine(engines: Records) -> int:
    """The engine that acts next: least time, ends before beginnings, then fewest requests, lowest number."""
    first_s = NEVER
    for e in range(len(engines)):
        if not engines[e].done:
            first_s = min(first_s, engines[e].time_s)
    best = NONE
    for e in range(len(engines)):
        here = engines[e]
        if here.done or here.time_s > first_s * SLACK:
            continue
        if best == NONE:
            best = e
            continue
        there = engines[best]
        if here.in_step != there.in_step:
            if here.in_step:
                best = e
        elif here.running + here.waiting < there.running + there.waiting:
            best = e
    return best


@compiled
def settle(
    requests: Records,
    runs: Records,
    engines: Records,
    heaps: Records,
    phases: Ints,
    stays: Records,
    counters: Ints,
    now_s: float,
    cut_s: float,
    marks: Ints,
    passed: Ints,
    base_s: Floats,
    slope_s: Floats,
    pieces: Ints,
    tokens: Ints,
) -> None:
    """Let every engine end its step, jumps at ``cut_s``, and write what its requests have at a review."""
    for e in range(len(engines)):
        engine, heap = engines[e], heaps[e]
        if engine.in_step:
            if engine.jump > 0 and engine.time_s > cut_s:
                kind, n = engine.kind, engine.decoding
                base = base_s[kind, n, : pieces[kind]]
                cut(engine, base, slope_s[kind], tokens[kind, n], engine.jump, cut_s)
            end(requests, runs, engine, heap, phases[e], stays, counters, marks, passed)
        else:
            engine.time_s = max(now_s, engine.ready_s)
        for place in range(engine.decoding):
            request = requests[heap[place].request]
            request.computed = request.offset + engine.gained
            request.generated = request.computed + 1 - request.prompt_tokens


@compiled
def take_off(
    requests: Records,
    runs: Records,
    engines: Records,
    heaps: Records,
    phases: Ints,
    stays: Records,
    leaving: Ints,
) -> None:
    """Take those marked in ``leaving`` off their engines, in running order."""
    for e in range(len(engines)):
        engine = engines[e]
        i = engine.run_head
        while i != NONE:
            after = requests[i].run_next
            if leaving[i]:
                held, full = holding(requests, engine, i, False)
                if i == engine.prefilling:
                    engine.prefilling = NONE
                else:
                    settle_deficit(engine, requests[i])
                    stop_decode(requests, engine, heaps[e], phases[e], i)
                leave(requests, runs, engine, stays, i, held, full, engine.time_s)
                requests[i].engine = NONE
            i = after


@compiled
def rekey(requests: Records, engines: Records, heaps: Records, marks: Ints) -> None:
    """Put the heaps in order after limits and marks have changed."""
    for e in range(len(engines)):
        engine, heap = engines[e], heaps[e]
        for place in range(engine.decoding):
            heap[place].due = due(engine, requests[heap[place].request], marks)
        for place in range(engine.decoding):
            sift_up(requests, heap, place, heap[place].request, heap[place].due)


@compiled
def last_notes(engines: Records, log: Records, counters: Ints) -> int:
    """Say in the log of each engine that nothing runs there any more."""
    if counters[PAGES] + len(engines) > len(log) // PAGE:
        return LOG_FULL
    for e in range(len(engines)):
        rest(log, counters, e, engines[e])
    return DONE


@compiled
def act(
    requests: Records,
    available_s: Floats,
    shared_tokens: Ints,
    runs: Records,
    engine: Record,
    heap: Records,
    phase: Ints,
    chains: Ints,
    own: Ints,
    unit_start: Ints,
    unit_member: Ints,
    unit_s: Floats,
    log: Records,
    stays: Records,
    counters: Ints,
    marks: Ints,
    watch_idle: bool,
    base_s: Floats,
    slope_s: Floats,
    tokens: Ints,
    e: int,
) -> int:
    """The engine's turn: let requests in; then jump, or begin a step, or wait, or be done."""
    if counters[PAGES] + 2 > len(log) // PAGE:
        return LOG_FULL
    now_s = engine.time_s * SLACK
    while engine.next_own < engine.end_own and available_s[own[engine.next_own]] <= now_s:
        if counters[RUNS_LENGTH] + 2 > len(runs):
            return RUNS_FULL
        enqueue(requests, shared_tokens, runs, engine, chains, counters, own[engine.next_own], e)
        engine.next_own += 1
    until_s = NEVER
    unit = counters[UNITS_PULLED]
    if engine.hungry and unit < len(unit_start) - 1:
        first, behind = unit_start[unit], unit_start[unit + 1]
        if unit_s[unit] > now_s:
            until_s = unit_s[unit]
        elif has_room(engine, requests[unit_member[first]]):
            if counters[RUNS_LENGTH] + 2 * (behind - first) > len(runs):
                return RUNS_FULL
            for place in range(first, behind):
                enqueue(requests, shared_tokens, runs, engine, chains, counters, unit_member[place], e)
            counters[UNITS_PULLED] += 1
            return DONE
        else:
            engine.hungry = False
    if engine.next_own < engine.end_own:
        until_s = min(until_s, available_s[own[engine.next_own]])
    if engine.running + engine.waiting == 0:
        rest(log, counters, e, engine)
        engine.time_s = until_s
        engine.done = until_s == NEVER
        if engine.done and watch_idle:
            counters[IDLE] += 1
        return DONE
    most = min(engine.max_running, engine.waiting)
    if counters[STAYS_LENGTH] + most > len(stays):
        return STAYS_FULL
    if engine.priority and counters[RUNS_LENGTH] + most > len(runs):
        return RUNS_FULL
    if max(engine.running, min(engine.max_running, engine.running + engine.waiting)) > len(heap):
        return HEAP_FULL
    if engine.time_s > engine.ready_s * SLACK:
        rest(log, counters, e, engine)
    steps = 0
    if engine.steady:
        steps = steps_ahead(requests, engine, heap, phase, tokens[engine.decoding])
        if steps == 0 and not engine.priority and engine.lookahead == 0:
            steps = make_room(requests, runs, engine, heap, phase, stays, tokens)
    if steps > 0:
        n = engine.decoding
        in_use = engine.blocks - engine.free + grown(engine, phase, 0) + engine.deficit
        note(log, counters, e, engine, engine.time_s, n, in_use)
        cut(engine, base_s[n], slope_s, tokens[n], steps, until_s)
    else:
        step(requests, runs, engine, heap, phase, log, stays, counters, marks, base_s, slope_s, tokens, e)
    engine.in_step = True
    return DONE


@inlined
def cut(engine: Record, base_s: Floats, slope_s: Floats, tokens: int, steps: int, until_s: float) -> None:
    """Plan a jump of ``steps`` steps, or fewer, to the first that ends at ``until_s`` or later."""
    n, kv, clock = engine.decoding, engine.next_kv, engine.tokens % TOKEN
    begin_s = engine.ready_s if engine.in_step else engine.time_s
    lasts_s = seconds(base_s, slope_s, n, kv, steps, tokens, clock)
    if begin_s + lasts_s > until_s:
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            if (begin_s + seconds(base_s, slope_s, n, kv, middle, tokens, clock)) * SLACK >= until_s:
                high = middle
            else:
                low = middle
        steps = high
        lasts_s = seconds(base_s, slope_s, n, kv, steps, tokens, clock)
    engine.ready_s = begin_s
    engine.jump = steps
    engine.time_s = begin_s + lasts_s


@inlined
def end(
    requests: Records,
    runs: Records,
    engine: Record,
    heap: Records,
    phase: Ints,
    stays: Records,
    counters: Ints,
    marks: Ints,
    passed: Ints,
) -> None:
    """End the jump or step that the engine is in."""
    if engine.jump > 0:
        gain, before = total_gain(engine, engine.jump), total_gain(engine, engine.jump - 1)
        take(runs, engine, grown(engine, phase, before) + engine.deficit)
        engine.deficit = 0
        engine.step += engine.jump
        engine.tokens += engine.jump * engine.rate
        engine.next_kv += engine.decoding * gain
        engine.gained += gain
        engine.last_gain = gain - before
        engine.jump = 0
    engine.ready_s = engine.time_s
    engine.in_step = False
    finish(requests, runs, engine, heap, phase, stays, counters, marks, passed)


@compiled
def has_room(engine: Record, request: Record) -> bool:
    """Whether the engine may pull a request: a place, and blocks for it and for all that wait there."""
    need = engine.waiting_blocks + blocks_of(engine, tokens_of(request))
    return bool(engine.running + engine.waiting < engine.max_running and need <= engine.free)


@compiled
def enqueue(
    requests: Records,
    shared_tokens: Ints,
    runs: Records,
    engine: Record,
    chains: Ints,
    counters: Ints,
    i: int,
    e: int,
) -> None:
    """Let request i wait on engine e: at the end, or at the place of its priority."""
    request = requests[i]
    request.engine = e
    request.shared_blocks = shared_tokens[i] // engine.block_tokens if engine.prefix_caching else 0
    request.own = run_on(runs, counters, request.own, e)
    request.chain = NONE
    if request.shared_blocks > 0:
        chains[request.group] = request.chain = run_on(runs, counters, chains[request.group], e)
    if engine.priority:
        wait_in_order(requests, engine, i)
    else:
        request.wait_next = NONE
        if engine.waiting == 0:
            engine.wait_head = i
        else:
            requests[engine.wait_tail].wait_next = i
        engine.wait_tail = i
        engine.waiting += 1
        engine.waiting_blocks += blocks_of(engine, tokens_of(request))
    engine.steady = False


@compiled
def run_on(runs: Records, counters: Ints, first: int, e: int) -> int:
    """The run on engine e of a list of runs, a new one if there is none; put first of the list."""
    before, r = NONE, first
    while r != NONE and runs[r].engine != e:
        before, r = r, runs[r].sibling
    if r == NONE:
        r = counters[RUNS_LENGTH]
        counters[RUNS_LENGTH] += 1
        run = runs[r]
        run.blocks = run.holders = 0
        run.leftovers = NONE
        run.engine = e
    elif before != NONE:
        runs[before].sibling = runs[r].sibling
    else:
        return int(r)
    runs[r].sibling = first
    return int(r)


@compiled
def wait_in_order(requests: Records, engine: Record, i: int) -> None:
    """Put request i among the waiting ones by its place in the plan's order."""
    before, after = NONE, engine.wait_head if engine.waiting > 0 else NONE
    if after != NONE and requests[engine.wait_tail].position < requests[i].position:
        before, after = engine.wait_tail, NONE
    while after != NONE and requests[after].position < requests[i].position:
        before, after = after, requests[after].wait_next
    requests[i].wait_next = after
    if before == NONE:
        engine.wait_head = i
    else:
        requests[before].wait_next = i
    if after == NONE:
        engine.wait_tail = i
    engine.waiting += 1
    engine.waiting_blocks += blocks_of(engine, tokens_of(requests[i]))


@compiled
def tokens_of(request: Record) -> int:
    """Tokens of the prompt and generated so far, of a request that does not decode."""
    return int(request.prompt_tokens + request.generated)


@compiled
def blocks_of(engine: Record, tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return int((tokens + engine.block_tokens - 1) // engine.block_tokens)


@compiled
def total_gain(engine: Record, steps: int) -> int:
    """Tokens that each request gains in so many steps of the jump that the engine is in."""
    if engine.rate == TOKEN:
        return steps
    return int((engine.tokens % TOKEN + steps * engine.rate) // TOKEN)


@inlined
def steps_ahead(requests: Records, engine: Record, heap: Records, phase: Ints, tokens: int) -> int:
    """Steps up to the next request that is due, or fewer if the free blocks do not last that long."""
    engine.rate = tokens
    gain = int(heap[0].due - engine.gained)
    steps = gain
    if tokens != TOKEN:
        steps = int(-((engine.tokens % TOKEN - gain * TOKEN) // tokens))
    size, free = engine.block_tokens, engine.free - engine.deficit
    rounds = free // engine.decoding  # each takes ``size`` tokens and one block of everybody
    if (gain + engine.last_gain) // size < rounds:
        return steps
    left = free - rounds * engine.decoding
    enough = rounds * size - engine.last_gain  # tokens from now for which the blocks last, see ``grown``
    offset = first_to_take(engine)
    while phase[offset] <= left:
        left -= phase[offset]
        enough += 1
        offset = offset - 1 if offset > 0 else size - 1
    if enough < 0:
        return 0
    before = ((enough + 1) * TOKEN - 1 - engine.tokens % TOKEN) // tokens
    return min(steps, int(before) + 1)


@compiled
def first_to_take(engine: Record) -> int:
    """The offset, modulo ``block_tokens``, of those in decode that are the first to take a block."""
    return int(-(1 + engine.gained - engine.last_gain + engine.lookahead) % engine.block_tokens)


@inlined
def grown(engine: Record, phase: Ints, further: int) -> int:
    """Blocks that those that decode take for their next token, ``further`` tokens from now.

    By the rule each holds blocks for the tokens that it had before the last step, and for the drafts. A
    token takes a block if those before it fill all.
    """
    size = engine.block_tokens
    tokens = further + engine.last_gain
    taken = engine.decoding * (tokens // size)
    offset = first_to_take(engine)
    for _ in range(tokens % size):
        taken += phase[offset]
        offset = offset - 1 if offset > 0 else size - 1
    return int(taken)


@inlined
def holding(requests: Records, engine: Record, i: int, scheduled: bool) -> tuple[int, int]:
    """Blocks that a running request holds, ``scheduled`` in this step or not, and how many can be found."""
    request, size = requests[i], engine.block_tokens
    if i == engine.prefilling:
        held, full = blocks_of(engine, request.computed), request.computed // size
    else:
        now = request.offset + engine.gained + 1
        if scheduled:
            held, full = blocks_of(engine, now + engine.lookahead), now // size
        elif engine.lookahead > 0 and request.odd_step == engine.step:
            held, full = request.held_blocks, request.full_blocks
        else:
            before = now - engine.last_gain
            held, full = blocks_of(engine, before + engine.lookahead), before // size
    return int(held), int(full if engine.prefix_caching else 0)


@inlined
def step(
    requests: Records,
    runs: Records,
    engine: Record,
    heap: Records,
    phase: Ints,
    log: Records,
    stays: Records,
    counters: Ints,
    marks: Ints,
    base_s: Floats,
    slope_s: Floats,
    tokens: Ints,
    e: int,
) -> None:
    """One step by the scheduler's rules: running requests, preemption, admission, then the clock."""
    preempted, skipped = False, NONE
    lacking = grown(engine, phase, 0) + engine.deficit
    if lacking <= engine.free:
        take(runs, engine, lacking)
        engine.deficit = 0
    elif engine.priority or engine.lookahead > 0:
        skipped = take_in_turn(requests, runs, engine, heap, phase, stays)
        preempted = True
    else:
        take_or_preempt(requests, runs, engine, heap, phase, stays)
        preempted = True
    budget = engine.token_budget - engine.decoding * (1 + engine.lookahead)
    sampling, kv, prefill = engine.decoding, engine.next_kv, 0
    fresh = 0  # requests whose prompts are complete after this step: the last ones of the list
    if engine.prefilling != NONE and budget > 0 and skipped == NONE:
        i = engine.prefilling
        chunk = min(tokens_of(requests[i]) - requests[i].computed, budget)
        lacking = blocks_of(engine, requests[i].computed + chunk) - blocks_of(engine, requests[i].computed)
        while lacking > engine.free and engine.prefilling == i:
            preempt(requests, runs, engine, heap, phase, stays, victim(requests, engine), True)
            preempted = True
        sampling, kv = engine.decoding, engine.next_kv
        if engine.prefilling == i:
            compute(requests, runs, engine, i, chunk)
            budget -= chunk
            prefill += chunk
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
        prefill += chunk
        if requests[i].computed == tokens_of(requests[i]):
            fresh += 1
            kv += tokens_of(requests[i]) + 1
        else:
            engine.prefilling = i
    sampling += fresh
    blocked = engine.waiting == 0 or engine.running >= engine.max_running or not fits(requests, runs, engine)
    engine.steady = blocked and engine.prefilling == NONE

    note(log, counters, e, engine, engine.time_s, engine.running, engine.blocks - engine.free)
    engine.step += 1
    engine.time_s += (prefill - fresh) * engine.prefill_s
    if sampling > 0:
        rate = tokens[sampling]
        engine.time_s += seconds(base_s[sampling], slope_s, sampling, kv, 1)
        engine.last_gain = (engine.tokens + rate) // TOKEN - engine.tokens // TOKEN
        engine.tokens += rate
        engine.gained += engine.last_gain
        engine.next_kv += engine.decoding * engine.last_gain
    else:
        engine.time_s += largest(base_s[0])
    i = engine.run_tail if engine.prefilling == NONE else requests[engine.run_tail].run_previous
    for _ in range(fresh):
        request = requests[i]
        request.held_blocks = blocks_of(engine, request.computed)
        request.full_blocks = request.computed // engine.block_tokens
        if request.generated == 0:
            request.first_token_s = engine.time_s
        request.generated += 1
        start_decode(requests, engine, heap, phase, marks, i)
        i = request.run_previous
    while skipped != NONE and skipped != engine.prefilling:
        start_decode(requests, engine, heap, phase, marks, skipped)
        skipped = requests[skipped].run_next


@inlined
def take_or_preempt(
    requests: Records, runs: Records, engine: Record, heap: Records, phase: Ints, stays: Records
) -> None:
    """Blocks for the next token of all that decode; they do not suffice, so some requests have to go.

    In running order each that needs a block takes one; when none is free, the last running requests go until
    one is. So the free blocks are all taken before the first one goes.
    """
    lacking = grown(engine, phase, 0)
    while lacking > engine.free:
        lacking -= engine.free
        take(runs, engine, engine.free)
        last = requests[engine.run_tail]
        if engine.run_tail != engine.prefilling and (last.offset + engine.gained) % engine.block_tokens == 0:
            lacking -= 1
        preempt(requests, runs, engine, heap, phase, stays, engine.run_tail, False)
    take(runs, engine, lacking)


@inlined
def make_room(
    requests: Records, runs: Records, engine: Record, heap: Records, phase: Ints, stays: Records, tokens: Ints
) -> int:
    """Nobody is in prefill, and blocks do not last for a step: preempt for it, and jump on from there.

    Nobody is admitted in that step. Nor later, up to the end of the jump, if the first in line does not fit
    now: while all decode, what it needs stays the same, and free blocks become fewer.
    """
    take_or_preempt(requests, runs, engine, heap, phase, stays)
    engine.deficit = -grown(engine, phase, 0)  # the jump takes the blocks of all its steps
    engine.steady = not fits(requests, runs, engine)
    return steps_ahead(requests, engine, heap, phase, tokens[engine.decoding]) if engine.steady else 1


@compiled
def take_in_turn(
    requests: Records, runs: Records, engine: Record, heap: Records, phase: Ints, stays: Records
) -> int:
    """The same, one by one: several blocks may be needed, and any request may have to go.

    If that is the one whose turn it is, nobody after it is computed in this step: the first of these is
    returned, all are taken out of those that decode, and the caller puts them back.
    """
    i = engine.run_head
    while i != NONE and i != engine.prefilling:
        request = requests[i]
        held, _ = holding(requests, engine, i, False)
        need = blocks_of(engine, request.offset + engine.gained + 1 + engine.lookahead) - held
        after = request.run_next
        while need > engine.free:
            v = victim(requests, engine)
            if v == after:
                after = requests[v].run_next
            preempt(requests, runs, engine, heap, phase, stays, v, requests[v].stay < request.stay)
            if v == i:
                skipped = after
                while after != NONE and after != engine.prefilling:
                    late = requests[after]
                    late.held_blocks, late.full_blocks = holding(requests, engine, after, False)
                    stop_decode(requests, engine, heap, phase, after)
                    after = late.run_next
                engine.deficit = 0
                return int(skipped)
        take(runs, engine, need)
        i = after
    engine.deficit = 0
    return NONE


@compiled
def victim(requests: Records, engine: Record) -> int:
    """Who goes when blocks run out: the one admitted last, or the least important."""
    worst = engine.run_tail
    if engine.priority:
        i = engine.run_head
        while i != NONE:
            if requests[i].position > requests[worst].position:
                worst = i
            i = requests[i].run_next
    return int(worst)


@compiled
def due(engine: Record, request: Record, marks: Ints) -> int:
    """What the engine has gained when this request is over, or passes its next mark."""
    tokens = request.limit
    if request.mark < len(marks):
        tokens = min(tokens, marks[request.mark])
    return int(engine.gained + tokens - request.generated)


@inlined
def start_decode(requests: Records, engine: Record, heap: Records, phase: Ints, marks: Ints, i: int) -> None:
    """From the step just taken on, request i decodes; all its tokens but the last are computed."""
    request = requests[i]
    request.offset = request.computed - engine.gained
    phase[request.offset % engine.block_tokens] += 1
    engine.next_kv += request.computed + 2
    sift_up(requests, heap, engine.decoding, i, due(engine, request, marks))
    engine.decoding += 1
    if engine.lookahead > 0:
        request.odd_step = engine.step
        engine.deficit += rule(engine, request) - request.held_blocks


@inlined
def stop_decode(requests: Records, engine: Record, heap: Records, phase: Ints, i: int) -> None:
    """Take a request out of those that decode; what it has so far is kept."""
    request = requests[i]
    request.computed = request.offset + engine.gained
    request.generated = request.computed + 1 - request.prompt_tokens
    phase[request.offset % engine.block_tokens] -= 1
    engine.next_kv -= request.computed + 2
    engine.decoding -= 1
    hole, last = request.heap_place, heap[engine.decoding]
    if hole != engine.decoding:
        place = sift_up(requests, heap, hole, last.request, last.due)
        sift_down(requests, heap, engine.decoding, place, last.request, last.due)


@compiled
def rule(engine: Record, request: Record) -> int:
    """Blocks that a request that decodes holds between two steps if it decoded in the last one."""
    return blocks_of(engine, request.offset + engine.gained + 1 - engine.last_gain + engine.lookahead)


@compiled
def settle_deficit(engine: Record, request: Record) -> None:
    """A request that decodes is about to leave between two steps."""
    if engine.lookahead > 0 and request.odd_step == engine.step:
        engine.deficit -= rule(engine, request) - request.held_blocks


@inlined
def finish(
    requests: Records,
    runs: Records,
    engine: Record,
    heap: Records,
    phase: Ints,
    stays: Records,
    counters: Ints,
    marks: Ints,
    passed: Ints,
) -> None:
    """Let requests that have all their tokens go, in running order, and see who has passed a mark."""
    done = 0  # those that are finished stand at the end of the heap's array, sorted by admission
    while engine.decoding > 0 and heap[0].due <= engine.gained:
        i = heap[0].request
        request = requests[i]
        generated = request.offset + engine.gained + 1 - request.prompt_tokens
        if generated < request.limit:
            while request.mark < len(marks) and marks[request.mark] <= generated:
                passed[request.mark] = 1
                counters[PASSED] += 1
                request.mark += 1
            request.generated = generated
            sift_down(requests, heap, engine.decoding, 0, i, due(engine, request, marks))
            continue
        settle_deficit(engine, request)
        request.held_blocks, request.full_blocks = holding(requests, engine, i, False)
        stop_decode(requests, engine, heap, phase, i)
        request.generated = request.limit
        done += 1
        place = engine.decoding
        while (
            place + 1 < engine.decoding + done
            and requests[heap[place + 1].request].stay < requests[i].stay
        ):  # fmt: skip
            heap[place].request = heap[place + 1].request
            place += 1
        heap[place].request = i
    if done == 0:
        return
    for place in range(engine.decoding, engine.decoding + done):
        i = heap[place].request
        request = requests[i]
        request.finish_s = engine.time_s
        leave(requests, runs, engine, stays, i, request.held_blocks, request.full_blocks, engine.time_s)
    counters[UNFINISHED] -= done
    engine.hungry = True
    engine.steady = engine.steady and engine.waiting == 0


@inlined
def preempt(
    requests: Records,
    runs: Records,
    engine: Record,
    heap: Records,
    phase: Ints,
    stays: Records,
    i: int,
    scheduled: bool,
) -> None:
    """Request i loses its blocks and waits at the very front, or at the place of its priority."""
    held, full = holding(requests, engine, i, scheduled)
    if i == engine.prefilling:
        engine.prefilling = NONE
    else:
        stop_decode(requests, engine, heap, phase, i)
    leave(requests, runs, engine, stays, i, held, full, engine.time_s)
    requests[i].preemptions += 1
    if engine.priority:
        wait_in_order(requests, engine, i)
        return
    if engine.waiting == 0:
        engine.wait_tail = i
    requests[i].wait_next = engine.wait_head if engine.waiting > 0 else NONE
    engine.wait_head = i
    engine.waiting += 1
    engine.waiting_blocks += blocks_of(engine, tokens_of(requests[i]))


@inlined
def leave(
    requests: Records,
    runs: Records,
    engine: Record,
    stays: Records,
    i: int,
    held: int,
    full: int,
    time_s: float,
) -> None:
    """A request runs no more: out of the list, end of its stay, and its blocks are released."""
    request = requests[i]
    before, after = request.run_previous, request.run_next
    if before != NONE:
        requests[before].run_next = after
    else:
        engine.run_head = after
    if after != NONE:
        requests[after].run_previous = before
    else:
        engine.run_tail = before
    engine.running -= 1
    stays[request.stay].end_s = time_s
    request.stay = NONE
    request.computed = 0
    release(runs, engine, request, held, full)


@inlined
def fits(requests: Records, runs: Records, engine: Record) -> bool:
    """Whether there are blocks for all tokens of the first in line; what it finds need not be free."""
    request = requests[engine.wait_head]
    found, standing = found_blocks(runs, engine, request)
    return bool(blocks_of(engine, tokens_of(request)) - found + standing <= engine.free)


@inlined
def found_blocks(runs: Records, engine: Record, request: Record) -> tuple[int, int]:
    """Blocks of a waiting request that can be found, and how many of them stand in the free queue."""
    found, standing = 0, 0
    if request.chain != NONE:
        chain = runs[request.chain]
        found = chain.blocks
        if chain.holders == 0:
            standing = chain.blocks
    if found == request.shared_blocks:
        own = runs[request.own]
        most = (tokens_of(request) - 1) // engine.block_tokens
        here = min(own.blocks, most - found)
        found += here
        standing += here
        while own.leftovers != NONE and found < most and leftover_at(runs, own, found) != NONE:
            found += 1
            standing += 1
    return found, standing


@compiled
def leftover_at(runs: Records, own: Record, index: int) -> int:
    """The leftover of a request's block ``index``, or NONE."""
    r = own.leftovers
    while r != NONE and not (runs[r].blocks == 1 and runs[r].index == index):
        r = runs[r].sibling
    return int(r)


@inlined
def admit(requests: Records, runs: Records, engine: Record, stays: Records, counters: Ints, e: int) -> None:
    """Let the first in line run; it holds what it finds in the prefix cache."""
    i = engine.wait_head
    request = requests[i]
    engine.wait_head = request.wait_next
    engine.waiting -= 1
    engine.waiting_blocks -= blocks_of(engine, tokens_of(request))
    found, _ = found_blocks(runs, engine, request)
    from_chain = 0
    if request.chain != NONE:
        chain = runs[request.chain]
        from_chain = chain.blocks
        if chain.holders == 0 and chain.blocks > 0:
            unlink(runs, engine, request.chain)
            engine.free -= chain.blocks
        chain.holders += 1
    own = runs[request.own]
    if own.leftovers != NONE or own.blocks > found - from_chain:
        sort_out_leftovers(runs, engine, counters, request.own, from_chain, found)
    if own.blocks > 0:
        unlink(runs, engine, request.own)
        engine.free -= own.blocks
        own.blocks = 0
    request.computed = found * engine.block_tokens
    if request.kv_sent:
        request.computed = tokens_of(request) - 1
        take(runs, engine, blocks_of(engine, request.computed) - found)
        request.kv_sent = False
    request.run_previous, request.run_next = engine.run_tail, NONE
    if engine.run_tail != NONE:
        requests[engine.run_tail].run_next = i
    else:
        engine.run_head = i
    engine.run_tail = i
    engine.running += 1
    if np.isnan(request.start_s):
        request.start_s = engine.time_s
    request.ran_on = e
    request.stay = counters[STAYS_LENGTH]
    counters[STAYS_LENGTH] += 1
    stay = stays[request.stay]
    stay.request = i
    stay.event = engine.event


@compiled
def sort_out_leftovers(runs: Records, engine: Record, counters: Ints, r: int, first: int, found: int) -> None:
    """A request finds its blocks from ``first`` to below ``found``: what it does not hold is left over.

    Its own run is left with those found; where an older copy of one of them is held instead, the run's stays
    in its place in the free queue.
    """
    own = runs[r]
    behind = first + own.blocks
    if behind > found:
        leftover = counters[RUNS_LENGTH]
        counters[RUNS_LENGTH] += 1
        extra = runs[leftover]
        extra.blocks, extra.index, extra.sibling = 1, found, own.leftovers
        own.leftovers = leftover
        insert_before(runs, engine, leftover, r)
        own.blocks -= 1
        behind = found
        extra.older = True
    for index in range(behind, found):  # only leftovers are left of these
        leftover = leftover_at(runs, own, index)
        unlink(runs, engine, leftover)
        runs[leftover].blocks = 0
        engine.free -= 1
    for index in range(found - 1, first - 1, -1):
        leftover = leftover_at(runs, own, index)
        if leftover != NONE and runs[leftover].older:
            unlink(runs, engine, leftover)
            insert_before(runs, engine, leftover, r)
            runs[leftover].older = False
    leftover = own.leftovers
    while leftover != NONE:
        if runs[leftover].index >= found:
            runs[leftover].older = True
        leftover = runs[leftover].sibling


@inlined
def compute(requests: Records, runs: Records, engine: Record, i: int, chunk: int) -> None:
    """Compute the next ``chunk`` tokens of a prefill; full blocks of its chain can be found at once."""
    request = requests[i]
    before = blocks_of(engine, request.computed)
    request.computed += chunk
    take(runs, engine, blocks_of(engine, request.computed) - before)
    if request.chain != NONE:
        chain = runs[request.chain]
        full = min(request.computed // engine.block_tokens, request.shared_blocks)
        chain.blocks = max(chain.blocks, full)


@inlined
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


@inlined
def release(runs: Records, engine: Record, request: Record, held: int, full: int) -> None:
    """A request gives its blocks back: its own that can be found to the end of the queue, then the chain."""
    engine.blank += held - full
    engine.free += held - full
    if full > request.shared_blocks:
        own = runs[request.own]
        own.blocks = full - request.shared_blocks
        engine.free += own.blocks
        append(runs, engine, request.own)
    if request.chain != NONE:
        chain = runs[request.chain]
        chain.holders -= 1
        if chain.holders == 0 and chain.blocks > 0:
            engine.free += chain.blocks
            append(runs, engine, request.chain)


@inlined
def append(runs: Records, engine: Record, r: int) -> None:
    """Put a run at the end of the free queue."""
    runs[r].previous, runs[r].next = engine.queue_tail, NONE
    if engine.queue_tail == NONE:
        engine.queue_head = r
    else:
        runs[engine.queue_tail].next = r
    engine.queue_tail = r


@compiled
def insert_before(runs: Records, engine: Record, r: int, after: int) -> None:
    """Put a run into the free queue before another."""
    before = runs[after].previous
    runs[r].previous, runs[r].next = before, after
    runs[after].previous = r
    if before == NONE:
        engine.queue_head = r
    else:
        runs[before].next = r


@inlined
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


@inlined
def sift_up(requests: Records, heap: Records, place: int, i: int, key: int) -> int:
    """Put request i, due at ``key``, where it belongs at or above ``place``; returns where."""
    while place > 0:
        parent = (place - 1) // 2
        other = heap[parent]
        if other.due <= key:
            break
        put(requests, heap, place, other.request, other.due)
        place = parent
    put(requests, heap, place, i, key)
    return place


@inlined
def sift_down(requests: Records, heap: Records, size: int, place: int, i: int, key: int) -> None:
    """Put request i, due at ``key``, where it belongs at or below ``place``."""
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and heap[child + 1].due < heap[child].due:
            child += 1
        other = heap[child]
        if key <= other.due:
            break
        put(requests, heap, place, other.request, other.due)
        place = child
    put(requests, heap, place, i, key)


@inlined
def put(requests: Records, heap: Records, place: int, i: int, key: int) -> None:
    """Request i, due at ``key``, stands at this place of the heap."""
    entry = heap[place]
    entry.due = key
    entry.request = i
    requests[i].heap_place = place


@inlined
def seconds(
    base_s: Floats, slope_s: Floats, n: int, kv: int, steps: int, tokens: int = TOKEN, clock: int = 0
) -> float:
    """Duration of ``steps`` steps of n requests, the first of which holds ``kv`` tokens.

    Each gains ``tokens`` / TOKEN a step, on a clock that stands at ``clock`` / TOKEN, below 1.
    """
    if len(base_s) == 1:
        return float(steps * base_s[0] + slope_s[0] * context_sum(n, kv, steps, tokens, clock))
    total, done = 0.0, 0
    while done < steps:
        here = kv + n * gain_of(tokens, clock, done)
        top = 0
        for p in range(1, len(base_s)):
            lead = (base_s[p] + slope_s[p] * here) - (base_s[top] + slope_s[top] * here)
            if lead > 0 or (lead == 0 and slope_s[p] > slope_s[top]):
                top = p
        until = steps
        for p in range(len(base_s)):
            if slope_s[p] > slope_s[top]:
                crossing = (base_s[top] - base_s[p]) / (slope_s[p] - slope_s[top])
                gain = int(np.floor((crossing - kv) / n)) + 1  # tokens a request, after which p is on top
                if tokens != TOKEN:
                    gain = -((clock - min(gain, 1 << 40) * TOKEN) // tokens)  # steps
                until = min(until, max(done + 1, gain))
        ahead = context_sum(n, kv, until, tokens, clock) - context_sum(n, kv, done, tokens, clock)
        if tokens == TOKEN:
            ahead = context_sum(n, here, until - done, tokens, clock)
        total += (until - done) * base_s[top] + slope_s[top] * ahead
        done = until
    return total


@compiled
def gain_of(tokens: int, clock: int, steps: int) -> int:
    """Whole tokens that a request gains in so many steps."""
    if tokens == TOKEN:
        return steps
    return (clock + steps * tokens) // TOKEN


@compiled
def largest(values: Floats) -> float:
    """The largest of some numbers."""
    best = values[0]
    for value in values:
        best = max(best, value)
    return float(best)


@compiled
def context_sum(n: int, kv: int, steps: int, tokens: int, clock: int) -> float:
    """Sum of kv + n floor((clock + k tokens) / TOKEN) for k = 0 .. steps - 1."""
    if tokens == TOKEN:
        return steps * float(kv) + n * (steps * (steps - 1.0) / 2)
    return float(steps * kv + n * floor_sum(steps, TOKEN, tokens, clock))


@compiled
def floor_sum(steps: int, size: int, rate: int, start: int) -> int:
    """Sum of floor((start + k rate) / size) for k = 0 .. steps - 1, by Euclid's algorithm on (rate, size)."""
    total = 0
    while steps > 0:
        total += (steps - 1) * steps // 2 * (rate // size) + steps * (start // size)
        rate, start = rate % size, start % size
        top = steps * rate + start
        steps, start = top // size, top % size
        size, rate = rate, size
    return total


@inlined
def rest(log: Records, counters: Ints, e: int, engine: Record) -> None:
    """Say in the log that nothing runs from the end of the last step on."""
    if not engine.rests:
        note(log, counters, e, engine, engine.ready_s, 0, 0)
    engine.rests = True


@inlined
def note(
    log: Records, counters: Ints, e: int, engine: Record, time_s: float, running: int, blocks: int
) -> None:
    """Log that the next step of engine e runs so many requests, which then hold so many blocks."""
    entry = log[engine.event]
    entry.step = engine.step
    entry.time_s = time_s
    entry.use = blocks * engine.log_width + running
    engine.event += 1
    if engine.event % PAGE == 0:
        engine.event = new_page(log, counters, e)
    engine.rests = False


@compiled
def new_page(log: Records, counters: Ints, e: int) -> int:
    """A new page of the log, for engine e; returns its first entry."""
    at = int(counters[PAGES]) * PAGE
    counters[PAGES] += 1
    log[at].step = e
    return at + 1
