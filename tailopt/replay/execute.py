"""``execute``: carry out a policy on real engines, and go on with what was interrupted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailopt.drive import drive
from tailopt.errors import InputError
from tailopt.plan import Fleet, Plan, Policy, View
from tailopt.replay.backend import EngineBackend, Engines, Progress
from tailopt.replay.recorder import read_record
from tailopt.run import Run
from tailopt.trace import Trace


def execute(
    trace: Trace,
    fleet: Fleet,
    policy: Policy,
    view: View,
    engines: Engines,
    *,
    record: str | Path | None = None,
    seed: int = 0,
    vocabulary: int | None = None,
    given: Sequence[Sequence[int]] | None = None,
    free: bool = False,
    progress: Progress | None = None,
    about: Mapping[str, Any] | None = None,
) -> Run:
    """Carry out ``policy`` for the batch ``trace`` on real engines and say what happened to each request.

    Args:
        trace: the batch; each response gets exactly the tokens that it had.
        fleet: the engines there are, with the profile that they are set up to match.
        policy, view: who decides, and what is seen at the start (:func:`tailopt.drive.drive`).
        engines: where to get engines (:class:`tailopt.replay.vllm.VllmEngines`).
        record: a new file for everything that happens (:mod:`tailopt.replay.recorder`).
        seed, vocabulary: of the prompts.
        given: prompts as token ids, rather than random ones.
        free: let responses end by themselves, and at the lengths of the trace at the latest.
        progress: told now and then what is left.
        about: more for the header of the record.

    Raises:
        InputError: if the record exists, or a plan cannot be carried out by these engines.
        ReplayError: if it could not be brought to an end; the record holds what was done, and :func:`resume`
            goes on from there.
    """
    if record is not None and Path(record).exists():
        raise InputError(f"{record}: exists, expected a new file (or to resume from it)")
    with EngineBackend(
        trace,
        fleet,
        engines,
        record=record,
        seed=seed,
        vocabulary=vocabulary,
        given=given,
        free=free,
        progress=progress,
        about=about,
    ) as backend:
        return drive(backend, policy, view)


def resume(
    record: str | Path, policy: Policy, view: View, engines: Engines, *, progress: Progress | None = None
) -> Run:
    """Go on with a replay that was interrupted: what is finished stays so, the rest keeps its tokens.

    The last plan stays in force; ``policy`` is asked at the review points to come, as it would have been. The
    clock goes on from the last line of the record, so the time in between does not count; what ran then is
    computed anew by its engine, which does.

    Args:
        record: the file; it is continued.
        policy, view: those of the start.
        engines, progress: as for :func:`execute`.

    Raises:
        InputError: if the file is no record, or ``view`` is of another batch.
        ReplayError: as :func:`execute`.
    """
    found = read_record(record)
    ledger = found.ledger()
    first, last = ledger.first_plan, ledger.plan
    assert first is not None
    assert last is not None
    if ledger.all_finished:
        return ledger.run(found.head["backend"])
    if view.n_requests != found.trace.n_requests or (view.prompt != found.trace.group).any():
        raise InputError(f"{record}: is of another batch, of {found.trace.n_requests} requests")
    begun = False

    def go_on(now: View) -> Plan:
        nonlocal begun
        if begun:
            return policy(now)
        begun = True
        return replace(first, deadline_s=last.deadline_s)

    with EngineBackend(
        found.trace,
        found.fleet,
        engines,
        record=record,
        resume=found,
        seed=found.head["seed"],
        vocabulary=found.head["vocabulary"],
        given=found.head.get("prompts"),
        progress=progress,
    ) as backend:
        return drive(backend, go_on, view)
