"""``tailopt rollout``: real prompts, real weights, real engines, a policy live; what comes out is a trace."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailopt.cli.errors import plain_errors
from tailopt.cli.inputs import check_range
from tailopt.cli.options import GoOnOption, PythonOption, QuietOption, SeedOption
from tailopt.cli.output import interrupts, write_out
from tailopt.cli.replay import Backend, BackendOption, Device, live_progress, started

if TYPE_CHECKING:
    from tailopt.plan import Fleet
    from tailopt.replay.recorder import Record

POLICY = "shared_queue"


def rollout(
    prompts: Annotated[
        str, typer.Argument(metavar="PROMPTS", help="JSON lines with prompt, messages or tokens; id.")
    ],
    model: Annotated[str, typer.Option("--model", metavar="FOLDER", help="Weights, config and tokenizer.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Record, trace and steps; a new folder.")
    ],
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Responses to a prompt.")] = 8,
    cap: Annotated[
        int, typer.Option("--cap", metavar="TOKENS", help="Tokens that a response may have at most.")
    ] = 1024,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="Of sampling; 0: the likeliest token.")
    ] = 1.0,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="SPEC",
            help=f"NAME, NAME(arg=value) or file.py:function. Default: {POLICY}.",
            show_default=False,
        ),
    ] = POLICY,
    shape: Annotated[
        str | None, typer.Option("--shape", metavar="SHAPE", help="Engines. Default: one per core.")
    ] = None,
    running: Annotated[
        int, typer.Option("--running", metavar="N", help="Requests that an engine runs together.")
    ] = 32,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="FILE",
            help="Engine profile, in place of --running. Default: limits that fit the model.",
        ),
    ] = None,
    go_on: GoOnOption = False,
    python: PythonOption = None,
    backend: BackendOption = Backend.VLLM,
    device: Annotated[Device, typer.Option("--device", help="What engines compute on.")] = Device.CPU,
    seed: SeedOption = 0,
    quiet: QuietOption = False,
) -> None:
    """Answer real prompts on real engines, responses ending by themselves, and write a trace.

    The folder holds record.jsonl (all that happened, texts as tokens), trace.parquet and steps.parquet.
    Example: tailopt rollout prompts.jsonl --model FOLDER --samples 8 --out run1
    """
    with plain_errors():
        from tailopt.errors import InputError
        from tailopt.policies import resolve_policy
        from tailopt.replay.recorder import read_record
        from tailopt.replay.rollout import free_batch, roll_out, step_table
        from tailopt.replay.transformers import transformers_python
        from tailopt.replay.vllm import vllm_python
        from tailopt.trace.reading import write_trace

        for option, value, least in (("--samples", samples, 1), ("--cap", cap, 1), ("--seed", seed, 0),
                                     ("--running", running, 1)):  # fmt: skip
            check_range(option, value, least)
        if not 0 <= temperature <= 100:
            raise InputError(f"--temperature: expected 0 to 100, got {temperature:g}")
        decider = resolve_policy(policy)
        if decider.needs_predictions:
            raise InputError(f"--policy: {policy} needs predicted lengths, and here there are none")
        find = {Backend.VLLM: vllm_python, Backend.TRANSFORMERS: transformers_python}[backend]
        interpreter = find(python)
        asked = {
            "prompts": Path(prompts).name, "model": Path(model).name, "samples": samples, "cap": cap,
            "temperature": temperature, "policy": policy, "seed": seed,
        }  # fmt: skip
        record = out / "record.jsonl"
        found = _begun(record, asked) if go_on else None
        if found is None:
            if out.exists() and not go_on:
                raise InputError(f"{out}: exists, expected a new folder (or --go-on)")
            batch = free_batch(prompts, python=interpreter, model=model, samples=samples, cap=cap)
            caps, stop = batch.caps, batch.stop
            longest = cap + int(batch.caps.context_tokens.max())
            fleet = _fleet(model, engine, shape, running, longest)
            out.mkdir(parents=True, exist_ok=True)
            record.unlink(missing_ok=True)
        else:
            batch, caps, stop, fleet = None, found.trace, found.head["stop"], found.fleet
        with contextlib.ExitStack() as stack:
            stack.enter_context(interrupts())
            told = stack.enter_context(live_progress(caps.n_requests, show=not quiet))
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            engines = stack.enter_context(
                started(backend)(
                    fleet.profile, python=interpreter, model=model, weights="auto", stop=stop,
                    temperature=temperature, device=device.value, more={"seed": seed},
                )
            )  # fmt: skip
            run, trace = roll_out(
                batch, fleet, decider, engines, record, progress=told("rollout"), about={"rollout": asked}
            )
        write_trace(trace, out / "trace.parquet")
        step_table(read_record(record)).write_parquet(out / "steps.parquet")
        lengths = trace.output_tokens
        write_out(
            f"{out}: {trace.n_requests} responses to {trace.n_prompts} prompts, {int(lengths.sum())} tokens, "
            f"{int(trace.capped.sum())} at the cap; {run.makespan_s:.1f} s on {fleet}, {run.backend}\n"
        )


def _fleet(model: str, engine: str | None, shape: str | None, running: int, longest: int) -> "Fleet":
    import os

    from tailopt.engine.catalogue import load_engine
    from tailopt.errors import InputError
    from tailopt.plan import Fleet
    from tailopt.replay.rollout import model_profile

    cores = len(os.sched_getaffinity(0))
    profile = (
        model_profile(model, cores, max_running=running, longest=longest)
        if engine is None
        else load_engine(engine)
    )
    smallest = min(profile.shapes)
    try:
        return Fleet.of(profile, shape or f"{max(cores // smallest, 1)}xTP{smallest}")
    except InputError as error:
        raise InputError(f"--shape: {error}") from None


def _begun(record: Path, asked: dict[str, Any]) -> "Record | None":
    """What is to be gone on with; None if nothing was begun."""
    from tailopt.errors import InputError
    from tailopt.replay.recorder import read_record

    if not record.exists() or not record.stat().st_size:
        return None
    try:
        found = read_record(record)
    except InputError as error:
        if "before the first plan" not in str(error):
            raise
        return None
    if (was := found.head.get("rollout")) != asked:
        changed = [key for key in asked if not isinstance(was, dict) or was.get(key) != asked[key]]
        raise InputError(f"{record}: was begun otherwise ({', '.join(changed)}); go on with the same options")
    return found
