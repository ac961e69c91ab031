"""``tailopt oracle``: the certificate, its files, what Ctrl-C leaves, and one line for whatever is wrong."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tailopt.cli import main
from tailopt.cli.options import METHOD_NAMES
from tailopt.cli.oracle import _topology
from tailopt.engine.catalogue import load_engine
from tailopt.errors import InputError
from tailopt.oracle.certificate import BoundArgument
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import METHODS, solve
from tailopt.plan import Fleet
from tailopt.plan_file import read_plan
from tailopt.report.figure import assignment_figure, write_figure
from tailopt.simulate import simulate
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import sample_batches

Cli = Callable[..., tuple[int, str, str]]
SMALL = ("--prompts", "8", "--samples", "4", "--quiet")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run ``tailopt oracle`` in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["oracle", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def small() -> Problem:
    """Three engines, eight requests."""
    trace = Trace.of([[900, 800], [700, 600], [500, 400], [300, 200]], prompt_tokens=10)
    return Problem(trace, Fleet.of(load_engine("h100-llama-3.1-8b"), "1xTP2+2xTP1"))


# The certificate


def test_given_shape_is_what_solve_says_of_the_batch_that_compare_draws(cli: Cli) -> None:
    code, out, err = cli("--shape", "2xTP1", "--batch", "3", "--seed", "5", "--json", *SMALL)
    assert (code, err) == (0, "")
    said = json.loads(out)
    trace = load_bundled("gpqa-deepseek-reasoner")
    batch = sample_batches(trace, batches=20, prompts=8, samples=4, seed=5)[3].trace
    problem = Problem(batch, Fleet.of(load_engine("h100-llama-3.1-8b"), "2xTP1"), atomic=True)
    certificate = solve(problem, seed=5)
    assert said["certificate"]["lower_s"] == certificate.lower_s
    assert said["certificate"]["upper_s"] == certificate.upper_s
    assert said["certificate"]["status"] == certificate.status
    assert said["fleet"] == {"shape": "2xTP1", "gpus": 2}
    assert cli("--shape", "2xTP1", "--batch", "3", "--seed", "5", "--json", *SMALL)[1] == out


def test_table_fits_80_columns_and_names_bound_and_engines(cli: Cli) -> None:
    code, out, err = cli("--shape", "8xTP1", "--groups", "free", "--check", *SMALL)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    joined = " ".join(out.split())
    for said in (
        "gpqa-deepseek-reasoner on 8xTP1 of h100-llama-3.1-8b", "Verified both ends", "samples go anywhere",
        "batch 0 of 8 prompts × 4 samples, seed 0", "bound by", "status", "seconds", "τ(n, K)",
    ):  # fmt: skip
        assert said in joined, said
    assert len(re.findall(r"^ +\d  TP1 ", out, re.MULTILINE)) == 8


def test_without_a_shape_all_are_compared(cli: Cli) -> None:
    code, out, _ = cli("--gpus", "4", "--check", *SMALL)
    assert code == 0
    joined = " ".join(out.split())
    assert "no shape is missing among 4" in joined
    for shape in ("1xTP4", "2xTP2", "1xTP2+2xTP1", "4xTP1"):
        assert re.search(rf"^{re.escape(shape)} ", out, re.MULTILINE), shape
    said = json.loads(cli("--gpus", "4", "--json", *SMALL)[1])
    assert [cut["state"] for cut in said["shapes"]].count("best") == 1
    assert said["certificate"]["lower_s"] == min(cut["lower_s"] for cut in said["shapes"])
    assert said["certificate"]["upper_s"] == min(
        cut["found_s"] for cut in said["shapes"] if cut["found_s"] is not None
    )


def test_topology_keeps_engines_within_groups(cli: Cli) -> None:
    said = json.loads(cli("--gpus", "4", "--topology", "2+2", "--json", *SMALL)[1])
    assert {cut["shape"] for cut in said["shapes"]} == {"2xTP2", "1xTP2+2xTP1", "4xTP1"}


def test_whole_trace_at_once(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    rows = [f"q{p},{s},40,{37 * p + 11 * s + 10},{p}" for p in range(5) for s in range(2)]
    file.write_text("prompt_id,sample,prompt_tokens,output_tokens,arrival_s\n" + "\n".join(rows) + "\n")
    code, out, _ = cli("--trace", str(file), "--whole", "--shape", "1xTP1", "--json")
    assert code == 0
    said = json.loads(out)
    assert said["batch"] == "all 10 requests"
    assert said["certificate"]["upper_s"] < 4  # nothing waits for the last arrival
    code, _, err = cli("--trace", str(file), "--shape", "1xTP1")
    assert code == 2
    assert "--whole" in err


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_method_answers(cli: Cli, method: str) -> None:
    if method in ("cpsat", "highs", "scip"):
        pytest.importorskip("ortools", reason="OR-tools is an extra")
    few = ("--prompts", "3", "--samples", "2", "--groups", "free", "--time-limit", "2", "--json")
    code, out, err = cli("--shape", "2xTP1", "--method", method, "--check", *few)
    assert (code, err) == (0, "")
    assert json.loads(out)["certificate"]["verified"].startswith("both ends")


def test_method_names_are_those_of_solve() -> None:
    assert set(METHOD_NAMES) == set(METHODS)


def test_every_bound_argument_is_documented() -> None:
    page = (Path(__file__).parent.parent / "docs" / "oracle.md").read_text(encoding="utf-8")
    for argument in get_args(BoundArgument):
        assert f"`{argument.__name__}`" in page, argument
    for method in METHODS:
        assert f"`{method}`" in page, method


# Files


def test_plan_file_attains_the_makespan(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    said = json.loads(cli("--gpus", "4", "--plan", str(file), "--json", *SMALL)[1])
    trace = load_bundled("gpqa-deepseek-reasoner")
    batch = sample_batches(trace, batches=1, prompts=8, samples=4, seed=0)[0].trace
    plan = read_plan(file)
    fleet = Fleet(load_engine("h100-llama-3.1-8b"), plan.engines, 4)
    assert simulate(batch, fleet, plan).makespan_s == said["certificate"]["upper_s"]


@pytest.mark.parametrize("ending", [".svg", ".png", ".PNG"])
def test_figure_is_the_same_every_time(small: Problem, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib", reason="figures are an extra")
    certificate = solve(small)
    for name in ("one", "two"):
        write_figure(certificate, small, tmp_path / (name + ending), title="eight requests")
    one, two = ((tmp_path / (name + ending)).read_bytes() for name in ("one", "two"))
    assert one == two
    if ending == ".svg":
        assert ElementTree.fromstring(one).tag.endswith("svg")
    else:
        assert one.startswith(b"\x89PNG")


def test_figure_shows_every_request_engine_and_bound(small: Problem) -> None:
    pytest.importorskip("matplotlib", reason="figures are an extra")
    certificate = solve(small)
    figure = assignment_figure(certificate, small)
    left, right = figure.axes
    ticks = [segment[0][0] for lines in left.collections for segment in lines.get_segments()]
    assert sorted(ticks) == sorted(small.trace.output_tokens.tolist())
    leaders = left.patches[0].get_data().values
    longest = [
        int(small.trace.output_tokens[certificate.plan.engine_of == e].max(initial=0)) for e in range(3)
    ]
    assert list(leaders) == sorted(longest, reverse=True)
    assert max(bar.get_width() for bar in right.patches) == certificate.upper_s
    assert [line.get_xdata()[0] for line in right.lines] == [certificate.upper_s, certificate.lower_s]
    assert "(s)" in right.get_xlabel()
    assert "tokens" in left.get_xlabel()


def test_an_engine_without_requests_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures are an extra")
    problem = Problem(Trace.of([[9]]), Fleet.of(load_engine("h100-llama-3.1-8b"), "3xTP1"))
    write_figure(solve(problem), problem, tmp_path / "one.svg")


def test_missing_matplotlib_is_a_hint_before_anything_is_computed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = cli("--figure", "plan.png")
    assert (code, out) == (2, "")
    assert err == "tailopt: figures need matplotlib: pip install 'tailopt[figures]'\n"


def test_nothing_is_written_over_what_is_read(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("prompt_id,output_tokens\na,3\n")
    code, _, err = cli("--trace", str(file), "--plan", str(file))
    assert code == 2
    assert "is also read" in err
    assert file.read_text() == "prompt_id,output_tokens\na,3\n"


# What is wrong


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shape", "8xTP1", "--topology", "4+4"), "--topology and --shape"),
        (("--method", "dp"), "--shape"),
        (("--shape", "8xTP1", "--method", "best"), "known: staircase"),
        (("--time-limit", "0"), "--time-limit"),
        (("--time-limit", "nan"), "--time-limit"),
        (("--time-limit", "soon"), "--time-limit"),
        (("--topology", "4+x"), "4+x"),
        (("--topology", "4+3"), "groups of 8 GPUs"),
        (("--topology", "8+0"), "groups of 8 GPUs"),
        (("--gpus", "0"), "--gpus"),
        (("--gpus", "200"), "ways to cut"),
        (("--gpus", "4", "--engine", "h200-deepseek-r1-sglang"), "smallest is TP8"),
        (("--batch", "-1"), "--batch"),
        (("--prompts", "0"), "--prompts"),
        (("--seed", "-1"), "--seed"),
        (("--figure", "plan.pdf"), "plan.pdf"),
        (("--figure", "nowhere/plan.png"), "no folder nowhere"),
        (("--plan", "nowhere/plan.json"), "no folder nowhere"),
        (("--plan", "x.png", "--figure", "x.png"), "two files"),
        (("--shape", "8xTP3"), "TP3"),
        (("--trace", "nothing-of-this-name"), "nothing-of-this-name"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    if "--figure" in arguments and "plan.pdf" not in arguments:
        pytest.importorskip("matplotlib", reason="figures are an extra")
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("tailopt: ")
    assert err.count("\n") == 1
    assert said in err


@given(st.text(alphabet="0123456789+ -x²", max_size=12))
def test_topology_is_sizes_or_one_line(text: str) -> None:
    parts = text.split("+")
    if all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        assume(max(map(len, parts)) <= 6)
        assert _topology(text) == [int(part) for part in parts]
    else:
        with pytest.raises(InputError, match="--topology"):
            _topology(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engine", "h100-gpt-oss-120b-vllm", "--gpus", "8"),
        ("--engine", "h100-gpt-oss-120b-vllm", "--shape", "2xTP4"),
    ],
)
def test_interrupt_shows_the_best_so_far(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tailopt", "oracle", *arguments, "--json"]
    for _ in range(2):  # the second time everything is compiled
        started = time.monotonic()
        subprocess.run([*command, "--time-limit", "0.1"], stdout=subprocess.DEVNULL, timeout=300, check=True)
        took_s = time.monotonic() - started
    plan = tmp_path / "plan.json"
    long = [*command, "--time-limit", "300", "--plan", str(plan)]
    process = subprocess.Popen(long, stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(2 * took_s + 1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    said = json.loads(out)
    assert said["stopped"]
    assert 0 < said["certificate"]["lower_s"] <= said["certificate"]["upper_s"]
    assert read_plan(plan).engines


# One switch


def test_a_switch_is_reported_checked_and_planned(cli: Cli, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    code, out, _ = cli(*SMALL, "--gpus", "4", "--switch", "--wake", "0.25", "--link", "100",
                       "--check", "--plan", str(plan))  # fmt: skip
    assert code == 0
    assert "At most one switch" in out
    assert "the switch carried out again" in " ".join(out.split())
    assert len(read_plan(plan).engine_of) == 32


def test_a_switch_as_json_agrees_with_the_plan(cli: Cli, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    code, out, _ = cli(*SMALL, "--gpus", "4", "--switch", "--sleep", "0", "--json", "--plan", str(plan))
    assert code == 0
    switch = json.loads(out)["switch"]
    assert switch["lower_s"] <= switch["upper_s"]
    assert switch["upper_s"] <= json.loads(out)["certificate"]["upper_s"]
    review = read_plan(plan).review
    assert [point.value for point in review] == [n for n in [switch["unfinished"]] if n is not None]
    assert (switch["second"] is None) == (switch["cost"] is None) == (switch["at_s"] is None)
    again = cli(*SMALL, "--gpus", "4", "--switch", "--sleep", "0", "--json")[1]
    assert again == out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--switch", "--shape", "4xTP1"), "--switch and --shape"),
        (("--wake", "1"), "--wake: expected --switch"),
        (("--switch", "--wake", "-1"), "--wake: expected a number from 0"),
        (("--switch", "--sleep", "nan"), "--sleep: expected a number from 0"),
        (("--switch", "--link", "0"), "--link: expected a number above 0"),
    ],
)
def test_a_switch_with_options_that_do_not_fit(cli: Cli, options: tuple[str, ...], said: str) -> None:
    code, _, err = cli(*SMALL, *options)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1
