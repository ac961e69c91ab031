r"""A short designed experiment on a live engine, and the engine profile that follows from it.

**What is run.** A *cell* is n requests of equal context, which decode for some steps: n = 1, 2, 4, ... to
the most, contexts from short to the longest that fits, four times as long each time; and prompts alone,
from an eighth of the token budget to twice the budget. Each visit to a cell begins with new random prompts,
so nothing is cached; its prefill and its decode steps are all data.

**In which order.** Every *round* visits all cells once, in an order drawn anew: whatever drifts, such as
clocks or other people's load, then meets all cells alike instead of being taken for an effect of n. Rounds
go on until the time is up; cells that would take too much of it are left out from the start, the costliest
first.

**How sure.** All steps are fitted (:mod:`tailopt.replay.fit`). Steps of one visit share its luck, so
intervals come from drawing whole visits with replacement and fitting the chosen form again.

Then the engine is put to sleep and woken, or stopped and started, as a switch would do it; and requests are
aborted and submitted again, beside what their prefill should take.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.engine.profile import ShapeProfile
from tailopt.errors import InputError
from tailopt.replay.fit import Fit, Steps, condense, fit_steps, joined
from tailopt.replay.fit_file import with_fit
from tailopt.replay.fit_forms import KINDS

DECODE_STEPS = 16
LEAST_ROUNDS = 2
SHORT = 32
"""Tokens of the shortest context."""

Progress = Callable[[str, float], None]
"""Told what is being done, and the share of the time that is used."""


class Bench(Protocol):
    """A live engine to be measured."""

    def measure(self, requests: Sequence[tuple[int, int]]) -> Steps:
        """All steps from standing still to the end of these, given as (prompt tokens, tokens to generate)."""
        ...

    def resubmit(self, context: int) -> float:
        """Seconds from the abort of a request with so much context until its next token."""
        ...

    def switch(self) -> tuple[float, float]:
        """Seconds to put the engine away, and to have it back."""
        ...


@dataclass(frozen=True, order=True)
class Cell:
    """``running`` requests with ``context`` tokens each that then take ``steps`` steps.

    >>> Cell(4, 100, 16).requests
    [(100, 17), (100, 17), (100, 17), (100, 17)]
    """

    running: int
    context: int
    steps: int

    @property
    def requests(self) -> list[tuple[int, int]]:
        """The first token comes with the prefill."""
        return self.running * [(self.context, self.steps + 1)]


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def text(self, scale: float, digits: str = ".3g") -> str:
        """``value (low-high)``, each times ``scale``."""
        low, high = (format(one * scale, digits) for one in (self.low, self.high))
        return f"{self.value * scale:{digits}} ({low}-{high})"


@dataclass(frozen=True, eq=False)
class Profiled:
    """What an experiment gave.

    Attributes:
        steps: all steps.
        visit: ``[k]`` the visit of each step.
        cells: those that were visited, each in every round.
        rounds: how many there were.
        fit: of all steps.
        step_s: tau at some (n, context), with intervals.
        prefill_tokens_per_s: with its interval.
        sleep_s, wake_s: of the switch.
        resubmissions: (context, seconds measured, seconds that its prefill and a step should take).
        seconds: how long all of it took.
    """

    steps: Steps
    visit: Ints
    cells: tuple[Cell, ...]
    rounds: int
    fit: Fit
    step_s: dict[tuple[int, int], Interval]
    prefill_tokens_per_s: Interval
    sleep_s: float
    wake_s: float
    resubmissions: tuple[tuple[int, float, float], ...]
    seconds: float

    def shape(self, like: ShapeProfile) -> ShapeProfile:
        """``like`` with all that was measured."""
        fitted = with_fit(like, self.fit)
        return replace(fitted, sleep_s=self.sleep_s, wake_s=self.wake_s, fit=f"{fitted.fit}; {self.remark()}")

    def remark(self) -> str:
        """How it was measured and how sure it is, in one line."""
        times = ", ".join(
            f"n = {n} of {context} tokens {one.text(1e3)} ms" for (n, context), one in self.step_s.items()
        )
        again = ", ".join(
            f"{context} tokens {measured * 1e3:.0f} ms ({expected * 1e3:.0f} expected)"
            for context, measured, expected in self.resubmissions
        )
        prefill = self.prefill_tokens_per_s.text(1, ".0f")
        return (
            f"{self.rounds} rounds of {len(self.cells)} cells in random order, {self.seconds:.0f} s; 95 % "
            f"intervals by bootstrap over visits: {times}, prefill {prefill} tokens/s; "
            f"resubmission {again or 'not measured'}"
        )


def design(shape: ShapeProfile, most_tokens: int, steps: int = DECODE_STEPS) -> list[Cell]:
    """The cells for an engine, whatever time they take; those with ``steps`` 0 are prompts alone.

    Args:
        shape: its limits.
        most_tokens: that a request may have.
        steps: decode steps of a visit.

    >>> from tailopt.engine.step_time import Affine
    >>> small = ShapeProfile(1, Affine(6e-3, 1e-4), 1e4, 2000, max_running=6, token_budget=256)
    >>> [(cell.running, cell.context) for cell in design(small, 1000) if cell.steps]
    [(1, 32), (1, 128), (1, 512), (1, 983), (2, 32), (2, 128), (2, 512), (2, 933), (4, 32), (4, 128), \
(4, 458), (6, 32), (6, 128), (6, 299)]
    """
    numbers = sorted({*(2**k for k in range(shape.max_running.bit_length())), shape.max_running})
    cells = []
    for n in numbers:
        room = min(most_tokens - steps - 1, int(0.95 * shape.kv_capacity_tokens) // n - steps - 1)
        longest = [SHORT * 4**k for k in range(20) if SHORT * 4**k < room]
        if longest and room < 1.5 * longest[-1]:
            longest.pop()
        cells += [Cell(n, context, steps) for context in (*longest, room) if context > 0]
    budget = shape.token_budget
    for prompt in sorted({budget // 8, budget // 4, budget // 2, budget, 2 * budget}):
        if 1 < prompt < min(most_tokens, shape.kv_capacity_tokens):
            cells.append(Cell(1, prompt, 0))
    return sorted(cells)


def profile(
    bench: Bench,
    shape: ShapeProfile,
    most_tokens: int,
    *,
    seconds: float = 90.0,
    seed: int = 0,
    kinds: Sequence[str] = tuple(KINDS),
    bootstrap: int = 100,
    switch: bool = True,
    progress: Progress = lambda what, share: None,
) -> Profiled:
    """Run the experiment.

    Args:
        bench: the engine.
        shape: its limits.
        most_tokens: that a request may have.
        seconds: about how long decode and prefill are measured; at least two rounds are.
        seed: of the order.
        kinds: forms of step time to try.
        bootstrap: how many times to draw for the intervals.
        switch: whether to measure putting the engine away and having it back.
        progress: told what is being done.

    Raises:
        InputError: if the engine has no room for different n and contexts.
    """
    began_s = time.monotonic()
    rng = np.random.default_rng(seed)
    progress("warming up", 0.0)
    cells, seconds_a_round = _affordable(bench, design(shape, most_tokens), shape, seconds)
    parts: list[Steps] = []
    started_s, rounds = time.monotonic(), 0
    while rounds < LEAST_ROUNDS or time.monotonic() - started_s + seconds_a_round < seconds:
        for i, number in enumerate(rng.permutation(len(cells))):
            share = (time.monotonic() - started_s) / max(seconds, LEAST_ROUNDS * seconds_a_round)
            progress(f"round {rounds + 1}, cell {i + 1} of {len(cells)}", min(share, 1.0))
            parts.append(bench.measure(cells[number].requests))
        rounds += 1
        seconds_a_round = (time.monotonic() - started_s) / rounds
    steps = joined(parts)
    visit = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    progress("fitting", 1.0)
    fit = fit_steps(steps, kinds=kinds)
    step_s, prefill = _intervals(steps, visit, fit, rng, bootstrap)
    again = []
    progress("aborting and submitting again", 1.0)
    longest = max(most_tokens - 80, 1)
    contexts = {min(cell.context, longest) for cell in cells if cell.steps and cell.running == 1}
    for context in sorted(contexts)[-2:]:
        expected = context / fit.prefill_tokens_per_s + float(fit.step_time(1, context))
        again.append((context, float(np.median([bench.resubmit(context) for _ in range(3)])), expected))
    progress("stopping and starting", 1.0)
    sleep_s, wake_s = bench.switch() if switch else (0.0, 0.0)
    return Profiled(
        steps=steps,
        visit=visit,
        cells=tuple(cells),
        rounds=rounds,
        fit=fit,
        step_s=step_s,
        prefill_tokens_per_s=prefill,
        sleep_s=sleep_s,
        wake_s=wake_s,
        resubmissions=tuple(again),
        seconds=time.monotonic() - began_s,
    )


def _affordable(
    bench: Bench, cells: Sequence[Cell], shape: ShapeProfile, seconds: float
) -> tuple[list[Cell], float]:
    """The cells without those that a round has no time for, and how long a round takes; from a first look.

    Whatever is left out, each n keeps its shortest context, and n = 1 its second.
    """
    bench.measure([(SHORT, 4)])  # what is slow once
    few, many = (bench.measure(Cell(n, SHORT, 4).requests) for n in (1, shape.max_running))
    low, high = (float(np.median(part.seconds[part.other_tokens == 0])) for part in (few, many))
    prompt = max(cell.context for cell in cells if not cell.steps or cell.running == 1)
    prompt = min(prompt, shape.token_budget)
    prefill_s = float(bench.measure([(prompt, 1)]).seconds.sum()) / prompt

    def cost_s(cell: Cell) -> float:
        per_step = low + (high - low) * (cell.running - 1) / max(shape.max_running - 1, 1)
        return cell.running * cell.context * prefill_s + (cell.steps + 1) * per_step

    decode = [cell for cell in cells if cell.steps]
    keep = {min(cell for cell in decode if cell.running == n) for n in {cell.running for cell in decode}}
    keep |= set(sorted(cell for cell in decode if cell.running == 1)[:2])
    left = list(cells)
    for cell in sorted(set(cells) - keep, key=cost_s, reverse=True):
        if sum(map(cost_s, left)) <= seconds / (LEAST_ROUNDS + 1):
            break
        left.remove(cell)
    if len({cell.context for cell in left if cell.steps}) < 2 or len({c.running for c in left}) < 3:
        raise InputError(
            f"profile: room for {len(left)} cells only, expected at least three numbers of requests and two "
            "contexts; give it more time, or an engine with more room"
        )
    return left, sum(map(cost_s, left))


def _intervals(
    steps: Steps, visit: Ints, fit: Fit, rng: np.random.Generator, draws: int
) -> tuple[dict[tuple[int, int], Interval], Interval]:
    """Of tau at the corners of what was measured, and of the prefill rate."""
    n_low, n_high = fit.n_range
    middle = int(np.sqrt(n_low * n_high))
    decode = steps.running > 0
    places = []
    for n in sorted({n_low, middle, n_high}):
        near = decode & (steps.running >= n) & (steps.running <= max(n, 1.2 * n))
        context = steps.kv_tokens[near] / steps.running[near]
        places.append((n, round(float(np.median(context if len(context) else [SHORT])))))
    rows = np.split(np.arange(len(steps)), np.flatnonzero(np.diff(visit)) + 1)
    drawn: list[Floats] = []
    for _ in range(draws):
        chosen = np.concatenate([rows[i] for i in rng.integers(len(rows), size=len(rows))])
        try:
            form = KINDS[fit.best.kind](condense(steps.where(chosen)))
        except InputError:  # a draw without enough different n
            continue
        if form.prefill_s > 0:
            at = [float(form.step_time(n, n * context)) for n, context in places]
            drawn.append(np.array([*at, 1 / form.prefill_s]))
    values = [*(float(fit.step_time(n, n * context)) for n, context in places), fit.prefill_tokens_per_s]
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0) if drawn else (values, values)
    found = [Interval(*map(float, one)) for one in zip(values, low, high, strict=True)]
    return dict(zip(places, found[:-1], strict=True)), found[-1]
