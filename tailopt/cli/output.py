"""Where a command's output goes: stdout for what was asked, stderr for progress; and what Ctrl-C does."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


INSIST_S = 2.0  # after which Ctrl-C is raised again: what is called back from C drops it
COMPILER_S = 0.05  # between looks whether the compiler is done: Ctrl-C would leave half a function


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Yield what raises if Ctrl-C was pressed before: a solver that is interrupted keeps its plan.

    The first Ctrl-C waits for numba to finish the function it compiles: inside, a KeyboardInterrupt becomes
    another error, or none. The second does not wait.
    """
    came: list[int] = []
    alarm = getattr(signal, "SIGALRM", None)  # there is none on Windows

    def handle(number: int, _: object) -> None:
        came.append(number)
        if alarm is not None:
            wait = _compiling() and came.count(signal.SIGINT) == 1
            signal.setitimer(signal.ITIMER_REAL, COMPILER_S if wait else INSIST_S)
            if wait:
                return
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    numbers = [signal.SIGINT] if alarm is None else [signal.SIGINT, alarm]
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield check
        check()
    except Exception:
        check()
        raise
    finally:
        if alarm is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _compiling() -> bool:
    lock = sys.modules.get("numba.core.compiler_lock")
    return lock is not None and bool(lock.global_compiler_lock.is_locked())


@contextlib.contextmanager
def progress_bar(
    batches: int, check: Callable[[], None], *, show: bool
) -> Iterator[Callable[[int, int], None]]:
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


@contextlib.contextmanager
def spinner(what: str, *, show: bool) -> Iterator[Callable[[str], None]]:
    """What is going on and for how long, on stderr, if that is a terminal; yields what to call with news."""
    if not (show and sys.stderr.isatty()):
        yield lambda news: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as line:
        task = line.add_task(what, total=None)
        yield lambda news: line.update(task, description=news)


def print_all(renderables: Sequence["RenderableType"]) -> None:
    """Print to stdout as wide as it is, without colours if it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as capture:
        for one in renderables:
            console.print(one)
    write_out("\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n")


def write_out(text: str) -> None:
    """Write text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
