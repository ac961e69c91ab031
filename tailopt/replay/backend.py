"""A backend of real engines: carries out plans through links to engines, and keeps the ledger.

The driver's part of the work, the same for any engine: it waits for arrivals, gives the shared queue to
engines with room (the rule of :mod:`tailopt.simulate.reference`), notices review points, stops everybody at
the end of their steps, takes requests away and submits them elsewhere with the tokens they have, opens and
closes engines, and starts an engine that died anew. What an engine does within is its own affair.

A review point is noticed when the event that crosses it is read, some tenths of a millisecond after it
happened; every engine then ends the step it is in, which may be the one after.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np

from tailopt.arrays import Bools, Ints
from tailopt.drive import State
from tailopt.errors import InputError
from tailopt.plan import DROPPED, SHARED_QUEUE, Engine, Fleet, Plan, ReviewPoint
from tailopt.plan_file import plan_to_json
from tailopt.replay.errors import ReplayError
from tailopt.replay.ledger import Ledger, Line
from tailopt.replay.process import Link, Message, wait_for_any
from tailopt.replay.prompts import prompts
from tailopt.replay.recorder import Record, Recorder, header, utc
from tailopt.run import Run
from tailopt.simulate import ledger as simulated
from tailopt.trace import Trace

PATIENCE_S = 120.0
"""An engine that has work and says nothing for so long is taken for dead."""

START_S = 300.0
"""The same for one that is being started."""

LIVES = 3
"""How often an engine may die before the replay is given up."""

BREATH_S = 0.002
"""After something was heard, wait so long for more, rather than spend a core on waking up for each step."""

SLOWER = 1.1
"""How much an engine's pace may have fallen from one step to the next."""

LONG_BREATH_S = 0.05
"""The same, where nothing can be to decide for long: the driver takes time from engines that it measures."""

REPORT_S = 0.25
"""Between two reports of progress."""

STALL_S = 5.0
"""A driver that did not listen for so long was stopped, with the machine perhaps: nobody is late for that."""

Progress = Callable[[float, Sequence[tuple[str, int]]], None]


class Engines(Protocol):
    """Where links come from, and where they go when a backend is done with them."""

    @property
    def name(self) -> str:
        """What carries out: the engine's name and version."""
        ...

    def most_tokens(self, engine: Engine) -> int:
        """Tokens of prompt and output that a request may have."""
        ...

    def take(self, engine: Engine) -> Link:
        """A link to such an engine, which says ``ready`` or ``awake`` when it is, and stands still."""
        ...

    def keeps(self, engine: Engine) -> bool:
        """Whether an engine that is closed is kept asleep, to be woken again."""
        ...

    def give_back(self, engine: Engine, link: Link) -> None:
        """Keep this one, which is idle."""
        ...


@dataclass
class _Seat:
    """The live side of an engine; what is known of it is in the ledger, under the same number."""

    number: int
    engine: Engine
    state: Literal["blocked", "waking", "open", "closing", "closed"] = "blocked"
    link: Link | None = None
    queue: deque[int] = field(default_factory=deque)  # its own requests that it has not got yet
    blockers: set[int] = field(default_factory=set)
    asked_s: float = 0.0  # when it was told to start or to close
    heard_s: float = 0.0
    token_s: float = 0.0  # what a token takes, lately and at best
    drain_s: float = 0.0
    ended_s: float = 0.0  # when it was to close and had ended its last step
    paused: bool = True
    owes: bool = False  # an answer to a pause or an abort
    deaths: int = 0


@dataclass
class _Watch:
    """A review point, and whether it was on the near side of it when the plan took effect."""

    point: ReviewPoint
    armed: bool
    below: Bools  # the requests with fewer tokens


class EngineBackend:
    """Carries out plans for one batch, once (:class:`tailopt.drive.Backend`); a context manager.

    Args:
        trace: the batch, with the lengths that each response is made to have.
        fleet: the engines and their profile, which they are set up to match.
        engines: where to get them.
        record: a file to write everything to as it happens; None for none.
        resume: what was read from that file, to go on from there.
        seed: of the prompts.
        vocabulary: of the model.
        given: the prompts as token ids, rather than random ones; each as long as the trace says.
        free: let responses end by themselves (the engines must be set up for it); the lengths of the trace
            are what they may have at most.
        progress: called now and then with the seconds and, per engine, its name and its unfinished requests.
        about: more for the header of the record.

    Raises:
        InputError: if a plan asks for what engines cannot do.
        ReplayError: if an engine fails again and again, or answers nonsense, or the record cannot be written.
    """

    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        engines: Engines,
        *,
        record: str | Path | None = None,
        resume: Record | None = None,
        seed: int = 0,
        vocabulary: int | None = None,
        given: Sequence[Sequence[int]] | None = None,
        free: bool = False,
        progress: Progress | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.trace, self.fleet, self.engines = trace, fleet, engines
        if given is None:
            self.prompts = prompts(trace, seed=seed, vocabulary=vocabulary)
        else:
            self.prompts = [list(tokens) for tokens in given]
            if [len(tokens) for tokens in given] != trace.context_tokens.tolist():
                raise InputError(
                    f"prompts: expected the lengths that trace {trace.name!r} has, one a response"
                )
        self.ledger = Ledger(trace, fleet, free=free) if resume is None else resume.ledger()
        self._record = None if record is None else Recorder(record)
        if self._record is not None and resume is None:
            more = {"seed": seed, "vocabulary": vocabulary, "free": free, **(about or {})}
            if given is not None:
                more["prompts"] = self.prompts
            self._record.write(header(trace, fleet, engines.name, **more))
        self._progress, self._resumed = progress, resume is not None
        self._seats: list[_Seat] = []
        self._shared: deque[list[int]] = deque()
        self._watches: list[_Watch] = []
        self._rank = np.zeros(trace.n_requests, dtype=np.int64)
        self._had = np.zeros(trace.n_requests, dtype=np.int64)  # tokens when it was last submitted
        self._zero_s = self._reported_s = self._listened_s = time.monotonic()
        self._started, self._standing, self._over = False, True, False
        self._reached: tuple[float, ReviewPoint] | None = None

    # what drive() calls ------------------------------------------------------------------------------

    def start(self, plan: Plan) -> None:
        """Get the engines, give them what is theirs while they stand still, and let them go together."""
        everyone = np.arange(self.trace.n_requests)
        if self._resumed:
            self._note({"kind": "note", "t": self.ledger.now_s, "what": "taken up again", "date": utc()})
        else:
            self._check(plan, everyone)
            self._note_plan(plan, everyone)
        self._sit_down()
        while any(seat.state == "waking" for seat in self._seats):
            self._wait(REPORT_S)
        self._zero_s = time.monotonic() - self.ledger.now_s
        self._started = True
        for seat in self._live():
            self._opened(seat, 0.0, self.ledger.now_s)
        self._line_up()
        self._arm()
        self._distribute()
        self._set_off()

    def until_review(self) -> State | None:
        """Go on until a review point or the deadline of the plan is reached; None when all are done."""
        while not self.ledger.all_finished:
            self._distribute()
            self._reached = self._crossed()
            if self._reached is not None:
                self._stand_still()
                if not self.ledger.all_finished:
                    return self._state(*self._reached)
            else:
                self._wait(self._patience_s())
        self._last(complete=True, why="")
        self._part()
        return None

    def change(self, plan: Plan, request: Ints) -> None:
        """Go on with this plan; all engines stand still at the end of a step."""
        request = np.asarray(request, dtype=np.int64)
        self._check(plan, request)
        self._note_plan(plan, request)
        ledger, now_s = self.ledger, self._now_s()
        dropped = request[plan.engine_of == DROPPED].tolist()
        full = request[(plan.engine_of != DROPPED) & (ledger.generated >= ledger.asked)[request]].tolist()
        stay = [
            one
            for one, index in zip(request.tolist(), plan.engine_of.tolist(), strict=True)
            if one not in full and self._stays(one, index)
        ]
        self._take_away([one for one in request.tolist() if one not in stay])
        for requests, completed in ((dropped, False), (full, True)):
            if requests:
                self._note({"kind": "end", "t": now_s, "requests": requests, "completed": completed})
        self._switch()
        self._line_up()
        for seat in self._live():
            self._tell(seat, [one for one in stay if ledger.engine_at(one) == seat.number])
        self._arm()
        self._distribute()
        self._set_off()

    def run(self) -> Run:
        """What happened."""
        return self.ledger.run(self.engines.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever still goes on is ended; what was recorded is kept, and says why."""
        for seat in self._seats:
            if seat.link is not None:
                seat.link.kill()
                seat.link = None
        if not self._over and kind is not None:
            try:
                self._last(complete=False, why=str(error) or kind.__name__)
            except ReplayError:
                if not isinstance(error, ReplayError):
                    raise
        if self._record is not None:
            self._record.close()

    # plans -------------------------------------------------------------------------------------------

    def _check(self, plan: Plan, request: Ints) -> None:
        """Refuse what these engines cannot do."""
        if plan.move == "migrate":
            raise InputError("plan: move: these engines cannot send their KV cache, expected recompute")
        fleet = Fleet(self.fleet.profile, plan.engines, self.fleet.gpus)
        tokens = (self.trace.context_tokens + self.trace.output_tokens)[request]
        for number, engine in enumerate(fleet.engines):
            shape = fleet.shape_of(number)
            cache = shape.kv_capacity_tokens // shape.block_tokens * shape.block_tokens
            if len(tokens) and int(tokens.max()) > (most := min(cache, self.engines.most_tokens(engine))):
                one = int(request[np.argmax(tokens)])
                raise InputError(
                    f"request {one}: has {tokens.max()} tokens with its prompt, engine {number} holds {most}"
                )
        if len(request) == self.trace.n_requests and not (plan.engine_of == DROPPED).any():
            simulated.Ledger(self.trace, self.fleet).begin(replace(plan, review=(), deadline_s=None))

    def _note_plan(self, plan: Plan, request: Ints) -> None:
        at, reason = (None, None) if self._reached is None else self._reached
        self._note(
            {
                "kind": "plan",
                "t": self._now_s() if self._started else 0.0,
                "at": at,
                "reason": None if reason is None else [reason.when, reason.value],
                "request": request.tolist(),
                "plan": plan_to_json(plan),
            }
        )

    def _stays(self, request: int, index: int) -> bool:
        """Whether a request runs on an engine that goes on, and the plan leaves it there."""
        ledger = self.ledger
        if not ledger.running[request]:
            return False
        here = ledger.places[ledger.engine_at(request)].index
        return here is not None and index in (here, SHARED_QUEUE)

    def _line_up(self) -> None:
        """Queue the requests that are nowhere, by arrival, then in the order of the plan."""
        plan, planned = self.ledger.plan, self.ledger.planned
        assert plan is not None
        ordered = planned[plan.order]
        self._rank[ordered] = np.arange(len(ordered))
        seat_of = {self.ledger.places[seat.number].index: seat for seat in self._live()}
        for seat in self._live():
            seat.queue.clear()
        units: dict[int, list[int]] = {}
        for place in np.argsort(self.trace.arrival_s[ordered], kind="stable").tolist():
            one, index = int(ordered[place]), int(plan.engine_of[plan.order[place]])
            if self.ledger.finished[one] or self.ledger.key[one] is not None or index == DROPPED:
                continue
            if index == SHARED_QUEUE:
                unit = int(self.trace.group[one]) if plan.atomic else one
                units.setdefault(unit, []).append(one)
            else:
                seat_of[index].queue.append(one)
        self._shared = deque(sorted(units.values(), key=self._arrival_s))

    def _arrival_s(self, requests: Sequence[int]) -> float:
        return float(self.trace.arrival_s[requests].max())

    def _arm(self) -> None:
        """Watch for the review points of the plan, as they are seen from when it took effect."""
        plan, ledger = self.ledger.plan, self.ledger
        assert plan is not None
        points = [*plan.review]
        if plan.deadline_s is not None:
            points.append(ReviewPoint("time", plan.deadline_s))
        self._watches = [
            _Watch(
                point,
                point.value > ledger.then_s if point.when == "time" else point.value < ledger.left_then,
                ledger.generated_then < point.value,
            )
            for point in points
        ]
        if plan.deadline_s is not None:
            self._watches[-1].armed = True

    def _crossed(self) -> tuple[float, ReviewPoint] | None:
        """The first of the plan's review points that is reached, and when that was."""
        ledger = self.ledger
        for watch in self._watches:
            value, now_s = watch.point.value, ledger.now_s
            if watch.point.when == "unfinished":
                reached = watch.armed and int((~ledger.finished).sum()) <= value
            elif watch.point.when == "tokens":
                reached = bool((watch.below & (ledger.generated >= value)).any())
            elif watch.point.when == "idle":
                reached = not self._shared and self._idle()
            else:
                reached, now_s = watch.armed and self._now_s() >= value, value
            if reached:
                return now_s, watch.point
        return None

    def _idle(self) -> bool:
        """Whether an engine that had work has none, and another has."""
        places = self.ledger.places
        work = {seat.number: bool(places[seat.number].there or seat.queue) for seat in self._live()}
        return any(work.values()) and any(places[number].worked and not work[number] for number in work)

    def _state(self, now_s: float, reason: ReviewPoint) -> State:
        ledger = self.ledger
        at = np.full(self.trace.n_requests, SHARED_QUEUE)
        for seat in self._live():
            place = ledger.places[seat.number]
            at[[*place.there.values(), *seat.queue]] = place.index
        return State(
            now_s=now_s,
            reason=reason,
            fleet=ledger.engines,
            engine=at,
            running=ledger.running.copy(),
            generated=ledger.generated.copy(),
            finished=ledger.finished.copy(),
            capped=ledger.capped,
        )

    # engines -----------------------------------------------------------------------------------------

    def _live(self) -> list[_Seat]:
        """The engines of the plan, awake or not."""
        return [seat for seat in self._seats if seat.state not in ("closing", "closed")]

    def _sit_down(self) -> None:
        """Get the engines of the plan; after an interruption, note what was lost by it."""
        for number, place in enumerate(self.ledger.places):
            seat = _Seat(number, place.engine)
            self._seats.append(seat)
            t = self.ledger.now_s
            if place.there:
                self._note({"kind": "lost", "t": t, "engine": number})
            if place.index is not None:
                self._launch(seat)
            else:
                seat.state = "closed"
                if place.close_s is None:
                    parts = {"drain_s": 0.0, "sleep_s": 0.0}
                    self._note({"kind": "close", "t": t, "engine": number, **parts})

    def _switch(self) -> None:
        """Close the engines that the new plan lacks, and get those that are new in it."""
        assert self._reached is not None
        reached_s = self._reached[0]
        for seat in self._live():
            place = self.ledger.places[seat.number]
            if place.index is None:
                seat.drain_s = max(place.last_s - reached_s, 0.0)
                seat.ended_s = reached_s + seat.drain_s
                seat.asked_s, seat.heard_s = time.monotonic(), time.monotonic()
                if seat.link is None:
                    self._closed(seat)
                    continue
                seat.state = "closing"
                if self.engines.keeps(seat.engine):
                    seat.link.send({"do": "forget"})
                    seat.link.send({"do": "sleep"})
                else:
                    seat.link.send({"do": "stop"})
        for number in range(len(self._seats), len(self.ledger.places)):
            engine = self.ledger.places[number].engine
            wanted = set(engine.gpus or ())
            blockers = {
                seat.number
                for seat in self._seats
                if seat.state == "closing" and wanted & set(seat.engine.gpus or ())
            }
            self._seats.append(_Seat(number, engine, blockers=blockers))
        self._unblock()

    def _unblock(self) -> None:
        for seat in self._seats:
            if seat.state == "blocked" and not seat.blockers:
                self._launch(seat)

    def _launch(self, seat: _Seat) -> None:
        seat.asked_s = seat.heard_s = time.monotonic()
        seat.link, seat.state, seat.paused = self.engines.take(seat.engine), "waking", True

    def _opened(self, seat: _Seat, wake_s: float, now_s: float) -> None:
        seat.state = "open"
        self._limit(seat)
        self._note({"kind": "open", "t": now_s, "engine": seat.number, "wake_s": wake_s})

    def _closed(self, seat: _Seat) -> None:
        seat.state, seat.link = "closed", None
        sleep_s = time.monotonic() - seat.asked_s
        t = seat.ended_s
        parts = {"drain_s": seat.drain_s, "sleep_s": sleep_s}
        self._note({"kind": "close", "t": t, "engine": seat.number, **parts})
        for other in self._seats:
            other.blockers.discard(seat.number)
        self._unblock()

    def _limit(self, seat: _Seat) -> None:
        index = self.ledger.places[seat.number].index
        if seat.link is not None and index is not None:
            limits, done = self.ledger.engines.limits(index), self.ledger.places[seat.number].finished
            later = [[finished - done, running] for finished, running in limits if finished > done]
            now = self._most_running(index, done)
            seat.link.send({"do": "limit", "running": now, **({"later": later} if later else {})})

    def _most_running(self, index: int, finished: int) -> int:
        """The limit of an engine of the plan when so many of its requests have finished."""
        return [running for first, running in self.ledger.engines.limits(index) if first <= finished][-1]

    def _tell(self, seat: _Seat, stay: Sequence[int]) -> None:
        """What the new plan changes for an engine that goes on and for what runs there."""
        if seat.link is None or seat.state != "open":
            return
        self._limit(seat)
        ledger = self.ledger
        changes = [
            [ledger.key[one], int(ledger.asked[one] - self._had[one]), int(self._rank[one])] for one in stay
        ]
        if changes:
            seat.link.send({"do": "update", "requests": changes})

    def _set_off(self) -> None:
        """All that are awake take steps."""
        self._standing = False
        for seat in self._live():
            if seat.state == "open" and seat.paused and seat.link is not None:
                seat.link.send({"do": "go"})
                seat.paused, seat.heard_s = False, time.monotonic()

    def _stand_still(self) -> None:
        """Everybody ends their step and takes no other."""
        self._standing = True
        for seat in self._live():
            if seat.state == "open" and not seat.paused and seat.link is not None:
                seat.link.send({"do": "pause"})
                seat.owes, seat.heard_s = True, time.monotonic()
        while any(seat.state == "open" and not seat.paused for seat in self._live()):
            self._wait(REPORT_S)

    def _take_away(self, requests: Sequence[int]) -> None:
        """Abort these where they are, and see that they are gone; engines stand still."""
        ledger = self.ledger
        for seat in self._seats:
            keys = [ledger.key[one] for one in requests if ledger.engine_at(one) == seat.number]
            if keys and seat.link is not None and seat.state == "open":
                seat.link.send({"do": "abort", "keys": keys})
                seat.owes, seat.heard_s = True, time.monotonic()
        while any(ledger.key[one] is not None for one in requests):
            self._wait(REPORT_S)

    def _part(self) -> None:
        """Give the engines back, standing still and empty."""
        for seat in self._seats:
            if seat.state == "open" and seat.link is not None:
                seat.link.send({"do": "pause"})
                seat.link.send({"do": "forget"})
                self.engines.give_back(seat.engine, seat.link)
                seat.link, seat.state = None, "closed"

    # requests ----------------------------------------------------------------------------------------

    def _distribute(self) -> None:
        """Submit what has arrived, and let engines with room pull from the shared queue."""
        now_s = self._now_s()
        for seat in self._live():
            arrived = []
            while seat.state == "open" and seat.queue and self.trace.arrival_s[seat.queue[0]] <= now_s:
                arrived.append(seat.queue.popleft())
            if arrived:
                self._submit(seat, arrived)
        while self._shared and self._arrival_s(self._shared[0]) <= now_s:
            first = self._shared[0][0]
            room = [seat for seat in self._live() if seat.state == "open" and self._has_room(seat, first)]
            if not room:
                return
            places = self.ledger.places
            best = min(room, key=lambda seat: (len(places[seat.number].there), seat.number))
            self._submit(best, self._shared.popleft())

    def _has_room(self, seat: _Seat, request: int) -> bool:
        """A place, and free blocks for it and for all that wait there."""
        place, ledger = self.ledger.places[seat.number], self.ledger
        assert place.index is not None
        block = ledger.engines.shape_of(place.index).block_tokens

        def blocks(one: int) -> int:
            return -(-(len(self.prompts[one]) + len(ledger.tokens[one])) // block)

        waiting = sum(blocks(one) for one in place.there.values() if not ledger.running[one])
        fits = waiting + blocks(request) <= place.free_blocks
        most = self._most_running(place.index, place.finished)
        return fits and len(place.there) + len(seat.queue) < most

    def _submit(self, seat: _Seat, requests: Sequence[int]) -> None:
        """With the tokens they have as part of their prompts."""
        ledger = self.ledger
        wanted = []
        for key, one in enumerate(requests, start=ledger.keys):
            self._had[one] = ledger.generated[one]
            prompt = self.prompts[one] + ledger.tokens[one]
            wanted.append([key, prompt, int(ledger.asked[one] - self._had[one]), int(self._rank[one])])
        items = [[key, one] for (key, *_), one in zip(wanted, requests, strict=True)]
        self._note({"kind": "submit", "t": self._now_s(), "engine": seat.number, "items": items})
        assert seat.link is not None
        seat.link.send({"do": "submit", "requests": wanted})
        seat.heard_s = time.monotonic()

    # events ------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return time.monotonic() - self._zero_s

    def _note(self, line: Line) -> None:
        """First what is known, then the file: what cannot be true is not recorded."""
        if line["kind"] != "note":
            self.ledger.apply(line)
        if self._record is not None:
            self._record.write(line)

    def _last(self, *, complete: bool, why: str) -> None:
        """The end of the record."""
        if not self._over and self._record is not None:
            line = {"kind": "last", "t": self.ledger.now_s, "complete": complete, "why": why}
            self._record.write(line)
        self._over = True

    def _patience_s(self) -> float:
        """Until something is due: an arrival, a time to review, a report."""
        due = [self._now_s() + REPORT_S]
        due += [watch.point.value for watch in self._watches if watch.point.when == "time" and watch.armed]
        due += [float(self.trace.arrival_s[seat.queue[0]]) for seat in self._live() if seat.queue]
        if self._shared:
            due.append(self._arrival_s(self._shared[0]))
        now_s = self._now_s()
        return max(min([one for one in due if one > now_s], default=REPORT_S) - now_s, 0.0)

    def _breath_s(self) -> float:
        """How long not to listen: half of the time until something can be to decide, at the pace of now.

        An engine takes at least as many steps as a request needs tokens to its end, or to a review point.
        """
        if self._standing:
            return 0.0
        if any(seat.state != "open" for seat in self._live()):
            return BREATH_S
        ledger, pulled = self.ledger, bool(self._shared)
        left = np.where(ledger.finished, np.iinfo(np.int64).max, ledger.asked - ledger.generated)
        near = [int(left.min())] if pulled or any(seat.queue for seat in self._live()) else []
        for watch in self._watches:
            point = watch.point
            if point.when == "unfinished" and watch.armed:
                ends = int((~ledger.finished).sum()) - int(point.value)
                near.append(int(np.partition(left, ends - 1)[ends - 1]) if ends > 0 else 0)
            elif point.when == "tokens":
                missing = (point.value - ledger.generated)[watch.below & ~ledger.finished]
                near.append(int(missing.min(initial=np.iinfo(np.int64).max)))
            elif point.when == "idle":
                there = [list(ledger.places[seat.number].there.values()) for seat in self._live()]
                near.append(min((int(left[some].max()) for some in there if some), default=0))
        steps = 0 if near and ledger.free else min(near, default=None)
        if steps is None:
            return LONG_BREATH_S
        safe_s = steps * min(seat.token_s for seat in self._live()) / 2
        return min(safe_s, LONG_BREATH_S) if safe_s > BREATH_S else 0.0 if pulled else BREATH_S

    def _wait(self, timeout_s: float) -> None:
        """Hear what the engines have to say, in the order in which it happened."""
        seats = {id(seat.link): seat for seat in self._seats if seat.link is not None}
        links = [seat.link for seat in seats.values() if seat.link is not None]
        ready = wait_for_any(links, timeout_s)
        if ready and (breath_s := min(self._breath_s(), timeout_s)) > 0:
            time.sleep(breath_s)
            ready = wait_for_any(links, 0.0)
        events = [(seats[id(link)], event) for link in ready for event in link.read()]
        for seat, event in sorted(events, key=lambda one: _happened_s(one[1])):
            seat.heard_s = time.monotonic()
            self._hear(seat, event)
        self._look_for_the_dead()
        if self._progress is not None and (now := time.monotonic()) >= self._reported_s + REPORT_S:
            self._reported_s = now
            left = [
                (f"engine {seat.number}, TP{seat.engine.tp}", len(self.ledger.places[seat.number].there))
                for seat in self._live()
            ]
            waiting = sum(map(len, self._shared)) + sum(len(seat.queue) for seat in self._live())
            self._progress(self._now_s() if self._started else 0.0, [*left, ("waiting", waiting)])

    def _hear(self, seat: _Seat, event: Message) -> None:
        what, number = event["event"], seat.number
        if what == "died":
            self._died(seat)
        elif what in ("ready", "awake"):
            if seat.state == "waking":
                seat.state = "open"
                if self._started:
                    self._opened(seat, time.monotonic() - seat.asked_s, self._now_s())
                    self._distribute()
                    if not self._standing:
                        self._set_off()
        elif seat.state == "waking":
            pass  # what an engine that was kept had still to say
        elif what == "step":
            facts = {key: value for key, value in event.items() if key != "event"}
            token_s = event["s"] / max(1, *(len(new) for _, *new in event["new"]), 1)
            # one late step says nothing of the next ones, and a driver that waits for it misses a review
            seat.token_s = min(token_s, SLOWER * seat.token_s or token_s)
            self._note({"kind": "step", "engine": number, **facts, "t": event["t"] - self._zero_s})
        elif what == "aborted":
            if event["absent"]:
                raise ReplayError(f"engine {number}: does not know submissions {event['absent']}")
            t = event["t"] - self._zero_s
            self._note({"kind": "abort", "t": t, "engine": number, "keys": event["keys"]})
            seat.owes = False
        elif what == "rejected":
            (key, why), *_ = event["keys"]
            request = self.ledger.places[number].there.get(key)
            raise ReplayError(f"engine {number}: rejects request {request} ({why})")
        elif what == "paused":
            seat.paused, seat.owes = True, False
        elif what == "asleep":
            if seat.link is not None and seat.state == "closing":
                self.engines.give_back(seat.engine, seat.link)
                self._closed(seat)
        elif what not in ("submitted", "stopped"):
            raise ReplayError(f"engine {number}: unknown event {what!r:.40}")

    def _died(self, seat: _Seat) -> None:
        """An engine is gone: as it was told, or it is started anew and gets its requests again."""
        if seat.state == "closing":
            if seat.link is not None:
                seat.link.kill()
            self._closed(seat)
            return
        assert seat.link is not None
        seat.link.kill()
        why, was_there = seat.link.complaint(), seat.state == "open"
        seat.link, seat.paused, seat.owes = None, True, False
        seat.deaths += 1
        t = self._now_s() if self._started else 0.0
        if self._started:
            self._note({"kind": "lost", "t": t, "engine": seat.number, "why": why})
        if seat.deaths > (LIVES if was_there else 1):  # one that was kept may have died since
            raise ReplayError(f"engine {seat.number}: died ({why})")
        self._launch(seat)
        if self._started and not self._standing:
            self._line_up()

    def _look_for_the_dead(self) -> None:
        """An engine that owes an answer or has work, and says nothing, is dead."""
        now = time.monotonic()
        deaf_s, self._listened_s = now - self._listened_s - REPORT_S, now
        for seat in self._seats:
            if deaf_s > STALL_S:
                seat.heard_s = min(seat.heard_s + deaf_s, now)
            works = seat.state == "open" and not seat.paused and bool(self.ledger.places[seat.number].there)
            patience_s = START_S if seat.state == "waking" else PATIENCE_S
            waited_for = works or seat.owes or seat.state in ("waking", "closing")
            if waited_for and seat.link is not None and now - seat.heard_s > patience_s:
                self._died(seat)


def _happened_s(event: Message) -> float:
    return float(event["t"]) + float(event.get("s", 0.0) if event["event"] == "step" else 0.0)
