"""Predictors of output length: one file each; ``PREDICTORS`` maps names to them.

A predictor is a function ``(Batch, rng, **options) -> [n] predicted output tokens``, or ``[scenarios, n]``
if it draws whole scenarios; options are keyword-only and have defaults. A new one is a file here and a line
below. It may look at ``batch.history``; one that looks at ``batch.trace.output_tokens`` is clairvoyant and
says so. Docstrings as for policies (:mod:`tailopt.policies`).
"""

from collections.abc import Callable, Mapping

from tailopt.arrays import Floats
from tailopt.predict import constant, noisy_truth, prompt_distribution, prompt_mean, truth
from tailopt.predict.named import NamedPredictor
from tailopt.spec import parse

PREDICTORS: Mapping[str, Callable[..., Floats]] = {
    "truth": truth.truth,
    "noisy_truth": noisy_truth.noisy_truth,
    "prompt_mean": prompt_mean.prompt_mean,
    "prompt_distribution": prompt_distribution.prompt_distribution,
    "constant": constant.constant,
}


def resolve_predictor(text: str) -> NamedPredictor:
    """The predictor that a spec names (see :mod:`tailopt.spec`).

    Raises:
        InputError: if it names none, or its options are wrong.

    >>> resolve_predictor("noisy_truth(sigma=0.5)").spec.options
    {'sigma': 0.5}
    """
    return NamedPredictor(parse("predictor", text, PREDICTORS))


__all__ = ["PREDICTORS", "NamedPredictor", "resolve_predictor"]
