"""The certified optimum of a batch: for people a table with what it rests on, for other programs JSON."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tailopt import __version__
from tailopt.oracle.certificate import BoundArgument, Certificate, Status, status_of
from tailopt.oracle.class_bound import ClassBound
from tailopt.oracle.one_switch import SwitchCertificate
from tailopt.oracle.problem import Problem
from tailopt.oracle.shapes import Cut, ShapesCertificate
from tailopt.report.terminal import MIXED, SYNTHETIC, describe, facts, percent
from tailopt.simulate.simulator import simulate
from tailopt.trace import Trace
from tailopt.trace.statistics import statistics

MOST_ENGINES, MOST_CUTS = 32, 40
"""Rows of the tables; what is left out is counted."""

UNFIT = "a request fits nowhere"

INTERRUPTED = "stopped by Ctrl-C: this is the best found until then"


@dataclass(frozen=True, eq=False)
class Answer:
    """What was asked and what came out.

    Attributes:
        source: the trace that the batch is from.
        drawn: how it was drawn, in words.
        problem: batch, fleet (the best one, if shapes were compared), and whether groups are atomic.
        certificate: of the plan on that fleet.
        shapes: of all shapes, if they were compared.
        seed: of all that was drawn.
        stopped: whether it was cut short by Ctrl-C.
        switch: with at most one switch of shapes, if that was asked.
    """

    source: Trace
    drawn: str
    problem: Problem
    certificate: Certificate
    shapes: ShapesCertificate | None
    seed: int
    stopped: bool
    switch: SwitchCertificate | None = None

    @property
    def lower_s(self) -> float:
        """No static plan is done earlier, on this fleet or, if shapes were compared, on any."""
        return self.certificate.lower_s if self.shapes is None else self.shapes.lower_s

    @property
    def upper_s(self) -> float:
        """Makespan of the plan."""
        return self.certificate.upper_s

    @property
    def gap(self) -> float:
        """``upper_s / lower_s - 1``."""
        return self.upper_s / self.lower_s - 1

    @property
    def status(self) -> Status:
        """As that of a certificate."""
        return status_of(self.lower_s, self.upper_s)

    @property
    def bound(self) -> BoundArgument:
        """What proves ``lower_s``."""
        if self.shapes is None:
            return self.certificate.bound_argument
        least = min(self.shapes.cuts, key=lambda cut: cut.lower_s)
        return least.bound or self.certificate.bound_argument


def verified(answer: Answer, topology: Sequence[int] | None) -> str:
    """What the independent checkers verified, in words.

    Raises:
        InputError: naming the first step that does not hold.
    """
    from tailopt.oracle.check import check
    from tailopt.oracle.check_one_switch import check_one_switch
    from tailopt.oracle.check_shapes import check_shapes

    trace, fleet, atomic = answer.problem.trace, answer.problem.fleet, answer.problem.atomic
    if answer.shapes is None:
        one = check(answer.certificate, answer.problem)
        return f"both ends, by carrying out the plan and by the argument: {one.argument}"
    switch = answer.switch
    if switch is None:
        all_ = check_shapes(answer.shapes, trace, fleet.profile, fleet.gpus, atomic=atomic, topology=topology)
        said, of_shapes = "", all_.arguments
    else:
        once = check_one_switch(switch, trace, fleet.profile, fleet.gpus, atomic=atomic, topology=topology)
        of_shapes, anyone = once.arguments[:-1], once.arguments[-1]
        said = f"; the switch carried out again, and the bound of any policy by: {anyone}"
    arguments = ", ".join(sorted(set(of_shapes)))
    return f"both ends: no shape is missing among {len(of_shapes)}, each bound holds by: {arguments}{said}"


def argument_name(bound: BoundArgument | ClassBound) -> str:
    """The name of a bound's argument, as the documentation calls it.

    >>> from tailopt.oracle.alone import AloneBound
    >>> argument_name(AloneBound(1.0, 0))
    'alone'
    """
    words = re.findall("[A-Z][a-z]*", type(bound).__name__.removesuffix("Bound"))
    return " ".join(words).lower()


def oracle_report(answer: Answer, checked: str | None, notes: Sequence[str] = ()) -> list[RenderableType]:
    """The certificate, the shapes if they were compared, the engines, and the facts under them."""
    parts: list[RenderableType] = [_certificate(answer), Text()]
    if answer.shapes is not None:
        parts += [_cuts(answer.shapes), *_more(len(answer.shapes.cuts), MOST_CUTS, "shapes"), Text()]
    if answer.switch is not None:
        parts += [_switch(answer.switch), Text()]
    engines = len(answer.problem.fleet.engines)
    parts += [_engines(answer), *_more(engines, MOST_ENGINES, "engines"), Text()]
    return [*parts, facts(_facts(answer, checked, notes))]


def _certificate(answer: Answer) -> Table:
    problem, shapes = answer.problem, answer.shapes
    mark = " (SYNTHETIC)" if answer.source.synthetic else ""
    profile = problem.fleet.profile.name
    where = f"{problem.fleet} of {profile}"
    if shapes is not None:
        where = f"{problem.fleet.gpus} GPUs of {profile}, best as {problem.fleet}"
    table = _table(f"{answer.source.name}{mark} on {where}")
    for header in ("lower\nbound (s)", "makespan\n(s)", "gap", "status", "bound by"):
        table.add_column(header, justify="left" if header in ("status", "bound by") else "right")
    table.add_column("method", overflow="fold")
    table.add_column("seconds", justify="right")
    wall_s = answer.certificate.wall_s if shapes is None else shapes.wall_s
    table.add_row(
        f"{answer.lower_s:,.3f}", f"{answer.upper_s:,.3f}", percent(answer.gap), answer.status,
        argument_name(answer.bound), Text(answer.certificate.method), f"{wall_s:.2f}",
    )  # fmt: skip
    return table


def _cuts(shapes: ShapesCertificate) -> Table:
    table = _table("")
    table.add_column("shape", overflow="fold")
    for header in ("lower\nbound (s)", "found\n(s)", "found over\nbest"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in ("bound by", "state"):
        table.add_column(header)
    for cut in shapes.cuts[:MOST_CUTS]:
        table.add_row(
            Text(str(cut.fleet)),
            f"{cut.lower_s:,.2f}" if np.isfinite(cut.lower_s) else "-",
            f"{cut.upper_s:,.2f}" if np.isfinite(cut.upper_s) else "-",
            f"{cut.upper_s / shapes.upper_s:.3f}" if np.isfinite(cut.upper_s) else "-",
            "-" if cut.bound is None else argument_name(cut.bound),
            cut_state(shapes, cut),
        )
    return table


def _switch(found: SwitchCertificate) -> Table:
    table = _table("At most one switch")
    table.add_column("from", overflow="fold")
    table.add_column("to", overflow="fold")
    for header in (
        "at most\nleft", "at\n(s)", "drain, sleep,\nwake, move (s)", "moved", "makespan\n(s)", "saved",
        "lower\nbound (s)",
    ):  # fmt: skip
        table.add_column(header, justify="right")
    cost = found.cost
    parts = "-" if cost is None else _seconds(cost.drain_s, cost.sleep_s, cost.wake_s, cost.move_s)
    table.add_row(
        Text(str(found.first)),
        Text("no switch" if found.second is None else str(found.second)),
        "-" if found.unfinished is None else f"{found.unfinished:,}",
        "-" if found.switch_s is None else f"{found.switch_s:,.1f}",
        parts,
        "-" if cost is None else f"{cost.moved_requests:,}",
        f"{found.upper_s:,.3f}",
        percent(found.gain),
        f"{found.lower_s:,.3f}",
    )
    return table


def _seconds(*parts: float) -> str:
    return " ".join(f"{part:.3g}" for part in parts)


def cut_state(shapes: ShapesCertificate, cut: Cut) -> str:
    """Where a cut stands: the best, pruned by its bound, left open, or unfit for the batch."""
    if cut is shapes.best:
        return "best"
    if cut.bound is None:
        return UNFIT
    return "pruned" if shapes.pruned(cut) else "open"


def _engines(answer: Answer) -> Table:
    trace, fleet, plan = answer.problem.trace, answer.problem.fleet, answer.certificate.plan
    run = simulate(trace, fleet, plan)
    table = _table("")
    table.add_column("engine", justify="right")
    table.add_column("shape")
    for header in ("requests", "longest\n(tokens)", "tokens", "done\n(s)"):
        table.add_column(header, justify="right", no_wrap=True)
    own = [np.flatnonzero(plan.engine_of == e) for e in range(len(fleet.engines))]
    longest = [int(trace.output_tokens[on].max(initial=0)) for on in own]
    for e in sorted(range(len(own)), key=lambda e: -longest[e])[:MOST_ENGINES]:
        table.add_row(
            str(e), f"TP{fleet.engines[e].tp}", f"{len(own[e]):,}", f"{longest[e]:,}",
            f"{int(trace.output_tokens[own[e]].sum()):,}", f"{run.finish_s[own[e]].max(initial=0.0):,.2f}",
        )  # fmt: skip
    return table


def _more(rows: int, most: int, what: str) -> list[RenderableType]:
    return [Text(f"and {rows - most:,} more {what}")] if rows > most else []


def _table(title: str) -> Table:
    return Table(
        title=title or None, title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False,
    )  # fmt: skip


HOW_TO_READ = (
    "No static plan is done before the lower bound, which is proven; the makespan is that of a plan, "
    "simulated. A static plan fixes each request's engine at the start. Engines by their longest request."
)

HOW_TO_READ_SHAPES = (
    " Shapes by their bound: one whose bound is no less than the makespan is pruned, what was found on it is "
    "not its best."
)


HOW_TO_READ_SWITCH = (
    "A switch: when at most so many requests are left, the engines that differ change, at the cost of its "
    "parts (move: contexts computed anew or sent). What it saves is against the best found without; below "
    "the lower bound is nobody, however often he switches."
)


def _facts(answer: Answer, checked: str | None, notes: Sequence[str]) -> list[tuple[str, str]]:
    problem = answer.problem
    profile = problem.fleet.profile
    groups = "whole groups stay together" if problem.atomic else "samples go anywhere"
    lines = [("", HOW_TO_READ + (HOW_TO_READ_SHAPES if answer.shapes is not None else ""))]
    if answer.switch is not None:
        lines.append(("", HOW_TO_READ_SWITCH))
    if answer.stopped:
        lines.append(("Stopped", INTERRUPTED))
    if checked is not None:
        lines.append(("Verified", checked))
    lines += [
        ("Batch", f"{answer.drawn}; {groups}"),
        ("Trace", f"{answer.source.name}: {describe(statistics(answer.source))}"),
        ("", f"{answer.source.source}; licence {answer.source.licence or 'not stated'}"),
    ]
    if answer.source.synthetic:
        lines.append(("", SYNTHETIC))
    lines += [("", note) for note in notes]
    lines.append(
        (
            "Engine",
            f"{profile.name}: {profile.model} on {profile.hardware}, "
            f"{profile.engine} {profile.engine_version}; {problem.fleet} on {problem.fleet.gpus} GPUs",
        )
    )
    engines = [*problem.fleet.engines, *(() if answer.switch is None else answer.switch.run.engines)]
    for tp in sorted({engine.tp for engine in engines}):
        lines.append(("", f"TP{tp}: τ(n, K) = {profile.shape(tp).step_time}"))
    return [*lines, ("", MIXED.format(model=profile.model)), ("Version", f"tailopt {__version__}")]


def to_json(answer: Answer, checked: str | None) -> str:
    """The certificate, its argument and the shapes as one JSON document.

    As for a comparison, equal answers give equal text: no clock time, path or machine is in it.
    """
    problem, shapes = answer.problem, answer.shapes
    document: dict[str, object] = {
        "tailopt": __version__,
        "seed": answer.seed,
        "batch": answer.drawn,
        "groups": "atomic" if problem.atomic else "free",
        "trace": {
            "name": answer.source.name,
            "source": answer.source.source,
            "licence": answer.source.licence,
            "synthetic": answer.source.synthetic,
            "sha256": answer.source.sha256,
        },
        "engine": problem.fleet.profile.name,
        "fleet": {"shape": str(problem.fleet), "gpus": problem.fleet.gpus},
        "stopped": answer.stopped,
        "certificate": {
            "lower_s": answer.lower_s,
            "upper_s": answer.upper_s,
            "gap": answer.gap,
            "status": answer.status,
            "method": answer.certificate.method,
            "bound_argument": argument_name(answer.bound),
            "verified": checked,
        },
    }
    if shapes is not None:
        document["shapes"] = [
            {
                "shape": str(cut.fleet),
                "lower_s": cut.lower_s if np.isfinite(cut.lower_s) else None,
                "found_s": cut.upper_s if np.isfinite(cut.upper_s) else None,
                "bound_argument": None if cut.bound is None else argument_name(cut.bound),
                "state": cut_state(shapes, cut),
            }
            for cut in shapes.cuts
        ]
    if answer.switch is not None:
        document["switch"] = _switch_json(answer.switch)
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _switch_json(found: SwitchCertificate) -> dict[str, object]:
    """With at most one switch: both ends, what switches when, and what it takes."""
    cost = found.cost
    return {
        "lower_s": found.lower_s,
        "upper_s": found.upper_s,
        "saved": found.gain,
        "saved_for_sure": found.sure_gain,
        "first": str(found.first),
        "second": None if found.second is None else str(found.second),
        "unfinished": found.unfinished,
        "at_s": found.switch_s,
        "cost": None if cost is None else asdict(cost),
        "bound_argument": argument_name(found.bound_argument),
    }
