"""The command line. Everything heavy is imported inside the commands, so that ``--help`` is quick."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tailopt.plan import Fleet
    from tailopt.run import Run
    from tailopt.trace import Trace
    from tailopt.trace.transforms import Batch

DEFAULT_TRACE = "gpqa-deepseek-reasoner"
DEFAULT_ENGINE = "h100-llama-3.1-8b"
DEFAULT_PREDICTORS = ("truth", "noisy_truth")
BESIDES = ("sample_mean",)  # policies that show their worth under a predictor of scenarios only
FORMAT_NAMES = (
    "parquet", "csv", "azure2023", "burstgpt", "mooncake", "vidur", "vllm-bench", "verl", "slime",
    "openai-batch",
)  # fmt: skip
"""The keys of :data:`tailopt.trace.formats.FORMATS`, which is not imported for help."""

DEFAULT_GPUS = 8
MOST_GPUS = 99_999
MOST_BATCHES = 1_000_000

INPUT_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_UsageError = cast(
    "type[typer.BadParameter]",
    next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError"),
)
"""What typer raises for a command or options that are not as declared; it has no public name."""

app = typer.Typer(
    help="Compare scheduling policies for LLM RL rollouts against a certified optimum, on real traces.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Groups(StrEnum):
    """Whether the samples of a prompt must stay on one engine."""

    ATOMIC = "atomic"
    FREE = "free"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command ``tailopt``: whatever is wrong is one line on stderr, and the exit code says which kind."""
    code = 0
    try:
        with _plain_errors():
            _check_streams()
            code = app(arguments, prog_name="tailopt", standalone_mode=False) or 0
            sys.stdout.flush()
    except typer.Exit as ended:
        code = ended.exit_code
    sys.exit(code)


def _check_streams() -> None:
    """Make what a stream cannot encode a replacement character, and see that there is a standard output."""
    from tailopt.errors import InputError

    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as the process lives
    if sys.stdout is None:
        raise InputError("standard output: closed, expected it to be open")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """One line on stderr for bad input, silence for a closed pipe and Ctrl-C; the exit code says which."""
    from tailopt.errors import InputError

    try:
        yield
    except InputError as error:
        _fail(str(error))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise typer.Exit(INPUT_ERROR) from None
        command = "tailopt" if error.ctx is None else error.ctx.command_path
        _fail(f"{error.format_message().rstrip('.')}; see {command} --help")
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()
        raise typer.Exit(BROKEN_PIPE) from None
    except OSError as error:
        _drop_output()
        _fail(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except MemoryError:
        _fail("out of memory")


def _fail(message: str) -> NoReturn:
    from tailopt.errors import one_line

    with contextlib.suppress(ValueError):  # stderr was closed by a policy
        typer.echo(f"tailopt: {one_line(message)}", err=True)
    raise typer.Exit(INPUT_ERROR) from None


def _drop_output() -> None:
    """Forget what is still buffered for stdout: it would raise again when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


TraceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trace", metavar="FILE|NAME", help=f"Rollouts; again for more files. Default: {DEFAULT_TRACE}."
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help=f"Format of the files, found out by default: {', '.join(FORMAT_NAMES)}.",
    ),
]
CapOption = Annotated[
    int | None,
    typer.Option(
        "--cap",
        metavar="TOKENS",
        help="Length cap of the run: flags responses of at least so many tokens as censored, cuts none.",
    ),
]
SkipOption = Annotated[bool, typer.Option("--skip-bad", metavar="", help="Skip bad rows, and count them.")]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="FILE", help="tokenizer.json or file.py:function, for formats of text only."
    ),
]


@app.command()
def compare(
    trace: TraceOption = None,
    format_: FormatOption = None,
    cap: CapOption = None,
    skip_bad: SkipOption = False,
    tokenizer: TokenizerOption = None,
    truncate: Annotated[
        int | None,
        typer.Option("--truncate", metavar="TOKENS", help="Cut longer responses off at so many tokens."),
    ] = None,
    tail: Annotated[
        float | None,
        typer.Option("--tail", metavar="RATIO", help="Reshape the tail to this P90/P50 (TailSieve)."),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME|FILE", help="Engine profile.")
    ] = DEFAULT_ENGINE,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", help=f"GPUs. Default: those of --shape, or {DEFAULT_GPUS}."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="SHAPE",
            help="Engines: 8xTP1, 2xTP2+1xTP4, ... Default: the smallest that the profile has.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="SPEC",
            help="NAME, NAME(arg=value) or file.py:function; again for more. uniform is always added. "
            f"Default: all but {', '.join(BESIDES)}.",
        ),
    ] = None,
    predictor: Annotated[
        list[str] | None,
        typer.Option(
            "--predictor", metavar="SPEC", help=f"As --policy. Default: {', '.join(DEFAULT_PREDICTORS)}."
        ),
    ] = None,
    batches: Annotated[int, typer.Option("--batches", metavar="N", help="Batches to draw.")] = 20,
    prompts: Annotated[int, typer.Option("--prompts", metavar="N", help="Prompts of a batch.")] = 32,
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Samples of a prompt.")] = 8,
    groups: Annotated[
        Groups, typer.Option("--groups", help="Whether the samples of a prompt stay on one engine.")
    ] = Groups.ATOMIC,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of all that is drawn.")] = 0,
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="JSON to stdout instead of the table.")
    ] = False,
    csv: Annotated[
        bool, typer.Option("--csv", metavar="", help="One row per run to stdout instead of the table.")
    ] = False,
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", metavar="DIR", help="Timelines of the first batch, for ui.perfetto.dev."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="No progress bar.")] = False,
) -> None:
    """Run policies on paired batches of a trace and compare them with the certified optimum.

    Example: tailopt compare --trace rollouts.parquet --policy lpt --policy mine.py:rule --batches 5
    """
    with _plain_errors():
        from tailopt.compare import compare as run_comparison
        from tailopt.errors import InputError
        from tailopt.policies import POLICIES

        if json and csv:
            raise InputError("--json and --csv: expected one of them")
        for option, value, least, most in (
            ("--batches", batches, 1, MOST_BATCHES),
            ("--prompts", prompts, 1, None),
            ("--samples", samples, 1, None),
            ("--seed", seed, 0, None),
        ):
            _check_range(option, value, least, most)
        rollouts, notes = _read(trace or [DEFAULT_TRACE], format_, cap, skip_bad, tokenizer)
        rollouts = _transformed(rollouts, truncate, tail)
        fleet = _fleet(engine, shape, gpus)
        # what a user's policy prints must not end up in the output
        with (
            _interrupts() as check,
            _progress(batches, check, show=not (quiet or json or csv)) as advance,
            contextlib.redirect_stdout(sys.stderr),
        ):
            comparison = run_comparison(
                rollouts,
                fleet,
                policy or [name for name in POLICIES if name not in BESIDES],
                predictor or list(DEFAULT_PREDICTORS),
                batches=batches,
                prompts=prompts,
                samples=samples,
                seed=seed,
                atomic=groups is Groups.ATOMIC,
                progress=advance,
                on_run=None if perfetto is None else _timelines(perfetto),
            )
        if json or csv:
            from tailopt.report.machine import to_csv, to_json

            _write(to_json(comparison) if json else to_csv(comparison))
        else:
            from tailopt.report.terminal import comparison_report

            _print(comparison_report(comparison, notes))


@app.command()
def traces() -> None:
    """List the bundled traces with their sources."""
    with _plain_errors():
        from tailopt.report.listing import trace_list
        from tailopt.trace.catalogue import bundled_traces

        _print(trace_list(bundled_traces()))


@app.command()
def engines() -> None:
    """List the bundled engine profiles with their sources."""
    with _plain_errors():
        from tailopt.engine.catalogue import bundled_engines, load_engine
        from tailopt.report.listing import engine_list

        _print(engine_list(load_engine(name) for name in bundled_engines()))


@app.command()
def policies() -> None:
    """List the policies and predictors with their options and sources."""
    with _plain_errors():
        from tailopt.policies import POLICIES
        from tailopt.predict import PREDICTORS
        from tailopt.report.listing import function_list, own_functions

        _print(
            [
                *function_list("Policies", POLICIES),
                "",
                *function_list("Predictors", PREDICTORS),
                "",
                *own_functions(),
            ]
        )


@app.command()
def convert(
    sources: Annotated[list[str], typer.Argument(metavar="IN...", help="Trace files, or a bundled name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new file that ends in .parquet or .csv.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT if it exists.", metavar="")] = False,
    format_: FormatOption = None,
    cap: CapOption = None,
    skip_bad: SkipOption = False,
    tokenizer: TokenizerOption = None,
) -> None:
    """Read a trace of any known format and write it as Parquet or CSV."""
    with _plain_errors():
        from tailopt.trace.reading import write_trace

        _check_target(out, sources, force)
        rollouts, notes = _read(sources, format_, cap, skip_bad, tokenizer)
        write_trace(rollouts, out)
        for line in (f"{out}: {rollouts.n_requests} responses to {rollouts.n_prompts} prompts", *notes):
            typer.echo(line, err=True)


def _check_target(out: Path, sources: Sequence[str], force: bool) -> None:
    """Refuse to write over what is read, or, unless told to, over anything."""
    from tailopt.errors import InputError
    from tailopt.files import is_file, is_folder

    if not is_file(out):
        return
    for source in map(Path, sources):
        if (is_file(source) and source.samefile(out)) or (is_folder(source) and source.samefile(out.parent)):
            raise InputError(f"{out}: is also read, expected another file to write")
    if not force:
        raise InputError(f"{out}: exists, expected a new file, or --force to overwrite it")


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Show the version and exit.")
    ] = False,
) -> None:
    if version:
        from tailopt import __version__

        typer.echo(f"tailopt {__version__}")
        raise typer.Exit


def _read(
    specs: Sequence[str], format_: str | None, cap: int | None, skip_bad: bool, tokenizer: str | None
) -> tuple["Trace", list[str]]:
    """The trace that the specs name, and what there is to say about reading it."""
    from tailopt.errors import InputError, one_line
    from tailopt.trace.reading import ReadReport, read_trace, resolve_trace
    from tailopt.trace.rows import MOST_TOKENS
    from tailopt.trace.tokenizer import load_tokenizer

    if cap is not None:
        _check_range("--cap", cap, 1, MOST_TOKENS)
    count = None if tokenizer is None else load_tokenizer(tokenizer)
    report: ReadReport | None
    if len(specs) > 1:
        rollouts, report = read_trace(specs, format=format_, cap=cap, skip_bad=skip_bad, tokenizer=count)
    else:
        rollouts, report = resolve_trace(
            specs[0], format=format_, cap=cap, skip_bad=skip_bad, tokenizer=count
        )
    if report is None:
        if format_ is not None:
            raise InputError(f"--format {format_}: trace {rollouts.name!r} is bundled, expected no format")
        return rollouts, _about_cap(rollouts, cap)
    first = [f"first bad row: {one_line(report.first_skipped)}"] if report.first_skipped else []
    return rollouts, [str(report), *first, *_about_cap(rollouts, cap)]


def _about_cap(rollouts: "Trace", cap: int | None) -> list[str]:
    """What --cap flagged, if that was nothing, or if it can hardly have been the cap of the run."""
    if cap is None:
        return []
    flagged, longer = int((rollouts.output_tokens >= cap).sum()), int((rollouts.output_tokens > cap).sum())
    if not flagged:
        return [f"--cap {cap}: no response is that long"]
    if longer <= 0.01 * flagged:
        return []
    return [
        f"--cap {cap}: {longer} of the {flagged} responses flagged as censored are longer than the cap; "
        "none is cut, --truncate does that"
    ]


def _check_range(option: str, value: int, least: int, most: int | None = None) -> None:
    from tailopt.errors import InputError

    if value < least:
        raise InputError(f"{option}: expected at least {least}, got {value}")
    if most is not None and value > most:
        raise InputError(f"{option}: expected at most {most}, got {value}")


def _transformed(rollouts: "Trace", truncate: int | None, tail: float | None) -> "Trace":
    """The trace cut, then reshaped, where the options say so."""
    from tailopt.errors import InputError
    from tailopt.trace import transforms
    from tailopt.trace.rows import MOST_TOKENS

    if truncate is not None:
        _check_range("--truncate", truncate, 1, MOST_TOKENS)
        rollouts = transforms.truncate(rollouts, truncate)
    if tail is not None:
        try:
            rollouts = transforms.reshape_tail(rollouts, tail)
        except InputError as error:
            raise InputError(f"--tail {tail:g}: {error}") from None
    return rollouts


def _fleet(engine: str, shape: str | None, gpus: int | None) -> "Fleet":
    """The fleet that the options describe: by default as many of the smallest engines as the GPUs hold."""
    from tailopt.engine.catalogue import load_engine
    from tailopt.errors import InputError
    from tailopt.plan import Fleet

    if gpus is not None:
        _check_range("--gpus", gpus, 1, MOST_GPUS)
    profile = load_engine(engine)
    if shape is not None:
        try:
            return Fleet.of(profile, shape, gpus)
        except InputError as error:
            options = "--shape" if gpus is None else f"--shape {shape} --gpus {gpus}"
            raise InputError(f"{options}: {error}") from None
    gpus, smallest = gpus or DEFAULT_GPUS, min(profile.shapes)
    if gpus < smallest:
        raise InputError(
            f"--gpus: engine {profile.name!r} needs at least {smallest} GPUs (TP{smallest}), got {gpus}"
        )
    return Fleet.of(profile, f"{gpus // smallest}xTP{smallest}", gpus)


def _timelines(folder: Path) -> Callable[[int, str, str, "Batch", "Run"], None]:
    """What writes the timeline of each run of the first batch into a folder, which is made if need be."""
    from tailopt.errors import InputError
    from tailopt.report.perfetto import file_name, write_perfetto

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--perfetto {folder}: cannot be made ({error.strerror})") from None

    def write(index: int, policy: str, predictor: str, batch: "Batch", run: "Run") -> None:
        if index == 0:
            write_perfetto(run, batch.trace, folder / file_name(index, policy, predictor))

    return write


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Yield what raises if Ctrl-C was pressed before: a solver that is interrupted keeps its plan."""
    came: list[int] = []

    def handle(number: int, _: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _progress(batches: int, check: Callable[[], None], *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal; yields what to call with batches done and to do.

    What is yielded calls ``check`` first.
    """
    if not (show and sys.stderr.isatty()):
        yield lambda done, total: check()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("batches"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=batches)

        def advance(done: int, total: int) -> None:
            check()
            bar.update(task, completed=done, total=total)

        yield advance


def _print(renderables: Sequence["RenderableType"]) -> None:
    """Print to stdout as wide as it is, without colours if it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as capture:
        for one in renderables:
            console.print(one)
    _write("\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
