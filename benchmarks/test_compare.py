"""The command line as a whole: starting it, and the main job with and without compiled code at hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

TAILOPT = [str(Path(sys.executable).with_name("tailopt"))]


def run(*arguments: str, cache: Path | None = None) -> None:
    environment = os.environ | ({"NUMBA_CACHE_DIR": str(cache)} if cache else {})
    subprocess.run([*TAILOPT, *arguments], check=True, capture_output=True, env=environment)


def test_help(benchmark: BenchmarkFixture) -> None:
    benchmark.pedantic(run, ("--help",), rounds=5, warmup_rounds=1)


def test_compare_compiled(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    run("compare", cache=tmp_path)
    benchmark.pedantic(run, ("compare",), {"cache": tmp_path}, rounds=3)


def test_compare_first_run(benchmark: BenchmarkFixture, tmp_path_factory: pytest.TempPathFactory) -> None:
    def empty_cache() -> tuple[tuple[str], dict[str, Path]]:
        return ("compare",), {"cache": tmp_path_factory.mktemp("numba")}

    benchmark.pedantic(run, setup=empty_cache, rounds=2)
