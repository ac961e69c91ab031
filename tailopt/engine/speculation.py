r"""Speculative decoding, host time, and what both make of the steps of an engine.

In each step an engine drafts k tokens for each of its n requests, at little cost, and verifies them with one
pass of the model over n (k + 1) tokens. If a drafted token is accepted with probability :math:`\alpha`
whenever those before it are, a request gains in the mean

.. math:: \sum_{j=0}^{k} \alpha^j = \frac{1 - \alpha^{k+1}}{1 - \alpha} \quad (k + 1 \text{ at } \alpha = 1)

tokens a step: the accepted ones and one that the model adds itself (Leviathan, Kalman and Matias, ICML 2023,
arXiv 2211.17192). With the step time :math:`\tau(n, K)` of the profile, of which the GPU waits
:math:`h(n) = h_0 + h_1 n` for the host, a step of n requests that hold K tokens, one new one each, takes

.. math:: T_k(n, K) = [\tau(n (k + 1), K') - h(n (k + 1))] + h(n) + [k > 0] \, (d_0 + d_1 n)
          + k \, (f \, [\tau(n, K') - h(n)] + \tau_d(n, K')), \qquad K' = K + n k,

where d is the cost of drafting on the host, f the cost of one drafted token in shares of a step, and
:math:`\tau_d` the step time of a draft model (:class:`tailopt.engine.profile.Draft`). K' holds the drafts; it
is read once per request, however many of its tokens are verified. Where host and GPU overlap, h = 0.

If no k is given, each n gets the k with the least :math:`T_k(n, n c) / \text{tokens}_k`, c tokens of context
a request, so that few requests may speculate far and many not at all; k = 0 is allowed.

All of this is the same for every request and step. Measured acceptance varies with text, position and
sampling (arXiv 2601.11580), and a draft model's own prefill and KV cache are not counted.
"""

from dataclasses import dataclass, replace
from functools import reduce
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike

from tailopt.arrays import Floats, Ints, assign, floats
from tailopt.engine.profile import MOST_DRAFT_TOKENS, Draft, ShapeProfile
from tailopt.engine.step_time import Affine, Lines, MaxAffine, StepTime
from tailopt.errors import InputError

TOKEN = 1 << 20
"""Units that one token counts in :attr:`Decoding.tokens`."""


@dataclass(frozen=True)
class Speculation:
    """The speculative decoding of one engine.

    Attributes:
        method: a draft method of the engine's profile, such as ``"ngram"``, ``"mtp"`` or ``"draft"``.
        draft_tokens: tokens drafted a step, k; None: the best k for each concurrency, up to the method's
            ``most_tokens`` and as far as the engine's token budget goes.
        acceptance: chance that a drafted token is accepted if those before it are; None for the profile's.
        context_tokens: context of a request at which the best k is chosen; of no effect if k is given.
    """

    method: str
    draft_tokens: int | None = None
    acceptance: float | None = None
    context_tokens: int = 4096

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise InputError(f"speculation: method: expected a name, got {self.method!r:.60}")
        whole = [
            ("draft_tokens", self.draft_tokens, MOST_DRAFT_TOKENS),
            ("context_tokens", self.context_tokens, 2**31 - 1),
        ]
        for what, value, most in whole:
            if value is None and what == "draft_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= value <= most:
                raise InputError(f"speculation: {what}: expected 0 to {most}, got {value!r:.60}")
            assign(self, **{what: int(value)})
        if self.acceptance is not None:
            what = "speculation: acceptance"
            rate = floats(what, [self.acceptance], 1, minimum=0, maximum=1)
            assign(self, acceptance=float(rate[0]))

    def check(self, shape: ShapeProfile) -> None:
        """Raise InputError unless the shape's profile knows the method."""
        shape.draft(self.method)


@dataclass(frozen=True, eq=False)
class Decoding:
    """The decode steps of an engine that may speculate.

    Attributes:
        lines: seconds of a step with n requests that decode, as maxima of lines in the tokens K that they
            hold with one new one each; column 0 is what a step that only computes prompts takes beside them.
        tokens: ``[n_max + 1]`` expected tokens that each request gains in a step, in units of 1 / ``TOKEN``,
            rounded down.
        lookahead: most tokens drafted a step for any n.
    """

    lines: Lines
    tokens: Ints
    lookahead: int

    def seconds(self, running: int, kv_tokens: int) -> float:
        """Seconds of one step, without the prompts that are computed in it."""
        return float(np.max(self.lines.base_s[:, running] + self.lines.slope_s * kv_tokens * (running > 0)))


def decoding(shape: ShapeProfile, speculation: Speculation | None, n_max: int) -> Decoding:
    """The decode steps of an engine of this shape for up to ``n_max`` requests.

    Raises:
        InputError: if the shape does not know the draft method.

    >>> from tailopt.engine.step_time import Affine
    >>> shape = ShapeProfile(1, Affine(10e-3, 1e-3), 1e4, 10**6, 8, drafts=[Draft("mtp", 0.5)])
    >>> steps = decoding(shape, Speculation("mtp", 1), 8)
    >>> steps.seconds(2, 100), int(steps.tokens[2]) / TOKEN  # as for 4 requests
    (0.014, 1.5)
    """
    if speculation is None:
        return Decoding(_steps(shape, None, 0, n_max), np.full(n_max + 1, TOKEN), 0)
    may = _Choices.of(shape, speculation, n_max)
    lines = _chosen(may.lines, may.best, shape.kv_capacity_tokens)
    return Decoding(lines, may.units[may.best], int(may.drafted[may.best].max()))


@dataclass(frozen=True)
class TokenTime:
    """Seconds per token of a request in an engine that speculates: a step time for what predicts times.

    The seconds of a step over the tokens that it gains in the mean; what is made of whole tokens is a little
    later. Context is at most what the engine's KV cache holds.

    Attributes:
        shape: the engine's shape.
        speculation: what it drafts.

    >>> from tailopt.engine.step_time import Affine
    >>> shape = ShapeProfile(1, Affine(10e-3, 1e-3), 1e4, 10**6, 8, drafts=[Draft("mtp", 0.5)])
    >>> round(float(TokenTime(shape, Speculation("mtp", 1))(2, 100)), 6)  # 14 ms for 1.5 tokens
    0.009333
    """

    shape: ShapeProfile
    speculation: Speculation

    def __call__(self, running: ArrayLike, kv_tokens: ArrayLike) -> Floats:
        """Seconds per token."""
        n, kv = np.broadcast_arrays(np.asarray(running, np.int64), np.asarray(kv_tokens, np.float64))
        lines = self.lines(int(n.max(initial=0)))
        return np.where(n > 0, np.max(lines.base_s[:, n] + np.multiply.outer(lines.slope_s, kv), axis=0), 0.0)

    def lines(self, n_max: int) -> Lines:
        """Seconds per token for 0..n_max requests as maxima of lines in the context."""
        may = _Choices.of(self.shape, self.speculation, n_max)
        per_token = [
            _times(lines, TOKEN / gained) for lines, gained in zip(may.lines, may.units, strict=True)
        ]
        return _with_host_alone(_chosen(per_token, may.best, self.shape.kv_capacity_tokens), 0.0)

    def __str__(self) -> str:
        return f"{self.shape.step_time} with {self.speculation.method}"


def token_time(shape: ShapeProfile, speculation: Speculation | None) -> StepTime:
    """Seconds per token and request of an engine of this shape: its step time, if it does not speculate."""
    return shape.step_time if speculation is None else TokenTime(shape, speculation)


def expected_tokens(acceptance: float, draft_tokens: int) -> float:
    """Tokens that a request gains in a step in the mean.

    >>> expected_tokens(0.5, 2), expected_tokens(1.0, 2), expected_tokens(0.9, 0)
    (1.75, 3.0, 1.0)
    """
    tokens = 1.0
    for _ in range(draft_tokens):
        tokens = 1.0 + acceptance * tokens  # never falls with either, in floating point too
    return tokens


def overlapped(shape: ShapeProfile) -> ShapeProfile:
    """The same shape with asynchronous scheduling: a step takes the larger of GPU and host time, not the sum.

    Raises:
        InputError: if its step time is no maximum of affine pieces.

    >>> from tailopt.engine.step_time import Affine
    >>> shape = ShapeProfile(1, Affine(10e-3, 1e-3), 1e4, 10**6, 8, host_s=4e-3)
    >>> float(shape.step_time(1, 0)), round(float(overlapped(shape).step_time(1, 0)), 6)
    (0.011, 0.007)
    """
    if shape.overlapped:
        return shape
    match shape.step_time:
        case Affine(a, b, c):
            pieces: tuple[tuple[float, float, float], ...] = ((a, b, c),)
        case MaxAffine(given):
            pieces = given
        case other:
            raise InputError(
                f"engine profile TP{shape.tp}: overlapped: expected an affine or max_affine step time, "
                f"got {other}"
            )
    fixed, each = shape.host_s, shape.host_per_request_s
    device = [(a - fixed, max(b - each, 0.0), c) for a, b, c in pieces]
    return replace(shape, step_time=MaxAffine((*device, (fixed, each, 0.0))), overlapped=True)


@dataclass(frozen=True, eq=False)
class _Choices:
    """What may be drafted.

    Attributes:
        drafted: ``[choices]`` tokens drafted a step, k.
        lines: of a step, choice by choice.
        units: ``[choices]`` tokens gained in a step, in units.
        best: ``[n_max + 1]`` the choice for each n.
    """

    drafted: Ints
    lines: list[Lines]
    units: Ints
    best: Ints

    @classmethod
    def of(cls, shape: ShapeProfile, speculation: Speculation, n_max: int) -> "_Choices":
        draft = shape.draft(speculation.method)
        acceptance = draft.acceptance if speculation.acceptance is None else speculation.acceptance
        if speculation.draft_tokens is None:
            most = min(draft.most_tokens, shape.token_budget // max(n_max, 1) - 1)
            drafted = np.arange(max(0, most) + 1)
        else:
            drafted = np.array([speculation.draft_tokens])
        lines = [_steps(shape, draft, k, n_max) for k in drafted.tolist()]
        units = np.array([_units(acceptance, k) for k in drafted.tolist()])
        context = np.arange(n_max + 1) * (speculation.context_tokens + 1)
        per_token = [_at(one, context) / gained for one, gained in zip(lines, units, strict=True)]
        best = np.argmin(per_token, axis=0)
        best[0] = best[1:].min(initial=len(drafted) - 1)  # nothing is drafted for nobody
        return cls(drafted, lines, units, best)


def _units(acceptance: float, draft_tokens: int) -> int:
    return int(np.floor(expected_tokens(acceptance, draft_tokens) * TOKEN))


def _steps(shape: ShapeProfile, draft: Draft | None, k: int, n_max: int) -> Lines:
    """T_k of the module's docstring."""
    running = np.arange(n_max + 1)
    waits = (0.0, 0.0) if shape.overlapped else (shape.host_s, shape.host_per_request_s)
    if k == 0 or draft is None:
        return _with_host_alone(shape.step_time.lines(n_max), waits[0])

    def device(at: Ints) -> Lines:
        every = np.arange(at[-1] + 1)
        lines = shape.step_time.lines(int(at[-1]))
        left = lines.base_s - (waits[0] + waits[1] * every)
        # a power curve may rise by less than the host's part, beyond the largest n that was checked
        left[:, 1:] = np.maximum.accumulate(left[:, 1:], axis=1)
        return Lines(left[:, at], lines.slope_s)

    parts = [device(running * (k + 1))]
    if draft.step_fraction:
        parts.append(_times(device(running), k * draft.step_fraction))
    if draft.step_time is not None:
        parts.append(_times(draft.step_time.lines(n_max), k))
    whole = reduce(_sum, parts)
    beside = waits[0] + waits[1] * running + draft.seconds + draft.seconds_per_request * running
    base_s = whole.base_s + whole.slope_s[:, None] * (running * k) + beside
    return _with_host_alone(Lines(base_s, whole.slope_s), waits[0])


def _with_host_alone(lines: Lines, host_s: float) -> Lines:
    base_s = lines.base_s.copy()
    base_s[:, 0] = host_s
    base_s.flags.writeable = False
    return Lines(base_s, lines.slope_s)


def _times(lines: Lines, factor: float) -> Lines:
    return Lines(factor * lines.base_s, factor * lines.slope_s)


def _sum(one: Lines, other: Lines) -> Lines:
    """The sum of two maxima is the maximum of all sums."""
    base_s = one.base_s[:, None, :] + other.base_s[None, :, :]
    slope_s = one.slope_s[:, None] + other.slope_s[None, :]
    return Lines(base_s.reshape(-1, base_s.shape[-1]), slope_s.reshape(-1))


def _at(lines: Lines, kv_tokens: Ints | Floats) -> Floats:
    """``[n_max + 1]`` seconds at the context given for each n."""
    return np.asarray(np.max(lines.base_s + lines.slope_s[:, None] * kv_tokens, axis=0))


def _chosen(choices: list[Lines], choice: Ints, most_kv: float) -> Lines:
    """The lines of ``choices[choice[n]]`` for each n.

    Slopes belong to all n alike. An n whose own lines lack a slope gets the highest line of that slope that
    is nowhere above its own ones for 0 <= K <= ``most_kv``, so that the maximum stays the same there.
    """
    used = [int(k) for k in np.unique(choice)]
    if len(used) == 1:
        return choices[used[0]]
    slope_s = np.unique(np.concatenate([choices[k].slope_s for k in used]))
    base_s = np.empty((len(slope_s), len(choice)))
    for k in used:
        lines, mine = choices[k], choice == k
        own = Lines(lines.base_s[:, mine], lines.slope_s)
        contexts = [np.zeros(mine.sum()), np.full(mine.sum(), most_kv), *_crossings(own, most_kv)]
        for piece, slope in enumerate(slope_s):
            same = own.slope_s == slope
            base_s[piece, mine] = (
                own.base_s[same].max(axis=0)
                if same.any()
                else np.min([_at(own, context) - slope * context for context in contexts], axis=0)
            )
    slope_s.flags.writeable = False
    return _with_host_alone(Lines(base_s, slope_s), float(choices[0].base_s[0, 0]))


def _crossings(lines: Lines, most_kv: float) -> list[Floats]:
    """Where two lines cross, for each n and pair of lines, within 0 .. ``most_kv``."""
    found = []
    for i, first in enumerate(lines.slope_s):
        for j in np.flatnonzero(lines.slope_s > first):
            at = (lines.base_s[i] - lines.base_s[j]) / (lines.slope_s[j] - first)
            found.append(np.clip(at, 0.0, most_kv))
    return found
