"""The optimal assignment as a figure: the length of every request on its engine, and each engine's time.

Engines are rows, the one with the longest request on top. Left, every request is a tick at its length; the
line through the longest request of each engine is the staircase. Right, when each engine is done, beside the
certified bounds.

Equal certificates give equal files: SVG ids are salted with a constant, and no date is written.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.errors import InputError
from tailopt.files import whole_file
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.problem import Problem
from tailopt.report.terminal import percent
from tailopt.simulate.simulator import simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")

SHAPES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
"""Colours of the shapes, by rising degree: Okabe and Ito's, which the colour-blind can tell apart."""

STAIRCASE, INK, QUIET, FAINT = "#D55E00", "#222222", "#555555", "#DDDDDD"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "tailopt",
    "svg.fonttype": "path",
}

WIDTH_IN, LEAST_HEIGHT_IN, MOST_HEIGHT_IN = 10.0, 3.2, 12.0
ROW_IN, LABEL_IN, EDGES_IN = 0.45, 0.15, 1.4  # of a row, of a label, of all that is no row
DOTS_PER_INCH = 150
BAR = 0.62  # of a row's height, for ticks and bars
SMALL = 8  # points


def require_figures() -> None:
    """Raise InputError with the way to install matplotlib if it is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("figures need matplotlib: pip install 'tailopt[figures]'") from None


def suffix_of(path: str | Path) -> str:
    """The ending of a figure's name, lower case; InputError if there is no such kind of figure.

    >>> suffix_of("plan.SVG")
    '.svg'
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{path}: expected the name of a figure to end in {' or '.join(SUFFIXES)}")
    return suffix


def write_figure(
    certificate: Certificate,
    problem: Problem,
    path: str | Path,
    *,
    lower_s: float | None = None,
    title: str = "",
) -> None:
    """Draw the plan of a certificate, as PNG or SVG by the ending of the path, whole or not at all.

    Args:
        certificate: bounds and plan.
        problem: what they are of.
        path: where to.
        lower_s: the bound to draw, that of the certificate by default.
        title: what the batch and the fleet are.

    Raises:
        InputError: if the path ends in neither, cannot be written, or matplotlib is not installed.
    """
    suffix = suffix_of(path)
    require_figures()
    import matplotlib as mpl

    metadata: dict[str, Any] = {"Date": None} if suffix == ".svg" else {"Software": None}
    with mpl.rc_context(STYLE), whole_file(path) as temporary:
        figure = assignment_figure(certificate, problem, lower_s=lower_s, title=title)
        figure.savefig(temporary, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=metadata)


def assignment_figure(
    certificate: Certificate, problem: Problem, *, lower_s: float | None = None, title: str = ""
) -> "Figure":
    """The figure, for further work with matplotlib; the arguments are those of :func:`write_figure`."""
    from matplotlib.figure import Figure

    trace, fleet, plan = problem.trace, problem.fleet, certificate.plan
    run = simulate(trace, fleet, plan)
    engines = range(len(fleet.engines))
    lengths = [-np.sort(-trace.output_tokens[plan.engine_of == e]) for e in engines]
    done_s = np.array([run.finish_s[plan.engine_of == e].max(initial=0.0) for e in engines])
    longest = np.array([own.max(initial=0) for own in lengths])
    rows = np.lexsort((-done_s, -longest)).tolist()

    row_in = min(ROW_IN, (MOST_HEIGHT_IN - EDGES_IN) / len(rows))
    size_in = (WIDTH_IN, max(LEAST_HEIGHT_IN, EDGES_IN + row_in * len(rows)))
    figure = Figure(figsize=size_in, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    degrees = sorted({engine.tp for engine in fleet.engines})
    colour_of = {tp: SHAPES[place % len(SHAPES)] for place, tp in enumerate(degrees)}
    colours = [colour_of[fleet.engines[e].tp] for e in rows]

    _lengths(left, [lengths[e] for e in rows], colours)
    lower_s = certificate.lower_s if lower_s is None else lower_s
    _times(right, done_s[rows], colours, lower_s, certificate.upper_s)
    labels = [f"{e} · TP{fleet.engines[e].tp} · {len(lengths[e]):,}" for e in rows]
    shown = range(0, len(rows), int(np.ceil(LABEL_IN / row_in)))
    left.set_yticks(list(shown), [labels[row] for row in shown])
    left.set_ylim(len(rows) - 0.5, -0.5)
    left.annotate(
        "engine · shape · requests", (0, 1), (-6, 4), "axes fraction", "offset points",
        ha="right", va="bottom", fontsize=SMALL, color=QUIET,
    )  # fmt: skip
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10)
    return figure


def _lengths(axes: "Axes", lengths: list[Ints], colours: list[str]) -> None:
    """Requests in rows, as ticks at their lengths, and the staircase."""
    for row, (own, colour) in enumerate(zip(lengths, colours, strict=True)):
        axes.vlines(own, row - BAR / 2, row + BAR / 2, color=colour, linewidth=0.8, alpha=0.7)
    leaders = [int(own.max(initial=0)) for own in lengths]
    axes.stairs(
        leaders, np.arange(len(leaders) + 1) - 0.5, orientation="horizontal", baseline=None,
        color=STAIRCASE, linewidth=1.6, label="longest request of the engine",
    )  # fmt: skip
    axes.set_xlim(0, 1.03 * max(leaders))
    axes.set_xlabel("output tokens, one tick a request")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _plain(axes)


def _times(axes: "Axes", done_s: Floats, colours: list[str], lower_s: float, upper_s: float) -> None:
    """When each engine is done, and the bounds on the makespan."""
    axes.barh(np.arange(len(done_s)), done_s, height=BAR, color=colours, alpha=0.75, linewidth=0)
    axes.axvline(upper_s, color=STAIRCASE, linewidth=1.6, label=f"this plan {upper_s:,.2f} s")
    axes.axvline(
        lower_s, color="black", linewidth=1.6, linestyle=(0, (3, 3)),
        label=f"lower bound {lower_s:,.2f} s",
    )  # fmt: skip
    axes.set_xlim(0, 1.04 * upper_s)
    axes.set_xlabel(f"time until the engine is done (s); gap {percent(upper_s / lower_s - 1)}")
    axes.xaxis.set_major_formatter("{x:,.0f}" if upper_s >= 10 else "{x:g}")
    _plain(axes)


def _plain(axes: "Axes") -> None:
    """No frame, a faint grid, the legend above."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize=SMALL,
        borderaxespad=0.2, handlelength=1.8, columnspacing=1.2,
    )  # fmt: skip
