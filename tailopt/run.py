"""The Run: what happened to each request when a plan was carried out, by the simulator or by engines."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tailopt.arrays import Bools, Floats, Ints
from tailopt.plan import Engine, Fleet, Plan, ReviewPoint


class Columns:
    """A dataclass of columns that are given, or made when they are first read."""

    @classmethod
    def made_by(cls, column: Callable[[str], Any]) -> Self:
        """Columns that ``column`` makes from their names."""
        new = object.__new__(cls)
        new.__dict__["_column"] = column
        return new

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # called for what is not there
            if "_column" not in self.__dict__ or name not in self.__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self.__dict__[name] = made = self._column(name)
            return made


@dataclass(frozen=True, eq=False)
class EngineLog(Columns):
    """What one fleet's engines did, event by event; engine by engine and, within one, in time order.

    Between two events of an engine the same requests run, each gaining a token a step, or more if it drafts.
    ``simulate`` logs the steps in which something happens, ``simulate_reference`` all.

    Attributes:
        engine: ``[k]`` which engine.
        step: ``[k]`` how many steps it has taken.
        time_s: ``[k]`` when.
        running: ``[k]`` requests running in the next step.
        kv_tokens: ``[k]`` tokens of KV cache in use in the next step, in whole blocks; it grows with the
            tokens gained, block by block, until the next event, so the peak is not in the log of events.
    """

    engine: Ints
    step: Ints
    time_s: Floats
    running: Ints
    kv_tokens: Ints


@dataclass(frozen=True, eq=False)
class Stays(Columns):
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
class Moves:
    """Running requests that went to another engine, in the order of time.

    Attributes:
        request, source: ``[k]`` who, from which engine.
        target: ``[k]`` to which; -1 if it did not run there next: it was given up, or sent elsewhere, before.
        start_s, end_s: ``[k]`` when it left, and when it could be admitted at the target; of KV cache in
            transfer when its request was given up or sent elsewhere: when that was.
        tokens: ``[k]`` tokens of prompt and output that it had.
        migrated: ``[k]`` True if its KV cache was sent, False if the target computed it anew.
    """

    request: Ints
    source: Ints
    target: Ints
    start_s: Floats
    end_s: Floats
    tokens: Ints
    migrated: Bools


@dataclass(frozen=True, eq=False)
class Spans:
    """When each engine was there; one entry per engine that ever was.

    Attributes:
        open_s: ``[k]`` when it could take its first step, 0 for those of the first plan.
        wake_s: ``[k]`` how long it took to wake before that.
        close_s: ``[k]`` when it had ended its last step and sent its last KV cache for a switch; the makespan
            if it was never closed, or ``open_s`` if all was over before.
        drain_s: ``[k]`` from the review to ``close_s``, 0 if it was never closed.
        sleep_s: ``[k]`` how long its GPUs were taken after ``close_s``.
    """

    open_s: Floats
    wake_s: Floats
    close_s: Floats
    drain_s: Floats
    sleep_s: Floats


@dataclass(frozen=True, eq=False)
class Review:
    """The policy was asked again.

    Attributes:
        time_s: when the review point was reached.
        reason: which one.
        plan: the answer, for the requests in ``request``.
        request: those that were unfinished.
    """

    time_s: float
    reason: ReviewPoint
    plan: Plan
    request: Ints


@dataclass(frozen=True, eq=False)
class Run:
    """One batch carried out.

    Attributes:
        backend: who carried it out (``"simulated"``, or the engine's name and version).
        fleet, plan: what was carried out, at first.
        engine: ``[n]`` where each request ran last: into ``engines``, as all engine numbers of a run; -1 if
            it was given up before it ran.
        start_s: ``[n]`` when it was first admitted; NaN if it was given up before.
        first_token_s: ``[n]`` when its first token was there; NaN likewise.
        finish_s: ``[n]`` when its last token was there, or it was given up; its arrival, if it was given up
            before that.
        output_tokens: ``[n]`` tokens generated.
        preemptions: ``[n]`` how often it lost its KV cache and had to queue again.
        log: the engines' concurrency over time.
        stays: when each request ran where.
        engines: all engines that ever were, those of the first plan first.
        spans: when each of them was there.
        completed: ``[n]`` whether it got all its tokens; False if it was given up, or cut short by
            ``max_tokens``.
        moves: running requests that changed engines.
        reviews: when the policy was asked again, and what it answered.
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
    engines: tuple[Engine, ...]
    spans: Spans
    completed: Bools
    moves: Moves
    reviews: tuple[Review, ...] = ()

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last request is done."""
        return float(self.finish_s.max())

    @cached_property
    def engine_finish_s(self) -> Floats:
        """``[engines]`` when each engine ran dry for good; 0 if it never ran."""
        finish = np.zeros(len(self.engines))
        np.maximum.at(finish, self.stays.engine, self.stays.end_s)
        return finish

    @cached_property
    def engine_busy_s(self) -> Floats:
        """``[engines]`` seconds in which each engine had a request to compute."""
        busy = np.zeros(len(self.engines))
        lasts = (np.diff(self.log.engine) == 0) & (self.log.running[:-1] > 0)
        np.add.at(busy, self.log.engine[:-1][lasts], np.diff(self.log.time_s)[lasts])
        return busy

    @property
    def idle_share(self) -> float:
        """Share of the GPU-seconds until the makespan in which a GPU had no request to compute.

        GPUs that belong to no engine are idle, and so are those of engines that wake, wait or sleep.
        """
        busy = float(np.dot([engine.tp for engine in self.engines], self.engine_busy_s))
        return 1.0 - busy / (self.fleet.gpus * self.makespan_s) if self.makespan_s else 0.0

    @property
    def tokens_per_gpu_s(self) -> float:
        """Output tokens per GPU and second of makespan."""
        return (
            float(self.output_tokens.sum()) / (self.fleet.gpus * self.makespan_s) if self.makespan_s else 0.0
        )
