"""Hypothesis strategies for small batches, step times, fleets, plans, and policies that review."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tailopt.engine.profile import Draft, EngineProfile, ShapeProfile
from tailopt.engine.speculation import Speculation
from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime, Table
from tailopt.plan import DROPPED, SHARED_QUEUE, Engine, Fleet, Plan, ReviewPoint, View
from tailopt.trace import Trace


def times_exactly(factor: int, most: int) -> st.SearchStrategy[float]:
    """Multiples of 1 / factor (a power of two): sums of them are exact in doubles."""
    return st.integers(0, most).map(lambda k: k / factor)


@st.composite
def affine_terms(draw: st.DrawFn) -> tuple[float, float, float]:
    return draw(times_exactly(4, 40)) + 0.25, draw(times_exactly(16, 32)), draw(times_exactly(128, 8))


@st.composite
def exact_step_times(draw: st.DrawFn) -> StepTime:
    """Step times whose sums are exact in doubles, so that ties between engines are true ties."""
    kind = draw(st.sampled_from(["affine", "max", "padded"]))
    if kind == "affine":
        return Affine(*draw(affine_terms()))
    if kind == "max":
        kink = (draw(times_exactly(4, 8)) - 1.0, draw(times_exactly(16, 64)), draw(times_exactly(128, 16)))
        return MaxAffine((draw(affine_terms()), kink))
    rises = draw(st.lists(times_exactly(8, 16), min_size=1, max_size=3))
    grid = np.cumsum([1, *draw(st.lists(st.integers(1, 20), min_size=len(rises), max_size=len(rises)))])
    seconds = draw(times_exactly(4, 16)) + 0.25 + np.cumsum([0.0, *rises])
    return Table([*grid, 1000], [*seconds, seconds[-1]], draw(times_exactly(128, 8)), padded=True)


@st.composite
def step_times(draw: st.DrawFn) -> StepTime:
    """Any step time."""
    if draw(st.booleans()):
        return draw(exact_step_times())
    a, b, c = (draw(st.floats(0.001, 10)), draw(st.floats(0, 3)), draw(st.floats(0, 0.05)))
    if draw(st.booleans()):
        return Power(a, b, draw(st.floats(0.05, 1)), c)
    return Table([1, 3, 10], np.cumsum([a, b, draw(st.floats(0, 3))]), c, padded=draw(st.booleans()))


def concave_step_times() -> st.SearchStrategy[StepTime]:
    return st.builds(
        Power, st.floats(0.001, 10), st.floats(0, 3), st.floats(0.05, 1), st.sampled_from([0.0, 0.01])
    )


@st.composite
def traces(
    draw: st.DrawFn, most_groups: int = 6, most_samples: int = 4, longest: int = 40, prompts: int = 30
) -> Trace:
    """Batches of a few groups; equal lengths and single tokens are common."""
    length = st.one_of(st.integers(1, longest), st.sampled_from([1, longest // 2, longest]))
    groups = draw(
        st.lists(st.lists(length, min_size=1, max_size=most_samples), min_size=1, max_size=most_groups)
    )
    prompt_tokens = draw(st.lists(st.integers(0, prompts), min_size=len(groups), max_size=len(groups)))
    return Trace.of(groups, prompt_tokens=prompt_tokens)


def profile(*shapes: ShapeProfile, **terms: Any) -> EngineProfile:
    """A profile for tests from its shapes, and other terms of it."""
    return EngineProfile(
        name="test", hardware="none", model="none", precision="none", engine="none", engine_version="0",
        date="2026-01-01", sources=("made up for tests",), licence="none", kv_bytes_per_token=1,
        shapes={shape.tp: shape for shape in shapes}, **terms,
    )  # fmt: skip


def fleet_of(
    step_time: StepTime, engines: int, *, kv_capacity_tokens: int = 10**6, max_running: int = 1000
) -> Fleet:
    """Identical engines of one GPU each, with prefill for nothing and a cache counted in tokens."""
    shape = ShapeProfile(
        1, step_time, 1e300, kv_capacity_tokens, max_running,
        token_budget=10**9, block_tokens=1, prefix_caching=False,
    )  # fmt: skip
    return Fleet(profile(shape), (Engine(1),) * engines, engines)


@st.composite
def fleets(
    draw: st.DrawFn,
    trace: Trace,
    times: st.SearchStrategy[StepTime],
    most_engines: int = 3,
    *,
    prefill_tokens_per_s: float = 64.0,
) -> Fleet:
    """One or two shapes, with a cache that holds the largest request and often little more."""
    least = int((trace.context_tokens + trace.output_tokens).max())
    block_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    caching = draw(st.booleans())
    shapes = []
    for tp in draw(st.sampled_from([(1,), (1, 2)])):
        max_running = draw(st.one_of(st.integers(1, 5), st.just(1000)))
        tokens = draw(st.one_of(st.integers(least, 3 * least), st.just(10**6)))
        budget = draw(st.one_of(st.integers(max_running, max_running + 30), st.just(10**4)))
        shapes.append(
            ShapeProfile(
                tp,
                draw(times),
                prefill_tokens_per_s,
                tokens + block_tokens,
                max_running,
                token_budget=budget,
                block_tokens=block_tokens,
                prefix_caching=caching,
                sleep_s=draw(times_exactly(4, 8)),
                wake_s=draw(times_exactly(4, 8)),
            )
        )
    link = draw(st.sampled_from([None, 32.0, 256.0]))
    degrees = draw(
        st.lists(st.sampled_from([shape.tp for shape in shapes]), min_size=1, max_size=most_engines)
    )
    known = profile(*shapes, link_bytes_per_s=link, link_latency_s=draw(times_exactly(4, 4)))
    return Fleet(known, tuple(Engine(tp) for tp in degrees), sum(degrees) + draw(st.integers(0, 1)))


@st.composite
def speculating(draw: st.DrawFn, fleet: Fleet) -> Fleet:
    """The same fleet, some engines of which draft, in a cache and a budget that hold the drafts."""
    drafted = Speculation("mtp", draw(st.integers(0, 4)), draw(st.sampled_from([0.0, 0.5, 0.75, 1.0])))
    shapes = {
        tp: replace(
            shape,
            drafts=(Draft("mtp", 0.5),),
            token_budget=max(shape.token_budget, 5 * shape.max_running),
            kv_capacity_tokens=shape.kv_capacity_tokens + 4 + shape.block_tokens,
        )
        for tp, shape in fleet.profile.shapes.items()
    }
    engines = [replace(e, speculation=draw(st.sampled_from([None, drafted]))) for e in fleet.engines]
    return Fleet(replace(fleet.profile, shapes=shapes), tuple(engines), fleet.gpus)


@st.composite
def arriving(draw: st.DrawFn, trace: Trace) -> Trace:
    """The same requests, some of which arrive later; at times whose sums are exact in doubles."""
    late = st.one_of(st.just(0.0), times_exactly(4, 400))
    times = draw(st.lists(late, min_size=trace.n_requests, max_size=trace.n_requests))
    return replace(trace, arrival_s=np.array(times))


@st.composite
def limits(draw: st.DrawFn, most: int = 6) -> tuple[tuple[int, int], ...]:
    """Concurrency limits that follow the finished requests; often none."""
    finished = draw(st.one_of(st.just(set()), st.sets(st.integers(1, 12), max_size=5)))
    return tuple((f, draw(st.integers(1, most))) for f in sorted(finished))


@st.composite
def plans(draw: st.DrawFn, trace: Trace, fleet: Fleet, *, shared: bool = True) -> Plan:
    """Any plan for the batch: engines' own queues, the shared queue, or both; own limits at times."""
    engines = tuple(
        Engine(engine.tp, draw(st.one_of(st.none(), st.integers(1, 4))), limits=draw(limits()))
        for engine in fleet.engines
    )
    atomic = draw(st.booleans())
    unit = trace.group if atomic else np.arange(trace.n_requests)
    lowest = SHARED_QUEUE if shared else 0
    size = int(unit.max()) + 1
    of_unit = draw(st.lists(st.integers(lowest, len(engines) - 1), min_size=size, max_size=size))
    order = draw(st.permutations(range(trace.n_requests)))
    return Plan(engines, np.array(of_unit)[unit], order, atomic=atomic)


class RandomPolicy:
    """Answers each review with any valid plan: switches, moves, drops, limits, new review points.

    The answers depend on the seed and on what is seen, but not on the clock, so two simulators that agree get
    the same ones. After ``most_reviews`` there are no more review points.
    """

    def __init__(self, seed: int, *, most_reviews: int = 6, shared: bool = True, drops: bool = True) -> None:
        self.rng = np.random.default_rng(seed)
        self.reviews, self.most_reviews, self.shared, self.drops = 0, most_reviews, shared, drops

    def __call__(self, view: View) -> Plan:
        rng, n = self.rng, view.n_requests
        engines = self._engines(view)
        unit = view.prompt if view.atomic else np.arange(n)
        lowest = SHARED_QUEUE if self.shared else 0
        engine_of = rng.integers(lowest, len(engines), int(unit.max()) + 1)[unit]
        if view.now_s > 0 and rng.random() < 0.7:  # most stay where they are
            same = [e for e, engine in enumerate(view.fleet.engines) if engine in engines]
            stays = np.isin(view.engine, same) & (rng.random(int(unit.max()) + 1) < 0.7)[unit]
            where = {e: engines.index(engine) for e, engine in enumerate(view.fleet.engines) if e in same}
            engine_of = np.array(
                [where[e] if stay else to for e, stay, to in zip(view.engine, stays, engine_of, strict=True)]
            )
        if view.now_s > 0 and self.drops:
            engine_of = np.where(rng.random(n) < 0.05, DROPPED, engine_of)
        limits = None
        if self.drops and rng.random() < 0.2:
            limits = np.maximum(1, view.generated_tokens + rng.integers(-2, 40, n))
        moves = ["cheaper", "recompute", *(["migrate"] if view.fleet.profile.link_bytes_per_s else [])]
        self.reviews += 1
        asks = self.reviews <= self.most_reviews
        return Plan(
            engines,
            engine_of,
            rng.permutation(n),
            atomic=view.atomic,
            review=self._points(view) if asks else (),
            max_tokens=limits,
            deadline_s=view.now_s + int(rng.integers(1, 200)) / 4
            if self.drops and rng.random() < 0.1
            else None,
            move=str(rng.choice(moves)),
        )

    def _engines(self, view: View) -> tuple[Engine, ...]:
        rng = self.rng
        engines = list(view.fleet.engines)
        if view.now_s > 0 and rng.random() < 0.4:
            engines.pop(int(rng.integers(len(engines))))
            while True:
                tp = int(rng.choice(list(view.fleet.profile.shapes)))
                if sum(engine.tp for engine in engines) + tp > view.fleet.gpus:
                    break
                engines.append(Engine(tp, scheduling=str(rng.choice(["fcfs", "priority"]))))
        elif view.now_s == 0:
            engines = [replace(e, scheduling=str(rng.choice(["fcfs", "priority"]))) for e in engines]
        if rng.random() < 0.3 and engines:
            engines = [replace(e, max_running=int(rng.integers(1, 5))) for e in engines]
        if rng.random() < 0.3 and engines:
            after = np.flatnonzero(rng.random(8) < 0.4) + 1
            engines = [replace(e, limits=[(int(f), int(rng.integers(1, 5))) for f in after]) for e in engines]
        return tuple(engines) or view.fleet.engines

    def _points(self, view: View) -> tuple[ReviewPoint, ...]:
        rng = self.rng
        points = [
            ReviewPoint("unfinished", int(rng.integers(1, max(2, view.n_requests)))),
            ReviewPoint("tokens", int(rng.integers(1, 40))),
            ReviewPoint("tokens", int(rng.integers(1, 40))),
            ReviewPoint("idle"),
            ReviewPoint("time", float(np.ceil(round(4 * view.now_s, 6)) + rng.integers(1, 100)) / 4),
        ]
        return tuple(points[i] for i in rng.permutation(5)[: rng.integers(0, 5)])
