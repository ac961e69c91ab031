"""Which tokens of a prompt its samples share, and the shared queue unit by unit."""

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.trace import Trace


def shared_tokens(trace: Trace, block_tokens: int) -> Ints:
    """``[n]`` tokens in the full blocks that a prompt shares with its other samples, 0 if it has none.

    A sample computes its prompt's last token, hence the block that ends with it, itself in any case. All
    engines of a profile have blocks of one size in practice; where not, the largest counts.
    """
    shared = (trace.context_tokens - 1) // block_tokens * block_tokens
    group_size = np.bincount(trace.group)[trace.group]
    return np.where(group_size > 1, _least_of_group(trace, shared), 0)


def _least_of_group(trace: Trace, values: Ints) -> Ints:
    least = np.full(int(trace.group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, trace.group, values)
    return least[trace.group]


def units(requests: Ints, group: Ints, available_s: Floats, *, atomic: bool) -> tuple[Ints, Ints, Floats]:
    """The shared queue unit by unit, where units start, and when they are there, never falling.

    A unit is one request, or a group if groups are ``atomic``: it stands where its first request stands in
    ``requests``, which are sorted by ``available_s``, and is there when its last request is.
    """
    if not atomic or not len(requests):
        return requests, np.arange(len(requests) + 1), available_s[requests]
    _, first, unit = np.unique(group[requests], return_index=True, return_inverse=True)
    there_s = np.zeros(len(first))
    np.maximum.at(there_s, unit, available_s[requests])
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.lexsort((first, there_s))] = np.arange(len(first))
    by_unit = np.argsort(rank[unit], kind="stable")
    starts = np.flatnonzero(np.diff(rank[unit][by_unit], prepend=-1))
    return requests[by_unit], np.append(starts, len(requests)), np.sort(there_s)
