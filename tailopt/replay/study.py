"""Policies on real engines beside what was predicted of them and the certified optimum, batch by batch.

Per batch, every policy and predictor is simulated and replayed, in rounds: all of them once, then all of
them again, so that a machine that slows down or speeds up meets them alike. Whatever is done is in a folder,
and an interrupted study goes on with what is missing:

=======================================  ==================================================================
``profile.toml``                         the engine profile
``BATCH-POLICY-PREDICTOR-REPEAT.jsonl``  the record of a replay
``....run``, ``....json``                its run (:mod:`tailopt.run_file`), and its Perfetto timeline, with
                                         the prediction above it
``pace-BATCH-REPEAT-NUMBER.jsonl``       the record of a yardstick
=======================================  ==================================================================

**Yardsticks.** A machine that is shared, or too warm, is some per cent faster now than a minute ago, which
no profile can know. With ``yardstick`` another batch, the same every time, runs before and after each replay.
An engine's *pace* is the time that its steps took over what the profile says of them. A makespan is the
finish of one engine, the last, so it is divided by the mean pace, in its two neighbours, of the engines on
the same GPUs as that one: seconds of the machine as it was when it was profiled.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tailopt.arrays import Floats
from tailopt.compare import NO_PREDICTOR, check_work
from tailopt.engine.catalogue import write_profile
from tailopt.engine.profile import EngineProfile
from tailopt.errors import InputError
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.problem import Problem
from tailopt.oracle.solve import solve
from tailopt.plan import Fleet, Plan, View
from tailopt.policies import NamedPolicy, resolve_policy
from tailopt.predict import NamedPredictor, resolve_predictor
from tailopt.replay.backend import Engines, Progress
from tailopt.replay.execute import execute, resume
from tailopt.replay.fit import fit_steps
from tailopt.replay.fit_file import fitted_profile, read_measured
from tailopt.replay.gap import Gap, profiled_s, repriced_s
from tailopt.replay.ledger import Line
from tailopt.replay.recorder import read_record
from tailopt.replay.timelines import write_side_by_side
from tailopt.run import Run
from tailopt.run_file import write_run
from tailopt.simulate import simulate, simulate_policy
from tailopt.trace import Trace
from tailopt.trace.transforms import Batch, sample_batches


@dataclass(frozen=True, eq=False)
class GivenPlan:
    """A plan, such as one read from a file, in place of a policy.

    Raises:
        InputError: if it has review points: only a policy can answer at these.
    """

    plan: Plan
    name: str
    needs_predictions: bool = False

    def __post_init__(self) -> None:
        if self.plan.review:
            raise InputError(f"plan {self.name}: has review points, expected none, or the policy to ask")

    def __call__(self, view: View) -> Plan:
        """The plan, whatever is seen."""
        return self.plan


Decider = NamedPolicy | GivenPlan
Cell = tuple[Decider, NamedPredictor | None]

DEALT = resolve_policy("round_robin")
"""How a batch is dealt out that is there to measure by."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """One policy under one predictor on one batch.

    Attributes:
        batch: its number.
        policy, predictor: their names, ``"-"`` for no predictor.
        gap: the makespans.
        simulated: the run that was predicted.
        measured: a run per repeat.
        records: the files of them.
        pace: ``[repeats]`` what measured makespans were divided by; 1 without yardsticks.
    """

    batch: int
    policy: str
    predictor: str
    gap: Gap
    simulated: Run
    measured: tuple[Run, ...]
    records: tuple[Path, ...]
    pace: Floats

    def row(self) -> dict[str, Any]:
        """The numbers, for a table."""
        gap = self.gap
        return {
            "batch": self.batch,
            "policy": self.policy,
            "predictor": self.predictor,
            "repeats": len(gap.measured_s),
            "simulated_s": gap.simulated_s,
            "measured_s": gap.mean_s,
            "noise_s": gap.noise_s,
            "error": gap.error,
            "pace": float(self.pace.mean()),
            "upper_s": gap.upper_s,
            "lower_s": gap.lower_s,
            **{part.replace(" ", "_") + "_s": seconds for part, seconds in gap.parts().items()},
            "moves": float(np.mean([len(run.moves.request) for run in self.measured])),
            "preemptions": float(np.mean([run.preemptions.sum() for run in self.measured])),
        }


def replay(
    trace: Trace,
    fleet: Fleet,
    engines: Engines,
    policies: Sequence[str | Decider],
    predictors: Sequence[str | NamedPredictor],
    *,
    folder: Path,
    batches: int = 1,
    prompts: int,
    samples: int,
    seed: int = 0,
    atomic: bool = False,
    repeats: int = 1,
    yardstick: bool = False,
    go_on: bool = False,
    progress: Callable[[str], Progress | None] = lambda _: None,
) -> list[Outcome]:
    """Replay every policy under every predictor on the same batches.

    Args:
        trace: what batches are drawn from; lengths are carried out as they are.
        fleet: the engines, with the profile that predicts.
        engines: where to get real ones.
        policies, predictors: specs or what they name; a policy that ignores predictions runs once.
        folder: a new one for records, runs and timelines; with ``go_on``, one that an interrupted study left.
        batches, prompts, samples, seed: what is drawn (:func:`tailopt.trace.transforms.sample_batches`).
        atomic: whether the samples of a group must stay on one engine.
        repeats: how often each is carried out.
        yardstick: whether to measure the pace of the machine before and after each.
        go_on: do only what is not done yet.
        progress: gives, for the name of a replay, who is told of its progress.

    Raises:
        InputError: bad arguments, a plan that cannot be carried out, or a policy that leaves work undone
            (:func:`tailopt.compare.check_work`): this is simulated before an engine starts.
        ReplayError: an engine failed for good; with ``go_on`` the study can be taken up again.
    """
    if repeats < 1:
        raise InputError(f"repeats: expected at least 1, got {repeats}")
    _make(folder, go_on)
    write_profile(fleet.profile, folder / "profile.toml")
    cells = _cells(policies, predictors)
    drawn = sample_batches(trace, batches=batches, prompts=prompts, samples=samples, seed=seed)
    (other,) = _others(trace, batches=1, prompts=prompts, samples=samples, seed=seed)
    outcomes = []

    def pace(where: str) -> Floats:
        if not yardstick:
            return np.ones(len(fleet.engines))
        path = folder / f"pace-{where}.jsonl"
        _carry_out(other, fleet, DEALT, View.at_start(other.trace, fleet), engines, path, progress(path.stem))
        record = read_record(path)
        return pace_of(record.run(), list(record.steps()))

    for number, batch in enumerate(drawn):
        certificate = solve(Problem(batch.trace, fleet, atomic))
        views = [_view(batch, fleet, atomic, predictor) for _, predictor in cells]
        predicted = [_simulated(number, batch, cell, view) for cell, view in zip(cells, views, strict=True)]
        records: list[list[Path]] = [[] for _ in cells]
        paces = np.ones((repeats, len(cells), len(fleet.engines)))
        for repeat in range(repeats):
            around = [pace(f"{number}-{repeat}-0")]
            for cell, view, mine in zip(cells, views, records, strict=True):
                path = folder / f"{_name(number, cell)}-{repeat}.jsonl"
                _carry_out(batch, fleet, cell[0], view, engines, path, progress(path.stem))
                mine.append(path)
                around.append(pace(f"{number}-{repeat}-{len(around)}"))
            paces[repeat] = (np.array(around[:-1]) + around[1:]) / 2
        for i, (cell, view) in enumerate(zip(cells, views, strict=True)):
            outcomes.append(
                _outcome(
                    number,
                    batch,
                    fleet,
                    cell,
                    view,
                    predicted[i],
                    records[i],
                    paces[:, i],
                    certificate,
                    atomic,
                )
            )
    return outcomes


def calibrate(
    trace: Trace,
    fleet: Fleet,
    engines: Engines,
    *,
    folder: Path,
    prompts: int,
    samples: int,
    seed: int,
    batches: int = 1,
    go_on: bool = False,
    progress: Progress | None = None,
) -> EngineProfile:
    """The fleet's profile with step times and prefill rate fitted to batches that the study does not draw.

    Their requests are admitted in the order drawn; in one batch they are dealt to the engines in turn, in the
    next one engine gets most of them, as policies do both. Each engine of the fleet gets some, so each shape
    in it is measured. Before, prompts of many lengths go through one by one, for the prefill rate; where it
    cannot be told from these, that of the fleet's profile stays.
    """
    _make(folder, go_on)
    probes = _probes(fleet, min(map(engines.most_tokens, fleet.engines)))
    one_by_one = GivenPlan(_one_by_one(fleet, probes), "one by one")
    todo: dict[Path, tuple[Batch, Decider]] = {folder / "prefill.jsonl": (Batch(probes, None, 0), one_by_one)}
    drawn = _others(trace, batches=batches, prompts=prompts, samples=samples, seed=seed)
    for number, batch in enumerate(drawn):
        policy = _crowded(fleet, batch.trace, number // 2) if number % 2 else DEALT
        todo[folder / f"calibration-{number}.jsonl"] = (batch, policy)
    for path, (batch, policy) in todo.items():
        _carry_out(batch, fleet, policy, View.at_start(batch.trace, fleet), engines, path, progress)
    measured = read_measured(list(todo), level=True)
    fits = {}
    for degree, steps in measured.steps.items():
        try:
            fits[degree] = fit_steps(steps, match_total=True)
        except InputError:
            rate = fleet.profile.shape(degree or fleet.engines[0].tp).prefill_tokens_per_s
            fits[degree] = fit_steps(steps, match_total=True, prefill_tokens_per_s=rate)
    fitted = fitted_profile(f"{fleet.profile.name}-fitted", fleet.profile, fits, measured)
    return replace(fitted, shapes={**fleet.profile.shapes, **fitted.shapes})


def pace_of(run: Run, steps: Sequence[Line]) -> Floats:
    """``[engines]`` the time that the steps of each took, over what its profile says of them.

    The pace of all together for one that took none.
    """
    engine = np.array([step["engine"] for step in steps])
    took_s, told_s = (
        np.bincount(engine, seconds, len(run.engines))
        for seconds in (np.array([step["s"] for step in steps]), profiled_s(run, steps))
    )
    none = told_s == 0
    took_s[none], told_s[none] = took_s.sum(), told_s.sum()
    pace: Floats = took_s / told_s
    return pace


def _pace_of_last(run: Run, fleet: Fleet, pace: Floats) -> float:
    """Of ``pace``, ``[engines of fleet]``, that of the GPUs on which the run came to its end."""
    done = np.where(run.completed, run.finish_s, -np.inf)
    last = set(run.engines[run.engine[int(np.argmax(done))]].gpus or ())
    shared = [bool(last & set(engine.gpus or ())) for engine in fleet.engines]
    return float(pace[shared].mean() if any(shared) else pace.mean())


def _others(trace: Trace, *, batches: int, prompts: int, samples: int, seed: int) -> list[Batch]:
    """Batches that the study does not draw, to measure the machine by."""
    return sample_batches(trace, batches=batches, prompts=prompts, samples=samples, seed=seed + 1_000_003)


def _probes(fleet: Fleet, most_tokens: int) -> Trace:
    """Prompts of 32, 64, ... tokens, three of each for every engine, and two tokens for each of them."""
    shapes = [fleet.shape_of(number) for number in range(len(fleet.engines))]
    most = min(min(shape.kv_capacity_tokens // 2, 2 * shape.token_budget) for shape in shapes)
    most = min(most, most_tokens - 2)
    lengths = [1 << power for power in range(5, 12) if 1 << power <= most] or [max(most, 1)]
    each = np.tile(np.repeat(lengths, len(shapes)), 3)
    return Trace.of([[2]] * len(each), prompt_tokens=each.tolist(), name="probes")


def _one_by_one(fleet: Fleet, probes: Trace) -> Plan:
    engines = tuple(replace(engine, max_running=1, limits=()) for engine in fleet.engines)
    order = np.arange(probes.n_requests)
    return Plan(engines, order % len(engines), order)


def _crowded(fleet: Fleet, trace: Trace, turn: int) -> GivenPlan:
    """Three of four requests to one engine, another each turn; the rest to the others in turn."""
    m, order = len(fleet.engines), np.arange(trace.n_requests)
    away = np.where(order % 4, 0, 1 + order // 4 % max(1, m - 1))
    return GivenPlan(Plan(fleet.engines, (turn + away) % m, order), "crowded")


def _cells(policies: Sequence[str | Decider], predictors: Sequence[str | NamedPredictor]) -> list[Cell]:
    """Each policy with each predictor that it needs."""
    told = [one if isinstance(one, NamedPredictor) else resolve_predictor(one) for one in predictors]
    cells: list[Cell] = []
    for policy in (resolve_policy(one) if isinstance(one, str) else one for one in policies):
        if not policy.needs_predictions:
            cells.append((policy, None))
        elif told:
            cells += [(policy, predictor) for predictor in told]
        else:
            raise InputError(f"policy {policy.name}: needs predicted lengths, expected a predictor")
    return cells


def _make(folder: Path, go_on: bool) -> None:
    try:
        if folder.exists() and not go_on:
            raise InputError(f"{folder}: exists, expected a new folder (or to go on with it)")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror})") from None


def _name(batch: int, cell: Cell) -> str:
    policy, predictor = cell
    told = NO_PREDICTOR if predictor is None else predictor.name
    return re.sub(r"[^\w.=]+", "_", f"{batch}-{policy.name}-{told}").strip("_")


def _view(batch: Batch, fleet: Fleet, atomic: bool, predictor: NamedPredictor | None) -> View:
    return View.at_start(
        batch.trace,
        fleet,
        None if predictor is None else predictor(batch),
        scenario_tokens=None if predictor is None else predictor.scenarios(batch),
        atomic=atomic,
        seed=batch.seed,
    )


def _simulated(number: int, batch: Batch, cell: Cell, view: View) -> Run:
    """What is predicted of a policy, which must do all the work."""
    run = simulate_policy(batch.trace, cell[0], view)
    _check_work(run, number, batch, cell)
    return run


def _check_work(run: Run, number: int, batch: Batch, cell: Cell) -> None:
    policy, predictor = cell
    told = NO_PREDICTOR if predictor is None else predictor.name
    check_work(run, batch.trace, number, policy.name, told)


def _carry_out(
    batch: Batch,
    fleet: Fleet,
    policy: Decider,
    view: View,
    engines: Engines,
    path: Path,
    progress: Progress | None,
) -> None:
    """One replay, unless its record is complete; what was begun is brought to its end."""
    if path.exists() and path.stat().st_size:
        try:
            found = read_record(path)
        except InputError as error:
            if "before the first plan" not in str(error):
                raise
            path.unlink()
        else:
            if found.trace.sha256 != batch.trace.sha256:
                raise InputError(f"{path}: is of another batch; go on with the options of the start")
            if not found.ledger().all_finished:
                resume(path, policy, view, engines, progress=progress)
            return
    path.unlink(missing_ok=True)
    execute(batch.trace, fleet, policy, view, engines, record=path, progress=progress)


def _outcome(
    number: int,
    batch: Batch,
    fleet: Fleet,
    cell: Cell,
    view: View,
    simulated: Run,
    paths: Sequence[Path],
    pace: Floats,
    certificate: Certificate,
    atomic: bool,
) -> Outcome:
    policy, predictor = cell
    trace = batch.trace
    records = [read_record(path) for path in paths]
    measured = [record.run() for record in records]
    divisor = np.array([_pace_of_last(run, fleet, mine) for run, mine in zip(measured, pace, strict=True)])
    for path, run in zip(paths, measured, strict=True):
        _check_work(run, number, batch, cell)
        if not path.with_suffix(".run").exists():
            write_run(run, path.with_suffix(".run"))
        runs = {"predicted": simulated, "measured": run}
        write_side_by_side(runs, trace, path.with_suffix(".json"))
    gap = Gap(
        measured_s=np.array([run.makespan_s for run in measured]) / divisor,
        repriced_s=np.array(
            [repriced_s(run, list(record.steps())) for run, record in zip(measured, records, strict=True)]
        ),
        simulated_s=simulated.makespan_s,
        told_s=_told_s(trace, fleet, view.predicted_tokens, certificate, atomic),
        upper_s=certificate.upper_s,
        lower_s=certificate.lower_s,
    )
    told = NO_PREDICTOR if predictor is None else predictor.name
    return Outcome(number, policy.name, told, gap, simulated, tuple(measured), tuple(paths), divisor)


def _told_s(
    trace: Trace, fleet: Fleet, predicted: Floats | None, certificate: Certificate, atomic: bool
) -> float:
    """Simulated with the true lengths, the best static plan for the predicted ones."""
    if predicted is None:
        return certificate.upper_s
    lengths = np.maximum(np.rint(predicted), 1).astype(np.int64)
    if (lengths == trace.output_tokens).all():
        return certificate.upper_s
    cache = min(
        shape.kv_capacity_tokens // shape.block_tokens * shape.block_tokens
        for shape in map(fleet.shape_of, range(len(fleet.engines)))
    )
    lengths = np.minimum(lengths, np.maximum(cache - trace.context_tokens, 1))
    best = solve(Problem(replace(trace, output_tokens=lengths), fleet, atomic))
    return simulate(trace, fleet, best.plan).makespan_s
