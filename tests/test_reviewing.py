"""Policies that are asked again while the batch runs: any state of it, and what each of them may change."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_policies import fleet_of

from tailopt.engine.profile import Draft
from tailopt.engine.speculation import Speculation
from tailopt.engine.step_time import Affine
from tailopt.errors import InputError
from tailopt.oracle.problem import Problem
from tailopt.plan import DROPPED, SHARED_QUEUE, Engine, Fleet, Plan, ReviewPoint, View
from tailopt.policies import resolve_policy
from tailopt.policies.example import example_view
from tailopt.policies.reviewing import move_seconds, seconds_of_engines
from tailopt.policies.units import fastest_alone
from tailopt.run import Run
from tailopt.simulate import simulate_policy, simulate_policy_reference
from tailopt.trace import Trace

REVIEWING = [
    "dyn(n=3)",
    "dyn(n=3, shape='1xTP1')",
    "split(tokens=60)",
    "steal",
    "rebalance",
    "rebalance(start='uniform')",
]

groups = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=1, max_size=8)
degrees = st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4)


@st.composite
def states(draw: st.DrawFn) -> View:
    """A batch under way: some requests are done, some run, some wait, some were never pulled."""
    trace = Trace.of(draw(groups), prompt_tokens=draw(st.integers(0, 100)))
    fleet = fleet_of(draw(degrees), draw(st.sampled_from([2, 64])))
    if draw(st.booleans()):
        profile = replace(fleet.profile, link_bytes_per_s=draw(st.sampled_from([1.0, 1e4, 1e9])))
        fleet = Fleet(profile, fleet.engines, fleet.gpus + draw(st.integers(0, 2)))
    start = View.at_start(
        trace, fleet, trace.output_tokens, atomic=draw(st.booleans()), seed=draw(st.integers(0, 99))
    )
    left = np.array(draw(st.lists(st.integers(0, trace.n_requests - 1), min_size=1, unique=True)))
    left.sort()
    n, m = len(left), len(fleet.engines)
    share = np.array(draw(st.lists(st.floats(0, 0.99), min_size=n, max_size=n)))
    generated = np.floor(share * trace.output_tokens[left]).astype(np.int64)
    unit = start.unit[left]
    engine = np.array(
        draw(
            st.lists(
                st.integers(SHARED_QUEUE, m - 1), min_size=int(unit.max()) + 1, max_size=int(unit.max()) + 1
            )
        )
    )[unit]
    running = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n))) & (engine >= 0)
    done = np.setdiff1d(np.arange(trace.n_requests), left)
    return replace(
        start, now_s=draw(st.floats(0.001, 100)), prompt=start.prompt[left],
        prompt_tokens=start.prompt_tokens[left], generated_tokens=generated, engine=engine,
        running=running, request=left,
        predicted_tokens=np.maximum(trace.output_tokens[left] * draw(st.floats(0.1, 3)), generated + 1),
        finished_prompt=start.prompt[done], finished_tokens=trace.output_tokens[done],
        finished_capped=np.zeros(len(done), np.bool_),
    )  # fmt: skip


@given(states())
@pytest.mark.parametrize("name", REVIEWING)
def test_any_state_is_answered_and_again_the_same(name: str, view: View) -> None:
    policy = resolve_policy(name)
    plan, again = policy(view), policy(view)  # the call checks the plan against the view
    assert (plan.engine_of >= SHARED_QUEUE).all()  # nothing is dropped
    assert np.array_equal(plan.engine_of, again.engine_of)
    assert np.array_equal(plan.order, again.order)
    assert plan.engines == again.engines
    if not name.startswith("dyn"):
        assert plan.engines == view.fleet.engines


def moved_requests(view: View, plan: Plan) -> np.ndarray:
    return np.flatnonzero(plan.engine_of != view.engine)


@given(states())
def test_steal_moves_only_what_waits_to_engines_without_work(view: View) -> None:
    plan = resolve_policy("steal")(view)
    moved = moved_requests(view, plan)
    assert not view.running[moved].any()
    used = np.unique(view.engine)
    if not view.atomic:
        assert not np.isin(plan.engine_of[moved], used).any()
    for e, waits in Counter(view.engine[~view.running & (view.engine >= 0)].tolist()).items():
        assert np.count_nonzero(view.engine[moved] == e) <= waits


def test_steal_takes_half_of_what_waits_where_most_waits() -> None:
    view = example_view([[9] * 3, [9] * 9], engines=(1, 1, 1), atomic=False)
    engine = np.array([0] * 3 + [1] * 9)
    running = np.array([True, False, False] + [True] * 3 + [False] * 6)
    now = replace(view, now_s=1.0, engine=engine, running=running)
    assert resolve_policy("steal")(now).engine_of.tolist() == [0] * 3 + [1] * 6 + [2] * 3


def test_steal_keeps_groups_together() -> None:
    view = example_view([[9] * 2, [9] * 2, [9] * 2], engines=(1, 1))
    running = np.array([True, False, False, False, False, False])
    now = replace(view, now_s=1.0, engine=np.zeros(6, np.int64), running=running)
    assert resolve_policy("steal")(now).engine_of.tolist() == [0, 0, 0, 0, 1, 1]


@given(states(), st.integers(1, 300), st.integers(1, 3))
def test_split_moves_what_has_proved_long_to_the_tail(view: View, tokens: int, tail_engines: int) -> None:
    assume(tail_engines < len(view.fleet.engines))
    plan = resolve_policy(f"split(tokens={tokens}, tail_engines={tail_engines})")(view)
    tail = fastest_alone(view)[:tail_engines]
    long_units = np.unique(view.unit[view.generated_tokens >= tokens])
    is_long = np.isin(view.unit, long_units)
    assert np.isin(plan.engine_of[is_long], tail).all()
    stays = ~is_long if not view.atomic else ~is_long & (view.engine >= 0)
    assert np.array_equal(plan.engine_of[stays], view.engine[stays])
    was_tail = np.isin(view.engine, tail)
    assert np.array_equal(plan.engine_of[was_tail], view.engine[was_tail])
    assert [(point.when, point.value) for point in plan.review] == [("tokens", tokens)]


@given(states(), st.integers(0, 2**32))
def test_split_starts_with_an_idle_tail(view: View, seed: int) -> None:
    start = example_view([[5, 6], [7], [8, 9], [3]], engines=(1, 2, 2), seed=seed % 1000)
    plan = resolve_policy("split(tokens=7)")(start)
    assert set(plan.engine_of.tolist()) == {0, 2}


@given(states())
def test_rebalance_moves_only_where_the_model_gains(view: View) -> None:
    plan = resolve_policy("rebalance")(view)
    before = view.engine if not view.atomic else plan.engine_of.copy()
    moved = np.flatnonzero(plan.engine_of != before)
    if not len(moved):
        return
    sources = np.unique(before[moved])
    assert (sources >= 0).all()
    targets = np.unique(plan.engine_of[moved])
    assert not np.isin(targets, before).any()
    was = seconds_of_engines(view, before)
    then = seconds_of_engines(view, plan.engine_of)
    for target in targets:
        flags = plan.engine_of == target
        then[target] += move_seconds(view, flags, int(target))
    assert then[np.concatenate([sources, targets])].max() < was[sources].max()


def crowded(link_bytes_per_s: float | None, prefill_tokens_per_s: float) -> View:
    view = example_view([[1000, 900, 800, 700, 600]], engines=(1, 1), atomic=False)
    shape = replace(view.fleet.profile.shape(1), prefill_tokens_per_s=prefill_tokens_per_s)
    profile = replace(view.fleet.profile, shapes={1: shape}, link_bytes_per_s=link_bytes_per_s)
    return replace(
        view, fleet=Fleet(profile, view.fleet.engines, 2), now_s=1.0, engine=np.zeros(5, np.int64),
        running=np.ones(5, np.bool_), generated_tokens=np.full(5, 100),
    )  # fmt: skip


def test_rebalance_by_hand() -> None:
    """10 ms a step and 1 ms a request: 12.5 s; 10.6 s without the longest, 10.7 s for the two longest."""
    assert resolve_policy("rebalance")(crowded(None, 1e4)).engine_of.tolist() == [1, 0, 0, 0, 0]
    view = crowded(None, 1e4)
    assert seconds_of_engines(view, view.engine).tolist() == pytest.approx([9.0 + 3.5, 0.0])
    two = np.array([True, True, False, False, False])
    assert float(move_seconds(view, two, 1)) == pytest.approx(220 / 1e4)


def test_rebalance_leaves_all_where_it_is_if_a_move_costs_more_than_it_saves() -> None:
    assert resolve_policy("rebalance")(crowded(None, 10.0)).engine_of.tolist() == [0] * 5
    assert resolve_policy("rebalance")(crowded(1e6, 10.0)).engine_of.tolist() == [1, 0, 0, 0, 0]  # sent
    waits = replace(crowded(None, 10.0), running=np.zeros(5, np.bool_))
    assert resolve_policy("rebalance")(waits).engine_of.tolist() == [1, 0, 0, 0, 0]


@given(states(), st.sampled_from(["1xTP4", "2xTP2", "1xTP2+1xTP1", "4xTP1", "1xTP1"]))
def test_dyn_switches_once(view: View, shape: str) -> None:
    target = Fleet.of(view.fleet.profile, shape)
    policy = resolve_policy(f"dyn(n=2, shape='{shape}')")
    if target.gpus > view.fleet.gpus:
        with pytest.raises(InputError, match="need"):
            policy(view)
        return
    plan = policy(view)
    wanted = Counter(engine.tp for engine in target.engines)
    assert Counter(engine.tp for engine in plan.engines) == wanted
    assert plan.review == ()
    if wanted == Counter(engine.tp for engine in view.fleet.engines):
        assert plan.engines == view.fleet.engines
        return
    for e, engine in enumerate(plan.engines):  # an engine that goes on keeps its requests
        for old, one in enumerate(view.fleet.engines):
            if engine.gpus is not None and one.same_as(engine):
                assert (plan.engine_of[view.engine == old] == e).all()
    after = Fleet(view.fleet.profile, plan.engines, view.fleet.gpus)
    again = policy(replace(view, fleet=after, engine=plan.engine_of))
    assert again.engines == after.engines
    assert np.array_equal(again.engine_of, plan.engine_of)


def test_dyn_deals_the_tail_over_what_is_opened() -> None:
    view = example_view([[9] * 5], engines=(1, 1, 2), atomic=False)
    now = replace(view, now_s=1.0, engine=np.array([0, 0, 1, 2, 2]), running=np.ones(5, np.bool_))
    plan = resolve_policy("dyn(n=5, shape='2xTP2')")(now)
    assert plan.engines == (Engine(2, None, (2, 3)), Engine(2))
    assert plan.engine_of.tolist() == [1, 1, 0, 0, 0] or plan.engine_of.tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dyn(n=0)", "n: expected at least 1, got 0"),
        ("dyn(shape='2xTP1+')", "expected engines like 8xTP1"),
        ("dyn(shape='3xTP1')", "3 engines need 3 GPUs, there are 2"),
        ("dyn(shape='1xTP2')", "has no TP2; known: TP1"),
        ("split(tokens=0)", "tokens: expected at least 1, got 0"),
        ("split(tail_engines=2)", "tail_engines: expected 1 to 1 of 2, got 2"),
        ("rebalance(start='dyn')", "start: expected uniform or lpt, got 'dyn'"),
    ],
)
def test_options_out_of_range(spec: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        resolve_policy(spec)(example_view([[5, 6]]))
    assert message in str(error.value)


@pytest.mark.parametrize("spec", ["top_k(k=1, speculate='mtp')", "split(tokens=50, speculate='mtp')"])
def test_the_tail_may_speculate(spec: str) -> None:
    """Seconds are those of the tail engine's own steps: half as many, at the same time each."""
    lengths = [[400], [30], [20], [10]]
    view = example_view(lengths, engines=(1, 1))
    with pytest.raises(InputError, match="has no draft method 'mtp'; known: none"):
        resolve_policy(spec)(view)
    shape = replace(
        view.fleet.profile.shape(1), step_time=Affine(10e-3, 0.0), drafts=(Draft("mtp", 1.0, most_tokens=1),)
    )
    profile = replace(view.fleet.profile, shapes={1: shape})
    view = replace(view, fleet=Fleet(profile, view.fleet.engines, 2))
    plan = resolve_policy(spec)(view)
    assert [engine.speculation is not None for engine in plan.engines] == [True, False]
    trace = Trace.of(lengths, prompt_tokens=10)
    with_drafts = simulate_policy(trace, resolve_policy(spec), view)
    without = simulate_policy(trace, resolve_policy(spec.replace(", speculate='mtp'", "")), view)
    assert with_drafts.output_tokens.tolist() == without.output_tokens.tolist() == [400, 30, 20, 10]
    saved = 200 if spec.startswith("top_k") else 175
    assert without.makespan_s - with_drafts.makespan_s == pytest.approx(saved * 10e-3, abs=0.03)


def test_the_oracle_takes_no_engine_that_speculates() -> None:
    shape = replace(example_view([[1]]).fleet.profile.shape(1), drafts=(Draft("mtp", 0.5),))
    profile = replace(example_view([[1]]).fleet.profile, shapes={1: shape})
    trace = Trace.of([[3, 4]])
    Problem(trace, Fleet(profile, (Engine(1), Engine(1, scheduling="priority")), 2))
    with pytest.raises(InputError, match=r"engine 1 speculates \(mtp\), expected none that does"):
        Problem(trace, Fleet(profile, (Engine(1), Engine(1, speculation=Speculation("mtp"))), 2))


@pytest.mark.parametrize("simulator", [simulate_policy, simulate_policy_reference])
def test_a_review_at_time_0_is_not_the_start(simulator: Callable[..., Run]) -> None:
    """One engine pulls the only request at 0 s, the other is idle: the fleet may change at once."""
    trace = Trace.of([[5, 5]], prompt_tokens=3)
    view = View.at_start(trace, fleet_of([1, 1]))
    shape = view.fleet.profile.shape(1)
    profile = replace(view.fleet.profile, shapes={1: shape, 2: replace(shape, tp=2)})
    view = replace(view, fleet=Fleet(profile, view.fleet.engines, 2))
    seen: list[View] = []

    def policy(now: View) -> Plan:
        seen.append(now)
        if now.is_start:
            return Plan(now.fleet.engines, [1, 1], [0, 1], review=(ReviewPoint("time", 0.01),))
        return Plan((Engine(2),), [DROPPED, 0], [0, 1])

    def at_once(now: View) -> Plan:
        seen.append(now)
        if now.is_start:
            return Plan(now.fleet.engines, [SHARED_QUEUE] * 2, [0, 1], True, review=(ReviewPoint("idle"),))
        return Plan((Engine(2),), [DROPPED, 0], [0, 1])

    for one in (policy, at_once):
        seen.clear()
        run = simulator(trace, one, view)
        assert [now.is_start for now in seen] == [True, False]
        assert len(run.reviews) == 1
        assert run.engines[-1].tp == 2
        assert run.completed.tolist() == [False, True]
    assert run.reviews[0].time_s == 0.0
