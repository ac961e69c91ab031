r"""Dynamic programming over sets of units: exact for a dozen units, any step time, any mix of shapes.

Engines do not influence each other, so the best makespan of engines 1 .. e for the units S is

.. math:: f_e(S) = \min_{R \subseteq S} \max(t_e(R),\, f_{e-1}(S \setminus R)), \qquad f_0(\emptyset) = 0,

in :math:`O(m\,3^u)` steps, where :math:`t_e(R)` are the seconds that engine e takes for R. It is solved
twice:

- **from below**, with seconds that no order of admission and no concurrency limit can beat
  (:func:`least_seconds`): the sum :math:`\sum_k f(n(k)) + c \sum A_i` of all requests started together
  where the step time is concave (the argument of :mod:`tailopt.oracle.alone`), and the affine terms of
  :mod:`tailopt.oracle.kinds`, whichever is more;
- **from above**, with the seconds of the longest-first order, simulated where the requests do not fit at
  once.

The two meet, and the optimum over all static plans is exact, where step times are concave and everything
fits. Elsewhere the plan found is optimal among those that admit longest first and never hold back, and the
gap says what order and limits might still gain.
"""

import time
from dataclasses import replace

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints
from tailopt.engine.decode_time import decode_time_s, engine_time_s
from tailopt.errors import InputError
from tailopt.oracle.alone import concave
from tailopt.oracle.bound_and_fill import plan_of, staircase
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.kinds import Kind, KindTerms, fits_at_once, kinds_of, terms_of
from tailopt.oracle.partition import PartitionBound
from tailopt.oracle.problem import Problem
from tailopt.oracle.staircase import ROUNDING
from tailopt.oracle.units import Units, too_large, units_of
from tailopt.plan import Fleet, Plan
from tailopt.simulate.simulator import simulate

MOST_UNITS = 16


def dp(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """The best plan that admits longest first, and a bound that is as high where step times are concave.

    Args:
        problem: with at most ``MOST_UNITS`` units.
        time_limit_s: after this, sets that do not fit at once are estimated, not simulated.
        seed: nothing is drawn.

    Raises:
        InputError: if there are more units.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet.of(load_engine("h100-gpt-oss-120b-vllm"), "2xTP2+1xTP4")
    >>> dp(Problem(Trace.of([[900], [800], [700], [600], [500], [400]]), fleet)).status
    'optimal'
    """
    started = time.perf_counter()
    units = units_of(problem)
    if len(units.members) > MOST_UNITS:
        raise InputError(f"method dp: {len(units.members)} units, expected at most {MOST_UNITS}")
    first = staircase(problem)
    kinds = kinds_of(problem.fleet)
    kind_of = np.empty(len(problem.fleet.engines), dtype=np.int64)
    for k, kind in enumerate(kinds):
        kind_of[list(kind.engines)] = k
    terms = terms_of(units, kinds, problem.trace.n_requests, first.upper_s)
    least = np.stack([least_seconds(problem, units, *pair) for pair in zip(kinds, terms, strict=True)])
    lower_s, _ = best_partition(least, kind_of)
    bound = PartitionBound(min(lower_s * (1 - ROUNDING), first.upper_s), tuple(terms), first.upper_s)

    deadline = np.inf if time_limit_s is None else started + time_limit_s
    taken = np.stack([_seconds(problem, units, kind, least[k], first.upper_s, deadline)
                      for k, kind in enumerate(kinds)])  # fmt: skip
    upper_s, engine_of_unit = best_partition(taken, kind_of)
    found = first.plan if upper_s == np.inf else plan_of(problem, units, engine_of_unit)
    return first.improved(
        bound, simulate(problem.trace, problem.fleet, found), "dynamic programming over sets", started, seed
    )


def sets_of(units: Units, n_requests: int) -> tuple[Bools, Bools]:
    """``[2^u, u]`` and ``[2^u, n]``: units and requests of every set; set s holds unit i if bit i is set."""
    count = len(units.members)
    holds = (np.arange(1 << count)[:, None] >> np.arange(count) & 1).astype(np.bool_)
    unit_of = np.empty(n_requests, dtype=np.int64)
    for u, members in enumerate(units.members):
        unit_of[members] = u
    return holds, holds[:, unit_of]


def least_seconds(problem: Problem, units: Units, kind: Kind, terms: KindTerms) -> Floats:
    """``[2^u]`` seconds that an engine takes at least for every set of units; infinity if one can never fit.

    Args:
        problem, units: the batch.
        kind: of the engine.
        terms: its affine terms, which hold for plans within the makespan they were made for.
    """
    trace = problem.trace
    holds, chosen = sets_of(units, trace.n_requests)
    seconds = np.zeros(len(holds))
    is_concave = concave(kind.shape.step_time.lines(trace.n_requests))
    if is_concave:
        seconds = decode_time_s(kind.shape.step_time, trace.context_tokens, trace.output_tokens, chosen)
    if not (is_concave and fits_at_once(problem, kind)):
        longest = np.where(holds, units.longest, 0).max(axis=1)
        tokens, context, cache = holds @ units.tokens, holds @ units.context, holds @ units.cache
        steps = np.maximum(longest, tokens / kind.max_running)
        steps = np.maximum(steps, cache / kind.shape.kv_capacity_tokens)
        for one in terms.minorants:
            seconds = np.maximum(seconds, one.a_s * steps + one.b_s * tokens + one.c_s * context)
    return np.where(chosen @ too_large(problem, kind.shape), np.inf, seconds)


def _seconds(
    problem: Problem, units: Units, kind: Kind, least: Floats, within_s: float, deadline: float
) -> Floats:
    """``[2^u]`` seconds of every set, longest first; simulated if it does not fit at once and may matter."""
    trace = problem.trace
    _, chosen = sets_of(units, trace.n_requests)
    if fits_at_once(problem, kind):
        return decode_time_s(kind.shape.step_time, trace.context_tokens, trace.output_tokens, chosen)
    seconds = engine_time_s(kind.shape, kind.max_running, trace.context_tokens, trace.output_tokens, chosen)
    seconds[least == np.inf] = np.inf
    fits = (chosen.sum(axis=1) <= kind.max_running) & (
        chosen @ (trace.context_tokens + trace.output_tokens) <= kind.shape.kv_capacity_tokens
    )
    engine = replace(problem.fleet.engines[kind.engines[0]], gpus=None)
    alone = Fleet(problem.fleet.profile, (engine,), engine.tp)
    longest_first = np.argsort(-trace.output_tokens, kind="stable")
    for s in np.flatnonzero(~fits & (least <= within_s)):
        if time.perf_counter() > deadline:
            break
        batch = trace.take(longest_first[chosen[s][longest_first]])
        plan = Plan.of_queues([engine], [range(batch.n_requests)])
        seconds[s] = simulate(batch, alone, plan).makespan_s
    return seconds


def best_partition(seconds: Floats, kind_of: Ints) -> tuple[float, Ints]:
    """The least makespan over all ways to deal the units to the engines, and the engine of each unit.

    Args:
        seconds: ``[kinds, 2^u]`` of every set of units.
        kind_of: ``[engines]`` kind of each engine.

    >>> one_engine_each = np.array([[0.0, 3.0, 2.0, 5.0]])  # the sets {}, {0}, {1}, {0, 1}
    >>> best_partition(one_engine_each, np.array([0, 0]))
    (3.0, array([0, 1]))
    """
    best, taken = _partition_tables(seconds, kind_of)
    rest, units = len(best) - 1, len(best).bit_length() - 1
    engine_of = np.zeros(units, dtype=np.int64)
    for e in range(len(kind_of) - 1, -1, -1):
        chosen = int(taken[e, rest])
        engine_of[[u for u in range(units) if chosen >> u & 1]] = e
        rest ^= chosen
    return float(best[-1]), engine_of


@njit(cache=True)
def _partition_tables(seconds: Floats, kind_of: Ints) -> tuple[Floats, Ints]:
    """f_m of the module, and the set that engine e takes in f_e(S)."""
    sets = seconds.shape[1]
    before = np.full(sets, np.inf)
    before[0] = 0.0
    after = np.empty(sets)
    taken = np.zeros((len(kind_of), sets), np.int64)
    for e in range(len(kind_of)):
        own = seconds[kind_of[e]]
        for s in range(sets):
            after[s], part = before[s], s
            while part:
                if own[part] < after[s]:
                    value = max(own[part], before[s ^ part])
                    if value < after[s]:
                        after[s], taken[e, s] = value, part
                part = (part - 1) & s
        before[:] = after
    return before, taken
