"""Bisection in a sorted array, compiled; ``numpy.searchsorted`` costs two seconds of compilation more."""

from numba import njit

from tailopt.arrays import Floats, Ints


@njit(cache=True)
def last_at_most(rising: Floats | Ints, limit: float) -> int:
    """The last place whose value is at most ``limit``, -1 if there is none.

    >>> import numpy as np
    >>> rising = np.array([0.0, 1.0, 1.0, 2.0])
    >>> last_at_most(rising, 1.0), last_at_most(rising, -1.0), last_at_most(rising, 9.0)
    (2, -1, 3)
    """
    low, high = 0, len(rising)
    while low < high:
        middle = (low + high) // 2
        if rising[middle] <= limit:
            low = middle + 1
        else:
            high = middle
    return low - 1
