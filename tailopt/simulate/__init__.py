"""The simulator: an event-jumping kernel and the step-by-step reference that defines it."""
