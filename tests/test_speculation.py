"""Speculative decoding and host time: the formulas against slow ones, and what must hold for any numbers."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.engine.profile import Draft, ShapeProfile
from tailopt.engine.speculation import (
    TOKEN,
    Speculation,
    decoding,
    expected_tokens,
    overlapped,
    token_time,
)
from tailopt.engine.step_time import Affine, MaxAffine, Power
from tailopt.errors import InputError
from tests.strategies import step_times

N_MAX = 12
CAPACITY = 5000
MOST = 8

shares = st.floats(0, 1)
small = st.floats(0, 0.5)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    own = draw(st.one_of(st.none(), step_times()))
    return Draft("any", draw(shares), own, draw(small), draw(small), draw(small), MOST, "made up")


@st.composite
def shapes(draw: st.DrawFn) -> ShapeProfile:
    """Any step time with a draft method, and a host that takes some of it."""
    step_time = draw(step_times())
    base_s = step_time.lines(N_MAX).base_s[:, 1:]
    alone = float(base_s[:, 0].max())
    each = draw(shares) * min(alone, float(np.diff(base_s).min())) * (1 - 1e-6)
    fixed = draw(shares) * (alone - each) * (1 - 1e-6)
    return ShapeProfile(
        1, step_time, 64.0, CAPACITY, N_MAX, 10**4,
        host_s=fixed, host_per_request_s=each, drafts=(draw(drafts()),),
    )  # fmt: skip


def slow_seconds(shape: ShapeProfile, k: int, n: int, kv_tokens: int) -> float:
    """The docstring of tailopt.engine.speculation, word for word."""

    def host(running: int) -> float:
        return 0.0 if shape.overlapped else shape.host_s + shape.host_per_request_s * running

    def tau(running: int, kv: int) -> float:
        return float(shape.step_time(running, kv))

    draft, with_drafts = shape.drafts[0], kv_tokens + n * k
    if k == 0:
        return tau(n, kv_tokens)
    seconds = tau(n * (k + 1), with_drafts) - host(n * (k + 1)) + host(n)
    seconds += draft.seconds + draft.seconds_per_request * n
    for _ in range(k):
        seconds += draft.step_fraction * (tau(n, with_drafts) - host(n))
        seconds += float(draft.step_time(n, with_drafts)) if draft.step_time is not None else 0.0
    return seconds


@given(shares, st.integers(0, 20))
def test_expected_tokens_is_the_sum_of_chances(acceptance: float, k: int) -> None:
    exact = sum(Fraction(acceptance) ** j for j in range(k + 1))
    assert expected_tokens(acceptance, k) == pytest.approx(float(exact), rel=1e-12)
    if acceptance < 0.999:
        closed = (1 - acceptance ** (k + 1)) / (1 - acceptance)
        assert expected_tokens(acceptance, k) == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize(("acceptance", "k"), [(0.0, 3), (0.3, 1), (0.7, 4), (0.95, 8), (1.0, 2)])
def test_expected_tokens_is_what_drawing_gives(acceptance: float, k: int) -> None:
    accepted = np.random.default_rng(0).random((200_000, k)) < acceptance
    gained = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    error = gained.std() / len(gained) ** 0.5
    assert abs(gained.mean() - expected_tokens(acceptance, k)) <= 5 * error + 1e-12


@given(shares, shares, st.integers(0, 8))
def test_more_acceptance_or_drafts_gain_more(one: float, other: float, k: int) -> None:
    low, high = sorted((one, other))
    assert expected_tokens(low, k) <= expected_tokens(high, k) <= expected_tokens(high, k + 1) <= k + 2


@given(shapes(), st.integers(0, 6), st.booleans(), st.integers(1, N_MAX), st.integers(0, CAPACITY))
def test_seconds_are_those_of_the_docstring(
    shape: ShapeProfile, k: int, is_overlapped: bool, n: int, kv_tokens: int
) -> None:
    if is_overlapped:
        shape = replace(shape, overlapped=True)
    if isinstance(shape.step_time, Power) and shape.host_per_request_s:
        return  # checked below: what is left of it may fall beyond the largest n
    steps = decoding(shape, Speculation("any", k), N_MAX)
    assert steps.seconds(n, kv_tokens) == pytest.approx(slow_seconds(shape, k, n, kv_tokens), rel=1e-9)
    assert steps.seconds(0, 0) == (0 if is_overlapped else shape.host_s)
    assert steps.lookahead == k
    exact = sum(Fraction(shape.drafts[0].acceptance) ** j for j in range(k + 1)) * TOKEN
    assert np.all(np.abs(steps.tokens - float(exact)) <= 1)


@given(shapes())
def test_no_drafts_is_no_speculation_to_the_byte(shape: ShapeProfile) -> None:
    plain, none = decoding(shape, None, N_MAX), decoding(shape, Speculation("any", 0), N_MAX)
    assert plain.lines.base_s.tobytes() == none.lines.base_s.tobytes()
    assert plain.lines.slope_s.tobytes() == none.lines.slope_s.tobytes()
    assert plain.tokens.tobytes() == none.tokens.tobytes() == np.full(N_MAX + 1, TOKEN).tobytes()
    assert plain.lookahead == none.lookahead == 0
    assert np.array_equal(plain.lines.base_s[:, 1:], shape.step_time.lines(N_MAX).base_s[:, 1:])
    useless = replace(shape, drafts=(Draft("any", 0.0, None, 0.1, 1.0, 1.0),))
    never = decoding(useless, Speculation("any"), N_MAX)
    assert never.lookahead == 0
    assert never.lines.base_s.tobytes() == plain.lines.base_s.tobytes()


@given(shapes(), st.integers(0, 400))
def test_the_best_k_is_never_worse_than_one_k_for_all(shape: ShapeProfile, context: int) -> None:
    best = decoding(shape, Speculation("any", None, None, context), N_MAX)
    for k in range(MOST + 1):
        fixed = decoding(shape, Speculation("any", k), N_MAX)
        for n in range(1, N_MAX + 1):
            kv_tokens = n * (context + 1)
            ours = best.seconds(n, kv_tokens) / best.tokens[n]
            assert ours <= fixed.seconds(n, kv_tokens) / fixed.tokens[n] * (1 + 1e-9)


@given(shapes(), st.integers(0, 400), st.integers(1, N_MAX), st.integers(0, CAPACITY))
def test_the_best_k_takes_as_long_as_that_k(
    shape: ShapeProfile, context: int, n: int, kv_tokens: int
) -> None:
    best = decoding(shape, Speculation("any", None, None, context), N_MAX)
    all_k = [decoding(shape, Speculation("any", k), N_MAX) for k in range(MOST + 1)]
    same = [one for one in all_k if one.tokens[n] == best.tokens[n]]
    seconds = best.seconds(n, kv_tokens)
    assert any(seconds == pytest.approx(one.seconds(n, kv_tokens), rel=1e-9) for one in same)


@given(shapes(), st.one_of(st.none(), st.integers(0, 5)))
def test_time_never_falls_with_the_context(shape: ShapeProfile, k: int | None) -> None:
    steps = decoding(shape, Speculation("any", k), N_MAX)
    assert (steps.lines.slope_s >= 0).all()
    assert np.isfinite(steps.lines.base_s).all()
    if k is not None:
        for kv_tokens in (0, 10, CAPACITY):
            seconds = [steps.seconds(n, kv_tokens) for n in range(1, N_MAX + 1)]
            assert np.all(np.diff(seconds) >= -1e-9 * np.array(seconds[1:]))


@given(shapes(), st.one_of(st.none(), st.integers(0, 5)), st.integers(1, N_MAX), st.integers(0, CAPACITY))
def test_seconds_per_token_are_those_of_a_step_over_its_tokens(
    shape: ShapeProfile, k: int | None, n: int, kv_tokens: int
) -> None:
    speculation = Speculation("any", k, None, 100)
    steps, tau = decoding(shape, speculation, N_MAX), token_time(shape, speculation)
    expected = steps.seconds(n, kv_tokens) * TOKEN / steps.tokens[n]
    lines = tau.lines(N_MAX)
    assert np.max(lines.base_s[:, n] + lines.slope_s * kv_tokens) == pytest.approx(expected, rel=1e-9)
    if k is not None:  # the best k depends on how many may run
        assert float(tau(n, kv_tokens)) == pytest.approx(expected, rel=1e-9)
    assert lines.base_s[:, 0].tolist() == [0.0] * len(lines.slope_s)
    assert token_time(shape, None) is shape.step_time


def test_the_best_k_keeps_to_the_token_budget() -> None:
    shape = ShapeProfile(1, Affine(1.0, 0.0), 64.0, 1000, 10, 35, drafts=(Draft("any", 1.0),))
    assert decoding(shape, Speculation("any"), 10).lookahead == 2
    assert decoding(shape, Speculation("any"), 4).lookahead == 7
    shape = replace(shape, drafts=(Draft("any", 1.0, most_tokens=3),))
    assert decoding(shape, Speculation("any"), 4).lookahead == 3
    assert decoding(shape, Speculation("any", 6), 4).lookahead == 6


def test_few_requests_speculate_and_many_do_not() -> None:
    shape = ShapeProfile(1, MaxAffine(((1.0, 0.0, 0.0), (0.0, 0.1, 0.0))), 64.0, 10**6, 64,
                         drafts=(Draft("any", 0.8, step_fraction=0.05),))  # fmt: skip
    tokens = decoding(shape, Speculation("any"), 64).tokens
    assert tokens[1] > tokens[4] > tokens[64] == TOKEN
    assert (np.diff(tokens[1:]) <= 0).all()


def test_a_power_curve_beyond_what_was_checked_never_falls() -> None:
    rise = 1.0 * (12**0.5 - 11**0.5)
    shape = ShapeProfile(1, Power(1.0, 1.0, 0.5), 64.0, 1000, 12, host_per_request_s=rise * 0.999,
                         drafts=(Draft("any", 0.5),))  # fmt: skip
    base = decoding(shape, Speculation("any", 8), 12).lines.base_s[0]
    assert np.all(np.diff(base[1:]) >= 0)


@given(shapes())
def test_overlapped_is_the_larger_of_both(shape: ShapeProfile) -> None:
    if not isinstance(shape.step_time, Affine | MaxAffine):
        with pytest.raises(InputError, match="expected an affine or max_affine"):
            overlapped(shape)
        return
    faster = overlapped(shape)
    for n in (1, 5, N_MAX):
        for kv_tokens in (0, 77):
            host = shape.host_s + shape.host_per_request_s * n
            device = float(shape.step_time(n, kv_tokens)) - host
            assert float(faster.step_time(n, kv_tokens)) == pytest.approx(max(device, host), rel=1e-9)
    assert decoding(faster, None, N_MAX).seconds(0, 0) == 0
    assert overlapped(faster) == faster


def test_bad_terms() -> None:
    shape = ShapeProfile(1, Affine(1.0, 0.1), 64.0, 1000, 8)
    with pytest.raises(InputError, match=r"the host takes 1\.2 s of a step of 1 requests"):
        replace(shape, host_s=1.2)
    with pytest.raises(InputError, match=r"of a step of 2 requests.*never to fall"):
        replace(shape, host_per_request_s=0.2)
    replace(shape, host_per_request_s=0.1, overlapped=True)
    with pytest.raises(InputError, match="draft 'a' is given twice"):
        replace(shape, drafts=(Draft("a", 0.1), Draft("a", 0.2)))
    with pytest.raises(InputError, match="has no draft method 'b'; known: a"):
        decoding(replace(shape, drafts=(Draft("a", 0.1),)), Speculation("b"), 4)
    with pytest.raises(InputError, match=r"acceptance: expected a number from 0 to 1, got 1\.5"):
        Draft("a", 1.5)
    with pytest.raises(InputError, match="draft a: most_tokens: expected 1 to 64, got 0"):
        Draft("a", 0.5, most_tokens=0)
    with pytest.raises(InputError, match="wake_s: expected a number from 0"):
        replace(shape, wake_s=float("nan"))
    with pytest.raises(InputError, match=r"acceptance\[0\]: expected at most 1"):
        Speculation("a", acceptance=2)
    with pytest.raises(InputError, match="draft_tokens: expected 0 to 64, got True"):
        Speculation("a", draft_tokens=True)
