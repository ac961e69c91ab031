"""What there is: bundled traces, engines, policies and predictors, each with its source."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tailopt.engine.profile import Draft, EngineProfile, ShapeProfile
from tailopt.report.terminal import facts
from tailopt.spec import parameters
from tailopt.trace.catalogue import BundledTrace, load_bundled
from tailopt.trace.statistics import statistics

OWN = (
    "a function of a file of yours, with options as above. A policy is (View) -> Plan, a predictor is "
    "(Batch, numpy Generator) -> predicted tokens. A policy is run once per predictor; decorated with "
    "tailopt.policies.ignores_predictions it is run once, without one. docs/policies.md has the rules."
)


def trace_list(traces: Iterable[BundledTrace]) -> list[RenderableType]:
    """The bundled traces, and under them where they come from.

    Rows are responses, ``× each`` is the median number of samples of a prompt at one training step; lengths
    are output tokens.
    """
    traces = list(traces)
    table = _table("name", "rows", "prompts\n× each", "P50", "P90", "max", "at\ncap")
    for trace in traces:
        mark = " (synthetic)" if trace.synthetic else ""
        found = statistics(load_bundled(trace.name))
        table.add_row(
            Text(trace.name + mark),
            f"{trace.responses:,}",
            f"{trace.prompts:,}×{found.samples_median:g}",
            *(f"{number:,.0f}" for number in (trace.p50, trace.p90, trace.max)),
            _share(found.capped_share),
        )
    lines = []
    for source in dict.fromkeys(trace.source for trace in traces):
        of_it = [trace for trace in traces if trace.source == source]
        one = of_it[0]
        names = of_it[0].name if len(of_it) == 1 else f"{of_it[0].name} … {of_it[-1].name} ({len(of_it)})"
        lines += [
            ("Names", names),
            ("Source", f"{one.source}, commit {one.commit}" if one.commit else one.source),
            ("Licence", f"{one.licence}; {one.attribution}"),
            ("Note", one.caveats),
            ("", ""),
        ]
    return [table, Text(), facts(lines[:-1])]


def engine_list(profiles: Iterable[EngineProfile]) -> list[RenderableType]:
    """The bundled engines: what was measured, each shape's step time, and the source."""
    lines = []
    for profile in profiles:
        lines += [
            ("Engine", profile.name),
            ("", f"{profile.model}, {profile.precision}"),
            ("", f"{profile.hardware}, {profile.engine} {profile.engine_version}, {profile.date}"),
            *(line for tp, shape in profile.shapes.items() for line in _shape(tp, shape)),
            *(("Source", source) for source in profile.sources),
            ("Licence", profile.licence),
            ("", ""),
        ]
    return [facts(lines[:-1])]


def _shape(tp: int, shape: ShapeProfile) -> list[tuple[str, str]]:
    limits = (
        f"at most {shape.max_running:,} requests at once, {shape.kv_capacity_tokens:,} tokens of KV cache"
    )
    fit = [("", f"Fit: {shape.fit}")] if shape.fit else []
    drafts = [("", f"Drafts by {draft.method}: {_draft(draft)}") for draft in shape.drafts]
    return [(f"TP{tp}", f"τ(n, K) = {shape.step_time}"), ("", limits), *drafts, *fit]


def _draft(draft: Draft) -> str:
    """What a draft method gains and costs; times of the host only where it takes any."""
    costs = [f"{draft.step_fraction:.2g} of a step"] if draft.step_fraction else []
    costs += [f"τ(n, K) = {draft.step_time}"] if draft.step_time is not None else []
    a_token = f"; each takes {' and '.join(costs)}" if costs else ""
    host = [f"{draft.seconds * 1e3:.3g} ms a step"] if draft.seconds else []
    host += [f"{draft.seconds_per_request * 1e3:.3g} ms a request"] if draft.seconds_per_request else []
    beside = f"; besides {' and '.join(host)}" if host else ""
    source = f"; {draft.source}" if draft.source else ""
    return (
        f"{draft.acceptance:.0%} of the tokens accepted, at most {draft.most_tokens} a step"
        f"{a_token}{beside}{source}"
    )


def own_functions() -> list[RenderableType]:
    """How to write a policy of one's own, in short."""
    return [Text("Your own"), Text(), facts([("FILE.py:FUNCTION", OWN)])]


def function_list(title: str, functions: Mapping[str, Callable[..., Any]]) -> list[RenderableType]:
    """Policies or predictors: options, idea and source of each, from its signature and docstring."""
    lines = []
    for name, function in functions.items():
        options = ", ".join(f"{key}={one.default!r}" for key, one in parameters(function).items())
        idea, source = idea_and_source(function)
        lines += [(name, idea), *([("", f"Options: {options}")] if options else []), ("", source), ("", "")]
    return [Text(title), Text(), facts(lines[:-1])]


def idea_and_source(function: Callable[..., Any]) -> tuple[str, str]:
    """First line of a docstring, and its paragraph that starts with ``Source:`` (empty if there is none).

    >>> def rule():
    ...     '''Do something.
    ...
    ...     Source: a paper
    ...     on it.
    ...     '''
    >>> idea_and_source(rule)
    ('Do something.', 'Source: a paper on it.')
    """
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    source = next((one for one in paragraphs if one.startswith("Source:")), "")
    return paragraphs[0], " ".join(source.split())


def _share(share: float) -> str:
    """A share of capped responses in three characters; ``-`` if none is known to be capped."""
    if share == 0:
        return "-"
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(first, overflow="fold")
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table
