"""Compiled work on two cores: parts that do not know of each other, one in a thread of its own.

The parts are compiled functions that hold no interpreter lock, or spend their time in such functions. What
they compute does not depend on whether they run side by side. The thread starts when first needed; where
there is one core there is none.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from tailopt.errors import InputError

Result = TypeVar("Result")

CORES = 2  # used at most
WORTH_IT = 200_000  # numbers to compute from which on a thread gains more than it costs


@lru_cache(maxsize=1)
def cores() -> int:
    """How many may be used."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(CORES, len(affinity(0)) if affinity else os.cpu_count() or 1)


def halves(count: int, numbers: int) -> list[slice]:
    """``count`` things as one part for each core; one part if there are few ``numbers`` to compute.

    >>> halves(5, 10)
    [slice(0, 5, None)]
    """
    parts = min(cores() if numbers >= WORTH_IT else 1, max(1, count))
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def side_by_side(work: Sequence[Callable[[], Result]]) -> list[Result]:
    """What each of one or two pieces of work returns, in order.

    An exception, Ctrl-C too, is raised when all are done.

    Raises:
        InputError: if there are more.

    >>> side_by_side([lambda: 1, lambda: 2])
    [1, 2]
    """
    if len(work) > CORES:
        raise InputError(f"side by side: {len(work)} pieces of work, expected {CORES} at most")
    if len(work) < 2 or cores() < 2:
        return [one() for one in work]
    second = _thread(os.getpid()).submit(work[1])
    try:
        first = work[0]()
    finally:
        wait([second])
    return [first, second.result()]


@lru_cache(maxsize=1)
def _thread(process: int) -> ThreadPoolExecutor:
    """The second thread of this process; a fork has its own."""
    return ThreadPoolExecutor(CORES - 1, f"tailopt-{process}")
