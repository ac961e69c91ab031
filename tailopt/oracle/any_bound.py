r"""``lower_any_s``: a makespan that no policy whatever can beat.

Not one that knows all lengths, moves requests between engines for free, and cuts the G GPUs into whatever
shapes of the profile it likes, anew at any moment. (Without speculative decoding: one token per request and
step.) Two arguments, the better one counts:

**Alone.** The longest request needs its L* steps one after another, and none is faster than it would be alone
on the shape that is fastest at its context: :math:`T \ge \sum_{k=1}^{L^*} \min_s \tau_s(1, p^* + k)`.

**Linear program.** Count the steps taken on shape s with n requests: v(s,n) in all, x(s,n) of them with the
longest request in the batch. All steps together occupy :math:`\sum t_s \tau \le G T` GPU-seconds (t_s GPUs a
shape), the longest request's steps at most T seconds. For any share :math:`\theta \in [0, 1]`

.. math:: T \ge \theta \sum_{\text{its steps}} \tau + \frac{1 - \theta}{G} \sum_{\text{all steps}} t_s \tau .

With :math:`\tau_s(n, K) \ge f_s(n) + c_s K`, and A' the token-steps of cache that a request keeps busy
(:func:`tailopt.oracle.units.cache_areas`), least over

.. math:: \sum x = L^*, \quad \sum n\,v = \sum_i L_i, \quad \sum M_s v \ge \sum_i A'_i, \quad v \ge x \ge 0,
          \quad n \le C_s .

By duality, for **any** multipliers mu, kappa >= 0 with
:math:`g(s,n) = \frac{1-\theta}{G} t_s f_s(n) - \mu n - \kappa M_s \ge 0` everywhere,

.. math:: T \ge \mu \sum L_i + \kappa \sum A'_i + L^* \min_{s,n} [\theta f_s(n) + g(s,n)]
          + \theta\, c_{\min} A^* + \tfrac{1-\theta}{G} \min_s (t_s c_s) \sum A_i .

A solver proposes the multipliers; the bound is then computed from this line alone, so that it holds whatever
the solver did.
"""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.engine.decode_time import context_read
from tailopt.engine.profile import ShapeProfile
from tailopt.oracle.staircase import ROUNDING
from tailopt.oracle.units import cache_areas
from tailopt.plan import Fleet
from tailopt.trace import Trace


@dataclass(frozen=True)
class AnyBound:
    """No policy is done before ``lower_s``.

    Attributes:
        lower_s: the bound in seconds.
        alone_s: the first argument's bound.
        theta, mu_s, kappa_s: the multipliers of the second argument: a share, seconds per output token,
            seconds per context token read.
    """

    lower_s: float
    alone_s: float
    theta: float
    mu_s: float
    kappa_s: float


@dataclass(frozen=True, eq=False)
class _Columns:
    """One column for each shape s and number of requests n."""

    gpus: Ints
    running: Ints
    base_s: Floats
    kv_capacity_tokens: Ints


def lower_any_s(trace: Trace, fleet: Fleet) -> AnyBound:
    """The better of the two bounds above for a batch on the fleet's GPUs, in any shapes of its profile.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Engine
    >>> fleet = Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1), Engine(1)), gpus=2)
    >>> bound = lower_any_s(Trace.of([[400] * 64]), fleet)
    >>> 0 < bound.alone_s <= bound.lower_s
    True
    """
    shapes = [shape for tp, shape in fleet.profile.shapes.items() if tp <= fleet.gpus]
    alone_s = _alone_s(trace, shapes)
    best = AnyBound(alone_s * (1 - ROUNDING), alone_s * (1 - ROUNDING), 1.0, 0.0, 0.0)
    for proposed in _propose(trace, shapes, fleet.gpus):
        multipliers = admissible(trace, shapes, fleet.gpus, *proposed)
        lower_s = dual_bound_s(trace, shapes, fleet.gpus, *multipliers) * (1 - ROUNDING)
        if lower_s > best.lower_s:
            best = AnyBound(lower_s, best.alone_s, *multipliers)
    return best


def _alone_s(trace: Trace, shapes: list[ShapeProfile]) -> float:
    longest = int(np.lexsort((trace.context_tokens, trace.output_tokens))[-1])
    context = trace.context_tokens[longest] + np.arange(1, trace.output_tokens[longest] + 1)
    return float(np.min([shape.step_time(1, context) for shape in shapes], axis=0).sum())


def admissible(
    trace: Trace, shapes: list[ShapeProfile], gpus: int, theta: float, mu_s: float, kappa_s: float
) -> tuple[float, float, float]:
    """The multipliers, mu and kappa shrunk so far that g >= 0 everywhere, rounding included."""
    theta = min(1.0, max(0.0, theta))
    columns = _columns(trace, shapes)
    cost = (1 - theta) / gpus * columns.gpus * columns.base_s
    price = max(0.0, mu_s) * columns.running + max(0.0, kappa_s) * columns.kv_capacity_tokens
    priced = price > 0
    shrink = min(1.0, float(np.min(cost[priced] / price[priced], initial=np.inf))) * (1 - 1e-12)
    return theta, shrink * max(0.0, mu_s), shrink * max(0.0, kappa_s)


def dual_bound_s(
    trace: Trace, shapes: list[ShapeProfile], gpus: int, theta: float, mu_s: float, kappa_s: float
) -> float:
    """The last line of the module's argument, for admissible multipliers."""
    area = context_read(trace.context_tokens, trace.output_tokens)
    longest = int(np.argmax(trace.output_tokens))
    slope_s, gpu_slope_s = _slopes(shapes)
    columns = _columns(trace, shapes)
    share = (1 - theta) / gpus
    left = (
        share * columns.gpus * columns.base_s - mu_s * columns.running - kappa_s * columns.kv_capacity_tokens
    )
    return float(
        mu_s * int(trace.output_tokens.sum())
        + kappa_s * int(cache_areas(trace, shapes).sum())
        + float(np.min(theta * columns.base_s + left)) * int(trace.output_tokens[longest])
        + theta * slope_s * int(area[longest])
        + share * gpu_slope_s * int(area.sum())
    )


def _slopes(shapes: list[ShapeProfile]) -> tuple[float, float]:
    """Least c_s and least t_s c_s."""
    slopes = [(float(shape.step_time.lines(1).slope_s.min()), shape.tp) for shape in shapes]
    return min(slope for slope, _ in slopes), min(tp * slope for slope, tp in slopes)


def _columns(trace: Trace, shapes: list[ShapeProfile]) -> _Columns:
    limits = [min(shape.max_running, trace.n_requests) for shape in shapes]
    bases = [
        shape.step_time.lines(limit).base_s.max(axis=0)[1:]
        for shape, limit in zip(shapes, limits, strict=True)
    ]
    return _Columns(
        gpus=np.repeat([shape.tp for shape in shapes], limits),
        running=np.concatenate([np.arange(1, limit + 1) for limit in limits]),
        base_s=np.concatenate(bases),
        kv_capacity_tokens=np.repeat([shape.kv_capacity_tokens for shape in shapes], limits),
    )


def _propose(trace: Trace, shapes: list[ShapeProfile], gpus: int) -> list[tuple[float, float, float]]:
    """Multipliers (theta, mu, kappa) that solve the dual program, as a solver sees it."""
    from scipy.optimize import linprog

    area = context_read(trace.context_tokens, trace.output_tokens)
    longest = int(np.argmax(trace.output_tokens))
    slope_s, gpu_slope_s = _slopes(shapes)
    columns = _columns(trace, shapes)
    tokens, context = float(trace.output_tokens.sum()), float(area.sum())
    cache = float(cache_areas(trace, shapes).sum())
    # scaled so that every variable and coefficient is of order one: mu in units of 1 / tokens, and so on
    unit_s = float(columns.base_s.max())
    f = columns.base_s / unit_s
    spread = columns.gpus * f / gpus
    per_token, per_cache = 1 / tokens, columns.kv_capacity_tokens / cache
    length = float(trace.output_tokens[longest])
    zero = np.zeros_like(f)
    refuse = np.stack([spread, columns.running * per_token, per_cache, zero], axis=1)
    value = np.stack(
        [spread - f, columns.running * per_token, per_cache, np.full_like(f, 1 / length)], axis=1
    )
    objective = -np.array(
        [(slope_s * float(area[longest]) - gpu_slope_s * context / gpus) / unit_s, 1.0, 1.0, 1.0]
    )
    solved = linprog(
        objective,
        A_ub=np.concatenate([refuse, value]),
        b_ub=np.concatenate([spread, spread]),
        bounds=[(0, 1), (0, None), (0, None), (None, None)],
        method="highs",
    )
    if solved.x is None:
        return []
    theta, mu, kappa, _ = solved.x
    return [(float(theta), float(mu) * unit_s / tokens, float(kappa) * unit_s / cache)]
