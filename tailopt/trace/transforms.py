"""From one trace to others: batches to compare policies on, reshaped tails, bootstraps, cuts, inventions.

Every function returns new traces and draws only from the seed it is given.
"""

from dataclasses import dataclass, replace

import numpy as np

from tailopt.arrays import Ints
from tailopt.errors import InputError
from tailopt.trace.trace import Trace


@dataclass(frozen=True, eq=False)
class Batch:
    """One rollout batch drawn from a trace: what policies are compared on.

    Attributes:
        trace: whole groups, prompts numbered 0, 1, ... in the order drawn; all arrive at time 0.
        history: the samples of the same prompts that were not drawn, at the same training step or an earlier
            one: all that a history predictor may learn from. None if there are none.
        seed: seed of whatever else is drawn for this batch; differs by batch.
    """

    trace: Trace
    history: Trace | None
    seed: int

    @property
    def history_prompt(self) -> Ints:
        """``[history]`` the prompt of each response of ``history``, numbered as in ``trace``."""
        if self.history is None:
            return np.zeros(0, np.int64)
        number = {prompt_id: prompt for prompt, prompt_id in enumerate(self.trace.prompt_ids)}
        own = np.array([number[prompt_id] for prompt_id in self.history.prompt_ids], dtype=np.int64)
        return own[self.history.prompt]


def sample_batches(trace: Trace, *, batches: int, prompts: int, samples: int, seed: int) -> list[Batch]:
    """Draw ``batches`` rollout batches of ``prompts`` groups with ``samples`` samples each.

    Within a batch no group and no response is drawn twice; batches are drawn independently of one another,
    so batch i is the same however many are drawn. If the trace has training steps, each batch comes from a
    single one, drawn evenly among those with enough groups.

    Raises:
        InputError: if no training step has ``prompts`` groups of at least ``samples`` samples.

    >>> from tailopt.trace import Trace
    >>> trace = Trace.of([[3, 5, 8], [20, 30, 10], [1, 2, 2]])
    >>> (batch,) = sample_batches(trace, batches=1, prompts=2, samples=2, seed=0)
    >>> batch.trace.n_prompts, batch.trace.n_requests, batch.history.n_requests
    (2, 4, 2)
    """
    for what, value, least in (("batches", batches, 1), ("prompts", prompts, 1), ("samples", samples, 1),
                               ("seed", seed, 0)):  # fmt: skip
        if value < least:
            raise InputError(f"{what}: expected at least {least}, got {value}")
    rows_of = _rows_by_group(trace)
    by_step = _groups_by_step(trace, rows_of, samples)
    enough = [step for step, groups in by_step.items() if len(groups) >= prompts]
    if not enough:
        most = max(map(len, by_step.values()))
        where = "" if trace.step is None else " at one training step"
        raise InputError(
            f"trace {trace.name!r}: has {most} groups with at least {samples} samples{where}, "
            f"a batch needs {prompts}"
        )
    return [_batch(trace, rows_of, by_step, enough, prompts, samples, seed, i) for i in range(batches)]


def _batch(
    trace: Trace,
    rows_of: list[Ints],
    by_step: dict[int, Ints],
    steps: list[int],
    prompts: int,
    samples: int,
    seed: int,
    index: int,
) -> Batch:
    sequence = np.random.SeedSequence(seed, spawn_key=(index,))
    rng = np.random.default_rng(sequence)
    step = steps[int(rng.integers(len(steps)))]
    groups = rng.choice(by_step[step], size=prompts, replace=False)
    rows = np.concatenate(
        [np.sort(rng.choice(rows_of[group], size=samples, replace=False)) for group in groups]
    )
    same_prompt = np.isin(trace.prompt, trace.prompt[rows])
    same_prompt[rows] = False
    if trace.step is not None:
        same_prompt &= trace.step <= step
    left = np.flatnonzero(same_prompt)
    batch = trace.take(rows)
    return Batch(
        trace=replace(batch, arrival_s=np.zeros(batch.n_requests)),
        history=trace.take(left) if len(left) else None,
        seed=int(sequence.generate_state(1)[0]),
    )


def _rows_by_group(trace: Trace) -> list[Ints]:
    order = np.argsort(trace.group, kind="stable")
    return np.split(order, np.cumsum(np.bincount(trace.group))[:-1])


def _groups_by_step(trace: Trace, rows_of: list[Ints], samples: int) -> dict[int, Ints]:
    """Groups with at least ``samples`` samples, by training step (step 0 if the trace has none)."""
    enough = np.array([len(rows) >= samples for rows in rows_of])
    first = np.array([rows[0] for rows in rows_of])
    step = np.zeros(len(first), np.int64) if trace.step is None else trace.step[first]
    return {int(value): np.flatnonzero(enough & (step == value)) for value in np.unique(step)}
