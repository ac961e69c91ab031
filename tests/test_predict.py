"""Predictors: what each answers, what it may look at, and a user's own."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.errors import InputError
from tailopt.predict import PREDICTORS, resolve_predictor
from tailopt.trace import Trace
from tailopt.trace.transforms import Batch, sample_batches

traces = st.lists(st.lists(st.integers(1, 10**6), min_size=4, max_size=4), min_size=3, max_size=8).map(
    Trace.of
)


def batch_of(trace: Trace, samples: int, seed: int = 0) -> Batch:
    (batch,) = sample_batches(trace, batches=1, prompts=2, samples=samples, seed=seed)
    return batch


@given(traces, st.integers(0, 1000))
@pytest.mark.parametrize("name", [*PREDICTORS, "noisy_truth(sigma=3, between=0.5)", "constant(tokens=5)"])
def test_every_predictor_answers_and_again_the_same(name, trace, seed):
    batch = batch_of(trace, 2, seed)
    predicted = resolve_predictor(name)(batch)
    assert predicted.shape == (batch.trace.n_requests,)
    assert (predicted >= 1).all()
    assert np.array_equal(predicted, resolve_predictor(name)(batch))


@given(traces, st.integers(0, 1000))
@pytest.mark.parametrize("name", ["prompt_mean", "constant"])
def test_no_leak_from_the_batch(name, trace, seed):
    """Whatever the batch's own lengths are, the prediction is the same."""
    batch = batch_of(trace, 2, seed)
    other = replace(batch.trace, output_tokens=batch.trace.output_tokens[::-1] + 7)
    before = resolve_predictor(name)(batch)
    assert np.array_equal(before, resolve_predictor(name)(Batch(other, batch.history, batch.seed)))


@given(traces, st.integers(0, 1000))
def test_prompt_mean_is_the_mean_of_the_samples_left_out(trace, seed):
    batch = batch_of(trace, 2, seed)
    predicted = resolve_predictor("prompt_mean")(batch)
    for i, prompt in enumerate(batch.trace.prompt):
        whole = trace.output_tokens[trace.prompt == trace.prompt_ids.index(batch.trace.prompt_ids[prompt])]
        drawn = batch.trace.output_tokens[batch.trace.prompt == prompt]
        assert predicted[i] == pytest.approx((whole.sum() - drawn.sum()) / 2)


def test_prompt_mean_without_history_of_one_prompt_takes_the_mean_of_all():
    batch = Batch(Trace.of([[5, 5], [9, 9]]), Trace.of([[100, 200, 600]]), seed=0)
    assert resolve_predictor("prompt_mean")(batch).tolist() == [300] * 4
    some = Batch(Trace.of([[5, 5], [9, 9]]), Trace.of([[100], [50, 60]]).take([1, 2]), seed=0)
    assert resolve_predictor("prompt_mean")(some).tolist() == [55] * 4


def test_prompt_mean_without_history_says_what_to_do():
    with pytest.raises(InputError, match=r"prompt_mean: .*takes all 4 samples .*--samples 2"):
        resolve_predictor("prompt_mean")(batch_of(Trace.of([[1, 2, 3, 4]] * 2), 4))


def test_constant_without_history_does_not_look_at_the_batch():
    short, long = batch_of(Trace.of([[1, 2]] * 2), 2), batch_of(Trace.of([[10**6] * 2] * 2), 2)
    predicted = resolve_predictor("constant")
    assert np.array_equal(predicted(short), predicted(long))
    assert len(set(predicted(short))) == 1


@pytest.mark.parametrize("between", [0.0, 0.5, 1.0])
def test_noise_has_the_spread_and_the_split_it_says(between):
    batch = batch_of(Trace.of([[10**6] * 400] * 2), 400)
    spec = f"noisy_truth(sigma=0.4, between={between})"
    noise = np.array(
        [
            np.log(resolve_predictor(spec)(Batch(batch.trace, None, seed)) / 1e6).reshape(2, 400)
            for seed in range(300)
        ]
    )
    within = noise.var(axis=2, ddof=1).mean()
    assert within == pytest.approx((1 - between) * 0.16, rel=0.05, abs=1e-12)
    assert noise.mean(axis=2).var() == pytest.approx(between * 0.16 + within / 400, rel=0.2)
    assert noise.mean() == pytest.approx(0.0, abs=0.05)


def test_noise_is_paired_across_options_and_depends_on_the_batch():
    batch = batch_of(Trace.of([[1000, 2000]] * 3), 2)
    first, other = (resolve_predictor(f"noisy_truth(sigma={sigma})")(batch) for sigma in (0.3, 0.30001))
    assert np.allclose(first, other, rtol=1e-3)
    assert not np.array_equal(
        first, resolve_predictor("noisy_truth(sigma=0.3)")(Batch(batch.trace, None, 77))
    )


@pytest.mark.parametrize("name", PREDICTORS)
def test_every_predictor_says_what_it_does_and_where_it_comes_from(name):
    text = PREDICTORS[name].__doc__
    assert text
    assert "Source: " in text
    assert ">>> " in text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("noisy_truth(sigma=-1)", "sigma: expected 0 to 50, got -1"),
        ("noisy_truth(between=2)", "between: expected 0 to 1, got 2"),
        ("noisy_truth(sigma='a')", "sigma: expected a number, got 'a'"),
        ("constant(tokens=0)", "tokens: expected at least 1, got 0"),
        ("constant(tokens=1e999)", "tokens: expected at least 1, got inf"),
        ("trut", "predictor 'trut': unknown; did you mean truth"),
    ],
)
def test_bad_specs_are_one_line(spec, message):
    with pytest.raises(InputError) as error:
        resolve_predictor(spec)(batch_of(Trace.of([[1, 2]] * 2), 2))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_own_predictor(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "def good(batch, rng, *, tokens: int = 3): return [tokens] * batch.trace.n_requests\n"
        "def short(batch, rng): return [3]\n"
        "def zero(batch, rng): return [0] * batch.trace.n_requests\n"
        "def nan(batch, rng): return [float('nan')] * batch.trace.n_requests\n"
        "def raises(batch, rng): return 1 / 0\n"
    )
    batch = batch_of(Trace.of([[1, 2]] * 2), 2)
    assert resolve_predictor(f"{path}:good(tokens=8)")(batch).tolist() == [8] * 4
    for name, message in {
        "short": "predicted tokens: expected 4 values, got 1",
        "zero": r"predicted tokens\[0\]: expected at least 1",
        "nan": r"predicted tokens\[0\]: expected a finite number",
        "raises": r"raised ZeroDivisionError: division by zero \(line 5\)",
    }.items():
        with pytest.raises(InputError, match=f"^predictor .*own.py:{name}: {message}"):
            resolve_predictor(f"{path}:{name}")(batch)
