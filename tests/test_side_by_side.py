"""Compiled work on two cores says what it says on one."""

import numpy as np
import pytest
from strategies import fleet_of

from tailopt.engine.step_time import MaxAffine, Power
from tailopt.errors import InputError
from tailopt.oracle import lagrangian_search
from tailopt.oracle import side_by_side as cores_of
from tailopt.oracle.bound_and_fill import staircase
from tailopt.oracle.lagrangian import Ascent, Asked
from tailopt.oracle.lagrangian_search import PricedSearch
from tailopt.oracle.problem import Problem
from tailopt.oracle.side_by_side import halves, side_by_side
from tailopt.oracle.units import units_of
from tailopt.trace import Trace


def interrupted() -> int:
    raise KeyboardInterrupt


def test_interrupts_wait_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_of, "cores", lambda: 2)
    done = []
    with pytest.raises(KeyboardInterrupt):
        side_by_side([interrupted, lambda: done.append(1)])
    assert done == [1]
    with pytest.raises(KeyboardInterrupt):
        side_by_side([lambda: 1, interrupted])
    assert side_by_side([lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(InputError, match="3 pieces of work"):
        side_by_side([lambda: 1] * 3)


@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_halves_are_all(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for cores in (1, 2):
        monkeypatch.setattr(cores_of, "cores", lambda cores=cores: cores)
        parts = halves(count, 10**9)
        assert len(parts) == min(cores, count)
        assert [i for part in parts for i in range(count)[part]] == list(range(count))


def test_prices_and_search_do_not_depend_on_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace.of(np.random.default_rng(5).lognormal(7, 0.6, (30, 2)).astype(int).tolist())
    kinked = MaxAffine(((12e-3, 1e-5, 1e-8), (8e-3, 3e-5, 9e-8)))
    for tau in (kinked, Power(2e-3, 1e-4, 0.6, 1e-9)):
        problem = Problem(trace, fleet_of(tau, 4))
        found = []
        for cores in (1, 2):
            monkeypatch.setattr(cores_of, "cores", lambda cores=cores: cores)
            monkeypatch.setattr(cores_of, "WORTH_IT", 0)
            monkeypatch.setattr(lagrangian_search, "cores", lambda cores=cores: cores)
            monkeypatch.setattr(lagrangian_search, "WORTH_IT", 0)
            found.append(priced_and_searched(problem))
        assert found[0] == found[1]


def priced_and_searched(problem: Problem) -> tuple:
    quick, units = staircase(problem), units_of(problem)
    engine_of = quick.plan.engine_of[[members[0] for members in units.members]]
    ascent = Ascent(Asked(problem, units, engine_of, quick.upper_s))
    ascent.climb(12)
    assert ascent.best is not None
    searched = PricedSearch(ascent.best).narrow(ascent.best_s, quick.upper_s, 3_000, np.inf)
    plans = [plan.tolist() for plan in searched.plans]
    prices, multipliers = ascent.best.prices.tolist(), ascent.best.multipliers.tolist()
    return ascent.best_s, prices, multipliers, searched.lower_s, searched.states, searched.given_up_s, plans
