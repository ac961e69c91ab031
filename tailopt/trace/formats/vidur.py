"""Vidur request traces: arrival in seconds, prefill and decode tokens.

microsoft/vidur, ``trace_replay`` and the files under ``data/processed_traces`` (MIT; Agrawal et al., MLSys
2024). The files of lengths alone, without ``arrived_at``, are read too: everything arrives at time 0.
"""

from collections.abc import Iterator
from pathlib import Path

from tailopt.trace.format import Format, Tokenizer, has_header
from tailopt.trace.rows import Rows
from tailopt.trace.text_rows import csv_rows

_LENGTHS = {"num_prefill_tokens": "prompt_tokens", "num_decode_tokens": "output_tokens"}
_NAMES = {"arrived_at": "arrival_s", **_LENGTHS}


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    return csv_rows(path, _NAMES, optional=["arrived_at"])


VIDUR = Format("vidur", "Vidur request trace (csv)", has_header(_LENGTHS), _read)
