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

``engine_of`` has the engine of each request, -1 for the shared queue; ``order`` is a permutation of the
requests. The JSON schema is in ``docs/plan.schema.json`` and comes from :func:`plan_schema`.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailopt.errors import InputError
from tailopt.files import whole_file
from tailopt.plan import SHARED_QUEUE, Engine, Plan

FORMAT: Literal["tailopt.plan/1"] = "tailopt.plan/1"


class EngineModel(BaseModel):
    """One engine of a plan."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tp: Annotated[int, Field(ge=1, description="tensor-parallel degree, the GPUs of the engine")]
    max_running: Annotated[
        int | None,
        Field(ge=1, description="requests that it decodes together at most; null for the engine's own limit"),
    ] = None


class PlanModel(BaseModel):
    """Where each request of a batch goes, and in which order requests are admitted."""

    model_config = ConfigDict(extra="forbid", strict=True, title="tailopt plan")

    format: Annotated[Literal["tailopt.plan/1"], Field(description="name and version of this format")]
    engines: Annotated[list[EngineModel], Field(min_length=1)]
    engine_of: Annotated[
        list[Annotated[int, Field(ge=SHARED_QUEUE)]],
        Field(description="for each request the index of its engine, or -1: any engine with room pulls it"),
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


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan, as published."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **PlanModel.model_json_schema()}


def plan_to_json(plan: Plan) -> str:
    """A plan as JSON text.

    >>> plan = Plan.of_queues([Engine(1), Engine(2)], [[2, 0], [1]], note="by hand")
    >>> plan_from_json(plan_to_json(plan)).order
    array([2, 0, 1])
    """
    model = PlanModel(
        format=FORMAT,
        engines=[EngineModel(tp=engine.tp, max_running=engine.max_running) for engine in plan.engines],
        engine_of=plan.engine_of.tolist(),
        order=plan.order.tolist(),
        atomic=plan.atomic,
        note=plan.note,
    )
    return model.model_dump_json(indent=None) + "\n"


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
        engines = [Engine(engine.tp, engine.max_running) for engine in model.engines]
        return Plan(tuple(engines), model.engine_of, model.order, model.atomic, model.note)  # type: ignore[arg-type]
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
