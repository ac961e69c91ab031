"""Speculative decoding: how an engine drafts, and what that makes of its steps."""

from dataclasses import dataclass

from tailopt.engine.profile import ShapeProfile


@dataclass(frozen=True)
class Speculation:
    """The speculative decoding of one engine.

    Attributes:
        method: a draft method of the engine's profile, such as ``"ngram"``, ``"mtp"`` or ``"draft"``.
        draft_tokens: tokens drafted a step, k; None: the profile's best k for each concurrency.
        acceptance: chance that a drafted token is accepted if those before it are; None for the profile's.
    """

    method: str
    draft_tokens: int | None = None
    acceptance: float | None = None

    def check(self, shape: ShapeProfile) -> None:
        """Raise InputError unless the shape's profile knows the method."""
