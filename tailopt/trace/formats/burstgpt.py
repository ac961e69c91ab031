"""BurstGPT: one row per request to ChatGPT and GPT-4 on Azure, with its second, prompt and output tokens.

HPMLL/BurstGPT, ``BurstGPT_*.csv`` (CC BY 4.0; Wang et al., arXiv:2401.17644). A failed request is written
with 0 response tokens: it is no response, is left out, and is counted.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tailopt.trace.format import Format, Tokenizer, has_header
from tailopt.trace.rows import LEFT_OUT, Rows
from tailopt.trace.text_rows import csv_rows

_NAMES = {
    "Timestamp": "arrival_s",
    "Request tokens": "prompt_tokens",
    "Response tokens": "output_tokens",
}


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    import polars as pl

    failed = pl.when(pl.col("output_tokens") == "0").then(pl.lit("failed requests (0 response tokens)"))
    for rows in csv_rows(path, _NAMES):
        yield replace(rows, table=rows.table.with_columns(failed.alias(LEFT_OUT)))


BURSTGPT = Format("burstgpt", "BurstGPT (csv)", has_header(_NAMES), _read)
