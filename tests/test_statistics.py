"""Statistics against a slow reference in exact fractions, against scipy, and under censoring."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.trace.statistics import DEFINITIONS, TraceStatistics, statistics
from tailopt.trace.trace import Trace


def reference_share_and_icc(groups: list[list[int]]) -> tuple[Fraction | None, Fraction | None]:
    """Eta squared and ICC(1), from the definition, one response at a time."""
    everything = [x for group in groups for x in group]
    n, a = len(everything), len(groups)
    if a == 1 or a == n:
        return None, None
    mean = Fraction(sum(everything), n)
    between = within = Fraction(0)
    for group in groups:
        own = Fraction(sum(group), len(group))
        for x in group:
            between += (own - mean) ** 2
            within += (x - own) ** 2
    if between + within == 0:
        return None, None
    n0 = Fraction(1, a - 1) * (n - Fraction(sum(len(group) ** 2 for group in groups), n))
    ms_between, ms_within = between / (a - 1), within / (n - a)
    return between / (between + within), (ms_between - ms_within) / (ms_between + (n0 - 1) * ms_within)


def reference_percentile(values: list[int], share: Fraction) -> Fraction:
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


groups = st.lists(st.lists(st.integers(1, 100_000), min_size=1, max_size=6), min_size=1, max_size=8)


@given(groups)
def test_against_the_reference(lengths: list[list[int]]) -> None:
    found = statistics(Trace.of(lengths))
    everything = [x for group in lengths for x in group]
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        expected = reference_percentile(everything, Fraction(share, 100))
        assert getattr(found, name) == pytest.approx(float(expected), rel=1e-12)
    share, icc = reference_share_and_icc(lengths)
    for value, exact in ((found.between_prompt_share, share), (found.icc, icc)):
        assert (value is None) == (exact is None)
        if exact is not None:
            assert value == pytest.approx(float(exact), rel=1e-9, abs=1e-9)
    assert found.max == max(everything)
    assert found.mean == pytest.approx(sum(everything) / len(everything))
    assert found.p90_over_p50 == found.p90 / found.p50
    assert (found.n_requests, found.n_prompts, found.n_groups) == (
        len(everything),
        len(lengths),
        len(lengths),
    )
    sizes = [len(group) for group in lengths]
    assert (found.samples_min, found.samples_median, found.samples_max) == (
        min(sizes), np.median(sizes), max(sizes),
    )  # fmt: skip
    assert found.capped_share == 0
    assert found.lower_bounds == ()


def test_icc_estimates_what_it_is_named_after() -> None:
    """Drawn with a true share of 0.7: ICC finds it, eta squared is too high, the more the fewer samples."""
    rng = np.random.default_rng(0)
    for samples in (2, 8):
        prompt, response = rng.standard_normal((4000, 1)), rng.standard_normal((4000, samples))
        normal = np.sqrt(0.7) * prompt + np.sqrt(0.3) * response
        found = statistics(Trace.of(np.rint(1e6 + 1e5 * normal).astype(int).tolist()))
        assert found.icc == pytest.approx(0.7, abs=0.03)
        assert found.between_prompt_share == pytest.approx(0.7 + 0.3 / samples, abs=0.03)


def test_f_statistic_of_scipy() -> None:
    from scipy.stats import f_oneway

    lengths = [[30, 50, 41], [7, 9], [100, 140, 90, 120]]
    found = statistics(Trace.of(lengths))
    f = f_oneway(*lengths).statistic
    n0 = (9 - (9 + 4 + 16) / 9) / 2
    assert found.icc == pytest.approx((f - 1) / (f + n0 - 1))


def test_undefined_shares() -> None:
    for lengths in ([[1, 2, 3]], [[1], [2], [3]], [[5, 5], [5, 5]], [[7]]):
        found = statistics(Trace.of(lengths))
        assert found.between_prompt_share is None
        assert found.icc is None


def test_groups_are_prompts_at_a_step() -> None:
    trace = Trace(
        name="t",
        source="s",
        prompt=np.array([0, 0, 0, 0, 1, 1]),
        prompt_ids=("a", "b"),
        sample=np.array([0, 1, 0, 1, 0, 1]),
        prompt_tokens=np.zeros(6, int),
        output_tokens=np.array([10, 11, 90, 91, 50, 51]),
        capped=np.zeros(6, bool),
        arrival_s=np.zeros(6),
        step=np.array([1, 1, 2, 2, 1, 1]),
    )
    found = statistics(trace)
    assert (found.n_prompts, found.n_groups, found.samples_max) == (2, 3, 2)
    share, icc = reference_share_and_icc([[10, 11], [90, 91], [50, 51]])
    assert share is not None
    assert icc is not None
    assert found.between_prompt_share == pytest.approx(float(share))
    assert found.icc == pytest.approx(float(icc))


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 10_000),
)
def test_lower_bounds(rows: list[tuple[int, bool]], more: int) -> None:
    """Whatever the capped lengths really were: what is not named stays, what is named can only be more."""
    trace = Trace.of([[length for length, _ in rows]])
    capped = np.array([flag for _, flag in rows])
    censored = Trace(
        name="t", source="s", prompt=trace.prompt, prompt_ids=trace.prompt_ids, sample=trace.sample,
        prompt_tokens=trace.prompt_tokens, output_tokens=trace.output_tokens, capped=capped,
        arrival_s=trace.arrival_s,
    )  # fmt: skip
    found = statistics(censored)
    assert found.capped_share == pytest.approx(capped.mean())
    truth = statistics(Trace.of([[length + more * flag for length, flag in rows]]))
    for name in ("mean", "p50", "p90", "p99", "max"):
        if name in found.lower_bounds:
            assert getattr(truth, name) >= getattr(found, name) - 1e-9
        else:
            assert getattr(truth, name) == pytest.approx(getattr(found, name))
    if "p90_over_p50" in found.lower_bounds:
        assert truth.p90_over_p50 >= found.p90_over_p50 - 1e-9


def test_every_number_is_defined() -> None:
    assert set(DEFINITIONS) == set(TraceStatistics.__annotations__) - {"lower_bounds"}
