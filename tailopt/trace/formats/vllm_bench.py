"""vLLM serving benchmarks: one JSON object per run, with a list entry per request.

``vllm bench serve --save-result --save-detailed`` (and ``--append-result``: several objects in a file):
``input_lens``, ``output_lens``, ``start_times`` and ``errors``. A request with an error, or with no output,
failed: it is no response, is left out, and is counted. The file is one JSON text and is held in memory
whole.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tailopt.errors import InputError
from tailopt.trace.format import Format, Tokenizer
from tailopt.trace.rows import LEFT_OUT, ROW, Rows, as_text

_NAMES = {"input_lens": "prompt_tokens", "output_lens": "output_tokens", "start_times": "arrival_s"}
_LABELS = {ours: theirs for theirs, ours in _NAMES.items()}


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    import polars as pl

    done = 0
    for run in _objects(path):
        columns = _columns(path, run)
        n = len(columns["output_tokens"])
        errors = run.get("errors") or [""] * n
        failed = [
            bool(error) or tokens == 0 for error, tokens in zip(errors, columns["output_tokens"], strict=True)
        ]
        table = pl.DataFrame([as_text(values, name) for name, values in columns.items()]).with_columns(
            pl.int_range(done + 1, done + n + 1).alias(ROW),
            pl.when(pl.Series(failed, dtype=pl.Boolean)).then(pl.lit("failed requests")).alias(LEFT_OUT),
        )
        yield Rows(table, _LABELS)
        done += n


def _columns(path: Path, run: Any) -> dict[str, list[Any]]:
    """The lists that are wanted, one entry a request."""
    if not isinstance(run, dict):
        raise InputError(f"{path}: expected a JSON object per run, got {type(run).__name__}")
    for field in ("input_lens", "output_lens"):
        if not isinstance(run.get(field), list):
            raise InputError(f"{path}: no list {field!r}, expected a result saved with --save-detailed")
    n = len(run["output_lens"])
    for field in (*_NAMES, "errors"):
        found = run.get(field)
        if found and (not isinstance(found, list) or len(found) != n):
            raise InputError(f"{path}: {field}: expected a list of {n} like output_lens")
    return {ours: run[theirs] for theirs, ours in _NAMES.items() if run.get(theirs) or not n}


def _objects(path: Path) -> Iterator[Any]:
    """The JSON values of a file, one after the other."""
    try:
        text = path.read_text("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start}: expected text in UTF-8") from None
    decoder = json.JSONDecoder()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: broken JSON ({error})") from None
        yield value
        text = text[end:].lstrip()


def _detect(start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") and b'"input_lens"' in start


VLLM_BENCH = Format("vllm-bench", "vllm bench serve --save-detailed (json)", _detect, _read, unit="request")
