"""Ctrl-C where searches follow each other, and time limits that are over before the first plan."""

from collections.abc import Callable
from time import perf_counter, process_time

import pytest
from strategies import fleet_of, profile

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, Power
from tailopt.oracle import (
    lagrangian,
    local_search,
    mixed_ends,
    mixed_priced,
    mixed_queues,
    mixed_search,
    mixed_solve,
)
from tailopt.oracle.bound_and_fill import staircase
from tailopt.oracle.check import check
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.plan import Engine, Fleet
from tailopt.trace import Trace

TRACE = Trace.of([[400 + 9 * k] for k in range(120)], prompt_tokens=50)
CROWDED = Problem(TRACE, fleet_of(Affine(5e-3, 1e-4, 1e-7), 2, kv_capacity_tokens=15_000))
KINKED = Problem(TRACE, fleet_of(MaxAffine(((5e-3, 1e-5, 0.0), (1e-3, 3e-4, 0.0))), 3))

SEARCHES = [
    (local_search._Search, "advance"),
    (mixed_search._Model, "moved"),
    (mixed_queues.Queues, "jobs"),
    (mixed_ends.Ends, "anneal"),
    (mixed_priced.KindsAscent, "climb"),
]
"""What each of the searches calls again and again, in the order in which they follow each other."""


def interrupted(patch: pytest.MonkeyPatch, owner: object, name: str, calls: list[str], *, after: int) -> None:
    """Have a function raise KeyboardInterrupt at the call after so many, and note its calls."""
    function: Callable[..., object] = getattr(owner, name)

    def stand_in(*arguments: object, **named: object) -> object:
        calls.append(name)
        if calls.count(name) > after:
            raise KeyboardInterrupt
        return function(*arguments, **named)

    patch.setattr(owner, name, stand_in)


@pytest.mark.parametrize(
    ("place", "after"), [(0, 0), *((place, after) for place in (1, 2, 3) for after in (0, 1)), (4, 0)]
)
def test_no_search_begins_after_an_interrupt(place: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for k, (owner, name) in enumerate(SEARCHES):
        interrupted(monkeypatch, owner, name, calls, after=after if k == place else 10**9)
    found = solve(CROWDED)
    stopped = SEARCHES[place][1]
    assert calls.count(stopped) == after + 1
    assert set(calls) == {name for _, name in SEARCHES[: place + 1]}
    assert found.upper_s <= staircase(CROWDED).upper_s
    check(found, CROWDED)


def test_no_prices_and_no_limits_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    interrupted(monkeypatch, local_search._Search, "advance", calls, after=1)
    interrupted(monkeypatch, lagrangian.Ascent, "climb", calls, after=10**9)
    interrupted(monkeypatch, mixed_solve, "admit", calls, after=10**9)
    found = solve(KINKED)
    assert set(calls) == {"advance"}
    check(found, KINKED)


def test_a_plan_that_was_interrupted_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    interrupted(monkeypatch, mixed_queues.Queues, "jobs", calls, after=1)
    interrupted(monkeypatch, mixed_priced.KindsAscent, "climb", calls, after=10**9)
    proof = mixed_solve.begun(CROWDED, time_limit_s=60.0, seed=0)
    assert proof is not None
    proof.go_on(perf_counter() + 60.0)
    assert calls == ["jobs", "jobs"]
    check(proof.certificate(), CROWDED)


@pytest.mark.parametrize("method", ["staircase", "search", "lagrangian", "kinds"])
@pytest.mark.parametrize("kind", ["alike", "mixed"])
def test_hardly_any_time_is_enough_for_a_certificate(method: str, kind: str) -> None:
    """Fillings, prices and searches of 2,000 requests take seconds of the processor, a plan 0.1."""
    trace = Trace.of([[100 + 7 * k % 5003] for k in range(2_000)], prompt_tokens=50)
    fleet = fleet_of(Power(5e-3, 1e-3, 0.5), 24)
    if kind == "mixed":
        sizes = [ShapeProfile(tp, Affine(8e-3 / tp, 2e-4, 1e-8), 1e4, 10**7, 256) for tp in (1, 2)]
        fleet = Fleet(profile(*sizes), (Engine(1),) * 16 + (Engine(2),) * 8, 32)
    problem = Problem(trace, fleet)
    solve(Problem(TRACE, fleet), method=method, time_limit_s=0.5)  # compiled
    spent_s, started = process_time(), perf_counter()
    found = solve(problem, method=method, time_limit_s=1e-3)
    assert process_time() - spent_s < 1.0
    assert found.wall_s <= perf_counter() - started
    assert 0 < found.lower_s <= found.upper_s
