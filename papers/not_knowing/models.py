"""Print README's comparison of models of lengths, on traces and batches that its other tables do not use.

    OPENBLAS_NUM_THREADS=1 .venv/bin/python papers/not_knowing/models.py [--batches 12]

Each model draws scenarios of a batch, a search of ``MOVES`` steps makes the plan, and its makespan on the
true lengths is divided by the clairvoyant optimum's. Batches are as in ``table.py``, affine.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from lengths import OTHERS, borrowed, redrawn, varied
from table import CURVES, fleet_of

from tailopt.arrays import Floats, Ints
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.plan import Fleet
from tailopt.policies.annealing import Outcomes, anneal, engine_times_s
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import Batch, sample_batches

MOVES = 30_000
SCENARIOS = 200
JUDGED = 600  # fresh scenarios that say where the true lengths lie in the model
QUANTILES = (0.5, 0.9, 0.99)

Draw = Callable[..., Floats]
BASE = "the predictor's"
MODELS: dict[str, Draw] = {
    BASE: varied,
    "smooth ceiling": partial(varied, smooth=True),
    "ceiling 25 % higher": partial(varied, ceiling=1.25),
    "no ceiling": partial(varied, ceiling=np.inf),
    "5 degrees of freedom": partial(varied, degrees=5.0),
    "12 degrees of freedom": partial(varied, degrees=12.0),
    "spreads x 0.8": partial(varied, spread=0.8),
    "spreads x 1.2": partial(varied, spread=1.2),
    "skew 0.15": partial(varied, skew=0.15),
    "1 % jumps": partial(varied, jumps=0.01),
    "5 degrees, skew 0.15, 0.5 % jumps, smooth": partial(
        varied, degrees=5.0, skew=0.15, jumps=0.005, smooth=True
    ),
    "borrowed": borrowed,
    "redrawn": lambda batch, rng, *, scenarios: redrawn(batch, scenarios).astype(np.float64),
}
OBJECTIVES = {"the worst half counts": SCENARIOS // 2, "the worst quarter counts": SCENARIOS // 4}
MORE = {"600 scenarios": 600}


def longest(lengths: Floats | Ints, group: Ints) -> Floats:
    """``[scenarios, groups]`` longest length of each group."""
    order = np.argsort(group, kind="stable")
    start = np.append(0, np.cumsum(np.bincount(group))[:-1])
    return np.asarray(np.maximum.reduceat(np.atleast_2d(lengths)[:, order], start, axis=1), dtype=np.float64)


def beyond(batch: Batch, draw: Draw) -> Floats:
    """Share of the batch's groups whose longest response is longer than each of the model's ``QUANTILES``."""
    believed = longest(
        draw(batch, np.random.default_rng([batch.seed, 4]), scenarios=JUDGED), batch.trace.group
    )
    marks = np.quantile(believed, QUANTILES, axis=0)
    return np.asarray((longest(batch.trace.output_tokens, batch.trace.group) > marks).mean(axis=1))


def ratio(
    batch: Batch, fleet: Fleet, clairvoyant_s: float, draw: Draw, scenarios: int, worst: int | None = None
) -> float:
    """Makespan, on the true lengths, of the plan for a model's scenarios over the clairvoyant's."""
    drawn = draw(batch, np.random.default_rng([batch.seed, 3]), scenarios=scenarios)

    def outcomes(lengths: Floats) -> Outcomes:
        return Outcomes.of(fleet, batch.trace.group, batch.trace.context_tokens, lengths)

    plan = anneal(outcomes(drawn), np.random.default_rng(batch.seed), worst=worst, moves=MOVES)
    true = outcomes(batch.trace.output_tokens[None].astype(np.float64))
    return float(engine_times_s(true, plan).max()) / clairvoyant_s


def main() -> None:
    """Print one line a model: over the clairvoyant, paired difference to the predictor's, calibration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    started_s = time.process_time()
    fleet = fleet_of(CURVES["affine"])
    found: dict[str, list[float]] = {}
    shares: dict[str, list[Floats]] = {}
    for name in OTHERS:
        for batch in sample_batches(
            load_bundled(name), batches=asked.batches, prompts=64, samples=4, seed=asked.seed
        ):
            judge = partial(ratio, batch, fleet, solve(Problem(batch.trace, fleet, atomic=True)).upper_s)
            for model, draw in MODELS.items():
                found.setdefault(model, []).append(judge(draw, SCENARIOS))
                shares.setdefault(model, []).append(beyond(batch, draw))
            for objective, worst in OBJECTIVES.items():
                found.setdefault(objective, []).append(judge(varied, SCENARIOS, worst))
            for more, scenarios in MORE.items():
                found.setdefault(more, []).append(judge(varied, scenarios))
    base = np.array(found[BASE])
    print(f"{len(base)} batches; longer than the model's quantile {QUANTILES}: share of groups")
    for model, values in found.items():
        change = np.array(values) - base
        half = 1.96 * change.std(ddof=1) / len(change) ** 0.5
        told = (
            " / ".join(f"{share:.3f}" for share in np.mean(shares[model], axis=0)) if model in shares else ""
        )
        print(f"{model}: {np.mean(values):.4f}, {change.mean():+.4f} ± {half:.4f}, {told}")
    print(f"{time.process_time() - started_s:.0f} seconds of CPU")


if __name__ == "__main__":
    main()
