"""Options that several commands share, each declared once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_TRACE = "gpqa-deepseek-reasoner"
DEFAULT_ENGINE = "h100-llama-3.1-8b"
FORMAT_NAMES = (
    "parquet", "csv", "azure2023", "burstgpt", "mooncake", "vidur", "vllm-bench", "verl", "slime",
    "openai-batch",
)  # fmt: skip
"""The keys of :data:`tailopt.trace.formats.FORMATS`, which is not imported for help."""

METHOD_NAMES = ("staircase", "search", "lagrangian", "kinds", "dp", "cpsat", "highs", "scip")
"""The keys of :data:`tailopt.oracle.solve.METHODS`, which is not imported for help."""

DEFAULT_METHOD = "search"
DEFAULT_GPUS = 8
MOST_GPUS = 99_999


class Groups(StrEnum):
    """Whether the samples of a prompt must stay on one engine."""

    ATOMIC = "atomic"
    FREE = "free"


TraceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trace", metavar="FILE|NAME", help=f"Rollouts; again for more files. Default: {DEFAULT_TRACE}."
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help=f"Format of the files, found out by default: {', '.join(FORMAT_NAMES)}.",
    ),
]
CapOption = Annotated[
    int | None,
    typer.Option(
        "--cap",
        metavar="TOKENS",
        help="Length cap of the run: flags responses of at least so many tokens as censored, cuts none.",
    ),
]
SkipOption = Annotated[bool, typer.Option("--skip-bad", metavar="", help="Skip bad rows, and count them.")]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="FILE", help="tokenizer.json or file.py:function, for formats of text only."
    ),
]
TruncateOption = Annotated[
    int | None,
    typer.Option("--truncate", metavar="TOKENS", help="Cut longer responses off at so many tokens."),
]
TailOption = Annotated[
    float | None,
    typer.Option("--tail", metavar="RATIO", help="Reshape the tail to this P90/P50 (TailSieve)."),
]
EngineOption = Annotated[str, typer.Option("--engine", metavar="NAME|FILE", help="Engine profile.")]
GpusOption = Annotated[
    int | None,
    typer.Option("--gpus", metavar="N", help=f"GPUs. Default: those of --shape, or {DEFAULT_GPUS}."),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="SHAPE",
        help="Engines: 8xTP1, 2xTP2+1xTP4, ... Default: the smallest that the profile has.",
    ),
]
PromptsOption = Annotated[int, typer.Option("--prompts", metavar="N", help="Prompts of a batch.")]
SamplesOption = Annotated[int, typer.Option("--samples", metavar="N", help="Samples of a prompt.")]
GroupsOption = Annotated[
    Groups, typer.Option("--groups", help="Whether the samples of a prompt stay on one engine.")
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Of all that is drawn.")]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="JSON to stdout instead of the table.")]
QuietOption = Annotated[bool, typer.Option("--quiet", metavar="", help="No progress bar.")]
GoOnOption = Annotated[
    bool,
    typer.Option("--go-on", metavar="", help="Go on with a FOLDER that was interrupted, as it was begun."),
]
RemoteOption = Annotated[bool, typer.Option("--remote", metavar="", help="Allow servers on other machines.")]
PythonOption = Annotated[
    Path | None,
    typer.Option(
        "--python",
        metavar="PATH",
        help="Python that has the engine's packages. Default: TAILOPT_VLLM_PYTHON, or this one.",
    ),
]
