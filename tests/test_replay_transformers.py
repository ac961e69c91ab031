"""Replays on transformers' own continuous batching, in process: a worker an engine.

Needs torch and transformers and runs if TAILOPT_VLLM_PYTHON names a python that has them. What is compared
with is not this engine: ``model.generate`` of transformers, one request after the other.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from test_replay_vllm import BATCH, ROOMY, TIGHT, halves, play

from tailopt.engine.speculation import Speculation
from tailopt.errors import InputError
from tailopt.plan import SHARED_QUEUE, Engine, Fleet, Plan, ReviewPoint, View
from tailopt.replay.execute import execute
from tailopt.replay.ledger import trace_of
from tailopt.replay.process import Link, WorkerProcess
from tailopt.replay.prompts import prompts
from tailopt.replay.recorder import read_record
from tailopt.replay.tiny_model import TINY
from tailopt.replay.transformers import TransformersEngines
from tailopt.replay.vllm import PYTHON
from tailopt.simulate.reference import simulate_reference
from tailopt.trace import Trace

pytestmark = pytest.mark.skipif(
    PYTHON not in os.environ, reason=f"needs transformers: {PYTHON} must name a Python that has it"
)

ALONE = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.set_num_threads(1)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.float32).eval()
for prompt, want in json.load(sys.stdin):
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
        min_new_tokens=want, max_new_tokens=want, eos_token_id=None,
    )
    print(json.dumps(out[0, len(prompt):].tolist()))
"""


@cache
def model() -> Path:
    """A model whose next token depends on all before it, and not on the last alone as the tiny one's does."""
    folder = Path(tempfile.mkdtemp(prefix="tailopt-"))
    config = TINY | {"tie_word_embeddings": False, "initializer_range": 0.15}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def alone(trace: Trace) -> list[list[int]]:
    """The likeliest tokens, each request by itself."""
    asked = list(zip(prompts(trace), trace.output_tokens.tolist(), strict=True))
    command = [os.environ[PYTHON], "-c", ALONE, str(model())]
    found = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.fixture(scope="module")
def engines() -> Iterator[TransformersEngines]:
    with TransformersEngines(ROOMY, model=model()) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    tokens = alone(BATCH)
    assert np.mean([len(set(one)) / len(one) for one in tokens]) > 0.5  # else they tell little
    return tokens


def test_tokens_are_those_of_each_request_alone(
    engines: TransformersEngines, expected: list[list[int]], tmp_path: Path
) -> None:
    run, record = play(BATCH, ROOMY, halves, engines, tmp_path)
    assert run.backend.startswith("transformers 5.")
    assert record.ledger().tokens == expected
    steps = list(record.steps())
    assert sum(len(gained) - 1 for step in steps for gained in step["new"]) == BATCH.total_output_tokens
    budget = ROOMY.shape(1).token_budget
    assert all(step["n"] == len(step["new"]) and step["n"] + step["P"] <= budget for step in steps)
    assert max(step["run"] for step in steps) == 6


def test_takes_the_steps_that_are_predicted(expected: list[list[int]], tmp_path: Path) -> None:
    """Decode first, then prompts in order, split at the budget: who is in which step, and blocks in use."""
    own = replace(ROOMY, shapes={1: replace(ROOMY.shape(1), prefix_caching=False)})
    with TransformersEngines(own, model=model()) as engines:
        run, record = play(BATCH, own, halves, engines, tmp_path)
    predicted = simulate_reference(BATCH, Fleet.of(own, "2xTP1"), run.plan)
    assert any(step["P"] for step in list(record.steps())[2:])
    for column in ("engine", "step", "running", "kv_tokens"):
        assert np.array_equal(getattr(run.log, column), getattr(predicted.log, column)), column
    assert record.ledger().tokens == expected


def test_full_caches(tmp_path: Path) -> None:
    """Split prompts, preemptions, shared prefixes: no token is lost, gained or another."""
    trace = Trace.of([[90, 120, 100, 80], [150, 60, 70, 75]], prompt_tokens=[200, 90])
    with TransformersEngines(TIGHT, model=model()) as tight:
        run, record = play(trace, TIGHT, halves, tight, tmp_path, "1xTP1")
    assert run.preemptions.sum() > 0
    assert record.ledger().tokens == alone(trace)
    steps, shape = list(record.steps()), TIGHT.shape(1)
    assert all(0 <= step["kv"] <= shape.kv_capacity_tokens for step in steps)
    assert all(step["n"] + step["P"] <= shape.token_budget for step in steps)
    assert steps[-1]["free"] == shape.kv_capacity_tokens // shape.block_tokens
    assert any(step["P"] for step in steps[1:])


def test_moves_limits_and_the_shared_queue(
    engines: TransformersEngines, expected: list[list[int]], tmp_path: Path
) -> None:
    """Two at a time from one queue; then whoever is left changes sides, with what it has, and limits go."""

    def swap(view: View) -> Plan:
        n = view.n_requests
        if view.now_s == 0:
            few = tuple(replace(engine, max_running=2) for engine in view.fleet.engines)
            review = (ReviewPoint("unfinished", 6), ReviewPoint("unfinished", 3))
            return Plan(few, np.full(n, SHARED_QUEUE), np.arange(n), review=review)
        return Plan(view.fleet.engines, np.where(view.engine == 0, 1, 0), np.arange(n))

    run, record = play(BATCH, ROOMY, swap, engines, tmp_path)
    assert len(run.moves.request) > 0
    assert record.ledger().tokens == expected
    first = run.reviews[0].time_s
    assert run.log.running[run.log.time_s < first].max() == 2


def test_priority(engines: TransformersEngines, expected: list[list[int]], tmp_path: Path) -> None:
    """One at a time, the last of the batch first."""
    one = Engine(1, gpus=(0,), max_running=1, scheduling="priority")

    def backwards(view: View) -> Plan:
        n = view.n_requests
        return Plan((one,), np.zeros(n, dtype=int), np.arange(n)[::-1])

    run, record = play(BATCH, ROOMY, backwards, engines, tmp_path, "1xTP1")
    assert np.argsort(run.finish_s).tolist() == list(range(BATCH.n_requests))[::-1]
    assert record.ledger().tokens == expected


def test_free_mode(expected: list[list[int]], tmp_path: Path) -> None:
    """A response ends where it ends itself."""
    stop = {expected[0][7], expected[5][3]}
    ended = [
        next((tokens[: k + 1] for k, token in enumerate(tokens) if token in stop), tokens)
        for tokens in expected
    ]
    fleet, path = Fleet.of(ROOMY, "1xTP1"), tmp_path / "record.jsonl"
    view = View.at_start(BATCH, fleet)
    with TransformersEngines(ROOMY, model=model(), stop=stop) as found:
        run = execute(
            BATCH, fleet, lambda v: Plan(v.fleet.engines, np.zeros(12, int), np.arange(12)), view, found,
            record=path, given=prompts(BATCH), free=True,
        )  # fmt: skip
    assert read_record(path).ledger().tokens == ended
    assert trace_of(run, BATCH, free=True).output_tokens.tolist() == [len(tokens) for tokens in ended]
    assert len(ended[0]) == 8


def test_samples_differ(tmp_path: Path) -> None:
    """One prompt, twelve samples with a temperature, half on each engine: no two are the same."""
    trace = Trace.of([[25] * 12], prompt_tokens=20)
    fleet, path = Fleet.of(ROOMY, "2xTP1"), tmp_path / "record.jsonl"
    same = [prompts(trace)[0]] * 12

    def by_turns(view: View) -> Plan:
        return Plan(view.fleet.engines, np.arange(12) % 2, np.arange(12))

    with TransformersEngines(ROOMY, model=model(), temperature=1.0) as found:
        run = execute(trace, fleet, by_turns, View.at_start(trace, fleet), found, record=path, given=same)
    tokens = read_record(path).ledger().tokens
    assert run.output_tokens.tolist() == [25] * 12
    assert len({one[0] for one in tokens}) > 6
    assert len(set(map(tuple, tokens))) == 12


def test_a_killed_engine(
    engines: TransformersEngines, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.jsonl"
    pids: list[int] = []
    killed: list[int] = []
    taken = engines.take

    def take(engine: Engine) -> Link:
        link = taken(engine)
        assert isinstance(link, WorkerProcess)
        pids.append(link.process.pid)
        return link

    def kill(now_s: float, left: object) -> None:
        if now_s > 0 and not killed and b'{"kind":"step"' in path.read_bytes():
            killed.append(pids[0])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(engines, "take", take)
    fleet = Fleet.of(ROOMY, "2xTP1")
    long = replace(BATCH, output_tokens=BATCH.output_tokens * 2)
    run = execute(long, fleet, halves, View.at_start(long, fleet), engines, record=path, progress=kill)
    record = read_record(path)
    assert sum(line["kind"] == "lost" for line in record.lines) == 1
    assert (run.output_tokens == long.output_tokens).all()
    tokens = record.ledger().tokens
    assert [new[: len(old)] for old, new in zip(expected, tokens, strict=True)] == expected


def test_what_it_cannot_do(engines: TransformersEngines) -> None:
    with pytest.raises(InputError, match="speculation"):
        engines.configuration(Engine(1, speculation=Speculation("ngram", 3)))
    with pytest.raises(InputError, match="TP2"):
        TransformersEngines(ROOMY, device="cuda").configuration(Engine(2))


def test_its_profile_by_command(tmp_path: Path) -> None:
    from tailopt.cli import main
    from tailopt.engine.catalogue import read_profile

    out = tmp_path / "here.toml"
    few = ["--seconds", "1", "--no-switch", "--kind", "affine", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--backend", "transformers", "--out", str(out), *few])
    assert not ended.value.code
    found = read_profile(out)
    assert found.engine == "transformers"
    assert found.shape(1).step_time(8, 800) > found.shape(1).step_time(1, 100) > 0
