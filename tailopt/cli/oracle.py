"""``tailopt oracle``: the certified optimum of one batch, for given shapes or for the best."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailopt.cli.errors import INTERRUPTED, plain_errors
from tailopt.cli.inputs import check_range, check_target, fleet_of, read_traces, transformed
from tailopt.cli.options import (
    DEFAULT_ENGINE,
    DEFAULT_GPUS,
    DEFAULT_METHOD,
    DEFAULT_TRACE,
    METHOD_NAMES,
    MOST_GPUS,
    CapOption,
    EngineOption,
    FormatOption,
    GpusOption,
    Groups,
    GroupsOption,
    JsonOption,
    PromptsOption,
    QuietOption,
    SamplesOption,
    SeedOption,
    SkipOption,
    TailOption,
    TokenizerOption,
    TraceOption,
    TruncateOption,
)
from tailopt.cli.output import interrupts, print_all, spinner, write_out

if TYPE_CHECKING:
    from tailopt.engine.profile import EngineProfile
    from tailopt.oracle.certificate import Certificate
    from tailopt.oracle.one_switch import SwitchCertificate
    from tailopt.oracle.problem import Problem
    from tailopt.oracle.shapes import ShapesCertificate
    from tailopt.trace import Trace

MOST_BATCH = 999_999

STATIC_SHARE = 0.4
"""With --switch: of the time limit, what the search without a switch may take."""


def oracle(
    trace: TraceOption = None,
    format_: FormatOption = None,
    cap: CapOption = None,
    skip_bad: SkipOption = False,
    tokenizer: TokenizerOption = None,
    truncate: TruncateOption = None,
    tail: TailOption = None,
    engine: EngineOption = DEFAULT_ENGINE,
    gpus: GpusOption = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="SHAPE",
            help="Engines: 8xTP1, 2xTP2+1xTP4, ... Default: all ways are compared.",
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="N+N+...",
            help="Without --shape: groups of GPUs that no engine may straddle, like 4+4.",
        ),
    ] = None,
    switch: Annotated[
        bool,
        typer.Option(
            "--switch", metavar="", help="Without --shape: also the best single change of shape in mid-batch."
        ),
    ] = False,
    sleep: Annotated[
        float | None,
        typer.Option("--sleep", metavar="SECONDS", help="With --switch: to put an engine to sleep."),
    ] = None,
    wake: Annotated[
        float | None, typer.Option("--wake", metavar="SECONDS", help="With --switch: to wake an engine.")
    ] = None,
    link: Annotated[
        float | None,
        typer.Option("--link", metavar="GB/S", help="With --switch: rate at which KV cache is sent."),
    ] = None,
    prompts: PromptsOption = 32,
    samples: SamplesOption = 8,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", help="Which of the batches that compare draws, from 0 on.")
    ] = 0,
    whole: Annotated[
        bool, typer.Option("--whole", metavar="", help="The whole trace as one batch; nothing is drawn.")
    ] = False,
    groups: GroupsOption = Groups.ATOMIC,
    seed: SeedOption = 0,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help=f"With --shape: {', '.join(METHOD_NAMES)}. Default: {DEFAULT_METHOD}.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit", metavar="SECONDS", help="When to stop; by default after a fixed amount of work."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="FILE", help="Write the plan, JSON; up to the switch if there is one."
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", metavar="FILE", help="Draw the plan; the name ends in .png or .svg."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", metavar="", help="Verify both ends with the independent checker.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Certify the least makespan of a batch: a proven lower bound, a plan, and the gap between them.

    Ctrl-C shows the best found so far. Example: tailopt oracle --shape 8xTP1 --groups free --figure plan.svg
    """
    with plain_errors():
        from tailopt.oracle.problem import Problem
        from tailopt.report.oracle import Answer, oracle_report, to_json, verified

        for option, value, least, most in (
            ("--prompts", prompts, 1, None),
            ("--samples", samples, 1, None),
            ("--batch", batch, 0, MOST_BATCH),
            ("--seed", seed, 0, None),
        ):
            check_range(option, value, least, most)
        _check_options(shape, method, topology, time_limit)
        _check_switch(switch, shape, sleep, wake, link)
        _check_targets(plan, figure, trace or [])
        rollouts, notes = read_traces(trace or [DEFAULT_TRACE], format_, cap, skip_bad, tokenizer)
        rollouts = transformed(rollouts, truncate, tail)
        if whole:
            requests, drawn = _at_once(rollouts), f"all {rollouts.n_requests:,} requests"
        else:
            requests = _drawn(rollouts, batch, prompts, samples, seed)
            drawn = f"batch {batch} of {prompts} prompts × {samples} samples, seed {seed}"
        atomic, show = groups is Groups.ATOMIC, not (quiet or json)
        shapes = switched = None
        if shape is None:
            count, islands = DEFAULT_GPUS if gpus is None else gpus, _topology(topology)
            check_range("--gpus", count, 1, MOST_GPUS)
            profile = _profile(engine, sleep, wake, link)
            static_s = time_limit if time_limit is None or not switch else STATIC_SHARE * time_limit
            shapes, stopped = _best_shape(requests, profile, count, islands, atomic, static_s, seed, show)
            if switch and not stopped:
                rest_s = None if time_limit is None else (1 - STATIC_SHARE) * time_limit
                switched, stopped = _best_switch(
                    requests, profile, count, islands, atomic, rest_s, seed, show, shapes
                )
            problem, certificate = Problem(requests, shapes.fleet, atomic), shapes.certificate
        else:
            problem = Problem(requests, fleet_of(engine, shape, gpus), atomic)
            certificate, stopped = _given_shape(problem, method or DEFAULT_METHOD, time_limit, seed, show)
            islands = None
        answer = Answer(rollouts, drawn, problem, certificate, shapes, seed, stopped, switched)
        if plan is not None:
            from tailopt.plan_file import write_plan

            write_plan(certificate.plan if switched is None else switched.run.plan, plan)
        if figure is not None:
            from tailopt.report.figure import write_figure

            title = f"{rollouts.name}, {drawn}, on {problem.fleet} of {problem.fleet.profile.name}"
            write_figure(certificate, problem, figure, lower_s=answer.lower_s, title=title)
        checked = verified(answer, islands) if check else None
        if json:
            write_out(to_json(answer, checked))
        else:
            print_all(oracle_report(answer, checked, notes))
        if stopped:
            raise typer.Exit(INTERRUPTED)


def _check_options(
    shape: str | None, method: str | None, topology: str | None, time_limit: float | None
) -> None:
    """Refuse options that do not go together, and a time limit that is none."""
    from tailopt.errors import InputError

    if shape is None and method is not None:
        raise InputError("--method: expected --shape beside it; without one all shapes are compared")
    if shape is not None and topology is not None:
        raise InputError("--topology and --shape: expected one of them")
    if method is not None and method not in METHOD_NAMES:
        raise InputError(f"--method {method!r}: unknown; known: {', '.join(METHOD_NAMES)}")
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise InputError(f"--time-limit: expected a positive number of seconds, got {time_limit:g}")


def _check_switch(
    switch: bool, shape: str | None, sleep: float | None, wake: float | None, link: float | None
) -> None:
    """Refuse options of a switch that do not go together, and costs that are none."""
    from tailopt.errors import InputError

    if switch and shape is not None:
        raise InputError("--switch and --shape: expected one of them")
    for option, value in (("--sleep", sleep), ("--wake", wake), ("--link", link)):
        if value is not None and not switch:
            raise InputError(f"{option}: expected --switch beside it")
        if value is not None and not (0 <= value <= 1e6 and (value > 0 or option != "--link")):
            least = "above 0" if option == "--link" else "from 0 on"
            raise InputError(f"{option}: expected a number {least}, at most 1e6, got {value:g}")


def _check_targets(plan: Path | None, figure: Path | None, sources: Sequence[str]) -> None:
    """Refuse, before anything is computed, files that cannot be written in the end."""
    from tailopt.errors import InputError

    if figure is not None:
        from tailopt.report.figure import require_figures, suffix_of

        suffix_of(figure)
        require_figures()
    for out in (plan, figure):
        if out is not None:
            check_target(out, sources, force=True)
    if plan is not None and plan == figure:
        raise InputError(f"{plan}: is both --plan and --figure, expected two files")


def _topology(text: str | None) -> list[int] | None:
    """The sizes of groups of GPUs that an option names."""
    from tailopt.errors import InputError

    if text is None:
        return None
    sizes = text.split("+")
    if not all(size.strip().isascii() and size.strip().isdigit() and len(size) < 7 for size in sizes):
        raise InputError(f"--topology {text!r}: expected sizes of groups of GPUs like 4+4")
    return [int(size) for size in sizes]


def _at_once(rollouts: "Trace") -> "Trace":
    """The whole trace as a batch: everything is there at the start."""
    from dataclasses import replace

    import numpy as np

    return replace(rollouts, arrival_s=np.zeros(rollouts.n_requests))


def _drawn(rollouts: "Trace", batch: int, prompts: int, samples: int, seed: int) -> "Trace":
    """A batch as ``tailopt compare`` draws it."""
    from tailopt.errors import InputError
    from tailopt.trace.transforms import sample_batches

    try:
        return sample_batches(
            rollouts, batches=batch + 1, prompts=prompts, samples=samples, seed=seed
        )[batch].trace  # fmt: skip
    except InputError as error:
        raise InputError(f"{error}; or --whole") from None


def _given_shape(
    problem: "Problem", method: str, time_limit_s: float | None, seed: int, show: bool
) -> "tuple[Certificate, bool]":
    """The certificate of a method, and whether Ctrl-C came first."""
    from tailopt.oracle.bound_and_fill import FIRST_SHARE
    from tailopt.oracle.solve import solve

    found = None
    try:
        with interrupts(), spinner("first bounds", show=show) as tell:
            first_s = (
                time_limit_s if time_limit_s is None or method == "staircase" else FIRST_SHARE * time_limit_s
            )
            found = solve(problem, method="staircase", time_limit_s=first_s)
            left_s = None if time_limit_s is None else time_limit_s - found.wall_s
            if method != "staircase" and (left_s is None or left_s > 0):
                tell(f"{method}: {_bracket(found.lower_s, found.upper_s)}")
                found = solve(problem, method=method, time_limit_s=left_s, seed=seed)
    except KeyboardInterrupt:
        if found is None:
            raise
        return found, True
    return found, False


def _profile(engine: str, sleep_s: float | None, wake_s: float | None, link: float | None) -> "EngineProfile":
    """The engine's profile, with the costs of a switch that options give; the link in GB/s."""
    from tailopt.engine.catalogue import load_engine

    profile = load_engine(engine)
    if sleep_s is None and wake_s is None and link is None:
        return profile
    from tailopt.oracle.one_switch import with_switch_costs

    rate = None if link is None else link * 1e9
    return with_switch_costs(profile, sleep_s=sleep_s, wake_s=wake_s, link_bytes_per_s=rate)


def _best_shape(
    requests: "Trace",
    profile: "EngineProfile",
    gpus: int,
    topology: Sequence[int] | None,
    atomic: bool,
    time_limit_s: float | None,
    seed: int,
    show: bool,
) -> "tuple[ShapesCertificate, bool]":
    """The certificate over all shapes, and whether Ctrl-C came first."""
    from tailopt.oracle.shapes import solve_shapes

    found = None
    try:
        with interrupts() as check, spinner("first bounds", show=show) as tell:

            def progress(known: "ShapesCertificate") -> None:
                left = sum(not known.pruned(cut) for cut in known.cuts)
                tell(f"{left} of {len(known.cuts)} shapes left, {_bracket(known.lower_s, known.upper_s)}")
                check()

            found = solve_shapes(
                requests, profile, gpus,
                atomic=atomic, time_limit_s=time_limit_s, seed=seed, topology=topology, progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        if found is None:
            raise
        return found, True
    return found, False


def _best_switch(
    requests: "Trace",
    profile: "EngineProfile",
    gpus: int,
    topology: Sequence[int] | None,
    atomic: bool,
    time_limit_s: float | None,
    seed: int,
    show: bool,
    static: "ShapesCertificate",
) -> "tuple[SwitchCertificate | None, bool]":
    """The certificate with at most one switch, and whether Ctrl-C came first; None if it came at once."""
    from tailopt.oracle.one_switch import solve_one_switch

    found = None
    try:
        with interrupts() as check, spinner("one switch", show=show) as tell:

            def progress(known: "SwitchCertificate") -> None:
                nonlocal found
                found = known
                tell(f"{known.first} to {known.second}: {_bracket(known.lower_s, known.upper_s)}")
                check()

            found = solve_one_switch(
                requests, profile, gpus, atomic=atomic, time_limit_s=time_limit_s, seed=seed,
                topology=topology, static=static, progress=progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        return found, True
    return found, False


def _bracket(lower_s: float, upper_s: float) -> str:
    return f"{lower_s:,.2f} to {upper_s:,.2f} s"
