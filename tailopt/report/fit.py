"""A fit for people: every form of step time, how it did where it had to predict, and which one was chosen."""

from collections.abc import Mapping

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tailopt.replay.fit import Fit
from tailopt.report.terminal import facts


def fit_report(fits: Mapping[int | None, Fit]) -> list[RenderableType]:
    """One table and its facts per tensor-parallel degree (None: not known)."""
    parts: list[RenderableType] = []
    for tp, fit in fits.items():
        if parts:
            parts.append(Text())
        parts += [_table(fit), Text(), facts(_facts(tp, fit))]
    return parts


def _table(fit: Fit) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("Form", no_wrap=True)
    for header in ("held out", "worst", "noise"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("τ(n, K)", overflow="fold")
    for one in fit.kinds:
        mark = " *" if one is fit.best else ""
        form = one.form
        table.add_row(
            one.kind + mark, f"{one.error:.2%}", f"{one.worst:.2%}", f"{form.noise:.2%}", str(form.step_time)
        )
    return table


def _facts(tp: int | None, fit: Fit) -> list[tuple[str, str]]:
    low, high = fit.prefill_range
    how = "given" if fit.prefill_given else f"from steps of {low:,} to {high:,} prompt tokens"
    rows = [] if tp is None else [("Shape", f"TP{tp}")]
    rows += [
        (
            "Steps",
            f"{fit.steps:,}, n {fit.n_range[0]} to {fit.n_range[1]}, "
            f"context {fit.context_range[0]:,.0f} to {fit.context_range[1]:,.0f} tokens a request",
        ),
        (
            "Chosen (*)",
            f"{fit.best.kind}: median residual {fit.residual:.2%}; all steps together took "
            f"{fit.total_ratio - 1:+.2%} against it",
        ),
        ("Prefill", f"{fit.prefill_tokens_per_s:,.0f} tokens/s, {how}"),
        (
            "Held out",
            "mean and worst relative error over cells of (n, context) that the form had not seen; outside of "
            "what was measured it is extrapolated",
        ),
    ]
    return rows
