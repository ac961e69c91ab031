"""What a policy sees (:class:`View`) and what it answers (:class:`Plan`).

A **policy** is a function ``(View) -> Plan``. A View holds no true length of an unfinished request: what a
policy knows about lengths is ``predicted_tokens``, so clairvoyance is a choice of predictor, never of policy.
A Plan is data, never a callback: it can be saved (:mod:`tailopt.plan_file`), executed and checked.

A plan may name **review points** (:class:`ReviewPoint`). When one is reached, every engine ends the step it
is in, the policy sees the unfinished requests as they are then, and answers with a plan for these, which
replaces the old one. Its engines are the fleet from then on: one that is in both (:meth:`Engine.same_as`)
goes on, the others are put to sleep or woken. A running request goes on where it is if its engine does and
the plan says so, and is moved otherwise; requests that wait are queued anew, in the new plan's order.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np

from tailopt.arrays import Bools, Floats, Ints, assign, bools, floats, ints
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.speculation import Speculation
from tailopt.errors import InputError, shown
from tailopt.trace import Trace

SHARED_QUEUE = -1
"""``Plan.engine_of`` of a request that any engine may pull."""


DROPPED = -2
"""``Plan.engine_of`` of a request that is given up, with the tokens it has: at a review only."""

Scheduling = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class Engine:
    """One engine of a fleet: ``tp`` GPUs that decode together.

    Attributes:
        tp: tensor-parallel degree.
        max_running: requests that it decodes together at most; None for the profile's own limit.
        gpus: the numbers of its GPUs, kept sorted: their order has no meaning; None for the next free ones in
            the order of the fleet.
        speculation: speculative decoding, None for none.
        scheduling: how it chooses whom to admit and whom to preempt: ``"fcfs"``, first come first served, or
            ``"priority"``, the earlier in the plan's order the more important.
        limits: pairs (finished, running), the first of each rising: from when so many requests have finished
            on it under this plan, at most so many run together, in place of ``max_running``. A limit is for
            admission: nobody that runs is stopped.

    Raises:
        InputError: if a field is not what is said here.

    Two run together at first, one after the first finish, and three from the fourth on:

    >>> Engine(1, max_running=2, limits=((1, 1), (4, 3))).limits_within(256)
    ((0, 2), (1, 1), (4, 3))
    """

    tp: int
    max_running: int | None = None
    gpus: tuple[int, ...] | None = None
    speculation: Speculation | None = None
    scheduling: Scheduling = "fcfs"
    limits: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for what, value in (("tp", self.tp), ("max_running", self.max_running)):
            if value is None and what == "max_running":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= value < 2**31:
                raise InputError(f"engine: {what}: expected a whole number from 1 on, got {shown(value)}")
            assign(self, **{what: int(value)})
        if self.gpus is not None:
            gpus = ints("engine: gpus", self.gpus, self.tp, minimum=0).tolist()
            if len(set(gpus)) < len(gpus):
                raise InputError(f"engine: gpus: expected different ones, got {gpus}")
            assign(self, gpus=tuple(sorted(gpus)))
        if self.speculation is not None and not isinstance(self.speculation, Speculation):
            raise InputError("engine: speculation: expected a tailopt.engine.speculation.Speculation or None")
        if self.scheduling not in get_args(Scheduling):
            raise InputError(f"engine: scheduling: expected fcfs or priority, got {shown(self.scheduling)}")
        assign(self, limits=_limits(self.limits))

    def limits_within(self, most: int) -> tuple[tuple[int, int], ...]:
        """Its concurrency limits from the first on, (0, r), none above ``most``."""
        first = most if self.max_running is None else self.max_running
        return tuple((finished, min(running, most)) for finished, running in ((0, first), *self.limits))

    def same_as(self, other: "Engine") -> bool:
        """Whether this placed engine can go on as the other one: all but the concurrency limits is the same.

        >>> Engine(1, gpus=(0,)).same_as(Engine(1, max_running=8, gpus=(0,)))
        True
        """
        told = {field.name for field in fields(self)} - {"max_running", "limits"}
        return all(getattr(self, name) == getattr(other, name) for name in told)


@dataclass(frozen=True)
class Fleet:
    """``gpus`` GPUs cut into engines of one profile.

    Every engine is placed on construction: those that name no GPUs get the lowest free ones, in order.

    Raises:
        InputError: if the engines need more GPUs than there are, two share one, or the profile lacks a shape
            or the draft method of an engine.

    >>> from tailopt.engine.catalogue import load_engine
    >>> [engine.gpus for engine in Fleet.of(load_engine("h100-llama-3.1-8b"), "1xTP2+1xTP1").engines]
    [(0, 1), (2,)]
    """

    profile: EngineProfile
    engines: tuple[Engine, ...]
    gpus: int

    def __post_init__(self) -> None:
        assign(self, engines=tuple(self.engines))
        if not self.engines:
            raise InputError("fleet: expected at least one engine")
        need = sum(engine.tp for engine in self.engines)
        if need > self.gpus:
            raise InputError(f"fleet: {len(self.engines)} engines need {need} GPUs, there are {self.gpus}")
        for engine in self.engines:
            shape = self.profile.shape(engine.tp)
            if engine.speculation is not None:
                engine.speculation.check(shape)
        assign(self, engines=_placed(self.engines, self.gpus))

    @classmethod
    def of(cls, profile: EngineProfile, shape: str, gpus: int | None = None) -> "Fleet":
        """A fleet from the text of its shape, as ``str`` of a fleet gives it; ``gpus`` defaults to all used.

        >>> from tailopt.engine.catalogue import load_engine
        >>> fleet = Fleet.of(load_engine("h100-llama-3.1-8b"), "2xTP2+1xTP4")
        >>> str(fleet), fleet.gpus
        ('2xTP2+1xTP4', 8)
        """
        engines: list[Engine] = []
        for part in shape.split("+"):
            found = re.fullmatch(r"\s*(\d{1,5})\s*[xX]\s*[tT][pP](\d{1,5})\s*", part)
            if found is None or int(found[1]) < 1 or int(found[2]) < 1:
                raise InputError(f"shape {shape!r}: expected engines like 8xTP1 or 2xTP2+1xTP4")
            engines += int(found[1]) * [Engine(int(found[2]))]
        return cls(profile, tuple(engines), sum(engine.tp for engine in engines) if gpus is None else gpus)

    def shape_of(self, engine: int) -> ShapeProfile:
        """The profile's numbers for the engine at this position."""
        return self.profile.shape(self.engines[engine].tp)

    def limits(self, engine: int) -> tuple[tuple[int, int], ...]:
        """The concurrency limits of this engine, (finished, running), its own or the profile's, the lower."""
        return self.engines[engine].limits_within(self.shape_of(engine).max_running)

    def max_running(self, engine: int) -> int:
        """Requests that this engine decodes together at most: the highest of its limits."""
        return max(running for _, running in self.limits(engine))

    @property
    def identical(self) -> bool:
        """True if all engines have one shape, the same limits, and decode and schedule alike."""
        kinds = {
            (engine.tp, self.limits(i), engine.speculation, engine.scheduling)
            for i, engine in enumerate(self.engines)
        }
        return len(kinds) == 1

    def __str__(self) -> str:
        counts: dict[int, int] = {}
        for engine in self.engines:
            counts[engine.tp] = counts.get(engine.tp, 0) + 1
        return "+".join(f"{count}xTP{tp}" for tp, count in counts.items())


@dataclass(frozen=True, eq=False)
class View:
    """All that a policy may see. Arrays have one entry per unfinished request, in the order of the batch.

    Attributes:
        now_s: the time, 0 at the start of the batch; whether it is the start, ``is_start`` says.
        fleet: the engines and their profile.
        prompt: group of each request, dense from 0 at the start.
        prompt_tokens: prompt length in tokens.
        generated_tokens: tokens generated so far.
        engine: where it runs or waits, -1 if nowhere yet.
        running: whether it is being decoded now.
        predicted_tokens: predicted output length in tokens, or None if the run has no predictor.
        scenario_tokens: ``[scenarios, n]`` output lengths in equally likely outcomes of the whole batch, or
            None if the predictor draws none.
        atomic: True if the requests of one group must stay on one engine.
        seed: for policies that draw; differs by batch, equal for all policies of a batch.
        request: the number of each request in the batch.
        finished_prompt, finished_tokens: group and output length of the requests that are done.
        finished_capped: whether each of them was cut off, by a limit of the plan or by being given up: then
            its own length is above ``finished_tokens`` (a censored length).
    """

    now_s: float
    fleet: Fleet
    prompt: Ints
    prompt_tokens: Ints
    generated_tokens: Ints
    engine: Ints
    running: Bools
    predicted_tokens: Floats | None
    atomic: bool
    seed: int
    scenario_tokens: Floats | None = None
    request: Ints | None = None
    finished_prompt: Ints | None = None
    finished_tokens: Ints | None = None
    finished_capped: Bools | None = None

    def __post_init__(self) -> None:
        n = len(self.prompt)
        given = np.arange(n) if self.request is None else self.request
        done, tokens = (() if part is None else part for part in (self.finished_prompt, self.finished_tokens))
        capped = np.zeros(len(done)) if self.finished_capped is None else self.finished_capped
        assign(
            self,
            request=ints("view: request", given, n, minimum=0),
            finished_prompt=ints("view: finished_prompt", done, minimum=0),
            finished_tokens=ints("view: finished_tokens", tokens, len(done), minimum=0),
            finished_capped=bools("view: finished_capped", capped, len(done)),
        )
        assign(
            self,
            prompt=ints("view: prompt", self.prompt, minimum=0),
            prompt_tokens=ints("view: prompt_tokens", self.prompt_tokens, n, minimum=0),
            generated_tokens=ints("view: generated_tokens", self.generated_tokens, n, minimum=0),
            engine=ints("view: engine", self.engine, n, minimum=SHARED_QUEUE),
            running=bools("view: running", self.running, n),
        )
        if self.predicted_tokens is not None:
            predicted = floats("view: predicted_tokens", self.predicted_tokens, n, minimum=0)
            assign(self, predicted_tokens=predicted)
        if self.scenario_tokens is not None:
            what = "view: scenario_tokens"
            drawn = np.array([floats(what, scenario, n, minimum=1) for scenario in self.scenario_tokens])
            if not len(drawn):
                raise InputError(f"{what}: expected at least one scenario")
            drawn.flags.writeable = False
            assign(self, scenario_tokens=drawn)

    @classmethod
    def at_start(
        cls,
        trace: Trace,
        fleet: Fleet,
        predicted_tokens: Floats | Ints | None = None,
        *,
        scenario_tokens: Floats | None = None,
        atomic: bool = False,
        seed: int = 0,
    ) -> "View":
        """What a policy sees of a batch before anything runs; of ``trace``, all but the output lengths."""
        n = trace.n_requests
        return cls(
            now_s=0.0,
            fleet=fleet,
            prompt=trace.group,
            prompt_tokens=trace.context_tokens,
            generated_tokens=np.zeros(n, dtype=np.int64),
            engine=np.full(n, SHARED_QUEUE, dtype=np.int64),
            running=np.zeros(n, dtype=np.bool_),
            predicted_tokens=predicted_tokens,  # type: ignore[arg-type]  # made floats on construction
            atomic=atomic,
            seed=seed,
            scenario_tokens=scenario_tokens,
        )

    @property
    def n_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self.prompt)

    @property
    def is_start(self) -> bool:
        """Whether nothing has been planned yet; ``now_s`` does not tell, a review may be at time 0 too.

        >>> from tailopt.policies.example import example_view
        >>> example_view([[90, 80]]).is_start
        True
        """
        under_way = (self.engine != SHARED_QUEUE).any() or self.generated_tokens.any()
        over = self.finished_prompt is not None and len(self.finished_prompt) > 0
        return self.now_s == 0 and not under_way and not over

    @cached_property
    def unit(self) -> Ints:
        """``[n]`` what is routed as one: the group if ``atomic``, else the request itself; dense from 0."""
        return np.unique(self.prompt, return_inverse=True)[1] if self.atomic else np.arange(self.n_requests)

    def members(self) -> list[Ints]:
        """The requests of each unit, unit by unit."""
        order = np.argsort(self.unit, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.unit[order])) + 1)

    def predictions(self) -> Floats:
        """The predicted lengths; InputError if this view has none."""
        if self.predicted_tokens is None:
            raise InputError("this policy needs predicted lengths: choose a predictor")
        return self.predicted_tokens


@dataclass(frozen=True)
class ReviewPoint:
    """When a policy is asked again: when what ``when`` names is *crossed* after the plan took effect.

    ``"unfinished"``
        the number of unfinished requests falls from above ``value`` to it or below;
    ``"tokens"``
        a request that had generated fewer than ``value`` tokens has generated so many, and is not over;
    ``"idle"``
        an engine is left with nothing to do, and nothing it might pull, while others have; one that the plan
        gives nothing from the start has not been *left* so, and does not count;
    ``"time"``
        the clock reaches ``value`` seconds.

    As each is a crossing, a policy may answer with the same points for ever.

    >>> ReviewPoint("unfinished", 8)
    ReviewPoint(when='unfinished', value=8.0)
    """

    when: Literal["unfinished", "tokens", "idle", "time"]
    value: float = 0.0

    def __post_init__(self) -> None:
        least = {"unfinished": 1, "tokens": 1, "idle": 0, "time": 0}
        if self.when not in least:
            raise InputError(f"review point: expected one of {', '.join(least)}, got {shown(self.when)}")
        value = float(floats("review point: value", [self.value], 1, minimum=least[self.when])[0])
        if self.when != "time" and value != int(value):
            raise InputError(f"review point: {self.when}: expected a whole number, got {value}")
        if self.when != "time" and value >= 2**53:
            raise InputError(f"review point: {self.when}: expected a number below 2**53, got {value:g}")
        assign(self, value=value)


Move = Literal["cheaper", "recompute", "migrate"]


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each request goes and in which order requests are admitted.

    Attributes:
        engines: the engines, with the concurrency limits that the plan wants.
        engine_of: ``[n]`` engine of each request, or ``SHARED_QUEUE`` (-1): an engine with room pulls it, but
            one that runs on an engine that goes on stays there; or, at a review, ``DROPPED`` (-2).
        order: ``[n]`` a permutation of the requests: an engine admits its own requests in this order, and the
            shared queue is served in this order.
        atomic: an engine that pulls a request from the shared queue takes its whole group.
        note: a remark for tables.
        review: when to ask the policy again.
        max_tokens: ``[n]`` tokens after which a request is ended, None for no limit but its own length.
        deadline_s: when all that is unfinished is given up, with the tokens it has; None for never.
        move: how a running request gets to another engine: its tokens are computed anew there
            (``"recompute"``), its KV cache is sent (``"migrate"``), or whichever the profile makes cheaper.

    Raises:
        InputError: if a request is missing, appears twice, or names an engine that does not exist.

    >>> plan = Plan.of_queues([Engine(1), Engine(1)], [[2, 0], [1]])
    >>> plan.engine_of, plan.order
    (array([0, 1, 0]), array([2, 0, 1]))
    """

    engines: tuple[Engine, ...]
    engine_of: Ints
    order: Ints
    atomic: bool = False
    note: str = ""
    review: tuple[ReviewPoint, ...] = ()
    max_tokens: Ints | None = None
    deadline_s: float | None = None
    move: Move = "cheaper"

    def __post_init__(self) -> None:
        if not all(isinstance(engine, Engine) for engine in self.engines):
            raise InputError("plan: engines: expected each to be a tailopt.plan.Engine")
        if not isinstance(self.atomic, bool) or not isinstance(self.note, str):
            raise InputError("plan: expected atomic to be True or False, and note to be a text")
        engine_of = ints("plan: engine_of", self.engine_of, minimum=DROPPED)
        order = ints("plan: order", self.order, minimum=0)
        if self.note.encode(errors="replace").decode() != self.note:
            raise InputError("plan: note: expected a text that UTF-8 can hold")
        engines = tuple(self.engines)
        if not all(isinstance(point, ReviewPoint) for point in self.review):
            raise InputError("plan: review: expected each to be a tailopt.plan.ReviewPoint")
        if self.move not in get_args(Move):
            raise InputError(f"plan: move: expected {', '.join(get_args(Move))}, got {shown(self.move)}")
        if self.max_tokens is not None:
            limits = ints("plan: max_tokens", self.max_tokens, len(engine_of), minimum=1)
            assign(self, max_tokens=limits)
        if self.deadline_s is not None:
            deadline = floats("plan: deadline_s", [self.deadline_s], 1, minimum=0)
            assign(self, deadline_s=float(deadline[0]))
        if len(engine_of) and int(engine_of.max()) >= len(engines):
            request = int(np.argmax(engine_of))
            raise InputError(
                f"plan: request {request} goes to engine {engine_of[request]}, there are {len(engines)}"
            )
        _check_permutation(order, len(engine_of))
        assign(self, engines=engines, engine_of=engine_of, order=order, review=tuple(self.review))

    @classmethod
    def of_queues(
        cls,
        engines: Sequence[Engine],
        queues: Sequence[Sequence[int] | Ints],
        shared: Sequence[int] | Ints = (),
        *,
        atomic: bool = False,
        note: str = "",
    ) -> "Plan":
        """A plan from each engine's own queue (requests in admission order) and the shared queue."""
        if len(queues) != len(engines):
            raise InputError(f"plan: {len(queues)} queues for {len(engines)} engines")
        owner = [(SHARED_QUEUE, shared), *enumerate(queues)]
        order = np.concatenate([np.asarray(queue, dtype=np.int64).reshape(-1) for _, queue in owner])
        engine = np.concatenate([np.full(len(queue), engine, dtype=np.int64) for engine, queue in owner])
        order = ints("plan: queues", order, minimum=0)
        _check_permutation(order, len(order))
        engine_of = np.empty(len(order), dtype=np.int64)
        engine_of[order] = engine
        return cls(tuple(engines), engine_of, order, atomic, note)

    def check(self, view: View) -> None:
        """Raise InputError unless this plan answers ``view``: its requests, its engines, its groups.

        At the start the engines are the fleet's; at a review, any that the GPUs can hold.
        """
        if len(self.engine_of) != view.n_requests:
            raise InputError(f"plan: has {len(self.engine_of)} requests, expected {view.n_requests}")
        fleet = Fleet(view.fleet.profile, self.engines, view.fleet.gpus)
        if view.is_start:
            if (self.engine_of == DROPPED).any():
                raise InputError(f"plan: request {int(np.argmin(self.engine_of))} is dropped before it runs")
            if [engine.tp for engine in fleet.engines] != [engine.tp for engine in view.fleet.engines]:
                shapes = [engine.tp for engine in self.engines]
                raise InputError(f"plan: engines of TP {shapes}, expected the fleet's, {view.fleet}")
        if view.atomic:
            if not self.atomic and (self.engine_of == SHARED_QUEUE).any():
                raise InputError("plan: groups are atomic here, expected a shared queue with atomic=True")
            for members in view.members():
                used = np.setdiff1d(self.engine_of[members], [DROPPED])
                if len(used) > 1:
                    raise InputError(
                        f"plan: group {view.prompt[members[0]]} is spread over engines {used.tolist()}, "
                        "expected one (groups are atomic)"
                    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _limits(given: Any) -> tuple[tuple[int, int], ...]:
    what = "engine: limits: expected pairs of whole numbers from 1 on, finished rising, got"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(f"{what} {shown(given)}")
    before = 0
    for place, pair in enumerate(given):
        whole = isinstance(pair, Sequence) and len(pair) == 2 and all(_is_whole(value) for value in pair)
        if not whole or not before < pair[0] < 2**31 or not 1 <= pair[1] < 2**31:
            raise InputError(f"{what} {shown(pair)} as number {place}")
        before = pair[0]
    return tuple((int(finished), int(running)) for finished, running in given)


def _placed(engines: tuple[Engine, ...], gpus: int) -> tuple[Engine, ...]:
    taken = [gpu for engine in engines for gpu in engine.gpus or ()]
    if len(set(taken)) < len(taken):
        twice = next(gpu for gpu in taken if taken.count(gpu) > 1)
        raise InputError(f"fleet: GPU {twice} belongs to two engines, expected one")
    if taken and max(taken) >= gpus:
        raise InputError(f"fleet: GPU {max(taken)} does not exist, there are {gpus}")
    free = iter(sorted(set(range(gpus)) - set(taken)))
    return tuple(
        engine
        if engine.gpus is not None
        else replace(engine, gpus=tuple(next(free) for _ in range(engine.tp)))
        for engine in engines
    )


def _check_permutation(order: Ints, n: int) -> None:
    if len(order) and int(order.max()) >= n:
        raise InputError(f"plan: request {int(order.max())} does not exist, there are {n}")
    count = np.bincount(order, minlength=n)
    if (count > 1).any():
        raise InputError(f"plan: request {int(np.argmax(count > 1))} is assigned twice, expected once")
    if (count < 1).any():
        raise InputError(f"plan: request {int(np.argmin(count))} is assigned to no engine, expected one")


Policy = Callable[[View], Plan]
"""A policy: any function from what is seen to a plan."""
