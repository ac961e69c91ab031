"""A predictor as it is named and run: its spec, and what it must answer."""

import zlib
from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, floats
from tailopt.errors import InputError
from tailopt.spec import Spec
from tailopt.trace.transforms import Batch


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
        return self._checked(batch, answer.mean(axis=0) if answer.ndim == 2 and len(answer) else answer)

    def scenarios(self, batch: Batch) -> Floats | None:
        """``[scenarios, n]`` equally likely outcomes of the whole batch; None if it gives one number each.

        Raises:
            InputError: as when called.
        """
        answer = self._answer(batch)
        if answer.ndim != 2 or not len(answer):
            return None
        return np.stack([self._checked(batch, scenario) for scenario in answer])

    def _answer(self, batch: Batch) -> Floats:
        rng = np.random.default_rng([batch.seed, zlib.crc32(self.name.encode())])
        return np.asarray(self.spec.call("predictor", batch, rng))

    def _checked(self, batch: Batch, predicted: Floats) -> Floats:
        try:
            return floats("predicted tokens", predicted, batch.trace.n_requests, minimum=1)
        except InputError as error:
            raise InputError(f"predictor {self.name}: {error}") from None
