r"""The engines of a fleet by kind, and affine terms that bound an engine of each kind from below.

Engines of one shape and one concurrency limit are of one **kind**: exchanging the sets of requests of two
such engines changes nothing. An engine of a kind that decodes at most C requests at once and holds M tokens
takes at least

.. math:: T \ge a\,s + b \sum L_i + c \sum A_i, \qquad s \ge \max(\max L_i,\; \textstyle\sum L_i / C,\;
          \sum A_i / M)

for every affine function below its step time (:mod:`tailopt.oracle.minorant`), up to the concurrency that a
plan within a known makespan can reach.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tailopt.engine.profile import ShapeProfile
from tailopt.oracle.minorant import Minorant, minorants, reachable
from tailopt.oracle.problem import Problem
from tailopt.oracle.units import Units
from tailopt.plan import Fleet


@dataclass(frozen=True)
class Kind:
    """Engines that are alike.

    Attributes:
        shape: their shape.
        max_running: requests that one decodes together at most.
        engines: their positions in the fleet.
    """

    shape: ShapeProfile
    max_running: int
    engines: tuple[int, ...]


@dataclass(frozen=True)
class KindTerms:
    """Affine functions below the step time of one kind.

    Attributes:
        rays: why no plan within the known makespan runs more than the minorants' ``n_max`` on one engine
            (:func:`tailopt.oracle.minorant.reachable`).
        minorants: each lies below the step time for 1 .. n_max running requests.
    """

    rays: tuple[Minorant, ...]
    minorants: tuple[Minorant, ...]


def kinds_of(fleet: Fleet) -> list[Kind]:
    """The kinds of engines, in the order in which the fleet names them.

    >>> from tailopt.engine.catalogue import load_engine
    >>> kinds = kinds_of(Fleet.of(load_engine("a100-llama-7b"), "1xTP4+2xTP1"))
    >>> [(kind.shape.tp, kind.engines) for kind in kinds]
    [(4, (0,)), (1, (1, 2))]
    """
    members: dict[tuple[int, int], list[int]] = {}
    for e, engine in enumerate(fleet.engines):
        members.setdefault((engine.tp, fleet.max_running(e)), []).append(e)
    return [Kind(fleet.profile.shape(tp), limit, tuple(es)) for (tp, limit), es in members.items()]


def terms_of(units: Units, kinds: Sequence[Kind], n_requests: int, within_s: float) -> list[KindTerms]:
    """The affine terms of each kind, for plans that are done within ``within_s``."""
    found = []
    for kind in kinds:
        lines = [kind.shape.step_time.lines(min(kind.max_running, n_requests))]
        rays, limit = reachable(lines, replace(units, max_running=kind.max_running), within_s)
        found.append(KindTerms(tuple(rays), tuple(minorants(lines, limit))))
    return found


def fits_at_once(problem: Problem, kind: Kind) -> bool:
    """Whether any set of the batch's requests can start at once on an engine of this kind."""
    trace = problem.trace
    return (
        trace.n_requests <= kind.max_running
        and int((trace.context_tokens + trace.output_tokens).sum()) <= kind.shape.kv_capacity_tokens
    )
