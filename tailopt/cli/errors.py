"""What goes wrong becomes one line on stderr and an exit code."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, cast

import typer

INPUT_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_UsageError = cast(
    "type[typer.BadParameter]",
    next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError"),
)
"""What typer raises for a command or options that are not as declared; it has no public name."""


def check_streams() -> None:
    """Make what a stream cannot encode a replacement character, and see that there is a standard output."""
    from tailopt.errors import InputError

    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as the process lives
    if sys.stdout is None:
        raise InputError("standard output: closed, expected it to be open")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
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
