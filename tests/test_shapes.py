"""Shapes and routing together: cuts against a slow list, certificates against brute force, tampering."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import profile, step_times, traces

from tailopt.engine.catalogue import load_engine
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.errors import InputError
from tailopt.oracle.brute import brute_force
from tailopt.oracle.check_shapes import UNFIT, check_shapes
from tailopt.oracle.problem import Problem
from tailopt.oracle.shapes import Cut, ShapesCertificate, full_cuts, solve_shapes
from tailopt.plan import Engine, Fleet
from tailopt.simulate import simulate
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import sample_batches

EXAMPLES = settings().max_examples
SLACK = 1 + 1e-9

LLAMA = load_engine("h100-llama-3.1-8b")
SMALL = Trace.of([[900, 80, 70], [60, 50, 40]] * 3, prompt_tokens=20)


@st.composite
def profiles(draw: st.DrawFn) -> EngineProfile:
    """One to three degrees with unlike step times; caches and slots sometimes bind."""
    degrees = draw(st.sampled_from([(1,), (2,), (1, 2), (2, 3), (1, 2, 4), (1, 3)]))
    return profile(*(
        ShapeProfile(
            tp, draw(step_times()), draw(st.sampled_from([1e3, 1e15])),
            draw(st.sampled_from([10**6, 96])), draw(st.sampled_from([1000, 2])),
        )
        for tp in degrees
    ))  # fmt: skip


def packs(engines: tuple[int, ...], groups: tuple[int, ...]) -> bool:
    """Whether engines can be dealt to the groups: all ways are tried."""
    return any(
        all(sum(tp for tp, g in zip(engines, dealt, strict=True) if g == at) <= size
            for at, size in enumerate(groups))
        for dealt in product(range(len(groups)), repeat=len(engines))
    )  # fmt: skip


def all_cuts(degrees: tuple[int, ...], groups: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every multiset of degrees, but the empty one, that can be packed."""
    counts = product(*(range(sum(groups) // tp + 1) for tp in degrees))
    cuts = [tuple(tp for tp, n in zip(degrees, some, strict=True) for _ in range(n)) for some in counts]
    return [cut for cut in cuts if cut and sum(cut) <= sum(groups) and packs(cut, groups)]


def least_makespan_s(trace: Trace, engines: EngineProfile, gpus: int, atomic: bool) -> float:
    """Over all cuts and all dealings, each engine with all orders and limits for what it is dealt."""
    unit = trace.group if atomic else np.arange(trace.n_requests)
    units = range(int(unit.max()) + 1)

    @cache
    def alone_s(tp: int, chosen: tuple[int, ...]) -> float:
        dealt = trace.take(np.flatnonzero(np.isin(unit, chosen)))
        return brute_force(Problem(dealt, Fleet(engines, (Engine(tp),), tp), atomic))[0]

    return min(
        max(alone_s(cut[e], tuple(u for u in units if dealt[u] == e)) for e in set(dealt))
        for cut in all_cuts(tuple(engines.shapes), (gpus,))
        for dealt in product(range(len(cut)), repeat=len(units))
    )


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_full_cuts_are_packed_and_hold_every_cut(degrees: list[int], sizes: list[int]) -> None:
    groups = tuple(sizes)
    assume(sum(groups) <= 8)
    every = all_cuts(tuple(degrees), groups)
    if not every:
        with pytest.raises(InputError, match="expected room for an engine"):
            full_cuts(degrees, sum(groups), groups)
        return
    found = full_cuts(degrees, sum(groups), groups)
    for packed in found:
        assert len(packed) == len(groups)
        for part, size in zip(packed, groups, strict=True):
            assert sum(part) <= size < sum(part) + min(degrees)
    joined = [Counter(tp for part in packed for tp in part) for packed in found]
    assert len({tuple(sorted(one.elements())) for one in joined}) == len(joined)
    assert all(any(Counter(cut) <= full for full in joined) for cut in every)


@settings(max_examples=EXAMPLES)
@given(
    traces(most_groups=3, most_samples=2, longest=9, prompts=6), profiles(), st.integers(1, 4), st.booleans()
)
def test_no_plan_on_any_cut_is_better(trace: Trace, engines: EngineProfile, gpus: int, atomic: bool) -> None:
    """Brute force over cuts, dealings, orders and limits."""
    assume(trace.n_requests <= 4)
    assume(min(engines.shapes) <= gpus)
    assume(all(trace.context_tokens + trace.output_tokens <= 96))
    found = solve_shapes(trace, engines, gpus, atomic=atomic)
    optimum_s = least_makespan_s(trace, engines, gpus, atomic)
    assert found.lower_s <= optimum_s * SLACK
    assert optimum_s <= found.upper_s * SLACK
    assert simulate(trace, found.fleet, found.plan).makespan_s == found.upper_s
    checked = check_shapes(found, trace, engines, gpus, atomic=atomic)
    assert len(checked.arguments) == len(found.cuts)
    assert checked.lower_s >= found.lower_s


def test_time_limit_and_topology_on_a_real_batch() -> None:
    trace = load_bundled("gpqa-deepseek-reasoner")
    batch = sample_batches(trace, batches=1, prompts=16, samples=4, seed=1)[0].trace
    free = solve_shapes(batch, LLAMA, 8, atomic=True, time_limit_s=2.0)
    pairs = solve_shapes(batch, LLAMA, 8, atomic=True, time_limit_s=2.0, topology=[2, 2, 2, 2])
    assert {engine.tp for cut in pairs.cuts for engine in cut.fleet.engines} == {1, 2}
    assert len(free.cuts) == 10
    assert len(pairs.cuts) == 5
    assert free.lower_s <= pairs.upper_s
    assert free.gap < 0.01
    assert pairs.gap < 0.01
    for found, topology in ((free, None), (pairs, [2, 2, 2, 2])):
        checked = check_shapes(found, batch, LLAMA, 8, atomic=True, topology=topology)
        assert checked.upper_s == pytest.approx(found.upper_s, rel=1e-9)
        assert [found.pruned(cut) for cut in found.cuts].count(True) >= 1
    with pytest.raises(InputError, match="no cut that holds"):
        check_shapes(pairs, batch, LLAMA, 8, atomic=True)


def test_engines_lie_within_their_groups() -> None:
    found = solve_shapes(SMALL, profile(ShapeProfile(2, Affine(1.0, 0.1), 1e9, 10**6, 8)), 6, atomic=False,
                         topology=[3, 3])  # fmt: skip
    assert [engine.gpus for engine in found.fleet.engines] == [(0, 1), (3, 4)]


def test_a_cut_without_room_for_the_longest_request_has_no_plan() -> None:
    engines = profile(
        ShapeProfile(1, Affine(1e-3, 1e-4), 1e9, 512, 8), ShapeProfile(2, Affine(1e-2, 1e-3), 1e9, 4096, 8)
    )
    found = solve_shapes(SMALL, engines, 2, atomic=False)
    assert str(found.fleet) == "1xTP2"
    unfit = found.cuts[-1]
    assert (str(unfit.fleet), unfit.bound, unfit.lower_s, found.pruned(unfit)) == (
        "2xTP1",
        None,
        np.inf,
        True,
    )
    assert check_shapes(found, SMALL, engines, 2, atomic=False).arguments[-1] == UNFIT
    with pytest.raises(InputError, match="request"):
        solve_shapes(SMALL, engines, 1, atomic=False)


def test_interrupt_gives_what_is_known() -> None:
    """The first report raises: one cut has a plan, the others have their quick bounds."""

    def progress(known: ShapesCertificate) -> None:
        raise KeyboardInterrupt

    found = solve_shapes(SMALL, LLAMA, 8, atomic=False, progress=progress)
    assert sum(cut.certificate is not None for cut in found.cuts) == 1
    assert found.lower_s <= found.upper_s < np.inf
    check_shapes(found, SMALL, LLAMA, 8, atomic=False)


def test_same_seed_same_answer() -> None:
    one, two = (solve_shapes(SMALL, LLAMA, 4, atomic=True, seed=3) for _ in range(2))
    assert (one.lower_s, one.upper_s, str(one.fleet)) == (two.lower_s, two.upper_s, str(two.fleet))
    assert np.array_equal(one.plan.engine_of, two.plan.engine_of)


@pytest.mark.parametrize(
    ("gpus", "limit", "topology", "said"),
    [
        (8, 0.0, None, "time limit"),
        (8, 1.0, [4, 3], "groups of 8 GPUs"),
        (8, 1.0, [8, 0], "groups of 8 GPUs"),
        (200, 1.0, None, "more than"),
    ],
)
def test_bad_input(gpus: int, limit: float, topology: list[int] | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        solve_shapes(SMALL, LLAMA, gpus, atomic=False, time_limit_s=limit, topology=topology)


# Tampered certificates

FOUND = solve_shapes(SMALL, LLAMA, 4, atomic=False)


def refused(tampered: ShapesCertificate, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_shapes(tampered, SMALL, LLAMA, 4, atomic=False)


def test_a_cut_left_out_is_missed() -> None:
    for left_out in FOUND.cuts:
        refused(replace(FOUND, cuts=tuple(cut for cut in FOUND.cuts if cut is not left_out)), "is listed")


def test_a_bound_raised_is_refused() -> None:
    for place, cut in enumerate(FOUND.cuts):
        assert cut.bound is not None
        raised = replace(cut.bound, lower_s=3 * cut.bound.lower_s, **(
            {"within_s": np.inf} if hasattr(cut.bound, "within_s") else {}
        ))  # fmt: skip
        cuts = (*FOUND.cuts[:place], replace(cut, bound=raised, certificate=None), *FOUND.cuts[place + 1 :])
        refused(replace(FOUND, cuts=cuts), "certificate: ")


def test_a_limited_engine_is_refused() -> None:
    limited = Cut(Fleet(LLAMA, (Engine(4, max_running=1),), 4), FOUND.cuts[0].bound)
    refused(replace(FOUND, cuts=(limited, *FOUND.cuts)), "limited")


def test_a_cut_said_to_hold_no_plan_is_refused() -> None:
    cuts = (replace(FOUND.cuts[0], bound=None, certificate=None), *FOUND.cuts[1:])
    refused(replace(FOUND, cuts=cuts), "every request fits")


def test_a_cut_of_other_gpus_is_refused() -> None:
    bound = FOUND.cuts[0].bound
    refused(replace(FOUND, cuts=(*FOUND.cuts, Cut(Fleet.of(LLAMA, "1xTP8"), bound))), "other GPUs")
