"""All ways to place the longest requests on engines of several kinds, as far as they may pay all prices.

Two in which engines of a kind hold requests that cost all kinds the same are one way. Breadth first, and in
whole numbers that are rounded in the engines' favour, for
:mod:`tailopt.oracle.check_mixed_priced`.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from tailopt.arrays import Ints
from tailopt.oracle.check_parts import require

TICKS = 2**44  # of the makespan
NO_TICKS = -(2**60)  # of an inequality that does not hold
MOST_STATES = 1_000_000  # after which the checker says that it could not verify the bound
CHUNK = 256  # states for which it is computed together what engines collect
NEVER = -(2**61)
FREE = 2**62  # room at a multiplier with a row that does not hold: it says nothing


@dataclass(frozen=True, eq=False)
class Placed:
    """What a request costs an engine of a kind by how many longer ones it holds.

    Attributes:
        paid: ``[longer ones + 1, k]`` its time at each multiplier; beyond the last it is that of the last.
        ticks: ``[longer ones + 1, inequalities]`` its time.
        most: how many longer ones can be there besides; -1: it cannot be on such an engine.
    """

    paid: Ints
    ticks: Ints
    most: int


@dataclass(frozen=True, eq=False)
class KindPlaces:
    """One kind of engines.

    Attributes:
        count: how many there are.
        value: ``[u]`` what an engine led by each unit collects.
        room: ``[u, k]`` the makespan less the leader's constants at each multiplier, or ``FREE``.
        constant: ``[u, inequalities]`` those, in ticks.
        rest: for each place ``[k, longer ones + 1, classes + 1]`` what requests from there on are worth.
        placed: of each request.
    """

    count: int
    value: Ints
    room: Ints
    constant: Ints
    rest: list[Ints]
    placed: list[Placed]


@dataclass(frozen=True, eq=False)
class _States:
    """``[states]`` and on: of each engine how many it holds, its room and ticks; the engine of each unit.

    And the number of the set of classes that each engine holds.
    """

    held: list[Ints]
    room: list[Ints]
    ticks: list[Ints]
    engine_of: Ints
    sets: Ints

    def of(self, chosen: Ints) -> "_States":
        return _States(
            [one[chosen] for one in self.held], [one[chosen] for one in self.room],
            [one[chosen] for one in self.ticks], self.engine_of[chosen], self.sets[chosen],
        )  # fmt: skip


def _joined(parts: list[_States]) -> _States:
    engines = range(len(parts[0].held))
    return _States(
        [np.concatenate([one.held[e] for one in parts]) for e in engines],
        [np.concatenate([one.room[e] for one in parts]) for e in engines],
        [np.concatenate([one.ticks[e] for one in parts]) for e in engines],
        np.concatenate([one.engine_of for one in parts]),
        np.concatenate([one.sets for one in parts]),
    )


def none_is_left(
    kinds: list[KindPlaces], unit: list[int], price: list[int], prefix: Ints, places: int, equal: list[int]
) -> bool:
    """Whether after placing so many requests no way is left that may pay.

    Args:
        kinds: what is known of each.
        unit, price: of each request, longest first.
        prefix: ``[u + 1]`` sums of the units' prices.
        places: how many are placed.
        equal: a number for each request, the same for those that cost every kind the same.

    Raises:
        InputError: if there are more than ``MOST_STATES``.
    """
    kind_of = [k for k, one in enumerate(kinds) for _ in range(one.count)]
    nothing = np.zeros(1, dtype=np.int64)
    states = _States(
        [nothing] * len(kind_of),
        [np.zeros((1, kinds[k].room.shape[1]), dtype=np.int64) for k in kind_of],
        [np.zeros((1, kinds[k].constant.shape[1]), dtype=np.int64) for k in kind_of],
        np.full((1, len(prefix) - 1), -1, dtype=np.int16),
        np.zeros((1, len(kind_of)), dtype=np.int64),
    )
    single = len(unit) == len(prefix) - 1
    of_kind = [slice(kind_of.index(k), kind_of.index(k) + one.count) for k, one in enumerate(kinds)]
    known: dict[tuple[int, int], int] = {}
    started, paid, looked_at = 0, 0, 0
    for i in range(places):
        begins = unit[i] >= started
        started, paid = max(started, unit[i] + 1), paid + price[i]
        after = [_with(states, kinds, kind_of, e, i, unit[i], begins) for e in range(len(kind_of))]
        if single:
            for e, one in enumerate(after):
                one.sets[:, e] = with_one(one.sets[:, e], equal[i], known)
        states = _joined(after)
        collected = np.full(len(states.engine_of), paid, dtype=np.int64)
        for e, k in enumerate(kind_of):
            collected += _collected(kinds[k].rest[i + 1], states.held[e], states.room[e])
            collected = np.minimum(collected, prefix[-1])  # that is enough, and more might wrap around
        collected = _with_new_engines(collected, kinds, kind_of, states, prefix, started)
        states = states.of(np.flatnonzero(collected >= prefix[-1]))
        if single:
            sets = np.concatenate([np.sort(states.sets[:, one], axis=1) for one in of_kind], axis=1)
            states = states.of(np.unique(sets, axis=0, return_index=True)[1])
        looked_at += len(states.engine_of)
        require(looked_at <= MOST_STATES, f"not verified: more than {MOST_STATES} states")
        if len(states.engine_of) == 0:
            return True
    return False


def with_one(sets: Ints, one: int, known: dict[tuple[int, int], int]) -> Ints:
    """``[states]`` numbers of the sets that an engine holds with one more; ``known`` are those so far."""
    before, which = np.unique(sets, return_inverse=True)
    after = [known.setdefault((set_, one), len(known) + 1) for set_ in before.tolist()]
    return np.array(after, dtype=np.int64)[which]


def _with(
    states: _States, kinds: list[KindPlaces], kind_of: list[int], e: int, i: int, unit: int, begins: bool
) -> _States:
    """Those states in which request i can go to engine e, after it did."""
    kind, one = kinds[kind_of[e]], kinds[kind_of[e]].placed[i]
    held = states.held[e]
    can = held <= one.most if begins else (held <= one.most) & (states.engine_of[:, unit] == e)
    if e > 0 and kind_of[e - 1] == kind_of[e]:
        can &= (held > 0) | (states.held[e - 1] > 0)  # of empty ones the first
    chosen = np.flatnonzero(can)
    rank, opens = np.minimum(held[chosen], len(one.paid) - 1), (held[chosen] == 0)[:, None]
    ticks = np.where(opens, kind.constant[unit], states.ticks[e][chosen]) + one.ticks[rank]
    in_time = (ticks <= TICKS).all(axis=1)
    chosen, rank, opens, ticks = chosen[in_time], rank[in_time], opens[in_time], ticks[in_time]
    after = states.of(chosen)
    room = np.where(opens, kind.room[unit], after.room[e])
    after.room[e] = np.where(room == FREE, FREE, np.maximum(room - one.paid[rank], NEVER))
    after.held[e], after.ticks[e] = after.held[e] + 1, ticks
    after.engine_of[:, unit] = e
    return after


def _collected(rest: Ints, held: Ints, room: Ints) -> Ints:
    """``[states]`` most that an engine, if it is open, collects of the requests that are left."""
    total = np.zeros(len(held), dtype=np.int64)
    for r in np.unique(held[held > 0]):
        states, row = np.flatnonzero(held == r), rest[:, min(r, rest.shape[1] - 1)]
        for chunk in np.array_split(states, len(states) // CHUNK + 1):
            total[chunk] = np.maximum((row + room[chunk][:, :, None]).min(axis=1).max(axis=1), 0)
    return total


def _with_new_engines(
    collected: Ints, kinds: list[KindPlaces], kind_of: list[int], states: _States, prefix: Ints, started: int
) -> Ints:
    """``[states]`` the same with the empty engines, each led by a unit that those before it leave."""
    richest = [np.concatenate([[0], np.maximum.accumulate(kind.value[started:])]) for kind in kinds]
    left = np.stack(
        [
            sum((states.held[e] == 0).astype(np.int64) for e, k in enumerate(kind_of) if k == kind)
            for kind in range(len(kinds))
        ],
        axis=1,
    )
    for counts in np.unique(left, axis=0):
        mine = np.flatnonzero((left == counts).all(axis=1))
        most = {(0,) * len(kinds): collected[mine]}
        for opened in product(*(range(count + 1) for count in counts)):
            leave = np.searchsorted(prefix[started:-1], most[opened], side="right")
            for k, count in enumerate(counts):
                if opened[k] < count:
                    then = (*opened[:k], opened[k] + 1, *opened[k + 1 :])
                    sums = np.minimum(most[opened] + richest[k][leave], prefix[-1])
                    most[then] = np.maximum(most[then], sums) if then in most else sums
        collected[mine] = most[tuple(counts.tolist())]
    return collected
