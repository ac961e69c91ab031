"""Truth: a clairvoyant predictor, the best that any prediction can do."""

import numpy as np

from tailopt.arrays import Floats
from tailopt.trace.transforms import Batch


def truth(batch: Batch, rng: np.random.Generator) -> Floats:
    """Predict the true length of every request.

    Source: the oracle against which predictors are measured; no system can have it.

    >>> from tailopt.trace import Trace
    >>> truth(Batch(Trace.of([[90, 80]]), None, seed=0), np.random.default_rng(0))
    array([90., 80.])
    """
    return batch.trace.output_tokens.astype(np.float64)
