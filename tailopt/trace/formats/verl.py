"""verl rollout dumps: one JSON line per response with its texts, one file per training step.

verl-project/verl, ``trainer.rollout_data_dir`` and ``validation_data_dir``: ``input``, ``output``, ``score``,
``step``. A dump without ``step`` takes it from its file name (``12.jsonl``).

The dump holds texts, no lengths, so a tokenizer must count them. What it counts is the text as decoded:
special tokens are missing from it, among them the end of sequence, so lengths may be a token or two short,
and an output that is empty counts as the one token it must have had. Equal inputs are one prompt. Which
responses the cap cut off the dump does not say: that takes ``cap``. A score of exactly 1 is correct, 0 is
wrong, any other unknown.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tailopt.errors import InputError
from tailopt.trace.format import Format, Tokenizer, has_fields
from tailopt.trace.rows import ROW, Rows, correctness
from tailopt.trace.text_rows import jsonl_rows

if TYPE_CHECKING:
    import polars as pl

_FIELDS = ("input", "output", "score", "step")
_LABELS = {"prompt_id": "input", "output_tokens": "output", "step": "step", "correct": "score"}


def _read(path: Path, tokenizer: Tokenizer | None) -> Iterator[Rows]:
    import polars as pl

    if tokenizer is None:
        raise InputError(f"{path}: a verl dump holds texts, no lengths; expected a tokenizer to count them")
    step = path.stem if path.stem.isdecimal() else None
    for texts, bad in jsonl_rows(path, dict.fromkeys(_FIELDS, pl.String)):
        table = _table(texts, tokenizer).with_columns(pl.col("step").fill_null(pl.lit(step, pl.String)))
        no_steps = step is None and table["step"].is_null().all()
        yield Rows(table.drop("step") if no_steps else table, _LABELS, tuple(bad))


def _table(texts: "pl.DataFrame", tokenizer: Tokenizer) -> "pl.DataFrame":
    import polars as pl

    seen = {text: (_digest(text), tokenizer(text)) for text in texts["input"].unique().drop_nulls()}
    prompts = [seen.get(text, (None, 0)) for text in texts["input"]]
    counts = [None if text is None else max(1, tokenizer(text)) for text in texts["output"]]
    return texts.select(
        ROW,
        pl.Series("prompt_id", [prompt_id for prompt_id, _ in prompts], dtype=pl.String),
        pl.Series("prompt_tokens", [tokens for _, tokens in prompts], dtype=pl.Int64),
        pl.Series("output_tokens", counts, dtype=pl.Int64),
        "step",
        correctness(pl.col("score")).alias("correct"),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


VERL = Format(
    "verl",
    "verl rollout dump (jsonl of texts)",
    has_fields(["input", "output", "score"]),
    _read,
    suffix=".jsonl",
)
