r"""Step time: how long an engine takes to decode one token for each of its running requests.

.. math:: \tau(n, K) \quad\text{seconds},

with ``n`` running requests that hold ``K`` context (KV) tokens in sum, the token being written included.
Four kinds cover what is measured on real engines:

=================  ==================================================  ======================================
:class:`Affine`    a + b n + c K                                       dense models on H100 and H200
:class:`Power`     a + b n^p + c K, 0 < p <= 1 (concave in n)          mixture-of-experts models
:class:`MaxAffine` max over pieces of a + b n + c K (convex in n)      A100: a floor, then a kink
:class:`Table`     interpolated f(n) + c K, linear or padded           a measured curve, CUDA-graph padding
=================  ==================================================  ======================================

All four are, for each n, a **maximum of lines in K**: that is the one form (:class:`Lines`) that the
simulator and the bounds read, so a new kind needs no change there. Time never falls when a request is added
or context grows; this is checked on construction, because the bounds rest on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from tailopt.arrays import Floats, Ints, assign, floats, ints
from tailopt.errors import InputError

LEAST_S = 1e-12
"""Seconds of a decode step of one request, at least: what is far below any clock would only underflow."""


@dataclass(frozen=True, eq=False)
class Lines:
    """``tau(n, K) = max over p of base_s[p, n] + slope_s[p] * K`` for n = 0..n_max, with tau(0, K) = 0.

    Attributes:
        base_s: ``[pieces, n_max + 1]`` seconds at K = 0; column 0 is zero.
        slope_s: ``[pieces]`` seconds per context token.
    """

    base_s: Floats
    slope_s: Floats

    @property
    def n_max(self) -> int:
        """Largest number of running requests covered."""
        return int(self.base_s.shape[1]) - 1

    @property
    def separable(self) -> bool:
        """True if n and K do not interact (one piece): tau = f(n) + c K."""
        return len(self.slope_s) == 1


class StepTime(Protocol):
    """Seconds of one decode step; vectorized over its arguments."""

    def __call__(self, running: ArrayLike, kv_tokens: ArrayLike) -> Floats:
        """Seconds per step with ``running`` requests holding ``kv_tokens`` in sum; 0 where nothing runs."""
        ...

    def lines(self, n_max: int) -> Lines:
        """The step time for 0..n_max running requests as maxima of lines in the context."""
        ...

    def __str__(self) -> str:
        """The formula with its numbers, in milliseconds."""
        ...


@dataclass(frozen=True)
class Affine:
    """``tau = a + b n + c K``: a dense model.

    Attributes:
        a_s: seconds per step whatever runs (weights are read once).
        b_s: seconds per running request.
        c_s: seconds per context token.

    >>> float(Affine(6e-3, 1e-4, 5e-8)(10, 20_000))
    0.008
    """

    a_s: float
    b_s: float
    c_s: float = 0.0

    def __post_init__(self) -> None:
        _check("affine step time", [(self.a_s, self.b_s, self.c_s)], at_one=self.a_s + self.b_s)

    def __call__(self, running: ArrayLike, kv_tokens: ArrayLike) -> Floats:
        """Seconds per step."""
        n, kv = _arguments(running, kv_tokens)
        return _zero_if_idle(n, self.a_s + self.b_s * n + self.c_s * kv)

    def lines(self, n_max: int) -> Lines:
        """One line per n."""
        return _lines([self.a_s + self.b_s * np.arange(n_max + 1)], [self.c_s])

    def __str__(self) -> str:
        return f"{_affine_text(self.a_s, self.b_s, self.c_s)} ms"


@dataclass(frozen=True)
class Power:
    """``tau = a + b n^p + c K`` with 0 < p <= 1: concave in n, as mixture-of-experts models are.

    A few more requests wake a few more experts; once most experts are read anyway, the next request is cheap.

    >>> float(Power(2e-3, 1e-3, 0.5)(16, 0))
    0.006
    """

    a_s: float
    b_s: float
    p: float
    c_s: float = 0.0

    def __post_init__(self) -> None:
        _check("power step time", [(self.a_s, self.b_s, self.c_s)], at_one=self.a_s + self.b_s)
        if not 0 < self.p <= 1:
            raise InputError(f"power step time: expected 0 < p <= 1, got {self.p}")

    def __call__(self, running: ArrayLike, kv_tokens: ArrayLike) -> Floats:
        """Seconds per step."""
        n, kv = _arguments(running, kv_tokens)
        return _zero_if_idle(n, self.a_s + self.b_s * n**self.p + self.c_s * kv)

    def lines(self, n_max: int) -> Lines:
        """One line per n."""
        return _lines([self.a_s + self.b_s * np.arange(n_max + 1.0) ** self.p], [self.c_s])

    def __str__(self) -> str:
        return f"{_ms(self.a_s)} + {_ms(self.b_s)}·n^{self.p:.3g} + {_ms(self.c_s * 1000)}·K/1000 ms"


@dataclass(frozen=True)
class MaxAffine:
    """The largest of several affine pieces ``(a_s, b_s, c_s)``: convex, a floor and then a kink, as on A100.

    >>> float(MaxAffine(((12e-3, 0.0, 0.0), (5e-3, 1e-4, 0.0)))(100, 0))
    0.015
    """

    pieces: tuple[tuple[float, float, float], ...]

    def __post_init__(self) -> None:
        if not self.pieces:
            raise InputError("max-of-affine step time: expected at least one piece")
        assign(self, pieces=tuple((float(a), float(b), float(c)) for a, b, c in self.pieces))
        _check("max-of-affine step time", self.pieces, at_one=max(a + b for a, b, _ in self.pieces))

    def __call__(self, running: ArrayLike, kv_tokens: ArrayLike) -> Floats:
        """Seconds per step."""
        n, kv = _arguments(running, kv_tokens)
        return _zero_if_idle(n, np.max(np.stack([a + b * n + c * kv for a, b, c in self.pieces]), axis=0))

    def lines(self, n_max: int) -> Lines:
        """One line per piece and n."""
        n = np.arange(n_max + 1)
        return _lines([a + b * n for a, b, _ in self.pieces], [c for *_, c in self.pieces])

    def __str__(self) -> str:
        return "max(" + ", ".join(_affine_text(*piece) for piece in self.pieces) + ") ms"


@dataclass(frozen=True, eq=False)
class Table:
    """A measured curve f(n), interpolated, plus ``c K``.

    Attributes:
        running: ``[k]`` increasing numbers of running requests, the first is 1.
        seconds: ``[k]`` step time there, never falling.
        c_s: seconds per context token.
        padded: True: between two entries the step costs what the next entry costs, as CUDA graphs pad the
            batch; False: linear interpolation. Beyond the last entry the last slope goes on.

    >>> table = Table([1, 8, 16], [6e-3, 7e-3, 9e-3], padded=True)
    >>> table([1, 2, 9], 0)
    array([0.006, 0.007, 0.009])
    """

    running: Ints
    seconds: Floats
    c_s: float = 0.0
    padded: bool = False

    def __post_init__(self) -> None:
        assign(self, running=ints("table step time: running", self.running, minimum=1))
        object.__setattr__(
            self, "seconds", floats("table step time: seconds", self.seconds, len(self.running))
        )
        if len(self.running) < 2 or self.running[0] != 1 or (np.diff(self.running) <= 0).any():
            raise InputError("table step time: expected two or more increasing numbers of requests from 1 on")
        if self.seconds[0] <= 0 or (np.diff(self.seconds) < 0).any():
            raise InputError("table step time: expected positive seconds that never fall")
        _check("table step time", [(0.0, 0.0, self.c_s)], at_one=float(self.seconds[0]))

    def __call__(self, running: ArrayLike, kv_tokens: ArrayLike) -> Floats:
        """Seconds per step."""
        n, kv = _arguments(running, kv_tokens)
        return _zero_if_idle(n, self._base(n) + self.c_s * kv)

    def lines(self, n_max: int) -> Lines:
        """One line per n."""
        return _lines([self._base(np.arange(n_max + 1))], [self.c_s])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return (tuple(self.running.tolist()), tuple(self.seconds.tolist()), self.c_s, self.padded)

    def _base(self, n: Ints) -> Floats:
        grid, seconds = self.running, self.seconds
        last_slope = (seconds[-1] - seconds[-2]) / (grid[-1] - grid[-2])
        beyond = seconds[-1] + last_slope * (n - grid[-1])
        if self.padded:
            inside = seconds[np.minimum(np.searchsorted(grid, n), len(grid) - 1)]
        else:
            inside = np.interp(n, grid, seconds)
        return np.where(n > grid[-1], beyond, inside)

    def __str__(self) -> str:
        ends = (
            f"{_ms(float(self.seconds[0]))} ms at n=1 to {_ms(float(self.seconds[-1]))} at {self.running[-1]}"
        )
        return f"table {ends}{', padded' if self.padded else ''} + {_ms(self.c_s * 1000)}·K/1000 ms"


def _arguments(running: ArrayLike, kv_tokens: ArrayLike) -> tuple[Ints, Floats]:
    n, kv = np.broadcast_arrays(np.asarray(running, dtype=np.int64), np.asarray(kv_tokens, dtype=np.float64))
    if (n < 0).any() or (kv < 0).any():
        raise InputError("step time: expected no negative number of requests or context tokens")
    return n, kv


def _zero_if_idle(n: Ints, seconds: Floats) -> Floats:
    return np.where(n > 0, seconds, 0.0)


def _lines(bases: Sequence[ArrayLike], slopes: Sequence[float]) -> Lines:
    base_s = np.stack([np.asarray(base, dtype=np.float64) for base in bases])
    base_s[:, 0] = 0.0
    slope_s = np.array(slopes, dtype=np.float64)
    base_s.flags.writeable = slope_s.flags.writeable = False
    return Lines(base_s, slope_s)


def _check(what: str, pieces: Sequence[tuple[float, float, float]], *, at_one: float) -> None:
    for a, b, c in pieces:
        if not np.isfinite((a, b, c)).all() or b < 0 or c < 0:
            raise InputError(f"{what}: expected finite numbers, b >= 0 and c >= 0, got a={a}, b={b}, c={c}")
    if at_one < LEAST_S:
        raise InputError(
            f"{what}: expected a positive time for one request, at least {LEAST_S:g} s, got {at_one}"
        )


def _affine_text(a_s: float, b_s: float, c_s: float) -> str:
    return f"{_ms(a_s)} + {_ms(b_s)}·n + {_ms(c_s * 1000)}·K/1000"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"
