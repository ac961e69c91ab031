"""Standard output that is full, closed or of another encoding, and wrong commands: one line each."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tailopt.cli import main
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.problem import Problem

TAILOPT = [sys.executable, "-m", "tailopt"]
QUICK = ["compare", "--batches", "1", "--prompts", "8", "--samples", "2", "--policy", "uniform", "--quiet"]
PRINTING = [
    ["--help"],
    ["compare", "--help"],
    ["--version"],
    ["traces"],
    ["engines"],
    ["policies"],
    [*QUICK, "--csv"],
]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command is refused with."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("tailopt: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert len(err) < 600
    assert err[:-1].isprintable()
    return err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", PRINTING)
def test_a_full_standard_output(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*TAILOPT, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (2, "tailopt: standard output: No space left on device\n")


@pytest.mark.parametrize("arguments", PRINTING)
def test_a_closed_standard_output(arguments: list[str]) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *TAILOPT, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    expected = "tailopt: standard output: closed, expected it to be open\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.parametrize("arguments", [["engines"], QUICK])
def test_an_encoding_that_lacks_characters(arguments: list[str]) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*TAILOPT, *arguments], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?(n, K) = " in done.stdout


@pytest.mark.parametrize("wait_s", [0.05, 0.2, 0.5])
def test_ctrl_c_while_starting_is_quiet(wait_s: float) -> None:
    process = subprocess.Popen(
        [*TAILOPT, *QUICK, "--batches", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(wait_s)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if process.returncode != -signal.SIGINT:  # Python itself was not up yet
        assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["compare", "--no-such"], ["--no-such", "tailopt compare --help"]),
        (["no-such"], ["no-such", "tailopt --help"]),
        (["compare", "--groups", "both"], ["--groups", "both", "atomic", "free"]),
        (["compare", "--batches", "x"], ["--batches", "integer"]),
        (["convert"], ["IN"]),
        (["compare", "--trace", "x" * 5000 + ".csv"], ["no such file"]),
        (["compare", "--trace", "\x1b[31m\n.csv"], ["\ufffd[31m", "no such file"]),
        (["compare", "--engine", "x" * 5000 + ".toml"], ["too long"]),
        (["compare", "--policy", "x" * 5000 + ".py:f"], ["does not exist"]),
        (["compare", "--policy", "x" * 100_000], ["expected NAME"]),
        (["compare", "--policy", f"top_k(k={'-' * 9_000}1)"], ["plain values"]),
        (["compare", "--policy", f"top_k(k={'(' * 4_000}1{')' * 4_000})"], ["plain values"]),
        (["compare", "--policy", "top_k(k=\0)"], ["plain values"]),
    ],
)  # fmt: skip
def test_wrong_commands_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: list[str]
) -> None:
    line = refused(capsys, *arguments)
    assert all(name in line for name in named), line


def test_ctrl_c_ends_though_a_solver_keeps_its_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tailopt import compare

    solve, calls = compare.solve, []

    def interrupted(problem: Problem) -> Certificate:
        calls.append(problem)
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return solve(problem)

    monkeypatch.setattr(compare, "solve", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        main([*QUICK, "--batches", "3"])
    assert (ended.value.code, len(calls), signal.getsignal(signal.SIGINT)) == (130, 1, before)
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_waits_for_the_compiler_but_not_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KeyboardInterrupt while numba compiles leaves half a function, and another error."""
    from numba.core.compiler_lock import global_compiler_lock

    from tailopt import compare

    solve, done = compare.solve, []

    def interrupted(times: int) -> Callable[[Problem], Certificate]:
        def interrupt(problem: Problem) -> Certificate:
            try:
                with global_compiler_lock:
                    for _ in range(times):
                        os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.3)
                    done.append(times)
            except KeyboardInterrupt:
                raise RuntimeError("no compiled object yet") from None
            return solve(problem)

        return interrupt

    for times in (1, 2):
        monkeypatch.setattr(compare, "solve", interrupted(times))
        with pytest.raises(SystemExit) as ended:
            main([*QUICK, "--batches", "3"])
        assert ended.value.code == 130
    assert done == [1]
    assert capsys.readouterr() == ("", "")
