"""What the stochastic oracle answers."""

from dataclasses import dataclass

import numpy as np

from tailopt.errors import InputError
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.stochastic.colocation import CoLocationBound
from tailopt.plan import Plan
from tailopt.policies.annealing import value_s


@dataclass(frozen=True, eq=False)
class StochasticCertificate:
    """The least value of any one static plan lies in ``[lower_s, upper_s]``.

    Attributes:
        lower_s: proven lower bound on the value of every static plan, in seconds.
        upper_s: value of ``plan``: the mean of its simulated makespans over the worst scenarios.
        plan: the plan that attains ``upper_s``.
        clairvoyant: for each scenario, the interval of the best plan of one who knows that it comes.
        bound: what proves ``lower_s``; None if the clairvoyant bounds alone do.
        worst: how many scenarios count.
        plan_s, wall_s: seconds that finding the plan took, and all together.
        seed: of the search.
    """

    lower_s: float
    upper_s: float
    plan: Plan
    clairvoyant: tuple[Certificate, ...]
    bound: CoLocationBound | None
    worst: int
    plan_s: float
    wall_s: float
    seed: int

    def __post_init__(self) -> None:
        if not (np.isfinite(self.upper_s) and 0 < self.lower_s <= self.upper_s):
            raise InputError(f"certificate: lower bound {self.lower_s} s, upper bound {self.upper_s} s")

    @property
    def gap(self) -> float:
        """``upper_s / lower_s - 1``: how far the plan is from the best one for these scenarios, at most."""
        return self.upper_s / self.lower_s - 1.0

    @property
    def clairvoyant_s(self) -> tuple[float, float]:
        """Bounds on the value of one who knows each scenario beforehand and plans anew for each."""
        ends = [(found.lower_s, found.upper_s) for found in self.clairvoyant]
        lower_s, upper_s = np.array(ends).T
        return value_s(lower_s, self.worst), value_s(upper_s, self.worst)

    @property
    def price(self) -> tuple[float, float]:
        """Bounds on the price of not knowing: the best static plan's value over the clairvoyant's."""
        known_lower_s, known_upper_s = self.clairvoyant_s
        return max(1.0, self.lower_s / known_upper_s), self.upper_s / known_lower_s
