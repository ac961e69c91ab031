"""What the oracle answers: an interval that holds the best static makespan, a plan, and what proves it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailopt.errors import InputError
from tailopt.oracle.alone import AloneBound
from tailopt.oracle.any_bound import AnyBound
from tailopt.oracle.mixed import MixedBound
from tailopt.oracle.staircase import StaircaseBound
from tailopt.plan import Plan

Status = Literal["optimal", "feasible"]

BoundArgument = StaircaseBound | AloneBound | AnyBound | MixedBound
"""What can prove a lower bound; each has a checker in :data:`tailopt.oracle.check.ARGUMENTS`."""

OPTIMAL_GAP = 1e-9
"""Relative gap up to which a certificate may be called optimal (the rounding of sums of doubles)."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """The least makespan of any static plan lies in ``[lower_s, upper_s]``.

    Attributes:
        lower_s: proven lower bound on the makespan of every static plan, in seconds.
        upper_s: makespan of ``plan``, simulated, in seconds.
        plan: the plan that attains ``upper_s``.
        status: ``"optimal"`` if the two meet within ``OPTIMAL_GAP``, else ``"feasible"``.
        method: how it was found.
        bound_argument: what proves ``lower_s``; :func:`tailopt.oracle.check.check` verifies it.
        wall_s: seconds it took.
        seed: of the search, 0 where nothing is drawn.

    Raises:
        InputError: if the bounds cross, or the status does not agree with them.
    """

    lower_s: float
    upper_s: float
    plan: Plan
    status: Status
    method: str
    bound_argument: BoundArgument
    wall_s: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.upper_s) and 0 < self.lower_s <= self.upper_s):
            raise InputError(f"certificate: lower bound {self.lower_s} s, upper bound {self.upper_s} s")
        if self.status != status_of(self.lower_s, self.upper_s):
            raise InputError(f"certificate: called {self.status} with a gap of {self.gap:.3g}")

    @property
    def gap(self) -> float:
        """``upper_s / lower_s - 1``."""
        return self.upper_s / self.lower_s - 1.0


def status_of(lower_s: float, upper_s: float) -> Status:
    """``"optimal"`` if the bounds meet within ``OPTIMAL_GAP``.

    >>> status_of(1.0, 1.0 + 1e-10), status_of(1.0, 1.001)
    ('optimal', 'feasible')
    """
    return "optimal" if upper_s <= lower_s * (1 + OPTIMAL_GAP) else "feasible"
