"""Checks :class:`tailopt.oracle.lagrangian.PricedBound`: prices that engines done in time cannot pay.

The functions lie below the step times and are concave; a dynamic program of its own, in whole numbers that
are rounded in the engines' favour, says what an engine can collect by its leader; and no choice of leaders
collects the prices of all requests. Or the longest requests are placed in all ways, breadth first, with all
states of one place in arrays, and after some place there is no way left in which all prices may be collected.
Two states in which engines hold requests of the same classes, in whatever order, are one.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil, floor
from typing import TypeVar

import numpy as np

from tailopt.arrays import Ints
from tailopt.oracle.check_mixed_places import with_one
from tailopt.oracle.check_parts import (
    area,
    held_prompt_tokens,
    line_below,
    prefill_seconds,
    require,
    units_by_length,
)
from tailopt.oracle.lagrangian import PricedBound
from tailopt.oracle.lagrangian_minorant import ConcaveMinorant, SwitchedMinorant
from tailopt.oracle.problem import Problem

Value = TypeVar("Value", int, Fraction)

ALL = 2**56  # all prices together, in whole numbers
NEVER = -(2**61)
TICKS = 2**44  # of the makespan
MOST_STATES = 1_000_000  # after which the checker says that it could not verify the bound
CHUNK = 256  # states for which it is computed together what engines collect


def check_priced(bound: PricedBound, problem: Problem) -> tuple[Fraction, str]:
    """The bound, if no plan done by then pays the prices."""
    trace = problem.trace
    makespan = Fraction(bound.lower_s)
    require(len(bound.prices) == trace.n_requests, "the prices are for another number of requests")
    require(min(bound.prices) >= 0 < sum(bound.prices) < np.inf, "the prices are no prices")
    require(bool(bound.minorants), "there is no function below the step times")
    require(
        len(bound.multipliers) > 0
        and all(len(one) == len(bound.minorants) and min(one) >= 0 for one in bound.multipliers),
        "the multipliers are not one for each function, or negative",
    )
    require(bound.label_s > 0 and bound.classes >= 1, "the labels have no grid")
    require(0 <= bound.places <= trace.n_requests, "more requests are placed than there are")
    for minorant in bound.minorants:
        if isinstance(minorant, SwitchedMinorant):
            _require_steeper_later(minorant)
        for line in _lines(minorant):
            _require_concave_below(line, problem)

    units = units_by_length(problem)
    unit_of = {i: u for u, members in enumerate(units) for i in members}
    length = trace.output_tokens.tolist()
    order = sorted(unit_of, key=lambda i: (-length[i], unit_of[i], i))
    scale = ALL / sum(map(Fraction, bound.prices), Fraction(0))
    price = [floor(scale * Fraction(bound.prices[i])) for i in order]
    prefill = {
        i: seconds / len(members)
        for members, seconds in zip(units, prefill_seconds(problem, units), strict=True)
        for i in members
    }
    shared = _shared_seconds(bound, problem)
    if bound.alike:
        require(len(units) == trace.n_requests, "requests that stay together are not exchanged")
    alike = _classes(bound, problem)
    by_minorant = [
        _least([prefill[i] + one for i, one in enumerate(seconds)], alike, order) for seconds in shared
    ]
    prompt = _least(trace.context_tokens.tolist(), alike, order)
    table, rest, cost = _tabulate(bound, length, order, prompt, price, scale, by_minorant)

    at_most = [ceil(scale * sum(map(Fraction, one)) * makespan) for one in bound.multipliers]
    require(max(at_most) < -NEVER // 2, "the multipliers are too large to compute with")
    place: dict[int, int] = {}
    for position, i in enumerate(order):
        place.setdefault(unit_of[i], position)
    value = [int((table[place[u]] + np.array(at_most)[:, None]).min(axis=0).max()) for u in range(len(units))]
    of_unit = [0] * len(units)
    for i, units_price in zip(order, price, strict=True):
        of_unit[unit_of[i]] += units_price
    prefix = [0, *accumulate(of_unit)]
    complaint = f"engines done by {bound.lower_s} s may pay all prices"
    if bound.places == 0:
        require(_most_collected(value, prefix, len(problem.fleet.engines)) < prefix[-1], complaint)
        return makespan, "prices"
    beginnings = _Beginnings(
        unit=[unit_of[i] for i in order], price=price, value=np.maximum(value, 0), prefix=np.array(prefix),
        at_most=np.array(at_most), rest=rest, cost=cost, engines=len(problem.fleet.engines),
        alike=[alike[i] for i in order] if bound.alike else None,
    )  # fmt: skip
    require(beginnings.none_is_left(bound.places), complaint)
    return makespan, "prices and search"


def _classes(bound: PricedBound, problem: Problem) -> list[int]:
    """The class of each request, of which all members are equally long units of their own."""
    n, length = problem.trace.n_requests, problem.trace.output_tokens.tolist()
    if not bound.alike:
        return list(range(n))
    require(len(bound.alike) == n, "the classes are for another number of requests")
    lengths = set(zip(bound.alike, length, strict=True))
    require(len(lengths) == len(set(bound.alike)), "requests of a class are not equally long")
    return list(bound.alike)


def _least(values: list[Value], alike: list[int], order: list[int]) -> list[Value]:
    """The least value of each request's class, in order."""
    least: dict[int, Value] = {}
    for one, value in zip(alike, values, strict=True):
        least[one] = min(value, least.get(one, value))
    return [least[alike[i]] for i in order]


def _shared_seconds(bound: PricedBound, problem: Problem) -> list[list[Fraction]]:
    """For each function, what each request pays of the tokens that an engine computes once for its prompt."""
    trace, fleet = problem.trace, problem.fleet
    if not bound.shares:
        return [[Fraction(0)] * trace.n_requests for _ in bound.minorants]
    require(not problem.atomic, "prompts that stay together are paid for already")
    require(
        len(bound.shares) == len(bound.minorants)
        and all(len(one) == trace.n_requests for one in bound.shares)
        and all(0 <= share <= 1 for one in bound.shares for share in one),
        "the shares are not one for each function and request, or no shares",
    )
    shapes = [fleet.shape_of(e) for e in range(len(fleet.engines))]
    rate = max(Fraction(shape.prefill_tokens_per_s) for shape in shapes)
    _, tokens = held_prompt_tokens(trace, shapes)
    paid = []
    for shares in bound.shares:
        of_prompt: dict[int, Fraction] = {}
        for group, share in zip(trace.group.tolist(), shares, strict=True):
            of_prompt[group] = of_prompt.get(group, Fraction(0)) + Fraction(share)
        require(max(of_prompt.values()) <= 1, "requests pay for more than their prompt")
        paid.append([Fraction(share) * one / rate for share, one in zip(shares, tokens, strict=True)])
    return paid


def _lines(minorant: ConcaveMinorant | SwitchedMinorant) -> list[ConcaveMinorant]:
    return [minorant] if isinstance(minorant, ConcaveMinorant) else [minorant.early, minorant.late]


def _require_steeper_later(minorant: SwitchedMinorant) -> None:
    """Lines, of which the later one counts no request's token for less."""
    early, late = _lines(minorant)
    require(minorant.steps >= 0, "a function switches before the first step")
    require(
        all(rise == line.rises_s[1] for line in (early, late) for rise in line.rises_s[2:]),
        "a function that switches is no line",
    )
    later = early.rises_s[:2][-1] <= late.rises_s[:2][-1] and early.c_s <= late.c_s
    require(later, "a function is less steep after its switch")


def _require_concave_below(minorant: ConcaveMinorant, problem: Problem) -> None:
    fleet = problem.fleet
    engines = range(len(fleet.engines))
    rises, slope = [Fraction(rise) for rise in minorant.rises_s], Fraction(minorant.c_s)
    require(min(*rises, slope) >= 0, "a function below the step times falls")
    require(all(later <= rise for rise, later in pairwise(rises)), "a function is not concave")
    n_max = min(max(fleet.max_running(e) for e in engines), problem.trace.n_requests)
    shapes = {fleet.shape_of(e) for e in engines}
    for n, flat in enumerate(_sums(rises, n_max), start=1):
        require(
            all(line_below(flat, slope, shape.step_time, n) for shape in shapes),
            f"a function is not below the step times of {n} requests",
        )


def _sums(rises: list[Fraction], count: int) -> list[Fraction]:
    """g(1), g(2), ...; the last rise goes on."""
    return list(accumulate([*rises[:count], *(rises[-1],) * (count - len(rises))]))


@dataclass(frozen=True, eq=False)
class _Cost:
    """What a request costs an engine by how many longer ones it holds, up to the most that it can.

    Attributes:
        paid: ``[longer ones + 1, k]`` its time at each multiplier.
        ticks: ``[longer ones + 1, minorants]`` its time.
        most: how many longer ones it can hold besides; if more than are listed, the cost is that of the last.
    """

    paid: Ints
    ticks: Ints
    most: int


@dataclass(frozen=True, eq=False)
class _Beginnings:
    """All ways to place the longest requests, as far as they may pay.

    Attributes:
        unit, price: of each request, longest first.
        value, prefix: what an engine led by each unit collects, and the sums of the units' prices.
        at_most: ``[k]`` the makespan at each multiplier.
        rest, cost: of :func:`_tabulate`.
        engines: how many.
        alike: class of each request; None if each is a class.
    """

    unit: list[int]
    price: list[int]
    value: Ints
    prefix: Ints
    at_most: Ints
    rest: list[Ints]
    cost: list[_Cost]
    engines: int
    alike: list[int] | None

    def none_is_left(self, places: int) -> bool:
        """Whether after so many requests none is left.

        Raises:
            InputError: if there are more than ``MOST_STATES``.
        """
        m, k, minorants = self.engines, len(self.at_most), self.cost[0].ticks.shape[1]
        held, opened = np.zeros((1, m), dtype=np.int64), np.zeros(1, dtype=np.int64)
        spent, ticks = np.zeros((1, m, k), dtype=np.int64), np.zeros((1, m, minorants), dtype=np.int64)
        engine_of = np.full((1, len(self.value)), -1, dtype=np.int16)
        holds = np.zeros((1, m), dtype=np.int64)
        sets: dict[tuple[int, int], int] = {}
        started, placed, states = 0, 0, 0
        for i in range(places):
            u, cost = self.unit[i], self.cost[i]
            begun = u < started
            started, placed = max(started, u + 1), placed + self.price[i]
            after = []
            for e in range(m):
                can = engine_of[:, u] == e if begun else opened >= e
                one = np.flatnonzero(can & (held[:, e] <= cost.most))
                rank = np.minimum(held[one, e], len(cost.paid) - 1)
                fits = (ticks[one, e] + cost.ticks[rank] <= TICKS).all(axis=1)
                one, rank = one[fits], rank[fits]
                new = [held[one], spent[one], ticks[one], np.maximum(opened[one], e + 1), engine_of[one],
                       holds[one]]  # fmt: skip
                new[0][:, e] += 1
                new[1][:, e] += cost.paid[rank]
                new[2][:, e] += cost.ticks[rank]
                new[4][:, u] = e
                if self.alike is not None:
                    new[5][:, e] = with_one(new[5][:, e], self.alike[i], sets)
                after.append(new)
            held, spent, ticks, opened, engine_of, holds = (
                np.concatenate(parts) for parts in zip(*after, strict=True)
            )
            pays = placed + self._collected(i + 1, held, spent, opened)
            pays = self._with_new_engines(pays, started, m - opened) >= self.prefix[-1]
            left = np.flatnonzero(pays)
            if self.alike is not None:
                left = left[np.unique(np.sort(holds[left], axis=1), axis=0, return_index=True)[1]]
            held, spent, ticks, opened, holds = (one[left] for one in (held, spent, ticks, opened, holds))
            engine_of = engine_of[left]
            states += len(held)
            require(states <= MOST_STATES, f"not verified: more than {MOST_STATES} states")
            if len(held) == 0:
                return True
        return False

    def _collected(self, i: int, held: Ints, spent: Ints, opened: Ints) -> Ints:
        """``[states]`` most that the open engines collect of the requests from i on."""
        total = np.zeros(len(held), dtype=np.int64)
        rest = self.rest[i]
        for e in range(self.engines):
            for r in np.unique(held[opened > e, e]):
                states = np.flatnonzero((opened > e) & (held[:, e] == r))
                row = rest[:, min(r, rest.shape[1] - 1)]
                for chunk in np.array_split(states, len(states) // CHUNK + 1):
                    room = self.at_most - spent[chunk, e]
                    total[chunk] += np.maximum((row + room[:, :, None]).min(axis=1).max(axis=1), 0)
            total = np.minimum(total, self.prefix[-1])  # that is enough, and more might wrap around
        return total

    def _with_new_engines(self, so_far: Ints, started: int, engines: Ints) -> Ints:
        """``[states]`` the same with more engines, each led by a unit that the ones before leave."""
        richest = np.concatenate([[0], np.maximum.accumulate(self.value[started:])])
        for count in range(1, self.engines + 1):
            paid = np.searchsorted(self.prefix[started : len(self.value)], so_far, side="right")
            so_far = np.minimum(so_far + np.where(engines >= count, richest[paid], 0), self.prefix[-1])
        return so_far


def _tabulate(
    bound: PricedBound,
    tokens: list[int],
    order: list[int],
    prompt: list[int],
    price: list[int],
    scale: Fraction,
    prefill: list[list[Fraction]],
) -> tuple[Ints, list[Ints], list[_Cost]]:
    """``[n, k, classes + 1]`` most that sets led by each request are worth, less their time at k.

    For each place up to ``bound.places`` also ``[k, longer ones, classes + 1]``, the same for requests that
    come behind so many longer ones, from that place on; and what each request up to there costs. ``prompt``
    is what each counts with, ``prefill`` the seconds by function.

    Sets that take longer than the bound, because so many requests at least as long as one of theirs do, count
    or not: either way the most is at least that of the sets done in time.
    """
    last, n = bound.classes, len(order)
    ranks = max(len(line.rises_s) for minorant in bound.minorants for line in _lines(minorant))
    parts = [part for q, minorant in enumerate(bound.minorants) for part in _parts(q, minorant, ranks)]
    multipliers = [[Fraction(one) for one in of_class] for of_class in bound.multipliers]
    rank_cost = [
        np.array(
            [[floor(scale * row[part.q] * rise) for rise in part.rises] for row in multipliers], dtype=object
        )
        for part in parts
    ]
    length = [tokens[i] for i in order]
    seconds = [
        [(part, _sums(part.rises, n)) for part in parts if part.q == q] for q in range(len(bound.minorants))
    ]

    most = np.full((len(multipliers), ranks + 1, last + 1), NEVER, dtype=np.int64)
    most[:, :, 0] = 0
    table = np.full((n, len(multipliers), last + 1), NEVER, dtype=np.int64)
    rest, cost = [most[:, :0]] * bound.places + [most.copy()], []
    ticks = TICKS / Fraction(bound.lower_s)
    for i in reversed(range(n)):
        before = min(_most_before(length[i], seconds, Fraction(bound.lower_s)), i, ranks)
        rank = np.arange(before + 1)
        column = np.minimum(rank, ranks - 1)
        areas = [part.area(prompt[i], length[i]) for part in parts]
        fixed = np.array(
            [
                sum(floor(scale * row[part.q] * part.c * one) for part, one in zip(parts, areas, strict=True))
                + sum(floor(scale * one * seconds[i]) for one, seconds in zip(row, prefill, strict=True))
                for row in multipliers
            ],
            dtype=object,
        )
        gain = price[i] - fixed[:, None]
        for part, by_rank in zip(parts, rank_cost, strict=True):
            gain = gain - part.steps(length[i]) * by_rank[:, column]
        require(bool((np.abs(gain) < -NEVER).all()), "the multipliers are too large to compute with")
        first = [(part, one) for part, one in zip(parts, areas, strict=True) if part.q == 0]
        label = _labels(bound, length[i], first, float(prefill[0][i]))
        _fold(most[:, 1 : before + 2], np.cumsum(label)[: before + 1])
        after = most[:, np.minimum(rank + 1, ranks)]
        taken = np.full_like(after, NEVER)
        step = np.minimum(label[column], last)
        for shift in np.unique(step):
            rows = np.flatnonzero(step == shift)
            taken[:, rows, shift:] = after[:, rows, : last + 1 - shift]
            taken[:, rows, last] = after[:, rows, last - shift :].max(axis=2)
        taken += gain.astype(np.int64)[:, :, None]
        table[i] = taken[:, 0]
        most[:, 1 : before + 1] = np.maximum(most[:, 1 : before + 1], taken[:, 1:])
        if i <= bound.places:
            rest[i] = most[:, : min(i, ranks) + 1].copy()
        if i < bound.places:
            paid = np.array(price[i] - gain, dtype=np.int64).T
            seconds_of = [
                [
                    prefill[q][i] + sum(
                        part.steps(length[i]) * part.rises[min(r, ranks - 1)] + part.c * one
                        for part, one in zip(parts, areas, strict=True) if part.q == q
                    )
                    for q in range(len(bound.minorants))
                ]
                for r in range(before + 1)
            ]  # fmt: skip
            taken_ticks = np.array(
                [[floor(ticks * one) for one in row] for row in seconds_of], dtype=np.int64
            )
            cost.append(_Cost(paid, taken_ticks, n if before == ranks else before))
    return table, rest, cost[::-1]


@dataclass(frozen=True)
class _Part:
    """A function of a minorant, and the steps for which it holds."""

    q: int
    rises: list[Fraction]
    c: Fraction
    first: int
    last: int | None

    def steps(self, length: int) -> int:
        """Steps of a request that are counted with it."""
        return self._end(length) - min(length, self.first)

    def area(self, prompt: int, length: int) -> Fraction:
        """Context tokens that it reads in these."""
        return area(prompt, self._end(length)) - area(prompt, min(length, self.first))

    def _end(self, length: int) -> int:
        return length if self.last is None else min(length, self.last)


def _parts(q: int, minorant: ConcaveMinorant | SwitchedMinorant, ranks: int) -> list[_Part]:
    ends = [0, None] if isinstance(minorant, ConcaveMinorant) else [0, minorant.steps, None]
    found = []
    for line, first, last in zip(_lines(minorant), ends, ends[1:], strict=False):
        rises = [Fraction(one) for one in (*line.rises_s, *(line.rises_s[-1],) * (ranks - len(line.rises_s)))]
        found.append(_Part(q, rises, Fraction(line.c_s), first or 0, last))
    return found


def _labels(bound: PricedBound, length: int, parts: list[tuple[_Part, Fraction]], prefill_s: float) -> Ints:
    """Any classes will do; those of the solver make the bound what it said."""
    rank = np.arange(len(parts[0][0].rises))
    seconds, context_s = np.zeros(len(rank)), 0.0
    for part, context in parts:
        seconds += part.steps(length) * np.array([float(rise) for rise in part.rises])
        context_s += float(part.c) * float(context)
    seconds += context_s + prefill_s
    spread = 0.6180339887498949 * rank % 1.0 + 1e-9
    return np.floor(seconds / bound.label_s + spread).astype(np.int64)


def _fold(most: Ints, before: Ints) -> None:
    """Labels that so much before brings to the last class are one class."""
    last = most.shape[2] - 1
    beyond = np.arange(last) > (last - 1 - before[: most.shape[1]])[:, None]
    folded = np.where(beyond, most[:, :, :last], NEVER).max(axis=2, initial=NEVER)
    most[:, :, last] = np.maximum(most[:, :, last], folded)
    most[:, :, :last][:, beyond] = NEVER


def _most_before(length: int, seconds: list[list[tuple[_Part, list[Fraction]]]], makespan: Fraction) -> int:
    """How many requests at least as long an engine done by then can hold besides one of that length."""
    low, high = 0, len(seconds[0][0][1]) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if all(sum(part.steps(length) * g[middle] for part, g in parts) <= makespan for parts in seconds):
            low = middle
        else:
            high = middle - 1
    return low


def _most_collected(value: list[int], prefix: list[int], engines: int) -> int:
    """Most that leaders collect, each engine's own and no unit before the next leader left unpaid."""
    best: list[int | None] = [value[0], *[None] * (len(value) - 1)]  # by the last leader so far
    most = value[0]
    for _ in range(engines - 1):
        following: list[int | None] = [None] * len(value)
        richest: int | None = None
        for u in range(1, len(value)):
            before = best[u - 1]
            richest = before if richest is None else richest if before is None else max(richest, before)
            if richest is not None and richest >= prefix[u]:
                following[u] = richest + value[u]
        best = following
        most = max([most, *(one for one in best if one is not None)])
    return most
