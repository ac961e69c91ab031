r"""The simulator's kernel: the reference's schedule, jumped from event to event.

Between two events of an engine (a request finishes, or the KV cache runs out) the same ``n`` requests run,
and their context grows by ``n`` tokens a step. A jump of S steps from context K therefore lasts, for
:math:`\tau = f(n) + cK`,

.. math:: S\,f(n) + c\,(S K + n\,S(S-1)/2),

and for a maximum of such lines the same sum on each stretch where one line is the largest. The next event
is known ahead: the least finishing step in a heap, or :math:`\lfloor (M - K)/n \rfloor + 1` steps, after
which the cache of M tokens is full. The cost is O(log running) a request and event, whatever the lengths.

All bookkeeping is in whole tokens and steps (int64); only the clocks are floating point. Requests and engines
are records of structured arrays, so that one request's fields share a cache line.
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
        ("remaining", np.int64),  # tokens to go, kept current while not running
        ("finish_step", np.int64),  # the engine's step after which it is done, while running
        ("heap_place", np.int64),
        ("wait_next", np.int64),  # the engine's own queue, a linked list
        ("run_next", np.int64),  # the running requests in the order of admission, a linked list
        ("run_previous", np.int64),
        ("engine", np.int64),
        ("preemptions", np.int64),
        ("start_s", np.float64),
        ("first_token_s", np.float64),
        ("finish_s", np.float64),
    ],
    align=True,
)
ENGINE = np.dtype(
    [
        ("shape", np.int64),  # row of the step-time lines
        ("max_running", np.int64),
        ("kv_capacity_tokens", np.int64),
        ("wait_head", np.int64),
        ("wait_tail", np.int64),
        ("run_tail", np.int64),
        ("waiting", np.int64),
        ("running", np.int64),
        ("fresh", np.int64),  # requests admitted since the last jump; they are the last ones of the list
        ("next_kv", np.int64),  # KV tokens that the next step needs
        ("step", np.int64),  # steps taken
        ("may_pull", np.bool_),
        ("time_s", np.float64),
    ],
    align=True,
)
LOG = np.dtype(
    [("engine", np.int64), ("time_s", np.float64), ("running", np.int64), ("kv_tokens", np.int64)], align=True
)

DONE, LOG_FULL, HEAP_FULL = 0, 1, 2
NONE = -1
UNITS_PULLED, LOG_LENGTH = 0, 1  # places in the counters


@njit(cache=True)
def run(
    requests: Records,
    engines: Records,
    heaps: Ints,
    log: Records,
    counters: Ints,
    base_s: Floats,
    slope_s: Floats,
    pieces: Ints,
    unit_start: Ints,
    unit_member: Ints,
) -> int:
    """Carry the batch out from where the arrays stand.

    Returns DONE, or what was too small: the caller then copies it into a larger array and calls again.

    Args:
        requests: ``[n]`` of REQUEST.
        engines: ``[m]`` of ENGINE.
        heaps: ``[m, width]`` running requests of each engine, a heap by finishing step.
        log: of LOG.
        counters: ``[2]`` units pulled from the shared queue, entries of the log.
        base_s: ``[shapes, running + 1, pieces]`` step time at no context.
        slope_s: ``[shapes, pieces]`` step time per context token.
        pieces: ``[shapes]`` how many pieces are in use.
        unit_start: ``[units + 1]`` into ``unit_member``.
        unit_member: the shared queue, unit by unit.
    """
    m, units = len(engines), len(unit_start) - 1
    for e in range(m):
        if not admit(requests, engines[e], heaps[e], e):
            return HEAP_FULL
    while counters[UNITS_PULLED] < units:
        e = next_engine(engines)
        engine = engines[e]
        start, end = unit_start[counters[UNITS_PULLED]], unit_start[counters[UNITS_PULLED] + 1]
        if engine.may_pull and engine.waiting == 0 and has_room(engine, requests[unit_member[start]]):
            for place in range(start, end):
                push_back(requests, engine, unit_member[place])
            counters[UNITS_PULLED] += 1
            if not admit(requests, engine, heaps[e], e):
                return HEAP_FULL
        else:
            lines = base_s[engine.shape, :, : pieces[engine.shape]], slope_s[engine.shape]
            code = jump(requests, engine, heaps[e], log, counters, lines[0], lines[1], e)
            if code != DONE:
                return code
    for e in range(m):
        engine = engines[e]
        base, slope = base_s[engine.shape, :, : pieces[engine.shape]], slope_s[engine.shape]
        while engine.running > 0:
            code = jump(requests, engine, heaps[e], log, counters, base, slope, e)
            if code != DONE:
                return code
    if counters[LOG_LENGTH] + m > len(log):
        return LOG_FULL
    for e in range(m):
        note(log, counters, engines[e], e)
    return DONE


@njit(cache=True)
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


@njit(cache=True)
def jump(
    requests: Records,
    engine: Record,
    heap: Ints,
    log: Records,
    counters: Ints,
    base_s: Floats,
    slope_s: Floats,
    e: int,
) -> int:
    """Advance an engine to its next event and handle it there."""
    if counters[LOG_LENGTH] == len(log):
        return LOG_FULL
    note(log, counters, engine, e)
    n, kv, capacity = engine.running, engine.next_kv, engine.kv_capacity_tokens
    steps = min(requests[heap[0]].finish_step - engine.step, (capacity - kv) // n + 1)
    base = base_s[n]
    if engine.fresh > 0:
        first_token_s = engine.time_s + seconds(base, slope_s, n, kv, 1)
        i = engine.run_tail
        for _ in range(engine.fresh):
            if np.isnan(requests[i].first_token_s):
                requests[i].first_token_s = first_token_s
            i = requests[i].run_previous
        engine.fresh = 0

    engine.time_s += seconds(base, slope_s, n, kv, steps)
    engine.step += steps
    engine.next_kv += n * steps
    engine.may_pull = False
    while engine.running > 0 and requests[heap[0]].finish_step == engine.step:
        request = requests[heap[0]]
        request.finish_s = engine.time_s
        request.remaining = 0
        release(requests, engine, heap, request)
        engine.may_pull = True
    while engine.next_kv > capacity:
        i = engine.run_tail
        request = requests[i]
        request.remaining = request.finish_step - engine.step
        request.preemptions += 1
        release(requests, engine, heap, request)
        push_front(requests, engine, i)
    return DONE if admit(requests, engine, heap, e) else HEAP_FULL


@njit(cache=True)
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


@njit(cache=True)
def context_sum(n: int, kv: int, steps: int) -> float:
    """Sum of kv + n k for k = 0 .. steps - 1."""
    return steps * float(kv) + n * (steps * (steps - 1.0) / 2)


@njit(cache=True)
def has_room(engine: Record, request: Record) -> bool:
    """Whether the engine could admit the request now."""
    return bool(
        engine.running < engine.max_running and engine.next_kv + held(request) <= engine.kv_capacity_tokens
    )


@njit(cache=True)
def held(request: Record) -> int:
    """KV tokens that a request which does not run would hold in its next step."""
    return int(request.prompt_tokens + request.output_tokens - request.remaining + 1)


@njit(cache=True)
def admit(requests: Records, engine: Record, heap: Ints, e: int) -> bool:
    """Admit from the engine's own queue while there is room; False if the heap is too small."""
    while engine.waiting > 0 and has_room(engine, requests[engine.wait_head]):
        if engine.running == len(heap):
            return False
        i = engine.wait_head
        request = requests[i]
        engine.wait_head = request.wait_next
        engine.waiting -= 1
        engine.next_kv += held(request)
        request.finish_step = engine.step + request.remaining
        request.run_previous, request.run_next = engine.run_tail, NONE
        if engine.run_tail != NONE:
            requests[engine.run_tail].run_next = i
        engine.run_tail = i
        sift_up(requests, heap, engine.running, i)
        engine.running += 1
        engine.fresh += 1
        request.engine = e
        if np.isnan(request.start_s):
            request.start_s = engine.time_s
    return True


@njit(cache=True)
def release(requests: Records, engine: Record, heap: Ints, request: Record) -> None:
    """Take a request that finished or lost its cache out of the running ones."""
    engine.next_kv -= held(request)
    before, after = request.run_previous, request.run_next
    if before != NONE:
        requests[before].run_next = after
    if after != NONE:
        requests[after].run_previous = before
    else:
        engine.run_tail = before
    engine.running -= 1
    hole, last = request.heap_place, heap[engine.running]
    if hole != engine.running:
        sift_down(requests, heap, engine.running, sift_up(requests, heap, hole, last), last)


@njit(cache=True)
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


@njit(cache=True)
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


@njit(cache=True)
def push_back(requests: Records, engine: Record, i: int) -> None:
    """Append to the engine's own queue."""
    if engine.waiting == 0:
        engine.wait_head = i
    else:
        requests[engine.wait_tail].wait_next = i
    engine.wait_tail = i
    engine.waiting += 1


@njit(cache=True)
def push_front(requests: Records, engine: Record, i: int) -> None:
    """Put at the front of the engine's own queue."""
    if engine.waiting == 0:
        engine.wait_tail = i
    requests[i].wait_next = engine.wait_head
    engine.wait_head = i
    engine.waiting += 1


@njit(cache=True)
def note(log: Records, counters: Ints, engine: Record, e: int) -> None:
    """Log what engine e runs from now on."""
    entry = log[counters[LOG_LENGTH]]
    entry.engine = e
    entry.time_s = engine.time_s
    entry.running = engine.running
    entry.kv_tokens = engine.next_kv
    counters[LOG_LENGTH] += 1
