"""``tailopt profile``: measure a live engine, and write its profile."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from tailopt.cli.errors import plain_errors
from tailopt.cli.fit import Kind
from tailopt.cli.inputs import check_range, check_target
from tailopt.cli.options import PythonOption, QuietOption, RemoteOption, SeedOption
from tailopt.cli.output import interrupts, print_all
from tailopt.cli.replay import Backend, BackendOption, Device, live_engines, servers_of

SECONDS = 90.0


def profile(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the engine profile (TOML).")],
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME|FILE",
            help="Profile whose limits the engine is set up with. Default: those of the tiny model.",
        ),
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option("--tp", metavar="N", help="Shape to measure; again for more. Default: the smallest."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the profile. Default: that of the file.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="S", help="To measure decode and prefill of a shape, about."),
    ] = SECONDS,
    kind: Annotated[
        list[Kind] | None, typer.Option("--kind", help="Form of step time; again for more. Default: all.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Measure a server that is there (URL#tp=2 for another shape than TP1); again for more. "
            "Default: one of --backend, started here.",
        ),
    ] = None,
    backend: BackendOption = Backend.VLLM,
    remote: RemoteOption = False,
    python: PythonOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FOLDER|NAME",
            help="Model whose shape to run, default a tiny one; or the one to ask a server for.",
        ),
    ] = None,
    device: Annotated[Device, typer.Option("--device", help="What the engine computes on.")] = Device.CPU,
    switch: Annotated[
        bool, typer.Option("--switch/--no-switch", help="Measure sleep and wake, or stop and start.")
    ] = True,
    steps: Annotated[
        Path | None, typer.Option("--steps", metavar="FILE", help="Write all steps as CSV, for tailopt fit.")
    ] = None,
    seed: SeedOption = 0,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Overwrite files that exist.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Measure a live engine with a short designed experiment, and write its profile.

    Example: tailopt profile --out mine.toml; then tailopt replay --engine mine.toml
    """
    with plain_errors():
        from dataclasses import replace

        from tailopt.engine.catalogue import load_engine, write_profile
        from tailopt.errors import InputError
        from tailopt.plan import Engine
        from tailopt.replay import profile as experiment
        from tailopt.replay.fit_file import machine_profile, write_steps
        from tailopt.replay.fit_forms import KINDS
        from tailopt.replay.profile_engine import EngineBench
        from tailopt.replay.vllm import tiny_profile
        from tailopt.report.fit import fit_report

        for target in (out, *([] if steps is None else [steps])):
            check_target(target, [engine or ""], force)
        check_range("--seed", seed, 0)
        if not 1 <= seconds <= 86_400:
            raise InputError(f"--seconds: expected 1 to 86400, got {seconds:g}")
        degrees = sorted(set(tp or ()))
        like = load_engine(engine) if engine is not None else tiny_profile(max([1, *degrees]))
        degrees = degrees or [min(like.shapes)]
        shapes = {degree: like.shape(degree) for degree in degrees}
        servers = servers_of(server, remote=remote)
        measured = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(interrupts())
            told = stack.enter_context(_live(show=not quiet))
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            engines = stack.enter_context(
                live_engines(
                    like,
                    servers,
                    backend=backend,
                    remote=remote,
                    python=python,
                    model=model,
                    device=device,
                )
            )
            for degree, shape in shapes.items():
                one = Engine(degree, gpus=tuple(range(degree)))
                told(f"TP{degree}: starting", 0.0)
                with EngineBench(engines, one, seed=seed) as bench:
                    measured[degree] = experiment.profile(
                        bench,
                        shape,
                        engines.most_tokens(one),
                        seconds=seconds,
                        seed=seed,
                        kinds=[item.value for item in kind] if kind else list(KINDS),
                        switch=switch,
                        progress=lambda what, share, tp=degree: told(f"TP{tp}: {what}", share),  # type: ignore[misc]
                    )
            measured_on = engines.name
        done = {degree: found.shape(shapes[degree]) for degree, found in measured.items()}
        write_profile(machine_profile(name or out.stem, replace(like, shapes=done), measured_on), out)
        if steps is not None:
            write_steps([found.steps for found in measured.values()], steps)
        print_all(fit_report({degree: found.fit for degree, found in measured.items()}))
        for degree, found in measured.items():
            print_all(["", f"TP{degree}: {found.remark()}"])
            if switch:
                print_all([f"away in {found.sleep_s:.3g} s, back in {found.wake_s:.3g} s"])
        typer.echo(f"{out}: written", err=True)


@contextlib.contextmanager
def _live(*, show: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar of the time on stderr, if that is a terminal."""
    if not (show and sys.stderr.isatty()):
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
