"""The argument of the dynamic program: no way to deal the units to the engines is done earlier."""

from dataclasses import dataclass

from tailopt.oracle.kinds import KindTerms


@dataclass(frozen=True)
class PartitionBound:
    """However the units are dealt, some engine's least seconds (:mod:`tailopt.oracle.dp`) reach ``lower_s``.

    Attributes:
        lower_s: the bound in seconds.
        kinds: affine terms of each kind of engine, in the fleet's order.
        within_s: makespan of some plan, which the terms' rays are about.
    """

    lower_s: float
    kinds: tuple[KindTerms, ...]
    within_s: float
