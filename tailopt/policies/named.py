"""A policy as it is named and run: its spec, and what it must answer."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from tailopt.errors import InputError
from tailopt.plan import Plan, View
from tailopt.spec import Spec

F = TypeVar("F", bound=Callable[..., Any])


def ignores_predictions(policy: F) -> F:
    """Mark a policy that does not look at ``view.predicted_tokens``: it is run once, without a predictor.

    A policy without the mark is run once per predictor.

    >>> @ignores_predictions
    ... def first_engine(view):
    ...     return Plan(view.fleet.engines, [0] * view.n_requests, range(view.n_requests))
    >>> first_engine.needs_predictions
    False
    """
    policy.needs_predictions = False  # type: ignore[attr-defined]
    return policy


@dataclass(frozen=True)
class NamedPolicy:
    """A policy with its options.

    Attributes:
        spec: what names it.
    """

    spec: Spec[Plan]

    @property
    def name(self) -> str:
        """The spec's text, for tables."""
        return self.spec.text

    @property
    def needs_predictions(self) -> bool:
        """Whether it looks at predicted lengths (see :func:`ignores_predictions`)."""
        return self.spec.mark("policy", "needs_predictions") is not False

    def __call__(self, view: View) -> Plan:
        """The policy's plan, checked against the view.

        The policy sees a copy of the view, and its plan is made anew from its parts: whatever it does to
        either, then or later, changes neither the check nor what is simulated.

        Raises:
            InputError: naming the policy, if it raises (in a user's file), returns no Plan, or its plan does
                not answer the view.
        """
        plan = self.spec.call("policy", replace(view, fleet=deepcopy(view.fleet)), read=_plan)
        try:
            plan.check(view)
        except InputError as error:
            raise InputError(f"policy {self.name}: {error}") from None
        return plan


def _plan(answer: Any) -> Plan:
    """A plan from the parts of what a policy answered, all checked; InputError if that was no plan."""
    if not isinstance(answer, Plan):
        shape = f" of shape {answer.shape}" if hasattr(answer, "shape") else ""
        raise InputError(
            f"returned {type(answer).__name__}{shape}, expected a tailopt.plan.Plan; "
            "from an engine for each request it is Plan(view.fleet.engines, engine_of, order)"
        )
    plan = Plan(**{part.name: getattr(answer, part.name) for part in fields(Plan)})
    return replace(plan, engines=tuple(replace(engine) for engine in plan.engines))
