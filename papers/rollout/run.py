"""A real rollout of a real model, recorded: ``python papers/rollout/run.py --out FOLDER``.

SmolLM2-135M-Instruct answers the prompts beside this file on two real vLLM engines, a core each, with
temperature 1 until it ends by itself. An interrupted run goes on when it is started again. Written here: the
lengths (``lengths.csv``, of which the bundled trace is made), every step of both engines (``steps.parquet``),
and ``RESULTS.md``. The texts stay in FOLDER.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl

from tailopt.replay.recorder import read_record
from tailopt.replay.rollout import rolled_out, step_table
from tailopt.replay.vllm import vllm_python
from tailopt.trace.reading import write_trace
from tailopt.trace.statistics import statistics

HERE = Path(__file__).parent
SAMPLES, CAP, RUNNING = 8, 768, 32


def main() -> None:
    """Make the model, roll out or go on, and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="model and record; may be there already")
    parser.add_argument("--results", type=Path, default=HERE, help="where lengths, steps and the page go")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--cap", type=int, default=CAP)
    options = parser.parse_args()
    model = options.out / "smollm2-135m-instruct"
    if not model.exists():
        subprocess.run([vllm_python(), str(HERE / "model.py"), str(model)], check=True)
    command = [
        sys.executable, "-m", "tailopt", "rollout", str(HERE / "prompts.jsonl"), "--model", str(model),
        "--samples", str(options.samples), "--cap", str(options.cap), "--running", str(RUNNING),
        "--shape", "2xTP1", "--out", str(options.out / "rollout"), "--go-on",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    write(options.out / "rollout" / "record.jsonl", options.results)


def write(path: Path, results: Path) -> None:
    """Lengths, steps and the page, of a record."""
    record = read_record(path)
    run = record.run()
    trace = rolled_out(run, record.trace)
    results.mkdir(parents=True, exist_ok=True)
    write_trace(trace, results / "lengths.csv")
    steps = step_table(record).drop("begin_s", "seconds")
    steps.write_parquet(results / "steps.parquet", compression="zstd", compression_level=19)
    (results / "RESULTS.md").write_text(page(record.head, trace, steps), "utf-8")


def page(head: dict, trace, steps: pl.DataFrame) -> str:  # type: ignore[no-untyped-def,type-arg]
    """What came out, in a few lines."""
    found, asked, machine = statistics(trace), head["rollout"], head["machine"]
    lines = [
        "# A rollout of SmolLM2-135M-Instruct: results",
        "",
        f"Written by `papers/rollout/run.py`. {head['backend']} on {machine['processor']}, "
        f"{machine['cores']} cores, {head['date'][:10]}; policy {asked['policy']}, temperature "
        f"{asked['temperature']:g}, cap {asked['cap']} tokens.",
        "",
        f"{trace.n_requests} responses to {trace.n_prompts} prompts, {trace.total_output_tokens:,} tokens. "
        f"Median {found.p50:g}, P90 {found.p90:.0f}, longest {found.max}; {int(trace.capped.sum())} "
        f"({found.capped_share:.0%}) were cut off at the cap, the others ended by themselves. Share of the "
        f"variance that lies between prompts: {found.between_prompt_share:.0%}.",
        "",
        "| prompt | tokens | shortest | median | longest | at the cap |",
        "|---" * 6 + "|",
    ]
    for number, name in enumerate(trace.prompt_ids):
        mine = trace.prompt == number
        lengths = trace.output_tokens[mine]
        lines.append(
            f"| {name} | {trace.prompt_tokens[mine][0]} | {lengths.min()} | {np.median(lengths):g} "
            f"| {lengths.max()} | {int(trace.capped[mine].sum())} |"
        )
    lines += [
        "",
        "Batch sizes: share of an engine's steps with so many requests running, and of its processor time.",
        "",
        "| engine | steps | tokens | 1 | 2-4 | 5-8 | 9-16 | 17-31 | 32 | of processor time with 1-8 |",
        "|---" * 10 + "|",
    ]
    for (engine,), own in steps.group_by("engine", maintain_order=True):
        running = own["running"].to_numpy()
        shares = [
            np.mean((running >= low) & (running <= high))
            for low, high in ((1, 1), (2, 4), (5, 8), (9, 16), (17, 31), (32, 32))
        ]
        cpu_s = own["cpu_s"].to_numpy()
        tail = cpu_s[running <= 8].sum() / cpu_s.sum()
        lines.append(
            f"| {engine} | {len(own)} | {own['tokens'].sum()} | "
            + " | ".join(f"{share:.0%}" for share in shares)
            + f" | {tail:.0%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
