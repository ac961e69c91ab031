r"""When two times are the same instant: equal up to rounding.

A clock is a sum of step times, and sums of the same numbers in another order differ in their last digits. If
that decided which of two engines acts first, a schedule would hang on rounding: engines that do the same work
are at one instant by rights. So times a and b are compared as

.. math:: a \text{ has come by } b \iff a \le (1 + 10^{-11})\, b,

in the definition and in the kernel alike: 1e-11 is beyond the rounding of a million steps, and far below a
step (at a day, it is a microsecond). Only times that differ by about 1e-11 by themselves, and not for
rounding, can still be told apart in the one and not in the other.
"""

import numpy as np

from tailopt.arrays import Floats

SLACK = 1.0 + 1e-11
"""Times that differ by no more than this factor are one instant."""


def by(one_s: float, other_s: float) -> bool:
    """Whether an instant has come by another.

    >>> by(0.1 + 0.2, 0.3), by(0.3, 0.1 + 0.2), by(0.31, 0.3)
    (True, True, False)
    """
    return bool(one_s <= other_s * SLACK)


def later(one_s: float, other_s: float) -> bool:
    """Whether an instant has not come by another.

    >>> later(0.1 + 0.2, 0.3), later(0.31, 0.3)
    (False, True)
    """
    return not by(one_s, other_s)


def made_equal(times_s: Floats) -> Floats:
    """Times of one instant made equal: all are the last of them.

    >>> made_equal(np.array([0.3, 5.0, 0.1 + 0.2])).tolist()
    [0.30000000000000004, 5.0, 0.30000000000000004]
    """
    if not len(times_s):
        return times_s
    order = np.argsort(times_s)
    rising = times_s[order]
    ends = np.append(rising[1:] > rising[:-1] * SLACK, True)
    last_s = rising[ends][np.cumsum(ends) - ends]
    equal = np.empty_like(times_s)
    equal[order] = last_s
    return equal
