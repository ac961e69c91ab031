"""One loop that carries out a policy on any backend: the simulator's clock, or real engines.

.. code-block:: text

    policy(View) -> Plan -> backend ... review point -> policy(View) -> Plan -> backend ... all done -> Run

A :class:`Backend` knows the batch with its true lengths; the policy sees none of an unfinished request.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tailopt.arrays import Bools, Ints
from tailopt.errors import InputError
from tailopt.plan import DROPPED, Fleet, Plan, Policy, ReviewPoint, View
from tailopt.run import Run

MOST_IDLE_REVIEWS = 1000
"""Reviews without a token between that may hold up a batch: at one instant, or with a switch or move each."""


@dataclass(frozen=True, eq=False)
class State:
    """A batch at a review, when every engine has ended its step.

    Attributes:
        now_s: when the review point was reached; engines may have ended their steps a little later.
        reason: the review point, ``ReviewPoint("time", deadline_s)`` for the plan's deadline.
        fleet: the engines there are.
        engine: ``[n]`` where each request runs or waits, numbered as in ``fleet``; -1 if nowhere.
        running: ``[n]`` whether it has a place in a batch.
        generated: ``[n]`` tokens generated so far.
        finished: ``[n]`` whether it is done.
        capped: ``[n]`` whether it is done with fewer tokens than it has.
    """

    now_s: float
    reason: ReviewPoint
    fleet: Fleet
    engine: Ints
    running: Bools
    generated: Ints
    finished: Bools
    capped: Bools


class Backend(Protocol):
    """What carries out plans for one batch, once."""

    def start(self, plan: Plan) -> None:
        """Begin with this plan for all requests; InputError if it cannot be carried out."""
        ...

    def until_review(self) -> State | None:
        """Go on until a review point or the deadline of the plan is reached; None when all are done."""
        ...

    def change(self, plan: Plan, request: Ints) -> None:
        """Go on with this plan, whose entry i is about request ``request[i]``: all unfinished ones."""
        ...

    def run(self) -> Run:
        """What happened; after ``until_review`` returned None."""
        ...


def drive(backend: Backend, policy: Policy, view: View) -> Run:
    """Carry out ``policy`` from the start, as ``view`` shows it, to the end.

    Raises:
        InputError: if a plan does not answer its view, or cannot be carried out.
    """
    plan = policy(view)
    plan.check(view)
    backend.start(plan)
    tokens, reviews, last_s = 0, 0, -1.0
    while (state := backend.until_review()) is not None:
        if plan.deadline_s is not None and state.now_s >= plan.deadline_s:
            plan, request = _given_up(state)
        else:
            now = view_at(view, state)
            assert now.request is not None
            plan, request = policy(now), now.request
            plan.check(now)
        backend.change(plan, request)
        reviews = 0 if state.generated.sum() > tokens else reviews
        reviews += state.now_s <= last_s or _disturbs(plan, request, state)
        tokens, last_s = state.generated.sum(), state.now_s
        if reviews > MOST_IDLE_REVIEWS:
            raise InputError(
                f"policy: {reviews} reviews without a token between, at one instant or with a switch or a "
                f"move each, the last at {state.now_s} s"
            )
    return backend.run()


def follow(backend: Backend, plan: Plan) -> Run:
    """Carry out one plan from the start to the end, or to its deadline.

    Raises:
        InputError: if it cannot be carried out, or has review points.
    """
    if plan.review:
        raise InputError(f"plan: review point {plan.review[0].when!r}: expected none without a policy to ask")
    backend.start(plan)
    while (state := backend.until_review()) is not None:
        backend.change(*_given_up(state))
    return backend.run()


def view_at(start: View, state: State) -> View:
    """What a policy sees at a review: the unfinished requests, and what became of the finished ones.

    Predicted lengths are those of the start, but at least one token more than generated.
    """
    left, done = np.flatnonzero(~state.finished), np.flatnonzero(state.finished)
    generated = state.generated[left]
    predicted, scenarios = start.predicted_tokens, start.scenario_tokens
    return replace(
        start,
        now_s=state.now_s,
        fleet=state.fleet,
        prompt=start.prompt[left],
        prompt_tokens=start.prompt_tokens[left],
        generated_tokens=generated,
        engine=state.engine[left],
        running=state.running[left],
        predicted_tokens=None if predicted is None else np.maximum(predicted[left], generated + 1),
        scenario_tokens=None if scenarios is None else np.maximum(scenarios[:, left], generated + 1),
        request=left,
        finished_prompt=start.prompt[done],
        finished_tokens=state.generated[done],
        finished_capped=state.capped[done],
    )


def _disturbs(plan: Plan, request: Ints, state: State) -> bool:
    """Whether a plan opens an engine, or moves a request: if not, time alone brings the batch on."""
    then = Fleet(state.fleet.profile, plan.engines, state.fleet.gpus).engines
    before = state.fleet.engines
    if not all(any(one.same_as(other) for other in before) for one in then):
        return True
    source = state.engine[request]
    placed = np.flatnonzero((source >= 0) & (plan.engine_of >= 0) & (plan.engine_of != source))
    return any(not then[plan.engine_of[i]].same_as(before[source[i]]) for i in placed)


def _given_up(state: State) -> tuple[Plan, Ints]:
    left = np.flatnonzero(~state.finished)
    nowhere, order = np.full(len(left), DROPPED), np.arange(len(left))
    return Plan(state.fleet.engines, nowhere, order, note="deadline"), left
