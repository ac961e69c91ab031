"""Checks :class:`tailopt.oracle.mixed.MixedBound`: the inequalities of that module, in exact arithmetic."""

from fractions import Fraction
from itertools import product

from tailopt.engine.profile import ShapeProfile
from tailopt.oracle.check_parts import all_below, area, cache_busy, require, require_rays, units_by_length
from tailopt.oracle.minorant import Minorant
from tailopt.oracle.mixed import KindBound, MixedBound
from tailopt.oracle.problem import Problem

Load = tuple[Fraction, Fraction]  # of a unit on an engine: seconds as leader, and seconds besides


def check_mixed(bound: MixedBound, problem: Problem) -> tuple[Fraction, str]:
    """The bound, if no placement of leaders is within it."""
    fleet, u = problem.fleet, bound.weights[0]
    counts: dict[tuple[ShapeProfile, int], int] = {}
    for e in range(len(fleet.engines)):
        kind = fleet.shape_of(e), fleet.max_running(e)
        counts[kind] = counts.get(kind, 0) + 1
    require(len(bound.kinds) == len(counts), "the bound is for other kinds of engines")
    require(min(bound.weights) >= 0 and sum(map(Fraction, bound.weights)) <= 1, "the weights are not convex")
    require(all(part.price >= 0 for part in bound.kinds), "a price is negative")
    for part, (shape, slots) in zip(bound.kinds, counts, strict=True):
        require_rays(part.rays, part.minorant.n_max, bound.within_s, slots, [shape], problem)
        require(all_below(part.minorant, [shape]), "the affine function is not below the step times")

    makespan = Fraction(bound.lower_s)
    units = units_by_length(problem)
    longest = [max(int(problem.trace.output_tokens[i]) for i in members) for members in units]
    loads = []
    for part, (shape, slots) in zip(bound.kinds, counts, strict=True):
        a = Fraction(u) * Fraction(part.minorant.a_s)
        weight = _unit_weights(part.minorant, bound.weights, shape, slots, units, problem)
        loads.append([(a * length, w) for length, w in zip(longest, weight, strict=True)])
    done = _placeable(loads, bound.kinds, list(counts.values()), makespan)
    require(not done, f"a plan may be done by {bound.lower_s} s")
    return min(makespan, Fraction(bound.within_s)), "staircase of shapes"


def _unit_weights(
    minorant: Minorant,
    weights: tuple[float, float, float],
    shape: ShapeProfile,
    slots: int,
    units: list[list[int]],
    problem: Problem,
) -> list[Fraction]:
    a, b, c = (Fraction(term) for term in (minorant.a_s, minorant.b_s, minorant.c_s))
    per_token = b + a * Fraction(weights[1]) / slots
    per_cache = a * Fraction(weights[2]) / shape.kv_capacity_tokens
    busy = cache_busy(problem.trace, [problem.fleet.shape_of(e) for e in range(len(problem.fleet.engines))])
    prompt, output = problem.trace.context_tokens.tolist(), problem.trace.output_tokens.tolist()
    return [
        per_token * sum(output[i] for i in members)
        + c * sum((area(prompt[i], output[i]) for i in members), Fraction(0))
        + per_cache * sum(busy[i] for i in members)
        for members in units
    ]


def _placeable(
    loads: list[list[Load]], kinds: tuple[KindBound, ...], counts: list[int], makespan: Fraction
) -> bool:
    """Whether leaders can be placed within the makespan; walks through all numbers of engines opened."""
    prices = [Fraction(part.price) for part in kinds]
    n = len(loads[0])
    opening: dict[tuple[int, ...], Fraction] = {(0,) * len(counts): Fraction(0)}
    held: dict[tuple[int, ...], list[Fraction]] = {}
    for state in product(*(range(count + 1) for count in counts)):
        if state not in opening:
            continue
        opened = tuple(k for k, count in enumerate(state) if count)
        if opened not in held:
            held[opened] = _held(loads, prices, opened, makespan)
        room = makespan * sum(p * c for p, c in zip(prices, state, strict=True)) - opening[state]
        following = 0
        while following < len(held[opened]) and held[opened][following] <= room:
            following += 1
        if following == n:
            return True
        for k, count in enumerate(state):
            leaders = (u for u in range(following, -1, -1) if sum(loads[k][u]) <= makespan)
            leader = next(leaders, None)
            if count < counts[k] and leader is not None:
                after = (*state[:k], count + 1, *state[k + 1 :])
                then = opening[state] + prices[k] * loads[k][leader][0]
                opening[after] = min(then, opening.get(after, then))
    return False


def _held(
    loads: list[list[Load]], prices: list[Fraction], opened: tuple[int, ...], makespan: Fraction
) -> list[Fraction]:
    """Least priced seconds of the first 1, 2, ... units on the kinds opened, up to one that fits on none."""
    sums: list[Fraction] = []
    for u in range(len(loads[0])):
        least = [prices[k] * loads[k][u][1] for k in opened if sum(loads[k][u]) <= makespan]
        if not least:
            break
        sums.append((sums[-1] if sums else Fraction(0)) + min(least))
    return sums
