r"""Print the tables of README.md: simulated against measured closed loops.

    .venv/bin/python papers/closed_loop/table.py [--only h100-qwen3-32b] [--csv FILE] [--figure PNG] [--write]

A serving benchmark keeps C requests in flight, each of about isl prompt and osl output tokens, and reports
the mean time to first token (TTFT) and the mean time per output token after it (TPOT). The simulator plays
the same loop on one engine: it runs C requests at most and takes the next one when one ends. The request that
follows the j-th finish was sent at that moment, so its TTFT counts from there, queueing included.

Four predictions of TPOT from the same :math:`\tau` and prefill rate 1/d:

- naive: :math:`\tau(C, K)` at the mean context K = C (isl + osl/2);
- formula: naive plus :math:`d\,(C - 1)\,isl/osl`, the prefill of others in a request's life if all C decode;
- steady: the simulator, the first and last two of twelve waves of C requests left out;
- benchmark: the simulator, ten waves of which the first is sent at once, all counted, as InferenceX does.

:math:`\tau` and d are fitted (``scripts/derive_profiles.py``) to all runs, as for the bundled profiles; to
all but those of the (isl, osl) that is predicted; and to all but those of its concurrency.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl

from tailopt.arrays import Ints
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.plan import Engine, Fleet, Plan
from tailopt.simulate import simulate
from tailopt.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- begin tables -->\n", "<!-- end tables -->\n"
TOKEN_BUDGET = 8192
"""``max-num-batched-tokens`` of InferenceX's vLLM runs; the others are not known or have no such number."""
SEEDS = 5
"""Draws of random lengths that a prediction is the mean of."""


def _derive_profiles() -> ModuleType:
    """The script that fits the bundled profiles; it is no part of the package."""
    name = "derive_profiles"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


fitting = _derive_profiles()


# ----------------------------------------------------------------------------------------------------------
# The loop
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A closed loop: ``concurrency`` requests in flight, lengths up to ``spread`` below the nominal ones."""

    concurrency: int
    isl: int
    osl: int
    spread: float = 0.0

    def lengths(self, nominal: int, n: int, draw: np.random.Generator) -> Ints:
        """Whole lengths, uniform between (1 - spread) of the nominal one and the nominal one."""
        return draw.integers(round(nominal * (1 - self.spread)), nominal, n, endpoint=True)

    def mean(self, nominal: int) -> float:
        """Their mean."""
        return nominal * (1 - self.spread / 2)


@dataclass(frozen=True)
class Outcome:
    """What a loop reports, as means over requests, and how often one was preempted."""

    tpot_s: float
    ttft_s: float
    preemptions: float


def play(shape: ShapeProfile, loop: Loop, *, steady: bool, seed: int = 0) -> Outcome:
    """Simulate ``loop`` on one engine, in its steady state or as a benchmark of ten waves."""
    c = loop.concurrency
    n, dropped = (max(12 * c, 240), 2 * c) if steady else (10 * c, 0)
    draw = np.random.default_rng(seed)
    trace = Trace(
        name="closed loop", source="drawn", prompt=np.arange(n), prompt_ids=tuple(map(str, range(n))),
        sample=np.zeros(n, dtype=np.int64), prompt_tokens=loop.lengths(loop.isl, n, draw),
        output_tokens=loop.lengths(loop.osl, n, draw), capped=np.zeros(n, dtype=np.bool_),
        arrival_s=np.zeros(n), synthetic=True,
    )  # fmt: skip
    profile = EngineProfile(
        name="fitted", hardware="", model="", precision="", engine="", engine_version="", date="2026-01-01",
        sources=("a fit",), licence="", kv_bytes_per_token=1, shapes={shape.tp: shape},
    )  # fmt: skip
    fleet = Fleet(profile, (Engine(shape.tp, max_running=c),), shape.tp)
    run = simulate(trace, fleet, Plan.of_queues(fleet.engines, [np.arange(n)]))
    sent_s = np.concatenate([np.zeros(c), np.sort(run.finish_s)[: n - c]])
    counted = slice(dropped, n - dropped)
    return Outcome(
        tpot_s=float(((run.finish_s - run.first_token_s) / (trace.output_tokens - 1))[counted].mean()),
        ttft_s=float((run.first_token_s - sent_s)[counted].mean()),
        preemptions=float(run.preemptions.sum()),
    )


def mean_of(shape: ShapeProfile, loop: Loop, *, steady: bool) -> Outcome:
    """The mean over draws of the lengths, where they are random."""
    played = [play(shape, loop, steady=steady, seed=seed) for seed in range(SEEDS if loop.spread else 1)]
    return Outcome(*np.mean([(one.tpot_s, one.ttft_s, one.preemptions) for one in played], axis=0).tolist())


# ----------------------------------------------------------------------------------------------------------
# Predictions
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One measured run and what a fit predicts for it; all TPOT and TTFT in seconds.

    Attributes:
        fitted_on: what the fit has seen: ``all`` runs, of other ``lengths``, or of other ``concurrency``.
        in_fit: whether this run was among them.
        kv_share: the tokens of C requests, half of the output done, over the capacity of the cache.
        mean_osl: output tokens of a request, as drawn.
    """

    profile: str
    tp: int
    concurrency: int
    isl: int
    osl: int
    fitted_on: str
    in_fit: bool
    kv_share: float
    mean_osl: float
    measured_tpot_s: float
    measured_ttft_s: float
    naive_tpot_s: float
    formula_tpot_s: float
    steady_tpot_s: float
    steady_ttft_s: float
    benchmark_tpot_s: float
    benchmark_ttft_s: float
    preemptions: float


def shape_of(recipe: Any, tp: int, fit: Any, concurrency: int) -> ShapeProfile:
    """One engine from a fit; its cache is the bundled profile's, and prefixes are not shared."""
    return ShapeProfile(
        tp=tp,
        step_time=fit.step_time(),
        prefill_tokens_per_s=1 / fit.d_s if fit.d_s > 0 else 1e300,
        kv_capacity_tokens=recipe.kv_capacity_tokens(tp),
        max_running=concurrency,
        token_budget=max(TOKEN_BUDGET, concurrency),
    )


def predict(recipe: Any, tp: int, runs: Any, fit: Any, fitted_on: str, in_fit: bool) -> Iterator[Row]:
    """What ``fit`` says of each of ``runs``."""
    for i, (isl, osl) in enumerate(runs.nominal):
        loop = Loop(int(runs.n[i]), isl, osl, spread=2 * (1 - recipe.length_scale))
        shape = shape_of(recipe, tp, fit, loop.concurrency)
        c, prompt, output = loop.concurrency, loop.mean(isl), loop.mean(osl)
        context = c * (prompt + output / 2)
        naive = float(shape.step_time(c, context))
        steady, benchmark = (mean_of(shape, loop, steady=steady) for steady in (True, False))
        yield Row(
            recipe.name, tp, c, isl, osl, fitted_on, in_fit, context / shape.kv_capacity_tokens, output,
            float(runs.tpot_s[i]), float(runs.ttft_s[i]), naive, naive + fit.d_s * (c - 1) * prompt / output,
            steady.tpot_s, steady.ttft_s, benchmark.tpot_s, benchmark.ttft_s, benchmark.preemptions,
        )  # fmt: skip


def rows_of(recipe: Any) -> Iterator[Row]:
    """All runs of a recipe: in sample, those too crowded to be fitted, lengths and concurrency held out."""
    runs, crowded = fitting.read_runs(recipe), crowded_runs(recipe)
    fits_in = [tp for tp in runs if recipe.kv_capacity_tokens(tp) >= 1]  # else the weights alone do not fit

    def fit(of: dict[int, Any]) -> dict[int, Any]:
        seen = {tp: some for tp, some in of.items() if len(some.n)}
        found: dict[int, Any] = fitting.fit_closed_loop(recipe, seen, concave=recipe.mixture_of_experts)
        return found

    everything = fit(runs)
    for tp in fits_in:
        yield from predict(recipe, tp, runs[tp], everything[tp], "all", True)
        yield from predict(recipe, tp, crowded[tp], everything[tp], "all", False)
    keys: dict[str, Callable[[Any], list[Any]]] = {
        "lengths": lambda of: list(of.nominal),
        "concurrency": lambda of: of.n.tolist(),
    }
    for held_out, key in keys.items():
        for value in sorted({value for of in runs.values() for value in key(of)}):
            others = fit({tp: of.select(other != value for other in key(of)) for tp, of in runs.items()})
            for tp in set(fits_in) & set(others):
                out = runs[tp].select(other == value for other in key(runs[tp]))
                yield from predict(recipe, tp, out, others[tp], held_out, False)


def crowded_runs(recipe: Any) -> dict[int, Any]:
    """The runs that no fit uses because their requests queue for much of their life."""
    least = fitting.MIN_DECODING_SHARE
    fitting.MIN_DECODING_SHARE = 0.0
    try:
        runs = fitting.read_runs(recipe)
    finally:
        fitting.MIN_DECODING_SHARE = least
    return {tp: of.select(of.decoding_share < least) for tp, of in runs.items()}


# ----------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------

PREDICTIONS = ("naive", "formula", "steady", "benchmark")


def with_errors(rows: list[Row]) -> pl.DataFrame:
    """The rows as a table, with every prediction over the measurement, less one.

    A ``life`` lasts from sending to the last token; C over it is the throughput (Little).
    """
    table = pl.DataFrame([asdict(row) for row in rows]).with_columns(
        (pl.col(f"{name}_ttft_s") + (pl.col("mean_osl") - 1) * pl.col(f"{name}_tpot_s")).alias(
            f"{name}_life_s"
        )
        for name in ("measured", "benchmark")
    )
    pairs = [(name, "tpot") for name in PREDICTIONS] + [
        ("steady", "ttft"),
        ("benchmark", "ttft"),
        ("benchmark", "life"),
    ]
    return table.with_columns(
        (pl.col(f"{name}_{what}_s") / pl.col(f"measured_{what}_s") - 1).alias(f"{name}_{what}")
        for name, what in pairs
    )


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def percent(value: float) -> str:
    """An error, signed."""
    return f"{100 * value:+.1f}"


def size(column: pl.Series) -> str:
    """How large errors are: median and 90th percentile of their sizes, in per cent."""
    return f"{100 * column.abs().median():.1f} / {100 * column.abs().quantile(0.9):.1f}"  # type: ignore[operator]


def by_profile(table: pl.DataFrame) -> str:
    """Sizes of the errors of TPOT and TTFT, by engine and by what the fit has seen."""
    errors = [*(f"{name}_tpot" for name in PREDICTIONS), "steady_ttft", "benchmark_ttft", "benchmark_life"]
    names = {"all": "these runs", "lengths": "other lengths", "concurrency": "other concurrency"}
    body = []
    for fitted_on, text in names.items():
        seen = table.filter(pl.col("fitted_on") == fitted_on)
        parts = [(str(name), rows) for (name,), rows in seen.group_by("profile", maintain_order=True)]
        for name, rows in [*parts, ("**all engines**", seen)]:
            body.append([text, name, str(len(rows)), *(size(rows[error]) for error in errors)])
    head = ["fitted to", "engine", "runs", *PREDICTIONS, "TTFT steady", "TTFT benchmark", "life benchmark"]
    return markdown(head, body)


def by_key(table: pl.DataFrame, key: pl.Expr, title: str) -> str:
    """Mean signed errors of TPOT and TTFT by a key of the run."""
    body = []
    for (value,), rows in table.group_by(key.alias("key"), maintain_order=False):
        signed = [percent(rows[f"{p}_tpot"].mean()) for p in PREDICTIONS]  # type: ignore[arg-type]
        ttft = percent(rows["benchmark_ttft"].median())  # type: ignore[arg-type]
        body.append((value, [f"{value:g}", str(len(rows)), *signed, ttft]))
    head = [title, "runs", *PREDICTIONS, "TTFT benchmark, median"]
    return markdown(head, [line for _, line in sorted(body, key=lambda pair: float(str(pair[0])))])


def full_caches(table: pl.DataFrame) -> str:
    """The runs whose requests do not all fit into the cache, one by one."""
    body = []
    for row in table.filter(pl.col("kv_share") > 1).sort("profile", "tp", "isl", "osl").iter_rows(named=True):
        body.append(
            [
                row["profile"], f"TP{row['tp']}", f"{row['isl']}/{row['osl']}", str(row["concurrency"]),
                f"{row['kv_share']:.2f}", "yes" if row["in_fit"] else "no",
                f"{1e3 * row['measured_tpot_s']:.1f}", *(percent(row[f"{p}_tpot"]) for p in PREDICTIONS),
                f"{row['measured_ttft_s']:.1f}", percent(row["benchmark_ttft"]),
                percent(row["benchmark_life"]), f"{row['preemptions']:.0f}",
            ]
        )  # fmt: skip
    head = ["engine", "TP", "isl/osl", "C", "tokens / cache", "in the fit", "TPOT ms", *PREDICTIONS,
            "TTFT s", "TTFT benchmark", "life benchmark", "preemptions"]  # fmt: skip
    return markdown(head, body)


def worst(table: pl.DataFrame, many: int = 12) -> str:
    """The runs that the simulated benchmark misses most."""
    rows = table.sort(pl.col("benchmark_tpot").abs(), descending=True).head(many)
    body = [
        [
            row["profile"], f"TP{row['tp']}", f"{row['isl']}/{row['osl']}", str(row["concurrency"]),
            f"{1e3 * row['measured_tpot_s']:.2f}", percent(row["formula_tpot"]),
            percent(row["benchmark_tpot"]), f"{row['measured_ttft_s']:.2f}", f"{row['benchmark_ttft_s']:.2f}",
        ]
        for row in rows.iter_rows(named=True)
    ]  # fmt: skip
    head = ["engine", "TP", "isl/osl", "C", "TPOT ms", "formula", "benchmark", "TTFT s", "benchmark's"]
    return markdown(head, body)


def report(table: pl.DataFrame) -> Iterator[str]:
    """The tables of README.md, with their titles."""
    fitted = table.filter(pl.col("in_fit") | (pl.col("fitted_on") != "all"))
    in_sample = fitted.filter(pl.col("fitted_on") == "all")
    yield "### Size of the errors: median / 90th percentile, per cent\n\n" + by_profile(fitted)
    ratio = pl.col("isl") / pl.col("osl")
    yield "### Mean error by isl/osl, in sample, per cent\n\n" + by_key(in_sample, ratio, "isl/osl")
    by_c = by_key(in_sample, pl.col("concurrency"), "C")
    yield "### Mean error by concurrency, in sample, per cent\n\n" + by_c
    out = fitted.filter(pl.col("fitted_on") == "concurrency")
    yield "### Mean error by concurrency, held out, per cent\n\n" + by_key(out, pl.col("concurrency"), "C")
    out = fitted.filter(pl.col("fitted_on") == "lengths")
    yield "### Mean error by isl/osl, held out, per cent\n\n" + by_key(out, ratio, "isl/osl")
    alone = full_caches(table.filter(pl.col("fitted_on") == "all"))
    yield "### Requests that do not all fit into the cache, errors in per cent\n\n" + alone
    yield "### Worst in sample, errors in per cent\n\n" + worst(in_sample)


FIGURE_ROWS = (("h200-llama-3.1-70b-fp8-vllm", 1, "tpot"), ("h200-llama-3.1-70b-fp8-vllm", 1, "ttft"),
               ("h100-gpt-oss-120b-vllm", 2, "tpot"))  # fmt: skip
FIGURE_LENGTHS = ((1024, 8192), (1024, 1024), (8192, 1024))
FIGURE_LINES = {
    "naive": ("naive", "all", {"color": "0.55", "linestyle": ":"}),
    "formula": ("formula", "all", {"color": "#D55E00", "linestyle": "--"}),
    "simulated benchmark": ("benchmark", "all", {"color": "#0072B2"}),
    "the same, these lengths not fitted": ("benchmark", "lengths", {"color": "#56B4E9", "linestyle": "-."}),
}


def draw(table: pl.DataFrame, file: Path) -> None:
    """TPOT and TTFT over the concurrency: a dense model, short of cache at the right end, and a mixture."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    shape = (len(FIGURE_ROWS), len(FIGURE_LENGTHS))
    figure, axes = plt.subplots(*shape, figsize=(10.5, 8.0), sharex=True, layout="constrained")
    for (name, tp, what), row in zip(FIGURE_ROWS, axes, strict=True):
        for (isl, osl), plot in zip(FIGURE_LENGTHS, row, strict=True):
            runs = table.filter(profile=name, tp=tp, isl=isl, osl=osl).sort("concurrency")
            for label, (prediction, fitted_on, style) in FIGURE_LINES.items():
                if f"{prediction}_{what}_s" in runs.columns:
                    line = runs.filter(pl.col("fitted_on") == fitted_on)
                    plot.plot(line["concurrency"], 1e3 * line[f"{prediction}_{what}_s"], label=label, **style)
            measured = runs.filter(pl.col("fitted_on") == "all")
            plot.plot(measured["concurrency"], 1e3 * measured[f"measured_{what}_s"], "ko", label="measured")
            plot.set(xscale="log", yscale="log", title=f"{name}\nTP{tp}, {isl} in, {osl} out")
            plot.title.set_fontsize("medium")
            ticks = measured["concurrency"].to_list()
            plot.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
            plot.xaxis.set_minor_locator(NullLocator())
            plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7) if what == "tpot" else (1, 2, 5)))
            plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            plot.yaxis.set_minor_locator(NullLocator())
        row[0].set_ylabel(f"{what.upper()} (ms)")
    for plot in axes[-1]:
        plot.set_xlabel("requests in flight")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description="simulated against measured closed loops")
    parser.add_argument("--only", default="", help="engines whose name holds this")
    parser.add_argument("--csv", type=Path, help="write every run and prediction here")
    parser.add_argument("--figure", type=Path, help="draw two engines' curves here (needs matplotlib)")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md as well")
    options = parser.parse_args()
    if (options.write or options.figure) and options.only:
        parser.error("README.md has all engines: --write and --figure go without --only")
    rows = [row for recipe in fitting.RECIPES if options.only in recipe.name for row in rows_of(recipe)]
    if not rows:
        parser.error(f"no engine has {options.only!r} in its name")
    table = with_errors(rows)
    if options.csv:
        table.write_csv(options.csv)
    if options.figure:
        draw(table, options.figure)
    parts = "\n".join(report(table))
    print(parts)
    if options.write:
        head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(head + BEGIN + parts + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
