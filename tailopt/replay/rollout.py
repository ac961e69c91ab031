"""Free mode: real prompts from a file, real weights, responses that end by themselves, the policy live.

A file of prompts is JSON lines, one prompt each, with ``prompt`` (a text), ``messages`` (of a chat) or
``tokens`` (ids), and ``id`` if it shall have a name. The tokenizer and the chat template are the model's own;
they run where the engine does (:mod:`tailopt.replay.prompt_worker`). Each prompt is answered several times,
with so many tokens at most: these caps are the batch, and what comes out is a Trace.

    prompts --tokenizer--> batch (caps) --policy, engines--> record --> Run, Trace, table of steps

All there is to know is in the record: a rollout that was interrupted goes on from it alone.
"""

import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailopt.engine.profile import EngineProfile
from tailopt.errors import InputError, one_line
from tailopt.plan import Fleet, Policy, View
from tailopt.replay.backend import Engines, Progress
from tailopt.replay.execute import execute, resume
from tailopt.replay.ledger import trace_of
from tailopt.replay.recorder import Record, read_record
from tailopt.replay.vllm import tiny_profile
from tailopt.run import Run
from tailopt.trace import Trace

if TYPE_CHECKING:
    import polars as pl

WORKER = Path(__file__).with_name("prompt_worker.py")
KINDS = {"prompt": str, "messages": list, "tokens": list}


@dataclass(frozen=True, eq=False)
class FreeBatch:
    """What is to be answered.

    Attributes:
        caps: a request per sample; its output tokens are what it may have at most.
        tokens: the prompt of each, as token ids.
        stop: the tokens that end a response.
    """

    caps: Trace
    tokens: tuple[tuple[int, ...], ...]
    stop: tuple[int, ...]


def read_prompts(path: str | Path) -> tuple[list[str], list[Any]]:
    """The names of the prompts, and the prompts, of a file of JSON lines.

    Raises:
        InputError: if it cannot be read, or a line is no prompt, or two have the same name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "prompts.jsonl"
    ...     _ = file.write_text('{"id": "sky", "prompt": "Why is the sky blue?"}\\n{"tokens": [5, 9]}\\n')
    ...     read_prompts(file)
    (['sky', '2'], ['Why is the sky blue?', [5, 9]])
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    names, prompts = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        kind = next((k for k in KINDS if isinstance(row, dict) and k in row), None)
        if kind is None or not isinstance(row[kind], KINDS[kind]) or not row[kind]:
            raise InputError(
                f"{path}: line {number}: expected a JSON object with prompt (a text), messages or tokens"
            )
        if kind == "tokens" and not all(type(one) is int and one >= 0 for one in row[kind]):
            raise InputError(f"{path}: line {number}: tokens: expected numbers from 0 on")
        names.append(str(row.get("id", number)))
        prompts.append(row[kind])
    if not prompts:
        raise InputError(f"{path}: empty, expected a prompt a line")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{path}: two prompts have the id {twice!r}")
    return names, prompts


def free_batch(
    path: str | Path, *, python: str | Path, model: str | Path, samples: int, cap: int
) -> FreeBatch:
    """Each prompt of a file so many times, with at most ``cap`` tokens of output.

    Raises:
        InputError: as :func:`read_prompts`, or the model has no tokenizer that works.
    """
    names, prompts = read_prompts(path)
    command = [str(python), "-P", str(WORKER), str(model)]
    found = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=False)
    if found.returncode:
        *_, last = found.stderr.strip().splitlines() or ["it ended"]
        raise InputError(f"{model}: prompts: {one_line(last)[:200]}")
    answer = json.loads(found.stdout)
    if empty := [name for name, ids in zip(names, answer["tokens"], strict=True) if not ids]:
        raise InputError(f"{path}: prompt {empty[0]!r}: has no tokens")
    caps = Trace.of(
        [[cap] * samples] * len(names),
        prompt_tokens=[len(ids) for ids in answer["tokens"]],
        name=Path(path).stem,
        source=f"{Path(path).name}, answered by {Path(model).name}",
    )
    tokens = tuple(tuple(answer["tokens"][prompt]) for prompt in caps.prompt.tolist())
    return FreeBatch(replace(caps, prompt_ids=tuple(names)), tokens, tuple(answer["stop"]))


def model_profile(
    model: str | Path, cores: int, *, max_running: int, longest: int, precision: str = "float32"
) -> EngineProfile:
    """Limits for engines of a model: a KV cache in which ``max_running`` requests of ``longest`` tokens fit.

    Step times are a guess, as those of :func:`tailopt.replay.vllm.tiny_profile`.

    Raises:
        InputError: if the folder has no configuration that says how large the KV cache of a token is.
    """
    file = Path(model) / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        numbers = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: expected the configuration of a model ({one_line(str(error))})") from None
    tiny = tiny_profile(cores)
    blocks = max_running * (-(-longest // tiny.shape(1).block_tokens) + 1)
    shapes = {
        tp: replace(shape, kv_capacity_tokens=blocks * shape.block_tokens, max_running=max_running)
        for tp, shape in tiny.shapes.items()
    }
    size = 4 if precision == "float32" else 2
    return replace(
        tiny,
        name=f"{Path(model).name.lower()}-cpu",
        model=Path(model).name,
        precision=precision,
        kv_bytes_per_token=numbers * size,
        shapes=shapes,
    )


def roll_out(
    batch: FreeBatch | None,
    fleet: Fleet,
    policy: Policy,
    engines: Engines,
    record: str | Path,
    *,
    progress: Progress | None = None,
    about: Mapping[str, Any] | None = None,
) -> tuple[Run, Trace]:
    """Answer a batch, or go on with the record of one that was interrupted (``batch`` None).

    The engines must be set up for it: real weights, the batch's ``stop``, a temperature.

    Returns:
        What happened, and the lengths that came out, those at the cap flagged as censored.

    Raises:
        InputError, ReplayError: as :func:`tailopt.replay.execute.execute` and ``resume``.
    """
    if batch is None:
        caps = read_record(record).trace
        run = resume(record, policy, View.at_start(caps, fleet), engines, progress=progress)
    else:
        caps = batch.caps
        run = execute(
            caps,
            fleet,
            policy,
            View.at_start(caps, fleet),
            engines,
            record=record,
            given=batch.tokens,
            free=True,
            progress=progress,
            about={"stop": list(batch.stop), **(about or {})},
        )
    return run, rolled_out(run, caps)


def rolled_out(run: Run, caps: Trace) -> Trace:
    """The lengths that came out."""
    return replace(trace_of(run, caps, free=True), name=caps.name, source=f"{caps.source}, on {run.backend}")


def step_table(record: Record) -> "pl.DataFrame":
    """Every step that engines took, one row each: who was in it, what it computed, how long it took.

    ``engine`` and ``step`` number it; ``begin_s`` since the start, ``seconds`` with all between it and the
    step before, ``cpu_s`` of processor time; ``running`` and ``waiting`` requests, ``decoding`` those that
    gained a token, ``context_tokens`` that these hold, ``other_tokens`` computed besides (prompts),
    ``kv_tokens`` of cache in use; ``tokens`` gained, requests ``finished`` and ``preempted``.
    """
    import polars as pl

    told = {
        "begin_s": "t", "seconds": "s", "cpu_s": "cpu_s", "running": "run", "waiting": "wait",
        "decoding": "n", "context_tokens": "K", "other_tokens": "P", "kv_tokens": "kv",
    }  # fmt: skip
    rows: list[dict[str, int | float]] = []
    count: Counter[int] = Counter()
    for step in record.steps():
        rows.append(
            {
                "engine": step["engine"],
                "step": count[step["engine"]],
                **{column: step[key] for column, key in told.items()},
                "tokens": sum(len(gained) - 1 for gained in step["new"]),
                "finished": len(step["done"]),
                "preempted": len(step["out"]),
            }
        )
        count[step["engine"]] += 1
    seconds = ("begin_s", "seconds", "cpu_s")
    schema = {name: pl.Float64 if name in seconds else pl.Int32 for name in rows[0]}
    return pl.DataFrame(rows, schema=schema).sort("engine", "step")
