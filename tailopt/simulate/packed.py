"""Log and stays as the kernel writes them, in half of the size; a column is made when it is read.

A million requests on engines whose cache is full make eight million events and as many stays, and most who
simulate them read neither.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tailopt.arrays import Ints
from tailopt.simulate.records import Records


@dataclass(frozen=True, eq=False)
class PackedLog:
    """The log on its pages; its columns are engine by engine.

    Attributes:
        entries: ``[pages, size]`` of LOG; the first of a page has the number of the page's engine as step.
        width: see LOG.
        end: ``[engines]`` behind the last entry of each engine, counted through all pages.
        block_tokens: ``[engines]`` tokens of a block.
    """

    entries: Records
    width: int
    end: Ints
    block_tokens: Ints

    def column(self, name: str) -> Any:
        """A column of the :class:`tailopt.run.EngineLog`."""
        if name == "engine":
            return np.repeat(self.owner[self._order], self._written)
        if name == "running":
            return self.column("use") % self.width
        if name == "kv_tokens":
            return self.column("use") // self.width * self.block_tokens[self.column("engine")]
        pages = self.entries[name][self._order, 1:]
        return pages[np.arange(pages.shape[1]) < self._written[:, None]]

    @property
    def owner(self) -> Ints:
        """``[pages]`` the engine of each page."""
        return self.entries["step"][:, 0]

    @cached_property
    def _order(self) -> Ints:
        """The pages, engine by engine."""
        order: Ints = np.argsort(self.owner, kind="stable")
        return order

    @cached_property
    def _written(self) -> Ints:
        """``[pages]`` entries written on each page, in that order."""
        size = self.entries.shape[1]
        written: Ints = np.minimum(self.end[self.owner[self._order]] - self._order * size, size) - 1
        return written


@dataclass(frozen=True, eq=False)
class PackedStays:
    """The stays, with the log that says where and when each began.

    Attributes:
        stays: of STAY.
        log: the log.
    """

    stays: Records
    log: PackedLog

    def column(self, name: str) -> Any:
        """A column of the :class:`tailopt.run.Stays`."""
        if name == "engine":
            return self.log.owner[self.stays["event"] // self.log.entries.shape[1]]
        if name == "start_s":
            return self.log.entries["time_s"].reshape(-1)[self.stays["event"]]
        return self.stays[name].astype(np.float64 if name == "end_s" else np.int64)
