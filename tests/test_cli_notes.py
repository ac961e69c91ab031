"""What the command line says beside its numbers, what it will not overwrite, and what its help names."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from tailopt.cli import main
from tailopt.cli.options import FORMAT_NAMES
from tailopt.compare import Comparison, compare
from tailopt.engine.catalogue import load_engine
from tailopt.plan import Fleet
from tailopt.report.terminal import comparison_report
from tailopt.trace import Trace
from tailopt.trace.formats import FORMATS

Cli = Callable[..., tuple[int, str, str]]
SMALL = ("--batches", "1", "--prompts", "4", "--samples", "2", "--policy", "uniform", "--quiet")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command in this process: exit code, stdout with its lines joined, stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), " ".join(out.split()), err

    return run


@pytest.fixture
def rollouts(tmp_path: Path) -> str:
    rows = [f"q{p},{s},{100 * p + 10 * s + 10}" for p in range(6) for s in range(2)]
    (tmp_path / "own.csv").write_text("prompt_id,sample,output_tokens\n" + "\n".join(rows) + "\n")
    return str(tmp_path / "own.csv")


def test_convert_overwrites_only_if_told_to(cli: Cli, rollouts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("mine")
    assert cli("convert", rollouts, str(out)) == (
        2, "", f"tailopt: {out}: exists, expected a new file, or --force to overwrite it\n"
    )  # fmt: skip
    assert out.read_text() == "mine"
    assert cli("convert", "--force", rollouts, str(out))[0] == 0
    assert "q5" in out.read_text()


@pytest.mark.parametrize("link", [False, True])
def test_convert_never_overwrites_what_it_reads(cli: Cli, rollouts: str, tmp_path: Path, link: bool) -> None:
    code, _, err = cli("convert", "--force", str(tmp_path), rollouts)
    assert (code, err) == (2, f"tailopt: {rollouts}: is also read, expected another file to write\n")
    out = Path(rollouts)
    if link:
        out = tmp_path / "link.csv"
        out.symlink_to(rollouts)
    before = Path(rollouts).read_text()
    code, _, err = cli("convert", "--force", rollouts, str(out))
    assert (code, err) == (2, f"tailopt: {out}: is also read, expected another file to write\n")
    assert Path(rollouts).read_text() == before


def test_cap_and_truncate(cli: Cli, rollouts: str) -> None:
    trace = ("compare", "--trace", rollouts, *SMALL)
    assert "no cap known" in cli(*trace)[1]
    out = cli(*trace, "--cap", "400")[1]
    assert "--cap 400: 4 of the 4 responses flagged as censored are longer than the cap" in out
    assert "33.3% at the cap" in out
    assert "longer than the cap" not in cli(*trace, "--cap", "520")[1]
    assert "--cap 600: no response is that long" in cli(*trace, "--cap", "600")[1]
    out = cli(*trace, "--truncate", "400")[1]
    assert "33.3% at the cap" in out
    assert "max ≥ 400;" in out
    found = json.loads(cli(*trace, "--truncate", "400", "--json")[1])["trace"]
    assert found["statistics"]["max"] == 400
    assert "cut at 400 tokens" in found["source"]


def test_unused_gpus_are_said(cli: Cli, rollouts: str) -> None:
    trace = ("compare", "--trace", rollouts, *SMALL)
    assert "belong to no engine" not in cli(*trace, "--shape", "4xTP2")[1]
    assert "3 of the 11 GPUs belong to no engine" in cli(*trace, "--shape", "4xTP2", "--gpus", "11")[1]


def report(comparison: Comparison) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for part in comparison_report(comparison):
            console.print(part)
    return capture.get()


def test_open_gaps_shared_queues_and_preemptions_are_said() -> None:
    trace = Trace.of([[900, 800], [700, 100], [60, 50], [400, 30]], prompt_tokens=100)
    drawn = {"batches": 2, "prompts": 4, "samples": 2, "seed": 0, "atomic": True}
    fleet = Fleet.of(load_engine("h100-llama-3.1-8b"), "2xTP1")
    closed = compare(trace, fleet, ["shared_queue"], [], **drawn)  # type: ignore[arg-type]
    text = report(closed)
    assert "≤" not in text.split("Batches")[0]
    assert "shared_queue is no static plan" in text
    assert "Preempted" not in text
    plain = compare(trace, fleet, ["round_robin"], [], **drawn)  # type: ignore[arg-type]
    assert "no static plan" not in report(plain)
    opened = replace(
        closed,
        certificates=closed.certificates.with_columns(gap=pl.Series([0.0, 0.05])),
        rows=closed.rows.with_columns(
            preemptions=pl.when(pl.col("policy") == "uniform").then(3).otherwise(1)
        ),
    )
    text = report(opened)
    assert re.search(r"^uniform .* ≤\d", text, re.MULTILINE)
    assert "may take up to 5% more than its bound" in text
    assert re.search(r"Preempted up to 3.0 requests per batch .*uniform", " ".join(text.split()))


def test_speculation_and_free_switches_are_said(cli: Cli) -> None:
    options = ("--batches", "1", "--prompts", "4", "--samples", "2", "--quiet", "--groups", "free")
    deepseek = ("--engine", "h200-deepseek-r1-sglang", "--gpus", "16")
    specs = ("top_k(k=1)", "top_k(k=1,speculate='mtp')")
    policies = [word for spec in specs for word in ("--policy", spec)]
    code, out, err = cli("compare", *deepseek, *options, *policies, "--predictor", "truth")
    assert code == 0, err
    assert "engines of top_k(k=1,speculate='mtp') speculate. The bounds are those of the same fleet" in out
    assert out.count("speculate. The bounds") == 1
    assert "switching is free" not in out
    code, out, err = cli("compare", *options, "--policy", "dyn(n=4)")
    assert code == 0, err
    assert "switching is free in this profile: its sleep_s and wake_s are 0, so dyn(n=4) paid for" in out
    assert "The bounds are those of the same fleet" not in out


def test_a_switch_that_costs_is_not_called_free() -> None:
    profile = load_engine("h100-llama-3.1-8b")
    trace = Trace.of([[900, 800], [100, 200], [40, 30], [500, 300]], prompt_tokens=100)
    drawn = {"batches": 1, "prompts": 4, "samples": 2, "seed": 0}
    for wake_s, said in ((0.0, ("dyn(n=3)",)), (1.0, ())):
        shapes = {tp: replace(shape, wake_s=wake_s) for tp, shape in profile.shapes.items()}
        fleet = Fleet.of(replace(profile, shapes=shapes), "2xTP1")
        assert compare(trace, fleet, ["dyn(n=3)"], [], **drawn, atomic=False).switching_free == said


def test_draft_methods_are_listed(cli: Cli) -> None:
    out = cli("engines")[1]
    said = "85% of the tokens accepted, at most 1 a step; each takes 0.042 of a step; acceptance: 85 to 90 %"
    assert out.count(f"Drafts by mtp: {said}") == 1


def test_lists_say_groups_caps_and_limits(cli: Cli) -> None:
    out = cli("traces")[1]
    assert re.search(r"gpqa-deepseek-reasoner 1,578 198×8 4,714 18,307 40,634 - ", out)
    assert re.search(r"mgsm-th-r1-distill-1.5b 2,000 250×8 [\d,]+ [\d,]+ [\d,]+ 4\d% ", out)
    out = cli("engines")[1]
    assert "at most 256 requests at once, 448,312 tokens of KV cache" in out
    assert "Fit: soft L1 over 28 closed-loop runs" in out
    assert "ignores_predictions" in cli("policies")[1]


def test_too_few_groups_say_what_would_do(cli: Cli) -> None:
    for options, hint in (
        (("--prompts", "500"), "--prompts 192"),
        (("--samples", "9"), "--samples 8"),
        (("--prompts", "195"), "--prompts 192 or --samples 7"),
    ):
        assert cli("compare", "--batches", "1", *options)[2].rstrip().endswith(f"draw fewer: {hint}")


def test_help(cli: Cli) -> None:
    assert set(FORMAT_NAMES) == set(FORMATS)
    out = cli("compare", "--help")[1]
    assert "(gpqa" not in out
    assert "Example: tailopt compare" in out
    assert "uniform is always added" in out.replace(" │ │ ", " ")
    assert all(name in out for name in FORMATS)
    assert re.search(r"--json JSON to stdout", out)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--batches", "0"], "--batches: expected at least 1, got 0"),
        (["--batches", "9" * 20], f"--batches: expected at most 1000000, got {'9' * 20}"),
        (["--seed", "-1"], "--seed: expected at least 0, got -1"),
        (["--gpus", "9" * 12], f"--gpus: expected at most 99999, got {'9' * 12}"),
        (
            ["--gpus", "4", "--shape", "8xTP1"],
            "--shape 8xTP1 --gpus 4: fleet: 8 engines need 8 GPUs, there are 4",
        ),
        (["--cap", "9" * 30], f"--cap: expected at most 2147483647, got {'9' * 30}"),
        (["--truncate", "0"], "--truncate: expected at least 1, got 0"),
    ],
)  # fmt: skip
def test_options_are_named(cli: Cli, options: list[str], line: str) -> None:
    assert cli("compare", *options) == (2, "", f"tailopt: {line}\n")


@pytest.mark.parametrize("ratio", ["1e300", "1e17", "inf", "nan", "-1", "0.5"])
def test_tail_is_named_and_quiet(cli: Cli, ratio: str) -> None:
    code, out, err = cli("compare", "--tail", ratio)
    assert (code, out) == (2, "")
    assert err.startswith(f"tailopt: --tail {float(ratio):g}: ratio: ")
    assert err.count("\n") == 1
