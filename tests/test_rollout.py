"""Free mode from a file of prompts: on engines that pretend (``tests/fake_worker.py``)."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from test_replay import Fakes, greedy

import tailopt.cli.rollout
from tailopt.cli.application import main
from tailopt.cli.replay import Backend, started
from tailopt.errors import InputError
from tailopt.plan import Fleet
from tailopt.policies import resolve_policy
from tailopt.replay.recorder import read_record
from tailopt.replay.rollout import free_batch, model_profile, read_prompts, roll_out, step_table
from tailopt.replay.tiny_model import KV_BYTES_PER_TOKEN, tiny_model
from tailopt.replay.transformers import TransformersEngines
from tailopt.replay.vllm import PYTHON, VllmEngines, tiny_profile
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.reading import read_trace

PROMPTS = [[7, 8, 9], [30, 31], [99] * 40, [5]]
CAP, SAMPLES = 60, 3
STOP = [t for prompt in PROMPTS[:3] for t in greedy(prompt, 60)[[11, 25, 40][len(prompt) % 3] :][:1]]


def file_of(folder: Path) -> Path:
    path = folder / "mine.jsonl"
    rows = [{"id": f"p{k}", "tokens": tokens} for k, tokens in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def model_of(folder: Path) -> Path:
    """The tiny model, with tokens that end a response."""
    made = tiny_model(folder / "tiny")
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}))
    return made


def ended(prompt: list[int]) -> list[int]:
    tokens = greedy(prompt, CAP)
    return next((tokens[: k + 1] for k, token in enumerate(tokens) if token in STOP), tokens)


def run_it(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["rollout", *arguments, "--quiet"])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """``tailopt rollout`` on engines that pretend; what they were made with."""
    made: list[dict[str, Any]] = []

    def fakes(profile: Any, *, python: Any, model: Any, weights: str, **options: Any) -> Fakes:
        made.append({"model": model, "weights": weights, **options})
        return Fakes(profile, model=model, **options)

    monkeypatch.setattr(tailopt.cli.rollout, "started", lambda _: fakes)
    monkeypatch.setenv("TAILOPT_VLLM_PYTHON", sys.executable)
    return made


def test_a_rollout(
    tmp_path: Path, pretended: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each response ends at its own end or at the cap; trace and steps say the same as the record."""
    model, out = model_of(tmp_path), tmp_path / "out"
    options = [str(file_of(tmp_path)), "--model", str(model), "--out", str(out), "--samples", str(SAMPLES),
               "--cap", str(CAP), "--shape", "2xTP1", "--running", "4"]  # fmt: skip
    code, said, err = run_it(options, capsys)
    assert (code, err) == (0, "")
    expected = [ended(prompt) for prompt in PROMPTS for _ in range(SAMPLES)]
    lengths = [len(tokens) for tokens in expected]
    assert len(set(lengths)) > 2
    assert max(lengths) == CAP
    assert re.search(rf"12 responses to 4 prompts, {sum(lengths)} tokens, \d+ at the cap", said)
    assert pretended[0] | {"stop": list(pretended[0]["stop"]), "more": None} == {
        "model": str(model), "weights": "auto", "stop": STOP, "temperature": 1.0, "device": "cpu",
        "more": None,
    }  # fmt: skip
    trace, _ = read_trace(out / "trace.parquet")
    assert trace.output_tokens.tolist() == lengths
    assert trace.capped.tolist() == [length == CAP for length in lengths]
    assert trace.prompt_ids == ("p0", "p1", "p2", "p3")
    assert trace.prompt_tokens.tolist() == [len(p) for p in PROMPTS for _ in range(SAMPLES)]
    record = read_record(out / "record.jsonl")
    assert record.ledger().tokens == expected
    steps = pl.read_parquet(out / "steps.parquet")
    assert (steps["tokens"].sum(), steps["finished"].sum()) == (sum(lengths), len(lengths))
    assert steps["running"].max() == 4  # a shared queue, so the fifth has to wait
    assert set(steps["engine"]) == {0, 1}
    for engine in (0, 1):
        assert steps.filter(pl.col("engine") == engine)["step"].to_list() == list(
            range((steps["engine"] == engine).sum())
        )
    code, _, err = run_it(options, capsys)
    assert (code, err) == (2, f"tailopt: {out}: exists, expected a new folder (or --go-on)\n")


def test_an_interrupted_rollout_goes_on(
    tmp_path: Path, pretended: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut off in the middle of a line, and before there is anything at all."""
    model, out = model_of(tmp_path), tmp_path / "out"
    options = [str(file_of(tmp_path)), "--model", str(model), "--out", str(out), "--samples", str(SAMPLES),
               "--cap", str(CAP), "--shape", "2xTP1", "--running", "4", "--go-on"]  # fmt: skip
    assert run_it(options, capsys)[0] == 0
    whole = (out / "trace.parquet").read_bytes()
    record = out / "record.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    for kept in (b"".join(lines[: len(lines) // 2]) + b'{"kind":"st', lines[0], b""):
        record.write_bytes(kept)
        (out / "trace.parquet").unlink()
        assert run_it(options, capsys)[0] == 0
        assert (out / "trace.parquet").read_bytes() == whole
        assert pl.read_parquet(out / "steps.parquet")["finished"].sum() == 12
    code, _, err = run_it([*options, "--cap", "50"], capsys)
    assert code == 2
    assert "was begun otherwise (cap)" in err


def test_without_the_command(tmp_path: Path) -> None:
    batch = free_batch(file_of(tmp_path), python=sys.executable, model=model_of(tmp_path), samples=2, cap=CAP)
    assert batch.caps.output_tokens.tolist() == [CAP] * 8
    assert batch.stop == tuple(STOP)
    fleet = Fleet.of(tiny_profile(1), "1xTP1")
    with Fakes(fleet.profile, stop=batch.stop) as engines:
        run, trace = roll_out(batch, fleet, resolve_policy("uniform"), engines, tmp_path / "r.jsonl")
    assert trace.output_tokens.tolist() == [len(ended(prompt)) for prompt in PROMPTS for _ in range(2)]
    table = step_table(read_record(tmp_path / "r.jsonl"))
    assert np.isclose(table["seconds"].sum(), run.makespan_s, rtol=0.2)
    assert (table["tokens"] == table["decoding"]).all()


def test_limits_that_fit_the_model(tmp_path: Path) -> None:
    found = model_profile(tiny_model(tmp_path / "m"), 2, max_running=8, longest=1000)
    assert found.kv_bytes_per_token == KV_BYTES_PER_TOKEN
    assert set(found.shapes) == {1, 2}
    assert found.shape(1).max_running == 8
    assert 8 * 1000 <= found.shape(1).kv_capacity_tokens < 8 * 1100
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="expected the configuration of a model"):
        model_profile(tmp_path / "m", 1, max_running=8, longest=1000)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty, expected a prompt a line"),
        ("{", r"line 1: expected a JSON object with prompt \(a text\), messages or tokens"),
        ('{"prompt": ""}', "line 1: expected a JSON object"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2: expected a JSON object"),
        ('{"tokens": [1, -1]}', "line 1: tokens: expected numbers from 0 on"),
        ('{"tokens": [1, true]}', "line 1: tokens: expected numbers from 0 on"),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}', "two prompts have the id 'x'"),
    ],
)
def test_bad_prompts(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(InputError, match=why):
        read_prompts(tmp_path / "p.jsonl")


def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, why in (
        (["--policy", "lpt"], "--policy: lpt needs predicted lengths, and here there are none"),
        (["--samples", "0"], "--samples: expected at least 1, got 0"),
        (["--temperature", "-1"], "--temperature: expected 0 to 100, got -1"),
    ):
        code, _, err = run_it(["x.jsonl", "--model", "m", "--out", str(tmp_path / "o"), *more], capsys)
        assert (code, err) == (2, f"tailopt: {why}\n")


def test_the_rollout_that_comes_with_it() -> None:
    """papers/rollout: the bundled trace is what was recorded, and its steps gained its tokens."""
    there = Path(__file__).parent.parent / "papers" / "rollout"
    names, _ = read_prompts(there / "prompts.jsonl")
    recorded, _ = read_trace(there / "lengths.csv")
    bundled = load_bundled("chat-smollm2-135m")
    assert sorted(bundled.prompt_ids) == sorted(recorded.prompt_ids) == sorted(names)
    assert (recorded.n_prompts, recorded.n_requests) == (32, 32 * 8)
    for one in (recorded, bundled):
        rows = sorted(zip(one.prompt, one.sample, strict=True))
        assert len(set(rows)) == len(rows)
    key = [
        sorted(zip([t.prompt_ids[p] for p in t.prompt], t.sample, t.output_tokens, t.capped, strict=True))
        for t in (recorded, bundled)
    ]
    assert key[0] == key[1]
    assert (recorded.capped == (recorded.output_tokens == 768)).all()
    steps = pl.read_parquet(there / "steps.parquet")
    assert steps["tokens"].sum() == recorded.total_output_tokens
    assert steps["finished"].sum() == recorded.n_requests
    assert set(steps["engine"]) == {0, 1}
    assert steps["running"].max() == 32
    assert (steps["decoding"] <= steps["running"]).all()
    assert (steps["context_tokens"] > steps["kv_tokens"] + steps["decoding"]).any()  # prompts are shared


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {one: started(one) for one in Backend} == {
        Backend.VLLM: VllmEngines, Backend.TRANSFORMERS: TransformersEngines,
    }  # fmt: skip
    monkeypatch.delenv(PYTHON, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"transformers: not installed here; .* --python or {PYTHON}"):
        TransformersEngines(tiny_profile(1))
    assert TransformersEngines(tiny_profile(1), python=sys.executable).python == sys.executable
    with pytest.raises(InputError, match="nowhere: expected a Python interpreter"):
        TransformersEngines(tiny_profile(1), python="nowhere")
