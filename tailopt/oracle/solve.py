"""``solve``: a certificate for a problem, by any of the methods.

Every method is one module with one function that takes the problem, a time limit and a seed, and returns a
:class:`Certificate`; a method that runs out of time returns the best bound and the best plan it has.
"""

from collections.abc import Callable
from importlib import import_module

from tailopt.errors import InputError
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.problem import Problem

Method = Callable[..., Certificate]
"""``(problem, *, time_limit_s: float | None, seed: int) -> Certificate``"""

METHODS = {
    "staircase": "tailopt.oracle.bound_and_fill",
    "search": "tailopt.oracle.search",
    "lagrangian": "tailopt.oracle.lagrangian_solve",
    "kinds": "tailopt.oracle.mixed_solve",
    "dp": "tailopt.oracle.dp",
    "cpsat": "tailopt.oracle.cpsat",
    "highs": "tailopt.oracle.ilp",
    "scip": "tailopt.oracle.ilp",
}
"""Name of each method, which is that of its function, and the module that holds it, imported when used."""


def solve(
    problem: Problem, *, method: str = "search", time_limit_s: float | None = None, seed: int = 0
) -> Certificate:
    """Bound the makespan of every static plan from below, and find a plan.

    Args:
        problem: batch, fleet, and whether groups are atomic.
        method: one of ``METHODS``.
        time_limit_s: seconds after which the best found so far is returned; None for the method's own.
        seed: for methods that draw.

    Raises:
        InputError: if the method is unknown or needs a package that is not installed, or a request can never
            fit into an engine's KV cache.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Engine, Fleet
    >>> from tailopt.trace import Trace
    >>> fleet = Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1), Engine(1)), gpus=2)
    >>> solve(Problem(Trace.of([[900], [800], [700], [600], [500]]), fleet)).gap < 0.05
    True
    """
    if method not in METHODS:
        raise InputError(f"method {method!r}: unknown; known: {', '.join(METHODS)}")
    if time_limit_s is not None and not time_limit_s > 0:
        raise InputError(f"time limit: expected a positive number of seconds, got {time_limit_s}")
    function: Method = getattr(import_module(METHODS[method]), method)
    return function(problem, time_limit_s=time_limit_s, seed=seed)
