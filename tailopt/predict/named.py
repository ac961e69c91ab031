"""A predictor as it is named and run: its spec, and what it must answer."""

import zlib
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, floats
from tailopt.errors import InputError
from tailopt.spec import Spec
from tailopt.trace.transforms import Batch

MOST_PREDICTED = 2.0**40
"""Tokens of one request: far beyond any response, and sums of it still fit 64 bits."""


@dataclass(frozen=True)
class NamedPredictor:
    """A predictor with its options.

    Attributes:
        spec: what names it.
    """

    spec: Spec[Floats]

    @property
    def name(self) -> str:
        """The spec's text, for tables."""
        return self.spec.text

    def __call__(self, batch: Batch) -> Floats:
        """``[n]`` predicted output tokens of the batch, at least 1; the mean where scenarios are drawn.

        What is drawn depends on the batch and on the spec's text alone, not on what else is compared.

        Raises:
            InputError: naming the predictor, if it raises (in a user's file) or does not answer one positive
                number for each request.
        """
        answer = self._answer(batch)
        return np.asarray(answer.mean(axis=0)) if answer.ndim == 2 else answer

    def scenarios(self, batch: Batch) -> Floats | None:
        """``[scenarios, n]`` equally likely outcomes of the whole batch; None if it gives one number each.

        Raises:
            InputError: as when called.
        """
        answer = self._answer(batch)
        return answer if answer.ndim == 2 else None

    def _answer(self, batch: Batch) -> Floats:
        """Its checked answer. It sees a copy of the batch: what it does to that changes no true length.

        Options do not change what is drawn: a predictor with other options is paired with itself.
        """
        rng = np.random.default_rng([batch.seed, zlib.crc32(self.spec.function.__name__.encode())])
        answer = self.spec.call("predictor", deepcopy(batch), rng, read=np.asarray)
        if answer.ndim == 2 and len(answer):
            return np.stack([self._checked(batch, scenario) for scenario in answer])
        return self._checked(batch, answer)

    def _checked(self, batch: Batch, predicted: Floats) -> Floats:
        try:
            n = batch.trace.n_requests
            return floats("predicted tokens", predicted, n, minimum=1, maximum=MOST_PREDICTED)
        except InputError as error:
            raise InputError(f"predictor {self.name}: {error}") from None
