"""The Trace: what a rollout (or a server) generated, one row per response.

A **prompt** is sampled ``G`` times; the samples of one prompt at one training step form a **group**. A
response that the length cap cut off is **capped**: its length is *censored*, the true one is at least that
long. Nothing here is a prediction and nothing is a schedule: a Trace is ground truth.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tailopt.arrays import Bools, Floats, Ints, assign, bools, floats, ints
from tailopt.errors import InputError

UNKNOWN_CORRECT = -1


@dataclass(frozen=True, eq=False)
class Trace:
    """Responses and their lengths; immutable and checked on construction.

    Attributes:
        name: short name, used in tables.
        source: where the lengths come from, for a reader to check.
        prompt: ``[n]`` prompt of each response, dense integers ``0 .. n_prompts - 1``.
        prompt_ids: the source's own name of each prompt, ``prompt_ids[prompt[i]]``.
        sample: ``[n]`` sample index within the prompt (any non-negative numbering, unique within a group).
        prompt_tokens: ``[n]`` tokens of the prompt; 0 where the source does not say.
        output_tokens: ``[n]`` generated tokens, at least 1.
        capped: ``[n]`` whether a length cap cut the response off (a censored length).
        arrival_s: ``[n]`` arrival time in seconds; 0 throughout for a rollout batch.
        step: ``[n]`` training step or checkpoint, or None.
        correct: ``[n]`` 1 correct, 0 wrong, -1 unknown, or None.
        synthetic: True if the lengths were drawn from a distribution, not observed.
        licence: licence of the data, empty if unknown.

    Raises:
        InputError: if a column has the wrong length, type or range, or a row appears twice.

    >>> trace = Trace.of([[30, 50], [7, 9]], prompt_tokens=100)
    >>> trace.n_requests, trace.n_prompts, trace.total_output_tokens
    (4, 2, 96)
    """

    name: str
    source: str
    prompt: Ints
    prompt_ids: tuple[str, ...]
    sample: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    capped: Bools
    arrival_s: Floats
    step: Ints | None = None
    correct: Ints | None = None
    synthetic: bool = False
    licence: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        n = len(self.output_tokens)
        if n == 0:
            raise InputError(f"trace {self.name!r}: empty, expected at least one response")
        at = f"trace {self.name!r}: "
        assign(
            self,
            prompt=ints(at + "prompt", self.prompt, n, minimum=0),
            prompt_ids=tuple(str(prompt_id) for prompt_id in self.prompt_ids),
            sample=ints(at + "sample", self.sample, n, minimum=0),
            prompt_tokens=ints(at + "prompt_tokens", self.prompt_tokens, n, minimum=0),
            output_tokens=ints(at + "output_tokens", self.output_tokens, n, minimum=1),
            capped=bools(at + "capped", self.capped, n),
            arrival_s=floats(at + "arrival_s", self.arrival_s, n, minimum=0),
        )
        if self.step is not None:
            assign(self, step=ints(at + "step", self.step, n))
        if self.correct is not None:
            assign(self, correct=ints(at + "correct", self.correct, n, minimum=UNKNOWN_CORRECT))
            if int(self.correct.max()) > 1:
                raise InputError(f"{at}correct: expected 1, 0 or -1 (unknown), got {self.correct.max()}")
        self._check_rows(at)

    def _check_rows(self, at: str) -> None:
        expected = len(self.prompt_ids)
        dense = int(self.prompt.max()) == expected - 1 and np.bincount(self.prompt, minlength=1).all()
        if not dense:
            raise InputError(
                f"{at}prompt: expected dense ids 0..{len(self.prompt_ids) - 1}, one per entry of prompt_ids"
            )
        if len(set(self.prompt_ids)) != len(self.prompt_ids):
            raise InputError(f"{at}prompt_ids: two prompts have the same id")
        order = np.lexsort((self.sample, self.group))
        twice = (np.diff(self.group[order]) == 0) & (np.diff(self.sample[order]) == 0)
        if twice.any():
            row = int(order[1:][twice][0])
            where = "" if self.step is None else f" at step {self.step[row]}"
            raise InputError(
                f"{at}sample {self.sample[row]} of prompt {self.prompt_ids[self.prompt[row]]!r}{where} "
                "appears twice, expected once"
            )

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[int]],
        *,
        prompt_tokens: int | Sequence[int] = 0,
        name: str = "inline",
        source: str = "given in code",
        synthetic: bool = False,
    ) -> "Trace":
        """A trace from the output lengths of each group; ``prompt_tokens`` is one number or one a group."""
        sizes = np.array([len(group) for group in groups], dtype=np.int64)
        n = int(sizes.sum())
        per_group = np.broadcast_to(np.asarray(prompt_tokens), (len(groups),))
        return cls(
            name=name,
            source=source,
            prompt=np.repeat(np.arange(len(groups)), sizes),
            prompt_ids=tuple(str(i) for i in range(len(groups))),
            sample=np.arange(n) - np.repeat(np.cumsum(sizes) - sizes, sizes),
            prompt_tokens=np.repeat(per_group, sizes),
            output_tokens=np.array([length for group in groups for length in group]),
            capped=np.zeros(n, np.bool_),
            arrival_s=np.zeros(n),
            synthetic=synthetic,
        )

    @property
    def n_requests(self) -> int:
        """Number of responses."""
        return len(self.output_tokens)

    @cached_property
    def context_tokens(self) -> Ints:
        """``[n]`` tokens that an engine holds before the first one is generated: the prompt, at least one."""
        tokens = np.maximum(self.prompt_tokens, 1)
        tokens.flags.writeable = False
        return tokens

    @property
    def n_prompts(self) -> int:
        """Number of distinct prompts."""
        return len(self.prompt_ids)

    @property
    def total_output_tokens(self) -> int:
        """Sum of the output lengths."""
        return int(self.output_tokens.sum())

    @cached_property
    def group(self) -> Ints:
        """``[n]`` dense group id: the samples of one prompt at one training step."""
        if self.step is None:
            return self.prompt
        pairs = np.stack([self.step, self.prompt])
        group = np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
        group.flags.writeable = False
        return group

    @cached_property
    def sha256(self) -> str:
        """Digest of the columns (not of name or source): equal data, equal digest, on any machine."""
        digest = hashlib.sha256("\0".join(self.prompt_ids).encode())
        for column in (self.prompt, self.sample, self.prompt_tokens, self.output_tokens, self.capped,
                       self.arrival_s, self.step, self.correct):  # fmt: skip
            digest.update(b"-" if column is None else column.astype(column.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    def take(self, rows: Any, *, name: str | None = None) -> "Trace":
        """The responses ``rows`` (indices, in that order), prompts renumbered by first appearance."""
        rows = np.asarray(rows, dtype=np.int64)
        kept, first, dense = np.unique(self.prompt[rows], return_index=True, return_inverse=True)
        by_appearance = np.argsort(first)
        rank = np.empty_like(by_appearance)
        rank[by_appearance] = np.arange(len(kept))
        return replace(
            self,
            name=self.name if name is None else name,
            prompt=rank[dense.reshape(-1)],
            prompt_ids=tuple(self.prompt_ids[prompt] for prompt in kept[by_appearance]),
            sample=self.sample[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            capped=self.capped[rows],
            arrival_s=self.arrival_s[rows],
            step=None if self.step is None else self.step[rows],
            correct=None if self.correct is None else self.correct[rows],
        )
