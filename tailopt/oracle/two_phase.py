r"""The two phases of a batch in closed form: when does one switch of shapes pay?

Shape A takes :math:`A_1` seconds for the crowded phase and :math:`A_2` for the sparse one, B takes
:math:`B_1, B_2`. A is ahead by the lead x in the first, B by y in the second:

.. math:: B_1 = (1 + x) A_1, \qquad A_2 = (1 + y) B_2 .

With a switch that costs S the batch takes :math:`A_1 + S + B_2`, not :math:`\min(A_1 + A_2, B_1 + B_2)`.
Staying with A loses :math:`y B_2`, with B :math:`x A_1`; the switch loses S. So

.. math:: \text{saved} = \min(x A_1, y B_2) - S , \qquad
          \text{gain} = \frac{\min(x A_1, y B_2) - S}{A_1 + B_2 + \min(x A_1, y B_2)} ,

and S breaks even at :math:`\min(x A_1, y B_2)`: the smaller of the two losses, whatever the phases are. With
:math:`A_1 = B_2`, x = y and S = 0 the gain is :math:`x / (2 + x) = 1 - 2 / (2 + x)`; 15 % of it needs
:math:`x = 0.3 / 0.85 = 35.3\,\%`. A mixed shape that takes M for both is beaten only if
:math:`A_1 + S + B_2 < M`: it may lose no more than S in the two phases together.

**Where to switch.** If k requests left take A :math:`a_k` seconds until the next is done, and B :math:`b_k`,
switching at n costs :math:`\sum_{k > n} a_k + S + \sum_{k \le n} b_k`. From n to n + 1 this changes by
:math:`b_{n+1} - a_{n+1}`: where A loses its lead for good, below some :math:`n^*`, is the place, and
:func:`best_switch` finds it for any a and b.
"""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats
from tailopt.errors import InputError


@dataclass(frozen=True)
class TwoPhases:
    """Seconds of two shapes for the crowded and the sparse phase of a batch.

    Attributes:
        a1_s, a2_s: of the shape to begin with.
        b1_s, b2_s: of the shape to end with.

    >>> even = TwoPhases(100.0, 135.3, 135.3, 100.0)
    >>> round(even.gain(0.0), 4), round(even.break_even_s, 1)
    (0.15, 35.3)
    """

    a1_s: float
    a2_s: float
    b1_s: float
    b2_s: float

    def __post_init__(self) -> None:
        for name in ("a1_s", "a2_s", "b1_s", "b2_s"):
            value = getattr(self, name)
            if not 0 < value < np.inf:
                raise InputError(f"two phases: {name}: expected a positive number of seconds, got {value}")

    @classmethod
    def of_leads(cls, a1_s: float, b2_s: float, x: float, y: float) -> "TwoPhases":
        """From the phases as the better shape does them, and its lead over the other in each."""
        return cls(a1_s, (1 + y) * b2_s, (1 + x) * a1_s, b2_s)

    @property
    def static_s(self) -> float:
        """The better of the two shapes for both phases."""
        return min(self.a1_s + self.a2_s, self.b1_s + self.b2_s)

    @property
    def break_even_s(self) -> float:
        """What a switch may cost without loss; negative if even a free one loses."""
        return min(self.b1_s - self.a1_s, self.a2_s - self.b2_s)

    def switched_s(self, cost_s: float) -> float:
        """Seconds with the switch."""
        return self.a1_s + cost_s + self.b2_s

    def gain(self, cost_s: float) -> float:
        """Share of the better shape's time that the switch saves; negative if it loses."""
        return (self.break_even_s - cost_s) / self.static_s


def lead_for(gain: float) -> float:
    """The lead on each side that a free switch between equal phases needs for a gain.

    >>> round(lead_for(0.15), 4)
    0.3529
    """
    if not 0 <= gain < 1:
        raise InputError(f"two phases: gain: expected a share from 0 to below 1, got {gain}")
    return 2 * gain / (1 - gain)


def best_switch(first_s: Floats, second_s: Floats, cost_s: float) -> tuple[int, float]:
    """At how many requests left to switch, and the seconds of the batch then; 0 for never.

    Args:
        first_s: ``[n]`` seconds of the first shape with 1, 2, ... n requests left until one more is done.
        second_s: ``[n]`` the same for the second shape.
        cost_s: of the switch.

    >>> best_switch(np.array([3.0, 3.0, 3.0, 3.0]), np.array([1.0, 2.0, 4.0, 6.0]), 1.0)
    (2, 10.0)
    """
    if len(first_s) != len(second_s):
        raise InputError(f"two phases: {len(first_s)} and {len(second_s)} stages, expected as many")
    saved = np.cumsum(np.asarray(first_s) - np.asarray(second_s)) - cost_s
    n = int(np.argmax(saved)) + 1 if len(saved) and saved.max() > 0 else 0
    return n, float(np.sum(first_s)) - (float(saved[n - 1]) if n else 0.0)
