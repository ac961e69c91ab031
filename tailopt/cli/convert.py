"""``tailopt convert``: a trace of any known format as Parquet or CSV."""

from pathlib import Path
from typing import Annotated

import typer

from tailopt.cli.errors import plain_errors
from tailopt.cli.inputs import check_target, read_traces
from tailopt.cli.options import CapOption, FormatOption, SkipOption, TokenizerOption


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
    with plain_errors():
        from tailopt.trace.reading import write_trace

        check_target(out, sources, force)
        rollouts, notes = read_traces(sources, format_, cap, skip_bad, tokenizer)
        write_trace(rollouts, out)
        for line in (f"{out}: {rollouts.n_requests} responses to {rollouts.n_prompts} prompts", *notes):
            typer.echo(line, err=True)
