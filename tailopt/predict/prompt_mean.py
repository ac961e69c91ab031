"""The mean of a prompt's other samples: what earlier rollouts of the same prompt tell."""

import numpy as np

from tailopt.arrays import Floats
from tailopt.errors import InputError
from tailopt.trace.trace import Trace
from tailopt.trace.transforms import Batch


def prompt_mean(batch: Batch, rng: np.random.Generator) -> Floats:
    r"""Predict the mean length of the samples of the same prompt that were drawn for no batch member.

    Only ``batch.history`` is read, never a length of the batch itself. The mean of the other samples *within*
    the batch would leak: with :math:`m_i = (S - L_i) / (G - 1)` for a group of G samples with sum S, the
    :math:`m_i` sum to exactly S, so a policy that routes whole groups would be told the truth. A prompt
    without history gets the mean over all history. Lengths that a cap cut off count as cut, so means are
    lower bounds there.

    Raises:
        InputError: if the batch took all samples of all its prompts, so that nothing is left to learn from.

    Source: prompts keep their length rank across samples and checkpoints, TailSieve (Xu et al., arXiv),
    appendix B.

    >>> from tailopt.trace import Trace
    >>> batch = Batch(Trace.of([[90, 80], [7, 9]]), Trace.of([[70, 60], [8]]), seed=0)
    >>> prompt_mean(batch, np.random.default_rng(0))
    array([65., 65.,  8.,  8.])
    """
    history = history_of(batch)
    lengths, prompt = history.output_tokens, batch.history_prompt
    count = np.bincount(prompt, minlength=batch.trace.n_prompts)
    total = np.bincount(prompt, weights=lengths, minlength=batch.trace.n_prompts)
    mean = np.where(count > 0, total / np.maximum(count, 1), lengths.mean())
    return np.asarray(mean[batch.trace.prompt])


def history_of(batch: Batch) -> Trace:
    """The batch's history.

    Raises:
        InputError: if the batch took all samples of all its prompts, so that nothing is left to learn from.
    """
    if batch.history is None:
        size = int(np.bincount(batch.trace.prompt).max())
        raise InputError(
            f"the batch takes all {size} samples of each prompt and leaves none to learn from; "
            f"draw fewer, e.g. --samples {max(1, size // 2)}"
        )
    return batch.history
