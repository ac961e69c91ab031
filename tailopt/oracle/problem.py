"""What the oracle is asked."""

from dataclasses import dataclass

from tailopt.plan import Fleet
from tailopt.trace import Trace


@dataclass(frozen=True)
class Problem:
    """A batch with known lengths, a fleet, and whether groups must stay together: which static plan is best?

    A *static plan* fixes each request's engine at time 0 for good; order and concurrency limits are free.
    """

    trace: Trace
    fleet: Fleet
    atomic: bool = False
