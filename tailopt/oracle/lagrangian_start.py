r"""Prices and multipliers to start the priced staircase from, by a small linear program.

The prices of :mod:`tailopt.oracle.lagrangian` are the dual of a question: how few engines are done by T if
requests and engines can be split? Let w be what a request costs behind a longer one and c what it costs as
the leader, by each minorant q: for functions that are lines, nothing else matters. Sort the requests by
falling length into groups, the longest ones each alone, and let :math:`y_p` engines be led by the longest
request of group p and :math:`x_{gp}` requests of group g sit behind it:

.. math:: \min \sum_p y_p, \quad \sum_g w_{gq} x_{gp} \le (T - c_{pq})\, y_p, \quad
          y_g + \sum_{p \le g} x_{gp} = \text{requests of } g .

The duals of the equations are the prices, and those of the inequalities say for each leader which mixture of
the minorants it is that binds: a multiplier. Those of leaders in use are enough, and with them few classes
do what many did with multipliers on a grid. That an engine holds a request once only,
:math:`x_{gp} \le (\text{requests of } g)\, y_p`, makes the program several times larger and matters where
few long requests share an engine; so there are two programs, where that holds for the groups of one request,
and for all groups, which are smaller.

All of it is a proposal: any prices and multipliers give a bound.
"""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, Ints

GROWTH, FINER_GROWTH = 0.15, 0.08  # requests of a group, as a share of those before it
SHARE = 0.995  # of the makespan at hand: the T that is asked for
USED = 1e-6  # engines led by a group, or else it does not lead
LEAST_PRICE = 1e-6  # of the highest: a price of nothing never moves
MOST = 8.0  # multipliers add up to all prices over the makespan, times this, at most


@dataclass(frozen=True, eq=False)
class Start:
    """Prices to start from.

    Attributes:
        prices: ``[n]``, positive.
        multipliers: ``[k, minorants]`` that go with them.
    """

    prices: Floats
    multipliers: Floats


def starts(cost_s: Floats, makespan_s: float) -> list[Start]:
    """One for each way to say that an engine holds a request once; none if the program cannot be solved.

    Args:
        cost_s: ``[minorants, n, 1 or 2]`` seconds of each request, by falling length, as a leader and behind.
        makespan_s: of a plan at hand.

    >>> [start] = starts(np.array([[[3.0, 2.0], [2.0, 1.0], [2.0, 1.0]]]), 4.0)[:1]
    >>> start.prices.round(2)
    array([0.51, 0.5 , 0.5 ])
    """
    n = cost_s.shape[1]
    found = [
        _solved(cost_s, _group_starts(n, growth), SHARE * makespan_s, once)
        for growth, once in ((GROWTH, 1), (FINER_GROWTH, n))
    ]
    return [start for start in found if start is not None]


def _group_starts(n: int, growth: float) -> Ints:
    """First requests of the groups.

    >>> _group_starts(16, 0.15)
    array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 12, 14])
    """
    begin = [0]
    while (after := begin[-1] + max(1, round(growth * begin[-1]))) < n:
        begin.append(after)
    return np.array(begin)


def _solved(cost_s: Floats, begin: Ints, makespan_s: float, once: int) -> Start | None:
    """What the duals say; requests of groups of up to ``once`` are held once."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    minorants, n, _ = cost_s.shape
    groups, size = len(begin), np.diff(begin, append=n)
    behind_s = cost_s[:, :, -1]
    mean_s = np.add.reduceat(behind_s, begin, axis=1) / size
    leader, group = np.triu_indices(groups)
    leader, group = (one[(leader < group) | (size[group] > 1)] for one in (leader, group))
    pairs = len(group)  # x comes first, then y

    row = [leader * minorants + q for q in range(minorants)]
    row += [np.arange(groups) * minorants + q for q in range(minorants)]
    column = [np.arange(pairs)] * minorants + [pairs + np.arange(groups)] * minorants
    entry = [*mean_s[:, group], *(cost_s[:, begin, 0] - makespan_s)]
    bound = np.flatnonzero(size[group] <= once)
    rows = groups * minorants
    row += [rows + np.arange(len(bound))] * 2
    column += [bound, pairs + leader[bound]]
    entry += [np.ones(len(bound)), ((group == leader)[bound] - size[group[bound]]).astype(np.float64)]
    rows += len(bound)
    below = coo_array(
        (np.concatenate(entry), (np.concatenate(row), np.concatenate(column))), (rows, pairs + groups)
    )
    of_group = np.concatenate([group, np.arange(groups)])
    placed = coo_array((np.ones(pairs + groups), (of_group, np.arange(pairs + groups))))
    solved = linprog(
        np.repeat([0.0, 1.0], [pairs, groups]),
        A_ub=below.tocsr(), b_ub=np.zeros(rows), A_eq=placed.tocsr(), b_eq=size, method="highs-ds",
    )  # fmt: skip
    if solved.status != 0:
        return None
    multiplier = np.maximum(-solved.ineqlin.marginals[: groups * minorants], 0.0).reshape(groups, minorants)
    used = (solved.x[pairs:] > USED) & (multiplier.sum(axis=1) > 0)
    price = _spread(solved.eqlin.marginals, multiplier, behind_s, begin)
    if not used.any() or not price.max() > 0:
        return None
    prices, multipliers = np.maximum(price, LEAST_PRICE * price.max()), multiplier[used]
    most = MOST * prices.sum() / makespan_s
    return Start(prices, multipliers * np.minimum(1.0, most / multipliers.sum(axis=1))[:, None])


def _spread(of_group: Floats, multiplier: Floats, behind_s: Floats, begin: Ints) -> Floats:
    """``[n]`` prices: those of groups, in proportion to what it costs to sit behind the cheapest leader."""
    size = np.diff(begin, append=behind_s.shape[1])
    cost = np.where(multiplier.sum(axis=1)[:, None] > 0, multiplier @ behind_s, np.inf)
    least = np.minimum.accumulate(cost, axis=0)[np.repeat(np.arange(len(begin)), size), np.arange(size.sum())]
    mean = np.add.reduceat(least, begin) / size
    known = np.isfinite(mean) & (mean > 0)
    share = np.where(np.repeat(known, size), least / np.repeat(np.where(known, mean, 1.0), size), 1.0)
    return np.asarray(np.repeat(of_group, size) * share)
