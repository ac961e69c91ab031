r"""Local search on a plan: moves and swaps of units between engines, for any step time and any shapes.

Engines do not influence each other, so a move or a swap changes two of them, and each is timed afresh from
the sorted requests that it holds (:func:`tailopt.oracle.filling.set_time_s`), and the prompt tokens that they
compute: those that a prompt shares with its other samples once on each engine. The makespan alone is flat
almost everywhere, so what falls is, for a *level* a little below the best makespan so far,

.. math:: E = \sum_e w_e \big[\max(0, T_e - \text{level})^2 / (\text{best} - \text{level})
          + \gamma\, T_e\big] :

engines above the level must shed work, the others may exchange it freely, and the small second term prefers
exchanges that save work (a concave step time rewards crowding). A change is taken if E does not rise, or
rises by less than a threshold drawn anew each time.

A second is not worth the same everywhere: what takes one second on the engine of the few longest requests
takes a fifth of one in the crowd of short ones. With equal weights the crowd stays below the others for good.
So the *weights* :math:`w_e` are multipliers: they rise on engines above the mean, fall below it.

The thresholds first fall from hot, where long requests change engines, to cold. Then the search settles: the
level stays a share below the best makespan; when no better plan comes for a while, the search goes back to
the best one and the share is halved.
"""

from time import perf_counter as clock

import numpy as np
from numba import njit

from tailopt.arrays import Bools, Floats, Ints
from tailopt.oracle.filling import set_time_s
from tailopt.oracle.problem import Problem
from tailopt.oracle.stop import Stop
from tailopt.oracle.units import Units, fits_on
from tailopt.simulate.batch import shared_tokens
from tailopt.simulate.line_table import line_table

SAVING = 0.02  # gamma
COOLING = 0.8  # share of the time in which it cools
DESCENT = 3e-2  # how far below the best makespan the level is then, as a share
SETTLING_DESCENT, LEAST_DESCENT = 1e-3, 1e-6  # and where it is when the search settles
PATIENCE = 4  # slices without a new best before the level comes half-way closer
HOT, COLD = 0.05, 0.01  # the largest rise taken at first and at last, as a share of best - level
HASTE, LIGHTEST, HEAVIEST = 0.2, 0.02, 50.0  # how fast the weights change, and how far
WORST, MOVE, FAR, NEAR = 0.7, 0.25, 0.5, 24  # shares of the proposals, and how many places are near
STEPS = 2_000  # proposals a slice: between two looks at the clock


def local_search(
    problem: Problem,
    units: Units,
    engine_of: Ints,
    *,
    lower_s: float,
    time_limit_s: float,
    seed: int = 0,
    slices: int | None = None,
    slowdown: Floats | None = None,
    stop: Stop | None = None,
) -> Ints:
    """``[u]`` engines of a plan that is no worse than ``engine_of`` by the engine times it goes by.

    Args:
        problem, units: what is placed where.
        engine_of: ``[u]`` the plan to start from.
        lower_s: no plan is done earlier; the search stops when it gets there.
        time_limit_s: seconds after which it stops, wherever it is; so does Ctrl-C.
        seed: of the proposals.
        slices: stop after this many slices of ``STEPS`` proposals, so that the result does not depend on the
            machine; None for no such limit.
        slowdown: ``[m]`` by how much each engine takes longer than estimated; None for not at all.
        stop: told of Ctrl-C.
    """
    started = clock()
    search = _Search(problem, units, engine_of, seed, slowdown)
    best, best_s = search.engine_of.copy(), float(search.done_s.max())
    descent, stuck, done, cooling = DESCENT, 0, 0, True
    with stop or Stop():
        while best_s > lower_s * (1 + 1e-12):
            spent = max((clock() - started) / max(time_limit_s, 1e-9), done / slices if slices else 0.0)
            if spent >= 1:
                break
            if cooling and spent >= COOLING:
                cooling, descent = False, SETTLING_DESCENT
                search.restart(best)
            heat = HOT * (COLD / HOT) ** (spent / COOLING) if cooling else COLD
            level_s = max(lower_s, best_s * (1 - descent))
            reached_s = search.advance(level_s, best_s, heat, best)
            done += 1
            stuck = 0 if reached_s < best_s else stuck + 1
            if cooling:
                search.weigh(best_s - level_s)
            elif stuck == PATIENCE:
                descent, stuck = (descent / 2 if descent > LEAST_DESCENT else DESCENT), 0
                search.restart(best)
            best_s = reached_s
    return best


def estimated_s(problem: Problem, units: Units, engine_of: Ints) -> Floats:
    """``[m]`` seconds of each engine of a plan, as the search estimates them."""
    return _Search(problem, units, engine_of, 0, None).done_s


class _Search:
    """Where the search is: engine of each unit, the sorted requests of each engine, and its time."""

    def __init__(
        self, problem: Problem, units: Units, engine_of: Ints, seed: int, slowdown: Floats | None
    ) -> None:
        trace, fleet = problem.trace, problem.fleet
        requests = np.concatenate(units.members)
        engines = range(len(fleet.engines))
        limits = [(fleet.max_running(e), fleet.shape_of(e).kv_capacity_tokens) for e in engines]
        self.limits = np.array(limits, dtype=np.int64)
        self.lines = line_table(fleet, int(min(self.limits[:, 0].max(), trace.n_requests)))
        self.output = trace.output_tokens[requests]
        self.prompt = trace.context_tokens[requests]
        self.unit_start = np.cumsum([0, *map(len, units.members)], dtype=np.int64)
        self.fits = fits_on(problem, units)
        shapes = [fleet.shape_of(e) for e in engines]
        shared = np.zeros(trace.n_requests, dtype=np.int64)
        if any(shape.prefix_caching for shape in shapes):
            shared = shared_tokens(trace, max(shape.block_tokens for shape in shapes))
        own = trace.context_tokens - shared - 1
        self.own = np.array([own[members].sum() for members in units.members])
        self.prompt_of = np.array([trace.group[members[0]] for members in units.members])
        self.shared = np.zeros(self.prompt_of.max() + 1, dtype=np.int64)
        self.shared[self.prompt_of] = [shared[members[0]] for members in units.members]
        self.prefill_s = np.array([1 / shape.prefill_tokens_per_s for shape in shapes])
        self.slowdown = np.ones(len(shapes)) if slowdown is None else slowdown
        self.weight = np.ones(len(shapes))
        self.random = np.random.default_rng(seed)
        self.restart(engine_of)

    def restart(self, engine_of: Ints) -> None:
        """Go to a plan."""
        self.engine_of = engine_of.astype(np.int64, copy=True)
        m, n = len(self.limits), len(self.output)
        self.held_output, self.held_prompt, self.held_unit = np.zeros((3, m, n), dtype=np.int64)
        self.held, self.done_s = np.zeros(m, dtype=np.int64), np.zeros(m)
        self.computed = np.zeros(m, dtype=np.int64)
        self.samples = np.zeros((m, len(self.shared)), dtype=np.int64)
        np.add.at(self.samples, (self.engine_of, self.prompt_of), 1)
        unit = np.repeat(np.arange(len(self.engine_of)), np.diff(self.unit_start))
        for e in range(m):
            mine = np.flatnonzero(self.engine_of[unit] == e)
            mine = mine[np.argsort(-self.output[mine], kind="stable")]
            self.held[e] = len(mine)
            self.held_output[e, : len(mine)] = self.output[mine]
            self.held_prompt[e, : len(mine)] = self.prompt[mine]
            self.held_unit[e, : len(mine)] = unit[mine]
            self.computed[e] = self.own[self.engine_of == e].sum() + self.shared[self.samples[e] > 0].sum()
            self.done_s[e] = self._time_s(e)

    def _time_s(self, e: int) -> float:
        shape, size = self.lines.shape[e], self.held[e]
        pieces = self.lines.pieces[shape]
        decode_s = set_time_s(
            self.held_output[e, :size], self.held_prompt[e, :size], self.lines.base_s[shape, :, :pieces],
            self.lines.slope_s[shape, :pieces], self.limits[e, 0], self.limits[e, 1],
        )  # fmt: skip
        return float(self.slowdown[e] * (decode_s + self.computed[e] * self.prefill_s[e]))

    def weigh(self, width_s: float) -> None:
        """Engines above the mean become heavier, the others lighter."""
        above = np.clip((self.done_s - self.done_s.mean()) / width_s, -1.0, 1.0)
        weight = self.weight * np.exp(HASTE * above)
        self.weight = np.clip(weight / weight.mean(), LIGHTEST, HEAVIEST)

    def advance(self, level_s: float, best_s: float, heat: float, best: Ints) -> float:
        """One slice towards a level; the least makespan seen, its plan in ``best`` if less than before."""
        lines = self.lines
        return float(
            wander(
                self.output, self.prompt, self.unit_start, lines.base_s, lines.slope_s, lines.pieces,
                lines.shape, self.limits, self.fits, self.engine_of, self.held_output, self.held_prompt,
                self.held_unit,
                self.held, self.done_s, self.own, self.prompt_of, self.shared, self.prefill_s, self.slowdown,
                self.computed,
                self.samples, self.random.random((STEPS, 5)), level_s, best_s, self.weight, heat, best,
            )
        )  # fmt: skip


@njit(cache=True)
def wander(
    output: Ints,
    prompt: Ints,
    unit_start: Ints,
    base_s: Floats,
    slope_s: Floats,
    pieces: Ints,
    shape: Ints,
    limits: Ints,
    fits: Bools,
    engine_of: Ints,
    held_output: Ints,
    held_prompt: Ints,
    held_unit: Ints,
    held: Ints,
    done_s: Floats,
    own: Ints,
    prompt_of: Ints,
    shared: Ints,
    prefill_s: Floats,
    slowdown: Floats,
    computed: Ints,
    samples: Ints,
    draws: Floats,
    level_s: float,
    least_s: float,
    weight: Floats,
    hottest: float,
    best: Ints,
) -> float:
    """Propose one change for each row of ``draws`` and take those that the energy allows.

    Args:
        output, prompt, unit_start, base_s, slope_s, pieces, shape: as in
            :func:`tailopt.oracle.filling.fill_any`.
        limits: ``[m, 2]`` concurrency limit and KV capacity of each engine.
        fits: ``[m, u]`` whether an engine can hold a unit's requests at all.
        engine_of, held_output, held_prompt, held_unit, held, done_s, computed, samples: the plan, with the
            prompt tokens that each engine computes, and how many units of each prompt it has; changed.
        own, prompt_of: ``[u]`` prompt tokens that each unit computes itself, and its prompt.
        shared: tokens of each prompt that an engine computes once.
        prefill_s, slowdown: ``[m]`` seconds per token of it, and a factor on an engine's seconds.
        draws: ``[steps, 5]`` uniform in [0, 1): which engine, unit, kind of change, partner, threshold.
        level_s: what the engines' times should fall to.
        least_s: the least makespan so far.
        weight: ``[m]`` of the engines' seconds.
        hottest: the largest rise taken, as a share of ``least_s - level_s``.
        best: ``[u]`` written whenever a makespan is less than that.

    Returns:
        The least makespan so far.
    """
    n, units = len(output), len(engine_of)
    new_output, new_prompt, new_unit = np.empty((3, 2, n), np.int64)
    times, tokens = np.empty(2), np.empty(2, np.int64)
    width_s = max(least_s - level_s, 1e-12 * level_s)
    for where, first, kind, second, heat in draws:
        a = int(np.argmax(done_s))
        u = held_unit[a, int(first * held[a])] if where < WORST else int(first * units)
        a = engine_of[u]
        swap = -1
        if kind < MOVE:
            b = int(second * len(done_s))
        else:
            swap = int(second * units) if kind < FAR else u + int((second - 0.5) * NEAR)
            if not 0 <= swap < units:
                continue
            b = engine_of[swap]
        if b == a or not fits[b, u] or (swap >= 0 and not fits[a, swap]):
            continue
        for side in range(2):
            e, gone, comes = (a, u, swap) if side == 0 else (b, swap, u)
            size = exchange(held_output[e], held_prompt[e], held_unit[e], held[e], gone, comes,
                            output, prompt, unit_start,
                            new_output[side], new_prompt[side], new_unit[side])  # fmt: skip
            s = shape[e]
            times[side] = set_time_s(new_output[side, :size], new_prompt[side, :size],
                                     base_s[s, :, : pieces[s]], slope_s[s, : pieces[s]],
                                     limits[e, 0], limits[e, 1])  # fmt: skip
            tokens[side] = computed[e] + prefill_change(samples[e], gone, comes, own, prompt_of, shared)
            times[side] = slowdown[e] * (times[side] + tokens[side] * prefill_s[e])
        rise = 0.0
        for e, then_s in ((a, times[0]), (b, times[1])):
            above = max(0.0, then_s - level_s) ** 2 - max(0.0, done_s[e] - level_s) ** 2
            rise += weight[e] * (above / width_s + SAVING * (then_s - done_s[e]))
        if rise > hottest * width_s * heat**4:
            continue
        came = unit_start[u + 1] - unit_start[u]
        went = unit_start[swap + 1] - unit_start[swap] if swap >= 0 else 0
        held[a] += went - came
        held[b] += came - went
        for side in range(2):
            e = a if side == 0 else b
            held_output[e, : held[e]] = new_output[side, : held[e]]
            held_prompt[e, : held[e]] = new_prompt[side, : held[e]]
            held_unit[e, : held[e]] = new_unit[side, : held[e]]
            done_s[e], computed[e] = times[side], tokens[side]
        engine_of[u] = b
        samples[a, prompt_of[u]] -= 1
        samples[b, prompt_of[u]] += 1
        if swap >= 0:
            engine_of[swap] = a
            samples[b, prompt_of[swap]] -= 1
            samples[a, prompt_of[swap]] += 1
        if done_s.max() < least_s:
            least_s = done_s.max()
            best[:] = engine_of
    return least_s


@njit(cache=True)
def prefill_change(samples: Ints, gone: int, comes: int, own: Ints, prompt_of: Ints, shared: Ints) -> int:
    """Prompt tokens that an engine computes more without unit ``gone`` and with ``comes`` (-1: none)."""
    change, left = 0, -1
    if gone >= 0:
        left = prompt_of[gone]
        change -= own[gone]
        if samples[left] == 1:
            change -= shared[left]
    if comes >= 0:
        prompt = prompt_of[comes]
        change += own[comes]
        if samples[prompt] == 0 or (prompt == left and samples[prompt] == 1):
            change += shared[prompt]
    return change


@njit(cache=True)
def exchange(
    held_output: Ints,
    held_prompt: Ints,
    held_unit: Ints,
    held: int,
    gone: int,
    comes: int,
    output: Ints,
    prompt: Ints,
    unit_start: Ints,
    new_output: Ints,
    new_prompt: Ints,
    new_unit: Ints,
) -> int:
    """Write an engine's sorted requests without unit ``gone``, with ``comes`` (-1: none); how many."""
    j, end = (unit_start[comes], unit_start[comes + 1]) if comes >= 0 else (0, 0)
    size = 0
    for i in range(held):
        if held_unit[i] == gone:
            continue
        while j < end and output[j] > held_output[i]:
            new_output[size], new_prompt[size], new_unit[size] = output[j], prompt[j], comes
            size, j = size + 1, j + 1
        new_output[size], new_prompt[size], new_unit[size] = held_output[i], held_prompt[i], held_unit[i]
        size += 1
    while j < end:
        new_output[size], new_prompt[size], new_unit[size] = output[j], prompt[j], comes
        size, j = size + 1, j + 1
    return size
