"""Studies of replays on engines that pretend: the split of the gap, files, interruptions, the command."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replay import FLEET, PROFILE, Fakes, fakes, play, queues, traces

from tailopt.cli import main
from tailopt.engine.catalogue import load_engine, write_profile
from tailopt.engine.step_time import Affine
from tailopt.errors import InputError
from tailopt.plan import Fleet, Plan, ReviewPoint
from tailopt.replay import vllm
from tailopt.replay.gap import PARTS, Gap, profiled_s, repriced_s
from tailopt.replay.recorder import read_record
from tailopt.replay.scale import scaled_down
from tailopt.replay.study import GivenPlan, calibrate, pace_of, replay
from tailopt.replay.vllm import VllmEngines, tiny_profile
from tailopt.replay.waterfall import write_waterfall
from tailopt.run_file import read_run
from tailopt.simulate.reference import simulate_reference
from tailopt.trace import Trace

TRACE = Trace.of([[30, 50, 20], [7, 9, 60], [100, 20, 5], [40, 45, 12], [3, 66, 71]], prompt_tokens=20)
DRAWN: dict[str, Any] = {"prompts": 3, "samples": 2, "seed": 5}


@pytest.fixture(autouse=True, scope="module")
def _end_fakes() -> Any:
    yield
    fakes().close()


@given(traces, st.floats(1, 50))
def test_scaling_keeps_shape(trace: Trace, factor: float) -> None:
    small = scaled_down(trace, factor)
    for before, after in (
        (trace.output_tokens, small.output_tokens),
        (trace.prompt_tokens, small.prompt_tokens),
    ):
        assert (np.abs(after - before / factor)[after > 1] <= 0.5).all()
        assert ((after == 0) == (before == 0)).all()
        order = np.argsort(before, kind="stable")
        assert (np.diff(after[order]) >= 0).all()
    assert (scaled_down(trace, 1).output_tokens == trace.output_tokens).all()
    with pytest.raises(InputError, match="at least 1"):
        scaled_down(trace, 0.5)


@given(
    st.lists(st.floats(0.1, 9), min_size=1, max_size=4), st.lists(st.floats(0.1, 9), min_size=4, max_size=4)
)
def test_parts_add_up(measured: list[float], levels: list[float]) -> None:
    gap = Gap(np.array(measured), np.array(measured) / 2, *levels)
    assert tuple(gap.parts()) == PARTS
    assert sum(gap.parts().values()) == pytest.approx(gap.mean_s - gap.lower_s, abs=1e-12)
    assert (gap.noise_s is None) == (len(measured) == 1)


@settings(max_examples=15)
@given(trace=traces, seed=st.integers(0, 99))
def test_repriced(trace: Trace, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the same steps, what the profile says of them is what is simulated, but for the first go."""
    rng = np.random.default_rng(seed)
    plan = Plan(FLEET.engines, rng.integers(2, size=trace.n_requests), rng.permutation(trace.n_requests))
    run, record = play(trace, lambda _: plan, tmp_path_factory.getbasetemp())
    steps = list(record.steps())
    begun_s = max(min(step["t"] for step in steps if step["engine"] == e) for e in set(run.engine.tolist()))
    late_s = repriced_s(run, steps) - simulate_reference(trace, FLEET, plan).makespan_s
    assert -1e-9 <= late_s <= begun_s + 1e-9


def study(folder: Path, **more: Any) -> Any:
    with Fakes(more=more.pop("fault", None)) as engines:
        return replay(
            TRACE, FLEET, engines, ["uniform", "lpt"], ["truth", "constant"], folder=folder, **DRAWN, **more
        )


def test_a_study(tmp_path: Path) -> None:
    outcomes = study(tmp_path / "study", batches=2, repeats=2)
    cells = [(outcome.batch, outcome.policy, outcome.predictor) for outcome in outcomes]
    assert cells == [
        (batch, *cell)
        for batch in (0, 1)
        for cell in (("uniform", "-"), ("lpt", "truth"), ("lpt", "constant"))
    ]
    for outcome in outcomes:
        gap = outcome.gap
        assert len(gap.measured_s) == 2
        assert gap.lower_s <= gap.upper_s <= gap.told_s * (1 + 1e-9)
        assert gap.simulated_s <= gap.measured_s.min()  # sleeping takes longer than it should
        if outcome.predictor != "constant":
            assert gap.told_s == gap.upper_s
        for path, run in zip(outcome.records, outcome.measured, strict=True):
            assert read_run(path.with_suffix(".run")).makespan_s == run.makespan_s
            events = json.loads(path.with_suffix(".json").read_text())["traceEvents"]
            names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
            assert {"predicted: engine 0, TP1", "measured: engine 0, TP1"} <= names
    pytest.importorskip("matplotlib", reason="figures are an extra")
    for name in ("gap.svg", "again.svg"):
        write_waterfall(outcomes, tmp_path / name, title="a study")
    assert (tmp_path / "gap.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
    assert len((tmp_path / "gap.svg").read_bytes()) > 10_000


def test_a_yardstick(tmp_path: Path) -> None:
    """Another batch around each replay; an engine twice as slow as its profile has a pace of 2."""
    folder = tmp_path / "study"
    outcomes = study(folder, repeats=2, yardstick=True)
    assert len(list(folder.glob("pace-*.jsonl"))) == 2 * (len(outcomes) + 1)
    (other,) = {read_record(path).trace.sha256 for path in folder.glob("pace-*.jsonl")}
    assert other not in {read_record(path).trace.sha256 for one in outcomes for path in one.records}

    def paces(repeat: int, number: int) -> Any:
        found = read_record(folder / f"pace-0-{repeat}-{number}.jsonl")
        return pace_of(found.run(), list(found.steps()))

    for number, outcome in enumerate(outcomes):
        raw_s = [run.makespan_s for run in outcome.measured]
        assert outcome.gap.measured_s == pytest.approx(raw_s / outcome.pace)
        for repeat, run in enumerate(outcome.measured):
            last = run.engine[np.argmax(run.finish_s)]
            around = paces(repeat, number)[last], paces(repeat, number + 1)[last]
            assert outcome.pace[repeat] == pytest.approx(np.mean(around))
        assert outcome.row()["pace"] > 1  # fakes sleep, and wake up late
    record = read_record(outcomes[0].records[0])
    steps = [{**step, "s": (2 + step["engine"]) * told_s} for step, told_s in zip(
        record.steps(), profiled_s(record.run(), list(record.steps())), strict=True)]  # fmt: skip
    assert pace_of(record.run(), steps) == pytest.approx([2, 3])
    none_of_first = [step for step in steps if step["engine"]]
    assert pace_of(record.run(), none_of_first) == pytest.approx([3, 3])


def test_a_policy_that_leaves_work_undone_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    short = queues([0, 1, 2], [3, 4, 5], max_tokens=[1] * 6)
    decider = GivenPlan(short(type("V", (), {"fleet": FLEET})()), "short.json")  # type: ignore[arg-type]
    with (
        Fakes() as engines,
        pytest.raises(InputError, match=r"policy short\.json, batch 0: \d of 6 requests did not get all"),
    ):
        replay(TRACE, FLEET, engines, [decider], [], folder=tmp_path / "study", **DRAWN)
    assert not list((tmp_path / "study").glob("*.jsonl"))


def test_an_interrupted_study(tmp_path: Path) -> None:
    """What is done is not done again; what was begun is brought to its end."""
    begun: list[str] = []

    def stop(name: str) -> None:
        begun.append(name)
        if len(begun) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(tmp_path / "study", repeats=2, progress=stop)
    done = {path.name: path.read_bytes() for path in (tmp_path / "study").glob("*.jsonl")}
    assert len(done) == 3
    cut = sorted(done)[0]
    lines = done[cut].splitlines(keepends=True)
    (tmp_path / "study" / cut).write_bytes(b"".join(lines[: len(lines) // 2]))
    with pytest.raises(InputError, match="exists, expected a new folder"):
        study(tmp_path / "study", repeats=2)
    outcomes = study(tmp_path / "study", repeats=2, go_on=True)
    assert all(len(outcome.gap.measured_s) == 2 for outcome in outcomes)
    for name, data in done.items():
        now = (tmp_path / "study" / name).read_bytes()
        assert (now == data) == (name != cut)
    mended = read_record(tmp_path / "study" / cut)
    assert (mended.run().output_tokens == mended.trace.output_tokens).all()
    other = DRAWN | {"seed": 6}
    with Fakes() as engines, pytest.raises(InputError, match="of another batch"):
        replay(TRACE, FLEET, engines, ["uniform"], [], folder=tmp_path / "study", go_on=True, **other)


def test_calibration(tmp_path: Path) -> None:
    """The step time of engines that sleep as they are told is found again."""
    lengths = np.random.default_rng(0).geometric(1 / 60, size=(12, 4)).clip(5, 300)
    trace = Trace.of(lengths.tolist(), prompt_tokens=np.arange(10, 130, 10).tolist())
    slow = {"step_s": 3e-3, "request_s": 1e-3, "token_s": 5e-5}
    profile = replace(PROFILE, shapes={1: replace(PROFILE.shape(1), step_time=Affine(1.0, 1.0))})
    with Fakes(profile, more=slow) as engines:
        fitted = calibrate(
            trace, Fleet.of(profile, "2xTP1"), engines, folder=tmp_path / "c", prompts=12, samples=4, seed=0
        )
    for n in (1, 3, 6):
        assert 0.9 * (3e-3 + 1e-3 * n) < float(fitted.shape(1).step_time(n, 100 * n)) < 2 * (3e-3 + 1e-3 * n)


def test_a_given_plan(tmp_path: Path) -> None:
    plan = queues([0, 1, 2], [3, 4, 5])
    given_plan = GivenPlan(plan(type("V", (), {"fleet": FLEET})()), "mine.json")  # type: ignore[arg-type]
    with Fakes() as engines:
        (outcome,) = replay(TRACE, FLEET, engines, [given_plan], [], folder=tmp_path / "study", **DRAWN)
    assert outcome.policy == "mine.json"
    with pytest.raises(InputError, match="has review points"):
        GivenPlan(replace(given_plan.plan, review=(ReviewPoint("idle"),)), "mine.json")


# The command -----------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["replay", *arguments])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


class OnlyFakes(Fakes):
    """In place of VllmEngines."""

    def __init__(self, profile: Any, *, python: Any, model: Any, device: str) -> None:
        super().__init__(profile)


def test_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="figures are an extra")
    monkeypatch.setattr(vllm, "VllmEngines", OnlyFakes)
    options = ["--demo", "--shape", "2xTP1", "--out", str(tmp_path / "demo"), "--quiet"]
    code, out, err = run(capsys, *options, "--figure", str(tmp_path / "gap.png"))
    assert (code, err) == (0, "")
    assert "cause by cause" in out
    assert "shared_queue" in out
    assert (tmp_path / "gap.png").stat().st_size > 10_000
    code, out, _ = run(capsys, *options, "--go-on", "--json")
    assert code == 0
    document = json.loads(out)
    assert document == json.loads((tmp_path / "demo" / "results.json").read_text())
    assert [row["policy"] for row in document["outcomes"]] == ["uniform", "lpt", "shared_queue"]
    code, _, err = run(capsys, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert "exists" in err


def test_the_command_on_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two servers are two engines; every request gets its tokens, and the study can be taken up again."""
    pytest.importorskip("aiohttp", reason="servers need aiohttp")
    from fake_server import FakeServer

    options = ["--demo", "--out", str(tmp_path / "demo"), "--policy", "shared_queue", "--quiet", "--json"]
    with FakeServer(max_running=64) as first, FakeServer(max_running=64) as second:
        options += ["--server", first.url, "--server", f"{second.url}#tp=1"]
        code, out, err = run(capsys, *options)
        assert (code, err) == (0, "")
        assert first.completions
        assert second.completions
        sent = len(first.completions) + len(second.completions)
        code, again, _ = run(capsys, *options, "--go-on")
        assert (code, json.loads(again)) == (0, json.loads(out))
        assert len(first.completions) + len(second.completions) == sent
        code, _, err = run(capsys, *options, "--go-on", "--shape", "3xTP1")
        assert (code, err.count("\n")) == (2, 1)
        assert "--shape: 3 engines of TP1, there are 2 servers of TP1" in err
    document = json.loads(out)
    assert document["backend"].startswith("vLLM")
    assert document["fleet"] == "2xTP1"
    assert document["engine"] == "servers-fitted"
    records = [read_record(tmp_path / "demo" / name) for name in document["outcomes"][0]["records"]]
    assert len(records) == 2
    for record in records:
        assert (record.run().output_tokens == record.trace.output_tokens).all()
        assert set(record.run().engine.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "http://192.0.2.1"], "is not on this machine; say so with --remote"),
        (["--server", "localhost:9", "--server", "localhost:9"], "is given twice"),
        (["--server", "localhost:9#tp=2", "--shape", "1xTP1"], "there are 0 servers of TP1"),
        (["--go-on"], "--go-on: expected the folder"),
        (["--figure", "gap.pdf"], "to end in .png or .svg"),
        (["--python", "/no/such/python"], "expected a Python interpreter"),
        (["--scale", "0.5"], "--scale: factor: expected at least 1"),
        (["--shape", "99xTP77"], "--shape: engine 'tiny-llama-cpu': has no TP77"),
        (["--repeats", "0"], "--repeats: expected at least 1"),
        (["--plan", "a.json", "--batches", "2"], "--plan: expected one batch"),
        (["--policy", "lptt", "--python", sys.executable, "--engine", "ENGINE"], "unknown"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_profile(tiny_profile(2), tmp_path / "engine.toml")
    code, out, err = run(capsys, *(str(tmp_path / "engine.toml") if a == "ENGINE" else a for a in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_profile_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache of an H100 is not asked of a machine that has no such memory."""
    monkeypatch.setattr(vllm, "_memory_bytes", lambda: 8 << 30)
    profile = load_engine("h100-llama-3.1-8b")
    with pytest.raises(InputError, match="expected a profile that was measured here"):
        Fakes(profile).configuration(Fleet.of(profile, "1xTP1").engines[0])


def test_what_a_worker_is_told() -> None:
    profile = tiny_profile(2)
    (engine,) = Fleet.of(profile, "1xTP2").engines
    told = VllmEngines(profile, python="/bin/true", cores=[3, 5]).configuration(engine)
    assert (told["cores"], told["threads"], told["max_model_len"]) == ([3, 5], 2, 32768)
    gpu = VllmEngines(profile, python="/bin/true", device="cuda").configuration(engine)
    assert (gpu["gpus"], gpu["tensor_parallel"]) == ([0, 1], 2)
