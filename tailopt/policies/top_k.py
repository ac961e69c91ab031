"""Top-k isolation with a fixed k."""

from tailopt.errors import InputError
from tailopt.plan import Plan, View
from tailopt.policies.isolation import isolate
from tailopt.policies.units import longest_first, n_units, plan_units


def top_k(view: View, *, k: int | None = None, tail_engines: int = 1) -> Plan:
    """Send the k units predicted longest to tail engines of their own, and deal the rest uniformly.

    ``k`` counts units, groups if they are atomic; by default it is a tenth of them, rounded up. Tail engines
    are the ones fastest for a lone request. With a single engine there is nothing to isolate.

    Source: TailSieve (Xu et al., TailSieve: Partial-Rollout-Guided Tail Routing for LLM Rollouts, arXiv),
    with known lengths, or with the prompts that a partial rollout left unfinished.

    >>> from tailopt.policies.example import example_view
    >>> top_k(example_view([[10, 10], [90, 80], [60, 60], [30, 30]]), k=1).engine_of
    array([1, 1, 0, 0, 1, 1, 1, 1])
    """
    engines = len(view.fleet.engines)
    if k is not None and k < 0:
        raise InputError(f"k: expected at least 0, got {k}")
    if tail_engines < 1 or (tail_engines >= engines and engines > 1):
        raise InputError(
            f"tail_engines: expected 1 to {max(1, engines - 1)} of {engines}, got {tail_engines}"
        )
    k = -(-n_units(view) // 10) if k is None else k
    engine_of_unit = isolate(view, k, tail_engines) if k and engines > 1 else isolate(view, 0, 0)
    return plan_units(view, engine_of_unit, longest_first(view))
