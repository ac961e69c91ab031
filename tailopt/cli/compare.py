"""``tailopt compare``: policies on paired batches, beside the certified optimum."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailopt.cli.errors import plain_errors
from tailopt.cli.inputs import check_range, fleet_of, read_traces, transformed
from tailopt.cli.options import (
    DEFAULT_ENGINE,
    DEFAULT_TRACE,
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
    ShapeOption,
    SkipOption,
    TailOption,
    TokenizerOption,
    TraceOption,
    TruncateOption,
)
from tailopt.cli.output import interrupts, print_all, progress_bar, write_out

if TYPE_CHECKING:
    from tailopt.run import Run
    from tailopt.trace.transforms import Batch

DEFAULT_PREDICTORS = ("truth", "noisy_truth")
BESIDES = ("sample_mean", "dyn", "split", "steal", "rebalance")
"""Policies that show their worth only under a predictor of scenarios, where the profile knows what changing
the fleet costs, or where requests wait."""

MOST_BATCHES = 1_000_000


def compare(
    trace: TraceOption = None,
    format_: FormatOption = None,
    cap: CapOption = None,
    skip_bad: SkipOption = False,
    tokenizer: TokenizerOption = None,
    truncate: TruncateOption = None,
    tail: TailOption = None,
    engine: EngineOption = DEFAULT_ENGINE,
    gpus: GpusOption = None,
    shape: ShapeOption = None,
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
    prompts: PromptsOption = 32,
    samples: SamplesOption = 8,
    groups: GroupsOption = Groups.ATOMIC,
    seed: SeedOption = 0,
    json: JsonOption = False,
    csv: Annotated[
        bool, typer.Option("--csv", metavar="", help="One row per run to stdout instead of the table.")
    ] = False,
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", metavar="DIR", help="Timelines of the first batch, for ui.perfetto.dev."),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Run policies on paired batches of a trace and compare them with the certified optimum.

    Example: tailopt compare --trace rollouts.parquet --policy lpt --policy mine.py:rule --batches 5
    """
    with plain_errors():
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
            check_range(option, value, least, most)
        rollouts, notes = read_traces(trace or [DEFAULT_TRACE], format_, cap, skip_bad, tokenizer)
        rollouts = transformed(rollouts, truncate, tail)
        fleet = fleet_of(engine, shape, gpus)
        # what a user's policy prints must not end up in the output
        with (
            interrupts() as check,
            progress_bar(batches, check, show=not (quiet or json or csv)) as advance,
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

            write_out(to_json(comparison) if json else to_csv(comparison))
        else:
            from tailopt.report.terminal import comparison_report

            print_all(comparison_report(comparison, notes))


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
