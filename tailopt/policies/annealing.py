r"""Annealing on scenarios: one assignment of units to engines that is good in many outcomes at once.

Given equally likely outcomes s of a batch, the plan sought minimises the mean over s of the makespan, or the
mean over the worst few (conditional value at risk). With everything admitted at once and a separable step
time tau = f(n) + c K, an engine that holds the units U is done in scenario s after

.. math:: T_s = \sum_j L_{(j)} \, (f(j) - f(j-1)) + c \sum_i A_i ,

its outputs sorted longest first; f affine leaves :math:`a \max L + \sum w`. A step of the search moves a
unit to another engine or swaps two, so two engines change and the others' times stand:

- *affine*: a sum and a maximum over the units of an engine, for all scenarios in one sweep;
- *other*: each engine keeps its outputs of each scenario sorted; a unit leaves and another enters
  in one merge.

Metropolis' rule is drawn before the step is evaluated: it accepts any change of the mean up to a threshold.
Merges are dear, so the evaluation of a step looks at what it has after every ``LOOK`` scenarios, and
refuses once the threshold lies ``SURE`` standard errors below their mean change. Most steps are bad, and
refused at the first look.
"""

import time
from dataclasses import dataclass

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints
from tailopt.engine.decode_time import context_read
from tailopt.engine.step_time import Affine, Lines, StepTime
from tailopt.plan import Fleet

HOT, WARM, COLD = 1e-2, 1e-3, 1e-5
"""Temperatures over the value of the plan that a search starts from: first, first of the second search where
step times are not affine, and last."""

SWEEPS = 10
"""Kernel calls of a search: between two of them it can be interrupted."""

LOOK, SURE = 20, 3.0

BUDGET = 1e9
"""Updates of a unit or request in one scenario that a search does by default, a nanosecond or two each."""

TRIES = 400
"""Most steps by default for each unit and engine: small problems need fewer than ``BUDGET`` allows."""

MERGE = 8  # what a request costs in a merge, in such updates


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Scenarios as the search wants them: requests sorted by unit, within a unit by falling length.

    Attributes:
        start: ``[units + 1]`` where the requests of each unit start.
        tokens: ``[n, scenarios]`` outputs, falling within each unit and scenario.
        longest: ``[units, scenarios]`` longest output of each unit.
        extra_s: ``[shapes, units, scenarios]`` seconds a unit adds whatever else is there: of its context
            and, if all step times are affine, b for each of its tokens.
        rise_s: ``[shapes, n + 1]`` f(j) - f(j - 1) at j; column 0 is zero. For affine step times a at j = 1.
        shape: ``[engines]`` row of ``extra_s`` and ``rise_s``.
        affine: whether all step times are affine.
    """

    start: Ints
    tokens: Floats
    longest: Floats
    extra_s: Floats
    rise_s: Floats
    shape: Ints
    affine: bool

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.start) - 1

    @property
    def scenarios(self) -> int:
        """Number of scenarios."""
        return int(self.tokens.shape[1])

    @classmethod
    def of(cls, fleet: Fleet, unit: Ints, prompt_tokens: Ints, scenario_tokens: Floats) -> "Outcomes":
        """From ``unit[n]``, ``prompt_tokens[n]`` and ``scenario_tokens[scenarios, n]``.

        A step time that is not separable is taken at the average context of a running request.
        """
        order = np.argsort(unit, kind="stable")
        start = np.append(0, np.cumsum(np.bincount(unit)))
        tokens = np.ascontiguousarray(scenario_tokens[:, order].T, dtype=np.float64)
        context = context_read(prompt_tokens[order][:, None], tokens.astype(np.int64)).astype(np.float64)
        for u in range(len(start) - 1):
            tokens[start[u] : start[u + 1]] = -np.sort(-tokens[start[u] : start[u + 1]], axis=0)
        degrees = list(dict.fromkeys(engine.tp for engine in fleet.engines))
        step_times = [fleet.profile.shape(tp).step_time for tp in degrees]
        affine = all(isinstance(step_time, Affine) for step_time in step_times)
        n = len(unit)
        held = float((prompt_tokens + scenario_tokens / 2).mean())  # context of a running request, on average
        lines = [_separable(step_time, n, held) for step_time in step_times]
        rise_s = np.stack([np.append(0.0, np.diff(line.base_s[0])) for line in lines])
        sums = np.add.reduceat(context, start[:-1], axis=0)
        extra_s = np.stack([line.slope_s[0] * sums for line in lines])
        if affine:
            per_token = np.array([step_time.b_s for step_time in step_times])  # type: ignore[attr-defined]
            extra_s += per_token[:, None, None] * np.add.reduceat(tokens, start[:-1], axis=0)
            rise_s = np.zeros_like(rise_s)
            rise_s[:, 1] = [step_time.a_s for step_time in step_times]  # type: ignore[attr-defined]
        shape = np.array([degrees.index(engine.tp) for engine in fleet.engines])
        return cls(start, tokens, tokens[start[:-1]], extra_s, rise_s, shape, affine)


def _separable(step_time: StepTime, n: int, held_tokens: float) -> Lines:
    lines = step_time.lines(n)
    if lines.separable:
        return lines
    running = np.arange(n + 1)
    return Lines(np.asarray(step_time(running, running * held_tokens))[None], np.zeros(1))


def engine_times_s(outcomes: Outcomes, engine_of: Ints) -> Floats:
    """``[engines, scenarios]`` time of each engine, by sorting its outputs: the plain form of the formula.

    Args:
        outcomes: the scenarios.
        engine_of: ``[units]`` engine of each unit.
    """
    times = np.zeros((len(outcomes.shape), outcomes.scenarios))
    owner = np.repeat(engine_of, np.diff(outcomes.start))
    for e, shape in enumerate(outcomes.shape):
        mine = -np.sort(-outcomes.tokens[owner == e], axis=0)
        times[e] = outcomes.rise_s[shape, 1 : len(mine) + 1] @ mine
        times[e] += outcomes.extra_s[shape][engine_of == e].sum(axis=0)
    return times


def made_affine(outcomes: Outcomes, engine_of: Ints) -> Outcomes:
    """The same outcomes for the affine step time that is nearest to each shape's own.

    Nearest in least squares over the steps that the plan ``engine_of`` would take: with its outputs sorted,
    an engine spends L_(j) - L_(j+1) steps with j running.
    """
    sums = np.add.reduceat(outcomes.tokens, outcomes.start[:-1], axis=0)
    owner = np.repeat(engine_of, np.diff(outcomes.start))
    rise_s, extra_s = np.zeros_like(outcomes.rise_s), outcomes.extra_s.copy()
    for shape, rises in enumerate(outcomes.rise_s):
        steps = np.zeros(len(rises))
        for e in np.flatnonzero(outcomes.shape == shape):
            mine = -np.sort(-outcomes.tokens[owner == e], axis=0)
            steps[1 : len(mine) + 1] += -np.diff(mine, axis=0, append=0.0).sum(axis=1)
        if np.count_nonzero(steps) > 1:
            b_s, a_s = np.polyfit(np.arange(len(rises)), np.cumsum(rises), 1, w=np.sqrt(steps))
        else:
            a_s, b_s = rises[1], 0.0
        rise_s[shape, 1] = max(a_s, 0.0)
        extra_s[shape] += max(b_s, 0.0) * sums
    return Outcomes(
        outcomes.start, outcomes.tokens, outcomes.longest, extra_s, rise_s, outcomes.shape, affine=True
    )


def value_s(makespans_s: Floats, worst: int) -> float:
    """Mean of the ``worst`` largest makespans.

    >>> value_s(np.array([1.0, 4.0, 2.0]), 2)
    3.0
    """
    return float(np.sort(makespans_s)[len(makespans_s) - worst :].mean())


def longest_mean_first(outcomes: Outcomes) -> Ints:
    """``[units]`` engines by list scheduling: most expected seconds first, each where it is done soonest.

    Times are those of the mean over scenarios, an engine's being its longest expected output at the first
    rise, and the sum of what its units add beyond that. A start for the search.
    """
    sums = np.add.reduceat(outcomes.tokens, outcomes.start[:-1], axis=0).mean(axis=1)
    later = (
        outcomes.rise_s[:, 2:].mean(axis=1)
        if outcomes.rise_s.shape[1] > 2
        else np.zeros(len(outcomes.rise_s))
    )
    added_s = outcomes.extra_s.mean(axis=2) + later[:, None] * sums
    longest = outcomes.longest.mean(axis=1)
    load, top = np.zeros(len(outcomes.shape)), np.zeros(len(outcomes.shape))
    engine_of = np.zeros(outcomes.units, dtype=np.int64)
    for u in np.argsort(-added_s.mean(axis=0), kind="stable"):
        done = (
            load
            + added_s[outcomes.shape, u]
            + outcomes.rise_s[outcomes.shape, 1] * np.maximum(top, longest[u])
        )
        e = int(np.argmin(done))
        engine_of[u], load[e], top[e] = e, load[e] + added_s[outcomes.shape[e], u], max(top[e], longest[u])
    return engine_of


def anneal(
    outcomes: Outcomes,
    rng: np.random.Generator,
    *,
    worst: int | None = None,
    start: Ints | None = None,
    moves: int | None = None,
    time_limit_s: float | None = None,
) -> Ints:
    """``[units]`` engines in the best plan found.

    Args:
        outcomes: the scenarios.
        rng: the only source of chance: the same state gives the same plan, if time does not run out.
        worst: how many scenarios count, the worst ones; None for all.
        start: ``[units]`` plan to start from; None for :func:`longest_mean_first`.
        moves: steps to try; None for as many as take a second or two.
        time_limit_s: the search ends early after this; Ctrl-C ends it too. The best so far is returned.

    >>> from tailopt.policies.example import example_view
    >>> view = example_view([[10, 10], [90, 80], [60, 60], [30, 30]])
    >>> outcomes = Outcomes.of(view.fleet, view.unit, view.prompt_tokens, view.predicted_tokens[None])
    >>> anneal(outcomes, np.random.default_rng(0), moves=1000).tolist() in ([0, 1, 0, 0], [1, 0, 1, 1])
    True
    """
    deadline = np.inf if time_limit_s is None else time.perf_counter() + time_limit_s
    worst = outcomes.scenarios if worst is None else worst
    plan = (longest_mean_first(outcomes) if start is None else start).astype(np.int64)
    if len(outcomes.shape) == 1:
        return plan
    if outcomes.affine:
        moves = _moves(outcomes) if moves is None else moves
        return _search(outcomes, plan, rng, worst, HOT, moves, deadline)
    near = made_affine(outcomes, plan)
    rough = _search(near, plan, rng, worst, HOT, _moves(near) // 2 if moves is None else moves, deadline)
    moves = _moves(outcomes) if moves is None else moves
    return _search(outcomes, rough, rng, worst, WARM, moves, deadline)


def _moves(outcomes: Outcomes) -> int:
    """Steps of a search by default, by what one of them costs in updates."""
    m = len(outcomes.shape)
    per_engine = outcomes.units / m if outcomes.affine else MERGE * len(outcomes.tokens) / m
    cost = outcomes.scenarios * (2 * per_engine + m) + outcomes.units
    return min(int(BUDGET / cost), TRIES * outcomes.units * m)


def _search(
    outcomes: Outcomes,
    plan: Ints,
    rng: np.random.Generator,
    worst: int,
    hot: float,
    moves: int,
    deadline: float,
) -> Ints:
    current, best = plan.copy(), plan.copy()
    times = engine_times_s(outcomes, current)
    best_value = value_s(times.max(axis=0), worst)
    hot_s, cold_s = hot * best_value, COLD * best_value
    engines, requests = len(outcomes.shape), len(outcomes.tokens)
    cells = (1, 1, 1) if outcomes.affine else (engines, outcomes.scenarios, requests)
    held_tokens, held_unit, held = np.zeros(cells), np.zeros(cells, np.int64), np.zeros(engines, np.int64)
    by_scenario = np.ascontiguousarray(outcomes.tokens.T)
    try:
        for sweep in range(SWEEPS):
            if time.perf_counter() >= deadline:
                break
            heat = [hot_s * (cold_s / hot_s) ** ((sweep + end) / SWEEPS) for end in (0, 1)]
            steps = (moves * (sweep + 1)) // SWEEPS - (moves * sweep) // SWEEPS
            best_value = _anneal(
                current, times, best, best_value, outcomes.start, by_scenario, outcomes.longest,
                outcomes.extra_s, outcomes.rise_s, outcomes.shape, outcomes.affine, worst, heat[0], heat[1],
                steps, rng, held_tokens, held_unit, held,
            )  # fmt: skip
    except KeyboardInterrupt:
        pass
    return best


@njit(cache=True)
def _anneal(
    engine_of: Ints, times: Floats, best: Ints, best_value: float, start: Ints, tokens: Floats, longest:
    Floats,
    extra_s: Floats, rise_s: Floats, shape: Ints, affine: bool, worst: int, hot_s: float, cold_s: float,
    moves: int,
    rng: np.random.Generator, held_tokens: Floats, held_unit: Ints, held: Ints,
) -> float:  # fmt: skip
    """Anneal ``engine_of`` in place, note the best plan in ``best``, and return its value."""
    m, scenarios = times.shape
    units = len(start) - 1
    first, second, top = np.empty(scenarios), np.empty(scenarios), np.empty(scenarios)
    span, makespan = np.empty(scenarios), np.empty(scenarios)
    held_extra_s = np.zeros((m, scenarios))
    for u in range(units):
        held_extra_s[engine_of[u]] += extra_s[shape[engine_of[u]], u]
    if not affine and held.sum() == 0:
        for u in range(units):
            e = engine_of[u]
            for s in range(scenarios):
                _insert(held_tokens[e, s], held_unit[e, s], held[e], tokens[s], start[u], start[u + 1], u)
            held[e] += start[u + 1] - start[u]
    for s in range(scenarios):
        makespan[s] = times[:, s].max()
    current = _value(makespan, worst)
    for step in range(moves):
        heat = hot_s * (cold_s / hot_s) ** (step / moves)
        u, v = int(rng.random() * units), -1
        e = engine_of[u]
        if rng.random() < 0.5:
            v = int(rng.random() * units)
            f = engine_of[v]
        else:
            f = int(rng.random() * m)
        threshold = current - heat * np.log(1.0 - rng.random())
        if e == f:
            continue
        for s in range(scenarios):
            rest = 0.0
            for g in range(m):
                if g != e and g != f:
                    rest = max(rest, times[g, s])
            span[s] = rest
        change, square, refused = 0.0, 0.0, False
        if affine:
            _affine_times(engine_of, e, longest, extra_s[shape[e]], rise_s[shape[e], 1], u, v, first, top)
            _affine_times(engine_of, f, longest, extra_s[shape[f]], rise_s[shape[f], 1], v, u, second, top)
            for s in range(scenarios):
                span[s] = max(span[s], first[s], second[s])
        else:
            for s in range(scenarios):
                first[s] = _seconds(
                    held_tokens[e, s], held_unit[e, s], held[e], tokens[s], start, u, v, rise_s[shape[e]]
                )
                second[s] = _seconds(
                    held_tokens[f, s], held_unit[f, s], held[f], tokens[s], start, v, u, rise_s[shape[f]]
                )
                first[s] += held_extra_s[e, s] - extra_s[shape[e], u, s]
                second[s] += held_extra_s[f, s] + extra_s[shape[f], u, s]
                if v >= 0:
                    first[s] += extra_s[shape[e], v, s]
                    second[s] -= extra_s[shape[f], v, s]
                span[s] = max(span[s], first[s], second[s])
                difference = span[s] - makespan[s]
                change += difference
                square += difference * difference
                if (s + 1) % LOOK == 0 and worst == scenarios:
                    mean = change / (s + 1)
                    error = np.sqrt(max(0.0, square / (s + 1) - mean * mean) / (s + 1))
                    if mean - SURE * error > threshold - current:
                        refused = True
                        break
        if refused:
            continue
        value = _value(span, worst)
        if value > threshold:
            continue
        current = value
        makespan[:] = span
        times[e], times[f] = first, second
        engine_of[u] = f
        if v >= 0:
            engine_of[v] = e
        if not affine:
            held_extra_s[e] -= extra_s[shape[e], u]
            held_extra_s[f] += extra_s[shape[f], u]
            if v >= 0:
                held_extra_s[e] += extra_s[shape[e], v]
                held_extra_s[f] -= extra_s[shape[f], v]
            for s in range(scenarios):
                _trade(held_tokens[e, s], held_unit[e, s], held[e], tokens[s], start, u, v)
                _trade(held_tokens[f, s], held_unit[f, s], held[f], tokens[s], start, v, u)
            entering = start[u + 1] - start[u]
            leaving = start[v + 1] - start[v] if v >= 0 else 0
            held[e] += leaving - entering
            held[f] += entering - leaving
        if current < best_value:
            best_value = current
            best[:] = engine_of
    return best_value


@njit(cache=True)
def _value(span: Floats, worst: int) -> float:
    if worst == len(span):
        return float(span.mean())
    return float(np.sort(span)[len(span) - worst :].mean())


@njit(cache=True)
def _affine_times(
    engine_of: Ints, e: int, longest: Floats, extra_s: Floats, a_s: float, leave: int, enter: int, out:
    Floats,
    top: Floats,
) -> None:  # fmt: skip
    """``out[s]``: time of engine ``e`` once unit ``leave`` has left and ``enter`` entered (-1: none)."""
    out[:] = 0.0
    top[:] = 0.0
    for u in range(len(engine_of)):
        if (engine_of[u] == e and u != leave) or u == enter:
            for s in range(len(out)):
                out[s] += extra_s[u, s]
                top[s] = max(top[s], longest[u, s])
    for s in range(len(out)):
        out[s] += a_s * top[s]


@njit(cache=True)
def _insert(
    held_tokens: Floats, held_unit: Ints, held: int, tokens: Floats, start: int, end: int, u: int
) -> None:
    """Put a unit's outputs into an engine's sorted ones, from the shortest on."""
    i, place = held - 1, held + end - start - 1
    for j in range(end - 1, start - 1, -1):
        while i >= 0 and held_tokens[i] < tokens[j]:
            held_tokens[place], held_unit[place] = held_tokens[i], held_unit[i]
            i -= 1
            place -= 1
        held_tokens[place], held_unit[place] = tokens[j], u
        place -= 1


@njit(cache=True)
def _trade(
    held_tokens: Floats, held_unit: Ints, held: int, tokens: Floats, start: Ints, leave: int, enter: int
) -> None:
    """Take unit ``leave`` out of an engine's sorted outputs and put ``enter`` in (-1: none)."""
    kept = 0
    for i in range(held):
        if held_unit[i] != leave:
            held_tokens[kept], held_unit[kept] = held_tokens[i], held_unit[i]
            kept += 1
    if enter >= 0:
        _insert(held_tokens, held_unit, kept, tokens, start[enter], start[enter + 1], enter)


@njit(cache=True)
def _seconds(
    held_tokens: Floats, held_unit: Ints, held: int, tokens: Floats, start: Ints, leave: int, enter: int,
    rise_s: Floats,
) -> float:  # fmt: skip
    """Seconds of an engine's outputs once unit ``leave`` has left and ``enter`` entered (-1: none)."""
    j, end = 0, 0
    if enter >= 0:
        j, end = start[enter], start[enter + 1]
    rank, total = 0, 0.0
    for i in range(held):
        if held_unit[i] == leave:
            continue
        while j < end and tokens[j] > held_tokens[i]:
            rank += 1
            total += rise_s[rank] * tokens[j]
            j += 1
        rank += 1
        total += rise_s[rank] * held_tokens[i]
    while j < end:
        rank += 1
        total += rise_s[rank] * tokens[j]
        j += 1
    return total
