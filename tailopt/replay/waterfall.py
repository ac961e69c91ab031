"""The gap of measured runs as waterfalls: from the lower bound up to the measurement, cause by cause."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tailopt.files import whole_file
from tailopt.replay.gap import PARTS
from tailopt.replay.study import Outcome
from tailopt.report.figure import (
    DOTS_PER_INCH,
    FAINT,
    INK,
    QUIET,
    SHAPES,
    SMALL,
    STYLE,
    require_figures,
    suffix_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
WIDTH_IN, HEIGHT_IN = 3.6, 2.8


def write_waterfall(outcomes: Sequence[Outcome], path: str | Path, *, title: str = "") -> None:
    """Draw one waterfall per policy and predictor, the mean over batches, as PNG or SVG, whole or not at all.

    Raises:
        InputError: if the path ends in neither, cannot be written, or matplotlib is not installed.
    """
    suffix = suffix_of(path)
    require_figures()
    import matplotlib as mpl

    metadata: dict[str, Any] = {"Date": None} if suffix == ".svg" else {"Software": None}
    with mpl.rc_context(STYLE), whole_file(path) as temporary:
        figure = waterfall_figure(outcomes, title=title)
        figure.savefig(temporary, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=metadata)


def waterfall_figure(outcomes: Sequence[Outcome], *, title: str = "") -> "Figure":
    """The figure, for further work with matplotlib."""
    from matplotlib.figure import Figure

    cells: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.policy, outcome.predictor), []).append(outcome)
    rows = -(-len(cells) // COLUMNS)
    columns = min(len(cells), COLUMNS)
    figure = Figure(figsize=(WIDTH_IN * columns, HEIGHT_IN * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    highest_s = 0.0
    for axes, ((policy, predictor), some) in zip(grid.flat, cells.items(), strict=False):
        highest_s = max(highest_s, _draw(axes, some))
        axes.set_title(f"{policy} · {predictor}", loc="left", fontsize=9, color=INK)
    for axes in list(grid.flat)[len(cells) :]:
        axes.set_visible(False)
    grid[0, 0].set_ylim(0, 1.12 * highest_s)  # they share it; the numbers need room above the bars
    for axes in grid[:, 0]:
        axes.set_ylabel("makespan (s)")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10)
    return figure


def _draw(axes: "Axes", outcomes: Sequence[Outcome]) -> float:
    """The bars, each from where the one before it ended; the noise of execution on the last. The highest."""
    lower_s = float(np.mean([outcome.gap.lower_s for outcome in outcomes]))
    parts = {part: float(np.mean([o.gap.parts()[part] for o in outcomes])) for part in PARTS}
    measured_s = float(np.mean([outcome.gap.mean_s for outcome in outcomes]))
    noise = [outcome.gap.noise_s for outcome in outcomes if outcome.gap.noise_s is not None]
    axes.bar(0, lower_s, color=QUIET, width=0.7)
    level = highest_s = lower_s
    for place, (part, colour) in enumerate(zip(PARTS, SHAPES, strict=False), start=1):
        axes.bar(place, parts[part], bottom=level, color=colour, width=0.7)
        axes.plot([place - 1.35, place + 0.35], [level, level], color=QUIET, linewidth=0.6)
        text = f"{parts[part]:+.2f}"
        top = max(level, level + parts[part])
        axes.annotate(text, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=SMALL)
        level += parts[part]
        highest_s = max(highest_s, level)
    last = len(PARTS) + 1
    axes.bar(last, measured_s, color=QUIET, width=0.7, yerr=np.mean(noise) if noise else None)
    names = ["lower\nbound", *(part.replace(" ", "\n") for part in PARTS), "measured"]
    axes.set_xticks(range(len(names)), names, fontsize=6.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    return max(highest_s, measured_s + float(np.mean(noise) if noise else 0))
