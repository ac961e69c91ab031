r"""Fillings for any step time and any mix of shapes: plans where the staircase's own filling does not apply.

Units go in longest first, as in :mod:`tailopt.oracle.staircase`, but an engine's time is that of the very set
of requests it holds: with its lengths sorted, each stretch between two finishes has a constant concurrency
and sums in closed form. Where a set does not fit at once this is an estimate, good enough to choose by, since
the plan is simulated in the end: in a stretch of n requests at most :math:`c = \min(C, n M / K)` run, the
others' token-steps wait, with the context that they read, and run as soon as stretches with fewer requests
leave slots and cache to spare.
"""

from time import perf_counter as clock

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import Units, fits_on
from tailopt.simulate.kernel import seconds
from tailopt.simulate.line_table import line_table

FULLEST, SOONEST = 0, 1  # where a unit goes: the fullest engine that still fits, or the one done soonest


def soonest(problem: Problem, units: Units) -> Ints:
    """``[u]`` engines, longest units first, each where it is done soonest (list scheduling)."""
    return _Filling(problem, units, kv_share=1.0).place(np.inf, SOONEST)[0]


def filling_by_bisection(
    problem: Problem,
    units: Units,
    lower_s: float,
    tolerance: float,
    kv_share: float,
    deadline_s: float = np.inf,
) -> Ints:
    """``[u]`` engines in the shortest filling that bisection on the makespan finds.

    Args:
        problem, units: what is placed where.
        lower_s: no plan is done earlier.
        tolerance: relative width at which the bisection stops.
        kv_share: share of the KV cache that the filling counts on.
        deadline_s: :func:`time.perf_counter` at which to stop.
    """
    filling = _Filling(problem, units, kv_share)
    best, high = filling.place(np.inf, SOONEST)
    low = min(lower_s, high)
    while high - low > tolerance * high and clock() <= deadline_s:
        middle = (low + high) / 2
        trial, done_s = filling.place(middle, FULLEST)
        if done_s == np.inf:
            low = middle
        else:
            best, high = trial, min(done_s, middle)
    return best


class _Filling:
    """A problem's arrays as the compiled code below wants them."""

    def __init__(self, problem: Problem, units: Units, kv_share: float) -> None:
        trace, fleet = problem.trace, problem.fleet
        requests = np.concatenate(units.members)
        engines = range(len(fleet.engines))
        self.units = len(units.members)
        self.max_running = np.array([fleet.max_running(e) for e in engines], dtype=np.int64)
        kv = [int(kv_share * fleet.shape_of(e).kv_capacity_tokens) for e in engines]
        self.kv_capacity_tokens = np.array(kv, dtype=np.int64)
        self.lines = line_table(fleet, int(min(self.max_running.max(), trace.n_requests)))
        self.output = trace.output_tokens[requests]
        self.prompt = trace.context_tokens[requests]
        self.unit_start = np.cumsum([0, *map(len, units.members)], dtype=np.int64)
        self.fits = fits_on(problem, units)

    def place(self, makespan_s: float, rule: int) -> tuple[Ints, float]:
        """Engines of the units, and when the last is done (infinity if not within ``makespan_s``)."""
        engine_of = np.zeros(self.units, dtype=np.int64)
        lines = self.lines
        done_s = fill_any(
            self.output, self.prompt, self.unit_start, lines.base_s, lines.slope_s, lines.pieces, lines.shape,
            self.max_running, self.kv_capacity_tokens, self.fits, makespan_s, rule, engine_of,
        )  # fmt: skip
        return engine_of, done_s


@njit(cache=True)
def set_time_s(
    output: Ints, prompt: Ints, base_s: Floats, slope_s: Floats, max_running: int, kv_capacity_tokens: int
) -> float:
    """Seconds of one engine for requests sorted by falling output; ``base_s[running, piece]``."""
    total, past = 0.0, 0
    prompts = prompt.sum()
    waiting, context = 0.0, 0.0  # token-steps that could not run yet, and the tokens that they will read
    for last in range(len(output) - 1, -1, -1):
        n, steps = last + 1, output[last] - past
        if steps > 0:
            kv = prompts + n * (past + 1)
            mean = kv + n * steps / 2.0
            fit = max(1.0, min(float(max_running), n * (kv_capacity_tokens / mean)))
            if n > fit:
                total += seconds(base_s[int(fit)], slope_s, int(fit), int(kv * (fit / n)), steps)
                waiting += (n - fit) * steps
                context += (1 - fit / n) * mean * steps
            else:
                if waiting > 0:
                    size = context / waiting
                    spare = min(max_running - n, int((kv_capacity_tokens - mean) / size))
                    drain = 0 if spare <= 0 else min(steps, int(waiting / spare))
                    if drain > 0:
                        total += seconds(base_s[n + spare], slope_s, n, kv + int(spare * size), drain)
                        waiting -= spare * drain
                        context -= size * (spare * drain)
                        kv += n * drain
                        steps -= drain
                total += seconds(base_s[n], slope_s, n, kv, steps)
        prompts -= prompt[last]
        past = output[last]
    if waiting > 0:
        size = context / waiting
        fit = int(max(1.0, min(float(max_running), kv_capacity_tokens / size)))
        total += waiting / fit * seconds(base_s[fit], slope_s, fit, int(fit * size), 1)
    return total


@njit(cache=True)
def fill_any(
    output: Ints,
    prompt: Ints,
    unit_start: Ints,
    base_s: Floats,
    slope_s: Floats,
    pieces: Ints,
    shape: Ints,
    max_running: Ints,
    kv_capacity_tokens: Ints,
    fits: Bools,
    makespan_s: float,
    rule: int,
    engine_of: Ints,
) -> float:
    """Place units in the order given, each within ``makespan_s``.

    Args:
        output, prompt: ``[n]`` of the requests, unit by unit, longest first within a unit.
        unit_start: ``[u + 1]`` where units start.
        base_s, slope_s, pieces: step-time lines of each shape, as the simulator's kernel takes them.
        shape, max_running, kv_capacity_tokens: ``[m]`` of the engines.
        fits: ``[m, u]`` whether an engine can hold a unit's requests at all.
        makespan_s: no engine may be done later.
        rule: FULLEST, which opens an engine only when no open one fits, or SOONEST.
        engine_of: ``[u]`` written.

    Returns:
        The time at which the last engine is done, or infinity if some unit fits nowhere.
    """
    m, n = len(shape), len(output)
    held_output, held_prompt = np.empty((m, n), np.int64), np.empty((m, n), np.int64)
    held, done_s = np.zeros(m, np.int64), np.zeros(m)
    merged_output, merged_prompt = np.empty(n, np.int64), np.empty(n, np.int64)
    for u in range(len(unit_start) - 1):
        start, end = unit_start[u], unit_start[u + 1]
        best, best_done, best_rank = -1, 0.0, 0.0
        for e in range(m):
            if not fits[e, u]:
                continue
            if rule == FULLEST and e > 0 and held[e] == 0 and held[e - 1] == 0 and shape[e] == shape[e - 1]:
                continue  # the same empty engine again
            size = held[e] + end - start
            merge(held_output[e, : held[e]], held_prompt[e, : held[e]], output[start:end], prompt[start:end],
                  merged_output, merged_prompt)  # fmt: skip
            lines = base_s[shape[e], :, : pieces[shape[e]]], slope_s[shape[e], : pieces[shape[e]]]
            then = set_time_s(merged_output[:size], merged_prompt[:size], lines[0], lines[1],
                              max_running[e], kv_capacity_tokens[e])  # fmt: skip
            rank = then if rule == SOONEST or held[e] == 0 else -1.0 - done_s[e]
            if then <= makespan_s and (best < 0 or rank < best_rank):
                best, best_done, best_rank = e, then, rank
        if best < 0:
            return np.inf
        size = held[best] + end - start
        merge(held_output[best, : held[best]], held_prompt[best, : held[best]], output[start:end],
              prompt[start:end], merged_output, merged_prompt)  # fmt: skip
        held_output[best, :size], held_prompt[best, :size] = merged_output[:size], merged_prompt[:size]
        held[best], done_s[best], engine_of[u] = size, best_done, best
    return float(done_s.max())


@njit(cache=True)
def merge(left: Ints, left_prompt: Ints, right: Ints, right_prompt: Ints, output: Ints, prompt: Ints) -> None:
    """Merge two lists sorted by falling output into ``output`` and ``prompt``."""
    i = j = 0
    while i < len(left) or j < len(right):
        if j == len(right) or (i < len(left) and left[i] >= right[j]):
            output[i + j], prompt[i + j] = left[i], left_prompt[i]
            i += 1
        else:
            output[i + j], prompt[i + j] = right[j], right_prompt[j]
            j += 1
