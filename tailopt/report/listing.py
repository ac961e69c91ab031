"""What there is: bundled traces, engines, policies and predictors, each with its source."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tailopt.engine.profile import EngineProfile
from tailopt.report.terminal import facts
from tailopt.spec import parameters
from tailopt.trace.catalogue import BundledTrace


def trace_list(traces: Iterable[BundledTrace]) -> list[RenderableType]:
    """The bundled traces, and under them where they come from."""
    traces = list(traces)
    table = _table("name", "responses", "prompts", "P50", "P90", "max")
    for trace in traces:
        mark = " (synthetic)" if trace.synthetic else ""
        numbers = (trace.responses, trace.prompts, trace.p50, trace.p90, trace.max)
        table.add_row(Text(trace.name + mark), *(f"{number:,.0f}" for number in numbers))
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
            *((f"TP{tp}", f"τ(n, K) = {shape.step_time}") for tp, shape in profile.shapes.items()),
            *(("Source", source) for source in profile.sources),
            ("Licence", profile.licence),
            ("", ""),
        ]
    return [facts(lines[:-1])]


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


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(first, overflow="fold")
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table
