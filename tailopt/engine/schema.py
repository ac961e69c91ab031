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

from tailopt.engine.profile import MOST_DRAFT_TOKENS, Draft, EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime, Table
from tailopt.errors import InputError

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**40)]
Seconds = Annotated[float, Field(ge=-1e6, le=1e6)]
Term = Annotated[float, Field(ge=0, le=1e6)]
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


AnyStepTime = Annotated[AffineModel | PowerModel | MaxAffineModel | TableModel, Field(discriminator="kind")]


class DraftModel(_Model):
    """One ``[[shape.drafts]]`` table."""

    method: Text
    acceptance: Annotated[float, Field(ge=0, le=1)]
    step_fraction: Term = 0.0
    seconds: Term = 0.0
    seconds_per_request: Term = 0.0
    most_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] = 8
    source: str = ""
    step_time: AnyStepTime | None = None


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
    step_time: AnyStepTime
    host_s: Term = 0.0
    host_per_request_s: Term = 0.0
    overlapped: bool = False
    sleep_s: Term = 0.0
    wake_s: Term = 0.0
    drafts: list[DraftModel] = []


ADDED = (
    "host_s",
    "host_per_request_s",
    "overlapped",
    "sleep_s",
    "wake_s",
    "link_bytes_per_s",
    "link_latency_s",
)
"""Keys that are written only where they say something."""


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
    link_bytes_per_s: Annotated[float, Field(gt=0, le=1e18)] | None = None
    link_latency_s: Term = 0.0
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
        fields = shape.model_dump(exclude={"step_time", "drafts"})
        place = f"{where}: shape[{index}]"
        step_time = _to_step_time(shape.step_time, place)
        drafts = [_to_draft(draft, f"{place}.drafts[{i}]") for i, draft in enumerate(shape.drafts)]
        try:
            shapes[shape.tp] = ShapeProfile(step_time=step_time, drafts=tuple(drafts), **fields)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
    return EngineProfile(
        **model.model_dump(exclude={"shape", "sources"}), sources=tuple(model.sources), shapes=shapes
    )


def _to_step_time(model: Any, place: str) -> StepTime:
    try:
        found: StepTime = STEP_TIMES[model.kind](**model.model_dump(exclude={"kind"}))
    except InputError as error:
        raise InputError(f"{place}.step_time: {error}") from None
    return found


def _to_draft(model: DraftModel, place: str) -> Draft:
    own = None if model.step_time is None else _to_step_time(model.step_time, place)
    return Draft(step_time=own, **model.model_dump(exclude={"step_time"}))


def to_toml(profile: EngineProfile) -> str:
    """``profile`` as TOML text that :func:`to_profile` turns back into an equal one."""
    lines = _pairs(profile, ProfileModel, without="shape")
    for shape in profile.shapes.values():
        lines += ["", "[[shape]]", *_pairs(shape, ShapeModel, without="drafts")]
        for draft in shape.drafts:
            lines += ["", "[[shape.drafts]]", *_pairs(draft, DraftModel)]
    return "\n".join(lines) + "\n"


def _pairs(source: Any, model: type[BaseModel], without: str = "") -> list[str]:
    """``key = value`` for each key of the model; none for one that was added later and says nothing."""
    lines = []
    for key, field in model.model_fields.items():
        value = getattr(source, key) if key != without else None
        if value is None or (key in ADDED and value == field.default):
            continue
        lines.append(f"{key} = {_step_time(value) if key == 'step_time' else _value(value)}")
    return lines


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
