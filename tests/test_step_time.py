"""Step times: every kind is what its formula says, monotone, zero when idle, and the lines it gives out."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime, Table
from tailopt.errors import InputError

seconds = st.floats(1e-5, 1.0)
per_request = st.floats(0, 1e-2)
per_token = st.one_of(st.just(0.0), st.floats(1e-10, 1e-5))
affine = st.builds(Affine, seconds, per_request, per_token)
power = st.builds(Power, seconds, per_request, st.floats(0.05, 1), per_token)
max_affine = st.builds(
    MaxAffine, st.lists(st.tuples(seconds, per_request, per_token), min_size=1, max_size=4).map(tuple)
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    steps = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    running = np.cumsum([1, *steps])
    rises = draw(st.lists(st.floats(0, 1e-2), min_size=len(steps), max_size=len(steps)))
    return Table(running, np.cumsum([draw(seconds), *rises]), draw(per_token), draw(st.booleans()))


step_times = st.one_of(affine, power, max_affine, tables())
requests = st.integers(1, 400)
contexts = st.floats(0, 1e7)


def by_formula(step_time: StepTime, n: int, kv: float) -> float:
    """The formulas of the module, written out for one point."""
    match step_time:
        case Affine(a, b, c):
            return a + b * n + c * kv
        case Power(a, b, p, c):
            return a + b * n**p + c * kv
        case MaxAffine(pieces):
            return max(a + b * n + c * kv for a, b, c in pieces)
        case Table():
            knots = list(zip(step_time.running.tolist(), step_time.seconds.tolist(), strict=True))
            if n >= knots[-1][0]:
                (n_0, s_0), (n_1, s_1) = knots[-2:]
                base = s_1 + (s_1 - s_0) / (n_1 - n_0) * (n - n_1)
            else:
                (n_0, s_0), (n_1, s_1) = next(pair for pair in pairwise(knots) if pair[1][0] > n)
                inside = s_0 if n == n_0 else s_1
                base = inside if step_time.padded else s_0 + (s_1 - s_0) * (n - n_0) / (n_1 - n_0)
            return base + step_time.c_s * kv
    raise AssertionError(step_time)


@given(step_times, requests, contexts)
def test_call_is_the_formula(step_time: StepTime, n: int, kv: float) -> None:
    assert float(step_time(n, kv)) == pytest.approx(by_formula(step_time, n, kv), rel=1e-12)


@given(step_times, st.integers(0, 200), st.lists(contexts, min_size=1, max_size=5))
def test_lines_are_the_step_time(step_time: StepTime, n_max: int, kvs: list[float]) -> None:
    lines = step_time.lines(n_max)
    assert lines.n_max == n_max
    assert lines.base_s.shape == (len(lines.slope_s), n_max + 1)
    assert lines.separable == (len(lines.slope_s) == 1)
    n, kv = np.arange(n_max + 1), np.array(kvs)
    upper = (lines.base_s[:, :, None] + lines.slope_s[:, None, None] * kv).max(axis=0)
    upper[0] = 0
    np.testing.assert_allclose(upper, step_time(n[:, None], kv[None, :]), rtol=1e-13)


@given(step_times, requests, st.integers(0, 50), contexts, st.floats(0, 1e6))
def test_never_falls(step_time: StepTime, n: int, more: int, kv: float, longer: float) -> None:
    here = float(step_time(n, kv))
    assert here > 0
    # Interpolation between equal entries may round in the last digit.
    assert float(step_time(n + more, kv + longer)) >= here * (1 - 1e-14)


@given(step_times, contexts)
def test_idle_is_free(step_time: StepTime, kv: float) -> None:
    assert float(step_time(0, kv)) == 0
    assert (step_time.lines(3).base_s[:, 0] == 0).all()


@given(power.filter(lambda tau: tau.b_s > 1e-6 and tau.p < 0.95), st.integers(1, 300))
def test_power_is_strictly_concave(step_time: Power, n: int) -> None:
    tau = step_time(np.array([n, n + 1, n + 2]), 0)
    assert tau[2] - tau[1] < tau[1] - tau[0]


@given(max_affine, st.integers(1, 300), contexts)
def test_max_affine_is_convex(step_time: MaxAffine, n: int, kv: float) -> None:
    tau = step_time(np.array([n, n + 1, n + 2]), kv)
    assert tau[2] - tau[1] >= tau[1] - tau[0] - 1e-12 * tau[2]


@given(step_times, st.lists(st.tuples(requests, contexts), min_size=1, max_size=8))
def test_vectorized(step_time: StepTime, points: list[tuple[int, float]]) -> None:
    n, kv = (np.array(column) for column in zip(*points, strict=True))
    one_by_one = [float(step_time(int(a), float(b))) for a, b in points]
    np.testing.assert_array_equal(step_time(n, kv), one_by_one)


@pytest.mark.parametrize(
    ("step_time", "text"),
    [
        (Affine(6e-3, 1e-4, 5e-8), "6 + 0.1·n + 0.05·K/1000 ms"),
        (Power(2e-3, 1e-3, 0.5, 1e-8), "2 + 1·n^0.5 + 0.01·K/1000 ms"),
        (
            MaxAffine(((12e-3, 0, 0), (5e-3, 1e-4, 2e-8))),
            "max(12 + 0·n + 0·K/1000, 5 + 0.1·n + 0.02·K/1000) ms",
        ),
        (Table([1, 8], [6e-3, 7e-3], 5e-8), "table 6 ms at n=1 to 7 at 8 + 0.05·K/1000 ms"),
        (Table([1, 8], [6e-3, 7e-3], padded=True), "table 6 ms at n=1 to 7 at 8, padded + 0·K/1000 ms"),
    ],
)
def test_str_shows_the_numbers(step_time: StepTime, text: str) -> None:
    assert str(step_time) == text


def test_tables_compare_by_value() -> None:
    table = Table([1, 8], [6e-3, 7e-3], 5e-8, padded=True)
    same = Table(np.array([1, 8]), np.array([6e-3, 7e-3]), 5e-8, padded=True)
    assert table == same
    assert hash(table) == hash(same)
    assert table != Table([1, 8], [6e-3, 7e-3], 5e-8)
    assert table != Table([1, 9], [6e-3, 7e-3], 5e-8, padded=True)
    assert table != Table([1, 8], [6e-3, 8e-3], 5e-8, padded=True)
    assert table != Affine(6e-3, 1e-4)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Affine(6e-3, -1e-4), "b >= 0 and c >= 0, got a=0.006, b=-0.0001"),
        (lambda: Affine(6e-3, 1e-4, -1e-8), "c=-1e-08"),
        (lambda: Affine(NAN, 1e-4), "expected finite numbers"),
        (lambda: Affine(6e-3, INF), "expected finite numbers"),
        (lambda: Affine(-6e-3, 1e-4), "expected a positive time for one request"),
        (lambda: Affine(0, 0), "expected a positive time for one request"),
        (lambda: Power(1e-3, 1e-3, 0), "expected 0 < p <= 1, got 0"),
        (lambda: Power(1e-3, 1e-3, 1.1), "expected 0 < p <= 1, got 1.1"),
        (lambda: Power(1e-3, 1e-3, NAN), "expected 0 < p <= 1, got nan"),
        (lambda: Power(1e-3, -1e-3, 0.5), "power step time: expected finite numbers, b >= 0"),
        (lambda: MaxAffine(()), "expected at least one piece"),
        (lambda: MaxAffine(((1e-3, 0, 0), (1e-3, -1, 0))), "b=-1.0"),
        (lambda: MaxAffine(((-1, 0, 0), (-2, 0, 0))), "expected a positive time for one request"),
        (lambda: Table([1], [1e-3]), "two or more increasing numbers of requests from 1 on"),
        (lambda: Table([2, 4], [1e-3, 2e-3]), "from 1 on"),
        (lambda: Table([1, 4, 4], [1e-3, 2e-3, 3e-3]), "increasing"),
        (lambda: Table([1, 4], [2e-3, 1e-3]), "expected positive seconds that never fall"),
        (lambda: Table([1, 4], [0, 1e-3]), "expected positive seconds that never fall"),
        (lambda: Table([1, 4], [1e-3]), "expected 2 values, got 1"),
        (lambda: Table([1, 4], [1e-3, NAN]), "seconds[1]: expected a finite number, got nan"),
        (lambda: Table([1, 4.5], [1e-3, 2e-3]), "running[1]: expected a whole number, got 4.5"),
        (lambda: Table([1, 4], [1e-3, 2e-3], -1e-9), "c=-1e-09"),
        (lambda: Affine(6e-3, 1e-4)(-1, 0), "expected no negative number"),
        (lambda: Affine(6e-3, 1e-4)(1, -1.0), "expected no negative number"),
    ],
)
def test_bad_parameters_are_refused(build, expected: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError) as error:
        build()
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
