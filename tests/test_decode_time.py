"""decode_time_s against the sum over steps; engine_time_s against a plain slot schedule."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.engine.decode_time import context_read, decode_time_s, engine_time_s
from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime, Table

seconds = st.floats(0, 0.02)
slopes = st.floats(0, 1e-5)
step_times = st.one_of(
    st.builds(Affine, st.floats(1e-3, 0.02), seconds, slopes),
    st.builds(Power, st.floats(1e-3, 0.02), seconds, st.floats(0.1, 1.0), slopes),
    st.lists(st.tuples(st.floats(-0.01, 0.02), seconds, slopes | st.floats(1e-4, 1e-2)), max_size=3).map(
        lambda pieces: MaxAffine(((5e-3, 1e-4, 0.0), *pieces))
    ),
    st.builds(
        lambda gaps, rises, c, padded: Table(
            np.cumsum([1, *gaps]), np.cumsum([1e-3, *rises]), c_s=c, padded=padded
        ),
        st.lists(st.integers(1, 5), min_size=3, max_size=3),
        st.lists(st.floats(0, 0.01), min_size=3, max_size=3),
        slopes,
        st.booleans(),
    ),
)
requests = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60)), min_size=1, max_size=8)


def sum_over_steps(step_time: StepTime, batch: list[tuple[int, int]]) -> float:
    total = 0.0
    for k in range(1, max((length for _, length in batch), default=0) + 1):
        running = [prompt for prompt, length in batch if length >= k]
        total += float(step_time(len(running), sum(prompt + k for prompt in running)))
    return total


def columns(batch: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(batch, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@given(step_times, requests)
def test_equals_the_sum_over_steps(step_time, batch):
    assert decode_time_s(step_time, *columns(batch)) == pytest.approx(
        sum_over_steps(step_time, batch), rel=1e-9
    )


@given(step_times, requests, st.data())
def test_many_sets_at_once(step_time, batch, data):
    flags = st.lists(st.booleans(), min_size=len(batch), max_size=len(batch))
    chosen = np.array(data.draw(st.lists(flags, min_size=1, max_size=4)), dtype=bool)
    expected = [
        sum_over_steps(step_time, [request for request, here in zip(batch, row, strict=True) if here])
        for row in chosen
    ]
    assert decode_time_s(step_time, *columns(batch), chosen) == pytest.approx(expected, rel=1e-9)
    assert decode_time_s(step_time, *columns(batch), chosen[None]).shape == (1, len(chosen))


@given(requests, st.floats(1e-3, 0.02), seconds, slopes)
def test_affine_formula(batch, a, b, c):
    prompt, output = columns(batch)
    expected = a * output.max() + np.sum(b * output + c * context_read(prompt, output))
    assert decode_time_s(Affine(a, b, c), prompt, output) == pytest.approx(expected, rel=1e-9)


def slot_schedule(lengths: list[int], slots: int) -> list[int]:
    """Steps that each slot is busy if requests start longest first, each in the slot that is free first."""
    busy = [0] * slots
    for length in sorted(lengths, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + length)
    return busy


@given(requests, st.integers(1, 8), st.floats(1e-3, 0.02), seconds)
def test_crowded_engine_is_estimated_within_one_request(batch, max_running, a, b):
    prompt, output = columns(batch)
    shape = ShapeProfile(1, Affine(a, b), 1e4, kv_capacity_tokens=10**6, max_running=100)
    estimate = float(engine_time_s(shape, max_running, prompt, output, np.ones(len(batch), bool)))
    exact = a * max(slot_schedule(output.tolist(), max_running)) + b * output.sum()
    assert estimate <= exact * (1 + 1e-9)
    assert exact <= (estimate + a * output.max()) * (1 + 1e-9)


@given(step_times, requests, st.integers(1, 8), st.integers(110, 1000))
def test_capacity_only_ever_costs(step_time, batch, max_running, kv_capacity):
    """Not below the least steps and context any schedule needs; equal to the exact sum where all fits."""
    prompt, output = columns(batch)
    shape = ShapeProfile(1, step_time, 1e4, kv_capacity, max_running=100)
    got = float(engine_time_s(shape, max_running, prompt, output, np.ones(len(batch), bool)))
    held = [sum(p + k for p, length in batch if length >= k) for k in range(1, output.max() + 1)]
    if len(batch) <= max_running and max(held) <= kv_capacity:
        assert got == float(decode_time_s(step_time, prompt, output))
    else:
        steps = max(output.max(), output.sum() / min(max_running, len(batch)))
        assert got >= steps * float(step_time(1, 0)) * (1 - 1e-9)


def test_kv_cache_binds_at_the_peak_not_at_the_sum():
    """Requests of 60 and 50 tokens peak at 2 * 50, never at 110; twenty in a cache for four must wait."""
    prompt, output = np.array([0, 0]), np.array([60, 50])
    shape = ShapeProfile(1, Affine(0.01, 0.001), 1e4, kv_capacity_tokens=100, max_running=99)
    both = engine_time_s(shape, 99, prompt, output, np.ones(2, bool))
    assert both == decode_time_s(shape.step_time, prompt, output)

    prompt, output = np.full(20, 50), np.full(20, 1)
    tight = ShapeProfile(1, Affine(0.01, 0.001), 1e4, kv_capacity_tokens=4 * 51, max_running=99)
    assert engine_time_s(tight, 99, prompt, output, np.ones(20, bool)) == pytest.approx(
        5 * (0.01 + 4 * 0.001)
    )
