"""Ctrl-C where one search follows another: the one that runs keeps what it has, and no other begins."""

from types import TracebackType


class Stop:
    """Ends what is inside at Ctrl-C, silently, and knows afterwards that it came.

    >>> stop = Stop()
    >>> with stop:
    ...     raise KeyboardInterrupt
    >>> with stop:
    ...     stop.check()
    ...     print("not reached")
    >>> stop.came
    True
    """

    def __init__(self) -> None:
        self.came = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if it came before."""
        if self.came:
            raise KeyboardInterrupt

    def __enter__(self) -> "Stop":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.came = self.came or interrupted
        return interrupted
