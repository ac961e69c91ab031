"""The staircase search on batches of real lengths: gap and time, medians and worst cases.

    .venv/bin/python benchmarks/search_table.py --batches 100

Lengths are drawn without replacement from all bundled GPQA traces whose 90th percentile is above 5,000
tokens, except groups, which come from one trace; "lognormal" draws lognormal(7.6, 1.0) capped at 16,384
instead. Engines are affine and large enough to run everything at once; "KV caps" is one whole trace on the
engine as measured. Where the longest request alone decides, bound and filling agree at once and prove little:
"b 2 ms" leaves hardly any such batch. Groups have a row more with 60 seconds, to be proven to the end. Times
are processor seconds, so that they compare on a busy machine; the time limit (1, 1, 2 and 10 s by size) is by
the clock, or counts processor seconds too with ``TAILOPT_CLOCK=processor``. `peers.py` has general solvers
beside this search.
"""

import argparse
import os
import time
from collections.abc import Iterator

import numpy as np

from tailopt.engine.catalogue import load_engine
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.oracle.certificate import OPTIMAL_GAP
from tailopt.oracle.problem import Problem
from tailopt.oracle.search import search
from tailopt.plan import Engine, Fleet
from tailopt.trace import Trace
from tailopt.trace.catalogue import bundled_traces, load_bundled
from tailopt.trace.transforms import sample_batches

CURVES = {
    "b 0.35 ms": Affine(10e-3, 0.35e-3),
    "b 2 ms": Affine(10e-3, 2e-3),
    "context": Affine(6.805e-3, 0.0, 4.262e-8),
}
ROWS = [  # requests, engines, time limit, gap asked for
    (100, 4, 1.0, 1e-6),
    (512, 8, 1.0, 1e-4),
    (4096, 16, 2.0, 1e-4),
    (32768, 64, 10.0, 1e-3),
]
GROUPED = ("gpqa-deepseek-reasoner", "gpqa-gpt-5.1-high", "gpqa-gpt-5.2-xhigh", "gpqa-kimi-k2-thinking-turbo")


def fleet_of(curve: Affine, engines: int) -> Fleet:
    shape = ShapeProfile(1, curve, 1e300, 10**12, max_running=10**6, token_budget=10**9)
    profile = EngineProfile(
        name="affine", hardware="none", model="none", precision="none", engine="none", engine_version="0",
        date="2026-01-01", sources=("this file",), licence="none", kv_bytes_per_token=1, shapes={1: shape},
    )  # fmt: skip
    return Fleet(profile, (Engine(1),) * engines, engines)


def free(requests: int, seed: int, lognormal: bool, pool: list[Trace]) -> Trace:
    rng = np.random.default_rng(seed)
    if lognormal:
        output = np.minimum(rng.lognormal(7.6, 1.0, requests), 16_384).astype(np.int64)
        return Trace.of([[one] for one in output.tolist()])
    output = np.concatenate([trace.output_tokens for trace in pool])
    prompt = np.concatenate([trace.prompt_tokens for trace in pool])
    chosen = rng.choice(len(output), requests, replace=False)
    return Trace.of([[one] for one in output[chosen].tolist()], prompt_tokens=prompt[chosen].tolist())


def instances(batches: int) -> Iterator[tuple[str, float, float, Iterator[Problem]]]:
    """Name, time limit, gap asked for, and problems of each row."""
    pool = [
        load_bundled(entry.name)
        for entry in bundled_traces()
        if entry.name.startswith("gpqa") and entry.p90 > 5000 and not entry.synthetic
    ]
    for requests, engines, limit_s, asked in ROWS:
        for name, curve in CURVES.items():
            fleet = fleet_of(curve, engines)
            count = batches if requests < 4096 else max(1, batches // 5) if requests < 32768 else 2
            for lognormal in (False, True):
                problems = (Problem(free(requests, seed, lognormal, pool), fleet) for seed in range(count))
                source = "lognormal" if lognormal else "real"
                yield f"{requests} x {engines}, {source}, {name}", limit_s, asked, problems
    for name, curve in CURVES.items():
        fleet = fleet_of(curve, 8)
        for limit_s, asked in ((1.0, 1e-3), (60.0, OPTIMAL_GAP)):
            groups = (
                Problem(batch.trace, fleet, atomic=True)
                for trace in GROUPED
                for batch in sample_batches(
                    load_bundled(trace), batches=max(1, batches // 4), prompts=64, samples=8, seed=0
                )
            )
            yield f"64 groups of 8 x 8, real, {name}", limit_s, asked, groups
    crowded = Fleet.of(load_engine("h100-llama-3.1-8b"), "8xTP1")
    whole = (Problem(load_bundled(name), crowded) for name in GROUPED)
    yield "whole trace x 8, KV caps, h100-llama-3.1-8b", 10.0, 1e-2, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    if os.environ.get("TAILOPT_CLOCK") == "processor":
        time.perf_counter = time.process_time
    search(Problem(free(100, 0, True, []), fleet_of(CURVES["b 2 ms"], 4)))  # compile
    print(
        f"{'':48} {'limit':>5} {'asked':>6} {'within':>7} {'proven':>7} {'gap: median':>12} {'worst':>8}"
        f" {'s: median':>10} {'worst':>7}"
    )
    for name, limit_s, asked, problems in instances(options.batches):
        if options.only not in name:
            continue
        gaps, seconds, proven = [], [], []
        for problem in problems:
            started = time.process_time()
            found = search(problem, time_limit_s=limit_s)
            seconds.append(time.process_time() - started)
            gaps.append(found.gap)
            proven.append(found.status == "optimal")
        within = np.mean(np.array(gaps) <= asked)
        print(
            f"{name:48} {limit_s:5.0f} {asked:6.0e} {within:7.0%} {np.mean(proven):7.0%}"
            f" {np.median(gaps):12.1e} {max(gaps):8.1e}"
            f" {np.median(seconds):10.3f} {max(seconds):7.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
