"""Make the bundled traces from the source tables: ``python scripts/bundle_traces.py SOURCE_DIR``.

SOURCE_DIR holds one folder per source (``epoch_benchhub``, ``rg_llama3b_rl_k50``, ...), each with the table
named below: counts extracted from the repositories and commits given here. They are not part of this
repository, so this script documents how ``tailopt/data`` came about, and makes it again for whoever has them,
byte for byte with the same polars. One Parquet file a source, a ``run`` column to tell its traces apart, and
``traces.toml`` about them all.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

DATA = Path(__file__).resolve().parent.parent / "tailopt" / "data"


@dataclass(frozen=True)
class Source:
    """Where traces come from, what may be done with them, and how to make the table."""

    key: str
    url: str
    commit: str
    licence: str
    attribution: str
    caveats: str
    runs: Callable[[Path], pl.DataFrame]
    synthetic: bool = False


def epoch(folder: Path) -> pl.DataFrame:
    """GPQA Diamond and OTIS Mock AIME, the runs with at least 4 samples for half of their prompts."""
    rows = pl.read_parquet(folder / "epoch_benchhub" / "single_turn.parquet")
    rows = rows.filter(pl.col("dataset").is_in(["gpqa_diamond", "otis_mock_aime"]))
    samples = rows.group_by("eval_id", "prompt_id").len().group_by("eval_id").agg(pl.median("len"))
    rows = rows.join(samples.filter(pl.col("len") >= 4), on="eval_id")
    identity = ["dataset", "model", "reasoning_effort", "thinking_budget"]
    names = pl.DataFrame(
        [
            {"eval_id": run["eval_id"], "run": epoch_name(*(run[column] for column in identity))}
            for run in rows.select("eval_id", *identity).unique().to_dicts()
        ]
    )
    return rows.join(names, on="eval_id").select(
        "run",
        pl.col("dataset").replace_strict(
            {"gpqa_diamond": "GPQA Diamond", "otis_mock_aime": "OTIS Mock AIME 2024-2025"}
        ),
        model=pl.concat_str(
            "model",
            pl.format(" (effort {})", "reasoning_effort").fill_null(""),
            pl.format(" (thinking budget {})", "thinking_budget").fill_null(""),
        ),
        prompt_id="prompt_id",
        sample="sample_idx",
        prompt_tokens=pl.col("prompt_tokens").median().over("run", "prompt_id").floor(),
        output_tokens="response_tokens",
        capped=pl.col("at_cap") == 1,
        correct="correct",
    )


def epoch_name(dataset: str, model: str, effort: str | None, budget: int | None) -> str:
    """``gpqa-gpt-5.1-high``: benchmark, model without provider and date, effort or thinking budget."""
    short = re.sub(r"-(\d{4}-\d{2}-\d{2}|\d{8})$", "", model.rsplit("/", 1)[-1]).replace("k2p5", "k2.5")
    setting = [effort] if effort else [f"think{budget // 1000}k"] if budget else []
    return "-".join([dataset.split("_")[0], short, *setting])


SOURCES = [
    Source(
        key="epoch",
        url="Epoch AI, AI Benchmarking Hub (epoch.ai/benchmarks), public Inspect logs, by way of "
        "github.com/feruiloba/miri-fellowship-inference-scaling",
        commit="69eb06927b242637a2f37af51fcbd7f13e338baa",
        licence="CC BY 4.0",
        attribution="Epoch AI, 'AI Benchmarking Hub', epoch.ai/benchmarks",
        caveats="Lengths are the provider's count of all generated tokens, hidden reasoning included. "
        "Served frontier models, not an RL run. Prompt tokens are the median over the samples of a prompt, "
        "as single rows report many times as much. Numbers only: no text of any question or answer.",
        runs=epoch,
    ),
]

COLUMNS = {
    "run": pl.Categorical,
    "prompt_id": pl.Categorical,
    "sample": pl.Int16,
    "prompt_tokens": pl.Int32,
    "output_tokens": pl.Int32,
    "capped": pl.Boolean,
    "arrival_s": pl.Float64,
    "step": pl.Int32,
    "correct": pl.Int8,
}


def main(folder: Path) -> None:
    """Write every Parquet file and the catalogue."""
    catalogue = [
        "# Written by scripts/bundle_traces.py. Lengths in tokens; percentiles interpolate linearly.",
        "",
    ]
    entries = []
    for source in SOURCES:
        rows = source.runs(folder)
        columns = [name for name in COLUMNS if name in rows.columns]
        order = [name for name in ("run", "step", "arrival_s", "prompt_id", "sample") if name in columns]
        rows = rows.sort(order, maintain_order=True)
        if rows.select(
            pl.struct(c for c in ("run", "step", "prompt_id", "sample") if c in columns).is_duplicated().any()
        ).item():
            raise SystemExit(f"{source.key}: two runs have the same name, or a row appears twice")
        table = rows.select(
            pl.col(name).cast(pl.String if COLUMNS[name] is pl.Categorical else COLUMNS[name])
            for name in columns
        )
        table.write_parquet(DATA / f"{source.key}.parquet", compression="zstd", compression_level=19)
        catalogue += [
            f"[source.{source.key}]",
            f"source = {quote(source.url)}",
            f"commit = {quote(source.commit)}",
            f"licence = {quote(source.licence)}",
            f"attribution = {quote(source.attribution)}",
            f"caveats = {quote(source.caveats)}",
            f"file = {quote(f'{source.key}.parquet')}",
            f"synthetic = {str(source.synthetic).lower()}",
            "",
        ]
        for (name,), run in rows.group_by("run", maintain_order=True):
            lengths = run["output_tokens"]
            dataset, model = run["dataset"][0], run["model"][0]
            entries += [
                f"[trace.{quote(str(name))}]",
                f"from = {quote(source.key)}",
                f"run = {quote(str(name))}",
                f"title = {quote(f'{model} on {dataset}')}",
                f"dataset = {quote(dataset)}",
                f"model = {quote(model)}",
                f"responses = {len(run)}",
                f"prompts = {run['prompt_id'].n_unique()}",
                f"p50 = {lengths.quantile(0.5, 'linear')}",
                f"p90 = {lengths.quantile(0.9, 'linear'):.1f}",
                f"max = {lengths.max()}",
                "",
            ]
    (DATA / "traces.toml").write_text("\n".join(catalogue + entries), encoding="utf-8")


def quote(text: str) -> str:
    """A TOML basic string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


if __name__ == "__main__":
    main(Path(sys.argv[1]))
