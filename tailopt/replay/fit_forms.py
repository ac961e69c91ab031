r"""Each kind of step time, fitted to measured steps.

A step in which n requests gained a token, holding K tokens in sum, and P other tokens were computed, lasts

.. math:: s \approx \tau(n, K) + u P \quad (n \ge 1), \qquad s \approx h + u P \quad (n = 0),

u being the reciprocal of the prefill rate and h what a step of prefill alone costs besides. Given what is not
linear in it (the exponent of a power, the partition of a maximum, the entries of a table), each kind is a sum
of columns with coefficients that must not be negative: b, c >= 0 and curves that never fall are then nothing
but :func:`scipy.optimize.nnls`. What is not linear is searched from outside.

**Robust.** Steps are disturbed upwards by whatever else the machine does, and the noise of a slow step is as
much larger as it is slow. So the residual is relative to the prediction, and its norm is soft L1,

.. math:: \sum_i w_i \left(\sqrt{1 + (r_i / \sigma)^2} - 1\right), \qquad r_i = s_i / \hat s_i - 1,

quadratic within the noise :math:`\sigma` (1.48 times the median of \|r\|, found on the way) and linear
beyond; it is minimised by iterated reweighting, as each iteration is a least-squares problem again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tailopt.arrays import Bools, Floats, Ints
from tailopt.engine.step_time import LEAST_S, Affine, MaxAffine, Power, StepTime, Table
from tailopt.errors import InputError

ITERATIONS = 20
"""Of the reweighting, at most; it ends when predictions change by less than 1e-5."""

COMPARED_AT = 0.02
"""The scale of relative residuals at which losses are compared."""

LEAST_NOISE = 1e-9
"""Of relative residuals: data without noise must not divide by zero."""


@dataclass(frozen=True, eq=False)
class Points:
    """Steps, or medians over like steps; all arrays ``[k]``.

    Attributes:
        running: n, requests that gained a token.
        kv_tokens: K, tokens that these hold with the new ones.
        other_tokens: P, other tokens computed.
        seconds: how long it took.
        weight: how much it counts.
    """

    running: Ints
    kv_tokens: Floats
    other_tokens: Floats
    seconds: Floats
    weight: Floats

    def __len__(self) -> int:
        return len(self.running)

    def where(self, chosen: Bools) -> "Points":
        """Some of the points."""
        return Points(
            self.running[chosen],
            self.kv_tokens[chosen],
            self.other_tokens[chosen],
            self.seconds[chosen],
            self.weight[chosen],
        )


@dataclass(frozen=True)
class Form:
    """One fitted kind.

    Attributes:
        step_time: tau.
        prefill_s: u, seconds per prefilled token; 0 if no point has any.
        idle_s: h, seconds of a step of prefill alone besides its tokens; 0 if there is none.
        noise: sigma, the scale of the relative residuals.
        loss: the soft L1 norm per weight, with one scale for all fits.
    """

    step_time: StepTime
    prefill_s: float
    idle_s: float
    noise: float
    loss: float

    def predict(self, points: Points) -> Floats:
        """Seconds of each step."""
        decode = self.step_time(points.running, points.kv_tokens)
        return np.where(points.running > 0, decode, self.idle_s) + self.prefill_s * points.other_tokens


def fit_affine(points: Points) -> Form:
    """``a + b n + c K``, all three not negative."""
    found = _fit(points, [np.ones(len(points)), points.running, points.kv_tokens])
    return _form(Affine(*found.x), found, points)


def fit_power(points: Points) -> Form:
    """``a + b n^p + c K``: the exponent from a grid, then by golden sections between its neighbours."""
    from scipy.optimize import minimize_scalar

    def at(p: float) -> _Fitted:
        return _fit(points, [np.ones(len(points)), points.running.astype(np.float64) ** p, points.kv_tokens])

    grid = np.array([0.05, 0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0])
    losses = [at(p).loss for p in grid]
    best = int(np.argmin(losses))
    around = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    near = minimize_scalar(lambda p: at(p).loss, bounds=around, method="bounded", options={"xatol": 1e-3})
    p = float(near.x if near.fun < losses[best] else grid[best])
    found = at(p)
    a, b, c = found.x
    return _form(Power(a, b, p, c), found, points)


def fit_max_affine(points: Points) -> Form:
    """The larger of two affine pieces.

    Points are given to a piece, both pieces are fitted, points go to the piece that is larger there, and so
    on (Magnani and Boyd, Convex piecewise-linear fitting, Optimization and Engineering 10, 2009), from
    several cuts by n, by context and by time. A piece may start below zero.
    """
    n, kv, ones = points.running.astype(np.float64), points.kv_tokens, np.ones(len(points))
    affine = fit_affine(points)
    one = affine.step_time
    assert isinstance(one, Affine)
    best = replace(affine, step_time=MaxAffine(((one.a_s, one.b_s, one.c_s),)))
    decode_s = points.seconds - affine.prefill_s * points.other_tokens
    seen: set[bytes] = set()
    for by in (n, kv, decode_s):
        for cut in np.unique(np.quantile(by[n > 0], (0.3, 0.7))):
            upper = (by > cut) & (n > 0)
            for _ in range(ITERATIONS):
                if upper.tobytes() in seen:
                    break
                seen.add(upper.tobytes())
                columns = [part * column for part in (~upper, upper) for column in (ones, -ones, n, kv)]
                found = _fit(points, columns)
                x = found.x
                pieces = tuple((x[i] - x[i + 1], x[i + 2], x[i + 3]) for i in (0, 4))
                if max(a + b for a, b, _ in pieces) < LEAST_S:
                    break
                first, second = (a + b * n + c * kv for a, b, c in pieces)
                upper = (second > first) & (n > 0)
                if upper.any() and not upper[n > 0].all():
                    form = _form(MaxAffine(pieces), found, points)
                    best = form if form.loss < best.loss else best
    return best


def fit_table(points: Points) -> Form:
    """A curve through entries at about 1, 2, 3, 4, 6, 8, 12, 16, 24 ... requests that never falls."""
    return _table(points, _entries(points.running), padded=False)


def fit_padded(points: Points) -> Form:
    """A curve of steps, as CUDA graphs pad the batch: where the steps are is found, too.

    From the curve over all n there are, the best partition of the n into runs of equal time is a dynamic
    program over its ends, each further step costing what a step in pure noise would gain (BIC).
    """
    linear = fit_table(points)
    table = linear.step_time
    assert isinstance(table, Table)
    rest = points.seconds - table.c_s * points.kv_tokens - linear.prefill_s * points.other_tokens
    numbers = np.unique(points.running[points.running > 0])
    level, typical, weight = (np.zeros(len(numbers)) for _ in range(3))
    spread = []
    for i, n in enumerate(numbers):
        at = points.running == n
        level[i] = weighted_median(rest[at], points.weight[at])
        typical[i] = weighted_median(points.seconds[at], points.weight[at])
        weight[i] = points.weight[at].sum()
        spread.append(np.abs(rest[at] - level[i]) / points.seconds[at])
    noise = max(1.48 * float(np.median(np.concatenate(spread))), 1e-3)
    return _table(points, numbers[_steps(level, weight / (noise * typical) ** 2)], padded=True)


KINDS: dict[str, Callable[[Points], Form]] = {
    "affine": fit_affine,
    "power": fit_power,
    "max_affine": fit_max_affine,
    "table": fit_table,
    "padded": fit_padded,
}
"""From the simplest to the one with most freedom."""


def weighted_median(values: Floats, weight: Floats) -> float:
    """The value with half of the weight on either side.

    >>> weighted_median(np.array([1.0, 2.0, 9.0]), np.array([1.0, 1.0, 5.0]))
    9.0
    """
    order = np.argsort(values, kind="stable")
    half = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    return float(values[order][min(half, len(values) - 1)])


@dataclass(frozen=True)
class _Fitted:
    x: tuple[float, ...]  # the columns' coefficients
    prefill_s: float
    idle_s: float
    noise: float
    loss: float


def _fit(points: Points, columns: Sequence[Floats | Ints]) -> _Fitted:
    """Coefficients, none negative: of the columns, which count where n >= 1; of P; of steps with n = 0."""
    from scipy.optimize import nnls

    some = points.running > 0
    parts = [some * column for column in columns] + [points.other_tokens, ~some]
    every = np.stack(parts, axis=1).astype(np.float64)
    scale = np.abs(every).max(axis=0)
    used = scale > 0
    matrix = every[:, used] / scale[used]
    weight = points.weight / points.weight.sum()
    predicted, robust, noise = points.seconds, np.ones(len(points)), 0.0
    for _ in range(ITERATIONS):
        root = np.sqrt(weight * robust) / predicted
        weighted = matrix * root[:, None]
        gram = weighted.T @ weighted
        gram.flat[:: len(gram) + 1] += 1e-13 * np.trace(gram)  # columns of opposite sign are dependent
        triangle = np.linalg.cholesky(gram)
        x = nnls(triangle.T, np.linalg.solve(triangle, weighted.T @ (points.seconds * root)))[0]
        before, predicted = predicted, np.maximum(matrix @ x, LEAST_S)
        residual = points.seconds / predicted - 1
        noise = max(1.48 * weighted_median(np.abs(residual), weight), LEAST_NOISE)
        robust = 1 / np.sqrt(1 + (residual / noise) ** 2)
        if np.max(np.abs(predicted / before - 1)) < 1e-5:
            break
    coefficients = np.zeros(len(scale))
    coefficients[used] = x / scale[used]
    *of_columns, prefill_s, idle_s = coefficients.tolist()
    return _Fitted(tuple(of_columns), prefill_s, idle_s, noise, _loss(points, predicted))


def _loss(points: Points, predicted: Floats) -> float:
    """Soft L1 with one scale for all, so that fits of the same points can be compared."""
    residual = points.seconds / np.maximum(predicted, LEAST_S) - 1
    each = np.sqrt(1 + (residual / COMPARED_AT) ** 2) - 1
    return float(np.sum(points.weight * each) / points.weight.sum())


def _form(step_time: StepTime, found: _Fitted, points: Points) -> Form:
    form = Form(step_time, found.prefill_s, found.idle_s, found.noise, 0.0)
    return replace(form, loss=_loss(points, form.predict(points)))


def _entries(running: Ints) -> Ints:
    """About 1, 2, 3, 4, 6, 8, 12 ... up to the largest, each the nearest number that was measured."""
    numbers = np.unique(running[running > 0])
    most = int(numbers[-1])
    wanted = np.array([w for k in range(most.bit_length() + 1) for w in (2**k, 3 * 2**k)])
    nearest = [numbers[np.argmin(np.abs(np.log(numbers / w)))] for w in wanted if w <= most]
    return np.unique([*nearest, numbers[0], most])


def _table(points: Points, entries: Ints, *, padded: bool) -> Form:
    """A table with these entries and, if none of them is 1, the first one's time there too."""
    n = points.running
    if len(entries) < 2:
        raise InputError("table step time: expected at least two different numbers of running requests")
    columns: list[Floats] = [np.ones(len(n))]
    for i, (before, here) in enumerate(pairwise(entries)):
        rise = (n > before).astype(np.float64) if padded else np.clip((n - before) / (here - before), 0, 1)
        if i == len(entries) - 2:
            rise = np.where(n > here, (n - before) / (here - before), rise)
        columns.append(rise)
    found = _fit(points, [*columns, points.kv_tokens])
    *rises, c = found.x
    seconds = np.maximum(np.cumsum(rises), LEAST_S)
    if entries[0] > 1:
        entries, seconds = np.append(1, entries), np.append(seconds[0], seconds)
    return _form(Table(entries, seconds, c, padded), found, points)


def _steps(level: Floats, precision: Floats) -> Ints:
    """Positions of the last n of each run of about equal level; the dynamic program of :func:`fit_padded`."""
    k = len(level)
    sums = [np.concatenate([[0.0], np.cumsum(precision * level**power)]) for power in (0, 1, 2)]
    penalty = 2 * np.log(max(k, 2))
    best, last = np.zeros(k + 1), np.zeros(k + 1, dtype=np.int64)
    for end in range(1, k + 1):
        begin = np.arange(end)
        s0, s1, s2 = (total[end] - total[begin] for total in sums)
        cost = best[begin] + (s2 - s1**2 / s0) + penalty
        last[end] = int(np.argmin(cost))
        best[end] = cost[last[end]]
    ends = []
    end = k
    while end > 0:
        ends.append(end - 1)
        end = int(last[end])
    chosen = np.array(ends[::-1])
    return chosen if len(chosen) > 1 else np.array([0, k - 1])
