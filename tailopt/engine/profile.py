"""An engine profile: one model on one kind of GPU under one engine version, by tensor-parallel degree.

Everything that a prediction rests on, with its source. Profiles live as TOML files (see
:mod:`tailopt.engine.catalogue`); this module holds the checked type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from types import MappingProxyType

import numpy as np

from tailopt.arrays import assign
from tailopt.engine.step_time import StepTime
from tailopt.errors import InputError


@dataclass(frozen=True)
class Draft:
    """One way to draft tokens for speculative decoding (:mod:`tailopt.engine.speculation`), and its cost.

    Attributes:
        method: name of the draft method: ``"ngram"``, ``"mtp"``, ``"draft"``, ``"eagle3"``, ...
        acceptance: chance that a drafted token is accepted if those before it are.
        step_time: of a draft model of its own, once per drafted token; None if it has none.
        step_fraction: what one drafted token costs, as a share of the engine's own step with as many
            requests: heads that sit on the model, as MTP and EAGLE.
        seconds: per step that drafts, whatever runs.
        seconds_per_request: per step that drafts and request: looking up n-grams on the host.
        most_tokens: tokens drafted a step at most where the best number is chosen: as far as ``acceptance``
            holds, which falls from token to token.
        source: where the numbers come from.
    """

    method: str
    acceptance: float
    step_time: StepTime | None = None
    step_fraction: float = 0.0
    seconds: float = 0.0
    seconds_per_request: float = 0.0
    most_tokens: int = 8
    source: str = ""

    def __post_init__(self) -> None:
        if not self.method:
            raise InputError("draft: method: expected a name")
        if not 1 <= self.most_tokens <= MOST_DRAFT_TOKENS:
            raise InputError(
                f"draft {self.method}: most_tokens: expected 1 to {MOST_DRAFT_TOKENS}, got {self.most_tokens}"
            )
        _check_between(f"draft {self.method}: acceptance", self.acceptance, 0.0, 1.0)
        for what in ("step_fraction", "seconds", "seconds_per_request"):
            _check_between(f"draft {self.method}: {what}", getattr(self, what), 0.0, MOST_S)


MOST_DRAFT_TOKENS = 64
"""Tokens drafted a step."""

MOST_S = 1e6
"""Of a term in seconds."""

ROUNDING = 1e-9
"""Share of a step time that rounding may take."""


@dataclass(frozen=True)
class ShapeProfile:
    """What one engine of a given tensor-parallel degree can do.

    Attributes:
        tp: tensor-parallel degree, the GPUs of one engine.
        step_time: seconds of one decode step, from its beginning to the beginning of the next.
        prefill_tokens_per_s: prompt tokens computed per second.
        kv_capacity_tokens: context tokens that fit into its KV cache.
        max_running: requests that it decodes together at most.
        token_budget: tokens that one step computes at most, decoded and prompt ones together
            (vLLM: ``max_num_batched_tokens``); at least ``max_running``.
        block_tokens: tokens of one block of KV cache.
        prefix_caching: whether requests of one prompt share the full blocks of it.
        fit: one line on how the numbers were derived and how far off the fit is.
        host_s, host_per_request_s: how much of ``step_time`` the GPU waits for the host (scheduling,
            sampling, sending tokens out), whatever runs and per running request. A step that only computes
            prompts takes ``host_s`` beside its tokens. 0 also where the share is not known.
        overlapped: the host works while the GPU does (asynchronous scheduling), so the GPU waits only where
            the host takes longer: ``step_time`` is the larger of both, and a step without decoding pays
            nothing (:func:`tailopt.engine.speculation.overlapped`).
        drafts: ways to draft tokens that this shape knows, one each.
        sleep_s, wake_s: seconds to put such an engine to sleep when the fleet changes, and to wake one.
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
    host_s: float = 0.0
    host_per_request_s: float = 0.0
    overlapped: bool = False
    drafts: tuple[Draft, ...] = ()
    sleep_s: float = 0.0
    wake_s: float = 0.0

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
        for what in ("host_s", "host_per_request_s", "sleep_s", "wake_s"):
            _check_between(f"engine profile TP{self.tp}: {what}", getattr(self, what), 0.0, MOST_S)
        assign(self, drafts=tuple(self.drafts))
        methods = [draft.method for draft in self.drafts]
        if len(set(methods)) < len(methods):
            twice = next(method for method in methods if methods.count(method) > 1)
            raise InputError(f"engine profile TP{self.tp}: draft {twice!r} is given twice, expected once")
        if self.host_s or self.host_per_request_s:
            self._check_host()

    def draft(self, method: str) -> Draft:
        """The numbers of one draft method; InputError names the known ones otherwise."""
        for draft in self.drafts:
            if draft.method == method:
                return draft
        known = ", ".join(draft.method for draft in self.drafts) or "none"
        raise InputError(f"engine profile TP{self.tp}: has no draft method {method!r}; known: {known}")

    def _check_host(self) -> None:
        """What the host takes is part of the step time; what is left never falls, whatever the context."""
        running = np.arange(1, self.max_running + 1)
        base_s = self.step_time.lines(self.max_running).base_s[:, 1:]
        host = self.host_s + self.host_per_request_s * running
        left = base_s - host
        bad = left.max(axis=0) < -ROUNDING * host
        if not self.overlapped:
            bad[1:] |= (np.diff(left) < -ROUNDING * host[1:]).any(axis=0)
        if bad.any():
            n = int(np.argmax(bad)) + 1
            raise InputError(
                f"engine profile TP{self.tp}: the host takes {host[n - 1]:.3g} s of a step of {n} requests, "
                f"{base_s[:, n - 1].max():.3g} s; expected the rest to be at least 0 and never to fall"
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
        link_bytes_per_s: how fast KV cache is sent from one engine to another; None if it cannot be.
        link_latency_s: seconds that each such transfer takes beside.
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
    link_bytes_per_s: float | None = None
    link_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.shapes:
            raise InputError(f"engine {self.name!r}: expected at least one tensor-parallel degree")
        if any(tp != shape.tp for tp, shape in self.shapes.items()):
            raise InputError(f"engine {self.name!r}: a shape is filed under another tensor-parallel degree")
        if self.kv_bytes_per_token < 1:
            raise InputError(f"engine {self.name!r}: kv_bytes_per_token: expected a positive number")
        if self.link_bytes_per_s is not None and not 0 < self.link_bytes_per_s < float("inf"):
            raise InputError(
                f"engine {self.name!r}: link_bytes_per_s: expected a positive number, "
                f"got {self.link_bytes_per_s}"
            )
        _check_between(f"engine {self.name!r}: link_latency_s", self.link_latency_s, 0.0, MOST_S)
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


def _check_between(what: str, value: float, least: float, most: float) -> None:
    if not isfinite(value) or not least <= value <= most:
        raise InputError(f"{what}: expected a number from {least:g} to {most:g}, got {value}")
