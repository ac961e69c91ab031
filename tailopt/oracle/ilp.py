"""Integer linear programming: HiGHS and SCIP, through MathOpt of OR-tools, on
:mod:`tailopt.oracle.integer_model`.

These solvers compute in floating point and take a constraint as kept if it is off by a tolerance, so what
they call a bound is lowered by ``TOLERANCE`` before it counts: they cannot prove a plan optimal, but come
close to it. As with CP-SAT the certificate names the solver, and the checker verifies the program, not the
proof.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tailopt.oracle.bound_and_fill import plan_of, staircase
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.integer_model import Formulation, write_model
from tailopt.oracle.problem import Problem
from tailopt.oracle.solver_bound import Question, ortools
from tailopt.simulate.simulator import simulate

TIME_LIMIT_S = 60.0
BITS = 24
"""A makespan is 2^BITS ticks: few enough for the numbers to be sound in floating point."""

TOLERANCE = 1e-5
"""Share of a solver's bound that is given up, for its tolerances (1e-6 a constraint and variable)."""


def highs(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """The best plan and bound that HiGHS finds, starting from the quick bounds."""
    return _solved(problem, "HiGHS", time_limit_s, seed)


def scip(problem: Problem, *, time_limit_s: float | None = None, seed: int = 0) -> Certificate:
    """The best plan and bound that SCIP finds, starting from the filling and the quick bounds."""
    return _solved(problem, "SCIP", time_limit_s, seed)


def _solved(
    problem: Problem, name: str, time_limit_s: float | None, seed: int, formulation: Formulation = "leader"
) -> Certificate:
    started = time.perf_counter()
    mathopt = ortools("math_opt.python.mathopt")
    solver = {"HiGHS": mathopt.SolverType.HIGHS, "SCIP": mathopt.SolverType.GSCIP}[name]
    first = staircase(problem)
    question = Question.of(problem, first, BITS)
    modeler = _Modeler(mathopt)
    variables = write_model(modeler, question.model, question.engine_of_unit, formulation)
    modeler.model.minimize(variables.makespan)
    limit = timedelta(seconds=TIME_LIMIT_S if time_limit_s is None else time_limit_s)
    parameters = mathopt.SolveParameters(time_limit=limit, random_seed=seed % 2**31)
    hints = [mathopt.SolutionHint(variable_values=modeler.hint)] if name == "SCIP" else []
    try:
        result = mathopt.solve(
            modeler.model,
            solver,
            params=parameters,
            model_params=mathopt.ModelSolveParameters(solution_hints=hints),
        )
    except KeyboardInterrupt:
        return first
    engine_of_unit, ticks = question.engine_of_unit, result.termination.objective_bounds.dual_bound
    if result.has_primal_feasible_solution():
        values = result.variable_values()
        engine_of_unit = question.read(variables.placed, values.__getitem__)
    bound = question.bound(name, int(max(0.0, ticks) * (1 - TOLERANCE)), first)
    run = simulate(problem.trace, problem.fleet, plan_of(problem, question.units, engine_of_unit))
    return first.improved(bound, run, f"{name}, {formulation}", started, seed)


class _Modeler:
    """A MathOpt model as :class:`tailopt.oracle.integer_model.Modeler`."""

    def __init__(self, mathopt: Any) -> None:
        self.model, self._sum = mathopt.Model(), mathopt.fast_sum
        self.hint: dict[Any, float] = {}

    def boolean(self, hint: bool) -> Any:
        return self.whole(0, 1, int(hint))

    def whole(self, low: int, high: int, hint: int) -> Any:
        variable = self.model.add_integer_variable(lb=low, ub=high)
        self.hint[variable] = float(hint)
        return variable

    def require(self, constraint: Any) -> None:
        self.model.add_linear_constraint(constraint)

    def total(self, terms: Sequence[Any], factors: Sequence[int] | None = None) -> Any:
        if factors is None:
            return self._sum(terms)
        return self._sum([factor * term for factor, term in zip(factors, terms, strict=True)])
