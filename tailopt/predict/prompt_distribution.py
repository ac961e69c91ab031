r"""A distribution per prompt: scenarios of all lengths of a batch, from earlier samples of its prompts.

Log lengths of prompt i are modelled as normal with its own mean and its own variance, both learned from few
samples, so both are shrunk towards the other prompts (the conjugate normal-inverse-gamma model):

.. math:: \log L = \mu_i + \sigma_i z, \quad \mu_i \sim N(m, t^2), \quad
          \sigma_i^2 \sim \text{inverse gamma}(\nu / 2, (\nu - 2) s^2 / 2).

s is the pooled spread within prompts, m and t the mean and spread of the prompts' means, and :math:`\nu` =
``DEGREES`` says how much spreads differ between prompts. A scenario draws, for each prompt, first
:math:`\sigma_i`, then :math:`\mu_i`, then one z per request: samples of a prompt are dependent, because its
mean is not known for sure. No scenario is longer than the longest response of the history: a lognormal tail
of many prompts overshoots a real rollout's longest response by far, and the longest is what a makespan
hangs on.
"""

import numpy as np

from tailopt.arrays import Floats
from tailopt.errors import InputError
from tailopt.predict.prompt_mean import history_of
from tailopt.trace.transforms import Batch

DEGREES = 8.0
"""Of freedom of the prior on a prompt's variance; real traces fit 5 to 20 about equally well."""

SPREAD = 0.35
"""Of log lengths within a prompt where no prompt has two samples; typical of real traces."""


def prompt_distribution(batch: Batch, rng: np.random.Generator, *, scenarios: int = 200) -> Floats:
    """Draw ``[scenarios, n]`` lengths of the batch's requests, given other samples of the same prompts.

    A policy that takes one number per request gets the mean over the scenarios; ``sample_mean`` gets
    them all.

    Raises:
        InputError: if the batch has no history, or fewer than one scenario is asked for.

    Source: the conjugate normal model (Gelman et al., Bayesian Data Analysis, chapter 5), on log lengths.

    >>> from tailopt.trace import Trace
    >>> batch = Batch(Trace.of([[90, 80], [7, 9]]), Trace.of([[70, 60], [8, 6]]), seed=0)
    >>> drawn = prompt_distribution(batch, np.random.default_rng(0), scenarios=500)
    >>> drawn.shape, bool(np.median(drawn[:, 0]) > 40 > 20 > np.median(drawn[:, 3])), float(drawn.max())
    ((500, 4), True, 70.0)
    """
    if scenarios < 1:
        raise InputError(f"scenarios: expected at least 1, got {scenarios}")
    history = history_of(batch)
    log_length, prompt = np.log(history.output_tokens), batch.history_prompt
    prompts = batch.trace.n_prompts
    count = np.bincount(prompt, minlength=prompts)
    mean = np.bincount(prompt, weights=log_length, minlength=prompts) / np.maximum(count, 1)
    squares = np.bincount(prompt, weights=(log_length - mean[prompt]) ** 2, minlength=prompts)
    seen = count > 0
    pairs = int((count[seen] - 1).sum())
    within = max(float(squares.sum()) / pairs if pairs else SPREAD**2, 1e-12)
    noise = within * float((1 / count[seen]).mean())  # of the means, from few samples
    between = max(float(mean[seen].var(ddof=1)) - noise if seen.sum() > 1 else within, 1e-12)
    center = float(mean[seen].mean())

    shape = (DEGREES + np.maximum(count - 1, 0)) / 2
    scale = ((DEGREES - 2) * within + squares) / 2
    variance = scale / rng.gamma(shape, size=(scenarios, prompts))
    precision = count / variance + 1 / between
    location = (count / variance * mean + center / between) / precision
    location += rng.standard_normal((scenarios, prompts)) / np.sqrt(precision)
    z = rng.standard_normal((scenarios, batch.trace.n_requests))
    drawn = np.exp(location[:, batch.trace.prompt] + np.sqrt(variance)[:, batch.trace.prompt] * z)
    return np.asarray(np.clip(np.rint(drawn), 1.0, float(history.output_tokens.max())))
