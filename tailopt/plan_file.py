"""Plans as JSON: what another program writes for tailopt to simulate, or carries out for it.

.. code-block:: json

    {
      "format": "tailopt.plan/1",
      "engines": [{"tp": 1}, {"tp": 1, "max_running": 64}],
      "engine_of": [0, 1, 1, -1],
      "order": [3, 0, 1, 2],
      "atomic": false,
      "note": ""
    }

``engine_of`` has the engine of each request, -1 for the shared queue (and -2 for one that is given up, in an
answer at a review point); ``order`` is a permutation of the requests. More that a plan may say:

.. code-block:: json

    {
      "engines": [{"tp": 2, "gpus": [0, 1], "scheduling": "priority",
                   "speculation": {"method": "mtp", "draft_tokens": 1, "acceptance": 0.85},
                   "max_running": 3, "limits": [[1, 2], [4, 5]]}],
      "review": [{"when": "unfinished", "value": 8}, {"when": "idle"}],
      "max_tokens": [1000, 1000, 1000, 1000],
      "deadline_s": 600.0,
      "move": "recompute"
    }

``limits`` lets the concurrency limit follow the requests that have finished on the engine: here 3 run
together at first, 2 from the first finish on, 5 from the fourth on.

The JSON schema is in ``docs/plan.schema.json`` and comes from :func:`plan_schema`.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailopt.engine.speculation import Speculation
from tailopt.errors import InputError
from tailopt.files import whole_file
from tailopt.plan import DROPPED, Engine, Move, Plan, ReviewPoint, Scheduling

FORMAT: Literal["tailopt.plan/1"] = "tailopt.plan/1"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SpeculationModel(_Model):
    """The speculative decoding of an engine."""

    method: Annotated[str, Field(min_length=1, description="a draft method of the engine's profile")]
    draft_tokens: Annotated[
        int | None, Field(ge=0, description="tokens drafted a step; null for the best at each concurrency")
    ] = None
    acceptance: Annotated[
        float | None,
        Field(ge=0, le=1, description="chance that a drafted token is accepted; null: profile's"),
    ] = None
    context_tokens: Annotated[
        int, Field(ge=0, description="context of a request at which the best draft_tokens are chosen")
    ] = Speculation.context_tokens


class EngineModel(_Model):
    """One engine of a plan."""

    tp: Annotated[int, Field(ge=1, description="tensor-parallel degree, the GPUs of the engine")]
    max_running: Annotated[
        int | None,
        Field(ge=1, description="requests that it decodes together at most; null for the engine's own limit"),
    ] = None
    gpus: Annotated[
        list[Annotated[int, Field(ge=0)]] | None,
        Field(description="the numbers of its GPUs; null for the lowest free ones"),
    ] = None
    speculation: SpeculationModel | None = None
    scheduling: Annotated[
        Scheduling, Field(description="first come first served, or by the place in the plan's order")
    ] = "fcfs"
    limits: Annotated[
        list[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]] | None,
        Field(
            description="pairs of requests finished on it under this plan, rising, and requests that it "
            "decodes together at most from then on; null for max_running throughout"
        ),
    ] = None

    @classmethod
    def of(cls, engine: Engine) -> "EngineModel":
        """The engine as it is written."""
        fields = vars(engine) | {"gpus": None if engine.gpus is None else list(engine.gpus)}
        fields["limits"] = list(engine.limits) or None
        own = engine.speculation
        return cls(**fields | {"speculation": None if own is None else SpeculationModel(**vars(own))})

    def engine(self) -> Engine:
        """The engine as it is held; InputError if it cannot be one."""
        fields = self.model_dump(exclude={"speculation"})
        own = self.speculation
        fields["limits"] = self.limits or ()
        return Engine(**fields, speculation=None if own is None else Speculation(**own.model_dump()))


class ReviewModel(_Model):
    """When the policy is asked again."""

    when: Literal["unfinished", "tokens", "idle", "time"]
    value: Annotated[float, Field(ge=0, description="requests, tokens or seconds; of no effect for idle")] = (
        0.0
    )

    @classmethod
    def of(cls, point: ReviewPoint) -> "ReviewModel":
        """The review point as it is written."""
        return cls(when=point.when, value=point.value)

    def point(self) -> ReviewPoint:
        """The review point as it is held; InputError if it cannot be one."""
        return ReviewPoint(self.when, self.value)


class PlanModel(_Model):
    """Where each request of a batch goes, and in which order requests are admitted."""

    model_config = ConfigDict(title="tailopt plan")

    format: Annotated[Literal["tailopt.plan/1"], Field(description="name and version of this format")]
    engines: Annotated[list[EngineModel], Field(min_length=1)]
    engine_of: Annotated[
        list[Annotated[int, Field(ge=DROPPED)]],
        Field(
            description="for each request the index of its engine; -1: any engine with room pulls it; "
            "-2, at a review only: it is given up"
        ),
    ]
    order: Annotated[
        list[Annotated[int, Field(ge=0)]],
        Field(description="the requests in the order of admission, each once"),
    ]
    atomic: Annotated[
        bool,
        Field(description="an engine that pulls a request from the shared queue takes its whole group"),
    ] = False
    note: str = ""
    review: Annotated[list[ReviewModel], Field(description="when to ask the policy again")] = []
    max_tokens: Annotated[
        list[Annotated[int, Field(ge=1)]] | None,
        Field(description="for each request the tokens after which it is ended; null for no limit"),
    ] = None
    deadline_s: Annotated[
        float | None, Field(ge=0, description="when all that is unfinished is given up; null for never")
    ] = None
    move: Annotated[Move, Field(description="how a running request gets to another engine")] = "cheaper"

    @classmethod
    def of(cls, plan: Plan) -> "PlanModel":
        """The plan as it is written."""
        return cls(
            format=FORMAT,
            engines=[EngineModel.of(engine) for engine in plan.engines],
            engine_of=plan.engine_of.tolist(),
            order=plan.order.tolist(),
            atomic=plan.atomic,
            note=plan.note,
            review=[ReviewModel.of(point) for point in plan.review],
            max_tokens=None if plan.max_tokens is None else plan.max_tokens.tolist(),
            deadline_s=plan.deadline_s,
            move=plan.move,
        )

    def plan(self) -> Plan:
        """The plan as it is held; InputError if it cannot be one."""
        return Plan(
            tuple(engine.engine() for engine in self.engines),
            self.engine_of,  # type: ignore[arg-type]  # made arrays on construction
            self.order,  # type: ignore[arg-type]
            self.atomic,
            self.note,
            tuple(point.point() for point in self.review),
            self.max_tokens,  # type: ignore[arg-type]
            self.deadline_s,
            self.move,
        )


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan, as published."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **PlanModel.model_json_schema()}


def plan_to_json(plan: Plan) -> str:
    """A plan as JSON text.

    >>> plan = Plan.of_queues([Engine(1), Engine(2)], [[2, 0], [1]], note="by hand")
    >>> plan_from_json(plan_to_json(plan)).order
    array([2, 0, 1])
    """
    return PlanModel.of(plan).model_dump_json(exclude_none=True) + "\n"


def plan_from_json(text: str | bytes, *, where: str = "plan") -> Plan:
    """The plan that JSON text holds.

    Raises:
        InputError: one line with ``where``, the key, the value and what was expected.

    >>> plan_from_json('{"format": "tailopt.plan/1", "engines": [], "engine_of": [], "order": []}')
    Traceback (most recent call last):
        ...
    tailopt.errors.InputError: plan: engines: List should have at least 1 item after validation, not 0, got []
    """
    try:
        model = PlanModel.model_validate_json(text)
    except ValidationError as error:
        raise InputError(f"{where}: {first_error(error)}") from None
    try:
        return model.plan()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON, whole or not at all; :func:`read_plan` gives an equal one back.

    Raises:
        InputError: if the file cannot be written.
    """
    with whole_file(path) as temporary:
        temporary.write_text(plan_to_json(plan), encoding="utf-8")


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a JSON file.

    Raises:
        InputError: if the file cannot be read, or as :func:`plan_from_json`.
    """
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return plan_from_json(text, where=str(path))


def first_error(error: ValidationError) -> str:
    """The first complaint: where in the document, what was expected, and what was there."""
    found = error.errors(include_url=False)[0]
    if found["type"] == "json_invalid":
        return f"not JSON ({found['ctx']['error']})"
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).lstrip(".")
    got = "" if found["type"] == "missing" else f", got {json.dumps(found['input'])[:60]}"
    return f"{place or 'document'}: {found['msg']}{got}"
