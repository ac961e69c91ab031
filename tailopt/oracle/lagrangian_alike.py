r"""Requests that count as equal, so that a search need not try both ways to exchange them.

Let the requests of a **class** be equally long and count with the least context and the least prefill among
them. An engine's time by a minorant (:mod:`tailopt.oracle.lagrangian`) then falls by at most what its
requests cost more than that, and the bound with it: little, where prompts are short beside responses. At a
length cap many requests end alike.

A plan that gives each request i an engine e(i) stays done by T if requests of a class change places, and if
two engines that hold as many and are equally late after the first requests exchange all that follow. So of
the plans done by T look at the one whose e(1), e(2), ... come first in the dictionary: the members of a
class are on engines that do not fall, and no request is on an engine while one before it holds as many and is
equally late. If no such plan begins in a way, none need be looked for there.
"""

import numpy as np

from tailopt.arrays import Floats, Ints


def classes(length: Ints, context_s: Floats, paid_s: Floats, spare_s: float) -> Ints:
    """``[n]`` the first request of each one's class: those of one length, in as few parts as may be.

    Args:
        length: ``[n]`` falling.
        context_s, paid_s: ``[minorants, n]`` what each request costs an engine besides its steps; a class
            counts with the least of either, which need not be of one request.
        spare_s: what all requests together may count less, by any minorant; longer ones come first.

    >>> none_s = np.zeros((1, 5))
    >>> classes(np.array([9, 9, 9, 5, 5]), np.array([[1.0, 3.0, 1.5, 0.0, 1.0]]), none_s, 0.7).tolist()
    [0, 1, 0, 3, 4]
    """

    def lost_s(one: Ints) -> float:
        of_each = [cost_s[:, one] - cost_s[:, one].min(axis=1)[:, None] for cost_s in (context_s, paid_s)]
        return float((of_each[0] + of_each[1]).sum(axis=1).max())

    fixed_s = context_s + paid_s
    alike = np.arange(len(length))
    for same in np.split(alike.copy(), np.flatnonzero(np.diff(length)) + 1):
        by_cost = same[np.lexsort(fixed_s[:, same])]
        for parts in range(1, len(same)):
            of_part = np.array_split(by_cost, parts)
            lost = sum(map(lost_s, of_part))
            if lost <= spare_s:
                for one in of_part:
                    alike[one] = one.min()
                spare_s -= lost
                break
    return alike


def least_of_class(values: Floats, alike: Ints) -> Floats:
    """``[..., n]`` the least value of each one's class.

    >>> least_of_class(np.array([3.0, 1.0, 2.0, 5.0]), np.array([0, 0, 2, 2]))
    array([1., 1., 2., 2.])
    """
    least = values.T.copy()
    np.minimum.at(least, alike, values.T)
    return np.asarray(least[alike].T)


def mean_of_class(values: Floats, alike: Ints) -> Floats:
    """``[n]`` the mean of each one's class: what holds for some prices holds for them exchanged.

    >>> mean_of_class(np.array([3.0, 1.0, 2.0, 6.0]), np.array([0, 0, 2, 2]))
    array([2., 2., 4., 4.])
    """
    return np.asarray((np.bincount(alike, values) / np.maximum(np.bincount(alike), 1))[alike])


def one_before(alike: Ints) -> Ints:
    """``[n]`` the member of its class before each request, or -1.

    >>> one_before(np.array([0, 1, 0, 0, 1]))
    array([-1, -1,  0,  2,  1])
    """
    before = np.full(len(alike), -1, dtype=np.int64)
    by_class = np.argsort(alike, kind="stable")
    same = alike[by_class[1:]] == alike[by_class[:-1]]
    before[by_class[1:][same]] = by_class[:-1][same]
    return before
