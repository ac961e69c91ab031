"""Print the table of README.md: plans that do not know the lengths, over the one that does.

    OPENBLAS_NUM_THREADS=1 .venv/bin/python papers/not_knowing/table.py [--batches 30] [--bounds 3] [--curve
    affine]

Each batch has 64 prompts with 4 samples, groups kept together, on 8 engines; the other samples of each
prompt are its history. A policy's makespan is simulated on the true lengths and divided by the clairvoyant
optimum's upper end.
"""

import argparse
import time
from dataclasses import replace

import numpy as np
from lengths import borrowed, redrawn

from tailopt.arrays import Floats
from tailopt.compare import t_interval
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine, Power, StepTime
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.oracle.stochastic.problem import StochasticProblem
from tailopt.oracle.stochastic.solve import solve_stochastic
from tailopt.plan import Engine, Fleet, View
from tailopt.policies import resolve_policy
from tailopt.predict import resolve_predictor
from tailopt.simulate import simulate
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import Batch, sample_batches

TRACES = ("gpqa-deepseek-reasoner", "gpqa-gpt-5.1-high", "gpqa-gpt-5.2-xhigh", "gpqa-kimi-k2-thinking-turbo")
CURVES: dict[str, StepTime] = {"affine": Affine(6.42e-3, 0.4e-3), "moe": Power(6e-3, 4.2e-3, 0.5)}
POLICIES = {
    "uniform": ("uniform", None),
    "best-k on history": ("best_k", "prompt_mean"),
    "LPT on history": ("lpt_additive", "prompt_mean"),
    "sample average": ("sample_mean", "prompt_distribution"),
}
FRESH = 2000  # scenarios that the search has not seen


def fleet_of(step_time: StepTime) -> Fleet:
    """Eight engines with room for everything."""
    shape = ShapeProfile(1, step_time, 1e300, 10**9, max_running=1024, token_budget=10**9)  # free prefill
    profile = EngineProfile(
        name="curve", hardware="none", model="none", precision="none", engine="none", engine_version="0",
        date="2026-01-01", sources=("a curve",), licence="", kv_bytes_per_token=1, shapes={1: shape},
    )  # fmt: skip
    return Fleet(profile, (Engine(1),) * 8, 8)


def believed(batch: Batch) -> Trace:
    """The batch as if each prompt's responses were those of its history again."""
    assert batch.history is not None
    lengths = batch.trace.output_tokens.copy()
    for prompt in range(batch.trace.n_prompts):
        past = batch.history.output_tokens[batch.history_prompt == prompt]
        mine = batch.trace.prompt == prompt
        lengths[mine] = np.resize(past, int(mine.sum()))
    return replace(batch.trace, output_tokens=lengths)


def ratios(batch: Batch, fleet: Fleet, scenarios: int) -> dict[str, float]:
    """Makespan of each policy over the clairvoyant optimum; its gap; seconds that the sample average took."""
    clairvoyant = solve(Problem(batch.trace, fleet, atomic=True))
    found = {"clairvoyant gap": clairvoyant.gap}
    for name, (policy_name, predictor_name) in POLICIES.items():
        policy = resolve_policy(policy_name)
        told, drawn = None, None
        if predictor_name is not None:
            options = f"(scenarios={scenarios})" if predictor_name == "prompt_distribution" else ""
            predictor = resolve_predictor(predictor_name + options)
            told, drawn = predictor(batch), predictor.scenarios(batch)
        view = View.at_start(batch.trace, fleet, told, scenario_tokens=drawn, atomic=True, seed=batch.seed)
        started = time.perf_counter()
        plan = policy(view)
        found[f"{name} s"] = time.perf_counter() - started
        found[name] = simulate(batch.trace, fleet, plan).makespan_s / clairvoyant.upper_s
    plan = solve(Problem(believed(batch), fleet, atomic=True)).plan
    found["staircase on history"] = simulate(batch.trace, fleet, plan).makespan_s / clairvoyant.upper_s
    return found


def bounds(batch: Batch, fleet: Fleet) -> dict[str, float]:
    """The sample-average problem's certificate, and its plan on fresh scenarios."""
    drawn = resolve_predictor("prompt_distribution").scenarios(batch)
    assert drawn is not None
    found = solve_stochastic(StochasticProblem(batch.trace, fleet, drawn.astype(np.int64), atomic=True))
    fresh = resolve_predictor(f"prompt_distribution(scenarios={FRESH})").scenarios(batch)
    assert fresh is not None
    unseen = StochasticProblem(batch.trace, fleet, fresh.astype(np.int64), atomic=True)
    known_lower_s, known_upper_s = found.clairvoyant_s
    own = StochasticProblem(batch.trace, fleet, redrawn(batch, len(drawn)), atomic=True)
    knowing = solve_stochastic(own)
    lent = borrowed(batch, np.random.default_rng([batch.seed, 2]), scenarios=len(drawn))
    borrowing = solve_stochastic(StochasticProblem(batch.trace, fleet, lent.astype(np.int64), atomic=True))
    return {
        "gap": found.gap,
        "gap to clairvoyant bound": found.upper_s / known_lower_s - 1,
        "price, at least": found.price[0],
        "price, at most": found.price[1],
        "fresh over seen": float(unseen.makespans_s(found.plan).mean()) / found.upper_s,
        "clairvoyant gap": known_upper_s / known_lower_s - 1,
        "borrowed: gap": borrowing.gap,
        "borrowed: price, at least": borrowing.price[0],
        "borrowed: price, at most": borrowing.price[1],
        "redrawn: gap": knowing.gap,
        "redrawn: price, at least": knowing.price[0],
        "redrawn: price, at most": knowing.price[1],
        "plan s": found.plan_s,
    }


def closest(rows: list[list[dict[str, float]]]) -> str:
    """How close a fixed plan can come to the clairvoyant, in the mean over traces and their batches."""

    def interval(prefix: str) -> str:
        low, high = (
            np.mean([np.mean([row[f"{prefix}price, at {end}"] for row in batches]) for batches in rows])
            for end in ("least", "most")
        )
        return f"{low:.3f} (the one found is within {high:.3f})"

    return (
        f"no fixed plan can be below {interval('')} x clairvoyant over the scenarios of the model, nor below "
        f"{interval('borrowed: ')} over those borrowed from other traces, nor below {interval('redrawn: ')} "
        f"over those redrawn from the prompts' own samples; "
        f"mean of {len(rows)} traces, {len(rows[0])} batches each"
    )


def main() -> None:
    """Print one line a trace and curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--bounds", type=int, default=3, help="batches whose plans are bounded too")
    parser.add_argument("--curve", choices=CURVES, nargs="*", default=list(CURVES))
    parser.add_argument("--scenarios", type=int, default=200, help="of the sample average in the first table")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    means: dict[str, list[float]] = {}
    proven: dict[str, list[list[dict[str, float]]]] = {}
    started_s = time.process_time()
    for curve in asked.curve:
        fleet = fleet_of(CURVES[curve])
        for name in TRACES:
            batches = sample_batches(
                load_bundled(name),
                batches=max(asked.batches, asked.bounds),
                prompts=64,
                samples=4,
                seed=asked.seed,
            )
            rows = [ratios(batch, fleet, asked.scenarios) for batch in batches[: asked.batches]]
            if rows:
                print(f"{name}, {curve}: {summary(rows)}", flush=True)
                means.setdefault(curve, []).append(float(np.mean([row["sample average"] for row in rows])))
            certified = [bounds(batch, fleet) for batch in batches[: asked.bounds]]
            if certified:
                print(f"{name}, {curve}, bounds: {summary(certified)}", flush=True)
                proven.setdefault(curve, []).append(certified)
    for curve, values in means.items():
        print(
            f"{curve}: sample average over clairvoyant, mean of {len(values)} traces: {np.mean(values):.3f}"
        )
    for curve, batches_of in proven.items():
        print(f"{curve}: {closest(batches_of)}")
    print(f"{time.process_time() - started_s:.0f} seconds of CPU")


def summary(rows: list[dict[str, float]]) -> str:
    """Mean of each column and, of ratios, half the width of its 95 % interval."""
    return ", ".join(f"{name} {column(np.array([row[name] for row in rows]), name)}" for name in rows[0])


def column(values: Floats, name: str) -> str:
    """The mean as text."""
    text = f"{values.mean():.4f}" if "gap" in name or "over" in name else f"{values.mean():.3f}"
    low, high = t_interval(np.log(values)) if values.min() > 0 and len(values) > 5 else (None, None)
    return text if low is None or high is None or " s" in name else f"{text}±{(high - low) / 2:.3f}"


if __name__ == "__main__":
    main()
