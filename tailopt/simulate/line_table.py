"""The step times of a fleet as the compiled code reads them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.engine.profile import EngineProfile
from tailopt.engine.speculation import Decoding, Speculation, decoding
from tailopt.plan import Engine, Fleet


@dataclass(frozen=True, eq=False)
class LineTable:
    """Lines of each kind of engine: tau = max over p < pieces of ``base_s[kind, n, p] + slope_s[kind, p] K``.

    Attributes:
        base_s: ``[kinds, n_max + 1, pieces]``.
        slope_s: ``[kinds, pieces]``.
        pieces: ``[kinds]`` how many pieces are in use.
        shape: ``[m]`` the kind of each engine.
        tokens: ``[kinds, n_max + 1]`` what each request gains in a step, in units of 1 / TOKEN.
        lookahead: ``[kinds]`` tokens drafted a step.
    """

    base_s: Floats
    slope_s: Floats
    pieces: Ints
    shape: Ints
    tokens: Ints
    lookahead: Ints


def decoding_of(profile: EngineProfile, tp: int, speculation: Speculation | None, n_max: int) -> Decoding:
    """The decode steps of an engine for up to ``n_max`` requests, or fewer if it can run no more.

    How far it drafts depends on its profile, not on ``n_max``.
    """
    shape = profile.shape(tp)
    return decoding(shape, speculation, shape.max_running if speculation else min(n_max, shape.max_running))


def line_table(fleet: Fleet, n_max: int) -> LineTable:
    """The lines of the fleet's engines for up to ``n_max`` running requests."""
    return lines_of(fleet.profile, fleet.engines, n_max)


def lines_of(profile: EngineProfile, engines: Iterable[Engine], n_max: int) -> LineTable:
    """The lines of any engines of one profile for up to ``n_max`` running requests."""
    wanted = [(engine.tp, engine.speculation) for engine in engines]
    kinds = list(dict.fromkeys(wanted))
    steps = [decoding_of(profile, tp, speculation, n_max) for tp, speculation in kinds]
    pieces = np.array([len(one.lines.slope_s) for one in steps], dtype=np.int64)
    base_s = np.zeros((len(kinds), n_max + 1, int(pieces.max())))
    slope_s = np.zeros((len(kinds), int(pieces.max())))
    tokens = np.zeros((len(kinds), n_max + 1), dtype=np.int64)
    for i, one in enumerate(steps):
        width = min(n_max + 1, one.lines.n_max + 1)
        base_s[i, :width, : pieces[i]] = one.lines.base_s[:, :width].T
        slope_s[i, : pieces[i]] = one.lines.slope_s
        tokens[i, :width] = one.tokens[:width]
    shape = np.array([kinds.index(kind) for kind in wanted], dtype=np.int64)
    return LineTable(base_s, slope_s, pieces, shape, tokens, np.array([one.lookahead for one in steps]))
