"""Reading a big JSON lines file takes memory for a few blocks and for the numbers, not for the file."""

import subprocess
import sys
from pathlib import Path

import pytest

LINES = 20_000
PAD = "x" * 10_000

READ = """
import resource, sys
from tailopt.trace.reading import read_trace
trace, _ = read_trace(sys.argv[1], tokenizer=len)
print(trace.n_requests, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""

# The field that pads the file is dropped at once (mooncake), or its text is needed and counted (verl).
LINE = {
    "mooncake": '{"timestamp": %d, "input_length": 5, "output_length": 7, "hash_ids": [], "pad": "'
    + PAD
    + '"}\n',
    "verl": '{"input": "prompt %d", "output": "' + PAD + '", "score": 1.0, "step": 1}\n',
}


def peak(path: Path) -> tuple[int, int]:
    """Rows read, and the most memory that a fresh process held while reading, in bytes."""
    result = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    rows, size = map(int, result.stdout.split())
    return rows, size


@pytest.mark.parametrize("format", LINE)
def test_memory_is_bounded(tmp_path: Path, format: str) -> None:
    small, big = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    small.write_text(LINE[format] % 0)
    with big.open("w") as file:
        file.writelines(LINE[format] % i for i in range(LINES))
    assert big.stat().st_size > 190 * 2**20
    _, base = peak(small)
    rows, size = peak(big)
    big.unlink()
    assert rows == LINES
    assert size - base < 190 * 2**20
