"""transformers' continuous batching as an engine, where vLLM cannot be had; all else is as with vLLM.

Needs a Python with torch and transformers 5: the one that the caller or ``TAILOPT_VLLM_PYTHON`` names, else
this one. What this engine does otherwise than vLLM is told in :mod:`tailopt.replay.transformers_worker`.
"""

import importlib.util
import json
import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from tailopt.engine.profile import EngineProfile
from tailopt.errors import InputError
from tailopt.plan import Engine
from tailopt.replay.vllm import PYTHON, VllmEngines, version_of, vllm_python

WORKER = Path(__file__).with_name("transformers_worker.py")


def transformers_python(python: str | Path | None = None) -> str:
    """The interpreter that has transformers: the one given, the one of the environment, or this one.

    Raises:
        InputError: if none of them is there.
    """
    if python or PYTHON in os.environ:
        return vllm_python(python)
    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            f"transformers: not installed here; name a Python that has it, with --python or {PYTHON}"
        )
    return sys.executable


class TransformersEngines(VllmEngines):
    """Engines of transformers on this machine; arguments as for :class:`tailopt.replay.vllm.VllmEngines`.

    Raises:
        InputError: if there is no Python that has transformers.
    """

    def __init__(self, profile: EngineProfile, *, python: str | Path | None = None, **more: Any) -> None:
        super().__init__(profile, python=transformers_python(python), **more)

    @cached_property
    def name(self) -> str:
        """``transformers`` with its version."""
        return f"transformers {version_of(self.python, 'transformers')}"

    def configuration(self, engine: Engine) -> dict[str, Any]:
        """What its worker is told.

        Raises:
            InputError: if it is to speculate, or to be one engine on several GPUs.
        """
        if engine.speculation is not None:
            raise InputError("engine: speculation: transformers' continuous batching has none")
        if self.device == "cuda" and engine.tp > 1:
            raise InputError(f"engine: TP{engine.tp}: expected TP1, one GPU for each engine of transformers")
        return super().configuration(engine)

    def command(self, engine: Engine) -> list[str]:
        """What starts its worker."""
        return [self.python, "-P", str(WORKER), json.dumps(self.configuration(engine))]
