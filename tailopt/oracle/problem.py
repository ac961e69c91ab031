"""What the oracle is asked, and what it answers."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailopt.errors import InputError
from tailopt.plan import Fleet, Plan
from tailopt.trace import Trace

Status = Literal["optimal", "feasible"]

OPTIMAL_GAP = 1e-9
"""Relative gap up to which a certificate may be called optimal (the rounding of sums of doubles)."""


@dataclass(frozen=True)
class Problem:
    """A batch with known lengths, a fleet, and whether groups must stay together: which static plan is best?

    A *static plan* fixes each request's engine at time 0 for good; order and concurrency limits are free.
    """

    trace: Trace
    fleet: Fleet
    atomic: bool = False


@dataclass(frozen=True, eq=False)
class Certificate:
    """The least makespan of any static plan lies in ``[lower_s, upper_s]``.

    Attributes:
        lower_s: proven lower bound on the makespan of every static plan, in seconds.
        upper_s: makespan of ``plan``, simulated, in seconds.
        plan: the plan that attains ``upper_s``.
        status: ``"optimal"`` if the two meet within ``OPTIMAL_GAP``, else ``"feasible"``.
        method: how it was found.
        bound_argument: what proves ``lower_s``; read by :func:`tailopt.oracle.check.check`.
        wall_s: seconds it took.
        seed: of the search, 0 where nothing is drawn.
    """

    lower_s: float
    upper_s: float
    plan: Plan
    status: Status
    method: str
    bound_argument: object
    wall_s: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.lower_s) and 0 < self.lower_s <= self.upper_s * (1 + OPTIMAL_GAP)):
            raise InputError(f"certificate: lower bound {self.lower_s} s above upper bound {self.upper_s} s")

    @property
    def gap(self) -> float:
        """``upper_s / lower_s - 1``, never negative."""
        return max(0.0, self.upper_s / self.lower_s - 1.0)
