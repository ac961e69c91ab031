"""vLLM serving benchmarks: one JSON object per run, with a list entry per request.

``vllm bench serve --save-result --save-detailed`` (and ``--append-result``: several objects in a file):
``input_lens``, ``output_lens``, ``start_times`` and ``errors``. A request with an error, or with no output,
failed: it is no response, is left out, and is counted. The file is one JSON text and is held in memory
whole.
"""

import json
import re
from collections.abc import Iterator
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any

from tailopt.errors import InputError
from tailopt.trace.format import Format, Tokenizer
from tailopt.trace.rows import LEFT_OUT, ROW, Rows, as_text

_NAMES = {"input_lens": "prompt_tokens", "output_lens": "output_tokens", "start_times": "arrival_s"}
_LABELS = {ours: theirs for theirs, ours in _NAMES.items()}
_FAILED = "failed"
_VISIBLE = re.compile(r"\S")


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    import polars as pl

    done = 0
    runs = (_columns(path, run) for run in _objects(path))
    for _names, alike in groupby((columns for columns in runs if columns[_FAILED]), key=list):
        columns = reduce(_extended, alike)
        failed = pl.Series(columns.pop(_FAILED), dtype=pl.Boolean)
        table = pl.DataFrame([as_text(values, name) for name, values in columns.items()]).with_columns(
            pl.int_range(done + 1, done + len(failed) + 1).alias(ROW),
            pl.when(failed).then(pl.lit("failed requests")).alias(LEFT_OUT),
        )
        yield Rows(table, _LABELS)
        done += len(failed)


def _extended(columns: dict[str, list[Any]], more: dict[str, list[Any]]) -> dict[str, list[Any]]:
    for name, values in more.items():
        columns[name] += values
    return columns


def _columns(path: Path, run: Any) -> dict[str, list[Any]]:
    """The lists that are wanted, one entry a request, and which requests failed."""
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
    errors = run.get("errors") or [""] * n
    failed = [bool(error) or tokens == 0 for error, tokens in zip(errors, run["output_lens"], strict=True)]
    return {ours: run[theirs] for theirs, ours in _NAMES.items() if run.get(theirs)} | {_FAILED: failed}


def _objects(path: Path) -> Iterator[Any]:
    """The JSON values of a file, one after the other."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start}: expected text in UTF-8") from None
    decoder, at = json.JSONDecoder(), 0
    while start := _VISIBLE.search(text, at):
        try:
            value, at = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: broken JSON ({error})") from None
        yield value


def _detect(start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") and b'"input_lens"' in start


VLLM_BENCH = Format("vllm-bench", "vllm bench serve --save-detailed (json)", _detect, _read, unit="request")
