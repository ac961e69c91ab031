r"""A bound for any policy that sees more than the longest request: requests in classes by length.

As for :mod:`tailopt.oracle.any_bound`, the policy may know all lengths, move requests for free and cut the G
GPUs into any shapes at any time. There, one request must have its steps one after another. Here each of them
must: the longest ones may not all sit in quiet engines, since the quiet steps cost GPUs.

Sort requests by falling length and split them into classes c of m_c requests, with W_c output tokens and KV
area A_c in sum. A step on shape s, of t_s GPUs, holds j_c requests of class c and :math:`n = \sum_c j_c` in
all, and takes :math:`\tau \ge f_s(n) + c_s K`. Each request is in one step at a time, so the steps that hold
class c give :math:`\sum j_c \tau \le m_c T`, and all steps :math:`\sum t_s \tau \le G T`. For any shares
:math:`\theta + \sum_c \theta_c \le 1`,

.. math:: T \ge \sum_{\text{steps}} \tau \Bigl(\frac{\theta t_s}{G} + \sum_c \frac{\theta_c j_c}{m_c}\Bigr) .

Now pay a price :math:`\nu_c` for a token of class c, :math:`\kappa_c` for a context token that it reads, and
:math:`\pi` for a token-step of cache (:func:`tailopt.oracle.units.cache_areas`). If **no step earns more than
it costs**, that is if for every shape s, every n from 1 to C_s and all :math:`0 \le j_c \le m_c` with sum n

.. math:: \sum_c j_c \Bigl(\nu_c - \frac{\theta_c f_s(n)}{m_c}\Bigr) + \pi M_s
          \le \frac{\theta t_s f_s(n)}{G} ,
          \qquad \kappa_c \le c_s \Bigl(\frac{\theta t_s}{G} + \frac{\theta_c}{m_c}\Bigr) ,

then the batch, whose tokens must all be paid, takes

.. math:: T \ge \sum_c (\nu_c W_c + \kappa_c A_c) + \pi \sum_i A'_i .

(A step that reads K_c context tokens of class c holds one of it, so its context pays for itself by the second
inequality.) The most that j can earn is found by filling the n places with the best-paid classes first.

A solver proposes shares and prices; prices are then lowered until the inequalities hold for every n, so that
the bound holds whatever the solver did.
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

ALONE = 2  # the longest requests that are a class each
GROWTH = 1.6  # size of one class over the size of the one before

DENSE, RATIO = 8, 1.2  # the solver sees all n up to the first, then a series of this ratio

SAFETY = 1e-12


@dataclass(frozen=True)
class ClassBound:
    """No policy is done before ``lower_s``.

    Attributes:
        lower_s: the bound in seconds.
        sizes: requests of each class, the longest ones first.
        theta: share of the GPUs' time.
        theta_of: share of each class's time.
        nu_s: seconds per output token of each class.
        kappa_s: seconds per context token read of each class.
        cache_s: seconds per token-step of KV cache.
    """

    lower_s: float
    sizes: tuple[int, ...]
    theta: float
    theta_of: tuple[float, ...]
    nu_s: tuple[float, ...]
    kappa_s: tuple[float, ...]
    cache_s: float


@dataclass(frozen=True, eq=False)
class _Batch:
    """What the argument reads of a batch and the shapes.

    Attributes:
        sizes, tokens, area: ``[classes]`` m_c, W_c and A_c.
        cache: token-steps of KV cache in sum.
        gpus, base_s, capacity, running: ``[columns]`` t_s, f_s(n), M_s and n, one column per shape and n.
        shape_gpus, slope_s: ``[shapes]`` t_s and c_s.
    """

    sizes: Ints
    tokens: Ints
    area: Ints
    cache: int
    gpus: Ints
    base_s: Floats
    capacity: Ints
    running: Ints
    shape_gpus: Ints
    slope_s: Floats


def class_bound(trace: Trace, fleet: Fleet) -> ClassBound | None:
    """The bound for a batch on the fleet's GPUs in any shapes of its profile; None if the solver finds none.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.oracle.any_bound import lower_any_s
    >>> fleet = Fleet.of(load_engine("h100-llama-3.1-8b"), "4xTP1")
    >>> trace = Trace.of([[9000] * 32, [400] * 32])
    >>> class_bound(trace, fleet).lower_s > 1.02 * lower_any_s(trace, fleet).lower_s
    True
    """
    shapes = [shape for tp, shape in fleet.profile.shapes.items() if tp <= fleet.gpus]
    batch = _batch(trace, shapes)
    proposed = _propose(batch, fleet.gpus)
    if proposed is None:
        return None
    theta, theta_of, nu, kappa, cache = proposed
    kappa = np.minimum(kappa, _most_kappa(batch, fleet.gpus, theta, theta_of) * (1 - SAFETY))
    share = _lowered(batch, fleet.gpus, theta, theta_of, nu, cache)
    nu, cache = share * nu, share * cache
    lower_s = float(nu @ batch.tokens + kappa @ batch.area + cache * batch.cache) * (1 - ROUNDING)
    if not lower_s > 0:
        return None
    of_class = tuple(theta_of.tolist()), tuple(nu.tolist()), tuple(kappa.tolist())
    return ClassBound(lower_s, tuple(batch.sizes.tolist()), theta, *of_class, cache)


def class_sizes(n: int) -> list[int]:
    """Requests of each class: the longest alone, then ever more.

    >>> class_sizes(12)
    [1, 1, 2, 4, 4]
    """
    sizes: list[int] = []
    while (left := n - sum(sizes)) > 0:
        size = 1 if len(sizes) < ALONE else int(np.ceil(GROWTH * sizes[-1]))
        sizes.append(min(size, left))
    return sizes


def _batch(trace: Trace, shapes: list[ShapeProfile]) -> _Batch:
    sizes = class_sizes(trace.n_requests)
    order = np.argsort(-trace.output_tokens, kind="stable")
    starts = np.cumsum([0, *sizes[:-1]])
    limits = [min(shape.max_running, trace.n_requests) for shape in shapes]
    lines = [shape.step_time.lines(limit) for shape, limit in zip(shapes, limits, strict=True)]
    return _Batch(
        sizes=np.array(sizes),
        tokens=np.add.reduceat(trace.output_tokens[order], starts),
        area=np.add.reduceat(context_read(trace.context_tokens, trace.output_tokens)[order], starts),
        cache=int(cache_areas(trace, shapes).sum()),
        gpus=np.repeat([shape.tp for shape in shapes], limits),
        base_s=np.concatenate([line.base_s.max(axis=0)[1:] for line in lines]),
        capacity=np.repeat([shape.kv_capacity_tokens for shape in shapes], limits),
        running=np.concatenate([np.arange(1, limit + 1) for limit in limits]),
        shape_gpus=np.array([shape.tp for shape in shapes]),
        slope_s=np.array([float(line.slope_s.min()) for line in lines]),
    )


def _most_kappa(batch: _Batch, gpus: int, theta: float, theta_of: Floats) -> Floats:
    """The second inequality."""
    shared = theta * batch.shape_gpus[:, None] / gpus + theta_of / batch.sizes
    return np.asarray((batch.slope_s[:, None] * shared).min(axis=0))


def _earned(batch: _Batch, theta_of: Floats, nu: Floats) -> Floats:
    """``[columns]`` the most that the requests of a step earn, up to rounding."""
    share_s = theta_of / batch.sizes * batch.base_s[:, None]
    pay = nu - share_s + SAFETY * (nu + share_s)
    order = np.argsort(-pay, axis=1, kind="stable")
    sizes = batch.sizes[order]
    before = np.cumsum(sizes, axis=1) - sizes
    places = np.clip(batch.running[:, None] - before, 0, sizes)
    return np.asarray((np.take_along_axis(pay, order, axis=1) * places).sum(axis=1))


def _lowered(batch: _Batch, gpus: int, theta: float, theta_of: Floats, nu: Floats, cache: float) -> float:
    """The largest share of the prices, up to rounding, at which no step earns more than it costs."""
    cost = theta * batch.gpus * batch.base_s / gpus * (1 - SAFETY)

    def holds(share: float) -> bool:
        earned = _earned(batch, theta_of, share * nu) + share * cache * batch.capacity
        return bool((earned <= cost).all())

    low, high = 0.0, 1.0
    if holds(high):
        return high
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _propose(batch: _Batch, gpus: int) -> tuple[float, Floats, Floats, Floats, float] | None:
    """Shares and prices that solve the program, as a solver sees it, for some of the n."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    seen = {1, *range(1, DENSE + 1), int(batch.running.max())}
    n = float(DENSE)
    while n < batch.running.max():
        n *= RATIO
        seen.add(int(n))
    last = np.append(np.diff(batch.running) < 0, True)
    columns = np.flatnonzero(np.isin(batch.running, list(seen)) | last)
    classes, count = len(batch.sizes), len(columns)
    unit_s = float(batch.base_s.max())
    f = batch.base_s[columns] / unit_s
    read = float(batch.area.sum() / batch.tokens.sum())  # context tokens per token
    capacity = float(batch.capacity.max())
    # theta, theta_c, nu_c, kappa_c * read, cache * capacity, level of each column, each class's excess
    at = np.cumsum([0, 1, classes, classes, classes, 1, count, count * classes])
    row: list[Ints] = []
    col: list[Ints] = []
    value: list[Floats] = []

    def add(rows: Ints, cols: Ints, values: Floats) -> None:
        rows, cols, values = np.broadcast_arrays(rows, cols, values)
        row.append(rows.ravel())
        col.append(cols.ravel())
        value.append(values.ravel())

    k, c = np.arange(count), np.arange(classes)
    # each column: level n + sum_c m_c excess_c + cache M <= theta t f / G
    add(k, at[0], -batch.gpus[columns] / gpus * f)
    add(k, at[4], batch.capacity[columns] / capacity)
    add(k, at[5] + k, batch.running[columns].astype(float))
    add(k[:, None], at[6] + k[:, None] * classes + c, batch.sizes.astype(float))
    # excess_c >= nu_c - theta_c f / m_c - level
    rows = count + k[:, None] * classes + c
    add(rows, at[2] + c, np.ones(1))
    add(rows, at[1] + c, -f[:, None] / batch.sizes)
    add(rows, at[5] + k[:, None], -np.ones(1))
    add(rows, at[6] + k[:, None] * classes + c, -np.ones(1))
    # kappa_c <= c_s (theta t_s / G + theta_c / m_c)
    s = np.arange(len(batch.slope_s))[:, None]
    rows = count * (1 + classes) + s * classes + c
    slope = batch.slope_s[:, None] / unit_s * read
    add(rows, at[3] + c, np.ones(1))
    add(rows, at[0], -slope * batch.shape_gpus[:, None] / gpus)
    add(rows, at[1] + c, -slope / batch.sizes)
    # all shares at most 1
    total = count * (1 + classes) + len(batch.slope_s) * classes
    add(np.array([total]), np.arange(at[2]), np.ones(1))

    matrix = coo_matrix(
        (np.concatenate(value), (np.concatenate(row), np.concatenate(col))), shape=(total + 1, at[7])
    ).tocsr()
    limit = np.zeros(total + 1)
    limit[total] = 1.0
    objective = np.zeros(at[7])
    tokens = float(batch.tokens.sum())
    objective[at[2] : at[3]] = -batch.tokens / tokens
    objective[at[3] : at[4]] = -batch.area / read / tokens
    objective[at[4]] = -batch.cache / capacity / tokens
    bounds = [(0, None)] * int(at[5]) + [(None, None)] * count + [(0, None)] * (count * classes)
    solved = linprog(objective, A_ub=matrix, b_ub=limit, bounds=bounds, method="highs")
    if solved.x is None:
        return None
    x = np.maximum(solved.x[: at[5]], 0.0)
    shares = x[: at[2]] / max(1.0, float(x[: at[2]].sum()) * (1 + SAFETY))
    return (
        float(shares[0]), shares[1:], x[at[2] : at[3]] * unit_s, x[at[3] : at[4]] * unit_s / read,
        float(x[at[4]] * unit_s / capacity),
    )  # fmt: skip
