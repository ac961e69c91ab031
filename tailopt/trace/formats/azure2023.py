"""Azure LLM inference traces: one row per request with its time, prompt and output tokens.

Azure/AzurePublicDataset, ``AzureLLMInferenceTrace_*.csv`` (CC BY 4.0; Patel et al., Splitwise, ISCA 2024).
"""

from collections.abc import Iterator
from pathlib import Path

from tailopt.trace.format import Format, Tokenizer, has_header
from tailopt.trace.rows import Rows
from tailopt.trace.text_rows import csv_rows

_NAMES = {
    "TIMESTAMP": "arrival_utc",
    "ContextTokens": "prompt_tokens",
    "GeneratedTokens": "output_tokens",
}


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    return csv_rows(path, _NAMES)


AZURE2023 = Format("azure2023", "Azure LLM inference trace (csv)", has_header(_NAMES), _read)
