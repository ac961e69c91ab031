"""Review points, moves, switches, limits: conservation laws, and tiny examples computed by hand."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import RandomPolicy, arriving, exact_step_times, fleets, profile, traces

from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.errors import InputError
from tailopt.plan import DROPPED, SHARED_QUEUE, Engine, Fleet, Plan, Policy, ReviewPoint, View
from tailopt.run import Run
from tailopt.simulate import simulate, simulate_policy, simulate_policy_reference
from tailopt.trace import Trace

SIMULATORS = [simulate_policy, simulate_policy_reference]
Simulator = Callable[[Trace, Policy, View], Run]


@given(st.data())
def test_no_token_is_won_or_lost(data: st.DataObject) -> None:
    """Whatever is reviewed, moved, switched, limited or given up."""
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, exact_step_times()))
    trace = data.draw(arriving(trace))
    view = View.at_start(trace, fleet, atomic=data.draw(st.booleans()))
    run = simulate_policy(trace, RandomPolicy(data.draw(st.integers(0, 2**32))), view)
    n, k = trace.n_requests, len(run.engines)

    assert (run.output_tokens <= trace.output_tokens).all()
    limits = np.full(n, np.inf)
    for plan, request in [(run.plan, np.arange(n)), *((r.plan, r.request) for r in run.reviews)]:
        if plan.max_tokens is not None:
            limits[request] = np.minimum(limits[request], plan.max_tokens)
    cut = run.output_tokens < trace.output_tokens
    np.testing.assert_array_equal(run.completed, ~cut)
    dropped = np.zeros(n, dtype=np.bool_)
    for review in run.reviews:
        dropped[review.request[review.plan.engine_of == DROPPED]] = True
    assert (run.output_tokens[cut & ~dropped] >= limits[cut & ~dropped]).all()
    assert (run.finish_s >= trace.arrival_s).all()

    ran = run.engine >= 0
    np.testing.assert_array_equal(ran, ~np.isnan(run.start_s))
    assert ran[run.completed].all()
    with_tokens = run.output_tokens > 0
    np.testing.assert_array_equal(with_tokens, ~np.isnan(run.first_token_s))
    assert (run.first_token_s[with_tokens] > run.start_s[with_tokens]).all()
    assert (run.first_token_s[with_tokens] <= run.finish_s[with_tokens]).all()

    stays = run.stays
    assert (stays.start_s <= stays.end_s).all()
    for request in np.unique(stays.request):  # one place at a time, from the first to the last
        mine = stays.request == request
        order = np.lexsort((stays.end_s[mine], stays.start_s[mine]))
        assert (stays.end_s[mine][order][:-1] <= stays.start_s[mine][order][1:]).all()
        assert stays.start_s[mine].min() == run.start_s[request]
        assert stays.engine[mine][order][-1] == run.engine[request]
    moved = np.bincount(run.moves.request, minlength=n)
    left = np.bincount(stays.request, minlength=n) - run.preemptions - moved
    assert ((left == 0) | (left == 1)).all()

    for e in range(k):
        mine = run.log.engine == e
        time_s, running, kv = run.log.time_s[mine], run.log.running[mine], run.log.kv_tokens[mine]
        assert (np.diff(time_s) >= 0).all()  # a step takes no time if the only one in its turn had to go
        assert time_s[0] >= run.spans.open_s[e]
        assert time_s[-1] <= run.spans.close_s[e]
        assert (kv <= fleet.profile.shape(run.engines[e].tp).kv_capacity_tokens).all()
        assert running[-1] == kv[-1] == 0
    held = [(gpu, e) for e, engine in enumerate(run.engines) for gpu in engine.gpus or ()]
    for gpu, e in held:  # a GPU belongs to one engine at a time
        for other in [other for shared, other in held if shared == gpu and other > e]:
            asleep_s = run.spans.close_s[e] + run.spans.sleep_s[e]
            assert asleep_s + run.spans.wake_s[other] <= run.spans.open_s[other]

    times = [review.time_s for review in run.reviews]
    assert times == sorted(times)
    assert (np.diff(run.moves.start_s) >= 0).all()
    for request, to, start_s in zip(run.moves.request, run.moves.target, run.moves.start_s, strict=True):
        after = (stays.request == request) & (stays.end_s > start_s)
        first = np.flatnonzero(after)[np.argsort(stays.start_s[after])[:1]]
        assert to == -1 or stays.engine[first].tolist() == [to]
    assert (run.moves.end_s >= run.moves.start_s).all()
    assert (run.moves.end_s[~run.moves.migrated] == run.moves.start_s[~run.moves.migrated]).all()
    assert 0 <= run.idle_share <= 1


class Relabelled:
    """Answers as ``policy`` does, but for engines in another order, a new one at each review."""

    def __init__(self, policy: Policy, fleet: Fleet, old: list[int], seed: int) -> None:
        self.policy, self.fleet, self.old = policy, fleet, np.array(old)  # engine e is the policy's old[e]
        self.rng = np.random.default_rng(seed)

    def __call__(self, view: View) -> Plan:
        engine = np.where(view.engine < 0, view.engine, self.old[np.maximum(view.engine, 0)])
        plan = self.policy(replace(view, fleet=self.fleet, engine=engine))
        self.fleet = replace(self.fleet, engines=plan.engines)  # places them, so that the order is no matter
        if not view.is_start:
            self.old = self.rng.permutation(len(plan.engines))
        new = np.argsort(self.old)[np.maximum(plan.engine_of, 0)]
        engine_of = np.where(plan.engine_of < 0, plan.engine_of, new)
        return replace(plan, engines=tuple(self.fleet.engines[e] for e in self.old), engine_of=engine_of)


@given(st.data())
def test_relabelling_engines_changes_nothing_through_any_reviews(data: st.DataObject) -> None:
    """Without a shared queue, where the number of an engine breaks ties."""
    trace = data.draw(traces())
    fleet = data.draw(fleets(trace, exact_step_times(), 4))
    trace = data.draw(arriving(trace))
    old = data.draw(st.permutations(range(len(fleet.engines))))
    there = replace(fleet, engines=tuple(fleet.engines[e] for e in old))
    atomic, seed = data.draw(st.booleans()), data.draw(st.integers(0, 2**32))
    policy, same = (RandomPolicy(seed, shared=False) for _ in range(2))
    first = simulate_policy(trace, policy, View.at_start(trace, fleet, atomic=atomic))
    other = Relabelled(same, fleet, old, seed)
    second = simulate_policy(trace, other, View.at_start(trace, there, atomic=atomic))
    for column in ("start_s", "first_token_s", "finish_s", "output_tokens", "preemptions", "completed"):
        np.testing.assert_array_equal(getattr(first, column), getattr(second, column), err_msg=column)
    assert [review.time_s for review in first.reviews] == [review.time_s for review in second.reviews]
    assert first.idle_share == pytest.approx(second.idle_share)
    assert _by_gpus(first) == _by_gpus(second)


def _by_gpus(run: Run) -> tuple[object, ...]:
    """What a run says of engines, with their GPUs and opening times for their numbers."""
    spans, stays, moves = run.spans, run.stays, run.moves
    names = [(engine.gpus, at_s) for engine, at_s in zip(run.engines, spans.open_s.tolist(), strict=True)]
    names.append(((), -1.0))  # of nowhere
    where = [names[e] for e in run.engine]
    there = sorted(zip(names[:-1], spans.wake_s, spans.close_s, spans.drain_s, spans.sleep_s, strict=True))
    stayed = [stays.request, [names[e] for e in stays.engine], stays.start_s, stays.end_s]
    moved = [moves.request, [names[e] for e in moves.source], [names[e] for e in moves.target]]
    moved += [moves.start_s, moves.end_s, moves.tokens, moves.migrated]
    log = zip(
        [names[e] for e in run.log.engine], run.log.step, run.log.running, run.log.kv_tokens, strict=True
    )
    return where, there, sorted(zip(*stayed, strict=True)), sorted(zip(*moved, strict=True)), sorted(log)


def answers(*given: Callable[[View], Plan]) -> Policy:
    """A policy that answers its k-th question with the k-th function."""
    left = iter(given)
    return lambda view: next(left)(view)


def fleet(engines: int = 2, **terms: object) -> Fleet:
    """Engines whose step takes a second, and a prompt token a quarter of one; two GPUs take half of both."""
    limits = {"token_budget": 100, "block_tokens": 1, "prefix_caching": False}
    limits |= {name: terms.pop(name) for name in ("sleep_s", "wake_s", "max_running") if name in terms}
    limits.setdefault("max_running", 8)
    shapes = [ShapeProfile(tp, Affine(1.0 / tp, 0.0), 4.0 * tp, 10**6, **limits) for tp in (1, 2)]
    return Fleet(profile(*shapes, **terms), (Engine(1),) * engines, engines)


def all_on(engine: int, *points: ReviewPoint, **fields: object) -> Callable[[View], Plan]:
    def plan(view: View) -> Plan:
        n = view.n_requests
        return Plan(view.fleet.engines, np.full(n, engine), np.arange(n), review=points, **fields)

    return plan


def send(where: dict[int, int], *points: ReviewPoint, **fields: object) -> Callable[[View], Plan]:
    """Everything stays where it is, but for some requests."""

    def plan(view: View) -> Plan:
        assert view.request is not None
        engine_of = [where.get(r, e) for r, e in zip(view.request.tolist(), view.engine, strict=True)]
        return Plan(view.fleet.engines, engine_of, np.arange(len(engine_of)), review=points, **fields)

    return plan


def outcome(simulator: Simulator, trace: Trace, fleet: Fleet, *plans: Callable[[View], Plan]) -> Run:
    return simulator(trace, answers(*plans), View.at_start(trace, fleet))


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_a_moved_request_computes_its_tokens_anew(simulator: Simulator) -> None:
    """After 4 of 10 steps one of two goes; its 5 tokens take 4 / 4 s as prefill and a step."""
    trace = Trace.of([[10], [10]], prompt_tokens=1)
    run = outcome(simulator, trace, fleet(), all_on(0, ReviewPoint("tokens", 4)), send({1: 1}))
    assert run.finish_s.tolist() == [10, 4 + 2 + 5]
    assert run.engine.tolist() == [0, 1]
    assert run.preemptions.tolist() == [0, 0]
    moves = run.moves
    assert [moves.request[0], moves.source[0], moves.target[0], moves.tokens[0]] == [1, 0, 1, 5]
    assert (moves.start_s[0], moves.end_s[0], moves.migrated[0]) == (4, 4, False)
    assert [(review.time_s, review.reason.when) for review in run.reviews] == [(4, "tokens")]
    assert sorted(
        zip(run.stays.request, run.stays.engine, run.stays.start_s, run.stays.end_s, strict=True)
    ) == [
        (0, 0, 0, 10),
        (1, 0, 0, 4),
        (1, 1, 4, 11),
    ]
    assert run.idle_share == pytest.approx(1 - (10 + 7) / (2 * 11))


@pytest.mark.parametrize("simulator", SIMULATORS)
@pytest.mark.parametrize(
    ("rate", "move", "finish_s"),
    [(2, "migrate", 12.5), (2, "cheaper", 11.0), (16, "cheaper", 10.75), (16, "recompute", 11.0)],
)
def test_kv_is_sent_if_that_is_cheaper(simulator: Simulator, rate: float, move: str, finish_s: float) -> None:
    """Half a second and 4 tokens of one byte; then the request goes on with its sixth token at once."""
    trace = Trace.of([[10], [10]], prompt_tokens=1)
    machines = fleet(link_bytes_per_s=rate, link_latency_s=0.5)
    plans = all_on(0, ReviewPoint("time", 3.5)), send({1: 1}, move=move)
    run = outcome(simulator, trace, machines, *plans)
    assert run.finish_s.tolist() == [10, finish_s]
    assert run.reviews[0].time_s == 3.5
    assert run.moves.start_s.tolist() == [4]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_transfers_out_of_one_engine_follow_one_another(simulator: Simulator) -> None:
    trace = Trace.of([[10], [10], [10]], prompt_tokens=1)
    machines = fleet(link_bytes_per_s=4.0)
    plans = all_on(0, ReviewPoint("tokens", 4)), send({1: 1, 2: 1}, move="migrate")
    run = outcome(simulator, trace, machines, *plans)
    assert run.moves.end_s.tolist() == [5, 6]
    assert run.finish_s.tolist() == [10, 11, 12]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_cheaper_counts_the_wait_for_other_transfers(simulator: Simulator) -> None:
    """4 tokens take 0.8 s to send and 1 s to compute; behind another transfer they take 1.6 s to send."""
    trace = Trace.of([[10], [10], [10]], prompt_tokens=1)
    machines = fleet(3, link_bytes_per_s=5.0)
    plans = all_on(0, ReviewPoint("tokens", 4)), send({1: 1, 2: 2})
    run = outcome(simulator, trace, machines, *plans)
    assert run.moves.migrated.tolist() == [True, False]
    assert run.moves.end_s.tolist() == [4.8, 4]
    assert run.finish_s.tolist() == [10, 10.8, 11]


@pytest.mark.parametrize("simulator", SIMULATORS)
@pytest.mark.parametrize("move", ["migrate", "cheaper"])
def test_no_kv_is_sent_to_an_engine_that_has_yet_to_wake(simulator: Simulator, move: str) -> None:
    """Nor to one that an earlier review began to wake: it wakes at 2 + 5 s, the request leaves at 4 s."""
    trace = Trace.of([[10], [10]], prompt_tokens=1)
    machines = fleet(wake_s=5.0, link_bytes_per_s=100.0)
    machines = Fleet(machines.profile, (Engine(1),), 2)

    def wake(engine_of: list[int], *points: ReviewPoint) -> Callable[[View], Plan]:
        both = (Engine(1, gpus=(0,)), Engine(1, gpus=(1,)))
        return lambda view: Plan(both, engine_of, [0, 1], review=points, move=move)

    run = outcome(simulator, trace, machines, all_on(0, ReviewPoint("time", 2)), wake([0, 1]))
    assert run.moves.migrated.tolist() == [False]
    assert run.finish_s.tolist() == [10, 7 + 2 / 4 + 8]
    plans = wake([0, 0], ReviewPoint("time", 4)), wake([0, 1])
    run = outcome(simulator, trace, machines, all_on(0, ReviewPoint("time", 2)), *plans)
    assert run.moves.migrated.tolist() == [False]
    assert run.finish_s.tolist() == [10, 7 + 4 / 4 + 6]
    plans = wake([0, 0], ReviewPoint("time", 7)), wake([0, 1])
    run = outcome(simulator, trace, machines, all_on(0, ReviewPoint("time", 2)), *plans)
    assert run.moves.migrated.tolist() == [True]


@pytest.mark.parametrize("simulator", SIMULATORS)
@pytest.mark.parametrize("back", [0, DROPPED])
def test_a_transfer_that_is_called_off_frees_its_link(simulator: Simulator, back: int) -> None:
    """4 tokens take 8 s; after one of them the other request's 5 tokens are sent instead, in 10 s."""
    trace = Trace.of([[10], [10]], prompt_tokens=1)
    machines = fleet(link_bytes_per_s=0.5)
    plans = (
        all_on(0, ReviewPoint("tokens", 4)),
        send({1: 1}, ReviewPoint("time", 5), move="migrate"),
        send({0: 1, 1: back}, move="migrate"),
    )
    run = outcome(simulator, trace, machines, *plans)
    assert run.moves.request.tolist() == [1, 0]
    assert run.moves.target.tolist() == [-1, 1]
    assert run.moves.start_s.tolist() == [4, 5]
    assert run.moves.end_s.tolist() == [5, 15]
    assert run.finish_s.tolist() == [20, 5 if back == DROPPED else 5 + 4 / 4 + 6]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_an_engine_whose_last_transfer_is_called_off_closes(simulator: Simulator) -> None:
    """GPU 0 is given up at 4 s, with 8 s of transfer ahead; a review at 6 s takes the GPU again."""
    trace = Trace.of([[10], [10]], prompt_tokens=1)
    machines = fleet(link_bytes_per_s=0.5, wake_s=1.0, sleep_s=0.5)
    first, other = Engine(1, gpus=(0,)), Engine(1, gpus=(1,))
    plans = (
        lambda view: Plan((first, other), [0, 1], [0, 1], review=[ReviewPoint("time", 4)]),
        lambda view: Plan((other,), [0, 0], [0, 1], move="migrate", review=[ReviewPoint("time", 6)]),
        lambda view: Plan((other, first), [1, 0], [0, 1]),
    )
    run = outcome(simulator, trace, machines, *plans)
    assert run.spans.close_s[0] == 6
    assert run.spans.drain_s[0] == 2
    assert run.spans.open_s.tolist() == [0, 0, 7.5]
    assert run.finish_s.tolist() == [7.5 + 4 / 4 + 6, 10]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_moves_name_where_a_request_ran_next(simulator: Simulator) -> None:
    """Engine 2 is full, so request 0 is sent on before it runs there, and 1 is given up."""
    trace = Trace.of([[10], [10], [9]], prompt_tokens=1)
    machines = fleet(4, max_running=1)
    first = lambda view: Plan(view.fleet.engines, [0, 1, 2], [0, 1, 2], review=[ReviewPoint("time", 2)])  # noqa: E731
    plans = send({0: 2, 1: 2}, ReviewPoint("time", 4)), send({0: SHARED_QUEUE, 1: DROPPED})
    run = outcome(simulator, trace, machines, first, *plans)
    assert run.moves.target.tolist() == [-1, -1]
    close = lambda view: Plan(view.fleet.engines[1:], [SHARED_QUEUE, 0, 1], [0, 1, 2])  # noqa: E731
    run = outcome(simulator, trace, machines, first, close)
    assert run.moves.target.tolist() == [3]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_a_request_given_up_before_it_arrives_ends_as_it_arrives(simulator: Simulator) -> None:
    trace = replace(Trace.of([[10], [10]], prompt_tokens=1), arrival_s=np.array([0.0, 7.0]))
    run = outcome(simulator, trace, fleet(), all_on(0, ReviewPoint("time", 3)), send({1: DROPPED}))
    assert run.finish_s.tolist() == [10, 7]
    assert run.completed.tolist() == [True, False]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_a_switch_drains_sleeps_and_wakes(simulator: Simulator) -> None:
    """Two GPUs as one engine, then as two; the request that is left computes 5 tokens anew."""
    trace = Trace.of([[4], [8]], prompt_tokens=1)
    machines = Fleet(fleet(sleep_s=2.0, wake_s=3.0).profile, (Engine(2),), 2)

    def split(view: View) -> Plan:
        assert view.generated_tokens.tolist() == [4]
        return Plan((Engine(1), Engine(1)), [1], [0])

    run = outcome(simulator, trace, machines, all_on(0, ReviewPoint("unfinished", 1)), split)
    assert run.finish_s.tolist() == [2, 2 + 2 + 3 + 2 + 3]
    assert [engine.gpus for engine in run.engines] == [(0, 1), (0,), (1,)]
    assert run.engine.tolist() == [0, 2]
    assert run.spans.open_s.tolist() == [0, 7, 7]
    assert run.spans.close_s.tolist() == [2, 12, 12]
    assert run.spans.sleep_s.tolist() == [2, 0, 0]
    assert run.spans.wake_s.tolist() == [0, 3, 3]
    assert run.idle_share == pytest.approx(1 - (2 * 2 + 5) / (2 * 12))


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_engines_end_their_steps_before_a_review(simulator: Simulator) -> None:
    """At 2.25 s the slow engine is in its third step and the fast one in its fifth; the third rests."""
    trace = Trace.of([[6], [6]], prompt_tokens=1)
    shapes = (Engine(1), Engine(2), Engine(1))
    machines = Fleet(fleet().profile, shapes, 4)
    seen: list[View] = []

    def watch(view: View) -> Plan:
        seen.append(view)
        return Plan(view.fleet.engines, [2, 1], [0, 1])

    first = lambda view: Plan(view.fleet.engines, [0, 1], [0, 1], review=[ReviewPoint("time", 2.25)])  # noqa: E731
    run = outcome(simulator, trace, machines, first, watch)
    assert seen[0].generated_tokens.tolist() == [3, 5]
    assert seen[0].now_s == 2.25
    assert run.moves.start_s.tolist() == [3]
    assert run.finish_s.tolist() == [3 + 3 / 4 + 1 + 2, 3]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_an_engine_that_runs_dry_takes_what_waits_elsewhere(simulator: Simulator) -> None:
    trace = Trace.of([[3], [9], [2], [2]], prompt_tokens=1)
    machines = fleet(max_running=1)

    def first(view: View) -> Plan:
        return replace(Plan.of_queues(view.fleet.engines, [[0], [1, 2, 3]]), review=(ReviewPoint("idle"),))

    run = outcome(simulator, trace, machines, first, send({2: 0}, ReviewPoint("idle")), send({3: 0}))
    assert [review.time_s for review in run.reviews] == [3, 5]
    assert run.finish_s.tolist() == [3, 9, 5, 7]
    assert len(run.moves.request) == 0


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_limits_deadlines_and_drops(simulator: Simulator) -> None:
    trace = Trace.of([[10], [10], [10], [10]], prompt_tokens=1)
    first = all_on(0, ReviewPoint("time", 2), max_tokens=[3, 10, 10, 10])
    then = send({1: DROPPED}, deadline_s=6.5)
    run = outcome(simulator, trace, fleet(1), first, then)
    assert run.output_tokens.tolist() == [7, 2, 7, 7]
    assert run.finish_s.tolist() == [7, 2, 7, 7]
    assert run.completed.tolist() == [False] * 4
    run = outcome(simulator, trace, fleet(1), all_on(0, max_tokens=[3, 10, 12, 1]))
    assert run.output_tokens.tolist() == [3, 10, 10, 1]
    assert run.completed.tolist() == [False, True, True, False]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_a_request_that_comes_back_finds_its_blocks(simulator: Simulator) -> None:
    """5 tokens fill two blocks of two; there and back again, only the rest is computed."""
    shape = ShapeProfile(1, Affine(1.0, 0.0), 4.0, 100, 8, token_budget=100, block_tokens=2)
    machines = Fleet(profile(shape), (Engine(1), Engine(1)), 2)
    trace = Trace.of([[10]], prompt_tokens=1)
    plans = all_on(0, ReviewPoint("tokens", 4)), send({0: 1}, ReviewPoint("tokens", 5)), send({0: 0})
    run = outcome(simulator, trace, machines, *plans)
    # 4 steps; 4 / 4 s and a step there; back, 4 of 6 tokens are found: 1 / 4 s and a step; 4 steps
    assert run.finish_s.tolist() == [4 + 2 + 1.25 + 4]


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_a_shared_queue_goes_on_after_a_review(simulator: Simulator) -> None:
    trace = Trace.of([[4], [4], [2], [2]], prompt_tokens=1)
    machines = fleet(max_running=1)
    first = all_on(SHARED_QUEUE, ReviewPoint("time", 1))
    run = outcome(simulator, trace, machines, first, all_on(SHARED_QUEUE))
    assert run.engine.tolist() == [0, 1, 0, 1]
    assert run.finish_s.tolist() == [4, 4, 6, 6]
    assert len(run.moves.request) == 0


def test_review_points_need_a_policy() -> None:
    trace = Trace.of([[4]])
    plan = Plan((Engine(1),), [0], [0], review=(ReviewPoint("idle"),))
    with pytest.raises(InputError, match="review point 'idle': expected none without a policy"):
        simulate(trace, fleet(1), plan)


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_a_plan_of_a_deadline_needs_no_policy(simulator: Simulator) -> None:
    trace = Trace.of([[4], [9]], prompt_tokens=1)
    plan = Plan((Engine(1),), [0, 0], [0, 1], deadline_s=5.5)
    run = simulate(trace, fleet(1), plan)
    assert run.output_tokens.tolist() == [4, 6]
    assert run.completed.tolist() == [True, False]
    assert run.makespan_s == 6


def test_kv_cannot_be_sent_without_a_link() -> None:
    trace = Trace.of([[4]])
    with pytest.raises(InputError, match="has no link_bytes_per_s"):
        simulate(trace, fleet(1), Plan((Engine(1),), [0], [0], move="migrate"))


def test_reviews_without_end_are_refused() -> None:
    """A policy that wakes another engine every millisecond never decodes a token."""
    trace = Trace.of([[4]])
    machines = Fleet(fleet(wake_s=1.0).profile, (Engine(1),), 2)

    def restless(view: View) -> Plan:
        gpu = 1 if view.fleet.engines[0].gpus == (0,) else 0
        point = ReviewPoint("time", view.now_s + 1e-3)
        engines = (Engine(1, gpus=(gpu,)),) if view.now_s else view.fleet.engines
        return Plan(engines, [0], [0], review=(point,))

    with pytest.raises(InputError, match="reviews without a token between"):
        simulate_policy(trace, restless, View.at_start(trace, machines))
