"""The simulator: an event-jumping kernel and the step-by-step reference that defines it."""

from tailopt.simulate.reference import simulate_reference
from tailopt.simulate.simulator import simulate

__all__ = ["simulate", "simulate_reference"]
