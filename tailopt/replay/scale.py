r"""Real traces made small enough for a small machine, the shape of their tail kept.

Every length is divided by the same factor, so all ratios of lengths stay, P90/P50, the longest over the mean,
up to the rounding to whole tokens (half a token, of lengths of at least one). What does not scale along is
what a token costs besides: the share of prefill and the fixed part of a step weigh as they do on the small
machine, which is measured there, not derived.
"""

from dataclasses import replace

import numpy as np

from tailopt.errors import InputError
from tailopt.trace import Trace


def scaled_down(trace: Trace, factor: float) -> Trace:
    """``trace`` with all lengths divided by ``factor`` and rounded, to 1 at least; unknown ones stay 0.

    Raises:
        InputError: if the factor is below 1.

    >>> scaled_down(Trace.of([[100, 204, 1600]], prompt_tokens=83), 8).output_tokens
    array([ 12,  26, 200])
    """
    if not 1 <= factor < np.inf:
        raise InputError(f"factor: expected at least 1, got {factor}")

    def less(tokens: np.ndarray) -> np.ndarray:
        return np.where(tokens > 0, np.maximum(np.rint(tokens / factor), 1), 0).astype(np.int64)

    return replace(
        trace,
        name=f"{trace.name} (1/{factor:g})",
        source=f"{trace.source}; lengths divided by {factor:g}",
        prompt_tokens=less(trace.prompt_tokens),
        output_tokens=less(trace.output_tokens),
    )
