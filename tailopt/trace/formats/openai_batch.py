"""OpenAI batch results: one JSON line per request with its ``custom_id`` and the usage of its response.

What the OpenAI Batch API returns for chat completions and for responses, and what ``vllm run-batch`` writes.
The output tokens are the usage's, hidden reasoning included; a finish for want of room (``length``,
``max_output_tokens``) is a capped response. A failed request (an error, or a status other than 200) is no
response, is left out, and is counted. A response with several choices is bad: the usage is their sum.

**Groups.** The API knows none. A ``custom_id`` of the form ``PROMPT#3`` or ``PROMPT/3``, or one that ends
in ``-sample-3``, ``_sample_3``, ``-s3`` or ``_s3``, is sample 3 of that prompt. Every other one,
``request-3`` among them, is a prompt of its own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tailopt.trace.format import Format, Tokenizer, has_fields
from tailopt.trace.rows import LEFT_OUT, ROW, Bad, Rows
from tailopt.trace.text_rows import jsonl_rows

if TYPE_CHECKING:
    import polars as pl

_SAMPLE = r"^(?P<prompt>.+?)(?:[#/]|[-_]s(?:ample[-_]?)?)(?P<sample>[0-9]+)$"
_LABELS = {
    "prompt_id": "custom_id",
    "prompt_tokens": "response.body.usage.prompt_tokens",
    "output_tokens": "response.body.usage.completion_tokens",
}


def _read(path: Path, _: Tokenizer | None) -> Iterator[Rows]:
    import polars as pl

    usage = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
    body = pl.Struct(
        {
            "usage": pl.Struct(dict.fromkeys(usage, pl.String)),
            "choices": pl.List(pl.Struct({"finish_reason": pl.String})),
            "incomplete_details": pl.Struct({"reason": pl.String}),
        }
    )
    schema = {
        "custom_id": pl.String(),
        "error": pl.String(),
        "response": pl.Struct({"status_code": pl.String(), "body": body}),
    }
    for lines, bad in jsonl_rows(path, schema):
        table = _table(lines)
        several = table.filter((pl.col("choices") > 1) & pl.col(LEFT_OUT).is_null())
        bad += [
            Bad(row, "response.body.choices", f"{count} choices", "one, as the usage is the sum of them")
            for row, count in several.select(ROW, "choices").iter_rows()
        ]
        yield Rows(table.join(several, on=ROW, how="anti").drop("choices"), _LABELS, tuple(bad))


def _table(lines: "pl.DataFrame") -> "pl.DataFrame":
    import polars as pl

    response = pl.col("response").struct
    body = response.field("body").struct
    usage, choices = body.field("usage").struct, body.field("choices")
    reasons = pl.concat_list(
        choices.list.get(0, null_on_oob=True).struct.field("finish_reason"),
        body.field("incomplete_details").struct.field("reason"),
    )
    named = pl.col("custom_id").str.extract_groups(_SAMPLE).struct
    failed = pl.col("error").is_not_null() | (response.field("status_code").fill_null("none") != "200")
    return lines.select(
        ROW,
        named.field("prompt").fill_null(pl.col("custom_id")).alias("prompt_id"),
        named.field("sample").fill_null("0").alias("sample"),
        pl.coalesce(usage.field("prompt_tokens"), usage.field("input_tokens")).alias("prompt_tokens"),
        pl.coalesce(usage.field("completion_tokens"), usage.field("output_tokens")).alias("output_tokens"),
        reasons.list.eval(pl.element().is_in(["length", "max_output_tokens"]))
        .list.any()
        .fill_null(False)
        .alias("capped"),
        choices.list.len().fill_null(0).alias("choices"),
        pl.when(failed).then(pl.lit("failed requests")).alias(LEFT_OUT),
    )


OPENAI_BATCH = Format(
    "openai-batch", "OpenAI batch results (jsonl)", has_fields(["custom_id", "response"]), _read
)
