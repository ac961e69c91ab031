"""An engine profile: one model on one kind of GPU under one engine version, by tensor-parallel degree.

Everything that a prediction rests on, with its source. Profiles live as TOML files (see
:mod:`tailopt.engine.catalogue`); this module holds the checked type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from tailopt.arrays import assign
from tailopt.engine.step_time import StepTime
from tailopt.errors import InputError


@dataclass(frozen=True)
class ShapeProfile:
    """What one engine of a given tensor-parallel degree can do.

    Attributes:
        tp: tensor-parallel degree, the GPUs of one engine.
        step_time: seconds of one decode step.
        prefill_tokens_per_s: prompt tokens computed per second.
        kv_capacity_tokens: context tokens that fit into its KV cache.
        max_running: requests that it decodes together at most.
        token_budget: tokens that one step computes at most, decoded and prompt ones together
            (vLLM: ``max_num_batched_tokens``); at least ``max_running``.
        block_tokens: tokens of one block of KV cache.
        prefix_caching: whether requests of one prompt share the full blocks of it.
        fit: one line on how the numbers were derived and how far off the fit is.
    """

    tp: int
    step_time: StepTime
    prefill_tokens_per_s: float
    kv_capacity_tokens: int
    max_running: int
    token_budget: int = 8192
    block_tokens: int = 16
    prefix_caching: bool = True
    fit: str = ""

    def __post_init__(self) -> None:
        for what, value in (("tp", self.tp), ("kv_capacity_tokens", self.kv_capacity_tokens),
                            ("max_running", self.max_running), ("token_budget", self.token_budget),
                            ("block_tokens", self.block_tokens)):  # fmt: skip
            if value < 1 or int(value) != value:
                raise InputError(
                    f"engine profile TP{self.tp}: {what}: expected a whole number from 1 on, got {value}"
                )
        if self.token_budget < self.max_running:
            raise InputError(
                f"engine profile TP{self.tp}: token_budget: expected at least max_running, "
                f"{self.max_running}, got {self.token_budget}"
            )
        if not 0 < self.prefill_tokens_per_s < float("inf"):
            raise InputError(
                f"engine profile TP{self.tp}: prefill_tokens_per_s: expected a positive number, "
                f"got {self.prefill_tokens_per_s}"
            )


@dataclass(frozen=True)
class EngineProfile:
    """A model on a kind of GPU under an engine: one :class:`ShapeProfile` per tensor-parallel degree.

    Attributes:
        name: short name, as given to ``--engine``.
        hardware, model, precision, engine, engine_version: what was measured.
        date: when it was measured (ISO), or when the source was published.
        sources: citations, with commit or date.
        licence: licence of the source data.
        kv_bytes_per_token: bytes of KV cache per context token, over all layers, on all GPUs together.
        shapes: tensor-parallel degree -> :class:`ShapeProfile`.
        notes: what the numbers mix in and where they should not be trusted.
    """

    name: str
    hardware: str
    model: str
    precision: str
    engine: str
    engine_version: str
    date: str
    sources: tuple[str, ...]
    licence: str
    kv_bytes_per_token: int
    shapes: Mapping[int, ShapeProfile]
    notes: str = ""

    def __post_init__(self) -> None:
        if not self.shapes:
            raise InputError(f"engine {self.name!r}: expected at least one tensor-parallel degree")
        if any(tp != shape.tp for tp, shape in self.shapes.items()):
            raise InputError(f"engine {self.name!r}: a shape is filed under another tensor-parallel degree")
        if self.kv_bytes_per_token < 1:
            raise InputError(f"engine {self.name!r}: kv_bytes_per_token: expected a positive number")
        assign(self, shapes=MappingProxyType(dict(sorted(self.shapes.items()))), sources=tuple(self.sources))

    def __reduce__(self) -> tuple[type["EngineProfile"], tuple[object, ...]]:
        """Copied and pickled by its fields, as a mapping proxy can be neither."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return EngineProfile, tuple((parts | {"shapes": dict(self.shapes)}).values())

    def shape(self, tp: int) -> ShapeProfile:
        """The profile of one tensor-parallel degree; InputError names the known ones otherwise."""
        if tp not in self.shapes:
            known = ", ".join(f"TP{known}" for known in self.shapes)
            raise InputError(f"engine {self.name!r}: has no TP{tp}; known: {known}")
        return self.shapes[tp]
