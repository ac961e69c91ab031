"""The simulator: an event-jumping kernel and the step-by-step reference that defines it."""

from tailopt.simulate.reference import simulate_policy_reference, simulate_reference
from tailopt.simulate.simulator import simulate, simulate_policy

__all__ = ["simulate", "simulate_policy", "simulate_policy_reference", "simulate_reference"]
