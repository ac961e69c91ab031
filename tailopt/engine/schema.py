"""The TOML schema of engine profiles, and both directions between it and :class:`EngineProfile`.

One pydantic model a table, unknown keys forbidden, types strict (``"5"`` is not 5, ``true`` is not 1). What
the numbers must satisfy (b >= 0, seconds that never fall ...) is checked where it is defined, in the types of
:mod:`tailopt.engine.step_time`; here such an error is only given its place in the file. A new kind of step
time is one model here and one line in ``STEP_TIMES``.
"""

import json
import re
from datetime import date
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime, Table
from tailopt.errors import InputError

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**40)]
Seconds = Annotated[float, Field(ge=-1e6, le=1e6)]
Rate = Annotated[float, Field(gt=0, le=1e12)]
"""Numbers beyond any engine are refused here, so that nothing overflows later."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class AffineModel(_Model):
    """``a + b n + c K``."""

    kind: Literal["affine"]
    a_s: Seconds
    b_s: Seconds
    c_s: Seconds = 0.0


class PowerModel(_Model):
    """``a + b n^p + c K``."""

    kind: Literal["power"]
    a_s: Seconds
    b_s: Seconds
    p: float
    c_s: Seconds = 0.0


class MaxAffineModel(_Model):
    """The largest of ``[a_s, b_s, c_s]`` pieces."""

    kind: Literal["max_affine"]
    pieces: list[Annotated[list[Seconds], Field(min_length=3, max_length=3)]]


class TableModel(_Model):
    """A measured curve."""

    kind: Literal["table"]
    running: list[Count]
    seconds: list[Seconds]
    c_s: Seconds = 0.0
    padded: bool = False


STEP_TIMES: dict[str, Any] = {"affine": Affine, "power": Power, "max_affine": MaxAffine, "table": Table}
"""``kind`` in the file -> class; the keys of its model are the arguments of the class."""


class ShapeModel(_Model):
    """One ``[[shape]]`` table."""

    tp: Count
    prefill_tokens_per_s: Rate
    kv_capacity_tokens: Count
    max_running: Count
    token_budget: Count = 8192
    block_tokens: Count = 16
    prefix_caching: bool = True
    fit: str = ""
    step_time: Annotated[AffineModel | PowerModel | MaxAffineModel | TableModel, Field(discriminator="kind")]


class ProfileModel(_Model):
    """The whole file."""

    name: Text
    hardware: Text
    model: Text
    precision: Text
    engine: Text
    engine_version: Text
    date: str
    licence: Text
    sources: Annotated[list[Text], Field(min_length=1)]
    kv_bytes_per_token: Count
    notes: str = ""
    shape: Annotated[list[ShapeModel], Field(min_length=1)]

    @field_validator("date", mode="before")
    @classmethod
    def _is_a_date(cls, text: Any) -> Any:
        """A text such as 2026-01-31; TOML's own dates, which have no quotes, are taken too."""
        if isinstance(text, date):
            return text.isoformat()[:10]
        if not isinstance(text, str):
            return text
        try:
            date.fromisoformat(text)
        except ValueError:
            raise ValueError("a date such as '2026-01-31'") from None
        return text


def to_profile(data: dict[str, Any], where: str) -> EngineProfile:
    """The profile that a parsed TOML file holds; InputError names ``where``, key, value and expectation."""
    try:
        model = ProfileModel.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{where}: {_one_line(error)}") from None
    shapes: dict[int, ShapeProfile] = {}
    for index, shape in enumerate(model.shape):
        if shape.tp in shapes:
            raise InputError(f"{where}: shape[{index}].tp: {shape.tp} is given twice, expected once")
        fields = shape.model_dump(exclude={"step_time"})
        arguments = shape.step_time.model_dump(exclude={"kind"})
        try:
            shapes[shape.tp] = ShapeProfile(step_time=STEP_TIMES[shape.step_time.kind](**arguments), **fields)
        except InputError as error:
            raise InputError(f"{where}: shape[{index}].step_time: {error}") from None
    return EngineProfile(
        **model.model_dump(exclude={"shape", "sources"}), sources=tuple(model.sources), shapes=shapes
    )


def to_toml(profile: EngineProfile) -> str:
    """``profile`` as TOML text that :func:`to_profile` turns back into an equal one."""
    head = {field: getattr(profile, field) for field in ProfileModel.model_fields if field != "shape"}
    lines = [f"{key} = {_value(value)}" for key, value in head.items()]
    for shape in profile.shapes.values():
        lines += ["", "[[shape]]"]
        for key in ShapeModel.model_fields:
            value = _step_time(shape.step_time) if key == "step_time" else _value(getattr(shape, key))
            lines.append(f"{key} = {value}")
    return "\n".join(lines) + "\n"


def _step_time(step_time: StepTime) -> str:
    for kind, cls in STEP_TIMES.items():
        if isinstance(step_time, cls):
            keys = list(cls.__dataclass_fields__)
            pairs = [f'kind = "{kind}"', *(f"{key} = {_value(getattr(step_time, key))}" for key in keys)]
            return "{ " + ", ".join(pairs) + " }"
    raise InputError(
        f"step time of type {type(step_time).__name__}: cannot be written; known: {', '.join(STEP_TIMES)}"
    )


def _value(value: Any) -> str:
    value = value.tolist() if hasattr(value, "tolist") else value
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _string(value)
        case int() | float():
            return repr(value)
    return "[" + ", ".join(map(_value, value)) + "]"


def _string(text: str) -> str:
    # JSON strings are TOML basic strings, but for DEL, which TOML wants escaped as well.
    lines = [
        json.dumps(line, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f") for line in text.split("\n")
    ]
    return f'"{lines[0]}"' if len(lines) == 1 else '"""\n' + "\n".join(lines) + '"""'


def _one_line(error: ValidationError) -> str:
    problems = error.errors()
    first = problems[0]
    key = ""
    for before, part in pairwise((None, *first["loc"])):
        if before == "step_time" and part in STEP_TIMES:
            continue  # pydantic puts the kind of step time into the path; the file has no such key
        key += f"[{part}]" if isinstance(part, int) else f".{_key(str(part))}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{key.lstrip('.')}: {_expectation(first)}{more}"


def _key(name: str) -> str:
    return f"{name:.60}" if re.fullmatch(r"[\w-]+", name) else f"{name!r:.60}"


def _expectation(problem: Any) -> str:
    kind, context, given = problem["type"], problem.get("ctx", {}), repr(problem["input"])
    given = given if len(given) <= 60 else given[:57] + "..."
    match kind:
        case "missing":
            return "missing, expected this key"
        case "extra_forbidden":
            return f"unknown key (value {given})"
        case "union_tag_invalid":
            return f"unknown kind {context['tag']!r}, expected one of {context['expected_tags']}"
        case "union_tag_not_found":
            return f"expected kind = one of {', '.join(map(repr, STEP_TIMES))}, got {given}"
        case "value_error":
            return f"expected {context['error']}, got {given}"
    expected = problem["msg"].removeprefix("Input should be ")
    return f"expected {expected}, got {given}"
