"""The truth with noise: how good does a predictor have to be?"""

import numpy as np

from tailopt.arrays import Floats
from tailopt.errors import InputError
from tailopt.trace.transforms import Batch

MOST_SIGMA = 50.0
"""Beyond it, and long before, predictions are no numbers of tokens any more."""


def noisy_truth(
    batch: Batch, rng: np.random.Generator, *, sigma: float = 0.3, between: float = 0.0
) -> Floats:
    r"""Predict the true length times lognormal noise with median 1.

    The noise of request i of group g is :math:`\exp(\sigma (\sqrt{\beta}\, z_g + \sqrt{1 - \beta}\, z_i))`
    with standard normal z: ``sigma`` is the standard deviation of the logarithm, and a share :math:`\beta` =
    ``between`` of its variance is common to a group, as where a whole prompt is misjudged. Predictions are at
    least 1 token.

    Source: multiplicative prediction error, as in the analysis of algorithms with predictions.

    >>> from tailopt.trace import Trace
    >>> batch = Batch(Trace.of([[1000, 1000]]), None, seed=0)
    >>> predicted = noisy_truth(batch, np.random.default_rng(0), between=1.0)
    >>> bool(predicted[0] == predicted[1] != 1000)
    True
    """
    if not 0 <= sigma <= MOST_SIGMA:
        raise InputError(f"sigma: expected 0 to {MOST_SIGMA:g}, got {sigma}")
    if not 0 <= between <= 1:
        raise InputError(f"between: expected 0 to 1, got {between}")
    group = batch.trace.group
    of_group = rng.standard_normal(int(group.max()) + 1)[group]
    own = rng.standard_normal(batch.trace.n_requests)
    noise = sigma * (np.sqrt(between) * of_group + np.sqrt(1 - between) * own)
    return np.asarray(np.maximum(1.0, batch.trace.output_tokens * np.exp(noise)))
