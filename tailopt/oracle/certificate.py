"""What the oracle answers: an interval that holds the best static makespan, a plan, and what proves it."""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailopt.errors import InputError
from tailopt.oracle.alone import AloneBound
from tailopt.oracle.any_bound import AnyBound
from tailopt.oracle.lagrangian import PricedBound
from tailopt.oracle.mixed import MixedBound
from tailopt.oracle.mixed_priced import PricedKindsBound
from tailopt.oracle.partition import PartitionBound
from tailopt.oracle.search_bound import SearchBound
from tailopt.oracle.solver_bound import SolverBound
from tailopt.oracle.staircase import StaircaseBound, not_above
from tailopt.plan import Plan
from tailopt.run import Run

Status = Literal["optimal", "feasible"]

BoundArgument = (
    StaircaseBound
    | SearchBound
    | AloneBound
    | AnyBound
    | MixedBound
    | PartitionBound
    | PricedBound
    | PricedKindsBound
    | SolverBound
)
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

    def improved(
        self, bound: "BoundArgument", run: Run, method: str, started: float, seed: int
    ) -> "Certificate":
        """With the better bound and the better plan of this certificate's and those given.

        Args:
            bound: an argument for a lower bound.
            run: what the simulator says of a plan.
            method: what is to be said of how they were found.
            started: when (:func:`time.perf_counter`).
            seed: of the search.
        """
        upper_s = min(self.upper_s, run.makespan_s)
        argument = self.bound_argument
        if status_of(argument.lower_s, upper_s) != "optimal" and bound.lower_s > argument.lower_s:
            argument = bound
        lower_s = not_above(argument.lower_s, upper_s)
        return Certificate(
            lower_s=lower_s,
            upper_s=upper_s,
            plan=run.plan if run.makespan_s < self.upper_s else self.plan,
            status=status_of(lower_s, upper_s),
            method=method,
            bound_argument=argument,
            wall_s=time.perf_counter() - started,
            seed=seed,
        )


def status_of(lower_s: float, upper_s: float) -> Status:
    """``"optimal"`` if the bounds meet within ``OPTIMAL_GAP``.

    >>> status_of(1.0, 1.0 + 1e-10), status_of(1.0, 1.001)
    ('optimal', 'feasible')
    """
    return "optimal" if upper_s <= lower_s * (1 + OPTIMAL_GAP) else "feasible"
