"""The driver's part of a replay, on engines that only pretend (fake_worker.py): they run everywhere."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_worker import next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.drive import drive
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.errors import InputError
from tailopt.plan import DROPPED, SHARED_QUEUE, Engine, Fleet, Plan, Policy, ReviewPoint, View
from tailopt.plan_file import plan_from_json
from tailopt.replay import backend as backend_module
from tailopt.replay.backend import EngineBackend
from tailopt.replay.errors import ReplayError
from tailopt.replay.execute import execute, resume
from tailopt.replay.ledger import trace_of
from tailopt.replay.prompts import prompts
from tailopt.replay.recorder import Record, header, read_record
from tailopt.replay.vllm import VllmEngines, vllm_python
from tailopt.run import Run
from tailopt.run_file import read_run, write_run
from tailopt.simulate.reference import simulate_reference
from tailopt.trace import Trace

FAKE = Path(__file__).with_name("fake_worker.py")
STEP_S, REQUEST_S = 4e-4, 2e-5


def shape(tp: int) -> ShapeProfile:
    return ShapeProfile(
        tp=tp,
        step_time=Affine(STEP_S, REQUEST_S, 0.0),
        prefill_tokens_per_s=1e9,
        kv_capacity_tokens=512,
        max_running=6,
        token_budget=64,
        block_tokens=16,
        prefix_caching=False,
    )


PROFILE = EngineProfile(
    "fake", "none", "none", "none", "fake", "1", "2026-01-31", ("none",), "CC0-1.0", 1,
    {tp: shape(tp) for tp in (1, 2)},
)  # fmt: skip
FLEET = Fleet.of(PROFILE, "2xTP1")


class Fakes(VllmEngines):
    """Engines that pretend, with the faults that ``more`` says."""

    name = "fake 1"

    def __init__(self, profile: EngineProfile = PROFILE, **options: Any) -> None:
        super().__init__(profile, python=sys.executable, **options)

    def command(self, engine: Engine) -> list[str]:
        config = {"step_s": STEP_S, "request_s": REQUEST_S, **self.configuration(engine)}
        return [sys.executable, str(FAKE), json.dumps(config)]


@cache
def fakes() -> Fakes:
    """For tests without faults: their processes are kept from one to the next."""
    return Fakes()


@pytest.fixture(autouse=True, scope="module")
def _end_fakes() -> Any:
    yield
    fakes().close()


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def check(run: Run, trace: Trace, record: Record, *, all_complete: bool = True) -> None:
    """What must hold of every replay."""
    ledger = record.ledger()
    again = ledger.run(run.backend)
    for name in (
        "engine",
        "start_s",
        "first_token_s",
        "finish_s",
        "output_tokens",
        "preemptions",
        "completed",
    ):
        assert np.array_equal(getattr(run, name), getattr(again, name), equal_nan=name.endswith("_s")), name
    assert ledger.tokens == [
        greedy(prompt, len(tokens)) for prompt, tokens in zip(prompts(trace), ledger.tokens, strict=True)
    ]
    assert (run.output_tokens <= trace.output_tokens).all()
    if all_complete:
        assert run.completed.all()
        assert (run.output_tokens == trace.output_tokens).all()
    assert all(line["keys"] for line in record.lines if line["kind"] == "abort")
    got = np.zeros(trace.n_requests, dtype=np.int64)
    key_of = {key: one for line in record.lines if line["kind"] == "submit" for key, one in line["items"]}
    for step in record.steps():
        for key, *tokens in step["new"]:
            got[key_of[key]] += len(tokens)
        assert step["n"] <= step["run"] <= 6
        assert step["kv"] <= 512
    assert (got == run.output_tokens).all()
    for engine in range(len(run.engines)):
        mine = run.log.engine == engine
        assert (np.diff(run.log.time_s[mine]) >= -1e-9).all()
        assert (np.diff(run.log.step[mine]) >= 0).all()
    for column in (run.stays.end_s - run.stays.start_s, run.moves.end_s - run.moves.start_s):
        assert (column >= -1e-9).all()
    ran = run.output_tokens > 0
    assert (run.start_s[ran] <= run.first_token_s[ran]).all()
    assert (run.first_token_s[ran] <= run.finish_s[ran]).all()
    assert record.last is not None
    assert record.last["complete"]


def play(
    trace: Trace, policy: Policy, tmp: Path, engines: VllmEngines | None = None, fleet: Fleet = FLEET
) -> tuple[Run, Record]:
    path = tmp / "record.jsonl"
    path.unlink(missing_ok=True)
    run = execute(trace, fleet, policy, View.at_start(trace, fleet), engines or fakes(), record=path)
    return run, read_record(path)


def queues(*parts: Any, **more: Any) -> Policy:
    return lambda view: replace(Plan.of_queues(view.fleet.engines, parts), **more)


traces = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=4).flatmap(
    lambda groups: st.lists(st.integers(0, 90), min_size=len(groups), max_size=len(groups)).map(
        lambda prompt: Trace.of(groups, prompt_tokens=prompt)
    )
)


class Whims:
    """A policy that answers each review with any valid plan, drops included; at most three reviews.

    It draws by itself: how many requests are left at a review is a matter of time.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.left = np.random.default_rng(seed), 3

    def __call__(self, view: View) -> Plan:
        rng, n = self.rng, view.n_requests
        start = view.now_s == 0
        self.left -= 1
        fleets = [FLEET.engines, (Engine(2),), (Engine(1, max_running=2, gpus=(0,)), Engine(1))]
        engines = fleets[0 if start else rng.integers(3)]
        points = [
            ReviewPoint("unfinished", int(rng.integers(1, 9))),
            ReviewPoint("tokens", int(rng.integers(1, 41))),
            ReviewPoint("idle"),
            ReviewPoint("time", float(rng.uniform(0, 0.02))),
        ]
        return Plan(
            engines,
            rng.integers(SHARED_QUEUE if start or rng.random() < 0.7 else DROPPED, len(engines), size=n),
            rng.permutation(n),
            atomic=bool(rng.integers(2)),
            review=tuple(points[i] for i in rng.integers(4, size=2)) if self.left > 0 else (),
            max_tokens=rng.integers(1, 41, size=n) if rng.random() < 0.3 else None,
            deadline_s=float(rng.uniform(0.001, 0.1)) if rng.random() < 0.3 else None,
        )


@settings(max_examples=30)
@given(trace=traces, seed=st.integers(0, 2**32))
def test_any_policy_conserves_tokens(
    trace: Trace, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Moves, switches, drops, limits, deadlines: the tokens are those of an undisturbed engine, each once."""
    run, record = play(trace, Whims(seed), tmp_path_factory.getbasetemp())
    check(run, trace, record, all_complete=False)
    folder = tmp_path_factory.mktemp("run") / "saved"
    write_run(run, folder)
    saved = read_run(folder)
    for name in ("engine", "start_s", "finish_s", "output_tokens", "completed"):
        assert np.array_equal(getattr(saved, name), getattr(run, name), equal_nan=name.endswith("_s")), name
    assert saved.engines == run.engines
    assert len(saved.moves.request) == len(run.moves.request)
    assert 0 <= run.idle_share <= 1
    limit = trace.output_tokens.copy()
    for line in record.lines:
        if line["kind"] == "plan":
            plan, request = plan_from_json(line["plan"]), line["request"]
            limit[request] = trace.output_tokens[request]
            if plan.max_tokens is not None:
                limit[request] = np.minimum(limit[request], plan.max_tokens)
    assert (run.completed <= (run.output_tokens >= np.minimum(limit, trace.output_tokens))).all()


@settings(max_examples=25)
@given(trace=traces, seed=st.integers(0, 99))
def test_schedules_as_simulated(trace: Trace, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With its own queues an engine takes the very steps that are predicted; only time may differ."""
    rng = np.random.default_rng(seed)
    plan = Plan(FLEET.engines, rng.integers(2, size=trace.n_requests), rng.permutation(trace.n_requests))
    run, record = play(trace, lambda _: plan, tmp_path_factory.getbasetemp())
    check(run, trace, record)
    predicted = simulate_reference(trace, FLEET, plan)
    for column in ("engine", "step", "running", "kv_tokens"):
        assert np.array_equal(getattr(run.log, column), getattr(predicted.log, column)), column
    assert np.array_equal(run.preemptions, predicted.preemptions)


BATCH = Trace.of([[30, 50], [7, 9], [100, 20], [40, 45]], prompt_tokens=20)


def test_preempts(tmp_path: Path) -> None:
    """More context than the cache holds."""
    trace = Trace.of([[150, 160, 170, 180]], prompt_tokens=20)
    run, record = play(trace, queues([0, 1, 2, 3], []), tmp_path)
    check(run, trace, record)
    assert run.preemptions.sum() > 0


@pytest.mark.parametrize(
    ("point", "least_reviews"),
    [
        (ReviewPoint("unfinished", 3), 1),
        (ReviewPoint("tokens", 25), 1),
        (ReviewPoint("idle"), 1),
        (ReviewPoint("time", 0.01), 1),
    ],
)
def test_review_points(point: ReviewPoint, least_reviews: int, tmp_path: Path) -> None:
    seen: list[View] = []

    def swap(view: View) -> Plan:
        """Everybody to the other engine."""
        seen.append(view)
        if view.now_s == 0:
            return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(point,))(view)
        return Plan(view.fleet.engines, 1 - view.engine, np.arange(view.n_requests))

    run, record = play(BATCH, swap, tmp_path)
    check(run, BATCH, record)
    assert len(run.reviews) == len(seen) - 1 >= least_reviews
    now = seen[1]
    assert run.reviews[0].reason == point
    assert (
        run.moves.request == now.request[now.running][np.argsort(now.engine[now.running], kind="stable")]
    ).sum() >= 0
    assert set(run.moves.request.tolist()) == set(now.request[now.running].tolist())
    if point.when == "unfinished":
        assert now.n_requests <= 3
    if point.when == "tokens":
        assert now.generated_tokens.max() >= 25
    if point.when == "idle":
        assert len(set(now.engine.tolist())) == 1
    if point.when == "time":
        assert now.now_s == 0.01


def test_what_stays_is_left_alone(tmp_path: Path) -> None:
    """A plan that leaves everybody where they run moves nobody."""

    def stay(view: View) -> Plan:
        if view.now_s == 0:
            return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(ReviewPoint("tokens", 5), ReviewPoint("idle")))(
                view
            )
        engine_of = view.engine if view.n_requests % 2 else np.full(view.n_requests, SHARED_QUEUE)
        return Plan(view.fleet.engines, engine_of, np.arange(view.n_requests))

    run, record = play(BATCH, stay, tmp_path)
    check(run, BATCH, record)
    assert run.reviews
    assert not len(run.moves.request)
    assert not any(line["kind"] == "abort" for line in record.lines)


def test_switch(tmp_path: Path) -> None:
    """Two engines become one, and its parts are timed; kept engines wake at once."""

    def merge(view: View) -> Plan:
        if view.now_s == 0:
            return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(ReviewPoint("unfinished", 4),))(view)
        return Plan((Engine(2),), np.zeros(view.n_requests, dtype=int), np.arange(view.n_requests))

    with Fakes() as engines:
        run, record = play(BATCH, merge, tmp_path, engines)
    check(run, BATCH, record)
    assert [engine.tp for engine in run.engines] == [1, 1, 2]
    spans = run.spans
    (review,) = run.reviews
    assert spans.open_s[:2].tolist() == [0, 0]
    assert (spans.close_s[:2] >= review.time_s).all()
    assert (spans.sleep_s[:2] > 0).all()
    assert spans.wake_s[2] > 0
    assert spans.open_s[2] >= (spans.close_s + spans.sleep_s)[:2].max() + spans.wake_s[2] - 0.05
    assert (run.engine[review.request] == 2).all()
    cold_s = float(spans.wake_s[2])

    with Fakes() as engines:
        engines.warm([replace(Engine(2), gpus=(0, 1))])
        time.sleep(2 * cold_s)
        warm, record = play(BATCH, merge, tmp_path, engines)
        check(warm, BATCH, record)
        assert warm.spans.wake_s[2] < cold_s / 2


def test_shared_queue_and_arrivals(tmp_path: Path) -> None:
    """Engines pull in order, never more than they may run, and nobody starts before its arrival."""
    trace = replace(BATCH, arrival_s=np.array([0, 0, 0.005, 0.005, 0.01, 0.01, 0.08, 0.08]))
    plan = Plan((replace(FLEET.engines[0], max_running=1), replace(FLEET.engines[1], max_running=2)),
                np.full(8, SHARED_QUEUE), np.arange(8))  # fmt: skip
    run, record = play(trace, lambda _: plan, tmp_path)
    check(run, trace, record)
    assert (run.start_s >= trace.arrival_s).all()
    pulled = [item[1] for line in record.lines if line["kind"] == "submit" for item in line["items"]]
    assert pulled == list(range(8))
    for engine, most in enumerate((1, 2)):
        assert run.log.running[run.log.engine == engine].max() <= most


def test_limits_follow_the_finished_requests(tmp_path: Path) -> None:
    """The engine itself counts: nobody is let in for a finish that lowers the limit."""
    limits = ((1, 2), (2, 1), (4, 3))
    engine = replace(FLEET.engines[0], max_running=3, limits=limits)
    plan = Plan((engine, FLEET.engines[1]), np.zeros(8), np.arange(8))
    run, record = play(BATCH, lambda _: plan, tmp_path)
    check(run, BATCH, record)
    finished, admitted = 0, 0
    for step in record.steps():
        if step["in"]:
            assert step["run"] <= [3, *(running for f, running in limits if f <= finished)][-1]
        admitted, finished = admitted + len(step["in"]), finished + len(step["done"])
    assert admitted == finished == 8
    said = simulate_reference(BATCH, FLEET, plan)
    assert np.argsort(run.start_s, kind="stable").tolist() == np.argsort(said.start_s, kind="stable").tolist()
    assert (np.unique(run.start_s).size, run.log.running.max()) == (np.unique(said.start_s).size, 3)


def test_groups_are_pulled_whole(tmp_path: Path) -> None:
    plan = Plan(FLEET.engines, np.full(8, SHARED_QUEUE), np.arange(8), atomic=True)
    run, record = play(BATCH, lambda _: plan, tmp_path)
    check(run, BATCH, record)
    assert (run.engine[::2] == run.engine[1::2]).all()


def test_given_up(tmp_path: Path) -> None:
    """Neither what a limit cuts off nor what a deadline does is whole."""
    limits = np.array([5, 50, 7, 9, 100, 20, 40, 45])
    trace = replace(BATCH, output_tokens=np.where(BATCH.output_tokens == 100, 400, BATCH.output_tokens))
    policy = queues(
        [0, 1, 2, 3], [4, 5, 6, 7], max_tokens=np.where(limits == 100, 400, limits), deadline_s=2.0
    )
    with Fakes(more={"step_s": 0.01}) as engines:  # 50 tokens take half a second, 400 take four
        run, record = play(trace, policy, tmp_path, engines)
    check(run, trace, record, all_complete=False)
    assert run.completed.tolist() == [False] + [True] * 3 + [False] + [True] * 3
    assert run.output_tokens[0] == 5
    assert 0 < run.output_tokens[4] < 400
    assert abs(run.finish_s[4] - 2.0) < 0.2
    measured = trace_of(run, trace)
    assert measured.capped.tolist() == (~run.completed).tolist()
    assert measured.output_tokens.tolist() == run.output_tokens.tolist()


def test_free(tmp_path: Path) -> None:
    """Responses end by themselves, or at the cap; a move in between changes no token."""
    texts = [[10 * i + j for j in range(20)] for i in range(8)]
    full = [greedy(text, 60) for text in texts]
    stop = {full[0][12], full[3][30], full[5][3]}
    expected = [
        next((tokens[: k + 1] for k, one in enumerate(tokens) if one in stop), tokens) for tokens in full
    ]
    cap = replace(BATCH, output_tokens=np.full(8, 60))

    def swap(view: View) -> Plan:
        if view.now_s == 0:
            return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(ReviewPoint("tokens", 20),))(view)
        return Plan(view.fleet.engines, 1 - view.engine, np.arange(view.n_requests))

    path = tmp_path / "record.jsonl"
    with Fakes(stop=stop) as engines:
        view = View.at_start(cap, FLEET)
        run = execute(cap, FLEET, swap, view, engines, record=path, given=texts, free=True)
        assert read_record(path).ledger().tokens == expected
        assert read_record(path).run().makespan_s == run.makespan_s
        text = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(text[:30]))
        resume(path, swap, view, engines)
        assert read_record(path).ledger().tokens == expected
    assert len(run.moves.request) > 0
    made = trace_of(run, cap, free=True)
    assert made.output_tokens.tolist() == [len(tokens) for tokens in expected]
    assert made.capped.tolist() == [len(tokens) == 60 for tokens in expected]
    with pytest.raises(InputError, match="expected the lengths"):
        execute(cap, FLEET, swap, view, fakes(), given=texts[1:], free=True)


# What goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["die", "nonsense", "hang"])
def test_an_engine_dies_once(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started anew, its requests go on with their tokens, and nothing is counted twice."""
    monkeypatch.setattr(backend_module, "PATIENCE_S", 2.0)
    more = {"fault": fault, "after": 20, "once": str(tmp_path / "once")}
    with Fakes(more=more) as engines:
        run, record = play(BATCH, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path, engines)
    check(run, BATCH, record)
    (lost,) = [line for line in record.lines if line["kind"] == "lost"]
    assert run.preemptions.sum() > 0
    submitted = [
        line for line in record.lines if line["kind"] == "submit" and line["engine"] == lost["engine"]
    ]
    assert len(submitted) == 2


def test_who_does_not_listen_calls_nobody_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is stopped for longer than an engine may be silent; nobody is taken for dead for that."""
    monkeypatch.setattr(backend_module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(backend_module, "STALL_S", 0.5)
    (tmp_path / "pids").mkdir()
    stopped: list[int] = []

    def signal_all(number: signal.Signals) -> None:
        for pid in stopped:
            os.kill(pid, number)

    def stop(now_s: float, left: Any) -> None:
        if now_s > 0 and not stopped:
            stopped.extend(int(pid.name) for pid in (tmp_path / "pids").iterdir())
            signal_all(signal.SIGSTOP)
            time.sleep(2.0)
            later = threading.Timer(0.6, signal_all, [signal.SIGCONT])  # the engines wake up after the driver
            later.daemon = True
            later.start()

    path, short = tmp_path / "record.jsonl", Trace.of([[10, 12], [8, 9]])
    with Fakes(more={"pids": str(tmp_path / "pids"), "step_s": 0.1}) as engines:
        policy, view = queues([0, 1], [2, 3]), View.at_start(short, FLEET)
        run = execute(short, FLEET, policy, view, engines, record=path, progress=stop)
    check(run, short, read_record(path))
    assert len(stopped) == 2
    assert not any(line["kind"] == "lost" for line in read_record(path).lines)


def test_an_engine_is_killed_in_the_middle(tmp_path: Path) -> None:
    """kill -9, whatever it is doing; what it had told of is kept, and the other one goes on."""
    (tmp_path / "pids").mkdir()
    killed: list[int] = []

    def kill(now_s: float, left: Any) -> None:
        if now_s > 0 and not killed:
            killed.extend(int(pid.name) for pid in (tmp_path / "pids").iterdir())
            os.kill(killed[0], signal.SIGKILL)

    path = tmp_path / "record.jsonl"
    with Fakes(more={"pids": str(tmp_path / "pids"), "step_s": 0.01}) as engines:
        policy, view = queues([0, 1, 2, 3], [4, 5, 6, 7]), View.at_start(BATCH, FLEET)
        run = execute(BATCH, FLEET, policy, view, engines, record=path, progress=kill)
    record = read_record(path)
    check(run, BATCH, record)
    assert len(killed) == 2
    (lost,) = [line for line in record.lines if line["kind"] == "lost"]
    assert "signal 9" in lost["why"]
    submitted = [line["engine"] for line in record.lines if line["kind"] == "submit"]
    assert submitted.count(lost["engine"]) == 2
    assert submitted.count(1 - lost["engine"]) == 1
    assert run.output_tokens.sum() == BATCH.output_tokens.sum()


def test_an_engine_dies_in_a_review(tmp_path: Path) -> None:
    def swap(view: View) -> Plan:
        if view.now_s == 0:
            return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(ReviewPoint("tokens", 20),))(view)
        for pid in (tmp_path / "pids").iterdir():
            os.kill(int(pid.name), signal.SIGKILL)
        return Plan(view.fleet.engines, 1 - view.engine, np.arange(view.n_requests))

    (tmp_path / "pids").mkdir()
    with Fakes(more={"pids": str(tmp_path / "pids")}) as engines:
        run, record = play(BATCH, swap, tmp_path, engines)
    check(run, BATCH, record)
    assert sum(line["kind"] == "lost" for line in record.lines) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fault": "die", "after": 3}, "died"),
        ({"fault": "short", "after": 0}, "ended request"),
        ({"fault": "stranger", "after": 5}, "999"),
        ({"fault": "stillborn"}, "no memory for the model"),
        ({"max_model_len": 60}, "rejects request"),
    ],
)
def test_an_engine_goes_wrong(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    """One line that says what; and the record says that it is incomplete, and why."""
    with Fakes(more=more) as engines, pytest.raises(ReplayError, match=message) as caught:
        play(BATCH, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path, engines)
    assert "\n" not in str(caught.value)
    record = read_record(tmp_path / "record.jsonl")
    assert record.last is not None
    assert not record.last["complete"]
    assert message in record.last["why"]
    with pytest.raises(ReplayError, match=r"incomplete, \d requests"):
        record.run()
    with Fakes() as engines:
        resume(tmp_path / "record.jsonl", queues([]), View.at_start(BATCH, FLEET), engines)
    mended = read_record(tmp_path / "record.jsonl")
    check(mended.run(), BATCH, mended)


def test_disk_full() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with pytest.raises(ReplayError, match="No space left"):
        EngineBackend(BATCH, FLEET, fakes(), record="/dev/full")


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
"""


@pytest.mark.parametrize("more", [-700, 10, 2000])
def test_disk_full_in_the_middle(more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the header, or in any line after it; one line of error, and with room it goes on from there."""
    pytest.importorskip("resource", reason="not on Windows")
    monkeypatch.setattr(sys, "argv", ["-c"])
    path = tmp_path / "record.jsonl"
    head = header(BATCH, FLEET, fakes().name, seed=0, vocabulary=None, free=False)
    most = len(json.dumps(head, separators=(",", ":"))) + more
    code = FULL.format(most=most) + DRIVER.format(tests=str(FAKE.parent), record=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"{path}: cannot be written (File too large)")
    assert path.stat().st_size == most
    if more <= 10:
        with pytest.raises(InputError, match="was cut short before the first plan"):
            read_record(path)
        return
    before = read_record(path).ledger()
    run = resume(path, three_plans, View.at_start(BATCH, FLEET), fakes())
    record = read_record(path)
    check(run, BATCH, record)
    assert all(new[: len(old)] == old for old, new in zip(before.tokens, record.ledger().tokens, strict=True))


def test_refuses(tmp_path: Path) -> None:
    everyone = [0, 1, 2, 3], [4, 5, 6, 7]
    (tmp_path / "there").touch()
    with pytest.raises(InputError, match="exists, expected a new file"):
        execute(
            BATCH, FLEET, queues(*everyone), View.at_start(BATCH, FLEET), fakes(), record=tmp_path / "there"
        )
    with pytest.raises(InputError, match="cannot send their KV cache"):
        play(BATCH, queues(*everyone, move="migrate"), tmp_path)
    long = replace(BATCH, output_tokens=BATCH.output_tokens * 9)
    with pytest.raises(InputError, match="request 4: has 920 tokens with its prompt, engine 0 holds 512"):
        play(long, queues(*everyone), tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_record(tmp_path / "none")
    (tmp_path / "text").write_text("no record\n")
    with pytest.raises(InputError, match="line 1: expected a JSON object"):
        read_record(tmp_path / "text")
    with pytest.raises(InputError, match="expected a Python interpreter"):
        vllm_python(tmp_path / "none")


# Interruptions ---------------------------------------------------------------------------------------

DRIVER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_replay import BATCH, FLEET, Fakes, three_plans
from tailopt.plan import View
from tailopt.replay.execute import execute
with Fakes(more={{"step_s": 4e-3}}) as engines:
    execute(BATCH, FLEET, three_plans, View.at_start(BATCH, FLEET), engines, record={record!r})
"""


def three_plans(view: View) -> Plan:
    """Everybody changes engines when six, then when three are left."""
    review = (ReviewPoint("unfinished", 6 if view.n_requests > 6 else 3),)
    if view.now_s == 0:
        return queues([0, 1, 2, 3], [4, 5, 6, 7], review=review)(view)
    engine_of = np.where(view.engine == 0, 1, 0)
    return Plan(view.fleet.engines, engine_of, np.arange(view.n_requests), review=review)


@pytest.mark.parametrize("lines", [9, 40, 70, 100])
def test_killed_and_resumed(lines: int, tmp_path: Path) -> None:
    """The driver is killed at any moment; another one goes on from what it had written."""
    path = tmp_path / "record.jsonl"
    code = DRIVER.format(tests=str(FAKE.parent), record=str(path))
    with subprocess.Popen([sys.executable, "-c", code]) as driver:
        while driver.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < lines):
            time.sleep(0.002)
        driver.kill()
    with path.open("ab") as file:
        file.write(b'{"kind":"step","eng')  # a line that it was about to write
    cut = read_record(path)
    assert cut.last is None
    before = cut.ledger()
    run = resume(path, three_plans, View.at_start(BATCH, FLEET), fakes())
    record = read_record(path)
    check(run, BATCH, record)
    assert not before.all_finished
    assert len(run.reviews) == 2
    assert all(new[: len(old)] == old for old, new in zip(before.tokens, record.ledger().tokens, strict=True))
    done = before.finished
    assert np.array_equal(run.finish_s[done], before.finish_s[done])
    assert resume(path, three_plans, View.at_start(BATCH, FLEET), fakes()).makespan_s == run.makespan_s


def test_interrupted_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, twice."""
    monkeypatch.setattr(backend_module, "REPORT_S", 0.02)
    path, view = tmp_path / "record.jsonl", View.at_start(BATCH, FLEET)

    def interrupt(now_s: float, left: Any) -> None:
        if now_s > 0.02:
            raise KeyboardInterrupt

    with Fakes() as engines:
        with pytest.raises(KeyboardInterrupt):
            execute(BATCH, FLEET, three_plans, view, engines, record=path, progress=interrupt)
        assert not read_record(path).last["complete"]  # type: ignore[index]
        with pytest.raises(KeyboardInterrupt):
            resume(path, three_plans, view, engines, progress=interrupt)
        run = resume(path, three_plans, view, engines)
    check(run, BATCH, read_record(path))


def test_resumes_its_own_batch_only(tmp_path: Path) -> None:
    path, other = tmp_path / "record.jsonl", Trace.of([[3, 5]])
    execute(BATCH, FLEET, three_plans, View.at_start(BATCH, FLEET), fakes(), record=path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:20]))
    with pytest.raises(InputError, match="another batch"):
        resume(path, three_plans, View.at_start(other, FLEET), fakes())


def test_a_state_is_what_a_policy_sees(tmp_path: Path) -> None:
    """At a review, waiting ones are where they wait."""
    fleet = Fleet(PROFILE, tuple(replace(engine, max_running=1) for engine in FLEET.engines), 2)
    plan = replace(
        Plan.of_queues(fleet.engines, [[0, 1, 2], [4, 5]], [3, 6, 7]), review=(ReviewPoint("tokens", 3),)
    )
    with EngineBackend(BATCH, fleet, fakes()) as backend:
        backend.start(plan)
        state = backend.until_review()
        assert state is not None
        backend.change(Plan(fleet.engines, np.zeros(8, dtype=int), np.arange(8)), np.arange(8))
        assert backend.until_review() is None
        run = backend.run()
    assert state.engine.tolist() == [0, 0, 0, -1, 1, 1, -1, -1]
    assert state.generated.max() >= 3
    assert state.running[state.generated > 0].all()
    assert set(np.flatnonzero(state.running).tolist()) <= {0, 4}
    assert (run.output_tokens == BATCH.output_tokens).all()
    assert (run.engine == 0).all()


def test_drive_needs_nothing_else() -> None:
    with EngineBackend(BATCH, FLEET, fakes()) as backend:
        run = drive(backend, queues([0, 1, 2, 3], [4, 5, 6, 7]), View.at_start(BATCH, FLEET))
    assert run.completed.all()
