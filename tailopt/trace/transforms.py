"""From one trace to others: batches to compare policies on, reshaped tails, cuts, bootstraps.

Every function returns new traces and draws only from the seed it is given.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from tailopt.arrays import Ints
from tailopt.errors import InputError
from tailopt.trace.rows import MOST_TOKENS
from tailopt.trace.trace import Trace


@dataclass(frozen=True, eq=False)
class Batch:
    """One rollout batch drawn from a trace: what policies are compared on.

    Attributes:
        trace: whole groups, prompts numbered 0, 1, ... in the order drawn; all arrive at time 0.
        history: the samples of the same prompts that were not drawn, at the same training step or an earlier
            one: all that a history predictor may learn from. None if there are none.
        seed: seed of whatever else is drawn for this batch; differs by batch.
    """

    trace: Trace
    history: Trace | None
    seed: int

    @property
    def history_prompt(self) -> Ints:
        """``[history]`` the prompt of each response of ``history``, numbered as in ``trace``."""
        if self.history is None:
            return np.zeros(0, np.int64)
        number = {prompt_id: prompt for prompt, prompt_id in enumerate(self.trace.prompt_ids)}
        own = np.array([number[prompt_id] for prompt_id in self.history.prompt_ids], dtype=np.int64)
        return own[self.history.prompt]


def sample_batches(trace: Trace, *, batches: int, prompts: int, samples: int, seed: int) -> list[Batch]:
    """Draw ``batches`` rollout batches of ``prompts`` groups with ``samples`` samples each.

    Within a batch no group and no response is drawn twice; batches are drawn independently of one another,
    so batch i is the same however many are drawn. If the trace has training steps, each batch comes from a
    single one, drawn evenly among those with enough groups.

    Raises:
        InputError: if no training step has ``prompts`` groups of at least ``samples`` samples.

    >>> from tailopt.trace import Trace
    >>> trace = Trace.of([[3, 5, 8], [20, 30, 10], [1, 2, 2]])
    >>> (batch,) = sample_batches(trace, batches=1, prompts=2, samples=2, seed=0)
    >>> batch.trace.n_prompts, batch.trace.n_requests, batch.history.n_requests
    (2, 4, 2)
    """
    for what, value, least in (("batches", batches, 1), ("prompts", prompts, 1), ("samples", samples, 1),
                               ("seed", seed, 0)):  # fmt: skip
        if value < least:
            raise InputError(f"{what}: expected at least {least}, got {value}")
    rows_of = _rows_by_group(trace)
    by_step = _groups_by_step(trace, rows_of, samples)
    enough = [step for step, groups in by_step.items() if len(groups) >= prompts]
    if not enough:
        most = max(map(len, by_step.values()))
        where = "" if trace.step is None else " at one training step"
        raise InputError(
            f"trace {trace.name!r}: has {most} groups with at least {samples} samples{where}, "
            f"a batch needs {prompts}{_smaller(trace, rows_of, prompts, most)}"
        )
    return [_batch(trace, rows_of, by_step, enough, prompts, samples, seed, i) for i in range(batches)]


def _smaller(trace: Trace, rows_of: list[Ints], prompts: int, most: int) -> str:
    """What to draw instead: as many samples as enough groups have, or as many prompts as there are."""
    hints = [f"--prompts {most}"] if most else []
    samples = max(len(rows) for rows in rows_of)
    while samples and max(map(len, _groups_by_step(trace, rows_of, samples).values())) < prompts:
        samples -= 1
    hints += [f"--samples {samples}"] if samples else []
    return f"; draw fewer: {' or '.join(hints)}" if hints else ""


def _batch(
    trace: Trace,
    rows_of: list[Ints],
    by_step: dict[int, Ints],
    steps: list[int],
    prompts: int,
    samples: int,
    seed: int,
    index: int,
) -> Batch:
    sequence = np.random.SeedSequence(seed, spawn_key=(index,))
    rng = np.random.default_rng(sequence)
    step = steps[int(rng.integers(len(steps)))]
    groups = rng.choice(by_step[step], size=prompts, replace=False)
    rows = np.concatenate(
        [np.sort(rng.choice(rows_of[group], size=samples, replace=False)) for group in groups]
    )
    same_prompt = np.isin(trace.prompt, trace.prompt[rows])
    same_prompt[rows] = False
    if trace.step is not None:
        same_prompt &= trace.step <= step
    left = np.flatnonzero(same_prompt)
    batch = trace.take(rows)
    return Batch(
        trace=replace(batch, arrival_s=np.zeros(batch.n_requests)),
        history=trace.take(left) if len(left) else None,
        seed=int(sequence.generate_state(1)[0]),
    )


def _rows_by_group(trace: Trace) -> list[Ints]:
    order = np.argsort(trace.group, kind="stable")
    return np.split(order, np.cumsum(np.bincount(trace.group))[:-1])


def _groups_by_step(trace: Trace, rows_of: list[Ints], samples: int) -> dict[int, Ints]:
    """Groups with at least ``samples`` samples, by training step (step 0 if the trace has none)."""
    enough = np.array([len(rows) >= samples for rows in rows_of])
    first = np.array([rows[0] for rows in rows_of])
    step = np.zeros(len(first), np.int64) if trace.step is None else trace.step[first]
    return {int(value): np.flatnonzero(enough & (step == value)) for value in np.unique(step)}


def reshape_tail(trace: Trace, ratio: float) -> Trace:
    r"""Stretch or squeeze the upper half of the lengths so that P90 / P50 becomes ``ratio``.

    The controlled workloads of TailSieve (Xu et al., "TailSieve: Partial-Rollout-Guided Tail Routing for LLM
    Rollouts", appendix A.3): lengths above the median are mapped so that the 90th percentile becomes r times
    the median; the order of the responses, the lower half and the median stay. These conditions do not fix
    the map; this is the linear one. With M the median, P the 90th percentile (both interpolated linearly, as
    in :mod:`tailopt.trace.statistics`) and U the least length that is at least M, a length l > U becomes

    .. math:: l' = U + (l - U) \, \frac{r M - U}{P - U},

    rounded to whole tokens, and l <= U stays. As P interpolates between lengths from U on, the new 90th
    percentile is r M exactly, up to the rounding (half a token). Capped responses stay flagged.

    Args:
        trace: percentiles are those of all its responses together.
        ratio: r; must leave room for the upper half, r M > U.

    Raises:
        InputError: if there are fewer than 3 responses, P90 is not above U, or the ratio is too small, or so
            large that a response would have more than ``MOST_TOKENS`` tokens.

    >>> trace = Trace.of([[100, 200, 300, 400, 500], [600, 700, 800, 900, 1000, 1100]])
    >>> reshape_tail(trace, 3.0).output_tokens
    array([ 100,  200,  300,  400,  500,  600,  900, 1200, 1500, 1800, 2100])
    """
    lengths = trace.output_tokens
    median, p90 = (float(value) for value in np.quantile(lengths, [0.5, 0.9]))
    pivot = int(lengths[lengths >= median].min())
    if trace.n_requests < 3 or p90 <= pivot:
        raise InputError(f"trace {trace.name!r}: P90 is {p90:g} and P50 {median:g}, no tail to reshape")
    if not (np.isfinite(ratio) and ratio * median > pivot):
        raise InputError(
            f"ratio: expected more than {pivot / median:g} for trace {trace.name!r}, got {ratio:g}"
        )
    stretch = (ratio * median - pivot) / (p90 - pivot)
    longest = pivot + (int(lengths.max()) - pivot) * stretch
    if longest > MOST_TOKENS:
        raise InputError(
            f"ratio: {ratio:g} would make a response of {longest:.3g} tokens, expected at most {MOST_TOKENS}"
        )
    stretched = pivot + (lengths - pivot) * stretch
    return replace(
        trace,
        name=f"{trace.name} (P90/P50={ratio:g})",
        source=f"{trace.source}; tail reshaped to P90/P50={ratio:g}",
        output_tokens=np.where(lengths > pivot, np.rint(stretched).astype(np.int64), lengths),
    )


def truncate(trace: Trace, cap: int) -> Trace:
    """Cut every response at ``cap`` tokens; those that were longer are flagged as capped.

    A response of exactly ``cap`` tokens had ended by itself and is flagged only if it was before.

    Raises:
        InputError: if the cap is below 1.

    >>> cut = truncate(Trace.of([[3, 8, 12]]), 8)
    >>> cut.output_tokens, cut.capped
    (array([3, 8, 8]), array([False, False,  True]))
    """
    if cap < 1:
        raise InputError(f"cap: expected at least 1 token, got {cap}")
    return replace(
        trace,
        name=f"{trace.name} (cap={cap})",
        source=f"{trace.source}; cut at {cap} tokens",
        output_tokens=np.minimum(trace.output_tokens, cap),
        capped=trace.capped | (trace.output_tokens > cap),
    )


def bootstrap(trace: Trace, *, seed: int) -> Trace:
    """A trace of as many prompts, drawn with replacement, each with all its responses.

    Whole prompts are drawn (a cluster bootstrap), because responses to one prompt are alike; all training
    steps of a prompt come along. A prompt drawn again is a new prompt, called ``ID~2``, ``ID~3`` and so on.

    Raises:
        InputError: if the seed is negative.

    >>> again = bootstrap(Trace.of([[3, 5], [20, 30], [7, 7]]), seed=0)
    >>> again.prompt_ids, again.output_tokens
    (('2', '1', '1~2'), array([ 7,  7, 20, 30, 20, 30]))
    """
    if seed < 0:
        raise InputError(f"seed: expected at least 0, got {seed}")
    drawn = np.random.default_rng(seed).integers(trace.n_prompts, size=trace.n_prompts)
    order = np.argsort(trace.prompt, kind="stable")
    rows_of = np.split(order, np.cumsum(np.bincount(trace.prompt))[:-1])
    rows = np.concatenate([rows_of[prompt] for prompt in drawn])
    copies = Counter[int]()
    ids = []
    for prompt in drawn.tolist():
        copies[prompt] += 1
        again = f"~{copies[prompt]}" if copies[prompt] > 1 else ""
        ids.append(trace.prompt_ids[prompt] + again)

    def drawn_rows(column: Ints | None) -> Ints | None:
        return None if column is None else column[rows]

    return Trace(
        name=f"{trace.name} (bootstrap {seed})",
        source=f"{trace.source}; prompts drawn with replacement, seed {seed}",
        prompt=np.repeat(np.arange(len(drawn)), [len(rows_of[prompt]) for prompt in drawn]),
        prompt_ids=tuple(ids),
        sample=trace.sample[rows],
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        capped=trace.capped[rows],
        arrival_s=trace.arrival_s[rows],
        step=drawn_rows(trace.step),
        correct=drawn_rows(trace.correct),
        synthetic=trace.synthetic,
        licence=trace.licence,
    )
