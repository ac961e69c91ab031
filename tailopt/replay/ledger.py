"""The ledger: what is known of a replay, line by line, and the Run that follows from it.

Whatever happens in a replay is one line, a dictionary with a ``kind``. The live driver and whoever reads a
record apply the same lines to the same ledger, so that a run read from its record *is* the run. Times ``t``
are seconds since the start of the batch; ``engine`` numbers all engines that ever were.

===========  ==========================================================================================
``plan``     ``plan`` (as :mod:`tailopt.plan_file` writes it) for ``request``; the ``reason`` of the review
             and when it was reached, ``at``, or null. Its engines go on (:meth:`Engine.same_as`) or are new
``open``     ``engine`` is there; it took ``wake_s``
``submit``   ``items`` ``[key, request]`` to ``engine``: a key is used once, a request has several in turn
``step``     of ``engine``: the worker's event (:mod:`tailopt.replay.worker`)
``abort``    ``keys`` ``[key, was running]`` left ``engine``
``end``      ``requests`` have ended with what they have; ``completed`` if that is all they were to get
``lost``     ``engine`` died, and all that was there was lost but the tokens that it had told of
``close``    ``engine`` is gone for a switch; it took ``drain_s`` and ``sleep_s``
===========  ==========================================================================================
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tailopt.arrays import Bools
from tailopt.plan import Engine, Fleet, Plan, ReviewPoint
from tailopt.plan_file import plan_from_json
from tailopt.replay.errors import ReplayError
from tailopt.run import EngineLog, Moves, Review, Run, Spans, Stays
from tailopt.trace import Trace

Line = Mapping[str, Any]


@dataclass
class Place:
    """One engine that ever was, or will be as soon as it is awake."""

    engine: Engine
    blocks: int
    index: int | None  # among the engines of the last plan; None if it is not one of them
    open_s: float | None = None
    wake_s: float = 0.0
    close_s: float | None = None
    drain_s: float = 0.0
    sleep_s: float = 0.0
    steps: int = 0
    last_s: float = 0.0
    free_blocks: int = 0
    worked: bool = False  # since the last plan
    finished: int = 0  # likewise
    there: dict[int, int] = field(default_factory=dict)  # key -> request, in order of submission


class Ledger:
    """What is known so far; changed by :meth:`apply` only.

    With ``free``, responses end by themselves: the lengths of the trace are what each may have at most.
    """

    def __init__(self, trace: Trace, fleet: Fleet, *, free: bool = False) -> None:
        n = trace.n_requests
        self.trace, self.fleet, self.free = trace, fleet, free
        self.plan: Plan | None = None  # the last one
        self.first_plan: Plan | None = None
        self.planned = np.arange(n)  # the requests of the last plan
        self.left_then, self.generated_then, self.then_s = n, np.zeros(n, dtype=np.int64), 0.0
        self.asked = trace.output_tokens.copy()
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.generated = np.zeros(n, dtype=np.int64)
        self.finished = np.zeros(n, dtype=np.bool_)
        self.completed = np.zeros(n, dtype=np.bool_)
        self.running = np.zeros(n, dtype=np.bool_)
        self.key: list[int | None] = [None] * n
        self.engine = np.full(n, -1, dtype=np.int64)
        self.preemptions = np.zeros(n, dtype=np.int64)
        self.start_s, self.first_token_s, self.finish_s = (np.full(n, np.nan) for _ in range(3))
        self.places: list[Place] = []
        self.engines = fleet  # those of the last plan
        self.now_s = 0.0
        self.keys = 0
        self.reviews: list[Review] = []
        self._log: list[tuple[int, int, float, int, int]] = []
        self._stays: list[tuple[int, int, float, float]] = []
        self._since = np.full(n, np.nan)
        self._left: dict[int, tuple[int, float]] = {}
        self._moves: list[tuple[int, int, int, float, float, int, bool]] = []

    @property
    def capped(self) -> Bools:
        """``[n]`` whether a request is finished with fewer tokens than it has."""
        at_most = self.free & (self.generated >= self.trace.output_tokens)
        return self.finished & (~self.completed | at_most)

    @property
    def all_finished(self) -> bool:
        """Whether nothing is left to do."""
        return bool(self.finished.all())

    def engine_at(self, request: int) -> int:
        """Where a request runs or waits, -1 if nowhere."""
        return int(self.engine[request]) if self.key[request] is not None else -1

    def apply(self, line: Line) -> None:
        """Take note of one line.

        Raises:
            ReplayError: if it cannot be true: tokens of a request that is not there, more than were asked
                for, an end before the last one.
        """
        self.now_s = max(self.now_s, float(line["t"]) + float(line.get("s", 0.0)))
        kind = line["kind"]
        if kind not in _NOTES:
            raise ReplayError(f"record: unknown kind of line {kind!r:.40}")
        _NOTES[kind](self, line)

    def _plan(self, line: Line) -> None:
        plan = plan_from_json(line["plan"], where="record: plan")
        self.plan, self.planned = plan, np.asarray(line["request"], dtype=np.int64)
        limits = self.trace.output_tokens[self.planned]
        if plan.max_tokens is not None:
            limits = np.minimum(limits, plan.max_tokens)
        self.asked[self.planned] = limits
        if line["reason"] is None:
            self.first_plan = plan
        else:
            self.reviews.append(Review(line["at"], ReviewPoint(*line["reason"]), plan, self.planned))
        self.left_then, self.generated_then = int((~self.finished).sum()), self.generated.copy()
        self.then_s = float(line["t"])
        self.engines = Fleet(self.fleet.profile, plan.engines, self.fleet.gpus)
        before = [place for place in self.places if place.index is not None]
        for place in before:
            place.index = None
        for index, engine in enumerate(self.engines.engines):
            goes_on = (place for place in before if place.index is None and place.engine.same_as(engine))
            if (found := next(goes_on, None)) is None:
                shape = self.engines.shape_of(index)
                found = Place(engine, shape.kv_capacity_tokens // shape.block_tokens, index)
                self.places.append(found)
            found.index = index
        for place in self.places:
            place.worked, place.finished = bool(place.there), 0

    def _open(self, line: Line) -> None:
        place = self.places[line["engine"]]
        if place.open_s is None:  # else it died and is there again
            place.open_s, place.wake_s, place.last_s = line["t"], line["wake_s"], line["t"]
        place.free_blocks = place.blocks

    def _submit(self, line: Line) -> None:
        number = line["engine"]
        for key, request in line["items"]:
            if self.key[request] is not None or self.finished[request]:
                raise ReplayError(f"request {request}: submitted while it is elsewhere, or finished")
            self.keys = max(self.keys, key + 1)
            self.key[request], self.engine[request] = key, number
            self.places[number].there[key], self.places[number].worked = request, True
            if (left := self._left.pop(request, None)) is not None and left[0] != number:
                tokens = int(self.trace.context_tokens[request]) + len(self.tokens[request])
                self._moves.append((request, left[0], number, left[1], line["t"], tokens, False))

    def _step(self, line: Line) -> None:
        number, begin_s = line["engine"], float(line["t"])
        place, end_s = self.places[number], begin_s + float(line["s"])
        told_s = float(line["s"]) - float(line.get("engine_s", line["s"]))  # spent on commands
        decided_s = begin_s + max(told_s, 0.0)
        for key in line["out"]:
            request = self._there(place, key)
            self.preemptions[request] += 1
            self._leave(request, decided_s)
        for key in line["in"]:
            request = self._there(place, key)
            self.running[request], self._since[request] = True, decided_s
            if np.isnan(self.start_s[request]):
                self.start_s[request] = decided_s
        self._log.append((number, place.steps, begin_s, line["run"], line["kv"]))
        place.steps, place.last_s, place.free_blocks = place.steps + 1, end_s, line["free"]
        for key, *new in line["new"]:
            request = self._there(place, key)
            self.tokens[request] += new
            self.generated[request] += len(new)
            if len(self.tokens[request]) > self.asked[request]:
                raise ReplayError(
                    f"engine {number}: gave request {request} {len(self.tokens[request])} tokens, "
                    f"expected {self.asked[request]}"
                )
            if np.isnan(self.first_token_s[request]):
                self.first_token_s[request] = end_s
        for key in line["done"]:
            request = self._there(place, key)
            length = int(self.trace.output_tokens[request])
            cut = len(self.tokens[request]) == self.asked[request] < length
            if self.free:
                self.asked[request] = len(self.tokens[request])
            if len(self.tokens[request]) != self.asked[request]:
                raise ReplayError(
                    f"engine {number}: ended request {request} after {len(self.tokens[request])} tokens, "
                    f"expected {self.asked[request]}"
                )
            self._leave(request, end_s)
            self._gone(place, key)
            place.finished += 1
            self._finish(request, end_s, completed=not cut)

    def _abort(self, line: Line) -> None:
        place = self.places[line["engine"]]
        for key, ran in line["keys"]:
            request = self._there(place, key)
            if ran:
                self._left[request] = (line["engine"], line["t"])
                self._leave(request, line["t"])
            self._gone(place, key)

    def _end(self, line: Line) -> None:
        self.left_then -= len(line["requests"])  # it is by a plan that they end so
        for request in line["requests"]:
            self._left.pop(request, None)
            whole = bool(self.generated[request] >= self.trace.output_tokens[request])
            self._finish(request, line["t"], completed=line["completed"] and whole)

    def _lost(self, line: Line) -> None:
        place = self.places[line["engine"]]
        self._log.append((line["engine"], place.steps, place.last_s, 0, 0))
        for key, request in list(place.there.items()):
            if self.running[request]:
                self.preemptions[request] += 1
                self._leave(request, place.last_s)
            self._gone(place, key)
        place.free_blocks = place.blocks

    def _close(self, line: Line) -> None:
        place = self.places[line["engine"]]
        place.index = None
        place.close_s, place.drain_s, place.sleep_s = line["t"], line["drain_s"], line["sleep_s"]
        self._log.append((line["engine"], place.steps, place.last_s, 0, 0))

    def _there(self, place: Place, key: int) -> int:
        if key not in place.there:
            raise ReplayError(f"an engine spoke of submission {key}, which is not there")
        return place.there[key]

    def _gone(self, place: Place, key: int) -> None:
        self.key[place.there.pop(key)] = None

    def _leave(self, request: int, time_s: float) -> None:
        if self.running[request]:
            self._stays.append((request, int(self.engine[request]), float(self._since[request]), time_s))
        self.running[request] = False

    def _finish(self, request: int, time_s: float, *, completed: bool) -> None:
        self.finished[request], self.completed[request] = True, completed
        self.finish_s[request] = time_s

    def run(self, backend: str) -> Run:
        """The run, once all are finished."""
        assert self.first_plan is not None
        assert self.all_finished
        makespan_s = float(self.finish_s.max())
        ends = [
            (number, place.steps, place.last_s, 0, 0)
            for number, place in enumerate(self.places)
            if place.open_s is not None and place.close_s is None
        ]
        log = sorted([*self._log, *ends], key=lambda event: event[:2])
        spans = np.array(
            [
                (
                    makespan_s if p.open_s is None else p.open_s,
                    p.wake_s,
                    makespan_s if p.close_s is None else p.close_s,
                    p.drain_s,
                    p.sleep_s,
                )
                for p in self.places
            ]
        )
        moves = list(zip(*self._moves, strict=True)) or [()] * 7
        kinds = (np.int64, np.int64, np.int64, np.float64, np.float64, np.int64, np.bool_)
        return Run(
            backend=backend,
            fleet=Fleet(self.fleet.profile, self.first_plan.engines, self.fleet.gpus),
            plan=self.first_plan,
            engine=self.engine.copy(),
            start_s=self.start_s.copy(),
            first_token_s=self.first_token_s.copy(),
            finish_s=self.finish_s.copy(),
            output_tokens=self.generated.copy(),
            preemptions=self.preemptions.copy(),
            log=EngineLog(*_columns(log, (np.int64, np.int64, np.float64, np.int64, np.int64))),
            stays=Stays(*_columns(self._stays, (np.int64, np.int64, np.float64, np.float64))),
            engines=tuple(place.engine for place in self.places),
            spans=Spans(*(np.ascontiguousarray(column) for column in spans.T)),
            completed=self.completed.copy(),
            moves=Moves(*(np.array(c, dtype=k) for c, k in zip(moves, kinds, strict=True))),
            reviews=tuple(self.reviews),
        )


_NOTES = {
    "plan": Ledger._plan,
    "open": Ledger._open,
    "submit": Ledger._submit,
    "step": Ledger._step,
    "abort": Ledger._abort,
    "end": Ledger._end,
    "lost": Ledger._lost,
    "close": Ledger._close,
}


def _columns(rows: list[Any], kinds: tuple[type, ...]) -> list[np.ndarray]:
    columns = list(zip(*rows, strict=True)) or [()] * len(kinds)
    return [np.array(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)]


def trace_of(run: Run, trace: Trace, *, free: bool = False) -> Trace:
    """What a run generated, as a trace: lengths as measured, given up ones flagged as capped.

    With ``free``, those that ended because they reached the length in ``trace`` were capped too.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.simulate import simulate
    >>> fleet = Fleet.of(load_engine("h100-llama-3.1-8b"), "1xTP1")
    >>> trace = Trace.of([[30, 50]])
    >>> trace_of(simulate(trace, fleet, Plan.of_queues(fleet.engines, [[0, 1]])), trace).output_tokens
    array([30, 50])
    """
    return replace(
        trace,
        name=f"{trace.name} (replayed)",
        source=f"{trace.source}; replayed on {run.backend}",
        output_tokens=np.maximum(run.output_tokens, 1),
        capped=~run.completed | ((run.output_tokens >= trace.output_tokens) if free else trace.capped),
    )
