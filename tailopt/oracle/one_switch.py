r"""One switch: the best single change of the fleet in the middle of a batch whose lengths are known.

A batch lives through a crowded phase and a sparse one, and no cut of the GPUs need be good at both. So begin
on a cut A; when no more than n requests are unfinished, go on with a cut B. Engines that are in both go on;
requests of the others, and those that the plan sends elsewhere, are moved, at what the profile says it costs:

.. math:: T(A, B, n) = t_n + \underbrace{\text{drain} + \text{sleep} + \text{wake} + \text{move}}_{
          \text{of what changes only}} + (\text{the rest on } B) , \qquad
          T^*_1 = \min \Bigl(T^*_0,\; \min_{A, B, n, \text{routings}} T(A, B, n)\Bigr) ,

with :math:`T^*_0` the best without a switch (:mod:`tailopt.oracle.shapes`). What a switch takes and gives is
the simulator's word (:mod:`tailopt.simulate`): the makespan found is that of a run.

**Lower end.** Whoever may switch once can do no more than whoever may switch at any time for nothing
(:mod:`tailopt.oracle.any_bound`, :mod:`tailopt.oracle.class_bound`), and who does not switch is not done
before the bound of the static plans: :math:`T^*_1 \ge \min(\mathrm{lower}_0, \mathrm{lower}_{\text{any}})`.
Moved requests change nothing in that argument: each of their tokens is gained in one step that holds them and
reads their context, and what is computed anew only adds time.

**Upper end.** A search (:mod:`tailopt.oracle.one_switch_search`) whose word is the simulator's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailopt.engine.profile import EngineProfile
from tailopt.errors import InputError
from tailopt.oracle.any_bound import AnyBound, lower_any_s
from tailopt.oracle.class_bound import ClassBound, class_bound
from tailopt.oracle.one_switch_search import SwitchSearch
from tailopt.oracle.shapes import ShapesCertificate, solve_shapes
from tailopt.plan import Fleet
from tailopt.run import Run
from tailopt.trace import Trace

STATIC_SHARE = 0.4
"""Of the time, what the search without a switch may take."""


@dataclass(frozen=True)
class SwitchCost:
    """What a switch took; each part the longest over the engines, so that they add up to at most the pause.

    Attributes:
        drain_s: from the review to the end of the last step, and of sending, of an engine that closed.
        sleep_s, wake_s: of engines that closed and opened.
        move_s: until the last KV cache was there, or the moved contexts were computed anew.
        moved_requests, moved_tokens: running requests that were moved, and their context.
    """

    drain_s: float
    sleep_s: float
    wake_s: float
    move_s: float
    moved_requests: int
    moved_tokens: int


@dataclass(frozen=True, eq=False)
class SwitchCertificate:
    """The least makespan with at most one switch lies in ``[lower_s, upper_s]``.

    Attributes:
        static: of the best without a switch.
        run: of the best that was found: with one review if it switches, else of the static plan.
        bound_argument: why nobody is done earlier, however often he switches.
        wall_s: seconds it took.
        seed: of the searches.
    """

    static: ShapesCertificate
    run: Run
    bound_argument: AnyBound | ClassBound
    wall_s: float
    seed: int

    @property
    def lower_s(self) -> float:
        """Nobody who switches at most once is done earlier."""
        return min(self.static.lower_s, self.bound_argument.lower_s, self.upper_s)

    @property
    def upper_s(self) -> float:
        """Makespan of the best run."""
        return self.run.makespan_s

    @property
    def first(self) -> Fleet:
        """The engines of the beginning."""
        return self.run.fleet

    @property
    def second(self) -> Fleet | None:
        """The engines after the switch; None if there is none."""
        if not self.run.reviews:
            return None
        return Fleet(self.first.profile, self.run.reviews[0].plan.engines, self.first.gpus)

    @property
    def unfinished(self) -> int | None:
        """Unfinished requests that the switch waits for; None if there is none."""
        return int(self.run.plan.review[0].value) if self.run.reviews else None

    @property
    def switch_s(self) -> float | None:
        """When that many were left; None if there is no switch."""
        return self.run.reviews[0].time_s if self.run.reviews else None

    @property
    def cost(self) -> SwitchCost | None:
        """What the switch took; None if there is none."""
        return switch_cost(self.run) if self.run.reviews else None

    @property
    def gain(self) -> float:
        """Share of the best static makespan found that the switch saves."""
        return 1.0 - self.upper_s / self.static.upper_s

    @property
    def most_gain(self) -> float:
        """Share of the best static makespan found that no switch saves more than."""
        return 1.0 - self.lower_s / self.static.upper_s

    @property
    def sure_gain(self) -> float:
        """Share of the *bound* of all static plans that the switch saves; above 0, it beats every one."""
        return 1.0 - self.upper_s / self.static.lower_s

    @property
    def gap(self) -> float:
        """``upper_s / lower_s - 1``."""
        return self.upper_s / self.lower_s - 1.0


def with_switch_costs(
    profile: EngineProfile,
    *,
    sleep_s: float | None = None,
    wake_s: float | None = None,
    link_bytes_per_s: float | None = None,
) -> EngineProfile:
    """The profile with other costs of a switch, for all its shapes; None leaves what it has.

    >>> from tailopt.engine.catalogue import load_engine
    >>> slow = with_switch_costs(load_engine("h100-llama-3.1-8b"), sleep_s=1.5, wake_s=2)
    >>> slow.shape(4).sleep_s, slow.shape(1).wake_s
    (1.5, 2)
    """
    shapes = {
        tp: replace(
            shape,
            sleep_s=shape.sleep_s if sleep_s is None else sleep_s,
            wake_s=shape.wake_s if wake_s is None else wake_s,
        )
        for tp, shape in profile.shapes.items()
    }
    rate = profile.link_bytes_per_s if link_bytes_per_s is None else link_bytes_per_s
    return replace(profile, shapes=shapes, link_bytes_per_s=rate)


def switch_cost(run: Run) -> SwitchCost:
    """The parts of what the first switch of a run took."""
    spans, moves, profile = run.spans, run.moves, run.fleet.profile
    opened = spans.open_s > 0
    sent_s = (moves.end_s - moves.start_s)[moves.migrated]
    anew_s = np.zeros(len(run.engines))
    for target, tokens in zip(moves.target[~moves.migrated], moves.tokens[~moves.migrated], strict=True):
        if target >= 0:
            anew_s[target] += tokens / profile.shape(run.engines[target].tp).prefill_tokens_per_s
    return SwitchCost(
        drain_s=float(spans.drain_s.max()),
        sleep_s=float(spans.sleep_s.max()),
        wake_s=float(spans.wake_s[opened].max(initial=0.0)),
        move_s=max(float(sent_s.max(initial=0.0)), float(anew_s.max())),
        moved_requests=len(moves.request),
        moved_tokens=int(moves.tokens.sum()),
    )


def solve_one_switch(
    trace: Trace,
    profile: EngineProfile,
    gpus: int,
    *,
    atomic: bool,
    time_limit_s: float | None = None,
    seed: int = 0,
    topology: Sequence[int] | None = None,
    static: ShapesCertificate | None = None,
    progress: Callable[[SwitchCertificate], None] | None = None,
) -> SwitchCertificate:
    """The best plan with at most one switch over all pairs of cuts, and what no such plan beats.

    Args:
        trace: the batch.
        profile: what an engine of each degree can do, and what a switch costs.
        gpus: how many GPUs there are.
        atomic: whether the samples of a group must stay on one engine.
        time_limit_s: when to stop; None for a fixed amount of work. An interrupt (Ctrl-C) stops it too, and
            what was found is returned.
        seed: of the searches.
        topology: sizes of the groups of GPUs that no engine may straddle; None for a single group.
        static: what is known of the best without a switch on these GPUs, if it is: not searched again then.
            Its profile may have other costs of a switch.
        progress: called with what is known whenever a better run was found; what it raises on an interrupt
            stops the search too.

    Raises:
        InputError: as :func:`tailopt.oracle.shapes.solve_shapes`.

    >>> from tailopt.engine.catalogue import load_engine
    >>> trace = Trace.of([[9000, 500, 400], [800, 700, 600], [300, 200, 100]] * 8, prompt_tokens=100)
    >>> found = solve_one_switch(trace, load_engine("h100-llama-3.1-8b"), 4, atomic=False)
    >>> found.lower_s <= found.upper_s <= found.static.upper_s
    True
    """
    started = time.perf_counter()
    if time_limit_s is not None and not time_limit_s > 0:
        raise InputError(f"time limit: expected a positive number of seconds, got {time_limit_s}")
    if static is None:
        share_s = None if time_limit_s is None else STATIC_SHARE * time_limit_s
        static = solve_shapes(
            trace, profile, gpus, atomic=atomic, time_limit_s=share_s, seed=seed, topology=topology
        )
    static = _at_the_costs_of(profile, static)
    groups = (gpus,) if topology is None else tuple(topology)
    anyone: AnyBound | ClassBound = max(
        (one for one in (lower_any_s(trace, static.fleet), class_bound(trace, static.fleet)) if one),
        key=lambda one: one.lower_s,
    )

    def found(run: Run) -> SwitchCertificate:
        return SwitchCertificate(static, run, anyone, time.perf_counter() - started, seed)

    def better(run: Run) -> None:
        if progress is not None:
            progress(found(run))

    deadline = np.inf if time_limit_s is None else started + time_limit_s
    search = SwitchSearch(trace, static, groups, atomic, deadline, seed, better)
    try:
        search.estimate()
        search.anneal()
    except KeyboardInterrupt:
        pass
    return found(search.run)


def _at_the_costs_of(profile: EngineProfile, static: ShapesCertificate) -> ShapesCertificate:
    """The same certificate for a profile that differs in what a switch costs, if at all."""
    one, other = (with_switch_costs(of, sleep_s=0.0, wake_s=0.0) for of in (profile, static.fleet.profile))
    if dict(one.shapes) != dict(other.shapes):
        raise InputError(f"static: is of engine {other.name!r}, expected the shapes of {one.name!r}")
    cuts = {
        id(cut): replace(cut, fleet=Fleet(profile, cut.fleet.engines, cut.fleet.gpus)) for cut in static.cuts
    }
    return replace(static, cuts=tuple(cuts.values()), best=cuts[id(static.best)])
