"""The KV blocks of one engine: who holds them, which can be found again, which is taken next.

What vLLM's block pool does, by *runs* of blocks instead of block by block.

**Contents.** A full block is known by its contents: the tokens in it and all tokens before it. Of a
request, the leading blocks that lie wholly inside the tokens it shares with its group are contents of the
group, the others are its own. So contents are places ``(chain, index)`` on two kinds of **chains**, the
group's and the request's own, and a request's path runs along the first and then along the second
(:class:`Path`).

**Findable blocks.** With prefix caching, a block becomes findable in the step in which its last token is
scheduled; the block that a request is still filling is not (without prefix caching, none is). It stays
findable until it is taken for something else, whether or not a request still holds it. Two copies of the
same contents may exist: nobody looks while filling, and a lookup never covers a request's last token. A
lookup walks the path from its start and takes, place by place, the copy that became findable first, up to
the first place without a copy.

**The free queue.** Blocks held by nobody stand in one queue and are taken from its head. A released
request's unfindable block goes to the head, its findable ones to the tail, last block first. So the queue
is always some *blank* blocks, of which only the number matters, and then the findable ones, least recently
released first. Of a request's blocks later ones are taken before earlier ones: what survives of it is a
prefix.

**Runs.** A :class:`Run` is a stretch ``[low, high)`` of a chain of which one copy is held by the same
holders, or stands in one piece in the queue, there in descending order. Taking blocks shortens the run at
the head at its high end, a release moves whole runs, a hit splits at most one run a piece. A release, a hit
or an allocation therefore costs the number of runs it touches, not the number of blocks.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Place = tuple[Hashable, int]
"""Contents of a full block: the chain and the index of the block in its request."""


class Path(NamedTuple):
    """The contents of a request's blocks: ``shared_blocks`` of chain ``shared``, then chain ``own``."""

    shared: Hashable
    shared_blocks: int
    own: Hashable

    def spans(self, low: int, high: int) -> Iterator[tuple[Hashable, int, int]]:
        """The stretches of chains that blocks ``low`` to ``high`` lie on.

        >>> list(Path("prompt", 4, "answer").spans(2, 6))
        [('prompt', 2, 4), ('answer', 4, 6)]
        """
        border = min(max(self.shared_blocks, low), high)
        if low < border:
            yield self.shared, low, border
        if border < high:
            yield self.own, border, high


@dataclass(eq=False)
class Run:
    """One copy of blocks ``[low, high)`` of a chain; in the free queue if ``holders`` is empty.

    Where runs of a chain overlap, the order of ``born`` is the order in which those copies became findable.
    """

    chain: Hashable
    low: int
    high: int
    born: int
    holders: set[int]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.high - self.low


@dataclass(frozen=True)
class Hit:
    """What a lookup found: the pieces of runs, ``(run, low, high)``, in the order of the path."""

    pieces: tuple[tuple[Run, int, int], ...] = ()

    @property
    def blocks(self) -> int:
        """Number of blocks found."""
        return sum(high - low for _, low, high in self.pieces)

    @property
    def free_blocks(self) -> int:
        """How many of them stand in the free queue now."""
        return sum(high - low for run, low, high in self.pieces if not run.holders)


@dataclass
class _Holding:
    path: Path
    blocks: int = 0
    runs: list[Run] = field(default_factory=list)  # the findable ones, in the order of the path

    @property
    def findable(self) -> int:
        return sum(run.blocks for run in self.runs)


class BlockCache:
    """The blocks of one engine; see the module's text for the rules.

    Args:
        blocks: blocks that requests may hold in all.
        prefix_caching: whether full blocks become findable.

    Two requests of one group; the second finds the three full blocks of the prompt:

    >>> cache = BlockCache(10)
    >>> first, second = Path("prompt", 3, "a"), Path("prompt", 3, "b")
    >>> cache.admit(1, first, cache.lookup(first, 3))
    >>> cache.grow(1, 4); cache.make_findable(1, 3)
    >>> cache.free
    6
    >>> cache.lookup(second, 3).blocks
    3
    >>> cache.release(1)
    >>> cache.free, list(cache.queue())[-3:]
    (10, [('prompt', 2), ('prompt', 1), ('prompt', 0)])
    """

    def __init__(self, blocks: int, prefix_caching: bool = True) -> None:
        self.blocks = blocks
        self.prefix_caching = prefix_caching
        self._blank = blocks  # free blocks without findable contents, at the head of the queue
        self._queue: list[Run] = []  # the findable rest of the queue
        self._free = blocks
        self._copies: dict[Hashable, list[Run]] = {}
        self._holdings: dict[int, _Holding] = {}
        self._births = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self._free

    def held(self, holder: int) -> int:
        """Blocks that a request holds."""
        return self._holdings[holder].blocks

    def queue(self) -> Iterator[Place | None]:
        """The free queue block by block, the next to be taken first; None for a blank block."""
        yield from [None] * self._blank
        for run in self._queue:
            yield from ((run.chain, index) for index in reversed(range(run.low, run.high)))

    def lookup(self, path: Path, limit: int) -> Hit:
        """The leading blocks of a path that can be found, at most ``limit``. Changes nothing."""
        pieces: list[tuple[Run, int, int]] = []
        for chain, low, high in path.spans(0, limit):
            copies = self._copies.get(chain, [])
            while low < high:
                run = min((r for r in copies if r.low <= low < r.high), key=lambda r: r.born, default=None)
                if run is None:
                    return Hit(tuple(pieces))
                older = (r.low for r in copies if r.born < run.born and r.low > low)
                end = min(high, run.high, *older)
                pieces.append((run, low, end))
                low = end
        return Hit(tuple(pieces))

    def admit(self, holder: int, path: Path, hit: Hit) -> None:
        """Let a request hold what was found for its path, and grow from there."""
        holding = self._holdings[holder] = _Holding(path, hit.blocks)
        for run, low, high in reversed(
            hit.pieces
        ):  # a run may appear twice; splits leave its low end in place
            if high < run.high:
                self._split(run, high)
            if low > run.low:
                run = self._split(run, low)
            if not run.holders:
                self._queue.remove(run)
                self._free -= run.blocks
            run.holders.add(holder)
            holding.runs.insert(0, run)

    def grow(self, holder: int, blocks: int) -> None:
        """Let a request hold ``blocks`` blocks, taking what it lacks from the head of the free queue.

        The caller has made sure that so many are free.
        """
        holding = self._holdings[holder]
        lacking = max(0, blocks - holding.blocks)
        assert lacking <= self._free
        holding.blocks += lacking
        self._free -= lacking
        blank = min(lacking, self._blank)
        self._blank -= blank
        lacking -= blank
        while lacking:
            run = self._queue[0]
            taken = min(lacking, run.blocks)
            run.high -= taken
            lacking -= taken
            if not run.blocks:
                self._queue.pop(0)
                self._forget(run)

    def make_findable(self, holder: int, blocks: int) -> None:
        """The request's first ``blocks`` blocks are full: from now on they can be found."""
        holding = self._holdings[holder]
        if not self.prefix_caching or blocks <= holding.findable:
            return
        for chain, low, high in holding.path.spans(holding.findable, blocks):
            copies = self._copies.setdefault(chain, [])
            last = holding.runs[-1] if holding.runs else None
            alone = not any(run.low < high and low < run.high for run in copies)
            if alone and last and last.chain == chain and last.high == low and last.holders == {holder}:
                last.high = high
            else:
                run = Run(chain, low, high, self._births, {holder})
                self._births += 1
                copies.append(run)
                holding.runs.append(run)

    def release(self, holder: int) -> None:
        """The request finished, was aborted or preempted: it holds nothing any more."""
        holding = self._holdings.pop(holder)
        blank = holding.blocks - holding.findable
        self._blank += blank
        self._free += blank
        for run in reversed(holding.runs):
            run.holders.remove(holder)
            if not run.holders:
                self._queue.append(run)
                self._free += run.blocks

    def _split(self, run: Run, at: int) -> Run:
        """Cut a run in two; it keeps the low part, the high part is returned."""
        high = Run(run.chain, at, run.high, run.born, set(run.holders))
        run.high = at
        self._copies[run.chain].append(high)
        if not run.holders:
            self._queue.insert(self._queue.index(run), high)
        for holder in run.holders:
            runs = self._holdings[holder].runs
            runs.insert(runs.index(run) + 1, high)
        return high

    def _forget(self, run: Run) -> None:
        copies = self._copies[run.chain]
        copies.remove(run)
        if not copies:
            del self._copies[run.chain]
