"""A small view to try a policy on: in documentation, in tests, or on one's own rule before a real trace."""

from collections.abc import Sequence

from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.plan import Engine, Fleet, View
from tailopt.trace import Trace


def example_view(
    groups: Sequence[Sequence[int]], *, engines: Sequence[int] = (1, 1), atomic: bool = True, seed: int = 0
) -> View:
    """The start of a batch whose predicted lengths are ``groups``.

    ``engines`` lists the tensor-parallel degree of each engine. The engine is invented: a step takes 10 ms
    plus 1 ms a request, over the degree.

    >>> view = example_view([[90, 80], [10, 20]])
    >>> view.n_requests, str(view.fleet)
    (4, '2xTP1')
    """
    shapes = {tp: ShapeProfile(tp, Affine(10e-3 / tp, 1e-3 / tp), 1e4, 10**6, 256) for tp in set(engines)}
    profile = EngineProfile(
        name="example", hardware="none", model="none", precision="none", engine="none", engine_version="0",
        date="2026-01-01", sources=("invented",), licence="", kv_bytes_per_token=1, shapes=shapes,
    )  # fmt: skip
    trace = Trace.of(groups, prompt_tokens=10, name="example", synthetic=True)
    fleet = Fleet(profile, tuple(Engine(tp) for tp in engines), gpus=sum(engines))
    return View.at_start(trace, fleet, trace.output_tokens, atomic=atomic, seed=seed)
