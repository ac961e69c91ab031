"""The Run: what happened to each request when a plan was carried out, by the simulator or by engines."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tailopt.arrays import Floats, Ints
from tailopt.plan import Fleet, Plan


@dataclass(frozen=True, eq=False)
class EngineLog:
    """What one fleet's engines did, event by event; engine by engine and, within one, in time order.

    Between two events of an engine the same requests run, each gaining a token a step.

    Attributes:
        engine: ``[k]`` which engine.
        step: ``[k]`` how many steps it has taken.
        time_s: ``[k]`` when.
        running: ``[k]`` requests running in the next step.
        kv_tokens: ``[k]`` tokens of KV cache in use in the next step, in whole blocks.
    """

    engine: Ints
    step: Ints
    time_s: Floats
    running: Ints
    kv_tokens: Ints


@dataclass(frozen=True, eq=False)
class Stays:
    """When each request ran where; a preempted one has several stays. In no particular order.

    Attributes:
        request, engine: ``[k]`` who and where.
        start_s, end_s: ``[k]`` admitted, and finished or preempted.
    """

    request: Ints
    engine: Ints
    start_s: Floats
    end_s: Floats


@dataclass(frozen=True, eq=False)
class Run:
    """One batch carried out.

    Attributes:
        backend: who carried it out (``"simulated"``, or the engine's name and version).
        fleet, plan: what was carried out.
        engine: ``[n]`` where each request ran.
        start_s: ``[n]`` when it was first admitted.
        first_token_s: ``[n]`` when its first token was there.
        finish_s: ``[n]`` when its last token was there.
        output_tokens: ``[n]`` tokens generated.
        preemptions: ``[n]`` how often it lost its KV cache and had to queue again.
        log: the engines' concurrency over time.
        stays: when each request ran where.
    """

    backend: str
    fleet: Fleet
    plan: Plan
    engine: Ints
    start_s: Floats
    first_token_s: Floats
    finish_s: Floats
    output_tokens: Ints
    preemptions: Ints
    log: EngineLog
    stays: Stays

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last request is done."""
        return float(self.finish_s.max())

    @cached_property
    def engine_finish_s(self) -> Floats:
        """``[engines]`` when each engine ran dry for good; 0 if it never ran."""
        finish = np.zeros(len(self.fleet.engines))
        np.maximum.at(finish, self.engine, self.finish_s)
        return finish

    @property
    def idle_share(self) -> float:
        """Share of the GPU-seconds until the makespan in which a GPU had no request to decode.

        GPUs that belong to no engine are idle throughout.
        """
        busy = float(sum(e.tp * t for e, t in zip(self.fleet.engines, self.engine_finish_s, strict=True)))
        return 1.0 - busy / (self.fleet.gpus * self.makespan_s)

    @property
    def tokens_per_gpu_s(self) -> float:
        """Output tokens per GPU and second of makespan."""
        return float(self.output_tokens.sum()) / (self.fleet.gpus * self.makespan_s)
