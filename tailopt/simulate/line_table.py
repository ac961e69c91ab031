"""The step times of a fleet as the compiled code reads them."""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.plan import Fleet


@dataclass(frozen=True, eq=False)
class LineTable:
    """Lines of each shape: tau = max over p < pieces of ``base_s[shape, n, p] + slope_s[shape, p] K``.

    Attributes:
        base_s: ``[shapes, n_max + 1, pieces]``.
        slope_s: ``[shapes, pieces]``.
        pieces: ``[shapes]`` how many pieces are in use.
        shape: ``[m]`` the shape of each engine.
        degrees: ``[shapes]`` tensor-parallel degree of each shape.
    """

    base_s: Floats
    slope_s: Floats
    pieces: Ints
    shape: Ints
    degrees: tuple[int, ...]


def line_table(fleet: Fleet, n_max: int) -> LineTable:
    """The lines of the fleet's shapes for up to ``n_max`` running requests."""
    degrees = sorted({engine.tp for engine in fleet.engines})
    lines = [fleet.profile.shape(tp).step_time.lines(n_max) for tp in degrees]
    pieces = np.array([len(line.slope_s) for line in lines], dtype=np.int64)
    base_s = np.zeros((len(lines), n_max + 1, int(pieces.max())))
    slope_s = np.zeros((len(lines), int(pieces.max())))
    for i, line in enumerate(lines):
        base_s[i, :, : pieces[i]], slope_s[i, : pieces[i]] = line.base_s.T, line.slope_s
    shape = np.array([degrees.index(engine.tp) for engine in fleet.engines], dtype=np.int64)
    return LineTable(base_s, slope_s, pieces, shape, tuple(degrees))
