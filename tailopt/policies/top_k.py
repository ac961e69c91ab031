"""Top-k isolation with a fixed k."""

from tailopt.errors import InputError
from tailopt.plan import Plan, View
from tailopt.policies.isolation import Isolation, speculating
from tailopt.policies.units import longest_first, n_units, plan_units


def top_k(view: View, *, k: int | None = None, tail_engines: int = 1, speculate: str | None = None) -> Plan:
    """Send the k units predicted longest to tail engines of their own, and deal the rest uniformly.

    ``k`` counts units, groups if they are atomic; by default it is a quarter of the units that an engine gets
    when they are dealt evenly, rounded up. Tail engines are the ones fastest for a lone request. With one
    engine there is nothing to isolate. ``speculate`` names a draft method of the engine profile for the tail
    engines alone: they run few requests, where speculation pays.

    Source: TailSieve (Xu et al., TailSieve: Partial-Rollout-Guided Tail Routing for LLM Rollouts, arXiv),
    with known lengths, or with the prompts that a partial rollout left unfinished; its route-specialized
    speculation is ``speculate``.

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
    k = -(-n_units(view) // (4 * engines)) if k is None else k
    isolated = (k, tail_engines) if k and engines > 1 else (0, 0)
    isolation = Isolation.of(view)
    plan = plan_units(view, isolation.engine_of_unit(*isolated), longest_first(view))
    return speculating(plan, isolation.engines[: isolated[1]], speculate)
