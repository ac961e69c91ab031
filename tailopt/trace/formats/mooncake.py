"""Mooncake traces: one JSON line per request with its millisecond, prompt and output tokens.

kvcache-ai/Mooncake, ``FAST25-release/traces/*.jsonl`` (Apache-2.0; Qin et al., FAST 2025). ``hash_ids``,
which name the 512-token blocks of the prompt for prefix caching, are dropped.
"""

from collections.abc import Iterator
from pathlib import Path

from tailopt.trace.format import Format, Tokenizer, has_fields
from tailopt.trace.rows import Rows
from tailopt.trace.text_rows import jsonl_rows

_NAMES = {"timestamp": "arrival_ms", "input_length": "prompt_tokens", "output_length": "output_tokens"}
_LABELS = {ours: theirs for theirs, ours in _NAMES.items()}


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    import polars as pl

    for table, bad in jsonl_rows(path, dict.fromkeys(_NAMES, pl.String)):
        yield Rows(table.rename(_NAMES), _LABELS, tuple(bad))


MOONCAKE = Format("mooncake", "Mooncake trace (jsonl)", has_fields(_NAMES), _read)
