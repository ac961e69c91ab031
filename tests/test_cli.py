"""The command line: output for people, for other programs, and one line for whatever is wrong."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tailopt import __version__
from tailopt.cli import app
from tailopt.cli.compare import BESIDES
from tailopt.engine.catalogue import bundled_engines
from tailopt.policies import POLICIES
from tailopt.predict import PREDICTORS
from tailopt.trace.catalogue import bundled_traces

SMALL = ("--batches", "2", "--prompts", "8", "--samples", "4", "--quiet")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            app(list(arguments))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def tailopt(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-c", "from tailopt.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]


@pytest.fixture
def csv_trace(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str, name: str = "trace.csv") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def rollouts(csv_trace: Callable[[str], str]) -> str:
    rows = [f"q{p},{s},{40},{(37 * p + 11 * s) % 90 + 10}" for p in range(10) for s in range(4)]
    return csv_trace("prompt_id,sample,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")


# Output


def test_default_table_fits_80_columns_and_says_what_it_rests_on(cli):
    code, out, err = cli("compare", "--batches", "2", "--quiet")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\x1b" not in out
    for policy in POLICIES:
        assert (re.search(rf"^{policy} ", out, re.MULTILINE) is not None) == (policy not in BESIDES)
    for said in (
        "gpqa-deepseek-reasoner", "P50 4,714", "P90 18,307", "max 40,634", "no cap known",
        "between-prompt share", "CC BY 4.0", "τ(n, K) = ", "h100-llama-3.1-8b", "gap between its bounds",
        "optimal", "seed 0", __version__, "prefill", "aiconfigurator",
    ):  # fmt: skip
        assert said in out, said
    assert "SYNTHETIC" not in out


def test_table_rows_are_the_summary_by_makespan(cli):
    options = ("compare", "--policy", "lpt", "--predictor", "truth", *SMALL)
    _, out, _ = cli(*options)
    summary = json.loads(cli(*options, "--json")[1])["summary"]
    shown = re.findall(r"^(\S+) +(\S+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", out, re.MULTILINE)
    assert shown == [
        (
            line["policy"],
            line["predictor"],
            f"{line['makespan_s']:.1f}",
            f"{line['over_static']:.3f}",
            f"{line['over_any']:.3f}",
            f"{line['speedup']:.3f}",
        )
        for line in sorted(summary, key=lambda line: line["makespan_s"])
    ]


def test_json_and_csv_agree_and_repeat(cli):
    options = ("compare", "--policy", "lpt", "--policy", "best_k", *SMALL)
    _, text, err = cli(*options, "--json")
    assert err == ""
    document = json.loads(text)
    _, table, _ = cli(*options, "--csv")
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [float(row["makespan_s"]) for row in rows] == [row["makespan_s"] for row in document["rows"]]
    assert len(rows) == 2 * 5  # batches × (uniform, two policies × two predictors)
    assert cli(*options, "--json")[1] == text
    assert cli(*options, "--json", "--seed", "1")[1] != text


def test_a_file_of_ones_own(cli, rollouts):
    drawn = ("--prompts", "6", "--samples", "2", "--batches", "3", "--groups", "free")
    shape = ("--shape", "2xTP2+1xTP4")
    code, out, _ = cli("compare", "--trace", rollouts, "--predictor", "prompt_mean", *drawn, *shape)
    assert code == 0
    assert "2xTP2+1xTP4 on 8 GPUs" in out
    assert "40 responses from 1 file of format csv" in out
    assert "TP2: τ(n, K)" in out
    assert "TP4: τ(n, K)" in out
    assert "samples go anywhere" in out


def test_synthetic_traces_are_marked_everywhere(cli, csv_trace):
    path = csv_trace("# synthetic: true\nprompt_id,sample,output_tokens\na,0,5\na,1,6\nb,0,7\nb,1,9\n")
    options = ("compare", "--trace", path, "--batches", "1", "--prompts", "2", "--samples", "2")
    out = cli(*options)[1]
    assert "(SYNTHETIC)" in out.splitlines()[0]
    assert "SYNTHETIC: drawn from a distribution, not observed" in out
    assert json.loads(cli(*options, "--json")[1])["trace"]["synthetic"] is True


def test_tail_reshapes(cli):
    plain, heavy = (
        json.loads(cli("compare", "--policy", "uniform", *SMALL, "--json", *tail)[1])["trace"]["statistics"]
        for tail in ((), ("--tail", "6"))
    )
    assert heavy["p50"] == plain["p50"]
    assert heavy["p90_over_p50"] == pytest.approx(6, rel=0.01)


def test_cap_flags_and_is_said(cli):
    out = cli("compare", "--cap", "20000", "--policy", "uniform", *SMALL)[1]
    assert not re.search(r"\b0\.0% at the cap", out)
    assert "max ≥ 40,634" in out


def test_skipped_rows_are_reported(cli, csv_trace):
    rows = "\n".join(f"q{p},{s},{p + s + 1}" for p in range(4) for s in range(2))
    path = csv_trace(f"prompt_id,sample,output_tokens\n{rows}\nq9,0,-3\n")
    options = ("compare", "--trace", path, "--prompts", "4", "--samples", "2", "--batches", "1")
    code, out, _ = cli(*options, "--skip-bad")
    assert code == 0
    assert "without 1 bad" in out
    assert "first bad row" in out
    assert cli(*options)[0] == 2


def test_own_policy_may_print_and_stdout_stays_clean(cli, tmp_path):
    (tmp_path / "own.py").write_text(
        "from tailopt.plan import Plan\n"
        "def mine(view):\n"
        "    print('thinking')\n"
        "    return Plan(view.fleet.engines, [0] * view.n_requests, range(view.n_requests), atomic=True)\n"
    )
    code, out, err = cli("compare", "--policy", f"{tmp_path / 'own.py'}:mine", *SMALL, "--json")
    assert code == 0
    assert json.loads(out)["summary"][1]["policy"].endswith("own.py:mine")
    assert "thinking" in err


def test_lists(cli):
    out = cli("traces")[1]
    assert all(trace.name in out for trace in bundled_traces())
    assert "Source" in out
    assert "CC BY 4.0" in out
    out = cli("engines")[1]
    assert all(name in out for name in bundled_engines())
    assert out.count("τ(n, K) = ") >= len(bundled_engines())
    out = cli("policies")[1]
    for name in (*POLICIES, *PREDICTORS):
        assert re.search(rf"^{name} ", out, re.MULTILINE)
    assert out.count("Source: ") == len(POLICIES) + len(PREDICTORS)
    assert "Options: k=None, tail_engines=1" in out


@pytest.mark.parametrize("command", ["traces", "engines", "policies"])
def test_lists_fit_80_columns(cli, command):
    code, out, err = cli(command)
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\x1b" not in out


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_convert_round_trip(cli, rollouts, tmp_path, suffix):
    out = tmp_path / f"converted.{suffix}"
    code, printed, said = cli("convert", rollouts, str(out))
    assert (code, printed) == (0, "")
    assert "40 responses to 10 prompts" in said
    options = ("--prompts", "6", "--samples", "2", "--batches", "1", "--json")
    before, after = (
        json.loads(cli("compare", "--trace", str(path), *options)[1]) for path in (rollouts, out)
    )
    assert before["trace"]["sha256"] == after["trace"]["sha256"]
    assert before["rows"] == after["rows"]


def test_version_and_help(cli):
    assert cli("--version") == (0, f"tailopt {__version__}\n", "")
    code, out, _ = cli("--help")
    assert code == 0
    assert all(command in out for command in ("compare", "traces", "engines", "policies", "convert"))
    assert "--predictor" in cli("compare", "--help")[1]
    assert "compare" in "".join(cli()[1:])  # no command: help


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from tailopt.cli import app\n"
        "try:\n    app(['compare', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'polars', 'numba', 'scipy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# Bad input: exit code 2, one line on stderr that names the thing, nothing on stdout

BAD_LENGTHS = {
    "-5": "-5",
    "0": "0",
    "NaN": "NaN",
    "2.5": "2.5",
    "many": "many",
    "99999999999999999999": "99999999999999999999",
}


def is_one_line(result: tuple[int, str, str], *named: str) -> None:
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.startswith("tailopt: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    for name in named:
        assert name in err, err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policy", "lptt"], ["policy 'lptt'", "lpt", "uniform"]),
        (["--policy", "top_k(kk=3)"], ["top_k(kk=3)", "'kk'"]),
        (["--policy", "top_k(k=-3)"], ["top_k(k=-3)", "at least 0"]),
        (["--policy", "no/such.py:f"], ["no/such.py", "does not exist"]),
        (["--predictor", "oracle"], ["predictor 'oracle'", "truth"]),
        (["--predictor", "noisy_truth(sigma=-1)"], ["noisy_truth(sigma=-1)", "sigma"]),
        (["--engine", "h100-llama"], ["engine 'h100-llama'", "h100-llama-3.1-8b"]),
        (["--engine", "no/such.toml"], ["no/such.toml"]),
        (["--trace", "gpqa-deepseek"], ["gpqa-deepseek", "gpqa-deepseek-reasoner"]),
        (["--trace", "no/such.csv"], ["no/such.csv", "no such file"]),
        (["--format", "csv"], ["--format csv", "bundled"]),
        (["--gpus", "0"], ["--gpus", "at least 1", "0"]),
        (["--gpus", "4", "--shape", "8xTP1"], ["8 engines need 8 GPUs, there are 4"]),
        (["--shape", "8TP1"], ["shape '8TP1'", "8xTP1"]),
        (["--shape", "2xTP3"], ["TP3", "TP1, TP2, TP4, TP8"]),
        (["--engine", "h100-qwen3-32b-vllm", "--gpus", "1"], ["qwen3-32b", "at least 2 GPUs", "got 1"]),
        (["--batches", "0"], ["batches", "at least 1", "0"]),
        (["--prompts", "1000"], ["192 groups", "1000"]),
        (["--samples", "9"], ["9 samples"]),
        (["--seed", "-1"], ["seed", "at least 0", "-1"]),
        (["--predictor", "prompt_mean"], ["prompt_mean", "--samples 4"]),
        (["--json", "--csv"], ["--json and --csv"]),
        (["--tail", "0.5"], ["0.5"]),
        (["--tail", "nan"], ["nan"]),
        (["--cap", "0"], ["cap", "at least 1", "0"]),
        (["--tokenizer", "nothing"], ["tokenizer 'nothing'"]),
    ],
)  # fmt: skip
def test_bad_options(cli, options, named):
    is_one_line(cli("compare", "--batches", "1", *options), *named)


@pytest.mark.parametrize("length", BAD_LENGTHS)
def test_bad_lengths(cli, csv_trace, length):
    path = csv_trace(f"prompt_id,sample,output_tokens\na,0,5\na,1,{length}\n")
    is_one_line(cli("compare", "--trace", path), path, "output_tokens", BAD_LENGTHS[length])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["empty"]),
        ("prompt_id,sample,output_tokens\n", ["no responses"]),
        ("colour,size\nred,3\n", ["unknown format", "known:", "parquet"]),
        ("prompt_id,sample,output_tokens\na,0,5\na,0,6\n", ["'a'", "twice"]),
    ],
)
def test_bad_files(cli, csv_trace, text, named):
    path = csv_trace(text)
    is_one_line(cli("compare", "--trace", path), *named)
    is_one_line(cli("convert", path, str(Path(path).with_suffix(".parquet"))), *named)
    assert not Path(path).with_suffix(".parquet").exists()


def test_unknown_format(cli, rollouts):
    is_one_line(cli("compare", "--trace", rollouts, "--format", "xlsx"), "'xlsx'", "known:", "parquet")


def test_a_group_split_over_files(cli, csv_trace):
    first = csv_trace("prompt_id,sample,output_tokens\na,0,5\nb,0,5\n", "first.csv")
    second = csv_trace("prompt_id,sample,output_tokens\na,1,5\nc,0,5\n", "second.csv")
    is_one_line(cli("compare", "--trace", first, "--trace", second), "'a'", "first.csv", "second.csv")


def test_convert_to_an_unknown_format(cli, rollouts, tmp_path):
    is_one_line(cli("convert", rollouts, str(tmp_path / "out.xlsx")), "out.xlsx", ".parquet", ".csv")
    is_one_line(cli("convert", rollouts, str(tmp_path / "no" / "out.csv")), "out.csv")


def test_an_engine_too_small_for_one_request(cli, tmp_path):
    (tmp_path / "small.toml").write_text(
        'name = "small"\nhardware = "x"\nmodel = "x"\nprecision = "x"\nengine = "x"\nengine_version = "1"\n'
        'date = "2026-01-01"\nlicence = "x"\nsources = ["x"]\nkv_bytes_per_token = 1\n'
        "[[shape]]\ntp = 1\nprefill_tokens_per_s = 1000\nkv_capacity_tokens = 2000\nmax_running = 8\n"
        'fit = "x"\nstep_time = { kind = "affine", a_s = 0.01, b_s = 0.001, c_s = 0.0 }\n'
    )
    is_one_line(cli("compare", "--engine", str(tmp_path / "small.toml")), "KV cache", "2000", "request")


def test_a_broken_engine_file(cli, tmp_path):
    (tmp_path / "broken.toml").write_text("name = 3\n")
    is_one_line(cli("compare", "--engine", str(tmp_path / "broken.toml")), "broken.toml", "name")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return 1 / 0", ["ZeroDivisionError: division by zero", "(line 3)"]),
        ("return None", ["returned NoneType", "expected a tailopt.plan.Plan"]),
        ("return np.zeros((3, 2))", ["ndarray of shape (3, 2)"]),
        ("return Plan(view.fleet.engines, [0], [0])", ["has 1 requests, expected 256"]),
        ("return Plan(view.fleet.engines, np.zeros((2, 2)), [0])", ["engine_of", "shape (2, 2)"]),
        (
            "return Plan.of_queues(view.fleet.engines, [range(view.n_requests), [7]] + [[]] * 6)",
            ["request 7 is assigned twice, expected once"],
        ),
        (
            "return Plan(view.fleet.engines, np.arange(view.n_requests) % 8, range(view.n_requests))",
            ["is spread over engines"],
        ),
    ],
)
def test_a_policy_of_ones_own_that_goes_wrong(cli, tmp_path, body, named):
    path = tmp_path / "own.py"
    path.write_text(f"from tailopt.plan import Plan; import numpy as np\ndef mine(view):\n    {body}\n")
    is_one_line(cli("compare", "--policy", f"{path}:mine"), f"{path}:mine", *named)
    is_one_line(cli("compare", "--policy", f"{path}:other"), f"{path}:other", "no function 'other'")


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--no-such"],
        ["no-such"],
        ["compare", "--groups", "both"],
        ["compare", "--batches", "x"],
        ["convert"],
    ],
)
def test_usage_errors_exit_with_2(cli, arguments):
    code, _, err = cli(*arguments)
    assert code == 2
    assert "Traceback" not in err
    assert "Usage" in err


# Signals, pipes and terminals, in a process of its own


def test_ctrl_c_is_quiet(tmp_path):
    (tmp_path / "own.py").write_text(
        "import os, signal\ndef mine(view):\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = tailopt("compare", "--policy", f"{tmp_path / 'own.py'}:mine", *SMALL)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", [("policies",), ("compare", *SMALL, "--csv")])
def test_a_closed_pipe_is_quiet(arguments):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", "from tailopt.cli import main; main()", *arguments]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("quiet", "shown"), [([], True), (["--quiet"], False), (["--csv"], False)])
def test_the_progress_bar_is_for_terminals_and_on_stderr(quiet, shown):
    import pty

    terminal, child = pty.openpty()
    options = ("--batches", "2", "--prompts", "8", "--samples", "4", "--policy", "round_robin")
    command = [sys.executable, "-c", "from tailopt.cli import main; main()", "compare", *options, *quiet]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=child, text=True, timeout=120, env=environment
    )
    os.write(child, b"END")
    os.close(child)
    seen = b""
    while not seen.endswith(b"END"):
        seen += os.read(terminal, 65536)
    os.close(terminal)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert (b"batches" in seen) == shown
