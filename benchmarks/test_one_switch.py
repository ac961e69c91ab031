"""What one switch of shapes in mid-batch saves: 8 GPUs, 256 requests, over the certified best without one.

Batches of 64 prompts × 4 samples from real rollouts, samples free. For each engine and each cost of a
switch (seconds to wake an engine; contexts are computed anew, or sent over a link of 100 GB/s), over
``TAILOPT_BATCHES`` batches (default 2): what the best switch found saves of the best static makespan found,
in the median and at most; what it saves of the *bound* of all static plans, at least (below 0: not proven);
what no policy saves more than; how often it switches, and how. ``TAILOPT_SECONDS`` is the limit for each
(default 20); with ``TAILOPT_CLOCK=processor`` it counts processor seconds, the same on a busy machine.

``python benchmarks/test_one_switch.py [ENGINE ...]`` prints the table.
"""

import os
import sys
import time
from collections import Counter

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tailopt.engine.catalogue import load_engine
from tailopt.oracle.one_switch import SwitchCertificate, solve_one_switch, with_switch_costs
from tailopt.oracle.shapes import solve_shapes
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import sample_batches

BATCHES = int(os.environ.get("TAILOPT_BATCHES", "2"))
SECONDS = float(os.environ.get("TAILOPT_SECONDS", "20"))
GPUS, PROMPTS, SAMPLES = 8, 64, 4
WAKE_S = (0.0, 0.5, 2.0, 10.0)
LINK = 100e9

TRACES = ("gpqa-deepseek-reasoner", "gpqa-gpt-5-high")
ENGINES = ("h100-llama-3.1-8b", "h200-llama-3.1-70b-fp8-vllm", "h100-gpt-oss-120b-vllm")


def certificates(trace: str, engine: str, link: float | None) -> list[list[SwitchCertificate]]:
    """``[batch][cost]``; the best without a switch is searched once for each batch, as it costs none."""
    profile = load_engine(engine)
    drawn = sample_batches(load_bundled(trace), batches=BATCHES, prompts=PROMPTS, samples=SAMPLES, seed=0)
    found = []
    for batch in drawn:
        static = solve_shapes(batch.trace, profile, GPUS, atomic=False, time_limit_s=SECONDS)
        found.append([
            solve_one_switch(
                batch.trace, with_switch_costs(profile, wake_s=wake_s, link_bytes_per_s=link), GPUS,
                atomic=False, time_limit_s=SECONDS, static=static,
            )
            for wake_s in WAKE_S
        ])  # fmt: skip
    return found


def summary(found: list[SwitchCertificate]) -> dict[str, object]:
    gains = [one.gain for one in found]
    ways = Counter(f"{one.first} to {one.second} at {one.unfinished}" for one in found if one.second)
    return {
        "median": float(np.median(gains)),
        "most": max(gains),
        "sure": min(one.sure_gain for one in found),
        "nobody_more": max(one.most_gain for one in found),
        "switched": len([one for one in found if one.second]) / len(found),
        "ways": ", ".join(ways) or "-",
    }


@pytest.mark.parametrize("link", [None, LINK], ids=["anew", "link"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trace", TRACES)
def test_what_a_switch_saves(
    benchmark: BenchmarkFixture, trace: str, engine: str, link: float | None
) -> None:
    found = benchmark.pedantic(certificates, (trace, engine, link), rounds=1)
    for k, wake_s in enumerate(WAKE_S):
        benchmark.extra_info[f"wake {wake_s:g} s"] = summary([one[k] for one in found])


def main() -> None:
    if os.environ.get("TAILOPT_CLOCK") == "processor":
        time.perf_counter = time.process_time
        for name, module in list(sys.modules.items()):
            if name.startswith("tailopt.oracle") and hasattr(module, "clock"):
                vars(module)["clock"] = time.process_time
    # compiled before the first limit runs
    one = sample_batches(load_bundled(TRACES[0]), batches=1, prompts=2, samples=4, seed=0)[0].trace
    solve_one_switch(one, load_engine(ENGINES[0]), 4, atomic=False)
    print(
        f"{'trace':22} {'engine':28} {'moves':5} {'wake':>5} {'median':>7} {'most':>7} {'sure':>7} "
        f"{'nobody':>7} {'times':>5}  ways"
    )
    for trace in TRACES:
        for engine in sys.argv[1:] or ENGINES:
            for link in (LINK, None):
                found = certificates(trace, engine, link)
                for k, wake_s in enumerate(WAKE_S):
                    row = summary([one[k] for one in found])
                    print(
                        f"{trace:22} {engine:28} {'sent' if link else 'anew'} {wake_s:5.1f} "
                        f"{row['median']:7.2%} {row['most']:7.2%} {row['sure']:7.2%} "
                        f"{row['nobody_more']:7.1%} {row['switched']:5.0%}  {row['ways']}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
