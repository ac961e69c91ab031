"""The experiment that profiles an engine: on engines that pretend, it finds what they were made to be."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailopt.cli import app
from tailopt.engine.catalogue import read_profile
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine, Power, StepTime
from tailopt.errors import InputError
from tailopt.plan import Engine
from tailopt.replay.errors import ReplayError
from tailopt.replay.fit import Steps
from tailopt.replay.fit_file import read_measured, write_steps
from tailopt.replay.http import HttpEngines
from tailopt.replay.profile import Cell, design, profile
from tailopt.replay.profile_engine import EngineBench
from tailopt.replay.vllm import PYTHON, VllmEngines, tiny_profile

if TYPE_CHECKING:
    from fake_server import FakeServer

FAKE = Path(__file__).with_name("fake_worker.py")
SHAPE = ShapeProfile(1, Affine(1e-2, 1e-3), 1e3, kv_capacity_tokens=8192, max_running=32, token_budget=512)


class Simulated:
    """An engine that takes steps of known length, with noise and a drift, in no time."""

    def __init__(self, tau: StepTime, rate: float, seed: int) -> None:
        self.tau, self.rate, self.rng = tau, rate, np.random.default_rng(seed)
        self.visits: list[list[tuple[int, int]]] = []

    def measure(self, requests: Sequence[tuple[int, int]]) -> Steps:
        self.visits.append(list(requests))
        drift = 1 + 0.1 * np.sin(len(self.visits) / 20)
        left = [[prompt, 0, want] for prompt, want in requests]  # to prefill, gained, wanted
        rows = []
        while left:
            budget, n, kv, prefill = SHAPE.token_budget, 0, 0, 0
            for one, (prompt, _) in zip(left, requests, strict=False):
                if one[0] == 0:
                    budget, n, kv = budget - 1, n + 1, kv + prompt + one[1] + 1
                    one[1] += 1
                elif budget:
                    chunk = min(one[0], budget)
                    budget, prefill, one[0] = budget - chunk, prefill + chunk, one[0] - chunk
                    if one[0] == 0:
                        n, kv, prefill, one[1] = n + 1, kv + prompt + 1, prefill - 1, 1
            s = float(self.tau(n, kv)) + prefill / self.rate + (0 if n else 2e-3)
            rows.append((n, kv, prefill, s * drift * float(self.rng.lognormal(0, 0.02))))
            left = [one for one in left if one[1] < one[2]]
        return Steps.of(*(np.array(column) for column in zip(*rows, strict=True)))

    def resubmit(self, context: int) -> float:
        return context / self.rate + 0.02

    def switch(self) -> tuple[float, float]:
        return 1.5, 3.5


@settings(max_examples=4)
@given(
    tau=st.builds(Affine, st.floats(3e-3, 1e-2), st.floats(5e-5, 3e-4), st.floats(1e-7, 1e-6))
    | st.builds(Power, st.floats(3e-3, 1e-2), st.floats(5e-4, 1e-3), st.floats(0.4, 0.6), st.just(2e-7)),
    seed=st.integers(0, 99),
)
def test_finds_a_known_engine(tau: StepTime, seed: int) -> None:
    bench = Simulated(tau, 2e4, seed)
    found = profile(bench, SHAPE, 2000, seconds=1.0, seed=seed, bootstrap=20)
    for n in (1, 5, 16, 32):
        assert float(found.fit.step_time(n, n * 120)) == pytest.approx(float(tau(n, n * 120)), rel=0.06)
    assert found.fit.prefill_tokens_per_s == pytest.approx(2e4, rel=0.15)
    for interval in (*found.step_s.values(), found.prefill_tokens_per_s):
        assert interval.low <= interval.high
        assert interval.low <= 1.02 * interval.value
        assert interval.high >= 0.98 * interval.value
    shape = found.shape(SHAPE)
    assert (shape.sleep_s, shape.wake_s) == (1.5, 3.5)
    assert shape.kv_capacity_tokens == SHAPE.kv_capacity_tokens
    assert all(measured > expected * 0.5 for _, measured, expected in found.resubmissions)


def test_every_round_visits_every_cell_in_an_order_of_its_own() -> None:
    bench = Simulated(Affine(3e-3, 1e-4, 1e-7), 2e4, 0)
    found = profile(bench, SHAPE, 2000, seconds=1.0, bootstrap=0)
    k = len(found.cells)
    visits = bench.visits[-k * found.rounds :]
    rounds = [visits[i * k : (i + 1) * k] for i in range(found.rounds)]
    assert found.rounds >= 2
    for one in rounds:
        assert sorted(one) == sorted(cell.requests for cell in found.cells)
    assert rounds[0] != rounds[1]
    assert found.visit.max() == len(visits) - 1
    assert len(found.visit) == len(found.steps)
    again = Simulated(Affine(3e-3, 1e-4, 1e-7), 2e4, 0)
    profile(again, SHAPE, 2000, seconds=1.0, bootstrap=0)
    assert again.visits[: k + 3] == bench.visits[: k + 3]


@given(
    most=st.integers(1, 300), cache=st.integers(100, 10**6), budget=st.integers(300, 9000),
    longest=st.integers(50, 10**5),
)  # fmt: skip
def test_cells_fit_into_the_engine(most: int, cache: int, budget: int, longest: int) -> None:
    shape = ShapeProfile(1, SHAPE.step_time, 1e3, cache, most, token_budget=budget)
    cells = design(shape, longest)
    assert len(set(cells)) == len(cells)
    for cell in cells:
        assert cell.running <= most
        assert cell.context >= 1
        assert cell.context + cell.steps + 1 <= longest
        assert cell.running * (cell.context + cell.steps + 1) <= cache or cell.running == 1
    assert {cell.running for cell in cells if cell.steps} >= {
        n for n in (1, 2, 4, most) if n <= most and cache * 0.95 // n > 18 and longest > 18
    }


def test_an_engine_without_room_is_refused() -> None:
    small = ShapeProfile(1, SHAPE.step_time, 1e3, 64, 1, token_budget=64)
    with pytest.raises(InputError, match="expected at least three numbers"):
        profile(Simulated(Affine(3e-3, 1e-4, 1e-7), 2e4, 0), small, 2000, seconds=1)


# ---- live engines ---------------------------------------------------------------------------------------


class Fakes(VllmEngines):
    """Workers that pretend."""

    name = "fake 1"

    def __init__(self, profile: EngineProfile, **faults: Any) -> None:
        super().__init__(profile, python=sys.executable)
        self.faults = faults

    def command(self, engine: Engine) -> list[str]:
        config = {"step_s": 2e-3, "request_s": 1e-4, **self.configuration(engine), **self.faults}
        return [sys.executable, str(FAKE), json.dumps(config)]


PROFILE = EngineProfile(
    "fake", "none", "none", "none", "fake", "1", "2026-01-31", ("none",), "CC0-1.0", 1, {1: SHAPE}
)


def fake(**options: Any) -> "FakeServer":
    pytest.importorskip("aiohttp", reason="servers need aiohttp")
    from fake_server import FakeServer

    return FakeServer(**options)


@pytest.fixture(params=["worker", "server"])
def bench(request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    if request.param == "worker":
        with Fakes(PROFILE) as engines, EngineBench(engines, Engine(1, gpus=(0,))) as found:
            yield found
    else:
        with (
            fake() as server,
            HttpEngines(PROFILE, [server.url]) as servers,
            EngineBench(servers, Engine(1, gpus=(0,))) as found,
        ):
            yield found


def test_a_live_engine_is_measured(bench: EngineBench) -> None:
    for cell in (Cell(1, 40, 6), Cell(4, 10, 6)):
        steps = bench.measure(cell.requests)
        n = cell.running
        full = steps.running == n
        assert full.sum() >= 3
        context = steps.kv_tokens[full] / n
        assert cell.context < context.min() <= context.max() <= cell.context + 7
        assert steps.other_tokens.sum() == n * (cell.context - 1)
        assert steps.seconds[full].mean() > 1e-3
    assert 0 < bench.resubmit(50) < 5
    away, back = bench.switch()
    assert away >= 0
    assert back >= 0
    again = bench.measure([(8, 3)])  # it is there; over HTTP two steps may come as one
    assert len(again) >= 2


def test_a_bench_that_dies_or_refuses_is_an_error() -> None:
    with (
        Fakes(PROFILE) as engines,
        pytest.raises(ReplayError, match="rejects a request"),
        EngineBench(engines, Engine(1, gpus=(0,))) as bench,
    ):
        bench.measure([(10**5, 3)])
    with (
        fake(fault=lambda body: "hang") as server,
        HttpEngines(PROFILE, [server.url], silence_s=0.3, retries=0) as servers,
        pytest.raises(ReplayError, match=r"died \(has said nothing"),
        EngineBench(servers, Engine(1, gpus=(0,))) as bench,
    ):
        bench.measure([(8, 3)])


def test_steps_are_written_and_read_back(tmp_path: Path) -> None:
    parts = [Simulated(Affine(3e-3, 1e-4, 1e-7), 2e4, 0).measure([(600, 5), (9, 9)]) for _ in range(2)]
    write_steps(parts, tmp_path / "steps.csv")
    back = read_measured([tmp_path / "steps.csv"]).steps[None]
    for name in Steps.__dataclass_fields__:
        expected = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(getattr(back, name), expected), name


def command(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        app(["profile", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_the_command_measures_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, steps = tmp_path / "mine.toml", tmp_path / "steps.csv"
    with fake(step_s=0.004, token_s=2e-5, max_running=64) as server:
        code = command("--out", out, "--steps", steps, "--server", server.url, "--seconds", "4", "--quiet")
        output = capsys.readouterr()
        assert code == 0, output.err
        assert not server.paused
    found = read_profile(out)
    assert found.engine == "vLLM"
    assert found.name == "mine"
    assert "rounds of" in found.shape(1).fit
    assert "held out" in output.out
    assert len(read_measured([steps]).steps[None]) > 100
    assert command("--out", out, "--server", "127.0.0.1:1") == 2
    assert "exists" in capsys.readouterr().err
    assert command("--out", tmp_path / "x.toml", "--server", "http://192.0.2.1") == 2
    assert "not on this machine" in capsys.readouterr().err
    assert not (tmp_path / "x.toml").exists()
    assert command("--out", tmp_path / "x.toml", "--seconds", "0") == 2


@pytest.mark.skipif(PYTHON not in os.environ, reason=f"needs vLLM: {PYTHON} must name a Python that has it")
def test_a_real_engine(tmp_path: Path) -> None:
    """Function, not speed: whoever else is on the machine is in the numbers."""
    like = tiny_profile(1)
    with VllmEngines(like) as engines, EngineBench(engines, Engine(1, gpus=(0,))) as bench:
        found = profile(bench, like.shape(1), 1024, seconds=10, bootstrap=20, switch=False)
    assert found.rounds >= 2
    tau = found.fit.step_time
    assert 1e-4 < float(tau(1, 100)) < 1
    assert float(tau(64, 6400)) >= float(tau(1, 100))
    assert found.fit.prefill_tokens_per_s > 10
