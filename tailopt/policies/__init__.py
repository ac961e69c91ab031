"""Policies: one file each; ``POLICIES`` maps names to them.

A policy is a function ``(View, **options) -> Plan``; options are keyword-only and have defaults. A new one is
a file here and a line below. Its docstring says the idea in its first line, and where it comes from in a
paragraph that starts with ``Source:``; ``tailopt policies`` prints both.
"""

from collections.abc import Callable, Mapping

from tailopt.plan import Plan
from tailopt.policies import (
    best_k,
    dyn,
    least_loaded,
    lpt,
    lpt_additive,
    rebalance,
    round_robin,
    sample_average,
    shared_queue,
    split,
    steal,
    top_k,
    uniform,
)
from tailopt.policies.named import NamedPolicy, ignores_predictions
from tailopt.spec import parse

POLICIES: Mapping[str, Callable[..., Plan]] = {
    "uniform": uniform.uniform,
    "round_robin": round_robin.round_robin,
    "least_loaded": least_loaded.least_loaded,
    "shared_queue": shared_queue.shared_queue,
    "lpt_additive": lpt_additive.lpt_additive,
    "lpt": lpt.lpt,
    "top_k": top_k.top_k,
    "best_k": best_k.best_k,
    "sample_mean": sample_average.sample_average,
    "dyn": dyn.dyn,
    "split": split.split,
    "steal": steal.steal,
    "rebalance": rebalance.rebalance,
}


def resolve_policy(text: str) -> NamedPolicy:
    """The policy that a spec names (see :mod:`tailopt.spec`).

    Raises:
        InputError: if it names none, or its options are wrong.

    >>> resolve_policy("top_k(k=3)").needs_predictions
    True
    """
    return NamedPolicy(parse("policy", text, POLICIES))


__all__ = ["POLICIES", "NamedPolicy", "ignores_predictions", "resolve_policy"]
