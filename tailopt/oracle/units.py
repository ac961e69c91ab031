"""A problem as the bounds see it: units by falling length, with the loads that each puts on an engine.

A **unit** is what a static plan places as one: a request, or a group if groups are atomic. Request i, with
p_i prompt and L_i output tokens, reads :math:`A_i = p_i L_i + L_i (L_i + 1) / 2` context tokens in its life
(its
*KV area*). A unit adds its longest request, and the sums of L and A over its requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Bools, Floats, Ints
from tailopt.engine.decode_time import context_read
from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Lines
from tailopt.oracle.problem import Problem
from tailopt.simulate.batch import shared_tokens
from tailopt.trace import Trace


@dataclass(frozen=True, eq=False)
class Units:
    """Units of a problem, longest first.

    Attributes:
        longest: ``[u]`` longest output of each unit in tokens, falling.
        tokens: ``[u]`` sum of outputs.
        context: ``[u]`` sum of KV areas, in token-steps.
        cache: ``[u]`` token-steps of KV cache that they keep busy at least (:func:`cache_areas`).
        prefill_s: ``[u]`` seconds that the prefill of each unit adds to its engine at least
            (:func:`least_prefill`).
        members: the requests of each unit, longest first.
        least_tokens: ``[n]`` least sum of outputs of 1, 2, ... n requests.
        least_context: ``[n]`` least sum of KV areas of 1, 2, ... n requests.
        most_context: KV tokens if all requests were at their end together.
        max_running: the largest concurrency limit of any engine.
        kv_capacity_tokens: the largest KV capacity of any engine.
    """

    longest: Ints
    tokens: Ints
    context: Ints
    cache: Ints
    prefill_s: Floats
    members: list[Ints]
    least_tokens: Ints
    least_context: Ints
    most_context: int
    max_running: int
    kv_capacity_tokens: int


def units_of(problem: Problem) -> Units:
    """The units of a problem by falling longest request, then by falling tokens."""
    trace, fleet = problem.trace, problem.fleet
    engines = range(len(fleet.engines))
    shapes = [fleet.shape_of(e) for e in engines]
    output = trace.output_tokens
    unit = trace.group if problem.atomic else np.arange(trace.n_requests)
    count = int(unit.max()) + 1
    area = context_read(trace.context_tokens, output)
    longest = np.zeros(count, dtype=np.int64)
    np.maximum.at(longest, unit, output)
    tokens, context, cache = np.zeros((3, count), dtype=np.int64)
    np.add.at(tokens, unit, output)
    np.add.at(context, unit, area)
    np.add.at(cache, unit, cache_areas(trace, shapes))
    order = np.lexsort((-tokens, -longest))
    requests = np.lexsort((-output, unit))  # by unit, longest first
    by_unit = np.split(requests, np.flatnonzero(np.diff(unit[requests])) + 1)
    return Units(
        longest=longest[order],
        tokens=tokens[order],
        context=context[order],
        cache=cache[order],
        prefill_s=least_prefill(problem)[order] / max(shape.prefill_tokens_per_s for shape in shapes),
        members=[by_unit[u] for u in order],
        least_tokens=np.cumsum(np.sort(output)),
        least_context=np.cumsum(np.sort(area)),
        most_context=int((trace.context_tokens + output).sum()),
        max_running=max(fleet.max_running(e) for e in engines),
        kv_capacity_tokens=max(shape.kv_capacity_tokens for shape in shapes),
    )


def cache_areas(trace: Trace, shapes: Sequence[ShapeProfile]) -> Ints:
    """``[n]`` least token-steps of KV cache that each request keeps busy while it gains its tokens.

    When it gains its j-th token, p + j - 1 tokens of it are computed and in the cache. The blocks that it
    shares with its group of G stand there once for all of them: of s shared tokens, s / G count for each.
    """
    shared = _shared(trace, shapes)
    output = trace.output_tokens
    held = trace.context_tokens - shared + shared // np.bincount(trace.group)[trace.group]
    return np.asarray(output * (output - 1) // 2 + output * held)


def held_prompts(problem: Problem) -> Ints:
    """``[n]`` tokens of its prompt that each request holds at least, shared blocks split among its group."""
    trace, fleet = problem.trace, problem.fleet
    shared = _shared(trace, [fleet.shape_of(e) for e in range(len(fleet.engines))])
    return np.asarray(trace.context_tokens - shared + shared // np.bincount(trace.group)[trace.group])


def _shared(trace: Trace, shapes: Sequence[ShapeProfile]) -> Ints:
    """``[n]`` tokens in the blocks that each request may share with its group."""
    if not any(shape.prefix_caching for shape in shapes):
        return np.zeros(trace.n_requests, dtype=np.int64)
    return shared_tokens(trace, max(shape.block_tokens for shape in shapes))


def least_prefill(problem: Problem) -> Ints:
    """``[u]`` tokens that the requests of each unit compute at least beside those with which they gain one.

    A request computes its prompt but for the blocks that it shares with its group; the last token of it is
    the one with which it gains its first. A group that stays together computes the shared blocks once.
    """
    own = own_prefill(problem)
    if not problem.atomic:
        return own
    of_group = np.zeros(int(problem.trace.group.max()) + 1, dtype=np.int64)
    np.add.at(of_group, problem.trace.group, own)
    return of_group


def own_prefill(problem: Problem) -> Ints:
    """``[n]`` the same by request; the longest of a group that stays together computes the shared blocks."""
    trace, fleet = problem.trace, problem.fleet
    shared = _shared(trace, [fleet.shape_of(e) for e in range(len(fleet.engines))])
    own = trace.context_tokens - shared - 1
    if problem.atomic:
        by_length = np.lexsort((-trace.output_tokens, trace.group))
        first = by_length[np.flatnonzero(np.diff(trace.group[by_length], prepend=-1))]
        own[first] += shared[first]
    return np.asarray(own)


def shared_prefill(problem: Problem) -> Ints:
    """``[n]`` tokens that an engine computes once for all requests of a prompt that it holds."""
    trace, fleet = problem.trace, problem.fleet
    return _shared(trace, [fleet.shape_of(e) for e in range(len(fleet.engines))])


def too_large(problem: Problem, shape: ShapeProfile) -> Bools:
    """``[n]`` whether a request can never fit into the KV cache of an engine of this shape."""
    need = problem.trace.context_tokens + problem.trace.output_tokens - 1
    return np.asarray(need > shape.kv_capacity_tokens // shape.block_tokens * shape.block_tokens)


def fits_on(problem: Problem, units: Units) -> Bools:
    """``[m, u]`` whether an engine's cache holds each request of a unit at all."""
    fleet, fits = problem.fleet, {}
    for e, engine in enumerate(fleet.engines):
        if engine.tp not in fits:
            large = too_large(problem, fleet.shape_of(e))
            fits[engine.tp] = [not large[members].any() for members in units.members]
    return np.array([fits[engine.tp] for engine in fleet.engines])


def lines_of(problem: Problem, n_max: int) -> list[Lines]:
    """The step-time lines of each shape in the fleet."""
    degrees = dict.fromkeys(engine.tp for engine in problem.fleet.engines)
    return [problem.fleet.profile.shape(tp).step_time.lines(n_max) for tp in degrees]
