r"""What plans say, kept from review to review: engines that open and close, where each request goes, moves.

The reference and the kernel decide what happens *within* a plan, each in its own way; here is what happens
*between* two plans, when every engine has ended a step and stands at its clock :math:`c_e`, at least the time
:math:`t^*` of the review. A new plan is followed in this order.

1. **Waiting requests** are withdrawn; what can be found of their blocks stays where it is.
2. **Engines** of the new plan that equal one in force go on. The others in force are closed, new ones opened.
3. **Running requests** go on where they are if their engine does and the plan names it, or the shared queue.
   All others are taken off their engine at :math:`c_e` with their tokens: those that are given up, or have
   all that ``max_tokens`` grants, are over then; the rest go on as if they were new, with all their tokens as
   prompt. They can be admitted elsewhere from :math:`c_e` on, or once their KV cache has been sent.
4. **KV cache** of t tokens, the last of which is never computed before the next step, is sent in

   .. math:: \text{latency} + (t - 1) \cdot \text{bytes per token} / \text{link rate}

   seconds; out of one engine one after another, in the order of the plan. It is sent if the plan says so, or
   if it says ``cheaper`` and that, with the wait for the transfers before it, is less than
   :math:`(t - 1) / \text{prefill rate of the target}`; but only of requests past their prefill, over a link
   that the profile knows, and to an engine that the plan names and that is awake when the request leaves:
   one that has yet to wake has no memory to send to, and computes the tokens anew whatever the plan says.
   It gives its request a place in the target's cache at its admission, is lost when it is preempted there
   later, and when a review sends the request elsewhere, or gives it up, before. A transfer under way then
   ends at t*, and its link is free for others; those behind it keep their times. A simplification: the
   source's blocks are free as soon as the request leaves, not when its transfer has ended.
5. **An engine closes** when it has ended its step and sent its last KV cache; earlier, if a later review ends
   its transfers, but what was to open after it keeps its time. A new one opens at the latest
   of t* and, for each closed engine that held one of its GPUs, the end of that one's sleep, plus its own
   wake.
6. **Queues** are made anew: own ones by the time from which each request can be admitted, then in the plan's
   order; all that could be admitted by t* are equal, as are times of one instant. In an atomic plan, requests
   of the shared queue whose group runs on an engine that goes on wait for that one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailopt.arrays import Bools, Floats, Ints
from tailopt.drive import State
from tailopt.engine.speculation import Decoding
from tailopt.errors import InputError
from tailopt.plan import DROPPED, SHARED_QUEUE, Engine, Fleet, Plan, ReviewPoint
from tailopt.run import Moves, Review, Run, Spans, Stays
from tailopt.simulate.batch import shared_tokens, units
from tailopt.simulate.instants import SLACK, by, later, made_equal
from tailopt.simulate.line_table import decoding_of
from tailopt.trace import Trace

NOWHERE = -1


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The batch when every engine has ended its step; engines by number, among all that ever were.

    Attributes:
        clock_s: ``[engines]`` when each of them may begin its next step.
        engine: ``[n]`` where each request runs or waits, -1 for one that no engine has been given yet.
        running: ``[n]`` whether it has a place in a batch.
        generated: ``[n]`` tokens generated so far.
        computed: ``[n]`` tokens whose KV its engine holds.
        finished: ``[n]`` whether it is over.
    """

    clock_s: Floats
    engine: Ints
    running: Bools
    generated: Ints
    computed: Ints
    finished: Bools


@dataclass(frozen=True, eq=False)
class Orders:
    """What a backend does to follow a new plan, in this order; engines by number, as above.

    Attributes:
        leaving: running requests to take off their engines.
        over: requests that are over, running ones among them.
        over_s: when.
        opened: engines to open.
        queue: own requests of each engine in force, in the order in which they can be admitted.
        unit_member: the shared queue unit by unit, in the order of service; a unit is one request, or what is
            there of a group if the plan is atomic.
        unit_start: ``[units + 1]`` where each unit starts in ``unit_member``.
        unit_s: ``[units]`` when all requests of a unit can be admitted, never falling.
    """

    leaving: Ints
    over: Ints
    over_s: Floats
    opened: range
    queue: dict[int, Ints]
    unit_member: Ints
    unit_start: Ints
    unit_s: Floats


@dataclass(frozen=True, eq=False)
class Watch:
    """The review points of a plan, as they are looked for.

    Attributes:
        unfinished: crossed when no more requests than this are left; 0 for never.
        tokens: crossed by a request that passes one of them, rising.
        idle: whether an engine with nothing to do is one.
        time_s: crossed by the clock; infinite for never.
    """

    unfinished: int
    tokens: Ints
    idle: bool
    time_s: float

    @property
    def nothing(self) -> bool:
        """True if no review point can be reached."""
        return not (self.unfinished or len(self.tokens) or self.idle or self.time_s < np.inf)


class Ledger:
    """A batch from plan to plan.

    Attributes:
        engines: all that ever were.
        current: numbers of those in force, in the plan's order.
        open_s: when each engine can take its first step.
        plan: the one in force.
        fleet: the engines in force.
        limit: ``[n]`` output tokens at which each request is over.
        position: ``[n]`` place of each unfinished request in the order of the plan in force.
        available_s: ``[n]`` from when each can be admitted.
        kv_sent_to: ``[n]`` the engine that its KV cache was sent to and where it has not been admitted since.
        shared_tokens: ``[n]`` leading tokens whose blocks its group shares.
        watch: the review points.
    """

    def __init__(self, trace: Trace, fleet: Fleet) -> None:
        n = trace.n_requests
        self.trace, self.profile, self.gpus = trace, fleet.profile, fleet.gpus
        self.engines: list[Engine] = []
        self.current: list[int] = []
        self.open_s: list[float] = []
        self.plan: Plan | None = None
        self.limit = trace.output_tokens.copy()
        self.position = np.zeros(n, dtype=np.int64)
        self.available_s = trace.arrival_s.copy()
        self.kv_sent_to = np.full(n, NOWHERE)
        self.place = np.full(n, SHARED_QUEUE)
        sizes = [shape.block_tokens for shape in fleet.profile.shapes.values()]
        self.shared_tokens = shared_tokens(trace, max(sizes))
        self._now_s = 0.0
        self._left = n
        self._freed_s = np.zeros(n)  # when it was last taken off an engine
        self._wake_s: list[float] = []
        self._close_s: list[float] = []
        self._stop_s: list[float] = []  # the end of its last step, of a closed engine
        self._drain_s: list[float] = []
        self._link_free_s: list[float] = []
        self._moves: list[list[Any]] = []
        self._reviews: list[Review] = []
        self._state: State | None = None

    def begin(self, plan: Plan) -> Orders:
        """Follow the first plan.

        Raises:
            InputError: if it is for another number of requests, or cannot be carried out.
        """
        n = self.trace.n_requests
        if len(plan.engine_of) != n:
            raise InputError(f"plan: has {len(plan.engine_of)} requests, trace {self.trace.name!r} has {n}")
        if (plan.engine_of == DROPPED).any():
            raise InputError(f"plan: request {int(np.argmin(plan.engine_of))} is dropped before it runs")
        nothing, nobody = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.bool_)
        start = Snapshot(np.zeros(0), nothing, nobody, nothing, nothing, nobody)
        orders = self._follow(plan, np.arange(n), start)
        self.first_plan, self.first_fleet = plan, self.fleet
        return orders

    def review(self, now_s: float, reason: ReviewPoint, seen: Snapshot) -> State:
        """What the policy is told when a review point has been reached."""
        place = np.full(len(self.engines) + 1, NOWHERE)  # the last one for those that are nowhere
        place[self.current] = np.arange(len(self.current))
        engine = place[np.where(seen.engine == NOWHERE, np.maximum(self.place, NOWHERE), seen.engine)]
        for at_s in self._times():
            if by(at_s, now_s) and by(now_s, at_s):
                now_s = at_s
        self._seen = seen
        self._state = State(
            now_s=now_s,
            reason=reason,
            fleet=self.fleet,
            engine=np.where(seen.finished, NOWHERE, engine),
            running=seen.running,
            generated=seen.generated,
            finished=seen.finished,
            capped=seen.finished & (seen.generated < self.trace.output_tokens),
        )
        return self._state

    def change(self, plan: Plan, request: Ints) -> Orders:
        """Follow the answer to the last review.

        Raises:
            InputError: if it cannot be carried out.
        """
        state = self._state
        if state is None:
            raise InputError("plan: changed without a review")
        self._state, self._now_s = None, state.now_s
        self._reviews.append(Review(state.now_s, state.reason, plan, request))
        return self._follow(plan, request, self._seen)

    def reason(
        self, now_s: float, left: int, passed: Sequence[bool] | Bools, idle: bool
    ) -> ReviewPoint | None:
        """The first review point of the plan that is crossed at ``now_s``, or its deadline; None if none is.

        Args:
            now_s: the time.
            left: unfinished requests.
            passed: for each of ``watch.tokens``, whether a request has passed it.
            idle: whether an engine was left with nothing to do.
        """
        assert self.plan is not None
        reached = {float(value) for value, one in zip(self.watch.tokens, passed, strict=True) if one}
        for point in self.plan.review:
            if (
                (point.when == "unfinished" and left <= point.value < self._left)
                or (point.when == "tokens" and point.value in reached)
                or (point.when == "idle" and idle)
                or (point.when == "time" and later(point.value, self._now_s) and by(point.value, now_s))
            ):
                return point
        deadline_s = self.plan.deadline_s
        return ReviewPoint("time", deadline_s) if deadline_s is not None and by(deadline_s, now_s) else None

    def decoding(self, e: int) -> Decoding:
        """The decode steps of engine e, for as many requests as it may run."""
        engine = self.engines[e]
        return decoding_of(self.profile, engine.tp, engine.speculation, self.trace.n_requests)

    def limits(self, e: int) -> tuple[tuple[int, int], ...]:
        """The concurrency limits of engine e under the plan in force: (finished, running), from (0, r) on."""
        return self.engines[e].limits_within(self.profile.shape(self.engines[e].tp).max_running)

    def max_running(self, e: int) -> int:
        """The highest of them."""
        return max(running for _, running in self.limits(e))

    def run(self, backend: str, **columns: Any) -> Run:
        """The run, from the columns that only the backend knows."""
        makespan_s = float(columns["finish_s"].max())
        slept = [self.profile.shape(engine.tp).sleep_s for engine in self.engines]
        close_s = np.array(self._close_s)
        open_to_the_end = np.isnan(close_s)
        moves = [list(column) for column in zip(*self._moves, strict=True)] or [[]] * 7
        kinds = [np.int64, np.int64, np.int64, np.float64, np.float64, np.int64, np.bool_]
        return Run(
            backend=backend,
            fleet=self.first_fleet,
            plan=self.first_plan,
            engines=tuple(self.engines),
            spans=Spans(
                open_s=np.array(self.open_s),
                wake_s=np.array(self._wake_s),
                close_s=np.where(open_to_the_end, np.maximum(makespan_s, self.open_s), close_s),
                drain_s=np.array(self._drain_s),
                sleep_s=np.where(open_to_the_end, 0.0, slept),
            ),
            completed=columns["output_tokens"] == self.trace.output_tokens,
            moves=_with_targets(
                Moves(*(np.array(column, dtype=kind) for column, kind in zip(moves, kinds, strict=True))),
                columns["stays"],
            ),
            reviews=tuple(self._reviews),
            **columns,
        )

    def _follow(self, plan: Plan, request: Ints, seen: Snapshot) -> Orders:
        now_s = self._now_s
        fleet = Fleet(self.profile, plan.engines, self.gpus)
        before = self.current
        numbers, opened = self._match(fleet)
        kept = [e for e in before if e in numbers]
        position = np.empty(len(request), dtype=np.int64)
        position[plan.order] = np.arange(len(request))
        limit = self.trace.output_tokens[request]
        if plan.max_tokens is not None:
            limit = np.minimum(limit, plan.max_tokens)

        to = np.where(plan.engine_of >= 0, np.array(numbers)[np.maximum(plan.engine_of, 0)], plan.engine_of)
        source, running, generated = seen.engine[request], seen.running[request], seen.generated[request]
        over = (to == DROPPED) | (generated >= limit)
        stays = running & ~over & np.isin(source, kept) & ((to == source) | (to == SHARED_QUEUE))
        to = np.where(stays, source, to)
        if plan.atomic:
            to = self._with_their_groups(request, to, stays)
        if plan.move == "migrate" and self.profile.link_bytes_per_s is None:
            raise InputError(f"plan: move: migrate: engine {self.profile.name!r} has no link_bytes_per_s")
        self._check_fit(fleet, numbers, request[~over], to[~over], limit[~over])

        self.plan, self.fleet, self.current = plan, fleet, numbers
        for e, engine in zip(numbers, fleet.engines, strict=True):
            if e in opened:
                self.engines.append(engine)
            else:
                self.engines[e] = engine
        self.limit[request] = limit
        self.position[request] = position
        self.place[request] = to
        moves = running & ~stays & ~over
        self._withdraw(request[~running], np.where(over, DROPPED, to)[~running])
        clock_s = np.where(
            running,
            np.append(np.maximum(seen.clock_s, now_s), now_s)[source],
            np.maximum(now_s, self._freed_s[request]),
        )
        self.available_s[request[moves]] = self._freed_s[request[moves]] = clock_s[moves]
        for i in plan.order[moves[plan.order]]:
            self._move(
                int(request[i]), int(source[i]), int(to[i]), int(generated[i]), seen, plan, float(clock_s[i])
            )
        self._close([e for e in before if e not in numbers], seen.clock_s)
        self._open(opened, first=not before)
        self._left = int((~over).sum())
        self.watch = self._watch(plan)

        over_s = np.maximum(clock_s, self.trace.arrival_s[request])[over]
        leaving = request[running & ~stays]
        queued = ~over & ~stays
        del position, limit, source, generated, clock_s  # of many requests, the memory is for what follows
        self.available_s[request[queued]] = made_equal(self.available_s[request[queued]])
        by_time = plan.order[np.argsort(self.available_s[request][plan.order], kind="stable")]
        by_time = by_time[queued[by_time]]
        shared = request[by_time[to[by_time] == SHARED_QUEUE]]
        member, start, unit_s = units(shared, self.trace.group, self.available_s, atomic=plan.atomic)
        return Orders(
            leaving=leaving,
            over=request[over],
            over_s=over_s,
            opened=opened,
            queue=self._own_queues(request[by_time], to[by_time]),
            unit_member=member,
            unit_start=start,
            unit_s=unit_s,
        )

    def _match(self, fleet: Fleet) -> tuple[list[int], range]:
        """The numbers of a plan's engines: that of the engine in force that goes on as it, or a new one."""
        first = len(self.engines)
        numbers: list[int] = []
        new = first
        for engine in fleet.engines:
            found = next((e for e in self.current if self.engines[e].same_as(engine)), None)
            numbers.append(new if found is None else found)
            new += found is None
        return numbers, range(first, new)

    def _own_queues(self, request: Ints, to: Ints) -> dict[int, Ints]:
        by_engine = np.argsort(to, kind="stable")
        starts = np.searchsorted(to[by_engine], [*self.current, 0])
        ends = np.searchsorted(to[by_engine], self.current, side="right")
        return {
            e: request[by_engine[low:high]] for e, low, high in zip(self.current, starts, ends, strict=False)
        }

    def _with_their_groups(self, request: Ints, to: Ints, stays: Bools) -> Ints:
        group = self.trace.group[request]
        engine = np.full(int(self.trace.group.max()) + 1, SHARED_QUEUE)
        engine[group[stays]] = to[stays]
        return np.where(to == SHARED_QUEUE, engine[group], to)

    def _check_fit(self, fleet: Fleet, numbers: list[int], request: Ints, to: Ints, limit: Ints) -> None:
        """The KV of a request's last token is never computed: prompt and output need one token less of cache.

        Drafted tokens need room behind them.
        """
        shapes = [fleet.shape_of(i) for i in range(len(numbers))]
        room = np.zeros(max(numbers) + 2, dtype=np.int64)
        for i, (e, shape) in enumerate(zip(numbers, shapes, strict=True)):
            speculation = fleet.engines[i].speculation
            ahead = decoding_of(self.profile, shape.tp, speculation, 1).lookahead
            if fleet.max_running(i) * (1 + ahead) > shape.token_budget:
                raise InputError(
                    f"engine {i} (TP{shape.tp} of {self.profile.name}): {fleet.max_running(i)} requests of "
                    f"{1 + ahead} tokens a step exceed its token budget, {shape.token_budget}; "
                    "limit max_running or draft fewer tokens"
                )
            room[e] = shape.kv_capacity_tokens // shape.block_tokens * shape.block_tokens - ahead
        least = numbers[int(np.argmin(room[numbers]))]
        runs_on = np.where(to == SHARED_QUEUE, least, to)
        need = self.trace.context_tokens[request] + limit - 1
        too_large = need > room[runs_on]
        if too_large.any():
            first = int(np.argmax(too_large))
            i = numbers.index(int(runs_on[first]))
            name = self.trace.prompt_ids[self.trace.prompt[request[first]]]
            raise InputError(
                f"request {request[first]} (prompt {name!r}) needs {need[first]} tokens of KV cache, "
                f"engine {i} (TP{fleet.engines[i].tp} of {self.profile.name}) holds {room[runs_on[first]]}; "
                "give it more GPUs, or shorter responses"
            )

    def _withdraw(self, request: Ints, to: Ints) -> None:
        """Waiting requests can be admitted at once, unless their KV cache was sent to where they still go."""
        known = self.kv_sent_to[request] == to
        since_s = np.maximum(self.trace.arrival_s[request], self._freed_s[request])
        since_s = np.where(known, self.available_s[request], since_s)
        sources = set()
        for i in request[~known & (self.kv_sent_to[request] != NOWHERE)]:
            move = next(move for move in reversed(self._moves) if move[0] == i)
            move[4] = max(move[3], min(move[4], self._now_s))
            sources.add(move[1])
        for e in sources:
            self._free_link(e)
        self.kv_sent_to[request[~known]] = NOWHERE
        self.available_s[request] = np.maximum(since_s, self._now_s)

    def _free_link(self, e: int) -> None:
        """Some of the transfers out of engine e have ended early."""
        self._link_free_s[e] = max(move[4] for move in self._moves if move[1] == e and move[6])
        if not np.isnan(self._close_s[e]):
            closed_s = max(self._stop_s[e], self._link_free_s[e])
            self._drain_s[e] -= self._close_s[e] - closed_s
            self._close_s[e] = closed_s

    def _move(
        self, i: int, source: int, to: int, generated: int, seen: Snapshot, plan: Plan, clock_s: float
    ) -> None:
        """Take request i off ``source``, and send its KV cache if that is the way."""
        profile, tokens = self.profile, int(self.trace.context_tokens[i]) + generated
        rate = profile.link_bytes_per_s
        awake = 0 <= to < len(self.open_s) and by(self.open_s[to], clock_s)
        migrated = False
        if awake and rate is not None and plan.move != "recompute" and seen.computed[i] == tokens - 1:
            target = profile.shape(self.engines[to].tp)
            sending_s = profile.link_latency_s + (tokens - 1) * profile.kv_bytes_per_token / rate
            sent_s = max(self._link_free_s[source], clock_s) + sending_s
            computed_s = clock_s + (tokens - 1) / target.prefill_tokens_per_s
            migrated = plan.move == "migrate" or later(computed_s, sent_s)
        if migrated:
            self.available_s[i] = self._link_free_s[source] = sent_s
            self.kv_sent_to[i] = to
        self._moves.append([i, source, to, clock_s, self.available_s[i], tokens, migrated])

    def _close(self, closed: list[int], clock_s: Floats) -> None:
        for e in closed:
            self._stop_s[e] = max(float(clock_s[e]), self._now_s)
            self._close_s[e] = max(self._stop_s[e], self._link_free_s[e])
            self._drain_s[e] = self._close_s[e] - self._now_s

    def _open(self, opened: range, *, first: bool) -> None:
        for e in opened:
            engine = self.engines[e]
            free_s = [
                self._close_s[other] + self.profile.shape(self.engines[other].tp).sleep_s
                for other in range(opened.start)
                if set(self.engines[other].gpus or ()) & set(engine.gpus or ())
            ]
            self._wake_s.append(0.0 if first else self.profile.shape(engine.tp).wake_s)
            self.open_s.append(max([self._now_s, *free_s]) + self._wake_s[e])
            self._close_s.append(np.nan)
            self._stop_s.append(np.nan)
            self._drain_s.append(0.0)
            self._link_free_s.append(0.0)

    def _watch(self, plan: Plan) -> Watch:
        points: dict[str, list[float]] = {"unfinished": [], "tokens": [], "idle": [], "time": []}
        for point in plan.review:
            points[point.when].append(point.value)
        return Watch(
            unfinished=int(max([value for value in points["unfinished"] if value < self._left], default=0)),
            tokens=np.unique(np.array(points["tokens"], dtype=np.int64)),
            idle=bool(points["idle"]),
            time_s=max(min(self._times(), default=np.inf), self._now_s),
        )

    def _times(self) -> list[float]:
        """Points in time that are yet to come under the plan in force, and its deadline, passed or not."""
        assert self.plan is not None
        ahead = [point.value for point in self.plan.review if point.when == "time"]
        deadline = [] if self.plan.deadline_s is None else [self.plan.deadline_s]
        return [value for value in ahead if later(value, self._now_s)] + deadline


def _with_targets(moves: Moves, stays: Stays) -> Moves:
    """Moves in the order of time; their targets are where they went, -1 if they did not run there next."""
    if not len(moves.request):
        return moves
    at = np.argsort(made_equal(moves.start_s), kind="stable")
    request, start_s = moves.request[at], moves.start_s[at]
    # a request's stays by their ends, and its moves between them: next comes the stay that a move led to
    moved = np.isin(stays.request, request)
    stayed, engine, end_s = stays.request[moved], stays.engine[moved], stays.end_s[moved]
    n, who, when_s = len(stayed), np.append(stayed, request), np.append(end_s, start_s * SLACK)
    order = np.lexsort((np.arange(len(who)) >= n, when_s, who))
    ahead = np.where(order < n, np.arange(len(order)), len(order))
    ahead = np.append(np.minimum.accumulate(ahead[::-1])[::-1], len(order))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    stay = np.append(order, NOWHERE)[ahead[place[n:]]]
    ran_on = np.where(
        (stay >= 0) & (np.append(stayed, NOWHERE)[stay] == request),
        np.append(engine, NOWHERE)[stay],
        NOWHERE,
    )
    sent_to = moves.target[at]
    target = np.where((sent_to == SHARED_QUEUE) | (sent_to == ran_on), ran_on, NOWHERE)
    return Moves(
        request, moves.source[at], target, start_s, moves.end_s[at], moves.tokens[at], moves.migrated[at]
    )
