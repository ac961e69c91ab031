r"""One integer program for all solvers: which engine takes which unit, so that the last is done soonest.

Time is counted in **ticks** of 2^-k seconds, and every coefficient is rounded **down**, from exact
fractions. So no plan has fewer seconds than its ticks say, and a solver's lower bound on the ticks is a
lower bound on the makespan of every static plan; at most one tick a unit is lost. With x[u, e] = 1 if unit
u is on engine e:

- every unit is on one engine;
- an engine is done after its longest unit's steps and its units' own seconds (the affine terms of
  :mod:`tailopt.oracle.kinds`, one row for each: exact if the step time is affine and everything fits);
- where the step time is concave and there are few requests: an engine takes :math:`\sum_k f(n(k)) + c \sum
  A_i`;
- alike engines open in the order of their longest units (they can be exchanged);
- the makespan is no less than a bound that is known, and no more than a plan at hand takes.

Each constraint is one function below. They are written once, for any solver whose expressions add up and
compare (:class:`Modeler`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from tailopt.arrays import Ints
from tailopt.engine.decode_time import context_read
from tailopt.engine.step_time import Affine
from tailopt.oracle.alone import concave
from tailopt.oracle.kinds import Kind, KindTerms, kinds_of
from tailopt.oracle.minorant import Minorant
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import Units, too_large

MOST_CROWD_VARIABLES = 20_000
"""Booleans up to which a concave step time is modelled as it is, and not by affine functions below it."""

Formulation = Literal["longest", "leader"]
"""How an engine's longest unit is known: a variable no less than each of its units' steps, or booleans
"opened by unit u" whose rise marks the leader. The first is smaller, the second is the stronger one."""


@dataclass(frozen=True, eq=False)
class Row:
    """``max over its units of lead + sum over its units of weight <= makespan``, in ticks, for one engine.

    Attributes:
        lead: ``[u]`` ticks of the steps of each unit's longest request, falling; or zeros.
        weight: ``[u]`` ticks that each unit adds.
    """

    lead: Ints
    weight: Ints


@dataclass(frozen=True, eq=False)
class Crowd:
    """Ticks of an engine by how many requests run on it in each stretch between two lengths.

    Attributes:
        running: ``[u, stretches]`` requests of each unit that run in a stretch, the longest's first.
        ticks: ``[stretches][n + 1]`` ticks of a stretch with 0 .. n requests, n being all that can run in it.
        reading: ``[u]`` ticks that the context of each unit adds.
    """

    running: Ints
    ticks: list[Ints]
    reading: Ints


@dataclass(frozen=True, eq=False)
class IntegerModel:
    """The program in numbers.

    Attributes:
        ticks_per_s: a power of two.
        kind_of: ``[engines]``.
        allowed: ``[kinds, u]`` whether the unit's requests fit into the cache at all.
        rows: for each kind, its rows.
        crowds: for each kind, its step time as it is, or None.
        lower: ticks that every plan takes, as is known; the makespan's lower end.
    """

    ticks_per_s: float
    kind_of: Ints
    allowed: list[list[bool]]
    rows: list[list[Row]]
    crowds: list[Crowd | None]
    lower: int

    @property
    def n_units(self) -> int:
        """Number of units."""
        return len(self.allowed[0])

    @property
    def digest(self) -> str:
        """SHA-256 of all numbers: equal models, equal digest."""
        numbers = [
            repr(self.ticks_per_s),
            self.kind_of.tolist(),
            self.allowed,
            [[(row.lead.tolist(), row.weight.tolist()) for row in rows] for rows in self.rows],
            [
                None if c is None else (c.running.tolist(), [t.tolist() for t in c.ticks], c.reading.tolist())
                for c in self.crowds
            ],
            self.lower,
        ]
        return sha256(repr(numbers).encode()).hexdigest()

    def engine_ticks(self, e: int, units: Sequence[int]) -> int:
        """Ticks of an engine for a set of units."""
        kind = int(self.kind_of[e])
        chosen = list(units)
        if not chosen:
            return 0
        ticks = [int(row.lead[chosen].max() + row.weight[chosen].sum()) for row in self.rows[kind]]
        crowd = self.crowds[kind]
        if crowd is not None:
            running = crowd.running[chosen].sum(axis=0)
            steps = sum(int(t[n]) for t, n in zip(crowd.ticks, running, strict=True))
            ticks.append(steps + int(crowd.reading[chosen].sum()))
        return max(ticks)

    def makespan(self, engine_of_unit: Ints) -> int:
        """Ticks of the engine that is done last, and no fewer than ``lower``."""
        ends = [
            self.engine_ticks(e, np.flatnonzero(engine_of_unit == e).tolist())
            for e in range(len(self.kind_of))
        ]
        return max(self.lower, *ends)


def integer_model(
    problem: Problem, units: Units, terms: Sequence[KindTerms], within_s: float, lower_s: float, bits: int
) -> IntegerModel:
    """The program of a problem, its numbers rounded down from exact fractions.

    Args:
        problem, units: the batch.
        terms: affine terms of each kind, for plans done within ``within_s``.
        within_s: makespan of a plan at hand.
        lower_s: a bound that is known.
        bits: the makespan is about 2^bits ticks.
    """
    kinds = kinds_of(problem.fleet)
    scale = Fraction(2) ** (bits - int(np.ceil(np.log2(within_s))))
    kind_of = np.empty(len(problem.fleet.engines), dtype=np.int64)
    for k, kind in enumerate(kinds):
        kind_of[list(kind.engines)] = k
    return IntegerModel(
        ticks_per_s=float(scale),
        kind_of=kind_of,
        allowed=[
            [not too_large(problem, kind.shape)[members].any() for members in units.members] for kind in kinds
        ],
        rows=[
            _rows(units, kind, part, problem.trace.n_requests, scale, 1 << bits + 1)
            for kind, part in zip(kinds, terms, strict=True)
        ],
        crowds=[_crowd(problem, units, kind, scale, 1 << bits + 1) for kind in kinds],
        lower=max(0, int(Fraction(lower_s) * scale) - len(units.members) - 1),
    )


def _rows(units: Units, kind: Kind, terms: KindTerms, n: int, scale: Fraction, most: int) -> list[Row]:
    """The rows of one kind; ``most`` ticks are more than any plan in question takes."""
    slots, cache = kind.max_running, kind.shape.kv_capacity_tokens
    rising = [one for one in terms.minorants if one.a_s > 0] or list(terms.minorants)
    rows = []
    for one in rising:
        rows.append(_row(units, one, Fraction(one.a_s), Fraction(0), Fraction(0), scale, most))
        if one.a_s > 0 and n > slots:
            rows.append(_row(units, one, Fraction(0), Fraction(one.a_s) / slots, Fraction(0), scale, most))
        if one.a_s > 0 and units.most_context > cache:
            rows.append(_row(units, one, Fraction(0), Fraction(0), Fraction(one.a_s) / cache, scale, most))
    return rows


def _row(
    units: Units,
    one: Minorant,
    a: Fraction,
    per_token: Fraction,
    per_cache: Fraction,
    scale: Fraction,
    most: int,
) -> Row:
    per_token, per_context = Fraction(one.b_s) + per_token, Fraction(one.c_s)
    lead = [min(most, int(a * scale * length)) for length in units.longest.tolist()]
    weight = [
        min(most, int(scale * (per_token * tokens + per_context * context + per_cache * cache)))
        for tokens, context, cache in zip(
            units.tokens.tolist(), units.context.tolist(), units.cache.tolist(), strict=True
        )
    ]
    return Row(np.array(lead, dtype=np.int64), np.array(weight, dtype=np.int64))


def _crowd(problem: Problem, units: Units, kind: Kind, scale: Fraction, most: int) -> Crowd | None:
    """The step time of one kind as it is, if concave but not affine, and small enough."""
    trace, tau = problem.trace, kind.shape.step_time
    lines = tau.lines(trace.n_requests)
    lengths = np.unique(trace.output_tokens)[::-1]
    total = (trace.output_tokens[:, None] >= lengths).sum(axis=0)
    if (
        isinstance(tau, Affine)
        or not concave(lines)
        or int(total.sum()) * len(problem.fleet.engines) > MOST_CROWD_VARIABLES
    ):
        return None
    stretch = (lengths - np.append(lengths[1:], 0)).tolist()
    f = [Fraction(float(seconds)) for seconds in tau(np.arange(trace.n_requests + 1), 0)]
    c = Fraction(float(lines.slope_s[0])) * scale
    area = context_read(trace.context_tokens, trace.output_tokens)
    return Crowd(
        running=np.stack([(trace.output_tokens[m][:, None] >= lengths).sum(axis=0) for m in units.members]),
        ticks=[
            np.array([min(most, int(f[n] * steps * scale)) for n in range(count + 1)], dtype=np.int64)
            for steps, count in zip(stretch, total.tolist(), strict=True)
        ],
        reading=np.array([min(most, int(c * int(area[m].sum()))) for m in units.members], dtype=np.int64),
    )


class Modeler(Protocol):
    """A solver's model: variables whose expressions add, multiply by numbers, and compare."""

    def boolean(self, hint: bool) -> Any:
        """A variable that is 0 or 1; a solution at hand has it at ``hint``."""

    def whole(self, low: int, high: int, hint: int) -> Any:
        """A variable from ``low`` to ``high``; a solution at hand has it at ``hint``."""

    def require(self, constraint: Any) -> None:
        """Require a comparison of two expressions."""

    def total(self, terms: Sequence[Any], factors: Sequence[int] | None = None) -> Any:
        """Sum of the terms, each multiplied by its factor."""


@dataclass(frozen=True, eq=False)
class Variables:
    """``placed[u][e]``: unit u is on engine e (the number 0 where it cannot be); the makespan in ticks."""

    placed: list[list[Any]]
    makespan: Any


def write_model(
    modeler: Modeler, model: IntegerModel, engine_of_unit: Ints, formulation: Formulation
) -> Variables:
    """Write the program into a solver's model; the plan at hand is a hint and the makespan's upper end."""
    hint = in_opening_order(model, engine_of_unit)
    upper = model.makespan(hint)
    makespan = modeler.whole(model.lower, upper, upper)
    placed = placements(modeler, model, hint)
    every_unit_is_on_one_engine(modeler, placed)
    opened = openings(modeler, placed, hint) if formulation == "leader" else []
    an_engine_opens_with_a_unit(modeler, placed, opened)
    alike_engines_open_in_order(modeler, model, opened)
    for e, k in enumerate(model.kind_of.tolist()):
        column = [placed[u][e] for u in range(model.n_units)]
        chosen = hint == e
        for row in model.rows[k]:
            if not row.lead.any():
                lead = 0
            elif formulation == "leader":
                lead = leader_ticks(modeler, row, [opened[u][e] for u in range(model.n_units)])
            else:
                lead = longest_ticks(modeler, row, column, chosen)
            an_engine_is_done_within_the_makespan(modeler, lead, row.weight, column, makespan)
        crowd = model.crowds[k]
        if crowd is not None:
            steps = crowd_ticks(modeler, crowd, column, chosen)
            an_engine_is_done_within_the_makespan(modeler, steps, crowd.reading, column, makespan)
    return Variables(placed, makespan)


def in_opening_order(model: IntegerModel, engine_of_unit: Ints) -> Ints:
    """The same plan with alike engines exchanged, so that they open in order."""
    renamed = np.empty_like(engine_of_unit)
    for k in range(len(model.rows)):
        alike = np.flatnonzero(model.kind_of == k)
        of_kind = np.isin(engine_of_unit, alike)
        used, first = np.unique(engine_of_unit[of_kind], return_index=True)
        for new, old in zip(alike, used[np.argsort(first)], strict=False):
            renamed[engine_of_unit == old] = new
    return renamed


def placements(modeler: Modeler, model: IntegerModel, hint: Ints) -> list[list[Any]]:
    """x[u][e] where the unit can be: it fits, and as many units come before it as alike engines do."""
    before = [int((model.kind_of[:e] == k).sum()) for e, k in enumerate(model.kind_of)]
    return [
        [
            modeler.boolean(bool(hint[u] == e)) if model.allowed[k][u] and before[e] <= u else 0
            for e, k in enumerate(model.kind_of.tolist())
        ]
        for u in range(model.n_units)
    ]


def every_unit_is_on_one_engine(modeler: Modeler, placed: list[list[Any]]) -> None:
    """sum over e of x[u][e] = 1."""
    for row in placed:
        modeler.require(modeler.total(row) == 1)


def openings(modeler: Modeler, placed: list[list[Any]], hint: Ints) -> list[list[Any]]:
    """opened[u][e]: some unit up to u is on engine e."""
    return [
        [modeler.boolean(bool((hint[: u + 1] == e).any())) for e in range(len(placed[0]))]
        for u in range(len(placed))
    ]


def an_engine_opens_with_a_unit(modeler: Modeler, placed: list[list[Any]], opened: list[list[Any]]) -> None:
    """x[u][e] and opened[u - 1][e] each imply opened[u][e], which implies one of them."""
    for u in range(len(opened)):
        for e, on_it in enumerate(placed[u]):
            before = opened[u - 1][e] if u else 0
            modeler.require(modeler.total([opened[u][e], on_it], [1, -1]) >= 0)
            modeler.require(modeler.total([opened[u][e], before], [1, -1]) >= 0)
            modeler.require(modeler.total([opened[u][e], before, on_it], [1, -1, -1]) <= 0)


def alike_engines_open_in_order(modeler: Modeler, model: IntegerModel, opened: list[list[Any]]) -> None:
    """opened[u][e'] implies opened[u][e] for the engine e before e' of one kind."""
    for k in range(len(model.rows)):
        alike = np.flatnonzero(model.kind_of == k).tolist()
        for row in opened:
            for first, then in pairwise(alike):
                modeler.require(modeler.total([row[first], row[then]], [1, -1]) >= 0)


def leader_ticks(modeler: Modeler, row: Row, opened: list[Any]) -> Any:
    """Ticks of the unit that opens the engine: its longest, since units are sorted."""
    falls = row.lead - np.append(row.lead[1:], 0)
    return modeler.total(opened, falls.tolist())


def longest_ticks(modeler: Modeler, row: Row, column: list[Any], chosen: Any) -> Any:
    """A variable no less than the ticks of each of the engine's units."""
    longest = modeler.whole(0, int(row.lead.max()), int(row.lead[chosen].max(initial=0)))
    for on_it, lead in zip(column, row.lead.tolist(), strict=True):
        modeler.require(modeler.total([longest, on_it], [1, -lead]) >= 0)
    return longest


def crowd_ticks(modeler: Modeler, crowd: Crowd, column: list[Any], chosen: Any) -> Any:
    """Ticks of all stretches, each by booleans "at least j requests run in it"."""
    ladder, rises = [], []
    for s, ticks in enumerate(crowd.ticks):
        running = int(crowd.running[chosen, s].sum())
        at_least = [modeler.boolean(j <= running) for j in range(1, len(ticks))]
        for fewer, more in pairwise(at_least):
            modeler.require(modeler.total([fewer, more], [1, -1]) >= 0)
        counted = [*column, *at_least]
        signs = [*crowd.running[:, s].tolist(), *(-1 for _ in at_least)]
        modeler.require(modeler.total(counted, signs) == 0)
        ladder += at_least
        rises += np.diff(ticks).tolist()
    return modeler.total(ladder, rises)


def an_engine_is_done_within_the_makespan(
    modeler: Modeler, steps: Any, weight: Ints, column: list[Any], makespan: Any
) -> None:
    """The steps' ticks and the units' own ticks are no more than the makespan."""
    modeler.require(modeler.total([steps, *column, makespan], [1, *weight.tolist(), -1]) <= 0)
