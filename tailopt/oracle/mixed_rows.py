r"""What bounds the seconds of one engine from below, row by row; all that it holds adds up in each.

An engine of a kind holds a set S of requests, the longest of :math:`\ell` tokens, and takes s decode steps.
With :math:`\tau(n, K) \ge a + b n + c K` on the concurrency that it can reach, P the seconds of its prefill,
and R the seconds in which it computes again what preemption lost,

.. math:: T \ge a s + \sum_{i \in S} (b L_i + c A_i) + P + R .

An engine that holds some of a prompt's samples computes the tokens that these share, once. Each of k samples
pays for a k-th of them, wherever it is, if they need not stay together.

None of the rows asks in which order requests are admitted or under which limits, be they fixed or follow the
requests that finish (:attr:`tailopt.plan.Engine.limits`): they bound every admission.

**Longest.** :math:`s \ge \ell`.

**Capacity, with a head start.** In the first :math:`\kappa \le \ell` steps request i gains at most
:math:`\min(\kappa, L_i)` tokens, however it is admitted. The others are gained in the s - κ steps left, none
of which holds more than C requests or M tokens of cache. So for any κ up to :math:`\ell`

.. math:: s \ge \kappa + \frac1C \sum_i (L_i - \kappa)^+, \qquad
          s \ge \kappa + \frac1M \sum_i \sum_{\kappa < j \le L_i} (h_i + j - 1),

where :math:`h_i` is what request i holds of its prompt, shared blocks split among its group. With κ = 0 these
are the plain :math:`\sum L / C` and :math:`\sum A' / M`; with a κ at which the cache has just filled they
count the time in which an engine that starts empty cannot fill it.

**Recompute.** Let :math:`G_i \le \kappa` be the tokens that request i has gained after κ steps. What the
unfinished ones computed of them, :math:`\sum (G_i - 1)^+`, is in the cache, which holds M, or is computed
again later, at :math:`\rho` seconds a token: R is at least :math:`\rho (\sum (G_i - 1)^+ - M)`. After step κ
the cache needs :math:`\sum_i \sum_{j > G_i} (h_i + j - 1)` token-steps. For each request the sum of the two
is concave in :math:`G_i \ge 1`, so it is least at 1 or at κ; a request that is finished by then adds nothing:

.. math:: T \ge a \kappa - \rho M + \sum_i (b L_i + c A_i) + P + \sum_{L_i > \kappa} \min\Big(
          \frac aM \sum_{j > 1} (h_i + j - 1),\;
          \frac aM \sum_{j > \kappa} (h_i + j - 1) + \rho (\kappa - 1) \Big) .

Starting everything at once fills the cache early but is paid for in recompute: that is what this row knows.

**Crowds.** Where the step time is at least :math:`f(n) + c K` with a concave f, a full cache costs more than
its affine functions know: few run together, and each pays a large share of f. Divide f by a rank J with rises
:math:`r_j = f(j) - f(j-1)`,

.. math:: f = f_1 + f_2, \qquad f_1(n) = \sum_{j \le n} (r_j - r_J)^+, \qquad
          f_2(n) = \sum_{j \le n} \min(r_j, r_J),

both concave. Over all steps :math:`f_1` takes at least :math:`\sum_j L_{(j)} (r_j - r_J)^+`, longest first,
as if all began together. For :math:`f_2`, between whole numbers a straight line, :math:`\psi(y) = y f_2(1/y)`
is concave and never falls. So if n requests run together that hold :math:`x_i` tokens, in sum at most M,

.. math:: \sum_i \psi(x_i / M) \le n \psi\Big(\frac1n \sum_i \frac{x_i}{M}\Big) \le n \psi(1/n) = f_2(n) ,

and as request i holds at least :math:`h_i + j - 1` tokens while it gains its j-th, in any order of admission

.. math:: T \ge \sum_j L_{(j)} (r_j - r_J)^+ + P
          + \sum_i \Big( c A_i + \sum_{j \le L_i} \psi\big((h_i + j - 1) / M\big) \Big) .

With an affine f and J = 1 this is the cache's row, with a J beyond all requests it ignores the cache.

**Filling.** The cache is not full from the beginning: whatever is admitted when, and preempted, those that
run while the u-th token is gained hold at most u - 1 tokens gained and :math:`H = \sum h_i` of prompts. Let a
token get back p, the less of it the fuller the cache is, and let :math:`\varphi \le \psi` be concave with

.. math:: \varphi(y) \le \frac{f_2(n)}n - p (1 - n y)
          \qquad\text{for all n with}\quad f_2(n) - n \min(r_{n+1}, r_J) < n p .

If n requests that hold K tokens run together, :math:`\sum_i \varphi(x_i / M) \le f_2(n) - n p (1 - K / M)`:
the left side is at most :math:`n \varphi(K / n M)`, which leaves the other n, and for these
:math:`n \psi(\kappa / n)` is concave, is :math:`f_2(n)` at :math:`\kappa = 1`, and its slope just below is
at least n p. All tokens get back :math:`\sum_u p (1 - (u - 1 + H) / M)^+`, at least :math:`p (M / 2 - H)` if
what the requests hold in the end fills the cache, :math:`\sum X_i \ge M` with :math:`X_i = h_i + L_i`. So
:math:`\varphi` may take the place of :math:`\psi` in the row if each request adds :math:`p h_i` less, and
then the row has :math:`p M / 2` more. Requests that do not fill the cache make it say no more than

.. math:: \frac{p M}2 + \ell \sum_j (r_j - r_J)^+ + M \max_i \frac{t_i}{X_i} ,

where :math:`t_i` is what request i adds whatever its rank: by as much as this exceeds T, the constant is
lowered for engines that are done by T.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.engine.decode_time import context_read
from tailopt.oracle.kinds import Kind
from tailopt.oracle.lagrangian_minorant import ConcaveMinorant
from tailopt.oracle.minorant import SHRINK, Minorant
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import held_prompts, own_prefill, shared_prefill

Limit = Literal["longest", "slots", "cache", "recompute"]


@dataclass(frozen=True)
class Row:
    """One bound on an engine's seconds: a constant, and something for each request that it holds.

    Attributes:
        limit: what bounds the engine's steps.
        minorant: the affine function below the step time.
        head_start: κ; the row holds for engines whose longest request has at least so many tokens. Unused
            for ``"longest"``, which takes that request's own length.
    """

    limit: Limit
    minorant: Minorant
    head_start: int = 0


@dataclass(frozen=True)
class Crowd:
    """A concave function below the step time, divided between the longest requests and the cache.

    Attributes:
        below: the function f.
        ranks: J, at most as many as f has rises.
        filling_s: p, what a token that is gained in an empty cache gets back.

    >>> crowd = Crowd(ConcaveMinorant((5.0, 3.0, 2.0), 0.0), 2)
    >>> crowd.longest_s, crowd.shared_s
    ((2.0, 0.0), (3.0, 3.0, 2.0))
    """

    below: ConcaveMinorant
    ranks: int
    filling_s: float = 0.0

    @property
    def longest_s(self) -> tuple[float, ...]:
        """Rises of the part that requests pay by rank; the last goes on."""
        rises = self.below.rises_s
        return tuple(rise - rises[self.ranks - 1] for rise in rises[: self.ranks])

    @property
    def shared_s(self) -> tuple[float, ...]:
        """Rises of the part that they pay by what they hold; the last goes on."""
        rises = self.below.rises_s
        return (rises[self.ranks - 1],) * self.ranks + rises[self.ranks :]


@dataclass(frozen=True, eq=False)
class Loads:
    """What the rows of one kind read of each request, in an order of the requests.

    Attributes:
        kind: of the engines.
        output, context: ``[n]`` output tokens and context read.
        held: ``[n]`` tokens of the prompt held while a token is gained.
        prefill_s: ``[n]`` seconds of prefill at least.
    """

    kind: Kind
    output: Ints
    context: Ints
    held: Ints
    prefill_s: Floats

    @classmethod
    def of(cls, problem: Problem, kind: Kind, requests: Ints) -> "Loads":
        """Those of the requests given, in that order."""
        trace = problem.trace
        return cls(
            kind,
            trace.output_tokens[requests],
            context_read(trace.context_tokens, trace.output_tokens)[requests],
            held_prompts(problem)[requests],
            (own_prefill(problem) + _shares(problem))[requests] / kind.shape.prefill_tokens_per_s,
        )

    def added_s(self, row: Row) -> Floats:
        """``[n]`` seconds that each request adds to the row."""
        one, steps = row.minorant, np.zeros(len(self.output))
        late = np.maximum(self.output - row.head_start, 0)
        if row.limit == "slots":
            steps = late / self.kind.max_running
        elif row.limit != "longest":
            steps = self._busy_after(row.head_start) / self.cache
        seconds = one.a_s * steps
        if row.limit == "recompute":
            again_s = max(row.head_start - 1, 0) / self.kind.shape.prefill_tokens_per_s
            never_s = one.a_s / self.cache * self._busy_after(1)
            seconds = np.where(late > 0, np.minimum(seconds + again_s, never_s), 0.0)
        return np.asarray(seconds + one.b_s * self.output + one.c_s * self.context + self.prefill_s)

    def crowd_s(self, crowd: Crowd) -> Floats:
        """``[n]`` seconds that each request adds to the row of a crowd, whatever its rank."""
        rises = np.array(crowd.shared_s)
        sums = np.append(0.0, np.cumsum(rises))
        tokens = np.arange(1, int((self.held + self.output).max()))
        together = self.cache / tokens
        whole = np.minimum(together.astype(np.int64), len(rises))
        shared_s = sums[whole] + (together - whole) * rises[np.minimum(whole, len(rises) - 1)]
        each_s = np.append(0.0, shared_s / together)
        self._fill(crowd.filling_s, rises, each_s)
        before_s = np.append(0.0, np.cumsum(each_s))
        held_s = before_s[self.held + self.output] - before_s[self.held]
        return np.asarray(
            held_s - crowd.filling_s * self.held + crowd.below.c_s * self.context + self.prefill_s
        )

    def _fill(self, filling_s: float, rises: Floats, each_s: Floats) -> None:
        """Lower ``[x]`` what a request that holds x tokens pays in a step, for what it gets back."""
        most = min(self.kind.max_running, len(self.output))
        after = rises[np.minimum(np.arange(1, most + 1), len(rises) - 1)]
        sums = np.cumsum(rises[np.minimum(np.arange(most), len(rises) - 1)])
        n = np.arange(1, most + 1)
        for together in n[sums - n * after < n * filling_s]:
            held = np.arange(min(len(each_s), self.cache // together + 1))
            line_s = sums[together - 1] / together - filling_s * (1 - together * held / self.cache)
            each_s[held] = np.minimum(each_s[held], line_s)

    def filled_s(self, crowd: Crowd, added_s: Floats, by_s: float) -> Floats:
        """``[n]`` constant of a crowd's row for engines done by ``by_s``, by the longest; infinity: none.

        Args:
            crowd: what :meth:`crowd_s` was asked for.
            added_s: ``[n]`` what it said, for requests by falling length.
            by_s: a bound on the engines' seconds.
        """
        full_s = crowd.filling_s * self.cache / 2
        if not full_s:
            return np.zeros(len(self.output))
        steepest = np.maximum.accumulate((added_s / (self.output + self.held))[::-1])[::-1]
        fitting_s = full_s + self.output * sum(crowd.longest_s) + self.cache * np.maximum(steepest, 0.0)
        constant_s = full_s - np.maximum(0.0, fitting_s - by_s)
        return np.where(constant_s >= 0, constant_s, np.inf)

    def constant_s(self, row: Row, longest: Ints) -> Floats:
        """Seconds besides, by the longest request of the engine; infinity where the row does not hold."""
        if row.limit == "longest":
            return np.asarray(row.minorant.a_s * longest)
        lost_s = self.cache / self.kind.shape.prefill_tokens_per_s if row.limit == "recompute" else 0.0
        return np.where(longest >= row.head_start, row.minorant.a_s * row.head_start - lost_s, np.inf)

    @property
    def cache(self) -> int:
        """Tokens in the whole blocks of the engine's cache."""
        shape = self.kind.shape
        return shape.kv_capacity_tokens // shape.block_tokens * shape.block_tokens

    def _busy_after(self, steps: int) -> Ints:
        """Token-steps of cache for all tokens beyond the first ``steps``."""
        first = np.minimum(self.output, steps)
        late = self.output - first
        return np.asarray(late * self.held + (self.output * (self.output - 1) - first * (first - 1)) // 2)


def _shares(problem: Problem) -> Floats:
    """``[n]`` tokens that each request pays for of those that an engine computes once for its prompt."""
    if problem.atomic:
        return np.zeros(problem.trace.n_requests)
    group = problem.trace.group
    return np.asarray(SHRINK * shared_prefill(problem) / np.bincount(group)[group])
