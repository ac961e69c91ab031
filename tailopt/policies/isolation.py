"""Tail isolation: the longest units on tail engines of their own, the rest dealt over the others."""

from dataclasses import dataclass, replace

import numpy as np

from tailopt.arrays import Ints
from tailopt.engine.speculation import Speculation
from tailopt.plan import Plan, View
from tailopt.policies.units import deal, fastest_alone, shuffled_units, units_longest_first


@dataclass(frozen=True, eq=False)
class Isolation:
    """All ways to isolate a tail, for one view.

    Attributes:
        longest: ``[units]`` units, longest first.
        shuffled: ``[units]`` units in the batch's random order.
        engines: ``[engines]`` engines in the order in which they become tail engines.
    """

    longest: Ints
    shuffled: Ints
    engines: Ints

    @classmethod
    def of(cls, view: View) -> "Isolation":
        """For this view: predicted lengths rank units, the fastest for a lone request are tail engines."""
        return cls(units_longest_first(view), shuffled_units(view), fastest_alone(view))

    def engine_of_unit(self, k: int, tail_engines: int) -> Ints:
        """``[units]`` engine of each unit when the ``k`` longest go to ``tail_engines`` engines of their own.

        Within each pool units are dealt: the tail from the longest on, the rest in the batch's random order.
        So no tail, (0, 0), is uniform routing.
        """
        tail = self.longest[:k]
        is_tail = np.zeros(len(self.longest), dtype=np.bool_)
        is_tail[tail] = True
        rest = self.shuffled[~is_tail[self.shuffled]]
        engine = np.empty(len(self.longest), dtype=np.int64)
        engine[tail] = deal(tail, self.engines[:tail_engines])
        engine[rest] = deal(rest, np.sort(self.engines[tail_engines:]))
        return engine


def speculating(plan: Plan, engines: Ints, method: str | None) -> Plan:
    """The same plan in which these engines speculate, each at its best draft length; None for none."""
    if method is None:
        return plan
    drafting = Speculation(method)
    return replace(
        plan,
        engines=tuple(
            replace(engine, speculation=drafting) if e in engines else engine
            for e, engine in enumerate(plan.engines)
        ),
    )
