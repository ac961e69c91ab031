"""A study of replays for people and for programs: what was predicted, what was measured, and why."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tailopt import __version__
from tailopt.plan import Fleet
from tailopt.replay.gap import PARTS
from tailopt.replay.study import Outcome
from tailopt.report.terminal import facts
from tailopt.trace import Trace

HOW_TO_READ = (
    "Seconds of makespan. Predicted: simulated on the profile. Measured: mean of the repeats ± their "
    "standard deviation. Optimum: certified bounds of the best static plan for the true lengths. The parts "
    "add up to measured - lower bound: what the bounds leave open; what not knowing lengths cost (the best "
    "plan for the predicted ones, with the true ones, over the best); what the policy's plan lost to that; "
    "what happened otherwise than simulated; and how much longer the steps took than the profile says."
)

PACE = (
    " Measured seconds are divided by the pace: how long the steps of another batch took, just before and "
    "after, over what the profile says of them."
)


def replay_report(
    outcomes: Sequence[Outcome], trace: Trace, fleet: Fleet, notes: Sequence[tuple[str, str]] = ()
) -> list[RenderableType]:
    """The tables, in the order of the policies, and the facts under them."""
    several = len({outcome.batch for outcome in outcomes}) > 1
    paced = any((outcome.pace != 1).any() for outcome in outcomes)
    times = _table(
        f"{trace.name} on {fleet} of {fleet.profile.name}",
        ("predicted", "measured", *(["pace"] if paced else []), "off", "optimum"),
        several,
    )
    parts = _table("measured - lower bound, cause by cause", PARTS, several)
    for outcome in outcomes:
        gap = outcome.gap
        noise = "" if gap.noise_s is None else f" ± {gap.noise_s:.2f}"
        same = gap.upper_s - gap.lower_s < 0.005
        optimum = f"{gap.upper_s:.2f}" if same else f"{gap.lower_s:.2f}–{gap.upper_s:.2f}"
        who: list[str | Text] = [
            *([str(outcome.batch)] if several else []),
            Text(outcome.policy),
            Text(outcome.predictor),
        ]
        pace = [f"{outcome.pace.mean():.2f}"] if paced else []
        times.add_row(
            *who, f"{gap.simulated_s:.2f}", f"{gap.mean_s:.2f}{noise}", *pace, f"{gap.error:+.1%}", optimum
        )
        parts.add_row(*who, *(f"{seconds:+.2f}" for seconds in gap.parts().values()))
    runs = [run for outcome in outcomes for run in (outcome.simulated, *outcome.measured)]
    engines = [*fleet.engines, *(engine for run in runs for engine in run.engines)]
    shapes = {tp: fleet.profile.shape(tp) for tp in sorted({engine.tp for engine in engines})}
    lines = [
        *((f"TP{tp}", f"{shape.step_time}; {shape.fit}") for tp, shape in shapes.items()),
        *notes,
        ("how to read", HOW_TO_READ + (PACE if paced else "")),
    ]
    return [times, Text(), parts, Text(), facts(lines)]


def _table(title: str, heads: Sequence[str], several: bool) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    if several:
        table.add_column("batch", justify="right")
    table.add_column("policy", overflow="fold")
    table.add_column("predictor", overflow="fold")
    for head in heads:
        table.add_column("\n".join(head.split(" ", 1)), justify="right", no_wrap=True)
    return table


def replay_json(outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> str:
    """All numbers as one JSON document; ``about`` holds what they are of."""
    document = {
        "tailopt": __version__,
        **about,
        "outcomes": [
            {
                **outcome.row(),
                "all_measured_s": outcome.gap.measured_s.tolist(),
                "records": [path.name for path in outcome.records],
            }
            for outcome in outcomes
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
