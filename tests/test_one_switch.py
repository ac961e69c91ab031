"""One switch: the bound against brute force, the search near it, costs, tampering."""

import time
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import profile, step_times, traces

from tailopt.engine.catalogue import load_engine
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.errors import InputError
from tailopt.oracle.any_bound import lower_any_s
from tailopt.oracle.check_one_switch import check_class, check_one_switch
from tailopt.oracle.class_bound import class_bound, class_sizes
from tailopt.oracle.one_switch import (
    SwitchCertificate,
    solve_one_switch,
    with_switch_costs,
)
from tailopt.oracle.one_switch_kernel import done_s, walk
from tailopt.oracle.one_switch_search import SwitchSearch, meeting
from tailopt.oracle.shapes import full_cuts, solve_shapes
from tailopt.plan import Engine, Fleet, Plan, ReviewPoint, View
from tailopt.simulate.simulator import simulate_policy
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import sample_batches

EXAMPLES = settings().max_examples
SLACK = 1 + 1e-9
LLAMA = load_engine("h100-llama-3.1-8b")
SMALL = Trace.of([[900, 80, 70], [60, 50, 40]] * 3, prompt_tokens=20)

CROWDED, SPARSE = Affine(1.0, 0.0), Affine(0.25, 0.4)
PHASES = profile(ShapeProfile(1, CROWDED, 1e9, 10**6, 100), ShapeProfile(2, SPARSE, 1e9, 10**6, 100))
"""TP1 is fast for many, TP2 for one."""


def brute_force_s(trace: Trace, engines: EngineProfile, gpus: int, atomic: bool) -> float:
    """The best with one switch: all pairs of cuts, numbers left, and ways to deal before and after."""
    fleets = [
        Fleet(engines, tuple(Engine(tp) for part in cut for tp in part), gpus)
        for cut in full_cuts(tuple(engines.shapes), gpus)
    ]
    n = trace.n_requests
    unit = trace.group if atomic else np.arange(n)
    units = int(unit.max()) + 1

    def makespan_s(
        first: Fleet, later: tuple[Engine, ...], dealt: tuple[int, ...], again: tuple[int, ...], left: int
    ) -> float:
        def policy(view: View) -> Plan:
            request = view.request
            assert request is not None
            longest_first = np.argsort(-trace.output_tokens[request], kind="stable")
            now, routing = (first.engines, dealt) if view.n_requests == n else (later, again)
            ask = (ReviewPoint("unfinished", left),) if view.n_requests == n else ()
            return Plan(now, np.array(routing)[unit[request]], longest_first, atomic=atomic, review=ask)

        run = simulate_policy(trace, policy, View.at_start(trace, first, atomic=atomic))
        return run.makespan_s if run.reviews else np.inf

    best = np.inf
    for first, second in permutations(fleets, 2):
        degrees = [engine.tp for engine in second.engines]
        later, _ = meeting(first.engines, degrees, [gpus], range(len(first.engines)))
        ways = product(
            product(range(len(first.engines)), repeat=units),
            product(range(len(later)), repeat=units),
            range(1, n),
        )
        best = min([best, *(makespan_s(first, later, *way) for way in ways)])
    return float(best)


@st.composite
def two_shapes(draw: st.DrawFn) -> EngineProfile:
    shapes = (
        ShapeProfile(tp, draw(step_times()), draw(st.sampled_from([1e3, 1e15])), 10**6, 100, **(
            draw(st.sampled_from([{}, {"sleep_s": 0.5, "wake_s": 2.0}]))
        ))
        for tp in (1, 2)
    )  # fmt: skip
    return profile(*shapes)


@settings(max_examples=max(20, EXAMPLES // 4))
@given(traces(most_groups=3, most_samples=2, longest=9, prompts=6), two_shapes(), st.booleans())
def test_no_switch_is_better_than_the_bound(trace: Trace, engines: EngineProfile, atomic: bool) -> None:
    assume(2 <= trace.n_requests <= 3)
    found = solve_one_switch(trace, engines, 2, atomic=atomic)
    least_s = min(brute_force_s(trace, engines, 2, atomic), found.static.upper_s)
    assert found.lower_s <= least_s * SLACK
    assert found.upper_s <= found.static.upper_s
    assert found.bound_argument.lower_s <= least_s * SLACK
    bound = class_bound(trace, found.first)
    assert bound is None or bound.lower_s <= least_s * SLACK
    checked = check_one_switch(found, trace, engines, 2, atomic=atomic)
    assert checked.lower_s >= found.lower_s


def test_the_search_is_close_to_brute_force() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(12):
        lengths = rng.integers(1, 60, 4).tolist()
        trace = Trace.of([[length] for length in lengths])
        found = solve_one_switch(trace, PHASES, 2, atomic=False)
        least_s = min(brute_force_s(trace, PHASES, 2, False), found.static.upper_s)
        ratios.append(found.upper_s / least_s)
    assert min(ratios) >= 1 - 1e-9
    assert float(np.median(ratios)) <= 1 + 1e-9
    assert max(ratios) <= 1.1


@settings(max_examples=EXAMPLES)
@given(traces(most_groups=4, longest=30), two_shapes(), st.integers(1, 4))
def test_class_bound_holds_for_what_is_found_and_is_checked(
    trace: Trace, engines: EngineProfile, gpus: int
) -> None:
    static = solve_shapes(trace, engines, gpus, atomic=False)
    bound = class_bound(trace, static.fleet)
    assert bound is not None
    assert bound.lower_s <= static.upper_s * SLACK
    assert check_class(bound, trace, engines, gpus) == bound.lower_s
    for field in ("nu_s", "theta_of"):
        raised = tuple(value * 1.5 + 1.0 for value in getattr(bound, field))
        with pytest.raises(InputError):
            check_class(replace(bound, **{field: raised}), trace, engines, gpus)
    with pytest.raises(InputError, match="prices give only"):
        check_class(replace(bound, lower_s=2 * bound.lower_s + 1), trace, engines, gpus)


@given(st.integers(1, 5000))
def test_every_request_is_in_a_class(n: int) -> None:
    sizes = class_sizes(n)
    assert sum(sizes) == n
    assert min(sizes) >= 1


def test_classes_tell_more_than_the_longest_request() -> None:
    batch = sample_batches(load_bundled("gpqa-gpt-5-high"), batches=1, prompts=64, samples=4, seed=0)[0].trace
    moe = Fleet.of(load_engine("h100-gpt-oss-120b-vllm"), "4xTP2")
    bound = class_bound(batch, moe)
    assert bound is not None
    assert bound.lower_s > 1.2 * lower_any_s(batch, moe).lower_s


def test_a_switch_pays_where_phases_differ() -> None:
    """Many short ones and one long one, on engines that are good at either: found, and by hand."""
    trace = Trace.of([[100]] + [[10]] * 39)
    found = solve_one_switch(trace, PHASES, 2, atomic=False)
    # 20 requests on each TP1 for 10 steps of 1 s, then 90 steps of 0.65 s
    by_hand_s = 10 * 1.0 + 90 * 0.65
    assert found.upper_s <= by_hand_s * (1 + 1e-3)
    assert found.sure_gain > 0.05
    assert (str(found.first), str(found.second), found.unfinished) == ("2xTP1", "1xTP2", 1)
    assert check_one_switch(found, trace, PHASES, 2, atomic=False).upper_s == pytest.approx(found.upper_s)


def test_dearer_switches_gain_less_and_then_nothing() -> None:
    trace = Trace.of([[100]] + [[10]] * 39)
    gains = []
    for wake_s in (0.0, 5.0, 100.0):
        dear = with_switch_costs(PHASES, wake_s=wake_s)
        found = solve_one_switch(trace, dear, 2, atomic=False)
        gains.append(found.gain)
        assert found.cost is None or found.cost.wake_s == wake_s
    assert gains[0] > gains[1] > 0
    assert gains[2] == 0
    assert found.second is None
    assert (found.unfinished, found.switch_s, found.cost) == (None, None, None)
    assert found.upper_s == found.static.upper_s


def test_a_static_certificate_is_taken_at_the_costs_given() -> None:
    trace = Trace.of([[100]] + [[10]] * 39)
    static = solve_shapes(trace, PHASES, 2, atomic=False)
    dear = with_switch_costs(PHASES, wake_s=5.0)
    found = solve_one_switch(trace, dear, 2, atomic=False, static=static)
    assert found.cost is not None
    assert found.cost.wake_s == 5.0
    assert check_one_switch(found, trace, dear, 2, atomic=False).upper_s == pytest.approx(found.upper_s)
    with pytest.raises(InputError, match="static: is of engine"):
        solve_one_switch(trace, LLAMA, 2, atomic=False, static=static)


def test_engines_that_are_in_both_go_on() -> None:
    now = (Engine(2, gpus=(0, 1)), Engine(1, gpus=(2,)), Engine(1, gpus=(3,)), Engine(4, gpus=(4, 5, 6, 7)))
    engines, kept = meeting(now, [4, 2, 2], [4, 4], [3, 0, 1, 2])
    assert kept == {3: 0, 0: 1}
    assert [engine.gpus for engine in engines] == [(4, 5, 6, 7), (0, 1), (2, 3)]
    # GPUs 0 and 3 are held, so that no TP2 engine lies within a group unless one of them gives way
    apart = (Engine(1, gpus=(0,)), Engine(1, gpus=(1,)), Engine(1, gpus=(2,)), Engine(1, gpus=(3,)))
    engines, kept = meeting(apart, [2, 1, 1], [2, 2], [0, 3, 1, 2])
    groups = [{gpu // 2 for gpu in engine.gpus or ()} for engine in engines]
    assert all(len(group) == 1 for group in groups)
    assert sorted(gpu for engine in engines for gpu in engine.gpus or ()) == [0, 1, 2, 3]
    assert len(kept) == 1


def test_time_limit_topology_and_groups_on_a_real_batch() -> None:
    batch = sample_batches(load_bundled("gpqa-deepseek-reasoner"), batches=1, prompts=16, samples=4, seed=1)
    trace = batch[0].trace
    found = solve_one_switch(trace, LLAMA, 8, atomic=True, time_limit_s=4.0, topology=[4, 4])
    assert found.wall_s < 60
    assert found.lower_s <= found.upper_s <= found.static.upper_s
    checked = check_one_switch(found, trace, LLAMA, 8, atomic=True, topology=[4, 4])
    assert checked.upper_s == pytest.approx(found.upper_s, rel=1e-9)


def test_a_switch_is_looked_for_within_a_limit_that_covers_the_static_search() -> None:
    trace = Trace.of([[100]] + [[10]] * 39)
    found = solve_one_switch(trace, PHASES, 2, atomic=False, time_limit_s=5.0)
    assert found.gain > 0.05


def test_interrupt_gives_what_is_known() -> None:
    reports: list[SwitchCertificate] = []

    def progress(known: SwitchCertificate) -> None:
        reports.append(known)
        raise KeyboardInterrupt

    trace = Trace.of([[100]] + [[10]] * 39)
    found = solve_one_switch(trace, PHASES, 2, atomic=False, progress=progress)
    assert len(reports) == 1
    assert found.upper_s == reports[0].upper_s
    assert found.upper_s < found.static.upper_s


def test_same_seed_same_answer() -> None:
    one, two = (solve_one_switch(SMALL, LLAMA, 4, atomic=True, seed=3) for _ in range(2))
    assert (one.lower_s, one.upper_s, str(one.second)) == (two.lower_s, two.upper_s, str(two.second))
    assert np.array_equal(one.run.finish_s, two.run.finish_s)


def test_nothing_is_estimated_when_time_is_over() -> None:
    trace = Trace.of([[100]] + [[10]] * 39)
    static = solve_shapes(trace, PHASES, 2, atomic=False)
    search = SwitchSearch(trace, static, (2,), False, np.inf, 0, lambda run: None)
    assert list(search._guesses(0, 0, np.inf))
    assert not list(search._guesses(0, 0, time.perf_counter()))


@pytest.mark.parametrize("late_s", [0.0, 1e-6, 1.0])
def test_a_start_whose_time_is_over_is_annealed_once(late_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time may pass between the share that a start is given and its beginning."""
    trace = Trace.of([[100]] + [[10]] * 39)
    static = solve_shapes(trace, PHASES, 2, atomic=False)
    search = SwitchSearch(trace, static, (2,), False, np.inf, 0, lambda run: None)
    search.estimate()
    _, dealt = search.starts[0]
    monkeypatch.setattr("tailopt.oracle.one_switch_search.time.perf_counter", lambda: 100.0)
    makespan_s, _ = search._annealed(dealt, 100.0 - late_s, np.random.default_rng(0))
    assert 0 < makespan_s < np.inf


@pytest.mark.parametrize(("limit", "said"), [(0.0, "time limit"), (-1.0, "time limit")])
def test_bad_input(limit: float, said: str) -> None:
    with pytest.raises(InputError, match=said):
        solve_one_switch(SMALL, LLAMA, 4, atomic=False, time_limit_s=limit)


def test_tampering_is_refused() -> None:
    trace = Trace.of([[100]] + [[10]] * 39)
    found = solve_one_switch(trace, PHASES, 2, atomic=False)
    raised = replace(found.bound_argument, lower_s=found.upper_s)
    static = replace(found.static, cuts=tuple(
        replace(cut, bound=None if cut.bound is None else replace(cut.bound, lower_s=found.upper_s))
        for cut in found.static.cuts
    ))  # fmt: skip
    with pytest.raises(InputError, match="certificate: "):
        check_one_switch(replace(found, bound_argument=raised, static=static), trace, PHASES, 2, atomic=False)
    faster = replace(found.run, finish_s=found.run.finish_s / 2)
    with pytest.raises(InputError, match="the switch takes"):
        check_one_switch(replace(found, run=faster), trace, PHASES, 2, atomic=False)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(("slots", "prefill"), [(100, 1e9), (3, 1e9), (100, 1e4)])
def test_what_is_annealed_is_what_the_simulator_says(atomic: bool, slots: int, prefill: float) -> None:
    """When a plan switches and is done, by the closed form and step by step, also where slots are few."""
    rng = np.random.default_rng(slots)
    shapes = (
        ShapeProfile(1, CROWDED, prefill, 10**6, slots, sleep_s=0.5, wake_s=2.0),
        ShapeProfile(2, Affine(0.25, 0.1, 1e-5), prefill, 10**6, slots, sleep_s=0.2, wake_s=1.0),
    )
    engines = profile(*shapes)
    for _ in range(3):
        trace = Trace.of(rng.integers(40, 400, (6, 2)).tolist(), prompt_tokens=30)
        static = solve_shapes(trace, engines, 4, atomic=atomic)
        search = SwitchSearch(trace, static, (4,), atomic, np.inf, 0, lambda run: None)
        search.estimate()
        for makespan_s, dealt in search.starts:
            batch, first, second = search._arrays(dealt)
            start, finish_s, seen = np.zeros(12, np.int64), np.zeros(12), np.zeros(6, np.int64)
            for e in range(len(first.kind)):
                walk(batch, first, e, dealt.before, np.inf, start, finish_s, seen)
            _, then_s, _ = done_s(
                batch, first, second, dealt.before, dealt.after, dealt.unfinished, start, finish_s, seen
            )
            assert then_s.max() == pytest.approx(makespan_s, rel=0.02 if slots == 100 else 0.1)
