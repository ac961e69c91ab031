"""``tailopt replay``: policies on real engines, beside what was predicted and the certified optimum."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailopt.cli.errors import plain_errors
from tailopt.cli.inputs import check_range, read_traces, transformed
from tailopt.cli.options import (
    DEFAULT_TRACE,
    CapOption,
    FormatOption,
    GoOnOption,
    Groups,
    GroupsOption,
    JsonOption,
    PythonOption,
    QuietOption,
    RemoteOption,
    SeedOption,
    SkipOption,
    TailOption,
    TokenizerOption,
    TraceOption,
    TruncateOption,
)
from tailopt.cli.output import interrupts, print_all, write_out

if TYPE_CHECKING:
    from tailopt.engine.profile import EngineProfile
    from tailopt.plan import Fleet
    from tailopt.replay.backend import Engines, Progress
    from tailopt.replay.http_server import Server
    from tailopt.replay.study import GivenPlan
    from tailopt.replay.vllm import VllmEngines
    from tailopt.trace import Trace

POLICIES = ("uniform", "lpt", "shared_queue")
PREDICTORS = ("truth",)
LONGEST = 400
"""Tokens of the longest prompt and response after scaling, by default, on a machine without a GPU."""


class Device(StrEnum):
    """What engines compute on."""

    CPU = "cpu"
    CUDA = "cuda"


class Backend(StrEnum):
    """What is started here where no server is named: a class of each in :func:`started`."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


BackendOption = Annotated[
    Backend, typer.Option("--backend", help="Engines to start, where no --server is given.")
]


def replay(
    trace: TraceOption = None,
    format_: FormatOption = None,
    cap: CapOption = None,
    skip_bad: SkipOption = False,
    tokenizer: TokenizerOption = None,
    truncate: TruncateOption = None,
    tail: TailOption = None,
    scale: Annotated[
        float | None,
        typer.Option(
            "--scale",
            metavar="FACTOR",
            help=f"Divide all lengths by it. Default: so that none has more than {LONGEST} tokens with its "
            "prompt on a CPU, 1 on a GPU and on servers.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="FILE",
            help="Engine profile that was measured here (tailopt profile). Default: fitted to a batch first.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", metavar="SHAPE", help="Engines: 2xTP1, ... Default: one per core, GPU or server."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="SPEC",
            help=f"NAME, NAME(arg=value) or file.py:function; again for more. Default: "
            f"{', '.join(POLICIES)}.",
        ),
    ] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option("--plan", metavar="FILE", help="A plan (JSON) for the batch that is drawn."),
    ] = None,
    predictor: Annotated[
        list[str] | None,
        typer.Option("--predictor", metavar="SPEC", help=f"As --policy. Default: {', '.join(PREDICTORS)}."),
    ] = None,
    batches: Annotated[int, typer.Option("--batches", metavar="N", help="Batches to draw.")] = 1,
    prompts: Annotated[int, typer.Option("--prompts", metavar="N", help="Prompts of a batch.")] = 8,
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Samples of a prompt.")] = 4,
    groups: GroupsOption = Groups.FREE,
    seed: SeedOption = 0,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Replays of each policy.")] = 3,
    yardstick: Annotated[
        bool,
        typer.Option(
            "--yardstick",
            metavar="",
            help="Another batch before and after each replay: makespans are told at the pace of the profile.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Records, runs, timelines, results; a new folder."),
    ] = None,
    go_on: GoOnOption = False,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", metavar="FILE", help="Draw the gap; the name ends in .png or .svg."),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="A server that is there (URL#tp=2 for another shape than TP1) as an engine; again for more. "
            "Default: vLLM, started here.",
        ),
    ] = None,
    remote: RemoteOption = False,
    python: PythonOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FOLDER|NAME",
            help="Model whose shape to run, default a tiny one; or the one to ask servers for.",
        ),
    ] = None,
    backend: BackendOption = Backend.VLLM,
    device: Annotated[Device, typer.Option("--device", help="What engines compute on.")] = Device.CPU,
    demo: Annotated[
        bool, typer.Option("--demo", metavar="", help="A small study that takes a minute or two.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Carry out policies on real engines and split the gap to the certified optimum into its causes.

    Lengths are forced, prompts are random tokens, weights too: nothing is downloaded.
    Example: tailopt replay --demo --out replay-demo --figure gap.svg
    """
    with plain_errors():
        import tempfile

        from tailopt.errors import InputError
        from tailopt.files import whole_file
        from tailopt.replay.study import calibrate
        from tailopt.replay.study import replay as run_study
        from tailopt.report.figure import require_figures, suffix_of
        from tailopt.report.replay import replay_json, replay_report

        if figure is not None:
            suffix_of(figure)
            require_figures()
        if demo:
            prompts, samples, repeats = min(prompts, 6), min(samples, 4), min(repeats, 2)
        if plan and batches > 1:
            raise InputError("--plan: expected one batch, --batches 1")
        if go_on and out is None:
            raise InputError("--go-on: expected the folder, --out FOLDER")
        for option, value, least in (("--batches", batches, 1), ("--prompts", prompts, 1),
                                     ("--samples", samples, 1), ("--seed", seed, 0),
                                     ("--repeats", repeats, 1)):  # fmt: skip
            check_range(option, value, least)
        rollouts, notes = read_traces(trace or [DEFAULT_TRACE], format_, cap, skip_bad, tokenizer)
        servers = servers_of(server, remote=remote)
        small = device is Device.CPU and (demo or not servers)
        rollouts = _scaled(transformed(rollouts, truncate, tail), scale, small=small)
        fleet = _fleet(engine, shape, servers)
        deciders = [*(policy or ([] if plan else POLICIES)), *map(_given, plan or [])]
        drawn = {"prompts": prompts, "samples": samples, "seed": seed}
        with contextlib.ExitStack() as stack:
            folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "replay"
            stack.enter_context(interrupts())
            told = stack.enter_context(live_progress(prompts * samples, show=not (quiet or json)))
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            engines = stack.enter_context(
                live_engines(
                    fleet.profile,
                    servers,
                    remote=remote,
                    backend=backend,
                    python=python,
                    model=model,
                    device=device,
                )
            )
            if engine is None:
                fitted = calibrate(
                    rollouts,
                    fleet,
                    engines,
                    folder=folder,
                    go_on=go_on,
                    progress=told("calibration"),
                    **drawn,
                )
                fleet = _with_profile(fleet, fitted)
            outcomes = run_study(
                rollouts,
                fleet,
                engines,
                deciders,
                predictor or PREDICTORS,
                folder=folder,
                batches=batches,
                atomic=groups is Groups.ATOMIC,
                repeats=repeats,
                yardstick=yardstick,
                go_on=go_on or engine is None,
                progress=told,
                **drawn,
            )
            text = replay_json(
                outcomes,
                {
                    "backend": engines.name,
                    "trace": rollouts.name,
                    "source": rollouts.source,
                    "fleet": str(fleet),
                    "engine": fleet.profile.name,
                    "batches": batches,
                    **drawn,
                },
            )
            with whole_file(folder / "results.json") as temporary:
                temporary.write_text(text, encoding="utf-8")
            title = f"{rollouts.name} on {fleet} of {fleet.profile.name}, {engines.name}"
            if figure is not None:
                from tailopt.replay.waterfall import write_waterfall

                write_waterfall(outcomes, figure, title=title)
        if json:
            write_out(text)
        else:
            where = "".join(f", {one} TP{one.tp}" for one in servers)
            facts = [("engines", f"{engines.name}{where}"), *(("trace", note) for note in notes)]
            facts += [("written", str(out))] if out is not None else []
            print_all(replay_report(outcomes, rollouts, fleet, facts))


def servers_of(urls: Sequence[str] | None, *, remote: bool) -> "tuple[Server, ...]":
    """The servers that ``--server`` names, none if it was not given.

    Raises:
        InputError: if one is no URL, is given twice, or is on another machine without ``remote``.
    """
    if not urls:
        return ()
    from tailopt.replay.http_server import Server, check_servers

    servers = tuple(Server.of(url) for url in urls)
    check_servers(servers, remote=remote)
    return servers


def started(backend: Backend) -> "type[VllmEngines]":
    """The engines of that name."""
    from tailopt.replay.transformers import TransformersEngines
    from tailopt.replay.vllm import VllmEngines

    return {Backend.VLLM: VllmEngines, Backend.TRANSFORMERS: TransformersEngines}[backend]


@contextlib.contextmanager
def live_engines(
    profile: "EngineProfile",
    servers: "Sequence[Server]",
    *,
    remote: bool,
    python: Path | None,
    model: str | None,
    device: Device,
    backend: Backend = Backend.VLLM,
) -> "Iterator[Engines]":
    """The servers, or engines started here if there are none."""
    if servers:
        from tailopt.replay.http import HttpEngines

        with HttpEngines(profile, servers, model=model, remote=remote) as there:
            yield there
    else:
        with started(backend)(profile, python=python, model=model, device=device.value) as workers:
            yield workers


def _scaled(rollouts: "Trace", scale: float | None, *, small: bool) -> "Trace":
    from tailopt.errors import InputError
    from tailopt.replay.scale import scaled_down

    if scale is None:
        longest = int((rollouts.context_tokens + rollouts.output_tokens).max())
        scale = max(1.0, longest / (LONGEST - 2)) if small else 1.0
    try:
        return rollouts if scale == 1 else scaled_down(rollouts, scale)
    except InputError as error:
        raise InputError(f"--scale: {error}") from None


def _fleet(engine: str | None, shape: str | None, servers: "Sequence[Server]" = ()) -> "Fleet":
    """By default an engine for each server or core; the limits of the tiny model, a guess for servers."""
    import os
    from collections import Counter
    from dataclasses import replace

    from tailopt.engine.catalogue import load_engine
    from tailopt.errors import InputError
    from tailopt.plan import Fleet
    from tailopt.replay.vllm import tiny_profile

    cores = len(os.sched_getaffinity(0))
    there = Counter(server.tp for server in servers)
    profile = tiny_profile(max(there, default=cores)) if engine is None else load_engine(engine)
    if servers and engine is None:
        profile = replace(
            profile, name="servers", hardware="unknown", model="unknown", precision="unknown",
            engine="unknown", notes="Limits are those of a tiny model, a guess.",
        )  # fmt: skip
    smallest = min(profile.shapes)
    wanted = there or {smallest: max(cores // smallest, 1)}
    default = "+".join(f"{count}xTP{tp}" for tp, count in sorted(wanted.items()))
    try:
        fleet = Fleet.of(profile, shape or default)
    except InputError as error:
        raise InputError(f"--shape: {error}") from None
    for tp, count in Counter(one.tp for one in fleet.engines).items():
        if servers and count > there[tp]:
            raise InputError(f"--shape: {count} engines of TP{tp}, there are {there[tp]} servers of TP{tp}")
    return fleet


def _with_profile(fleet: "Fleet", profile: "EngineProfile") -> "Fleet":
    from tailopt.plan import Fleet

    return Fleet(profile, fleet.engines, fleet.gpus)


def _given(path: Path) -> "GivenPlan":
    from tailopt.plan_file import read_plan
    from tailopt.replay.study import GivenPlan

    return GivenPlan(read_plan(path), path.name)


@contextlib.contextmanager
def live_progress(requests: int, *, show: bool) -> Iterator[Callable[[str], "Progress | None"]]:
    """A bar of finished requests on stderr, if that is a terminal, and what is left on each engine."""
    if not (show and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=requests, left="")

        def told(name: str) -> "Progress":
            bar.update(task, description=name, completed=0, left="engines start")

            def update(now_s: float, left: Sequence[tuple[str, int]]) -> None:
                text = ", ".join(f"{engine}: {count}" for engine, count in left)
                finished = requests - sum(count for _, count in left)
                if now_s > 0:
                    bar.update(task, completed=finished, left=f"{now_s:.1f} s; left {text}")

            return update

        yield told
