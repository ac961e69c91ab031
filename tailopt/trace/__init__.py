"""Traces: what a rollout generated. The type, readers and writers, transforms, statistics."""

from tailopt.trace.trace import UNKNOWN_CORRECT, Trace

__all__ = ["UNKNOWN_CORRECT", "Trace"]
