"""The two-phase closed form against its definition, and the best place to switch against all places."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.errors import InputError
from tailopt.oracle.two_phase import TwoPhases, best_switch, lead_for

SECONDS = st.floats(0.01, 1e4)
LEAD = st.floats(0, 5)


@given(SECONDS, SECONDS, LEAD, LEAD, st.floats(0, 1e4))
def test_gain_and_break_even_are_what_they_say(a1: float, b2: float, x: float, y: float, cost: float) -> None:
    phases = TwoPhases.of_leads(a1, b2, x, y)
    static_s = min(phases.a1_s + phases.a2_s, phases.b1_s + phases.b2_s)
    assert phases.gain(cost) == pytest.approx(1 - phases.switched_s(cost) / static_s, abs=1e-9)
    assert phases.switched_s(phases.break_even_s) == pytest.approx(static_s)
    least = min(x * a1, y * b2)
    assert phases.break_even_s == pytest.approx(least, abs=1e-9 * (a1 + b2) * 10)
    assert phases.gain(cost) == pytest.approx((least - cost) / (a1 + b2 + least), abs=1e-8)


@given(SECONDS, LEAD)
def test_equal_phases_and_leads(a1: float, x: float) -> None:
    assert TwoPhases.of_leads(a1, a1, x, x).gain(0.0) == pytest.approx(1 - 2 / (2 + x))


@given(st.floats(0, 0.99))
def test_lead_for_is_the_inverse(gain: float) -> None:
    assert TwoPhases.of_leads(1.0, 1.0, lead_for(gain), lead_for(gain)).gain(0.0) == pytest.approx(gain)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8), st.integers(0, 10)
)
def test_best_switch_is_the_best_of_all(stages: list[tuple[int, int]], cost: int) -> None:
    first, second = np.array(stages, dtype=np.float64).T
    ways = [first.sum()] + [first[n:].sum() + cost + second[:n].sum() for n in range(1, len(first) + 1)]
    n, seconds = best_switch(first, second, float(cost))
    assert seconds == min(ways) == ways[n]


def test_bad_input() -> None:
    with pytest.raises(InputError, match="a2_s"):
        TwoPhases(1.0, 0.0, 1.0, 1.0)
    with pytest.raises(InputError, match="gain"):
        lead_for(1.0)
    with pytest.raises(InputError, match="as many"):
        best_switch(np.ones(2), np.ones(3), 0.0)
