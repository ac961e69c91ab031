"""Make the tables of README.md: best-k isolation beside the certified optimum.

    OPENBLAS_NUM_THREADS=1 .venv/bin/python papers/best_k/run.py --out FOLDER

For each bundled trace, step-time curve and number of engines: ``--groups`` groups of ``--trajectories``
responses, drawn from the trace without replacement, each placed freely, all lengths known. Engines only
decode: no prefill, no limit of the cache. Every k from 0 to all is tried, and every size of the tail pool.

One file a cell goes to FOLDER, and cells that are there are not computed again. ``RESULTS.md``,
``results.json`` and ``ecdf.svg`` in ``--results`` are made of them; the same seed gives the same files.
"""

import argparse
import heapq
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from tailopt.arrays import Floats, Ints
from tailopt.engine.catalogue import load_engine
from tailopt.engine.decode_time import decode_time_s
from tailopt.files import whole_file
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.plan import Engine, Fleet, View
from tailopt.policies.isolation import Isolation
from tailopt.policies.units import plan_units, predicted_times_s, predicted_work
from tailopt.simulate import simulate
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled

HERE = Path(__file__).parent
CURVES = {  # name: engine profile, degree, what it is
    "MoE": ("h100-gpt-oss-120b-vllm", 2, "concave: a mixture of experts"),
    "dense": ("h200-llama-3.1-70b-fp8-vllm", 2, "affine, paid by context"),
    "kinked": ("a100-llama-13b", 1, "the larger of two lines"),
}
TRACES = (
    "gpqa-deepseek-reasoner", "gpqa-gpt-5.2-xhigh", "gpqa-qwen3-max",
    "aime24-llama-3.2-3b-rl",
)  # fmt: skip
ENGINES = (2, 4)
LIMITS = (0.01, 0.04)
"""The two that the source counts groups within."""


@dataclass(frozen=True)
class Cell:
    """What one file of FOLDER is of."""

    trace: str
    curve: str
    engines: int
    groups: int
    trajectories: int
    seed: int

    @property
    def file(self) -> str:
        """Its name."""
        return f"{self.trace}--{self.curve}--{self.engines}.json"

    def fleet(self) -> Fleet:
        """Engines that decode by the curve, and whatever else they do takes no time and has room."""
        name, tp, _ = CURVES[self.curve]
        profile = load_engine(name)
        shape = replace(
            profile.shape(tp),
            prefill_tokens_per_s=1e300, kv_capacity_tokens=10**9, max_running=10**6, token_budget=10**9,
        )  # fmt: skip
        profile = replace(profile, shapes={tp: shape})
        return Fleet(profile, (Engine(tp),) * self.engines, tp * self.engines)

    def batches(self) -> Iterator[tuple[Trace, int]]:
        """Each group, and a seed for what else is drawn for it."""
        trace = load_bundled(self.trace)
        for group in range(self.groups):
            rng = np.random.default_rng([self.seed, group])
            rows = np.sort(rng.choice(trace.n_requests, self.trajectories, replace=False))
            batch = trace.take(rows)
            yield replace(batch, arrival_s=np.zeros(batch.n_requests)), int(rng.integers(2**32))


@dataclass(frozen=True)
class Way:
    """One way to isolate: the ``k`` longest on ``pool`` tail engines; where each unit goes, and makespan."""

    k: int
    pool: int
    engine_of: Ints
    predicted_s: float


def balanced(longest: Ints, tokens: Ints, k: int, pool: int, engines: int) -> Ints:
    """``[units]`` engine of each unit: in both pools the next longest goes where there are fewest tokens."""
    engine_of = np.empty(len(longest), dtype=np.int64)
    for units, own in ((longest[:k], range(pool)), (longest[k:], range(pool, engines))):
        heap = [(0, engine) for engine in own]
        for unit in units.tolist():
            load, engine = heap[0]
            engine_of[unit] = engine
            heapq.heapreplace(heap, (load + int(tokens[unit]), engine))
    return engine_of


def isolations(view: View, *, balance: bool) -> list[Way]:
    """Every k on every number of tail engines; first k = 0, which isolates nothing."""
    isolation, engines = Isolation.of(view), len(view.fleet.engines)
    context, tokens = predicted_work(view)
    choices = [(0, 0), *product(range(1, view.n_requests + 1), range(1, engines))]
    if balance:
        engine_of = [balanced(isolation.longest, tokens, k, pool, engines) for k, pool in choices]
    else:
        engine_of = [isolation.engine_of_unit(k, pool) for k, pool in choices]
    chosen = np.stack(engine_of)[:, None, view.unit] == np.arange(engines)[:, None]
    times_s = predicted_times_s(view.fleet, context, tokens, chosen).max(axis=-1).tolist()
    return [Way(*choice, *rest) for choice, *rest in zip(choices, engine_of, times_s, strict=True)]


def policies(view: View) -> dict[str, Way]:
    """What each policy does."""

    def best(ways: list[Way]) -> Way:
        return min(ways, key=lambda way: way.predicted_s)

    plain = isolations(view, balance=False)
    tenth = round(0.1 * view.n_requests)
    one = [way for way in plain if way.pool <= 1]
    return {
        "uniform": plain[0],
        "10 %": next(way for way in one if way.k == tenth),
        "best k, one tail engine": best(one),
        "best k, best pool": best(plain),
        "best k, best pool, balanced": best(isolations(view, balance=True)),
    }


POLICIES = ("uniform", "10 %", "best k, one tail engine", "best k, best pool", "best k, best pool, balanced")
SHOWN = POLICIES[3]


def row_of(batch: Trace, seed: int, fleet: Fleet) -> dict[str, Any]:
    """Bounds on the optimum of one group, and the makespan, k and tail pool of each policy, in seconds."""
    certificate = solve(Problem(batch, fleet))
    view = View.at_start(batch, fleet, batch.output_tokens.astype(np.float64), seed=seed)
    found = policies(view)
    makespan_s = {
        name: simulate(batch, fleet, plan_units(view, way.engine_of)).makespan_s
        for name, way in found.items()
    }
    upper_s = min(certificate.upper_s, *makespan_s.values())
    alone_s = decode_time_s(
        fleet.shape_of(0).step_time, batch.context_tokens, batch.output_tokens,
        np.eye(batch.n_requests, dtype=np.bool_),
    ).max()  # fmt: skip
    return {
        "lower_s": min(certificate.lower_s, upper_s),
        "upper_s": upper_s,
        "alone_s": float(alone_s),
        "policies": {
            name: {"makespan_s": makespan_s[name], "k": way.k, "pool": way.pool}
            for name, way in found.items()
        },
    }


def cells_of(folder: Path, wanted: list[Cell]) -> dict[Cell, list[dict[str, Any]]]:
    """The rows of each cell, computed where FOLDER does not have them."""
    folder.mkdir(parents=True, exist_ok=True)
    answers: dict[Cell, list[dict[str, Any]]] = {}
    with Progress(transient=True) as progress:
        whole = progress.add_task("groups", total=sum(cell.groups for cell in wanted))
        for cell in wanted:
            progress.update(whole, description=f"{cell.trace}, {cell.curve}, {cell.engines} engines")
            file = folder / cell.file
            kept = json.loads(file.read_text("utf-8")) if file.exists() else {}
            if kept.get("cell") != asdict(cell):
                started, fleet, rows = time.process_time(), cell.fleet(), []
                for batch, seed in cell.batches():
                    rows.append(row_of(batch, seed, fleet))
                    progress.advance(whole)
                kept = {"cell": asdict(cell), "cpu_s": time.process_time() - started, "rows": rows}
                with whole_file(file) as temporary:
                    temporary.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            else:
                progress.advance(whole, cell.groups)
            answers[cell] = kept["rows"]
    return answers


def ratios(rows: list[dict[str, Any]], policy: str, end: str) -> Floats:
    """``[groups]`` makespan over one end of the certificate: "lower_s" or "upper_s"."""
    return np.array([row["policies"][policy]["makespan_s"] / row[end] for row in rows])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one cell: how far each policy is from the optimum, at least and at most."""
    gaps = np.array([row["upper_s"] / row["lower_s"] - 1 for row in rows])
    alone = np.array([row["alone_s"] / row["upper_s"] for row in rows])
    policies = {}
    for policy in POLICIES:
        low, high = (ratios(rows, policy, end) for end in ("upper_s", "lower_s"))
        policies[policy] = {
            "within": {f"{limit:.0%}": [int((high <= 1 + limit).sum()), int((low <= 1 + limit).sum())]
                       for limit in LIMITS},
            "median": [float(np.median(low)), float(np.median(high))],
            "worst": [float(low.max()), float(high.max())],
            "median_k": float(np.median([row["policies"][policy]["k"] for row in rows])),
            "median_pool": float(np.median([row["policies"][policy]["pool"] for row in rows])),
        }  # fmt: skip
    return {
        "groups": len(rows),
        "gap_median": float(np.median(gaps)),
        "gap_worst": float(gaps.max()),
        "longest_alone": int((alone >= 0.99).sum()),
        "policies": policies,
        "ratio": {
            end: [round(float(r), 5) for r in ratios(rows, SHOWN, end)] for end in ("lower_s", "upper_s")
        },
    }


def between(ends: list[float], text: Callable[[float], str]) -> str:
    """Two ends, or the one text they share."""
    low, high = map(text, ends)
    return low if low == high else f"{low}-{high}"


def table(head: list[str], body: list[list[str]]) -> str:
    """In Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *body]) + "\n"


def markdown(document: dict[str, Any]) -> str:
    """The tables."""
    off: Callable[[float], str] = lambda ratio: f"{100 * (ratio - 1):.1f}"  # noqa: E731
    about = document["about"]
    lines = [
        "# Best-k isolation beside the certified optimum: results",
        "",
        f"Written by `papers/best_k/run.py`. {about['groups']} groups of {about['trajectories']} "
        f"trajectories a cell, seed {about['seed']}. 'Within' counts groups (published: 72 within 1 %, 100 "
        "within 4 %). Where the optimum is open a number has two ends: by the certified lower bound and "
        "by the best plan known. 'Longest alone': groups whose longest trajectory, alone on an engine, takes "
        "99 % of the best makespan or more.",
        "",
    ]  # fmt: skip
    curves = dict.fromkeys(cell["curve"] for cell in document["cells"])
    for curve in curves:
        own = [cell for cell in document["cells"] if cell["curve"] == curve]
        lines += [f"## {curve}: {about['curves'][curve]}", "", f"{SHOWN}, in every cell:", ""]
        body = []
        for cell in own:
            policy = cell["policies"][SHOWN]
            body.append([
                str(cell["engines"]), cell["trace"],
                *(between(policy["within"][f"{limit:.0%}"], "{:.0f}".format) for limit in LIMITS),
                between(policy["median"], off), between(policy["worst"], off),
                f"{policy['median_k']:.0f} on {policy['median_pool']:.0f}", str(cell["longest_alone"]),
                f"{100 * cell['gap_median']:.2f} / {100 * cell['gap_worst']:.2f}",
            ])  # fmt: skip
        head = ["engines", "trace", "within 1 %", "within 4 %", "median off, %", "worst off, %",
                "k on tail engines", "longest alone", "gap of the optimum, %: median / worst"]  # fmt: skip
        lines += [table(head, body)]
        lines += [
            "All policies, all traces together: groups of a hundred within 1 % and 4 %; middle of "
            "the traces' medians and worst off in %; all by the certified lower bound:",
            "",
        ]
        body = []
        for engines in dict.fromkeys(cell["engines"] for cell in own):
            same = [cell for cell in own if cell["engines"] == engines]
            total = sum(cell["groups"] for cell in same)
            line = [str(engines)]
            for policy in POLICIES:
                found = [cell["policies"][policy] for cell in same]
                within = [sum(f["within"][f"{limit:.0%}"][0] for f in found) / total for limit in LIMITS]
                medians = np.median([f["median"][1] for f in found])
                line.append(
                    f"{100 * within[0]:.0f}, {100 * within[1]:.0f}; {off(float(medians))}, "
                    f"{off(max(f['worst'][1] for f in found))}"
                )
            body.append(line)
        lines += [table(["engines", *POLICIES], body)]
    return "\n".join(lines)


STYLES = {
    "uniform": ("0.6", ":"),
    "10 %": ("0.35", "--"),
    "best k, one tail engine": ("#56B4E9", "-."),
    "best k, best pool": ("#0072B2", "-"),
    "best k, best pool, balanced": ("#D55E00", "-"),
}


def draw(answers: dict[Cell, list[dict[str, Any]]], file: Path) -> None:
    """Share of groups within a distance of the certified lower bound, all traces, by curve and engines."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    curves = list(dict.fromkeys(cell.curve for cell in answers))
    counts = sorted({cell.engines for cell in answers})
    figure = Figure(figsize=(3.4 * len(counts), 2.5 * len(curves) + 0.7), layout="constrained")
    axes = figure.subplots(len(curves), len(counts), squeeze=False, sharex=True, sharey=True)
    for (curve, engines), plot in zip(product(curves, counts), axes.flat, strict=True):
        rows = [r for c, own in answers.items() if (c.curve, c.engines) == (curve, engines) for r in own]
        for policy, (colour, line) in STYLES.items():
            off = 100 * (ratios(rows, policy, "lower_s") - 1)
            plot.ecdf(off, label=policy, color=colour, linestyle=line)
        for limit in LIMITS:
            plot.axvline(100 * limit, color="0.8", linewidth=0.8, zorder=0)
        plot.plot([1, 4], [0.72, 1.0], "k+", markersize=9, label="published, best k")
        plot.set_title(f"{curve}, {engines} engines", fontsize=9)
        plot.set(xlim=(0, 30), ylim=(0, 1.03))
    for plot in axes[-1]:
        plot.set_xlabel("over the certified lower bound, %")
    for plot in axes[:, 0]:
        plot.set_ylabel("share of groups")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    with mpl.rc_context({"svg.hashsalt": "best_k"}), whole_file(file) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})


def main() -> None:
    """Compute what is missing, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="one file a cell; may be there already")
    parser.add_argument("--results", type=Path, default=HERE, help="where tables and figure go")
    parser.add_argument("--traces", nargs="+", default=TRACES)
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=["MoE", "dense"])
    parser.add_argument("--engines", nargs="+", type=int, default=ENGINES)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--trajectories", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    sizes = (asked.groups, asked.trajectories, asked.seed)
    order = product(asked.engines, asked.curves, asked.traces)
    answers = cells_of(asked.out, [Cell(trace, curve, m, *sizes) for m, curve, trace in order])
    document = {
        "about": {
            "groups": asked.groups, "trajectories": asked.trajectories, "seed": asked.seed,
            "curves": {
                curve: f"{name}, TP{tp}, {load_engine(name).shape(tp).step_time} ({text})"
                for curve, (name, tp, text) in CURVES.items() if curve in asked.curves
            },
        },
        "cells": [{**asdict(cell), **summary(rows)} for cell, rows in answers.items()],
    }  # fmt: skip
    asked.results.mkdir(parents=True, exist_ok=True)
    with whole_file(asked.results / "results.json") as temporary:
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with whole_file(asked.results / "RESULTS.md") as temporary:
        temporary.write_text(markdown(document), encoding="utf-8")
    draw(answers, asked.results / "ecdf.svg")
    print(markdown(document))


if __name__ == "__main__":
    main()
