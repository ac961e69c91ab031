"""The event-jumping simulator against its step-by-step definition, closed forms, and conservation laws."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    RandomPolicy,
    affine_terms,
    arriving,
    exact_step_times,
    fleet_of,
    fleets,
    plans,
    profile,
    speculating,
    step_times,
    traces,
)

from tailopt.engine.profile import Draft, ShapeProfile
from tailopt.engine.speculation import Speculation
from tailopt.engine.step_time import Affine, MaxAffine, Power
from tailopt.errors import InputError
from tailopt.plan import Engine, Fleet, Plan, Policy, ReviewPoint, View
from tailopt.run import EngineLog, Run
from tailopt.simulate import (
    kernel,
    simulate,
    simulate_policy,
    simulate_policy_reference,
    simulate_reference,
)
from tailopt.simulate.kernel import PAGE
from tailopt.simulate.packed import PackedLog
from tailopt.simulate.records import COUNTERS, ENGINE, LOG, PAGES
from tailopt.trace import Trace

CASES = 2 * settings().max_examples  # the profile's number, doubled: these are the project's foundation


def assert_same_run(fast: Run, slow: Run, *, rtol: float) -> None:
    for column in ("engine", "output_tokens", "preemptions"):
        np.testing.assert_array_equal(getattr(fast, column), getattr(slow, column), err_msg=column)
    for column in ("start_s", "first_token_s", "finish_s"):
        np.testing.assert_allclose(getattr(fast, column), getattr(slow, column), rtol=rtol, err_msg=column)
    by_request = [np.lexsort((run.stays.start_s, run.stays.request)) for run in (fast, slow)]
    for column in ("request", "engine", "start_s", "end_s"):
        stays = [
            getattr(run.stays, column)[order] for run, order in zip((fast, slow), by_request, strict=True)
        ]
        np.testing.assert_allclose(*stays, rtol=rtol, err_msg=f"stays {column}")
    # the kernel logs the steps in which something happens, the reference all of them
    keys = [run.log.engine * 10**9 + 2 * run.log.step + (run.log.running > 0) for run in (fast, slow)]
    at = np.searchsorted(keys[1], keys[0])
    np.testing.assert_array_equal(keys[1][at], keys[0])
    for column in ("running", "kv_tokens"):
        logged = getattr(fast.log, column), getattr(slow.log, column)[at]
        np.testing.assert_array_equal(*logged, err_msg=column)
    np.testing.assert_allclose(fast.log.time_s, slow.log.time_s[at], rtol=rtol)


@settings(max_examples=CASES)
@given(st.data())
def test_jumps_equal_steps_for_any_plan(data: st.DataObject) -> None:
    """Shared queues, atomic groups, all limits, mixed shapes, arrivals; exact times make ties true ties."""
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, exact_step_times()))
    plan = data.draw(plans(trace, fleet))
    trace = data.draw(arriving(trace))
    assert_same_run(simulate(trace, fleet, plan), simulate_reference(trace, fleet, plan), rtol=0)


@settings(max_examples=CASES)
@given(st.data())
def test_jumps_equal_steps_for_any_step_time(data: st.DataObject) -> None:
    """Without a shared queue engines do not interact, so any step time will do."""
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, step_times(), prefill_tokens_per_s=data.draw(st.floats(1, 1e4))))
    plan = data.draw(plans(trace, fleet, shared=False))
    assert_same_run(simulate(trace, fleet, plan), simulate_reference(trace, fleet, plan), rtol=1e-9)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "speculating"])
@given(data=st.data())
def test_jumps_equal_steps_through_any_reviews(data: st.DataObject, drafts: bool) -> None:
    """Review points of all kinds, switches, moves, drops, limits, deadlines, priorities, speculation."""
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, exact_step_times()))
    if drafts:
        fleet = data.draw(speculating(fleet))
    trace = data.draw(arriving(trace))
    view = View.at_start(trace, fleet, atomic=data.draw(st.booleans()))
    seed = data.draw(st.integers(0, 2**32))
    fast = simulate_policy(trace, RandomPolicy(seed), view)
    slow = simulate_policy_reference(trace, RandomPolicy(seed), view)
    assert_same_run(fast, slow, rtol=1e-12 if drafts else 0)


@settings(max_examples=CASES)
@given(st.data())
def test_ties_up_to_rounding_are_ties(data: st.DataObject) -> None:
    """Equal engines, few lengths, terms that no double holds: they meet at times that differ in rounding."""
    lengths = data.draw(st.lists(st.sampled_from([3, 7, 20, 30]), min_size=1, max_size=8))
    trace = Trace.of([[length] for length in lengths], prompt_tokens=data.draw(st.sampled_from([1, 11])))
    a, b = (data.draw(st.sampled_from([1 / 3, 0.1, 0.7, 0.8113])) for _ in range(2))
    tau = Affine(a, b, data.draw(st.sampled_from([0.0, 0.0, 0.01 / 3])))
    limits = {"token_budget": 100, "block_tokens": 1, "prefix_caching": False, "max_running": 2}
    limits["wake_s"] = limits["sleep_s"] = data.draw(st.sampled_from([0.0, 0.1, a + b]))
    shape = ShapeProfile(1, tau, data.draw(st.sampled_from([3.0, 1e300])), 10**6, **limits)
    link = data.draw(st.sampled_from([{}, {"link_bytes_per_s": 7.0, "link_latency_s": 0.1}]))
    fleet = Fleet(profile(shape, **link), (Engine(1),) * data.draw(st.integers(2, 4)), 4)
    if data.draw(st.booleans()):
        at = st.sampled_from([0.0, a + b, 3 * (a + b), 7 * a, 0.3])
        trace = replace(
            trace, arrival_s=np.array(data.draw(st.lists(at, min_size=len(lengths), max_size=len(lengths))))
        )
    view = View.at_start(trace, fleet, atomic=data.draw(st.booleans()))
    seed = data.draw(st.integers(0, 2**32))
    runs = [
        simulate_policy(trace, RandomPolicy(seed), view),
        simulate_policy_reference(trace, RandomPolicy(seed), view),
    ]
    assert_same_run(*runs, rtol=1e-9)


@pytest.mark.parametrize("queue", ["own", "shared"])
def test_a_log_of_many_pages(queue: str) -> None:
    """Engines by turns, each with several pages of the log; some preempted, the last page full or not."""
    lengths = np.random.default_rng(0).integers(1, 60, 700)
    trace = Trace.of([[int(length)] for length in lengths], prompt_tokens=3)
    fleet = fleet_of(Affine(1.0, 0.5, 0.125), 3, kv_capacity_tokens=200)
    engine_of = np.arange(700) % 3 if queue == "own" else np.full(700, -1)
    plan = Plan(fleet.engines, engine_of, np.arange(700))
    fast = simulate(trace, fleet, plan)
    assert (np.bincount(fast.log.engine) > 2 * PAGE).all()
    assert fast.preemptions.sum() > 100
    assert_same_run(fast, simulate_reference(trace, fleet, plan), rtol=0)


@given(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_pages_of_the_log_are_read_in_order(sizes: list[int], random: Random) -> None:
    """Any number of entries an engine, written in any order of engines."""
    turns = [e for e, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(turns)
    log, counters = np.empty(8 * PAGE * len(sizes), dtype=LOG), np.zeros(COUNTERS, dtype=np.int64)
    engines = np.zeros(len(sizes), dtype=ENGINE)
    engines["block_tokens"], engines["log_width"] = 1 + np.arange(len(sizes)), 2 * len(turns)
    engines["event"] = [kernel.new_page(log, counters, e) for e in range(len(sizes))]
    for k, e in enumerate(turns):
        engines[e]["step"] = k
        kernel.note(log, counters, e, engines[e], k / 2, 2 * k, 3 * k)
    packed = PackedLog(
        log.reshape(-1, PAGE)[: counters[PAGES]], 2 * len(turns), engines["event"], engines["block_tokens"]
    )
    engine = np.sort(turns)
    k = np.argsort(turns, kind="stable")
    expected = {
        "engine": engine,
        "step": k,
        "time_s": k / 2,
        "running": 2 * k,
        "kv_tokens": 3 * k * (1 + engine),
    }
    for name, column in expected.items():
        found = getattr(EngineLog.made_by(packed.column), name)
        np.testing.assert_array_equal(found, column, err_msg=name)
        assert found.dtype == (np.float64 if name == "time_s" else np.int64)


def test_columns_are_made_once_and_can_be_kept() -> None:
    log = simulate(
        Trace.of([[3, 5]]), fleet_of(Affine(1.0, 0.0), 1), everything_on_one(Trace.of([[3, 5]]))
    ).log
    again = pickle.loads(pickle.dumps(log))
    assert log.time_s is log.time_s
    assert again.time_s.tolist() == log.time_s.tolist() == [0, 1, 3, 5]
    assert replace(log, step=log.step + 1).step.tolist() == [1, 2, 4, 6]
    with pytest.raises(AttributeError, match="'EngineLog' object has no attribute 'steps'"):
        log.steps  # noqa: B018


@given(traces(), affine_terms())
def test_affine_closed_form(trace: Trace, terms: tuple[float, float, float]) -> None:
    """T = a max L + sum of b L + c (p L + L (L + 1) / 2), if all requests of an engine start together."""
    a, b, c = terms
    p, length = trace.context_tokens, trace.output_tokens
    expected = a * length.max() + np.sum(b * length + c * (p * length + length * (length + 1) / 2))
    run = simulate(trace, fleet_of(Affine(a, b, c), 1), everything_on_one(trace))
    assert run.makespan_s == pytest.approx(expected, rel=1e-12)


@given(traces(), st.floats(0.1, 5), st.floats(0, 3), st.floats(0.1, 1))
def test_general_closed_form(trace: Trace, a: float, b: float, p: float) -> None:
    """T = sum over k of tau(n(k)) = sum over j of L_(j) (tau(j) - tau(j - 1)), without context."""
    tau = Power(a, b, p)
    longest_first = np.sort(trace.output_tokens)[::-1]
    curve = tau(np.arange(len(longest_first) + 1), 0)
    by_request = np.sum(longest_first * np.diff(curve))
    by_step = sum(float(tau((trace.output_tokens >= k).sum(), 0)) for k in range(1, longest_first[0] + 1))
    run = simulate(trace, fleet_of(tau, 1), everything_on_one(trace))
    assert run.makespan_s == pytest.approx(by_request, rel=1e-9)
    assert run.makespan_s == pytest.approx(by_step, rel=1e-9)


def everything_on_one(trace: Trace) -> Plan:
    return Plan.of_queues([Engine(1)], [range(trace.n_requests)])


@given(st.data())
def test_conservation(data: st.DataObject) -> None:
    """Tokens out are tokens asked; limits hold at every event; clocks run forward; nobody is lost."""
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, step_times()))
    plan = data.draw(plans(trace, fleet))
    run = simulate(trace, fleet, plan)
    np.testing.assert_array_equal(run.output_tokens, trace.output_tokens)
    assert ((run.start_s >= 0) & (run.start_s < run.first_token_s)).all()
    assert (run.first_token_s <= run.finish_s).all()
    assigned = plan.engine_of >= 0
    np.testing.assert_array_equal(run.engine[assigned], plan.engine_of[assigned])
    if plan.atomic:
        assert len({*zip(trace.group.tolist(), run.engine.tolist(), strict=True)}) == trace.n_prompts
    for e in range(len(fleet.engines)):
        mine = run.log.engine == e
        time_s, running, kv = run.log.time_s[mine], run.log.running[mine], run.log.kv_tokens[mine]
        assert (np.diff(time_s) > 0).all()
        assert (running <= run.fleet.max_running(e)).all()
        assert (kv <= fleet.shape_of(e).kv_capacity_tokens).all()
        assert running[-1] == kv[-1] == 0
        assert run.engine_finish_s[e] == pytest.approx(time_s[-1])
    assert (run.stays.start_s < run.stays.end_s).all()
    np.testing.assert_array_equal(np.bincount(run.stays.request), run.preemptions + 1)
    assert 0 <= run.idle_share < 1


@given(st.data())
def test_cache_never_holds_more_than_it_can(data: st.DataObject) -> None:
    """In every step, by the definition's log; the kernel's says from where it grows, a token a step."""
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, exact_step_times()))
    plan = data.draw(plans(trace, fleet))
    all_steps, events = simulate_reference(trace, fleet, plan).log, simulate(trace, fleet, plan).log
    for e in range(len(fleet.engines)):
        shape, mine = fleet.shape_of(e), (all_steps.engine == e) & (all_steps.running > 0)
        size = shape.block_tokens
        step, kv = all_steps.step[mine], all_steps.kv_tokens[mine]
        np.testing.assert_array_equal(step, np.arange(len(step)))
        assert (kv % size == 0).all()
        assert (kv <= shape.kv_capacity_tokens // size * size).all()
        mine = (events.engine == e) & (events.running > 0)
        first, running, begins_with = events.step[mine], events.running[mine], events.kv_tokens[mine]
        last = np.append(first, len(step))[1:] - 1
        np.testing.assert_array_equal(kv[first], begins_with)
        assert (kv[last] - begins_with >= running * ((last - first) // size) * size).all()
        assert (kv[last] - begins_with <= running * -(-(last - first) // size) * size).all()


@given(st.data())
def test_relabelling_engines_changes_nothing(data: st.DataObject) -> None:
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, step_times()))
    plan = data.draw(plans(trace, fleet, shared=False))
    new = np.array(data.draw(st.permutations(range(len(plan.engines)))))
    engines = [plan.engines[int(old)] for old in np.argsort(new)]
    renamed = Plan(tuple(engines), new[plan.engine_of], plan.order, plan.atomic)
    there = Fleet(fleet.profile, tuple(fleet.engines[int(old)] for old in np.argsort(new)), fleet.gpus)
    first, second = simulate(trace, fleet, plan), simulate(trace, there, renamed)
    np.testing.assert_array_equal(first.finish_s, second.finish_s)
    np.testing.assert_array_equal(new[first.engine], second.engine)


def small_engine(**limits: object) -> Fleet:
    """One engine whose step takes a second, and a prompt token a quarter of one."""
    known = {"token_budget": 100, "block_tokens": 1, "prefix_caching": False, "kv_capacity_tokens": 10**6}
    shape = ShapeProfile(1, Affine(1.0, 0.0), 4.0, max_running=8, **(known | limits))
    return Fleet(profile(shape), (Engine(1),), 1)


def test_preempted_request_waits_at_the_front_and_computes_its_tokens_anew() -> None:
    """Two requests of 1 + 10 tokens in a cache of 13: after 6 steps together the later one has to go."""
    trace = Trace.of([[10], [10]], prompt_tokens=1)
    run = simulate(trace, small_engine(kv_capacity_tokens=13), everything_on_one(trace))
    assert run.preemptions.tolist() == [0, 1]
    # the first goes on alone to 10; then the other has 1 + 6 tokens to compute, all but the last as prefill
    assert run.finish_s.tolist() == [10, 10 + 6 / 4 + 4]
    assert run.stays.request.tolist() == [0, 1, 1]
    assert run.stays.start_s.tolist() == [0, 0, 10]
    assert run.stays.end_s.tolist() == [10, 6, 15.5]
    assert run.log.time_s.tolist() == [0, 1, 6, 10, 12.5, 15.5]
    assert run.log.kv_tokens.tolist() == [2, 4, 7, 7, 8, 0]


def test_prefill_is_chunked_and_shares_the_budget_with_decode() -> None:
    """A budget of 8: prompts of 6 and 10 tokens take two steps; in the second, one request decodes."""
    trace = Trace.of([[3], [2]], prompt_tokens=[6, 10])
    run = simulate(trace, small_engine(token_budget=8), everything_on_one(trace))
    # step 1: 6 + 2 tokens, one of them a token gained: 7 / 4 + 1; step 2: 1 + 7 of 8; step 3: the last one
    assert run.first_token_s.tolist() == [2.75, 2.75 + (7 / 4 + 1) + 1]
    assert run.finish_s.tolist() == [6.5, 7.5]


def test_a_group_computes_the_full_blocks_of_its_prompt_once() -> None:
    trace = Trace.of([[2, 2, 2]], prompt_tokens=11)
    alone = simulate(trace, small_engine(block_tokens=4), everything_on_one(trace))
    shared = simulate(trace, small_engine(block_tokens=4, prefix_caching=True), everything_on_one(trace))
    assert alone.makespan_s == (33 - 3) / 4 + 2
    assert shared.makespan_s == (33 - 16 - 3) / 4 + 2  # two samples find two blocks of four tokens
    assert shared.log.kv_tokens.max() == 4 * (2 + 3 * 1)


def test_drafts_that_are_accepted_save_steps() -> None:
    """At an acceptance of one half, one drafted token makes 1.5 tokens a step; it costs what 2 cost."""
    shape = ShapeProfile(1, Affine(1.0, 0.25), 4.0, 10**6, 8, token_budget=100, drafts=(Draft("mtp", 0.5),))
    fleet = Fleet(profile(shape), (Engine(1, speculation=Speculation("mtp", 1)),), 1)
    run = simulate(Trace.of([[8]], prompt_tokens=1), fleet, Plan(fleet.engines, [0], [0]))
    # a first token on a clock that then stands at 1.5, then 2 + 1 + 2 + 1 + 1 of 2 tokens
    assert run.makespan_s == 6 * 1.5
    assert run.output_tokens.tolist() == [8]


def test_another_engine_can_raise_the_makespan() -> None:
    """Under the shared queue, without caps: the long request shares an engine in any case.

    With two engines it meets the shortest one there, with three a longer one. See docs/vllm_semantics.md.
    """
    trace = Trace.of([[3], [1], [3], [7]])
    makespan_s = []
    for engines in (1, 2, 3):
        fleet = fleet_of(Affine(1.0, 0.5, 0.125), engines)
        plan = Plan(fleet.engines, np.full(4, -1), np.arange(4))
        makespan_s.append(simulate(trace, fleet, plan).makespan_s)
    assert makespan_s == [20.875, 15.625, 17.5]


def test_requests_wait_for_their_arrival() -> None:
    trace = replace(Trace.of([[4], [2], [1]], prompt_tokens=1), arrival_s=np.array([0.0, 1.5, 9.0]))
    run = simulate(trace, small_engine(), everything_on_one(trace))
    assert run.start_s.tolist() == [0, 2, 9]
    assert run.finish_s.tolist() == [4, 4, 10]


def test_shared_queue_is_pulled_by_whoever_has_room_first() -> None:
    trace = Trace.of([[9], [2], [2], [2]])
    plan = Plan((Engine(1, 1), Engine(1, 1)), np.full(4, -1), np.arange(4))
    run = simulate(trace, fleet_of(Affine(1.0, 0.0), 2), plan)
    assert run.engine.tolist() == [0, 1, 1, 1]
    assert run.start_s.tolist() == [0, 0, 2, 4]


@pytest.mark.parametrize("simulator", [simulate, simulate_reference])
@pytest.mark.parametrize(("arrival_s", "start_s"), [(0.0, 10.0), (1.0, 5.0)])
def test_an_engine_stops_pulling_for_what_is_there_only(
    simulator: Callable[[Trace, Fleet, Plan], Run], arrival_s: float, start_s: float
) -> None:
    """Two samples of 17 tokens wait for 5 blocks each, all of 10, but share 4 once they run.

    What is there before they run does not fit, and waits for a finish; what comes later finds room.
    """
    trace = Trace.of([[6, 6], [2]], prompt_tokens=[17, 4])
    trace = replace(trace, arrival_s=np.array([0.0, 0.0, arrival_s]))
    fleet = small_engine(block_tokens=4, prefix_caching=True, kv_capacity_tokens=40)
    run = simulator(trace, fleet, Plan(fleet.engines, [0, 0, -1], [0, 1, 2]))
    assert run.start_s.tolist() == [0.0, 0.0, start_s]


@pytest.mark.parametrize("simulator", [simulate, simulate_reference])
def test_limits_follow_the_finished_requests(simulator: Callable[[Trace, Fleet, Plan], Run]) -> None:
    """Three at first; nobody for the first that finishes; both who wait after the second."""
    trace = Trace.of([[2], [4], [9], [3], [3]])
    fleet = fleet_of(Affine(1.0, 0.0), 1)
    engine = Engine(1, 3, limits=((1, 2), (2, 3)))
    run = simulator(trace, fleet, Plan.of_queues([engine], [range(5)]))
    assert run.start_s.tolist() == [0, 0, 0, 4, 4]
    assert run.finish_s.tolist() == [2, 4, 9, 7, 7]
    # finishes of one step count together, and a limit below what runs stops nobody
    engine = Engine(1, 4, limits=((2, 1), (3, 2)))
    run = simulator(Trace.of([[2], [2], [5], [6], [1]]), fleet, Plan.of_queues([engine], [range(5)]))
    assert run.start_s.tolist() == [0, 0, 0, 0, 5]


@pytest.mark.parametrize("simulate_", [simulate_policy, simulate_policy_reference])
def test_limits_count_from_the_plan_in_force(simulate_: Callable[[Trace, Policy, View], Run]) -> None:
    """The second plan lets one run at a time until one has finished under it, whatever finished before."""

    def policy(view: View) -> Plan:
        engine = Engine(1, 2 if view.is_start else 1, limits=((1, 2),), gpus=(0,))
        ask = (ReviewPoint("unfinished", 4),) if view.is_start else ()
        return Plan((engine,), np.zeros(view.n_requests), range(view.n_requests), review=ask)

    trace = Trace.of([[1], [5], [3], [3], [3]])
    run = simulate_(trace, policy, View.at_start(trace, fleet_of(Affine(1.0, 0.0), 1)))
    assert run.start_s.tolist() == [0, 0, 5, 5, 8]


def test_an_atomic_unit_is_pulled_as_a_whole() -> None:
    trace = Trace.of([[5, 5, 5], [3, 3, 3]])
    plan = Plan((Engine(1, 2), Engine(1, 2)), np.full(6, -1), [0, 3, 1, 4, 2, 5], atomic=True)
    run = simulate(trace, fleet_of(Affine(1.0, 0.0), 2), plan)
    assert run.engine.tolist() == [0, 0, 0, 1, 1, 1]
    assert run.start_s.tolist() == [0, 0, 5, 0, 0, 3]


def test_gpus_of_no_engine_are_idle() -> None:
    trace = Trace.of([[4], [2]])
    shape = ShapeProfile(2, Affine(1.0, 0.0), 1e300, 1000, 8)
    fleet = Fleet(profile(shape), (Engine(2), Engine(2)), gpus=5)
    run = simulate(trace, fleet, Plan.of_queues(fleet.engines, [[0], [1]]))
    assert run.makespan_s == 4
    assert run.idle_share == pytest.approx(1 - (2 * 4 + 2 * 2) / (5 * 4))
    assert run.tokens_per_gpu_s == pytest.approx(6 / (5 * 4))


def test_a_large_context_stays_exact() -> None:
    """A maximum of lines over 100,000 steps, where the lines cross in the middle of a jump."""
    tau = MaxAffine(((12e-3, 0.0, 1e-7), (8e-3, 5e-5, 3.4e-7)))
    trace = Trace.of([[100_000, 60_001, 60_000, 3]], prompt_tokens=517)
    fleet = fleet_of(tau, 1)
    fast = simulate(trace, fleet, everything_on_one(trace))
    k = np.arange(1, 100_001)
    running = (trace.output_tokens[:, None] >= k).sum(axis=0)
    context = ((trace.output_tokens[:, None] >= k) * (517 + k)).sum(axis=0)
    assert fast.makespan_s == pytest.approx(float(tau(running, context).sum()), rel=1e-11)


def test_a_request_too_large_for_its_engine_is_refused() -> None:
    trace = Trace.of([[10], [92]], prompt_tokens=10)
    with pytest.raises(
        InputError, match=r"request 1 \(prompt '1'\) needs 101 tokens of KV cache, engine 0 .* holds 100"
    ):
        simulate(trace, fleet_of(Affine(1.0, 0.0), 1, kv_capacity_tokens=100), everything_on_one(trace))


def test_plan_for_another_batch_is_refused() -> None:
    with pytest.raises(InputError, match="has 3 requests, trace 'inline' has 1"):
        simulate(Trace.of([[10]]), fleet_of(Affine(1.0, 0.0), 1), Plan.of_queues([Engine(1)], [[0, 1, 2]]))
