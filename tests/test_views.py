"""What a policy sees at a review, what it may ask for, and when it is asked too often."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from strategies import profile

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.errors import InputError
from tailopt.plan import DROPPED, Engine, Fleet, Plan, ReviewPoint, View
from tailopt.run import Run
from tailopt.simulate import simulate_policy, simulate_policy_reference
from tailopt.trace import Trace

SIMULATORS = [simulate_policy, simulate_policy_reference]


def fleet(engines: int = 1, gpus: int = 2, **limits: float) -> Fleet:
    """Engines whose step takes a second, and a prompt token a quarter of one."""
    shape = ShapeProfile(1, Affine(1.0, 0.0), 4.0, 10**6, 8, token_budget=10**4, prefix_caching=False)
    return Fleet(profile(replace(shape, **limits)), (Engine(1),) * engines, gpus)  # type: ignore[arg-type]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_lengths_that_were_cut_off_are_marked(simulator: Callable[..., Run]) -> None:
    """One ends by itself, one at a limit, one at a limit that is its length; one is dropped, one goes on."""
    trace = Trace.of([[2, 9], [4], [20, 30]], prompt_tokens=1)
    seen: list[View] = []

    def policy(view: View) -> Plan:
        seen.append(view)
        n = view.n_requests
        if view.is_start:
            limits = [50, 3, 4, 50, 50]
            points = (ReviewPoint("tokens", 6),)
            return Plan(view.fleet.engines, [0] * n, range(n), review=points, max_tokens=limits)
        if len(seen) == 2:
            return Plan(view.fleet.engines, [DROPPED, 0], range(n), review=(ReviewPoint("tokens", 8),))
        return Plan(view.fleet.engines, [0] * n, range(n))

    run = simulator(trace, policy, View.at_start(trace, fleet()))
    start, first, second = seen
    assert first.finished_tokens.tolist() == [2, 3, 4]  # type: ignore[union-attr]
    assert first.finished_capped.tolist() == [False, True, False]  # type: ignore[union-attr]
    assert first.finished_prompt.tolist() == [0, 0, 1]  # type: ignore[union-attr]
    assert second.finished_tokens.tolist() == [2, 3, 4, 6]  # type: ignore[union-attr]
    assert second.finished_capped.tolist() == [False, True, False, True]  # type: ignore[union-attr]
    assert start.finished_capped.tolist() == []  # type: ignore[union-attr]
    assert run.output_tokens.tolist() == [2, 3, 4, 6, 30]


def test_an_idle_review_is_of_an_engine_that_had_something() -> None:
    """The second engine never gets anything: nobody is asked."""
    trace = Trace.of([[3], [5]])
    asked: list[float] = []

    def policy(view: View) -> Plan:
        asked.append(view.now_s)
        n = view.n_requests
        return Plan(view.fleet.engines, [0] * n, range(n), review=(ReviewPoint("idle"),))

    simulate_policy(trace, policy, View.at_start(trace, fleet(2)))
    assert asked == [0.0]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_a_policy_may_look_at_the_clock_for_long(simulator: Callable[..., Run]) -> None:
    """Every second until the first request comes after 1,500 s, and while its prompt takes as long."""
    trace = replace(Trace.of([[5]], prompt_tokens=6001), arrival_s=np.array([1500.0]))
    asked: list[float] = []

    def policy(view: View) -> Plan:
        asked.append(view.now_s)
        return Plan(view.fleet.engines, [0], [0], review=(ReviewPoint("time", view.now_s + 1),))

    run = simulator(trace, policy, View.at_start(trace, fleet()))
    assert run.makespan_s == 1500 + 6000 / 4 + 5
    assert len(asked) > 2000


def test_a_policy_that_holds_up_the_batch_is_refused() -> None:
    """A prompt that takes 3,000 s goes to the other engine every second; another one is woken each time."""
    trace = Trace.of([[5]], prompt_tokens=12001)

    def there_and_back(view: View) -> Plan:
        to = 1 if view.engine[0] == 0 else 0
        return Plan(view.fleet.engines, [to], [0], review=(ReviewPoint("time", view.now_s + 1),))

    def restless(view: View) -> Plan:
        point = ReviewPoint("time", view.now_s + 1)
        gpu = 1 if view.fleet.engines[0].gpus == (0,) else 0
        engines = view.fleet.engines if view.is_start else (Engine(1, gpus=(gpu,)),)
        return Plan(engines, [0], [0], review=(point,))

    for policy, machines in ((there_and_back, fleet(2)), (restless, fleet(1, 2, wake_s=2.0))):
        with pytest.raises(InputError, match="1001 reviews without a token between, at one instant or with"):
            simulate_policy(trace, policy, View.at_start(trace, machines))


def test_review_points_are_below_2_to_the_53() -> None:
    for when in ("tokens", "unfinished"):
        assert ReviewPoint(when, 2**53 - 1).value == 2**53 - 1  # type: ignore[arg-type]
        for value in (2.0**53, 1e300):
            with pytest.raises(InputError, match=rf"review point: {when}: expected a number below 2\*\*53"):
                ReviewPoint(when, value)  # type: ignore[arg-type]
    assert ReviewPoint("time", 1e300).value == 1e300


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_the_order_of_gpus_has_no_meaning(simulator: Callable[..., Run]) -> None:
    assert Engine(2, gpus=(1, 0)) == Engine(2, gpus=(0, 1))
    shape = replace(fleet().profile.shape(1), tp=2)
    trace = Trace.of([[5], [5]], prompt_tokens=1)

    def policy(view: View) -> Plan:
        points = (ReviewPoint("time", 2.5),) if view.is_start else ()
        return Plan((Engine(2, gpus=(0, 1) if view.is_start else (1, 0)),), [0, 0], [0, 1], review=points)

    run = simulator(trace, policy, View.at_start(trace, Fleet(profile(shape), (Engine(2),), 2)))
    assert (len(run.engines), len(run.moves.request), run.makespan_s) == (1, 0, 5.0)
