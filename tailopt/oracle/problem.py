"""What the oracle is asked."""

from dataclasses import dataclass

from tailopt.errors import InputError
from tailopt.plan import Fleet
from tailopt.trace import Trace


@dataclass(frozen=True)
class Problem:
    """A batch with known lengths, a fleet, and whether groups must stay together: which static plan is best?

    A *static plan* fixes each request's engine at time 0 for good; order and concurrency limits are free.

    What the host takes is part of ``step_time``, which the bounds read; that a step without decoding takes
    ``host_s`` too only makes plans later, never a bound too high. Bounds hold for any order and any
    scheduling, but they count one token per request and step.

    Raises:
        InputError: if an engine speculates.
    """

    trace: Trace
    fleet: Fleet
    atomic: bool = False

    def __post_init__(self) -> None:
        for number, engine in enumerate(self.fleet.engines):
            if engine.speculation is not None:
                raise InputError(
                    f"problem: engine {number} speculates ({engine.speculation.method}), expected none that "
                    "does: the bounds count one token per request and step"
                )
