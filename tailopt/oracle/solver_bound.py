"""What a solver is asked, and what its answer proves: a bound that rests on the solver."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from tailopt.arrays import Ints
from tailopt.errors import InputError
from tailopt.oracle.integer_model import IntegerModel, integer_model
from tailopt.oracle.kinds import KindTerms, kinds_of, terms_of
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import Units, units_of

if TYPE_CHECKING:
    from tailopt.oracle.certificate import BoundArgument, Certificate


@dataclass(frozen=True)
class SolverBound:
    """A solver says that no answer to an integer program has fewer than ``ticks``.

    Attributes:
        lower_s: the bound in seconds: ``ticks / ticks_per_s``.
        solver, version: whom to trust.
        ticks: the solver's bound, less what its tolerances may have cost.
        ticks_per_s: a power of two.
        digest: SHA-256 of the program's numbers (:class:`tailopt.oracle.integer_model.IntegerModel`).
        bits: how long a makespan is in ticks.
        kinds: affine terms of each kind of engine, in the fleet's order.
        within_s: makespan of some plan, which the terms' rays are about.
        known: the bound from which the program's makespan starts.
    """

    lower_s: float
    solver: str
    version: str
    ticks: int
    ticks_per_s: float
    digest: str
    bits: int
    kinds: tuple[KindTerms, ...]
    within_s: float
    known: "BoundArgument"


@dataclass(frozen=True, eq=False)
class Question:
    """An integer program, and the plan at hand.

    Attributes:
        units: what is placed.
        terms: affine terms of each kind.
        model: the program.
        bits: how long a makespan is in ticks.
        engine_of_unit: of the plan at hand.
    """

    units: Units
    terms: tuple[KindTerms, ...]
    model: IntegerModel
    bits: int
    engine_of_unit: Ints

    @classmethod
    def of(cls, problem: Problem, first: "Certificate", bits: int) -> "Question":
        """The program of a problem, from a first certificate."""
        units, kinds = units_of(problem), kinds_of(problem.fleet)
        terms = tuple(terms_of(units, kinds, problem.trace.n_requests, first.upper_s))
        engine_of_unit = first.plan.engine_of[[members[0] for members in units.members]]
        model = integer_model(problem, units, terms, first.upper_s, first.bound_argument.lower_s, bits)
        return cls(units, terms, model, bits, engine_of_unit)

    def read(self, placed: list[list[Any]], value: Callable[[Any], float]) -> Ints:
        """``[u]`` engines from a solver's values."""
        return np.array([int(np.argmax([float(value(x)) if not isinstance(x, int) else x for x in row]))
                         for row in placed], dtype=np.int64)  # fmt: skip

    def bound(self, solver: str, ticks: int, first: "Certificate") -> SolverBound:
        """The argument that a solver's bound gives."""
        version: str = ortools("").__version__
        ticks = min(max(ticks, self.model.lower), self.model.makespan(self.engine_of_unit))
        lower_s = min(ticks / self.model.ticks_per_s, first.upper_s)
        return SolverBound(
            lower_s, solver, version, ticks, self.model.ticks_per_s, self.model.digest, self.bits,
            self.terms, first.upper_s, first.bound_argument,
        )  # fmt: skip


def ortools(module: str) -> Any:
    """A module of OR-tools; InputError with the way to install it if it is not there."""
    try:
        return import_module(f"ortools.{module}" if module else "ortools")
    except ImportError:
        raise InputError("this method needs OR-tools: pip install 'tailopt[solvers]'") from None
