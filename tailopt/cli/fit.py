"""``tailopt fit``: an engine profile from measured steps."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tailopt.cli.errors import plain_errors
from tailopt.cli.inputs import check_target
from tailopt.cli.output import print_all


class Kind(StrEnum):
    """The keys of :data:`tailopt.replay.fit_forms.KINDS`, which is not imported for help."""

    AFFINE = "affine"
    POWER = "power"
    MAX_AFFINE = "max_affine"
    TABLE = "table"
    PADDED = "padded"


def fit(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Records of replays, or tables of steps (CSV, Parquet)."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the engine profile (TOML).")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the profile. Default: that of the file.")
    ] = None,
    kind: Annotated[
        list[Kind] | None, typer.Option("--kind", help="Form of step time; again for more. Default: all.")
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", metavar="ENGINE", help="Profile that gives the limits. Default: that of the record."
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", help="Tensor-parallel degree of a table's engine.")
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(
            "--prefill", metavar="TOKENS/S", help="Prefill rate, if it is known; else it is fitted."
        ),
    ] = None,
    match_total: Annotated[
        bool,
        typer.Option("--match-total", metavar="", help="Scale so that the sum of all steps is predicted."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="Overwrite the file if it exists.")
    ] = False,
) -> None:
    """Fit every form of step time to measured steps, and choose one by what was held out."""
    with plain_errors():
        from tailopt.engine.catalogue import load_engine, write_profile
        from tailopt.errors import InputError
        from tailopt.replay.fit import fit_steps
        from tailopt.replay.fit_file import fitted_profile, read_measured
        from tailopt.replay.fit_forms import KINDS
        from tailopt.report.fit import fit_report

        if out is not None:
            check_target(out, runs, force)
        measured = read_measured(runs)
        kinds = [one.value for one in kind] if kind else list(KINDS)
        fits = {
            tp if degree is None else degree: fit_steps(
                steps, kinds=kinds, prefill_tokens_per_s=prefill, match_total=match_total
            )
            for degree, steps in measured.steps.items()
        }
        print_all(fit_report(fits))
        if out is None:
            return
        profile = measured.profile if like is None else load_engine(like)
        if profile is None:
            raise InputError(
                "--like: expected an engine that gives the limits, as a table says nothing of them"
            )
        write_profile(fitted_profile(name or out.stem, profile, fits, measured), out)
        typer.echo(f"{out}: written", err=True)
