"""What the stochastic oracle is asked."""

from dataclasses import dataclass, replace

import numpy as np

from tailopt.arrays import Floats, Ints, assign, ints
from tailopt.errors import InputError
from tailopt.oracle.problem import Problem
from tailopt.plan import Fleet, Plan
from tailopt.simulate import simulate
from tailopt.trace import Trace


@dataclass(frozen=True, eq=False)
class StochasticProblem:
    """A batch whose lengths are one of several equally likely scenarios: which one static plan is best?

    Best is the least mean makespan over the ``worst`` scenarios: all of them (the expectation), or the few
    in which the plan does worst (conditional value at risk at level 1 - worst / scenarios). The plan is
    fixed before a length is known; admission in it is in the order of the plan, which stays the same too.

    Attributes:
        trace: prompts and groups of the batch; its output lengths are not looked at.
        fleet: the engines.
        scenario_tokens: ``[scenarios, n]`` output lengths.
        atomic: whether groups must stay together.
        worst: how many scenarios count; all by default.

    Raises:
        InputError: if the scenarios do not fit the trace, or ``worst`` is not between 1 and their number.
    """

    trace: Trace
    fleet: Fleet
    scenario_tokens: Ints
    atomic: bool = False
    worst: int = 0

    def __post_init__(self) -> None:
        n = self.trace.n_requests
        tokens = [ints("scenario_tokens", scenario, n, minimum=1) for scenario in self.scenario_tokens]
        if not tokens:
            raise InputError("scenario_tokens: expected at least one scenario")
        stacked = np.stack(tokens)
        stacked.flags.writeable = False
        worst = self.worst or len(tokens)
        if not 1 <= worst <= len(tokens):
            raise InputError(f"worst: expected 1 to {len(tokens)} scenarios, got {worst}")
        assign(self, scenario_tokens=stacked, worst=worst)

    @property
    def scenarios(self) -> int:
        """Number of scenarios."""
        return len(self.scenario_tokens)

    @property
    def unit(self) -> Ints:
        """``[n]`` what is placed as one: the group if ``atomic``, else the request; dense from 0."""
        return self.trace.group if self.atomic else np.arange(self.trace.n_requests)

    def scenario(self, s: int) -> Problem:
        """The problem of one who knows that scenario ``s`` comes."""
        none_capped = np.zeros(self.trace.n_requests, dtype=np.bool_)
        trace = replace(self.trace, output_tokens=self.scenario_tokens[s], capped=none_capped)
        return Problem(trace, self.fleet, self.atomic)

    def makespans_s(self, plan: Plan) -> Floats:
        """``[scenarios]`` simulated makespan of a plan in each scenario."""
        problems = (self.scenario(s) for s in range(self.scenarios))
        return np.array([simulate(problem.trace, self.fleet, plan).makespan_s for problem in problems])
