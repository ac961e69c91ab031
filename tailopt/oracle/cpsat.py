"""CP-SAT, the constraint solver of OR-tools, on :mod:`tailopt.oracle.integer_model`.

CP-SAT computes in whole numbers, so its bound is one on ticks without rounding of its own. What it proves, it
proves in ways that nobody can re-trace here: the certificate names it (:class:`SolverBound`), and the checker
verifies the program it was given, not its proof.
"""

import time
from collections.abc import Sequence
from typing import Any

from tailopt.oracle.bound_and_fill import plan_of, staircase
from tailopt.oracle.certificate import Certificate
from tailopt.oracle.integer_model import Formulation, write_model
from tailopt.oracle.problem import Problem
from tailopt.oracle.solver_bound import Question, ortools
from tailopt.simulate.simulator import simulate

TIME_LIMIT_S = 60.0
BITS = 31
"""A makespan is 2^BITS ticks for each unit or so: rounding down then costs less than ``OPTIMAL_GAP``."""


def cpsat(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    seed: int = 0,
    formulation: Formulation = "leader",
    workers: int = 1,
) -> Certificate:
    """The best plan and bound that CP-SAT finds, starting from the filling and the quick bounds.

    Args:
        problem: batch and fleet.
        time_limit_s: 60 by default.
        seed: of CP-SAT.
        formulation: how an engine's longest unit is modelled.
        workers: threads. With one, the same seed gives the same answer if the time suffices, and on the
            leader formulation one was quicker than several on two cores.

    Raises:
        InputError: if OR-tools is not installed.
    """
    started = time.perf_counter()
    cp_model = ortools("sat.python.cp_model")
    first = staircase(problem)
    question = Question.of(problem, first, BITS + len(first.plan.order).bit_length())
    modeler = _Modeler(cp_model)
    variables = write_model(modeler, question.model, question.engine_of_unit, formulation)
    modeler.model.minimize(variables.makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = TIME_LIMIT_S if time_limit_s is None else time_limit_s
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = workers
    answer = solver.solve(modeler.model)
    if answer not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        engine_of_unit, ticks = question.engine_of_unit, 0.0
    else:
        engine_of_unit = question.read(variables.placed, solver.value)
        ticks = solver.best_objective_bound
    bound = question.bound("CP-SAT", int(ticks), first)
    run = simulate(problem.trace, problem.fleet, plan_of(problem, question.units, engine_of_unit))
    return first.improved(bound, run, f"CP-SAT, {formulation}", started, seed)


class _Modeler:
    """A CP-SAT model as :class:`tailopt.oracle.integer_model.Modeler`."""

    def __init__(self, cp_model: Any) -> None:
        self.model, self._sum = cp_model.CpModel(), cp_model.LinearExpr

    def boolean(self, hint: bool) -> Any:
        variable = self.model.new_bool_var("")
        self.model.add_hint(variable, hint)
        return variable

    def whole(self, low: int, high: int, hint: int) -> Any:
        variable = self.model.new_int_var(low, high, "")
        self.model.add_hint(variable, hint)
        return variable

    def require(self, constraint: Any) -> None:
        self.model.add(constraint)

    def total(self, terms: Sequence[Any], factors: Sequence[int] | None = None) -> Any:
        if factors is None:
            return self._sum.sum(list(terms))
        return self._sum.weighted_sum(list(terms), list(factors))
