"""slime debug rollouts: a ``torch.save`` file per rollout, read safely (:mod:`tailopt.trace.torch_file`).

THUDM/slime, ``--save-debug-rollout-data``: ``{"rollout_id": ..., "samples": [...]}``, where a sample has
``group_index``, ``tokens`` (of prompt and response), ``response_length``, ``status`` and ``reward``. The
rollout id is the step, the group index the prompt (where there is none, equal prompt texts are one prompt).
``truncated`` is a capped response. Samples that are aborted, failed or pending are no responses, are left
out, and are counted. A reward of exactly 1 is correct, 0 is wrong, any other unknown.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tailopt.errors import InputError
from tailopt.trace.format import Format, Tokenizer
from tailopt.trace.rows import LEFT_OUT, ROW, Rows, as_text, correctness
from tailopt.trace.torch_file import Items, Made, load

_NO_RESPONSE = ("aborted", "failed", "pending")
_LABELS = {"output_tokens": "response_length", "prompt_id": "group_index", "step": "rollout_id"}

Sample = dict[str, Any]


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    import polars as pl

    rollout = load(path)
    samples = rollout.get("samples") if isinstance(rollout, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise InputError(f"{path}: no list of samples, expected a slime debug rollout")
    status = [sample.get("status") for sample in samples]
    table = pl.DataFrame(
        [
            as_text(map(_prompt_id, samples), "prompt_id"),
            as_text(map(_prompt_tokens, samples), "prompt_tokens"),
            as_text((_plain(sample.get("response_length")) for sample in samples), "output_tokens"),
            as_text((_plain(rollout.get("rollout_id")) for _ in samples), "step"),
            as_text((state == "truncated" for state in status), "capped"),
            as_text((_plain(sample.get("reward")) for sample in samples), "correct"),
            as_text((f"{s} samples" if s in _NO_RESPONSE else None for s in status), LEFT_OUT),
        ]
    )
    rows = pl.int_range(1, pl.len() + 1).alias(ROW)
    yield Rows(table.with_columns(rows, correctness(pl.col("correct")).alias("correct")), _LABELS)


def _prompt_id(sample: Sample) -> str | None:
    group, prompt = _plain(sample.get("group_index")), sample.get("prompt")
    if group is not None:
        return str(group)
    messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
    texts = [message.get("content") for message in messages if isinstance(message, dict)]
    text = "\0".join(text for text in texts if isinstance(text, str))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16] if text else None


def _prompt_tokens(sample: Sample) -> int:
    """All tokens less those of the response; 0 (unknown) where the tokens are not there."""
    tokens, response = _length(sample.get("tokens")), sample.get("response_length")
    return max(0, tokens - response) if tokens is not None and isinstance(response, int) else 0


def _length(value: object) -> int | None:
    """Length of a list, a tensor or an array of the file."""
    if isinstance(value, Items):
        return value.length
    if isinstance(value, Made) and value.name.name.startswith("_rebuild_tensor"):
        shape = value.arguments[2:3] if isinstance(value.arguments, tuple) else ()
    elif isinstance(value, Made) and value.name.name == "_reconstruct":
        shape = value.state[1:2] if isinstance(value.state, tuple) else ()
    else:
        return None
    sizes = shape[0] if shape else None
    if not isinstance(sizes, tuple) or len(sizes) != 1:
        return None
    return sizes[0] if type(sizes[0]) is int and sizes[0] >= 0 else None


def _plain(value: object) -> object:
    """The value if it is a plain one, else what it is called: rewards can be anything."""
    return value if value is None or isinstance(value, str | int | float) else type(value).__name__


def _detect(start: bytes) -> bool:
    return start.startswith(b"PK\x03\x04")


SLIME = Format("slime", "slime debug rollout (pt)", _detect, _read, unit="sample", suffix=".pt")
