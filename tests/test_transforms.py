"""Batches, tails, cuts, bootstraps and inventions: what they promise, checked on random traces."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tailopt.errors import InputError
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.statistics import statistics
from tailopt.trace.synthetic import (
    synthetic_bimodal,
    synthetic_gamma,
    synthetic_lognormal,
    synthetic_pareto,
)
from tailopt.trace.trace import Trace
from tailopt.trace.transforms import bootstrap, reshape_tail, sample_batches, truncate

lengths = st.integers(1, 50_000)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces with shuffled rows, groups of unequal size, and sometimes training steps."""
    steps = draw(st.sampled_from([1, 1, 2, 3]))
    groups = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    rows = [(p, s, step) for p, size in enumerate(groups) for step in range(steps) for s in range(size)]
    rows = draw(st.permutations(rows))
    n = len(rows)
    first = list(dict.fromkeys(p for p, _, _ in rows))
    return Trace(
        name="t",
        source="drawn",
        prompt=np.array([first.index(p) for p, _, _ in rows]),
        prompt_ids=tuple(f"q{p}" for p in first),
        sample=np.array([s for _, s, _ in rows]),
        prompt_tokens=np.array([10 * p for p, _, _ in rows]),
        output_tokens=np.array(draw(st.lists(lengths, min_size=n, max_size=n))),
        capped=np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n))),
        arrival_s=np.arange(n) * 0.5,
        step=np.array([step for _, _, step in rows]) if steps > 1 else None,
    )


def keys(trace: Trace) -> list[tuple[str, int, int, int]]:
    """Each response by prompt id, sample and step, with its length."""
    steps = np.zeros(trace.n_requests, int) if trace.step is None else trace.step
    ids = [trace.prompt_ids[prompt] for prompt in trace.prompt]
    return list(zip(ids, trace.sample.tolist(), steps.tolist(), trace.output_tokens.tolist(), strict=True))


@given(traces(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**40))
def test_batches(trace: Trace, prompts: int, samples: int, seed: int) -> None:
    steps = [0] if trace.step is None else np.unique(trace.step)
    large = []
    for step in steps:
        at_step = np.ones(trace.n_requests, bool) if trace.step is None else trace.step == step
        large.append(int((np.bincount(trace.prompt[at_step]) >= samples).sum()))
    if max(large) < prompts:
        with pytest.raises(InputError, match=f"has {max(large)} groups with at least {samples} samples"):
            sample_batches(trace, batches=1, prompts=prompts, samples=samples, seed=seed)
        return
    source = set(keys(trace))
    for batch in sample_batches(trace, batches=3, prompts=prompts, samples=samples, seed=seed):
        drawn = batch.trace
        assert drawn.prompt.tolist() == np.repeat(np.arange(prompts), samples).tolist()
        assert drawn.group.tolist() == drawn.prompt.tolist()
        assert (drawn.arrival_s == 0).all()
        assert len(set(keys(drawn))) == prompts * samples
        assert set(keys(drawn)) <= source
        step = 0 if drawn.step is None else drawn.step[0]
        assert drawn.step is None or (drawn.step == step).all()
        left = [key for key in source - set(keys(drawn)) if key[0] in drawn.prompt_ids and key[2] <= step]
        history = [] if batch.history is None else keys(batch.history)
        assert sorted(history) == sorted(left)
        named = [drawn.prompt_ids[prompt] for prompt in batch.history_prompt]
        assert named == [key[0] for key in history]


@given(traces(), st.integers(0, 1000))
def test_batches_are_paired(trace: Trace, seed: int) -> None:
    one, two, three = (sample_batches(trace, batches=n, prompts=1, samples=1, seed=seed) for n in (1, 2, 2))
    digest = [batch.trace.sha256 for batch in two]
    assert digest == [batch.trace.sha256 for batch in three]
    assert one[0].trace.sha256 == digest[0]
    assert [batch.seed for batch in two] == [batch.seed for batch in three]
    assert two[0].seed != two[1].seed


def test_batches_are_drawn_evenly() -> None:
    """Every prompt is as likely as any other, and so is every sample of it: within 5 standard deviations."""
    trace = Trace.of([[10 * p + s + 1 for s in range(2 + p)] for p in range(5)])
    draws = 4000
    batches = sample_batches(trace, batches=draws, prompts=2, samples=2, seed=1)
    drawn = np.concatenate([batch.trace.output_tokens for batch in batches])
    for p in range(5):
        for s in range(2 + p):
            share = (2 / 5) * 2 / (2 + p)
            count = np.count_nonzero(drawn == 10 * p + s + 1)
            assert abs(count - draws * share) < 5 * np.sqrt(draws * share * (1 - share))


def test_batch_options() -> None:
    trace = Trace.of([[1, 2], [3, 4]])
    for option in ("batches", "prompts", "samples", "seed"):
        options = {"batches": 1, "prompts": 1, "samples": 1, "seed": 1} | {option: -1}
        with pytest.raises(InputError, match=f"{option}: expected at least"):
            sample_batches(trace, **options)
    with pytest.raises(
        InputError, match="trace 'inline': has 2 groups with at least 2 samples, a batch needs 3"
    ):
        sample_batches(trace, batches=1, prompts=3, samples=2, seed=0)
    (whole,) = sample_batches(trace, batches=1, prompts=2, samples=2, seed=0)
    assert whole.history is None
    assert whole.history_prompt.tolist() == []


@given(st.lists(lengths, min_size=3, max_size=60), st.floats(1.05, 20))
def test_reshape_tail(values: list[int], ratio: float) -> None:
    trace = Trace.of([values])
    before = trace.output_tokens
    median, p90 = np.quantile(before, [0.5, 0.9])
    middle = before[before >= median].min()
    if p90 <= middle or ratio * median <= middle:
        with pytest.raises(InputError, match=r"ratio: expected more than|no tail to reshape"):
            reshape_tail(trace, ratio)
        return
    after = reshape_tail(trace, ratio).output_tokens
    assert (after >= 1).all()
    assert (after[before <= median] == before[before <= median]).all()
    assert np.quantile(after, 0.5) == median
    assert abs(np.quantile(after, 0.9) - ratio * median) <= 0.5 + 1e-6
    order = np.argsort(before, kind="stable")
    assert (np.diff(after[order]) >= 0).all()
    assert (np.diff(after[order])[np.diff(before[order]) == 0] == 0).all()


@pytest.mark.parametrize("ratio", [1.5, 6.0])
def test_reshape_a_real_tail(ratio: float) -> None:
    trace = load_bundled("gpqa-deepseek-reasoner")
    shaped = reshape_tail(trace, ratio)
    found = statistics(shaped)
    assert found.p50 == statistics(trace).p50
    assert found.p90_over_p50 == pytest.approx(ratio, abs=1e-3)
    assert shaped.name == f"gpqa-deepseek-reasoner (P90/P50={ratio:g})"
    assert "reshaped" in shaped.source


def test_reshape_refuses() -> None:
    with pytest.raises(InputError, match="no tail to reshape"):
        reshape_tail(Trace.of([[5, 5, 5, 5]]), 3)
    with pytest.raises(InputError, match="no tail to reshape"):
        reshape_tail(Trace.of([[1, 9]]), 3)
    with pytest.raises(InputError, match="ratio: expected more than 1 "):
        reshape_tail(Trace.of([[1, 2, 3, 4, 5]]), float("nan"))


@given(traces(), st.integers(1, 60_000))
def test_truncate(trace: Trace, cap: int) -> None:
    cut = truncate(trace, cap)
    for before, was, after, now in zip(
        trace.output_tokens, trace.capped, cut.output_tokens, cut.capped, strict=True
    ):
        assert after == min(before, cap)
        assert now == (was or before > cap)
    with pytest.raises(InputError, match="cap: expected at least 1"):
        truncate(trace, 0)


@given(traces(), st.integers(0, 1000))
def test_bootstrap(trace: Trace, seed: int) -> None:
    again = bootstrap(trace, seed=seed)
    assert again.n_prompts == trace.n_prompts
    assert again.sha256 == bootstrap(trace, seed=seed).sha256

    def responses(some: Trace, prompt: int) -> list[tuple[int, ...]]:
        rows = some.prompt == prompt
        steps = np.zeros(some.n_requests) if some.step is None else some.step
        columns = (some.sample, steps, some.output_tokens, some.capped, some.prompt_tokens)
        return sorted(zip(*(column[rows].tolist() for column in columns), strict=True))

    for prompt, name in enumerate(again.prompt_ids):
        original = trace.prompt_ids.index(name.split("~")[0])
        assert responses(again, prompt) == responses(trace, original)
    with pytest.raises(InputError, match="seed"):
        bootstrap(trace, seed=-1)


def test_bootstrap_varies() -> None:
    trace = Trace.of([[i + 1] for i in range(50)])
    drawn = [bootstrap(trace, seed=seed).output_tokens for seed in range(200)]
    counts = np.bincount(np.concatenate(drawn), minlength=51)[1:]
    assert counts.sum() == 50 * 200
    assert abs(counts - 200).max() < 6 * np.sqrt(200)


MADE = {
    "lognormal": lambda **o: synthetic_lognormal(median=2000, sigma=0.8, **o),
    "gamma": lambda **o: synthetic_gamma(mean=2000, shape=2, **o),
    "pareto": lambda **o: synthetic_pareto(least=500, alpha=3, **o),
    "bimodal": lambda **o: synthetic_bimodal(median=600, sigma=0.5, at_cap=0.1, **o),
}


@pytest.mark.parametrize("name", MADE)
def test_inventions_are_marked_and_reproduce(name: str) -> None:
    options = {"prompts": 20, "samples": 4, "between": 0.5}
    trace = MADE[name](seed=3, **options)
    assert trace.synthetic
    assert trace.name.startswith(f"synthetic {name}(")
    assert "synthetic" in trace.source
    assert trace.sha256 == MADE[name](seed=3, **options).sha256
    assert trace.sha256 != MADE[name](seed=4, **options).sha256
    for option, value in (("prompts", 0), ("samples", 0), ("between", 1.5), ("seed", -1)):
        with pytest.raises(InputError, match=f"{option}: expected"):
            MADE[name](**({"seed": 3} | options | {option: value}))


@pytest.mark.parametrize("between", [0.0, 0.6])
def test_inventions_follow_their_distribution(between: float) -> None:
    """Quantiles of 40,000 draws against the closed forms, to 3 percent; the share of variance to 0.05."""
    from scipy import stats

    options = {"prompts": 10_000, "samples": 4, "between": between, "seed": 5}
    expected = {
        "lognormal": stats.lognorm(s=0.8, scale=2000),
        "gamma": stats.gamma(a=2, scale=1000),
        "pareto": stats.pareto(b=3, scale=500),
    }
    for name, distribution in expected.items():
        trace = MADE[name](**options)
        for share in (0.1, 0.5, 0.9, 0.98):
            found = np.quantile(trace.output_tokens, share)
            assert found == pytest.approx(distribution.ppf(share), rel=0.03), (name, share)
    logs = np.log(MADE["lognormal"](**options).output_tokens).reshape(10_000, 4)
    within = logs.var(axis=1, ddof=1).mean()
    assert 1 - within / logs.var() == pytest.approx(between, abs=0.05)
    bimodal = MADE["bimodal"](**options)
    assert bimodal.capped.mean() == pytest.approx(0.1, abs=0.01)
    assert (bimodal.output_tokens[bimodal.capped] == 8192).all()
    short = bimodal.output_tokens[~bimodal.capped]
    assert np.median(short) == pytest.approx(600, rel=0.03)


def test_bad_inventions() -> None:
    for call, match in (
        (
            lambda: synthetic_lognormal(prompts=1, samples=1, median=0, seed=0),
            "median: expected a number above 0",
        ),
        (lambda: synthetic_gamma(prompts=1, samples=1, shape=float("nan"), seed=0), "shape: expected"),
        (lambda: synthetic_pareto(prompts=1, samples=1, alpha=-1, seed=0), "alpha: expected"),
        (lambda: synthetic_bimodal(prompts=1, samples=1, at_cap=1, seed=0), "at_cap: expected a share"),
        (lambda: synthetic_lognormal(prompts=1, samples=1, cap=0, seed=0), "cap: expected at least 1"),
    ):
        with pytest.raises(InputError, match=match):
            call()


@given(st.floats(0.05, 1.5), st.integers(1, 2000), st.integers(0, 100))
def test_a_cap_only_cuts(sigma: float, cap: int, seed: int) -> None:
    free = synthetic_lognormal(prompts=5, samples=3, sigma=sigma, seed=seed)
    cut = synthetic_lognormal(prompts=5, samples=3, sigma=sigma, seed=seed, cap=cap)
    assume((free.output_tokens > cap).any())
    assert cut.sha256 == truncate(free, cap).sha256
