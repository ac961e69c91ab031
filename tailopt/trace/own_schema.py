"""tailopt's own schema: the columns of a Trace as a table, in Parquet or CSV.

=================  ==================================================================================
``output_tokens``  generated tokens, from 1 on; the only column that must be there
``prompt_id``      the prompt's name; rows without it are a prompt each
``prompt``         number of the prompt, from 0 on without gaps; without it, prompts count by appearance
``sample``         sample index within the prompt; without it, samples count by appearance
``prompt_tokens``  tokens of the prompt, 0 if unknown
``capped``         true if the length cap cut the response off
``arrival_s``      arrival time in seconds
``step``           training step or checkpoint
``correct``        1 correct, 0 wrong, -1 unknown
=================  ==================================================================================

Name, source, licence, and whether the trace is synthetic, are kept beside the table (:func:`about`).
"""

from typing import TYPE_CHECKING

from tailopt.trace.trace import Trace

if TYPE_CHECKING:
    import polars as pl

NAMES = (
    "prompt",
    "prompt_id",
    "sample",
    "prompt_tokens",
    "output_tokens",
    "capped",
    "arrival_s",
    "step",
    "correct",
)
"""The columns, in the order in which they are written."""

REQUIRED = "output_tokens"


def table_of(trace: Trace) -> "pl.DataFrame":
    """The trace as a table.

    >>> table_of(Trace.of([[5, 7]])).select("prompt_id", "sample", "output_tokens").rows()
    [('0', 0, 5), ('0', 1, 7)]
    """
    import polars as pl

    columns = {
        "prompt": trace.prompt,
        "prompt_id": [trace.prompt_ids[prompt] for prompt in trace.prompt],
        "sample": trace.sample,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
        "capped": trace.capped,
        "arrival_s": trace.arrival_s,
        "step": trace.step,
        "correct": trace.correct,
    }
    return pl.DataFrame({name: column for name, column in columns.items() if column is not None})


def about(trace: Trace) -> dict[str, str]:
    """What is kept beside the table."""
    return {
        "name": trace.name,
        "source": trace.source,
        "licence": trace.licence,
        "synthetic": str(trace.synthetic).lower(),
    }
