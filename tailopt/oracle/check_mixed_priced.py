"""Checks :class:`tailopt.oracle.mixed_priced.PricedKindsBound`: prices that no engines can pay in time.

Every inequality is derived anew from the step times and the batch, in exact arithmetic; a dynamic program of
its own, in whole numbers that are rounded in the engines' favour, says what an engine of each kind can
collect by its leader; and no choice of leaders, kind by kind, collects the prices of all requests.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, product
from math import ceil, floor

import numpy as np

from tailopt.arrays import Ints
from tailopt.engine.profile import ShapeProfile
from tailopt.oracle.check_mixed_places import FREE, NEVER, NO_TICKS, TICKS, KindPlaces, Placed, none_is_left
from tailopt.oracle.check_parts import (
    all_below,
    area,
    fits_alone,
    held_prompt_tokens,
    line_below,
    require,
    require_rays,
    units_by_length,
)
from tailopt.oracle.mixed_priced import KindPrices, PricedKindsBound
from tailopt.oracle.mixed_rows import Crowd, Row
from tailopt.oracle.problem import Problem

MUCH = 2**60  # at least what any multiplier times the makespan is, in whole numbers
FINE = 2**90  # parts of a second in which shares of a step time are counted


def check_priced_kinds(bound: PricedKindsBound, problem: Problem) -> tuple[Fraction, str]:
    """The bound, if no plan done by then pays the prices."""
    trace, fleet = problem.trace, problem.fleet
    counts: dict[tuple[ShapeProfile, int], int] = {}
    for e in range(len(fleet.engines)):
        kind = fleet.shape_of(e), fleet.max_running(e)
        counts[kind] = counts.get(kind, 0) + 1
    require(len(bound.kinds) == len(counts), "the bound is for other kinds of engines")
    require(len(bound.prices) == trace.n_requests, "the prices are for another number of requests")
    require(min(bound.prices) >= 0 < sum(bound.prices) < np.inf, "the prices are no prices")

    units = units_by_length(problem)
    unit_of = {i: u for u, members in enumerate(units) for i in members}
    length = trace.output_tokens.tolist()
    order = sorted(unit_of, key=lambda i: (-length[i], unit_of[i], i))
    first: dict[int, int] = {}
    for place, i in enumerate(order):
        first.setdefault(unit_of[i], place)
    makespan, total = Fraction(bound.lower_s), sum(map(Fraction, bound.prices), Fraction(0))
    require(
        all(np.isfinite(x) for part in bound.kinds for one in part.multipliers for x in one),
        "a multiplier is not finite",
    )
    require(
        all(0 <= crowd.filling_s < 1e9 for part in bound.kinds for crowd in part.crowds),
        "what a token gets back while the cache fills is negative or too large",
    )
    steepest = max(sum(map(Fraction, one)) for part in bound.kinds for one in [(), *part.multipliers])
    spare_s = max(
        (
            Fraction(shape.kv_capacity_tokens) / Fraction(shape.prefill_tokens_per_s)
            for part, (shape, _) in zip(bound.kinds, counts, strict=True)
            if any(row.limit == "recompute" for row in part.rows)
        ),
        default=Fraction(0),
    )  # what a row may have besides the makespan
    filling_s = max((crowd.filling_s for part in bound.kinds for crowd in part.crowds), default=0.0)
    held, _ = held_prompt_tokens(trace, [fleet.shape_of(e) for e in range(len(fleet.engines))])
    back_s = Fraction(filling_s) * (sum(held) + trace.total_output_tokens)  # at most what requests get back
    scale = MUCH / max(16 * total, steepest * max(makespan + spare_s, back_s))
    price = [floor(scale * Fraction(bound.prices[i])) for i in order]
    of_unit = [0] * len(units)
    for i, one in zip(order, price, strict=True):
        of_unit[unit_of[i]] += one

    require(0 <= bound.places <= trace.n_requests, "more requests are placed than there are")
    leaders = [first[u] for u in range(len(units))]
    values, kinds, costs = [], [], []
    for part, ((shape, slots), count) in zip(bound.kinds, counts.items(), strict=True):
        _require_below(part, shape, slots, bound.within_s, problem)
        engine = _Engine(problem, shape, slots, order, set(leaders))
        table = _tabulate(part, engine, price, makespan, scale, bound.places)
        values.append(_values(part, engine, price, leaders, table))
        if bound.places:
            steady = all(crowd.filling_s == 0 for crowd in part.crowds)
            require(steady, "requests are placed, and some may make an engine faster")
            kinds.append(_places(table, count, values[-1], part, engine, leaders))
            constants = [tuple(table.constants(part, engine, place)) for place in range(len(order))]
            costs.append(list(zip(engine.requests, constants, strict=True)))
    prefix, complaint = [0, *accumulate(of_unit)], f"engines done by {bound.lower_s} s may pay all prices"
    lower = min(makespan, Fraction(bound.within_s))
    if bound.places == 0:
        require(_most_collected(values, list(counts.values()), prefix) < sum(of_unit), complaint)
        return lower, "prices on kinds"
    unit = [unit_of[i] for i in order]
    numbers: dict[object, int] = {}
    equal = [numbers.setdefault(one, len(numbers)) for one in zip(*costs, strict=True)]
    require(none_is_left(kinds, unit, price, np.array(prefix), bound.places, equal), complaint)
    return lower, "prices on kinds and search"


def _require_below(
    part: KindPrices, shape: ShapeProfile, slots: int, within_s: float, problem: Problem
) -> None:
    """The functions lie below the kind's step time, for as many requests as can run together."""
    count = len(part.rows) + len(part.crowds) + len(part.concave)
    require(
        all(len(one) == count and min(one, default=0.0) >= 0 for one in part.multipliers),
        "the multipliers are not one for each inequality, or negative",
    )
    require(part.label_s > 0 and 1 <= part.classes <= 10_000, "the labels have no grid")
    for minorant in {row.minorant for row in part.rows}:
        require_rays(part.rays, minorant.n_max, within_s, slots, [shape], problem)
        require(all_below(minorant, [shape]), "the affine function is not below the step times")
    for row in part.rows:
        require(row.head_start >= 0, "a head start is negative")
        require(row.limit in ("longest", "slots", "cache", "recompute"), "a row is of no known sort")
    for crowd in part.crowds:
        require(1 <= crowd.ranks <= len(crowd.below.rises_s), "a crowd is divided at no rank of its function")
    for one in dict.fromkeys([*part.concave, *(crowd.below for crowd in part.crowds)]):
        rises, slope = [Fraction(rise) for rise in one.rises_s], Fraction(one.c_s)
        require(min(*rises, slope) >= 0, "a function below the step times falls")
        require(all(later <= rise for rise, later in pairwise(rises)), "a function is not concave")
        flat = Fraction(0)
        for n in range(1, min(slots, problem.trace.n_requests) + 1):
            flat += rises[min(n, len(rises)) - 1]
            require(
                line_below(flat, slope, shape.step_time, n),
                f"a function is not below the step times of {n} requests",
            )


@dataclass(frozen=True)
class _Request:
    """One request on an engine of a kind; equal ones count as the same in a search over places."""

    output: int
    context: Fraction
    held: int
    prefill_s: Fraction
    fits: bool


class _Engine:
    """A kind of engine, and the requests as it sees them, longest first."""

    def __init__(
        self, problem: Problem, shape: ShapeProfile, slots: int, order: list[int], leaders: set[int]
    ) -> None:
        trace, fleet = problem.trace, problem.fleet
        shapes = [fleet.shape_of(e) for e in range(len(fleet.engines))]
        held, shared = held_prompt_tokens(trace, shapes)
        samples = Counter(trace.group.tolist())
        self.rate, self.slots = Fraction(shape.prefill_tokens_per_s), slots
        self.cache = shape.kv_capacity_tokens // shape.block_tokens * shape.block_tokens
        self.requests: list[_Request] = []
        self.held_s: dict[Crowd, list[int]] = {}
        for place, i in enumerate(order):
            prompt, output = int(trace.context_tokens[i]), int(trace.output_tokens[i])
            tokens = Fraction(prompt - shared[i] - 1)
            if not problem.atomic:  # each sample pays for as much of what an engine computes once for all
                tokens += Fraction(shared[i], samples[trace.group[i]])
            elif place in leaders:
                tokens += shared[i]
            self.requests.append(
                _Request(
                    output, area(prompt, output), held[i], tokens / self.rate, fits_alone(problem, shape, i)
                )
            )

    def constant(self, row: Row, longest: int) -> Fraction | None:
        """Seconds of the row besides what requests add; None if it does not hold for this leader."""
        a = Fraction(row.minorant.a_s)
        if row.limit == "longest":
            return a * longest
        if longest < row.head_start:
            return None
        return a * row.head_start - (self.cache / self.rate if row.limit == "recompute" else 0)

    def added(self, row: Row, request: _Request) -> Fraction:
        """Seconds that a request adds to the row."""
        a, b, c = (Fraction(term) for term in (row.minorant.a_s, row.minorant.b_s, row.minorant.c_s))
        late = max(0, request.output - row.head_start)
        extra = Fraction(0)
        if row.limit == "slots":
            extra = a * late / self.slots
        elif row.limit == "cache":
            extra = a * self._busy(request, row.head_start) / self.cache
        elif row.limit == "recompute" and late:
            kept = a * self._busy(request, row.head_start) / self.cache
            again = max(0, row.head_start - 1) / self.rate
            extra = min(kept + again, a * self._busy(request, 1) / self.cache)
        return extra + b * request.output + c * request.context + request.prefill_s

    def crowded(self, crowd: Crowd, request: _Request) -> Fraction:
        """Seconds that a request adds to the row of a crowd, whatever its rank."""
        if crowd not in self.held_s:
            self.held_s[crowd] = self._shares(crowd)
        before = self.held_s[crowd]
        shared = Fraction(before[request.held + request.output] - before[request.held], self.cache * FINE)
        shared -= Fraction(_fine(crowd.filling_s), FINE) * request.held
        return shared + Fraction(crowd.below.c_s) * request.context + request.prefill_s

    def filled(self, crowd: Crowd, makespan: Fraction) -> list[Fraction | None]:
        """Constant of a crowd's row by the place of the leader, for engines done by then; None: no row.

        Requests that do not fill the cache make the row say at most what the steepest of them would make it
        say if it filled the cache, besides the constant and the ranks; beyond the makespan that is too much.
        """
        full = Fraction(_fine(crowd.filling_s) * self.cache, 2 * FINE)
        rises = [Fraction(rise) for rise in crowd.below.rises_s[: crowd.ranks]]
        by_rank = sum((rise - rises[-1] for rise in rises), Fraction(0))
        found: list[Fraction | None] = []
        steepest = Fraction(0)
        for request in reversed(self.requests):
            rate = self.crowded(crowd, request) / (request.output + request.held)
            steepest = max(steepest, rate)
            fitting = full + request.output * by_rank + self.cache * steepest
            constant = full - max(Fraction(0), fitting - makespan)
            found.append(Fraction(0) if not full else constant if constant >= 0 else None)
        return found[::-1]

    def _shares(self, crowd: Crowd) -> list[int]:
        """Sums over x below 0, 1, ... of what x held tokens cost in one step, times cache and ``FINE``."""
        rises = [_fine(rise) for rise in crowd.below.rises_s]
        shared = [min(rise, rises[crowd.ranks - 1]) for rise in rises]
        sums, filling = [0, *accumulate(shared)], _fine(crowd.filling_s)
        most = min(self.slots, len(self.requests))
        sums_on = [sums[min(n, len(shared))] + max(0, n - len(shared)) * shared[-1] for n in range(most + 1)]
        few = [  # a step of n would not pay what they get back while the cache fills
            n for n in range(1, most + 1) if sums_on[n] - n * shared[min(n, len(shared) - 1)] < n * filling
        ]
        shares = {n: self.cache * sums_on[n] // n - self.cache * filling for n in few}
        before = [0, min([0, *shares.values()])]  # nothing held costs nothing
        for x in range(1, max(request.held + request.output for request in self.requests)):
            n = min(self.cache // x, len(shared))  # f between n and n + 1, at cache / x, times x
            least = x * sums[n] + (self.cache - n * x) * shared[min(n, len(shared) - 1)]
            least -= 1  # as much as ``shares`` are rounded: beyond cache / n a line of n does not count
            for n in few[: bisect_right(few, self.cache // x)]:
                least = min(least, shares[n] + filling * n * x)
            before.append(before[-1] + least)
        return before

    @staticmethod
    def _busy(request: _Request, gained: int) -> int:
        """Token-steps of cache for the tokens after the first ``gained``."""
        late = range(min(gained, request.output), request.output)  # with each, so many are held before it
        return (late[0] + late[-1]) * len(late) // 2 + len(late) * request.held if late else 0


def _fine(seconds: float) -> int:
    """In parts of a second, rounded down."""
    return floor(FINE * Fraction(seconds))


@dataclass(frozen=True, eq=False)
class _Table:
    """What the dynamic program of a kind says.

    Attributes:
        makespan, scale: whole numbers of a second's worth.
        led: ``[n, k, classes + 1]`` most that sets led by each request are worth, less their time at k.
        rest: for each place ``[k, longer ones + 1, classes + 1]`` the same of requests from there on, behind
            so many longer ones.
        placed: what the requests before the last place cost.
        filled: for each crowd ``[n]`` the constant of its row by the place of the leader; None: no row.
    """

    makespan: Fraction
    scale: Fraction
    led: Ints
    rest: list[Ints]
    placed: list[Placed]
    filled: list[list[Fraction | None]]

    def room(self, part: KindPrices, engine: _Engine, leader: int) -> Ints:
        """``[k]`` the makespan less a leader's constants, at multipliers whose rows hold; else ``FREE``."""
        constants = self.constants(part, engine, leader)
        found = []
        for row in part.multipliers:
            used = [(Fraction(x), less) for x, less in zip(row, constants, strict=True) if x]
            room_s = sum((x * (self.makespan - less) for x, less in used if less is not None), Fraction(0))
            room = ceil(self.scale * room_s)
            require(room < -NEVER, "the multipliers are too large to compute with")
            holds = all(less is not None for _, less in used)
            found.append(max(-MUCH, room) if holds else FREE)
        return np.array(found, dtype=np.int64)

    def constants(self, part: KindPrices, engine: _Engine, leader: int) -> list[Fraction | None]:
        """Seconds of each inequality besides what requests add; None if it does not hold for this leader."""
        rows = [engine.constant(row, engine.requests[leader].output) for row in part.rows]
        return [*rows, *(one[leader] for one in self.filled), *[Fraction(0)] * len(part.concave)]


def _values(
    part: KindPrices, engine: _Engine, price: list[int], leaders: list[int], table: _Table
) -> list[int | None]:
    """Most that an engine led by each unit is worth if it is done by the makespan; None: it cannot be."""
    values: list[int | None] = []
    room_for, everything = _Room(part, table.makespan), sum(price)
    for place in leaders:
        one = engine.requests[place]
        if not one.fits or room_for.besides(one.output) < 0:
            values.append(None)
            continue
        worth = table.led[place] + table.room(part, engine, place)[:, None]
        most = min(everything, int(worth.min(axis=0).max())) if len(worth) else everything
        values.append(None if most <= NEVER + MUCH else most)
    return values


def _places(
    table: _Table, count: int, values: list[int | None], part: KindPrices, engine: _Engine, leaders: list[int]
) -> KindPlaces:
    """What the search over places needs to know of a kind."""
    ticks = TICKS / table.makespan
    constant = [
        [NO_TICKS if less is None else floor(ticks * less) for less in table.constants(part, engine, place)]
        for place in leaders
    ]
    return KindPlaces(
        count=count,
        value=np.array([max(0, one or 0) for one in values], dtype=np.int64),
        room=np.array([table.room(part, engine, place) for place in leaders], dtype=np.int64),
        constant=np.array(constant, dtype=np.int64),
        rest=table.rest,
        placed=table.placed,
    )


def _tabulate(
    part: KindPrices, engine: _Engine, price: list[int], makespan: Fraction, scale: Fraction, places: int
) -> _Table:
    """The dynamic program of a kind; ``rest`` and ``placed`` for so many places."""
    requests, n, last = engine.requests, len(engine.requests), part.classes
    multipliers = [[Fraction(one) for one in row] for row in part.multipliers]
    flat, by_rank_s = len(part.rows), _by_rank(part)
    ranks = max(map(len, by_rank_s), default=1)
    rises = [[*one, *(one[-1],) * (ranks - len(one))] for one in by_rank_s]
    by_rank = np.array(
        [[sum(floor(scale * x * rise[r]) for x, rise in zip(row[flat:], rises, strict=True))
          for r in range(ranks)] for row in multipliers], dtype=object,
    )  # fmt: skip
    label_of = _labels(part, engine)
    room_for = _Room(part, makespan)
    most = np.full((len(multipliers), ranks + 1, last + 1), NEVER, dtype=np.int64)
    most[:, :, 0] = 0
    table = np.full((n, len(multipliers), last + 1), NEVER, dtype=np.int64)
    rest, placed = [most[:, :0]] * places + [most.copy()], []
    ticks = TICKS / makespan
    for i in reversed(range(n)):
        one = requests[i]
        room = room_for.besides(one.output) if one.fits else -1
        before = min(room, i, ranks)
        if before >= 0:
            column = np.minimum(np.arange(before + 1), ranks - 1)
            added = [
                *(engine.added(row, one) for row in part.rows),
                *(engine.crowded(crowd, one) for crowd in part.crowds),
                *(Fraction(g.c_s) * one.context + one.prefill_s for g in part.concave),
            ]
            fixed = [
                sum(floor(scale * x * second) for x, second in zip(row, added, strict=True))
                for row in multipliers
            ]
            gain = price[i] - one.output * by_rank[:, column] - np.array(fixed, dtype=object)[:, None]
            gain = np.maximum(gain, NEVER).astype(np.int64)  # what costs so much is never worth it
            after = most[:, np.minimum(np.arange(before + 1) + 1, ranks)]
            taken = np.full_like(after, NEVER)
            step = np.minimum(label_of[i][column], last)
            for shift in np.unique(step):
                rows = np.flatnonzero(step == shift)
                taken[:, rows, shift:] = after[:, rows, : last + 1 - shift]
                taken[:, rows, last] = after[:, rows, last - shift :].max(axis=2)
            taken = np.maximum(taken + gain[:, :, None], NEVER)
            table[i] = taken[:, 0]
            most[:, 1 : before + 1] = np.maximum(most[:, 1 : before + 1], taken[:, 1:])
        if i <= places:
            rest[i] = most[:, : min(i, ranks) + 1].copy()
        if i < places and before < 0:
            nothing = np.zeros((1, len(multipliers)), dtype=np.int64)
            placed.append(Placed(nothing, np.zeros((1, flat + len(rises)), dtype=np.int64), -1))
        elif i < places:
            zero = [Fraction(0)] * flat
            seconds = [
                [second + one.output * rise for second, rise in zip(added, of_rank, strict=True)]
                for of_rank in ([*zero, *(rise[r] for rise in rises)] for r in column)
            ]
            floors = [[floor(ticks * second) for second in row] for row in seconds]
            placed.append(Placed((price[i] - gain).T, np.array(floors, dtype=np.int64), room))
    filled = [engine.filled(crowd, makespan) for crowd in part.crowds]
    return _Table(makespan, scale, table, rest, placed[::-1], filled)


def _by_rank(part: KindPrices) -> list[list[Fraction]]:
    """Rises that requests pay by their rank, of the crowds and of the concave functions."""
    crowds = []
    for crowd in part.crowds:
        rises = [Fraction(rise) for rise in crowd.below.rises_s[: crowd.ranks]]
        crowds.append([rise - rises[-1] for rise in rises])
    return [*crowds, *([Fraction(rise) for rise in one.rises_s] for one in part.concave)]


def _labels(part: KindPrices, engine: _Engine) -> list[Ints]:
    """Any classes will do; those of the solver make the bound what it said."""
    by_rank_s = _by_rank(part)
    ranks = max(map(len, by_rank_s), default=1)
    last_s = [float(rise) for rise in by_rank_s[-1]] if by_rank_s else []
    spread = 0.6180339887498949 * np.arange(ranks) % 1.0 + 1e-9
    found = []
    for one in engine.requests:
        if last_s:
            rises = np.array([*last_s, *(last_s[-1],) * (ranks - len(last_s))])
            if part.concave:
                fixed_s = part.concave[-1].c_s * float(one.context) + float(one.prefill_s)
            else:
                fixed_s = float(engine.crowded(part.crowds[-1], one))
            seconds = one.output * rises + fixed_s
        else:
            seconds = np.array([float(engine.added(part.rows[-1], one))]) if part.rows else np.zeros(1)
        seconds = np.maximum(seconds, 0.0)
        found.append(np.minimum(seconds / part.label_s + spread, 2.0**40).astype(np.int64))
    return found


class _Room:
    """How many requests at least as long an engine done by the makespan can hold besides a given one."""

    def __init__(self, part: KindPrices, makespan: Fraction) -> None:
        self.makespan = makespan
        concave = [*part.concave, *(crowd.below for crowd in part.crowds)]
        self.sums = [list(accumulate(map(Fraction, one.rises_s))) for one in concave]
        self.last = [Fraction(one.rises_s[-1]) for one in concave]

    def besides(self, length: int) -> int:
        """-1 if not even one of that length can be."""
        most, within = 2**40, self.makespan / length
        for sums, last in zip(self.sums, self.last, strict=True):
            fit = bisect_right(sums, within)
            if fit == len(sums):  # the last rise goes on
                fit += floor((within - sums[-1]) / last) if last else 2**40
            most = min(most, fit - 1)
        return most


def _most_collected(values: list[list[int | None]], counts: list[int], prefix: list[int]) -> int:
    """Most that leaders collect, each engine's own and no unit before the next leader left unpaid."""
    value = [np.array([NEVER if one is None else one for one in of_kind]) for of_kind in values]
    due = np.array(prefix[:-1])
    start = np.full(len(due), NEVER)
    best: dict[tuple[int, ...], Ints] = {}
    most = NEVER
    for state in product(*(range(count + 1) for count in counts)):
        if any(state) and state not in best:
            continue
        if not any(state):
            before = start.copy()
            before[0] = 0  # the first leader is the longest unit
        else:
            most = max(most, int(best[state].max()))
            before = np.concatenate([[NEVER], np.maximum.accumulate(best[state])[:-1]])
        for k, count in enumerate(state):
            if count < counts[k]:
                after = (*state[:k], count + 1, *state[k + 1 :])
                may = (before >= due) & (value[k] > NEVER)
                collected = np.where(may, before + value[k], NEVER)
                best[after] = np.maximum(best.get(after, start), collected)
    return most
