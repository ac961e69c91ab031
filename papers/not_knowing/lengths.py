r"""Ways to draw a batch's lengths, beside the predictor's own (:mod:`tailopt.predict.prompt_distribution`).

- :func:`redrawn` knows every length that a prompt has in the trace, and not which come.
- :func:`varied` is the predictor's model with its parts changed one by one.
- :func:`borrowed` has no formula. With h the log lengths of a prompt's history, :math:`\bar h` and s their
  mean and spread, z the mean in standard units among the trace's prompts and :math:`\sigma` the trace's
  pooled spread within prompts, a prompt's samples are those of another trace's prompt with like s / σ and z,
  as they lay about *its* history:

  .. math:: \log L = \bar h + \sigma \, (y' - \bar h') / \sigma' .

  All samples of a group come from one such lender, so whatever dependence, skew and tail the lenders have,
  the borrowed lengths have too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.predict.prompt_distribution import DEGREES
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import Batch

OTHERS = (
    "gpqa-claude-opus-4-5-think32k", "gpqa-claude-opus-4-6-think64k", "gpqa-gemini-2.5-pro",
    "gpqa-gemini-3-pro-preview", "gpqa-gpt-5-high", "gpqa-gpt-5-mini-high", "gpqa-gpt-5.1-medium",
    "gpqa-gpt-5.2-high", "gpqa-gpt-5.4-mini-high", "gpqa-gpt-5.4-nano-high", "gpqa-kimi-k2.5",
)  # fmt: skip
"""Traces that lend, and on which models are compared: none of those in README's other tables."""

SAMPLES = 4
"""Of a lender's history, and as many of what followed."""

SPLITS = 6
"""Ways in which each lender's samples are parted into history and what followed."""

NEAREST = 300
"""Lenders, of thousands, that a prompt may borrow from."""

SMOOTH = 8
"""Power of a smooth ceiling: l becomes l / (1 + (l / ceiling)^8)^(1/8)."""


def redrawn(batch: Batch, scenarios: int) -> Ints:
    """``[scenarios, n]`` lengths, had other samples of each prompt been drawn for the batch.

    All samples of a prompt, those of the batch and those of its history, are equally likely to be drawn. So a
    plan for these scenarios knows every length that a prompt has in the trace, and not which ones come.
    """
    assert batch.history is not None
    rng = np.random.default_rng([batch.seed, 1])
    lengths = np.empty((scenarios, batch.trace.n_requests), dtype=np.int64)
    for prompt in range(batch.trace.n_prompts):
        mine = np.flatnonzero(batch.trace.prompt == prompt)
        past = batch.history.output_tokens[batch.history_prompt == prompt]
        known = np.tile(np.append(batch.trace.output_tokens[mine], past), (scenarios, 1))
        lengths[:, mine] = rng.permuted(known, axis=1)[:, : len(mine)]
    return lengths


def varied(
    batch: Batch,
    rng: np.random.Generator,
    *,
    scenarios: int = 200,
    degrees: float = DEGREES,
    spread: float = 1.0,
    skew: float = 0.0,
    jumps: float = 0.0,
    ceiling: float = 1.0,
    smooth: bool = False,
) -> Floats:
    """``[scenarios, n]`` lengths from the predictor's model, changed; with defaults, the predictor's own.

    Args:
        batch: each of its prompts has at least two samples in the history.
        rng: as the predictor's.
        scenarios: how many.
        degrees: of freedom of the prior on a prompt's variance.
        spread: factor on spreads within prompts.
        skew: z is stretched by 1 + skew above 0 and 1 - skew below, then brought back to mean 0, variance 1.
        jumps: share of requests that are longer by a factor e^x, x exponential with mean 1/2.
        ceiling: over the longest response of the history; inf for none.
        smooth: whether lengths near the ceiling bend instead of being cut at it.
    """
    assert batch.history is not None
    log_length, prompt = np.log(batch.history.output_tokens), batch.history_prompt
    count, mean, squares = _moments(log_length, prompt, batch.trace.n_prompts)
    within = squares.sum() / (count - 1).sum()
    between = mean.var(ddof=1) - within * (1 / count).mean()
    scale = ((degrees - 2) * within + squares) / 2
    shape = (scenarios, len(count))
    variance = spread**2 * scale / rng.gamma((degrees + count - 1) / 2, size=shape)
    precision = count / variance + 1 / between
    location = (count / variance * mean + mean.mean() / between) / precision
    location += rng.standard_normal(shape) / np.sqrt(precision)
    z = rng.standard_normal((scenarios, batch.trace.n_requests))
    if skew:
        z = z * (1 + skew * np.sign(z)) - skew * np.sqrt(2 / np.pi)
        z /= np.sqrt(1 + skew**2 * (1 - 2 / np.pi))
    drawn = location[:, batch.trace.prompt] + np.sqrt(variance)[:, batch.trace.prompt] * z
    if jumps:
        drawn += (rng.random(z.shape) < jumps) * rng.exponential(0.5, z.shape)
    return _under(np.exp(drawn), ceiling * float(batch.history.output_tokens.max()), smooth)


@dataclass(frozen=True, eq=False)
class Lenders:
    """Prompts of a trace, their samples parted into a history and what followed.

    Attributes:
        alike: ``[lenders, 2]`` what is compared: the history's spread, and how long the prompt is.
        followed: ``[lenders, SAMPLES]`` log lengths of what followed, over the history's mean, in spreads.
    """

    alike: Floats
    followed: Floats


@cache
def lenders_of(name: str) -> Lenders:
    """Those of a bundled trace; prompts with too few samples lend nothing."""
    trace = load_bundled(name)
    rng = np.random.default_rng(0)
    logs = [np.log(rows) for rows in _by_prompt(trace) if len(rows) >= 2 * SAMPLES]
    within = float(np.sqrt(np.mean([rows.var(ddof=1) for rows in logs])))
    alike, followed = [], []
    for _ in range(SPLITS):
        parted = np.stack([rng.permutation(rows)[: 2 * SAMPLES] for rows in logs])
        past, after = parted[:, :SAMPLES], parted[:, SAMPLES:]
        mean = past.mean(axis=1)
        alike.append(_alike(past.std(axis=1, ddof=1) / within, mean))
        followed.append((after - mean[:, None]) / within)
    return Lenders(np.concatenate(alike), np.concatenate(followed))


def borrowed(
    batch: Batch, rng: np.random.Generator, *, scenarios: int = 200, names: Sequence[str] = OTHERS
) -> Floats:
    """``[scenarios, n]`` lengths borrowed from prompts of other traces; see above.

    The ceiling is the longest response of the history, and smooth.

    Args:
        batch: at most ``SAMPLES`` requests of a prompt, and two or more in its history.
        rng: chooses the lenders.
        scenarios: how many.
        names: traces that lend; the batch's own never does.
    """
    assert batch.history is not None
    lenders = [lenders_of(name) for name in names if name != batch.trace.name]
    alike = np.concatenate([each.alike for each in lenders])
    followed = np.concatenate([each.followed for each in lenders])
    log_length, prompt = np.log(batch.history.output_tokens), batch.history_prompt
    count, mean, squares = _moments(log_length, prompt, batch.trace.n_prompts)
    variance = squares / (count - 1)
    within = float(np.sqrt(variance.mean()))
    drawn = np.empty((scenarios, batch.trace.n_requests))
    for i, own in enumerate(_alike(np.sqrt(variance) / within, mean)):
        near = np.argpartition(((alike - own) ** 2).sum(axis=1), NEAREST)[:NEAREST]
        mine = np.flatnonzero(batch.trace.prompt == i)
        drawn[:, mine] = mean[i] + within * followed[rng.choice(near, size=scenarios)][:, : len(mine)]
    return _under(np.exp(drawn), float(batch.history.output_tokens.max()), smooth=True)


def _alike(spread: Floats, mean: Floats) -> Floats:
    """``[prompts, 2]`` spread in logs, softened near 0, and the mean in standard units, which counts less."""
    return np.column_stack([np.log(spread + 0.15), 0.3 * (mean - mean.mean()) / mean.std()])


def _under(lengths: Floats, ceiling: float, smooth: bool) -> Floats:
    if smooth:
        lengths = lengths / (1 + (lengths / ceiling) ** SMOOTH) ** (1 / SMOOTH)
    return np.asarray(np.clip(np.rint(lengths), 1.0, ceiling))


def _moments(values: Floats, prompt: Ints, prompts: int) -> tuple[Ints, Floats, Floats]:
    """``[prompts]`` number of values, their mean, and the sum of squares about it."""
    count = np.bincount(prompt, minlength=prompts)
    mean = np.bincount(prompt, weights=values, minlength=prompts) / count
    return count, mean, np.bincount(prompt, weights=(values - mean[prompt]) ** 2, minlength=prompts)


def _by_prompt(trace: Trace) -> list[Ints]:
    order = np.argsort(trace.prompt, kind="stable")
    return np.split(trace.output_tokens[order], np.cumsum(np.bincount(trace.prompt))[:-1])
