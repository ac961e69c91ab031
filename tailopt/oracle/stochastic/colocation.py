r"""Co-location: a lower bound for plans that do not know which scenario comes.

Someone who knows scenario s can make a plan for it, and the mean over s of the best makespans bounds every
fixed plan. But a fixed plan has the *same units together in every scenario*. Write :math:`y_{ij} = 1` if
units i and j share an engine. On m engines, for every vector v over the units,

.. math:: \sum_{ij} v_i v_j y_{ij} = \sum_e \Big(\sum_{i \in e} v_i\Big)^2
          \;\ge\; \frac1m \Big(\sum_i v_i\Big)^2, \qquad y_{ii} = 1, \quad 0 \le y_{ij} \le 1 \qquad (share),

by Cauchy and Schwarz: things cannot all be kept apart. And in scenario s the engine of unit i takes,
whatever i is,

.. math:: T^s_{e(i)} \;\ge\; t_{is} + \sum_{j \ne i} g_{ijs} \, y_{ij},
\qquad (engine)

with t the time of i alone. For a concave step time f(n) + c K, with :math:`n_j(k)` requests of unit j longer
than k tokens and N(k) of all units, concavity on :math:`[n_i(k), N(k)]` gives

.. math:: g_{ijs} = \sum_k n_j(k) \frac{f(N(k)) - f(n_i(k))}{N(k) - n_i(k)} + c A_j ,

which is just b L_j + c A_j if f is affine. (Waiting and preemption only add time:
:mod:`tailopt.oracle.alone`.)

Where f bends this is loose: a chord up to all requests at once. The
relaxation: choose y, subject to (share) alone, that minimises the mean over s of the largest right-hand
side of (engine), or of the clairvoyant bound if that is larger.

**Proof by weights.** Any weights :math:`\lambda_{is} \ge 0` of the engines' times and :math:`\kappa_s \ge
0` of the clairvoyant bounds, with :math:`\sum_i \lambda_{is} + \kappa_s \le 1/S`, and any vectors v,
multipliers 1, give

.. math:: \frac1S \sum_s \max_e T_e^s \;\ge\; \sum_{s} \Big(\sum_i \lambda_{is} t_{is} + \kappa_s P_s\Big)
          + \sum_{i<j} \min(0, h_{ij} - 2 q_{ij}) + \sum_v \Big(\frac{(\sum_i v_i)^2}{m} - |v|^2\Big),

with :math:`h_{ij} = \sum_s (\lambda_{is} g_{ijs} + \lambda_{js} g_{jis})` and :math:`q_{ij} = \sum_v v_i
v_j`: add up (engine) with its weights, then (share) for each v. So weights and vectors are all that a
checker needs; how they were found does not matter. They are found by the primal-dual hybrid gradient method
on the saddle function: steps in y (a box), in the weights (a simplex for each scenario) and in Q (positive
semidefinite), each a projection.
"""

import time
from dataclasses import dataclass

import numpy as np
from numba import njit

from tailopt.arrays import Floats, Ints
from tailopt.engine.step_time import Lines
from tailopt.oracle.alone import concave
from tailopt.oracle.staircase import ROUNDING
from tailopt.oracle.stochastic.problem import StochasticProblem
from tailopt.policies.annealing import Outcomes, value_s

ITERATIONS = 1500
LOOK = 50  # iterations between two evaluations of the bound
BALANCE = 0.02  # dual over primal step length

MOST_CELLS = 30_000_000
"""Largest scenarios x units x units for which the bound is tried."""


@dataclass(frozen=True, eq=False)
class CoLocationBound:
    """Why no plan has a value below ``lower_s``: see the module.

    Attributes:
        lower_s: the bound in seconds.
        weight: ``[scenarios, units]`` of (engine).
        clairvoyant_weight: ``[scenarios]`` of the clairvoyant bounds.
        vectors: ``[k, units]`` of (share), in roots of seconds.
    """

    lower_s: float
    weight: Floats
    clairvoyant_weight: Floats
    vectors: Floats


def colocation_bound(
    problem: StochasticProblem,
    outcomes: Outcomes,
    clairvoyant_s: Floats,
    makespans_s: Floats,
    *,
    iterations: int = ITERATIONS,
    time_limit_s: float | None = None,
) -> CoLocationBound | None:
    """The best bound found; None for unequal engines, a step time that is not concave, or too large a batch.

    Args:
        problem: what is bounded.
        outcomes: its scenarios, as the search wants them.
        clairvoyant_s: ``[scenarios]`` lower bounds for plans that know the scenario.
        makespans_s: ``[scenarios]`` of the best plan found; if only some scenarios count, the weights stay
        on its worst.
        iterations: of the method.
        time_limit_s: it ends early after this; Ctrl-C ends it too.
    """
    deadline = np.inf if time_limit_s is None else time.perf_counter() + time_limit_s
    units, scenarios = outcomes.units, outcomes.scenarios
    lines = problem.fleet.shape_of(0).step_time.lines(problem.trace.n_requests)
    if not problem.fleet.identical or not concave(lines) or units**2 * scenarios > MOST_CELLS or units < 2:
        return None
    counted = np.sort(np.argsort(makespans_s, kind="stable")[scenarios - problem.worst :])
    alone_s, added_s = engine_terms(problem, outcomes.start, lines, counted)
    found = _Saddle(alone_s, added_s, clairvoyant_s[counted], len(problem.fleet.engines))
    try:
        for iteration in range(1, iterations + 1):
            found.step()
            if iteration % LOOK == 0 or iteration == iterations:
                found.look()
                if time.perf_counter() >= deadline:
                    break
    except KeyboardInterrupt:
        pass
    lower_s, weight, clairvoyant_weight, vectors = found.best
    wide, narrow = np.zeros((scenarios, units)), np.zeros(scenarios)
    wide[counted], narrow[counted] = weight, clairvoyant_weight
    lower_s = min(lower_s * (1 - 100 * ROUNDING), value_s(makespans_s, problem.worst))
    return CoLocationBound(lower_s, wide, narrow, vectors)


def engine_terms(
    problem: StochasticProblem, start: Ints, lines: Lines, counted: Ints
) -> tuple[Floats, Floats]:
    """t ``[scenarios, units]`` and g ``[scenarios, units, units]`` of (engine), for some scenarios.

    Args:
        problem: the scenarios.
        start: ``[units + 1]`` where units start when requests are sorted by unit.
        lines: the step time, f(n) + c K.
        counted: which scenarios.
    """
    base_s, slope_s = lines.base_s[0], float(lines.slope_s[0])
    order = np.argsort(problem.unit, kind="stable")
    unit, tokens = problem.unit[order], np.ascontiguousarray(problem.scenario_tokens[counted][:, order])
    context = problem.trace.context_tokens[order] * tokens + tokens * (tokens + 1) // 2
    read_s = slope_s * np.add.reduceat(context, start[:-1], axis=1)
    units = len(start) - 1
    alone_s, added_s = np.zeros((len(counted), units)), np.zeros((len(counted), units, units))
    for s in range(len(counted)):
        falling = np.argsort(-tokens[s], kind="stable")
        _terms(tokens[s], falling, unit, base_s, alone_s[s], added_s[s])
    return alone_s + read_s, added_s + read_s[:, None, :]


@njit(cache=True)
def _terms(tokens: Ints, falling: Ints, unit: Ints, base_s: Floats, alone_s: Floats, added_s: Floats) -> None:
    running = np.zeros(len(alone_s), np.int64)
    for rank in range(len(falling)):
        running[unit[falling[rank]]] += 1
        below = tokens[falling[rank + 1]] if rank + 1 < len(falling) else 0
        steps = tokens[falling[rank]] - below
        if steps == 0:
            continue
        for i in range(len(alone_s)):
            own = running[i]
            alone_s[i] += steps * base_s[own]
            if own < rank + 1:
                rise = steps * (base_s[rank + 1] - base_s[own]) / (rank + 1 - own)
                for j in range(len(alone_s)):
                    if j != i:
                        added_s[i, j] += rise * running[j]


class _Saddle:
    """Iterates of the primal-dual method, in units of the mean clairvoyant bound."""

    def __init__(self, alone_s: Floats, added_s: Floats, clairvoyant_s: Floats, engines: int) -> None:
        scenarios, units = alone_s.shape
        self.scale_s = float(clairvoyant_s.mean())
        self.alone, self.added = alone_s / self.scale_s, added_s / self.scale_s
        diagonal = np.arange(units)
        self.added[:, diagonal, diagonal] = 0.0
        self.known = clairvoyant_s / self.scale_s
        self.engines = engines
        self.together = np.full((units, units), 1.0 / engines)
        np.fill_diagonal(self.together, 1.0)
        self.ahead = self.together
        self.weight = np.zeros((scenarios, units + 1))  # times the number of scenarios; the last is kappa
        self.weight[:, -1] = 1.0
        self.q = np.zeros((units, units))
        self.roots = np.zeros((0, units))
        norm = max(float(np.linalg.norm(self.added[:, i], 2)) for i in range(units)) / scenarios**0.5
        self.weight_step = BALANCE / max(norm, 1e-12)
        self.together_step = min(1.0 / max(norm, 1e-12), 1.0) / BALANCE
        self.best = (
            float(clairvoyant_s.mean()),
            np.zeros_like(alone_s),
            np.full(scenarios, 1 / scenarios),
            self.roots,
        )

    def step(self) -> None:
        """One round of projected steps."""
        times = self.alone + np.einsum("sij,ij->si", self.added, self.ahead)
        times = np.concatenate([times, self.known[:, None]], axis=1)
        self.weight = onto_simplex(self.weight + self.weight_step * times)
        values, vectors = np.linalg.eigh(self.q - BALANCE * (self.ahead - 1.0 / self.engines))
        self.roots = (vectors * np.sqrt(np.maximum(values, 0.0))).T[values > 0]
        self.q = self.roots.T @ self.roots
        slope = self._pairs() / 2 - self.q
        after = np.clip(self.together - self.together_step * slope, 0.0, 1.0)
        np.fill_diagonal(after, 1.0)
        self.ahead, self.together = 2 * after - self.together, after

    def look(self) -> None:
        """Evaluate the bound that the current weights and vectors prove, and keep them if it is the best."""
        upper = np.triu_indices(len(self.q), 1)
        short = np.minimum(0.0, (self._pairs() - 2 * self.q)[upper]).sum()
        direct = ((self.weight[:, :-1] * self.alone).sum() + self.weight[:, -1] @ self.known) / len(
            self.weight
        )
        value = direct + short + self.q.sum() / self.engines - np.trace(self.q)
        if value * self.scale_s > self.best[0]:
            share = self.weight * ((1 - 1e-12) / len(self.weight))
            self.best = (
                float(value * self.scale_s), share[:, :-1], share[:, -1], self.roots * self.scale_s**0.5,
            )  # fmt: skip

    def _pairs(self) -> Floats:
        """``[units, units]`` h."""
        one_way = np.einsum("si,sij->ij", self.weight[:, :-1], self.added) / len(self.weight)
        return np.asarray(one_way + one_way.T)


def onto_simplex(rows: Floats) -> Floats:
    """The nearest point of the probability simplex to each row.

    >>> onto_simplex(np.array([[0.6, 0.6], [3.0, 0.0]]))
    array([[0.5, 0.5],
           [1. , 0. ]])
    """
    falling = -np.sort(-rows, axis=1)
    level = (np.cumsum(falling, axis=1) - 1.0) / np.arange(1, rows.shape[1] + 1)
    last = np.count_nonzero(falling > level, axis=1) - 1
    return np.asarray(np.maximum(rows - level[np.arange(len(rows)), last][:, None], 0.0))
