r"""An engine's step time from the steps that it took: fitted in every form, chosen by what was held out.

Measured steps (:class:`Steps`) of one engine shape are **condensed**: of the steps with one n and nearly the
same context and prefill, the median is kept. As a median is off by its noise and by the model's own error,
which more steps do not remove, m steps weigh m / (1 + m / 10).

**Which form.** The points are cut into cells: bands of n (1, 2, 3-4, 5-8, ...) by bands of context per
request (powers of two). A fifth of the cells in turn, along diagonals, is held out *as a whole*: neighbouring
steps of a run are nearly equal, so holding out single steps would prefer whatever interpolates noise. The
error of a cell is the median of measured / predicted, off 1; the error of a form is the mean over cells. The
form chosen is the simplest whose error is above the least one by no more than a tenth, or 0.1 %, or the
standard error of that difference, cell by cell (the one-standard-error rule: Breiman, Friedman, Olshen and
Stone, Classification and Regression Trees, 1984).

**Pace.** A shared machine is some per cent faster in one batch than in the next, and a batch whose tail is
long has more steps of few requests: what was the machine's then looks like the form's. Batches of like
requests tell both apart, as each goes through steps that the others go through, too: ``levelled`` takes

.. math:: s \approx \pi_f \, \tau(n, K),

:math:`\pi_f` the pace of batch f, by fitting one with the other held in turn.

**Mean or median.** The fit predicts the usual step. What disturbs an engine only ever slows it down, so the
sum of all steps is above the sum of usual ones, by ``total_ratio``; ``match_total`` scales it away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailopt.arrays import Floats, Ints, assign, floats, ints
from tailopt.engine.step_time import LEAST_S, Affine, MaxAffine, Power, StepTime, Table
from tailopt.errors import InputError
from tailopt.replay.fit_forms import KINDS, Form, Points, weighted_median

LEAST_STEPS = 20
LEAST_BANDS = 3
"""Of n, so that one can be held out between two others."""

FOLDS = 5

MOST_ROUNDS = 50
"""Of fitting paces and step time in turn."""

NEGLIGIBLE = 1e-3
"""Errors that differ by no more are equal."""

_FINE = np.log(1.02)
"""Steps with context and prefill within 2 % of each other are alike."""

_SATURATION = 10.0


@dataclass(frozen=True, eq=False)
class Steps:
    """Measured steps of engines of one shape, one row a step.

    Attributes:
        running: ``[k]`` requests that gained a token in the step.
        kv_tokens: ``[k]`` tokens that these held with the new ones.
        other_tokens: ``[k]`` tokens computed besides, as prefill is.
        seconds: ``[k]`` how long it took.
        engine: ``[k]`` which engine; all 0 if there was one.
        time_s: ``[k]`` when it began; all 0 if unknown.

    Raises:
        InputError: lengths that differ, a negative number, no time, or context below one token a request.
    """

    running: Ints
    kv_tokens: Floats
    other_tokens: Floats
    seconds: Floats
    engine: Ints
    time_s: Floats

    def __post_init__(self) -> None:
        k = len(self.running)
        assign(
            self,
            running=ints("steps: running", self.running, minimum=0),
            kv_tokens=floats("steps: kv_tokens", self.kv_tokens, k, minimum=0),
            other_tokens=floats("steps: other_tokens", self.other_tokens, k, minimum=0),
            seconds=floats("steps: seconds", self.seconds, k, minimum=0, maximum=1e6),
            engine=ints("steps: engine", self.engine, k, minimum=0),
            time_s=floats("steps: time_s", self.time_s, k),
        )
        for what, bad in (
            ("seconds: expected a positive time", self.seconds < LEAST_S),
            ("kv_tokens: expected at least one token a running request", self.kv_tokens < self.running),
            ("expected a running request or other tokens", (self.running == 0) & (self.other_tokens == 0)),
        ):
            if bad.any():
                raise InputError(f"steps[{int(np.argmax(bad))}]: {what}")

    def __len__(self) -> int:
        return len(self.running)

    @classmethod
    def of(
        cls,
        running: Sequence[int] | Ints,
        kv_tokens: Sequence[float] | Floats | Ints,
        other_tokens: Sequence[float] | Floats | Ints,
        seconds: Sequence[float] | Floats,
    ) -> "Steps":
        """Steps of one engine, of which nothing else is known."""
        nothing = np.zeros(len(running))
        return cls(running, kv_tokens, other_tokens, seconds, nothing, nothing)  # type: ignore[arg-type]

    def where(self, chosen: Ints) -> "Steps":
        """Some of the rows, by number."""
        return Steps(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class KindFit:
    """One form fitted to all steps, and how it did where it had to predict.

    Attributes:
        kind: its name in :data:`tailopt.replay.fit_forms.KINDS`.
        form: the fit.
        error: mean relative error over cells that were held out.
        worst: the largest one.
        excess: ``error`` above the least one of all kinds.
        excess_error: standard error of ``excess``; 0 for the best kind itself.
    """

    kind: str
    form: Form
    error: float
    worst: float
    excess: float = 0.0
    excess_error: float = 0.0


@dataclass(frozen=True)
class Fit:
    """The step time and the prefill rate of an engine, and where they come from.

    Attributes:
        best: the form chosen.
        kinds: all forms, the simplest first.
        steps: how many steps were fitted.
        n_range, context_range, prefill_range: least and most n, context per running request, and P of steps
            that have any (``(0, 0)`` if none has).
        residual: median absolute relative residual of the condensed points under the best form.
        total_ratio: sum of all measured seconds over their prediction.
        prefill_tokens_per_s: measured, or as given.
        prefill_given: whether it was given.
    """

    best: KindFit
    kinds: tuple[KindFit, ...]
    steps: int
    n_range: tuple[int, int]
    context_range: tuple[float, float]
    prefill_range: tuple[int, int]
    residual: float
    total_ratio: float
    prefill_tokens_per_s: float
    prefill_given: bool = False

    @property
    def step_time(self) -> StepTime:
        """Of the form chosen."""
        return self.best.form.step_time

    def __str__(self) -> str:
        """One line for the profile's ``fit``."""
        others = ", ".join(f"{one.kind} {one.error:.2%}" for one in self.kinds if one is not self.best)
        prefill = (
            "prefill rate given, not measured"
            if self.prefill_given
            else f"prefill from steps of {self.prefill_range[0]}-{self.prefill_range[1]} prompt tokens"
        )
        beside = f"; other forms: {others}" if others else ""
        return (
            f"{self.best.kind}, soft L1 over {self.steps} steps, n {self.n_range[0]}-{self.n_range[1]}, "
            f"context {self.context_range[0]:.0f}-{self.context_range[1]:.0f} a request: relative residual "
            f"median {self.residual:.2%}; cells of n and context held out: mean {self.best.error:.2%}, "
            f"worst {self.best.worst:.2%}{beside}; sum of all steps {self.total_ratio - 1:+.2%}; {prefill}"
        )


def fit_steps(
    steps: Steps,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    prefill_tokens_per_s: float | None = None,
    match_total: bool = False,
) -> Fit:
    """Fit every kind of step time to measured steps, and choose one.

    Args:
        steps: of engines of one shape.
        kinds: which forms to try; one alone is not chosen but taken.
        prefill_tokens_per_s: the prefill rate, if it is known; steps with prefill are then left out.
        match_total: scale times and rate so that the sum of all steps is predicted exactly.

    Raises:
        InputError: an unknown kind; too few steps, numbers of requests, or contexts to tell b from c; no step
            with prefill and no rate given.

    >>> n, kv = np.tile([1, 2, 4, 8, 16, 32], 40), np.repeat(np.arange(100, 4100, 100), 6)
    >>> fit = fit_steps(Steps.of(n, n * kv, 0 * n, 5e-3 + 1e-4 * n + 1e-8 * n * kv), prefill_tokens_per_s=1e4)
    >>> fit.best.kind, str(fit.step_time)
    ('affine', '5 + 0.1·n + 0.01·K/1000 ms')
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise InputError(
            f"kind of step time: expected one of {', '.join(KINDS)}, got {', '.join(unknown) or 'none'}"
        )
    if prefill_tokens_per_s is not None:
        if not 0 < prefill_tokens_per_s < np.inf:
            raise InputError(f"prefill rate: expected a positive number, got {prefill_tokens_per_s}")
        steps = steps.where(np.flatnonzero(steps.other_tokens == 0))
    _check_enough(steps, measured=prefill_tokens_per_s is None)
    points = condense(steps)
    tried = _compared(points, [kind for kind in KINDS if kind in kinds])
    least = min(one.error for one in tried)
    best = next(one for one in tried if one.excess <= max(one.excess_error, 0.1 * least, NEGLIGIBLE))
    rate = prefill_tokens_per_s
    if rate is None:
        if best.form.prefill_s <= 0:
            raise InputError("fit: prefill costs no time in these steps; give the prefill rate")
        rate = 1 / best.form.prefill_s
    decode = steps.running > 0
    context = steps.kv_tokens[decode] / steps.running[decode]
    prefilled = steps.other_tokens[steps.other_tokens > 0]
    everything = Points(
        steps.running, steps.kv_tokens, steps.other_tokens, steps.seconds, np.ones(len(steps))
    )
    predicted = replace(best.form, prefill_s=1 / rate).predict(everything)
    residual = points.seconds / np.maximum(best.form.predict(points), LEAST_S) - 1
    ratio = float(steps.seconds.sum() / predicted.sum())
    fit = Fit(
        best=best,
        kinds=tuple(tried),
        steps=len(steps),
        n_range=(int(steps.running[decode].min()), int(steps.running.max())),
        context_range=(float(context.min()), float(context.max())),
        prefill_range=(int(prefilled.min()), int(prefilled.max())) if len(prefilled) else (0, 0),
        residual=weighted_median(np.abs(residual), points.weight),
        total_ratio=ratio,
        prefill_tokens_per_s=rate,
        prefill_given=prefill_tokens_per_s is not None,
    )
    return _scaled(fit, ratio) if match_total else fit


def joined(parts: Sequence[Steps]) -> Steps:
    """The rows of all parts, one after the other."""
    names = Steps.__dataclass_fields__
    return Steps(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def levelled(parts: Sequence[Steps]) -> Steps:
    """The rows of all parts, as if the machine had kept one pace: the mean one, so the seconds stay in sum.

    A part with n in fewer than three bands has no pace of its own: its steps may be slower than others
    because they are different ones.

    >>> n = np.tile([1, 2, 4, 8], 40)
    >>> usual = Steps.of(n, n * np.repeat(np.arange(100, 4100, 100), 4), 0 * n, 5e-3 + 1e-4 * n)
    >>> slow = replace(usual, seconds=1.2 * usual.seconds)
    >>> found = levelled([usual, slow]).seconds
    >>> bool(np.allclose(found, 1.1 * np.tile(usual.seconds, 2)))
    True
    """
    decoded = [part.where(np.flatnonzero((part.running > 0) & (part.other_tokens == 0))) for part in parts]
    own = [f for f, part in enumerate(decoded) if _bands(part) >= LEAST_BANDS]
    if len(own) < 2:
        return joined(parts)
    seconds = np.array([decoded[f].seconds.sum() for f in own])
    pace = np.ones(len(own))
    for _ in range(MOST_ROUNDS):
        before = pace
        even = [replace(decoded[f], seconds=decoded[f].seconds / pace[i]) for i, f in enumerate(own)]
        step_time = KINDS["affine"](condense(joined(even))).step_time
        told = [step_time(decoded[f].running, decoded[f].kv_tokens).sum() for f in own]
        pace = seconds / np.array(told)
        pace *= (seconds / pace).sum() / seconds.sum()
        if np.abs(pace / before - 1).max() < 1e-6:
            break
    all_paces = np.ones(len(parts))
    all_paces[own] = pace
    return joined(
        [replace(part, seconds=part.seconds / one) for part, one in zip(parts, all_paces, strict=True)]
    )


def condense(steps: Steps) -> Points:
    """The median step of each n, context within 2 % and prefill within 2 %."""
    context = np.log(np.maximum(steps.kv_tokens / np.maximum(steps.running, 1), 1.0))
    prefill = np.log1p(steps.other_tokens)
    key = np.stack([steps.running, np.floor(context / _FINE), np.ceil(prefill / _FINE)], axis=1)
    _, member, count = np.unique(key, axis=0, return_inverse=True, return_counts=True)
    member = member.reshape(-1)
    order = np.lexsort((steps.seconds, member))
    first = np.cumsum(count) - count
    lower, upper = order[first + (count - 1) // 2], order[first + count // 2]

    def mean(values: Floats | Ints) -> Floats:
        return np.bincount(member, weights=values) / count

    return Points(
        running=steps.running[lower],
        kv_tokens=mean(steps.kv_tokens),
        other_tokens=mean(steps.other_tokens),
        seconds=(steps.seconds[lower] + steps.seconds[upper]) / 2,
        weight=count / (1 + count / _SATURATION),
    )


def _check_enough(steps: Steps, *, measured: bool) -> None:
    """Refuse what no form can be told from; ``measured``: the prefill rate is to be found, too."""
    if len(steps) < LEAST_STEPS:
        raise InputError(f"fit: {len(steps)} steps of use, expected at least {LEAST_STEPS}")
    some = steps.where(np.flatnonzero(steps.running > 0))
    if _bands(some) < LEAST_BANDS:
        seen = ", ".join(map(str, np.unique(some.running)[:8])) or "none"
        raise InputError(
            f"fit: steps with {seen} running requests, expected numbers in at least {LEAST_BANDS} of the "
            "bands 1, 2, 3-4, 5-8, 9-16, ..."
        )
    if measured and not (steps.other_tokens > 0).any():
        raise InputError("fit: no step has prefill, expected some, or the prefill rate to be given")
    columns = np.stack([np.ones(len(some)), some.running, some.kv_tokens], axis=1) / some.seconds[:, None]
    values = np.linalg.svd(columns / np.linalg.norm(columns, axis=0), compute_uv=False)
    if values[-1] < 1e-3:
        raise InputError(
            "fit: the context per request hardly differs, expected different ones to tell the cost of a "
            "request from that of its context"
        )


def _bands(decoded: Steps) -> int:
    """How many bands of n there are."""
    return len(np.unique(_n_band(decoded)))


def _n_band(points: Points | Steps) -> Ints:
    """0 for n = 1, 1 for 2, 2 for 3-4, 3 for 5-8, ...; 0 as well for n = 0, which is never held out."""
    return np.ceil(np.log2(np.maximum(points.running, 1))).astype(np.int64)


def _context_band(points: Points) -> Ints:
    """By powers of two of the context per request."""
    return np.floor(np.log2(np.maximum(points.kv_tokens / np.maximum(points.running, 1), 1))).astype(np.int64)


def _compared(points: Points, kinds: Sequence[str]) -> list[KindFit]:
    """Every kind fitted to all points, with its error over cells that were held out."""
    some = points.running > 0
    by_n, by_context = _n_band(points), _context_band(points)
    cells, cell = np.unique(np.stack([by_n, by_context], axis=1)[some], axis=0, return_inverse=True)
    members = np.full(len(points), -1)
    members[some] = cell.reshape(-1)
    fold = (cells[:, 0] + 2 * cells[:, 1]) % FOLDS
    error = np.zeros((len(kinds), len(cells)))
    for held in np.unique(fold):
        rest = points.where(~np.isin(members, np.flatnonzero(fold == held)))
        for i, kind in enumerate(kinds):
            form = KINDS[kind](rest)
            for out in np.flatnonzero(fold == held):
                here = points.where(members == out)
                ratio = here.seconds / np.maximum(form.predict(here), LEAST_S)
                error[i, out] = abs(weighted_median(ratio, here.weight) - 1)
    excess = error - error[np.argmin(error.mean(axis=1))]
    deviation = excess.std(axis=1, ddof=1) / np.sqrt(len(cells))
    return [
        KindFit(
            kind,
            KINDS[kind](points),
            error=float(error[i].mean()),
            worst=float(error[i].max()),
            excess=float(excess[i].mean()),
            excess_error=float(deviation[i]),
        )
        for i, kind in enumerate(kinds)
    ]


def _scaled(fit: Fit, ratio: float) -> Fit:
    """All times of ``fit`` times ``ratio``; a prefill rate that was given stays."""
    kinds = {
        one.kind: replace(
            one,
            form=replace(
                one.form,
                step_time=_times(one.form.step_time, ratio),
                prefill_s=one.form.prefill_s * ratio,
                idle_s=one.form.idle_s * ratio,
            ),
        )
        for one in fit.kinds
    }
    rate = fit.prefill_tokens_per_s if fit.prefill_given else fit.prefill_tokens_per_s / ratio
    return replace(
        fit,
        best=kinds[fit.best.kind],
        kinds=tuple(kinds.values()),
        prefill_tokens_per_s=rate,
        total_ratio=1.0,
    )


def _times(step_time: StepTime, factor: float) -> StepTime:
    match step_time:
        case Affine(a, b, c):
            return Affine(a * factor, b * factor, c * factor)
        case Power(a, b, p, c):
            return Power(a * factor, b * factor, p, c * factor)
        case MaxAffine(pieces):
            return MaxAffine(tuple((a * factor, b * factor, c * factor) for a, b, c in pieces))
        case Table():
            return replace(step_time, seconds=step_time.seconds * factor, c_s=step_time.c_s * factor)
    raise InputError(f"step time of type {type(step_time).__name__}: cannot be scaled")
