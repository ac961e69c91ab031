r"""Why a measured run was not as short as it could be: the gap to the optimum, split into its causes.

With the makespans, for one batch and one policy,

=========  ==============================================================================================
measured   of each repeat on real engines; their mean is M
simulated  of the same policy on the engine profile, S
told       of the best static plan for the *predicted* lengths, simulated with the true ones, Q; if the
           policy is told nothing, Q = U
upper      of the best static plan found for the true lengths, U
lower      which no static plan beats, L (certified)
=========  ==============================================================================================

the gap M - L is the sum of

.. math:: \underbrace{M - R}_{\text{step time}} + \underbrace{R - S}_{\text{course of events}}
          + \underbrace{S - Q}_{\text{policy}} + \underbrace{Q - U}_{\text{prediction}}
          + \underbrace{U - L}_{\text{open bound}},

where R prices the steps that were really taken with the profile: each engine's finish less its measured
steps plus what the profile says of the same numbers of requests, context and prefill; the latest engine
counts. So the first term is the error of the step time alone, and the second is what happened otherwise than
simulated (who was admitted when, pauses, switches). Together they are the error of the model. The noise of
execution is the spread of the repeats, and stands beside the sum, as it is in M.

A part may be negative: a policy that moves requests may beat the best static plan, and one that was misled
may be lucky.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats, assign, floats
from tailopt.engine.speculation import decoding
from tailopt.replay.ledger import Line
from tailopt.run import Run

PARTS = ("open bound", "prediction", "policy", "course of events", "step time")
"""From the lower bound up to the measurement."""


@dataclass(frozen=True, eq=False)
class Gap:
    """The makespans of one policy on one batch; seconds.

    Attributes:
        measured_s: ``[repeats]`` on real engines.
        repriced_s: ``[repeats]`` the steps that were taken, priced by the profile.
        simulated_s: on the profile.
        told_s: of the best static plan for what the policy was told.
        upper_s, lower_s: of the certificate.

    >>> gap = Gap([1.3, 1.5], [1.25, 1.25], 1.2, 1.1, 1.0, 0.9)
    >>> {part: round(seconds, 3) for part, seconds in gap.parts().items()}["step time"]
    0.15
    """

    measured_s: Floats
    repriced_s: Floats
    simulated_s: float
    told_s: float
    upper_s: float
    lower_s: float

    def __post_init__(self) -> None:
        assign(self, measured_s=floats("gap: measured_s", self.measured_s, minimum=0))
        assign(self, repriced_s=floats("gap: repriced_s", self.repriced_s, len(self.measured_s), minimum=0))

    @property
    def mean_s(self) -> float:
        """The mean of the measured makespans."""
        return float(self.measured_s.mean())

    @property
    def noise_s(self) -> float | None:
        """Their standard deviation; None for one repeat."""
        return float(self.measured_s.std(ddof=1)) if len(self.measured_s) > 1 else None

    @property
    def error(self) -> float:
        """Simulated over measured, less 1."""
        return self.simulated_s / self.mean_s - 1

    def parts(self) -> dict[str, float]:
        """Seconds of each of ``PARTS``; their sum is measured - lower."""
        repriced_s = float(self.repriced_s.mean())
        levels = (self.lower_s, self.upper_s, self.told_s, self.simulated_s, repriced_s, self.mean_s)
        return dict(zip(PARTS, np.diff(levels).tolist(), strict=True))


def repriced_s(run: Run, steps: Sequence[Line]) -> float:
    """The makespan of ``run`` if each of its ``step`` lines had taken what the profile says."""
    finish = np.zeros(len(run.engines))
    np.maximum.at(finish, run.engine[run.completed], run.finish_s[run.completed])
    late_s = profiled_s(run, steps) - np.array([step["s"] for step in steps])
    np.add.at(finish, np.array([step["engine"] for step in steps], dtype=np.int64), late_s)
    return float(finish.max())


def profiled_s(run: Run, steps: Sequence[Line]) -> Floats:
    """``[steps]`` what the profile says of each ``step`` line of ``run``; seconds."""
    most: dict[int, int] = {}
    for step in steps:
        most[step["engine"]] = max(step["n"], most.get(step["engine"], 0))
    shapes = {number: run.fleet.profile.shape(run.engines[number].tp) for number in most}
    decode = {
        number: decoding(shape, run.engines[number].speculation, most[number])
        for number, shape in shapes.items()
    }
    return np.array(
        [
            decode[step["engine"]].seconds(step["n"], step["K"])
            + step["P"] / shapes[step["engine"]].prefill_tokens_per_s
            for step in steps
        ]
    )
