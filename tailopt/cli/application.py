"""The application: its commands, and ``main``. A new command is one module and one line here."""

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from tailopt.cli.compare import compare
from tailopt.cli.convert import convert
from tailopt.cli.errors import check_streams, plain_errors
from tailopt.cli.fit import fit
from tailopt.cli.listings import engines, policies, traces
from tailopt.cli.oracle import oracle
from tailopt.cli.profile import profile
from tailopt.cli.replay import replay
from tailopt.cli.rollout import rollout

app = typer.Typer(
    help="Compare scheduling policies for LLM RL rollouts against a certified optimum, on real traces.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

COMMANDS = (
    compare,
    oracle,
    replay,
    rollout,
    traces,
    engines,
    policies,
    convert,
    profile,
    fit,
)
"""In the order of the help."""

for command in COMMANDS:
    app.command()(command)


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


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command ``tailopt``: whatever is wrong is one line on stderr, and the exit code says which kind."""
    code = 0
    try:
        with plain_errors():
            check_streams()
            code = app(arguments, prog_name="tailopt", standalone_mode=False) or 0
            sys.stdout.flush()
    except typer.Exit as ended:
        code = ended.exit_code
    sys.exit(code)
