"""Files: written whole or not at all, and read without surprises."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailopt.errors import InputError, one_line


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it takes the place of ``path`` only if nothing was raised.

    Raises:
        InputError: if the folder is not there, the file cannot be written, or the disk is full.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder) / "a.txt") as temporary:
    ...         _ = temporary.write_text("all of it")
    ...     [file.name for file in Path(folder).iterdir()]
    ['a.txt']
    """
    path = Path(path)
    if not path.name:
        raise InputError(f"{path}: expected the name of a file")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        temporary.touch(exist_ok=False)
    except (OSError, ValueError) as error:  # ValueError: a zero in the name
        raise InputError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)


def is_file(path: Path) -> bool:
    """Whether there is a file of this name; False too for a name that no file can have.

    >>> is_file(Path("x" * 10_000)), is_file(Path("a\\0b"))
    (False, False)
    """
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name; as :func:`is_file`.

    >>> is_folder(Path()), is_folder(Path("x" * 10_000))
    (True, False)
    """
    try:
        return path.is_dir()
    except OSError:
        return False


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Whatever polars raises on a Parquet file, in one InputError line that names the file.

    On some damaged files polars panics: no Exception, and a message of its own on stderr, which is held back
    here.
    """
    import polars as pl

    try:
        with _silent_stderr():
            yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or one_line(str(error))[:100]})") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, RuntimeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: broken Parquet ({one_line(str(error))[:100]})") from None


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Nothing that is written to the process's stderr is seen, below Python too."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
