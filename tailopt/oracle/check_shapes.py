"""Checks :class:`tailopt.oracle.shapes.ShapesCertificate`: no cut is left out, and each bound holds.

It counts the ways afresh, otherwise than the solver does: all numbers of engines that fit into the GPUs, each
packed into the groups of GPUs by trying. Every one of them must be part of a cut that is listed, since a
plan on it is then a plan on that cut too. The bound of each cut is verified as
:mod:`tailopt.oracle.check` does it for a single fleet, and the best plan is carried out.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from tailopt.engine.profile import EngineProfile
from tailopt.oracle.check import check, verified
from tailopt.oracle.check_parts import fits_alone, require
from tailopt.oracle.problem import Problem
from tailopt.oracle.shapes import Cut, ShapesCertificate
from tailopt.plan import Engine, Fleet
from tailopt.trace import Trace

UNFIT = "a request fits on no engine"


@dataclass(frozen=True)
class CheckedShapes:
    """What the checker found: both ends as it computed them, and the argument verified for each cut."""

    lower_s: float
    upper_s: float
    arguments: tuple[str, ...]


def check_shapes(
    certificate: ShapesCertificate,
    trace: Trace,
    profile: EngineProfile,
    gpus: int,
    *,
    atomic: bool,
    topology: Sequence[int] | None = None,
) -> CheckedShapes:
    """Verify a certificate for shapes and routing together; the arguments are those of ``solve_shapes``.

    Raises:
        InputError: naming the first step that does not hold.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.oracle.shapes import solve_shapes
    >>> trace, profile = Trace.of([[900, 80], [70, 60]]), load_engine("h100-llama-3.1-8b")
    >>> found = solve_shapes(trace, profile, 2, atomic=False)
    >>> check_shapes(found, trace, profile, 2, atomic=False).arguments
    ('staircase of shapes', 'staircase of shapes')
    """
    groups = (gpus,) if topology is None else tuple(topology)
    require(sum(groups) == gpus, f"the groups are not of {gpus} GPUs")
    for cut in certificate.cuts:
        require(cut.fleet.profile == profile and cut.fleet.gpus == gpus, "a cut is of other GPUs")
        plain = all(engine == Engine(engine.tp, gpus=engine.gpus) for engine in cut.fleet.engines)
        require(plain, "an engine of a cut is limited")
    listed = [Counter(engine.tp for engine in cut.fleet.engines) for cut in certificate.cuts]
    for counts in _cuts(tuple(profile.shapes), groups):
        missing = "+".join(f"{count}xTP{tp}" for tp, count in counts.items())
        require(any(counts <= larger for larger in listed), f"no cut that holds {missing} is listed")

    best = certificate.best
    require(best.certificate is not None, "the best cut has no plan")
    assert best.certificate is not None
    require(_within_groups(best.fleet, groups), "an engine of the best cut lies in two groups of GPUs")
    upper = check(best.certificate, Problem(trace, best.fleet, atomic))

    bounds = [_bound(cut, trace, atomic) for cut in certificate.cuts]
    lower_s = min((bound for bound, _ in bounds if bound is not None), default=Fraction(0))
    require(Fraction(certificate.lower_s) <= lower_s, f"the arguments give only {float(lower_s)} s")
    return CheckedShapes(
        float(min(lower_s, Fraction(certificate.upper_s))), upper.upper_s, tuple(said for _, said in bounds)
    )


def _cuts(degrees: tuple[int, ...], groups: tuple[int, ...]) -> Iterator[Counter[int]]:
    """All multisets of degrees, but the empty one, that pack into the groups."""

    @cache
    def packs(engines: tuple[int, ...], room: tuple[int, ...]) -> bool:
        if not engines:
            return True
        tried = {left for left in room if left >= engines[0]}
        return any(packs(engines[1:], _with(room, left, left - engines[0])) for left in tried)

    def grow(engines: tuple[int, ...], least: int) -> Iterator[Counter[int]]:
        for place in range(least, len(degrees)):
            more = (*engines, degrees[place])
            if sum(more) <= sum(groups) and packs(tuple(sorted(more, reverse=True)), tuple(sorted(groups))):
                yield Counter(more)
                yield from grow(more, place)

    yield from grow((), 0)


def _with(room: tuple[int, ...], old: int, new: int) -> tuple[int, ...]:
    """The room left in each group, sorted, with one of them changed."""
    at = room.index(old)
    return tuple(sorted((*room[:at], new, *room[at + 1 :])))


def _within_groups(fleet: Fleet, groups: tuple[int, ...]) -> bool:
    """Whether the engines hold different GPUs, each of them some of one group."""
    group_of = [g for g, size in enumerate(groups) for _ in range(size)]
    used = [gpu for engine in fleet.engines for gpu in engine.gpus or ()]
    placed = all(
        engine.gpus is not None
        and len(engine.gpus) == engine.tp
        and len({group_of[gpu] for gpu in engine.gpus}) == 1
        for engine in fleet.engines
    )
    return placed and len(set(used)) == len(used)


def _bound(cut: Cut, trace: Trace, atomic: bool) -> tuple[Fraction | None, str]:
    """What the argument of a cut proves, None for infinity, and the argument's name."""
    problem = Problem(trace, cut.fleet, atomic)
    if cut.bound is not None:
        return verified(cut.bound, problem)
    shapes = {engine.tp: cut.fleet.profile.shape(engine.tp) for engine in cut.fleet.engines}.values()
    unfit = (i for i in range(trace.n_requests) if not any(fits_alone(problem, s, i) for s in shapes))
    require(next(unfit, None) is not None, f"every request fits on some engine of {cut.fleet}")
    return None, UNFIT
