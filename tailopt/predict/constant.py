"""A constant: knowing nothing about any request."""

import numpy as np

from tailopt.arrays import Floats
from tailopt.errors import InputError
from tailopt.trace.transforms import Batch

WITHOUT_HISTORY = 4096.0
"""Predicted tokens where nothing is known; all requests being equal, a policy can hardly tell."""


def constant(batch: Batch, rng: np.random.Generator, *, tokens: float | None = None) -> Floats:
    """Predict one number for all requests.

    By default it is the mean length in the batch's history (samples of the same prompts that are not in the
    batch), and ``WITHOUT_HISTORY`` if there is none: never a number computed from the batch itself.

    Source: the baseline of every length predictor.

    >>> from tailopt.trace import Trace
    >>> constant(Batch(Trace.of([[90, 80]]), Trace.of([[70, 60]]), seed=0), np.random.default_rng(0))
    array([65., 65.])
    """
    if tokens is None:
        tokens = WITHOUT_HISTORY if batch.history is None else float(batch.history.output_tokens.mean())
    if not 1 <= tokens < float("inf"):
        raise InputError(f"tokens: expected at least 1, got {tokens}")
    return np.full(batch.trace.n_requests, float(tokens))
