r"""Compare policies under predictors on paired batches, against a certified optimum.

Every policy carries out the same batches: batch b draws the same groups, the same predictions and the same
random order for all of them, so what differs between two policies is the policies. Per batch there is one
certificate: the least makespan of any *static* plan lies in [lower_s, upper_s]; and a bound ``lower_any_s``
that no policy whatever can beat, not even one that moves requests while they run.

The summary of a policy and predictor over B batches is

=================  ===========================================================================================
``makespan_s``     the mean makespan
``over_static``    the mean of makespan / lower_s: the policy is at most this far from the best static plan
``over_any``       the mean of makespan / lower_any_s: at most this far from the best that anyone could do
``speedup``        :math:`\exp(\bar d)`, the geometric mean of the paired ratios uniform / policy, with
                   :math:`d_b = \ln(T^{uniform}_b / T_b)`
``speedup_t``      its 95 % interval :math:`\exp(\bar d \pm t_{0.975, B-1}\, s_d / \sqrt{B})`; none for B = 1
``speedup_boot``   its 95 % interval by the percentile bootstrap over batches; none for B = 1
=================  ===========================================================================================

The intervals say how far the mean over batches *drawn from this trace* may be off. They do not hold the error
of the engine model. Makespans are of equal work: a run in which a request did not get all the tokens that the
trace has of it, cut off or given up, is refused before any ratio. ``over_static`` may fall below 1 for what
is not a static plan: the shared queue, and policies that are asked again while the batch runs. Both bounds
count one token per request and step, so where engines speculate they are those of the same fleet without
speculation, and both ratios may fall below 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import polars as pl

from tailopt.arrays import Floats
from tailopt.errors import InputError
from tailopt.oracle.any_bound import lower_any_s
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.plan import Fleet, View
from tailopt.policies import NamedPolicy, resolve_policy
from tailopt.predict import NamedPredictor, resolve_predictor
from tailopt.run import Run
from tailopt.simulate import simulate_policy
from tailopt.trace import Trace
from tailopt.trace.transforms import Batch, sample_batches

BASELINE = "uniform"
"""The policy that speed-ups are over; it is always run."""

NO_PREDICTOR = "-"
"""Stands for the predictor of a policy that ignores predictions."""

RESAMPLES = 10_000
"""Bootstrap resamples."""

COLUMNS = (
    "batch", "policy", "predictor", "makespan_s", "lower_s", "upper_s", "lower_any_s", "idle_share",
    "tokens_per_gpu_s", "preemptions",
)  # fmt: skip
"""Of :attr:`Comparison.rows`: seconds, shares between 0 and 1, preemptions of all requests together."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What was compared and what came out.

    Attributes:
        trace: what batches were drawn from.
        fleet: what they ran on.
        prompts, samples: groups of a batch, samples of a group.
        atomic: whether the samples of a group had to stay on one engine.
        seed: what the batches were drawn with.
        rows: one row per batch, policy and predictor, with the columns ``COLUMNS``.
        certificates: one row per batch: ``batch, lower_s, upper_s, gap, status, method, lower_any_s``.
        degrees: rising tensor-parallel degrees of all engines that ever were, also after a switch.
        speculating: policies with engines that speculated.
        switching_free: policies that changed the fleet, though the profile has no cost of sleep and wake.
    """

    trace: Trace
    fleet: Fleet
    prompts: int
    samples: int
    atomic: bool
    seed: int
    rows: pl.DataFrame
    certificates: pl.DataFrame
    degrees: tuple[int, ...]
    speculating: tuple[str, ...] = ()
    switching_free: tuple[str, ...] = ()

    @cached_property
    def summary(self) -> pl.DataFrame:
        """One row per policy and predictor, in the order given; columns as the module's docstring says."""
        cells = self.rows.partition_by("policy", "predictor", maintain_order=True)
        baseline = next(cell for cell in cells if cell["policy"][0] == BASELINE)["makespan_s"].to_numpy()
        picks = np.random.default_rng([self.seed, 0xB007]).integers(
            len(baseline), size=(RESAMPLES, len(baseline))
        )
        return pl.DataFrame([_summarize(cell, baseline, picks) for cell in cells])


def compare(
    trace: Trace,
    fleet: Fleet,
    policies: Sequence[str | NamedPolicy],
    predictors: Sequence[str | NamedPredictor],
    *,
    batches: int,
    prompts: int,
    samples: int,
    seed: int,
    atomic: bool,
    progress: Callable[[int, int], None] | None = None,
    on_run: Callable[[int, str, str, Batch, Run], None] | None = None,
) -> Comparison:
    """Run every policy under every predictor on the same batches.

    Args:
        trace: what batches are drawn from (:func:`tailopt.trace.transforms.sample_batches`).
        fleet: what runs them.
        policies, predictors: specs (:mod:`tailopt.spec`) or what they name. A policy that ignores predictions
            is run once, and ``uniform`` is run in any case.
        batches, prompts, samples: how many batches, groups of a batch, samples of a group.
        seed: of all that is drawn.
        atomic: whether the samples of a group must stay on one engine.
        progress: called with the batches done and all batches to do.
        on_run: called with batch number, policy, predictor, batch and run of each run.

    Raises:
        InputError: if a policy or predictor is unknown or goes wrong, the trace is too small for the batches,
            a policy needs predictions and there is no predictor, a request does not fit an engine, or a
            policy leaves work undone (:func:`check_work`).

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Engine
    >>> fleet = Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1),) * 2, gpus=2)
    >>> trace = Trace.of([[900, 800], [100, 200], [40, 30], [500, 300]], prompt_tokens=100)
    >>> drawn = {"batches": 3, "prompts": 4, "samples": 2, "seed": 0}
    >>> found = compare(trace, fleet, ["lpt"], ["truth"], **drawn, atomic=True)
    >>> found.summary.select("policy", "predictor").rows()
    [('uniform', '-'), ('lpt', 'truth')]
    >>> bool((found.rows["makespan_s"] >= found.rows["lower_s"] * (1 - 1e-9)).all())
    True
    """
    cells = list(_cells(policies, predictors))
    drawn = sample_batches(trace, batches=batches, prompts=prompts, samples=samples, seed=seed)
    plain = replace(fleet, engines=tuple(replace(engine, speculation=None) for engine in fleet.engines))
    rows, certificates = [], []
    for index, batch in enumerate(drawn):
        outcomes = list(_run(index, batch, fleet, cells, atomic, on_run))
        certificate = solve(Problem(batch.trace, plain, atomic))
        bounds = {
            "lower_s": certificate.lower_s,
            "upper_s": certificate.upper_s,
            "lower_any_s": lower_any_s(batch.trace, fleet).lower_s,
        }
        rows += [{"batch": index, **outcome, **bounds} for outcome in outcomes]
        certificates.append(
            {
                "batch": index,
                **bounds,
                "gap": certificate.gap,
                "status": certificate.status,
                "method": certificate.method,
            }
        )
        if progress is not None:
            progress(index + 1, len(drawn))
    found = pl.DataFrame(rows)
    degrees = tuple(found["degrees"].explode().unique().sort())
    remarks = (_policies(found.filter(remark)) for remark in ("speculates", "switches_free"))
    return Comparison(
        trace, fleet, prompts, samples, atomic, seed,
        found.select(COLUMNS), pl.DataFrame(certificates), degrees, *remarks,
    )  # fmt: skip


def _policies(rows: pl.DataFrame) -> tuple[str, ...]:
    return tuple(rows["policy"].unique(maintain_order=True))


Cell = tuple[NamedPolicy, NamedPredictor | None]


def _cells(
    policies: Sequence[str | NamedPolicy], predictors: Sequence[str | NamedPredictor]
) -> Iterator[Cell]:
    """Each policy with each predictor it needs, the baseline first unless given elsewhere; nothing twice."""
    named = [one if isinstance(one, NamedPolicy) else resolve_policy(one) for one in policies]
    if BASELINE not in [policy.name for policy in named]:
        named.insert(0, resolve_policy(BASELINE))
    told = {
        predictor.name: predictor
        for predictor in (
            one if isinstance(one, NamedPredictor) else resolve_predictor(one) for one in predictors
        )
    }
    for policy in {policy.name: policy for policy in named}.values():
        if not policy.needs_predictions:
            yield policy, None
        elif told:
            yield from product([policy], told.values())
        else:
            raise InputError(
                f"policy {policy.name}: needs predicted lengths, expected at least one predictor"
            )


def _run(
    index: int,
    batch: Batch,
    fleet: Fleet,
    cells: Sequence[Cell],
    atomic: bool,
    on_run: Callable[[int, str, str, Batch, Run], None] | None,
) -> Iterator[dict[str, object]]:
    """What each cell makes of one batch."""
    predictors = {predictor.name: predictor for _, predictor in cells if predictor is not None}
    told = {name: (predictor(batch), predictor.scenarios(batch)) for name, predictor in predictors.items()}
    for policy, predictor in cells:
        tokens, scenarios = (None, None) if predictor is None else told[predictor.name]
        view = View.at_start(
            batch.trace, fleet, tokens, scenario_tokens=scenarios, atomic=atomic, seed=batch.seed
        )
        run = simulate_policy(batch.trace, policy, view)
        told_by = NO_PREDICTOR if predictor is None else predictor.name
        check_work(run, batch.trace, index, policy.name, told_by)
        if on_run is not None:
            on_run(index, policy.name, told_by, batch, run)
        yield {
            "policy": policy.name,
            "predictor": told_by,
            "makespan_s": run.makespan_s,
            "idle_share": run.idle_share,
            "tokens_per_gpu_s": run.tokens_per_gpu_s,
            "preemptions": int(run.preemptions.sum()),
            "degrees": [engine.tp for engine in (*fleet.engines, *run.engines)],
            "speculates": any(engine.speculation is not None for engine in run.engines),
            "switches_free": _switches_free(run),
        }


def check_work(run: Run, trace: Trace, batch: int, policy: str, predictor: str = NO_PREDICTOR) -> None:
    """Raise InputError unless the run may be compared: all tokens of the trace, in a time above zero.

    Makespans say something only of equal work, and a policy can have less of it: by limits on tokens, by a
    deadline, by dropping requests.

    >>> from tailopt.plan import Plan
    >>> from tailopt.policies.example import example_view
    >>> trace, fleet = Trace.of([[30, 9]], prompt_tokens=10), example_view([[1]]).fleet
    >>> plan = Plan(fleet.engines, [0, 1], [0, 1], max_tokens=[5, 9])
    >>> check_work(simulate_policy(trace, lambda _: plan, View.at_start(trace, fleet)), trace, 0, "short")
    Traceback (most recent call last):
    ...
    tailopt.errors.InputError: policy short, batch 0: 1 of 2 requests did not get all their tokens: 25 of 39 \
tokens were not generated; expected the whole batch, as of every policy that is compared
    """
    who = f"policy {policy}{'' if predictor == NO_PREDICTOR else f' under {predictor}'}, batch {batch}"
    less = run.output_tokens != trace.output_tokens
    if less.any():
        missing = int((trace.output_tokens - run.output_tokens).sum())
        raise InputError(
            f"{who}: {np.count_nonzero(less)} of {trace.n_requests} requests did not get all their tokens: "
            f"{missing} of {trace.total_output_tokens} tokens were not generated; expected the whole batch, "
            "as of every policy that is compared"
        )
    if not run.makespan_s > 0:
        raise InputError(f"{who}: took {run.makespan_s} s, expected a time above zero")


def _switches_free(run: Run) -> bool:
    """Whether engines were opened after the start, and no engine took any time to sleep or to wake."""
    switched = len(run.engines) > len(run.fleet.engines)
    return switched and not (run.spans.sleep_s.any() or run.spans.wake_s.any())


def _summarize(cell: pl.DataFrame, baseline_s: Floats, picks: np.ndarray) -> dict[str, object]:
    makespan_s = cell["makespan_s"].to_numpy()
    log_ratio = np.log(baseline_s / makespan_s)
    t_low, t_high = t_interval(log_ratio)
    boot_low, boot_high = bootstrap_interval(log_ratio, picks)
    return {
        "policy": cell["policy"][0],
        "predictor": cell["predictor"][0],
        "batches": len(cell),
        "makespan_s": float(makespan_s.mean()),
        "over_static": float((makespan_s / cell["lower_s"].to_numpy()).mean()),
        "over_any": float((makespan_s / cell["lower_any_s"].to_numpy()).mean()),
        "speedup": float(np.exp(log_ratio.mean())),
        "speedup_t_low": t_low,
        "speedup_t_high": t_high,
        "speedup_boot_low": boot_low,
        "speedup_boot_high": boot_high,
        "idle_share": float(cell["idle_share"].to_numpy().mean()),
        "tokens_per_gpu_s": float(cell["tokens_per_gpu_s"].to_numpy().mean()),
        "preemptions": float(cell["preemptions"].to_numpy().mean()),
    }


def t_interval(log_ratio: Floats) -> tuple[float | None, float | None]:
    """95 % t-interval of the geometric mean ratio, from the logarithms; none from a single one.

    >>> [round(end, 3) for end in t_interval(np.log([1.0, 1.2, 1.1]))]
    [0.875, 1.376]
    """
    from scipy.special import stdtrit

    n = len(log_ratio)
    if n < 2:
        return None, None
    half = float(stdtrit(n - 1, 0.975)) * float(log_ratio.std(ddof=1)) / n**0.5
    return float(np.exp(log_ratio.mean() - half)), float(np.exp(log_ratio.mean() + half))


def bootstrap_interval(log_ratio: Floats, picks: np.ndarray) -> tuple[float | None, float | None]:
    """95 % percentile-bootstrap interval of the geometric mean ratio; ``picks``: ``[resamples, n]`` indices.

    >>> bootstrap_interval(np.log([1.0, 4.0]), np.array([[0, 0], [0, 1], [1, 1]]))[0] < 1.1
    True
    """
    if len(log_ratio) < 2:
        return None, None
    low, high = np.quantile(log_ratio[picks].mean(axis=1), [0.025, 0.975])
    return float(np.exp(low)), float(np.exp(high))
