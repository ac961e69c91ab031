"""A comparison for people: one table, and under it what it rests on."""

from collections.abc import Iterable, Sequence

import numpy as np
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tailopt import __version__
from tailopt.arrays import Floats
from tailopt.compare import BASELINE, NO_PREDICTOR, Comparison
from tailopt.trace.statistics import TraceStatistics, statistics

SYNTHETIC = "SYNTHETIC: drawn from a distribution, not observed"

HOW_TO_READ = (
    "Means over batches, simulated. × best static: makespan over a proven lower bound of every static plan, "
    "so a policy is at most this far from the best one. × any bound: over a bound that nothing can beat, "
    "whatever it knows or moves. Speed-up: geometric mean of the paired ratios uniform / policy, with its "
    "95 % t-interval over batches. Idle: share of GPU time without a request."
)

AS_THEY_RUN = ("shared_queue", "dyn", "split", "steal", "rebalance")
"""Policies that are no static plan, by the name that their spec begins with."""

EXACT = 1e-3
"""Gap of a certificate from which on ``× best static`` is shown as what it is, an upper bound."""

NO_STATIC_PLAN = "{} is no static plan: it decides as it runs, so it may get below 1."

SPECULATING = (
    "engines of {} speculate. The bounds are those of the same fleet without speculation, so both ratios may "
    "get below 1 for it."
)

SWITCHING_FREE = (
    "switching is free in this profile: its sleep_s and wake_s are 0, so {} paid for nothing but moves and "
    "the ends of steps."
)

MIXED = (
    "Step times are those of {model}, lengths those of whatever model wrote the trace: unless the two are "
    "the same, read the ratios, not the seconds. Contexts and concurrencies outside the range of the fit are "
    "extrapolated."
)

LEFT_OUT = (
    "host time, speculation and the cost of changing the fleet, where the engine's profile has no numbers "
    "for them. A difference smaller than the engine's fit is off says nothing."
)


def comparison_report(comparison: Comparison, notes: Sequence[str] = ()) -> list[RenderableType]:
    """The table, by rising makespan, and the facts under it; ``notes`` are further lines on the trace."""
    return [_table(comparison), Text(), facts(_facts(comparison, notes))]


def facts(lines: Iterable[tuple[str, str]]) -> Table:
    """A grid of labels and the text that belongs to each."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(label, Text(text))
    return grid


def _table(comparison: Comparison) -> Table:
    trace, fleet = comparison.trace, comparison.fleet
    mark = " (SYNTHETIC)" if trace.synthetic else ""
    table = Table(
        title=f"{trace.name}{mark} on {fleet} of {fleet.profile.name}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    at_most = "≤" if _gaps(comparison).max() > EXACT else ""
    table.add_column("policy", overflow="fold")
    table.add_column("predictor", overflow="fold")
    for header in ("makespan\n(s)", "× best\nstatic", "× any\nbound", "speed-up", "95 %\ninterval", "idle"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in comparison.summary.sort("makespan_s", maintain_order=True).iter_rows(named=True):
        low, high = row["speedup_t_low"], row["speedup_t_high"]
        interval = "" if low is None or row["policy"] == BASELINE else f"{low:.3f}–{high:.3f}"
        table.add_row(
            Text(row["policy"]),
            Text(row["predictor"]),
            f"{row['makespan_s']:.1f}",
            f"{at_most}{row['over_static']:.3f}",
            f"{row['over_any']:.3f}",
            f"{row['speedup']:.3f}",
            interval,
            f"{row['idle_share']:.0%}",
        )
    return table


def _facts(comparison: Comparison, notes: Sequence[str]) -> list[tuple[str, str]]:
    trace, fleet = comparison.trace, comparison.fleet
    profile = fleet.profile
    groups = "whole groups stay together" if comparison.atomic else "samples go anywhere"
    lines = [
        ("", HOW_TO_READ),
        (
            "Batches",
            f"{len(comparison.certificates)} of {comparison.prompts} prompts × {comparison.samples} samples, "
            f"{groups}; seed {comparison.seed}",
        ),
        ("Trace", f"{trace.name}: {describe(statistics(trace))}"),
        ("", f"{trace.source}; licence {trace.licence or 'not stated'}"),
    ]
    if trace.synthetic:
        lines.append(("", SYNTHETIC))
    lines += [("", note) for note in notes]
    lines.append(
        (
            "Engine",
            f"{profile.name}: {profile.model} on {profile.hardware}, "
            f"{profile.engine} {profile.engine_version}; {fleet} on {fleet.gpus} GPUs",
        )
    )
    for tp in comparison.degrees:
        shape = profile.shape(tp)
        lines.append(("", f"TP{tp}: τ(n, K) = {shape.step_time}"))
        if shape.fit:
            lines.append(("", f"TP{tp}: {shape.fit}"))
    lines += [("", source) for source in profile.sources]
    lines.append(("", MIXED.format(model=profile.model)))
    unused = fleet.gpus - sum(engine.tp for engine in fleet.engines)
    if unused:
        lines.append(("", f"{unused} of the {fleet.gpus} GPUs belong to no engine and count as idle"))
    lines += [
        ("Optimum", _certificates(comparison)),
        *_preemptions(comparison),
        *(("Drafts", SPECULATING.format(policy)) for policy in comparison.speculating),
        *(("Switches", SWITCHING_FREE.format(policy)) for policy in comparison.switching_free),
        ("Left out", LEFT_OUT),
        ("Version", f"tailopt {__version__}"),
    ]
    return lines


def describe(found: TraceStatistics) -> str:
    """One line on a trace's lengths; a number that the cap makes a lower bound has a ≥ before it."""

    def tokens(name: str) -> str:
        return f"{'≥ ' if name in found.lower_bounds else ''}{getattr(found, name):,.0f}"

    capped = f"{found.capped_share:.1%} at the cap" if found.capped_share else "no cap known"
    share = found.between_prompt_share
    between = "not defined" if share is None else f"{share:.0%} (ICC {found.icc:.2f})"
    return (
        f"{found.n_requests} responses to {found.n_prompts} prompts; output tokens P50 {tokens('p50')}, "
        f"P90 {tokens('p90')}, P99 {tokens('p99')}, max {tokens('max')}; "
        f"{capped}; between-prompt share of variance {between}"
    )


def _certificates(comparison: Comparison) -> str:
    certificates = comparison.certificates
    gap = _gaps(comparison)
    counts = certificates["status"].value_counts().sort("status")
    statuses = ", ".join(f"{count} {status}" for status, count in counts.iter_rows())
    said = (
        f"best static plan, certified per batch; gap between its bounds: median {percent(np.median(gap))}, "
        f"worst {percent(gap.max())}; {statuses}."
    )
    if gap.max() > EXACT:
        said += f" The best static plan may take up to {percent(gap.max())} more than its bound, hence the ≤."
    names = comparison.summary["policy"].unique(maintain_order=True)
    for name in AS_THEY_RUN:
        if any(name == text.partition("(")[0].strip() for text in names):
            said += f" {NO_STATIC_PLAN.format(name)}"
    return said


def _gaps(comparison: Comparison) -> Floats:
    return comparison.certificates["gap"].to_numpy()


def _preemptions(comparison: Comparison) -> list[tuple[str, str]]:
    """Which policy preempted most, if any did: then the KV cache was too small for it."""
    worst = comparison.summary.sort("preemptions", descending=True, maintain_order=True).row(0, named=True)
    if not worst["preemptions"]:
        return []
    under = "" if worst["predictor"] == NO_PREDICTOR else f" under {worst['predictor']}"
    return [
        (
            "Preempted",
            f"up to {worst['preemptions']:,.1f} requests per batch for want of KV cache, by "
            f"{worst['policy']}{under}",
        )
    ]


def percent(share: float) -> str:
    """A small share, in per cent with two significant digits.

    >>> percent(0.0123), percent(1e-11), percent(0.2)
    ('1.2%', '0%', '20%')
    """
    return "0%" if share < 1e-8 else f"{100 * share:.2g}%"
