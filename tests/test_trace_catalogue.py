"""The bundled traces: all load, all are credited, and their statistics are those that their sources state."""

import importlib.util
import tomllib
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import tailopt
from tailopt.errors import InputError
from tailopt.trace.catalogue import DEFAULT_TRACE, bundled_traces, load_bundled
from tailopt.trace.statistics import statistics
from tailopt.trace.transforms import sample_batches

PACKAGE = Path(tailopt.__file__).parent
ROOT = Path(__file__).parent.parent
NAMES = [entry.name for entry in bundled_traces()]

# Computed by others from the same rows: statistics that come with the source tables, to four digits.
STATED = pl.read_csv(Path(__file__).parent / "data" / "source_statistics.csv")
# The source tables lack some rows that these statistics still counted.
ROWS_MISSING = {"gpqa-claude-opus-4-5": 8, "gpqa-claude-opus-4-7-xhigh": 2, "gpqa-kimi-k2.5": 7}


@pytest.mark.parametrize("name", NAMES)
def test_every_bundled_trace_loads(name: str) -> None:
    entry = next(entry for entry in bundled_traces() if entry.name == name)
    trace = load_bundled(name)
    assert trace.name == name
    assert trace.licence == entry.licence != ""
    assert entry.commit in trace.source
    assert (trace.n_requests, trace.n_prompts) == (entry.responses, entry.prompts)
    found = statistics(trace)
    assert (found.p50, found.max) == (entry.p50, entry.max)
    assert found.p90 == pytest.approx(entry.p90, abs=0.051)
    assert trace.synthetic == ("synthetic" in name) == ("SYNTHETIC" in entry.caveats) == entry.synthetic


@pytest.mark.parametrize("row", STATED.to_dicts(), ids=lambda row: f"{row['name']} {row['step'] or ''}")
def test_statistics_are_those_of_the_source(row: dict[str, float]) -> None:
    trace = load_bundled(str(row["name"]))
    if row["step"] is not None:
        assert trace.step is not None
        trace = trace.take(np.flatnonzero(trace.step == row["step"]))
    found = statistics(trace)
    missing = ROWS_MISSING.get(str(row["name"]), 0)
    assert found.n_requests == row["rows"] - missing
    assert found.max == row["max"]
    tolerance = 0.03 if missing else 6e-4  # they are rounded to four digits
    assert found.p50 == pytest.approx(row["p50"], rel=tolerance)
    assert found.p90 == pytest.approx(row["p90"], rel=tolerance)
    assert found.p99 == pytest.approx(row["p99"], rel=tolerance)
    assert found.capped_share == pytest.approx(row["cap_frac"], rel=tolerance, abs=1e-6)
    sizes = np.bincount(trace.prompt)  # they count the groups of two and more only
    several = statistics(trace.take(np.flatnonzero(sizes[trace.prompt] > 1)))
    assert several.between_prompt_share == pytest.approx(row["eta2"], rel=tolerance)
    assert several.icc == pytest.approx(row["icc"], rel=tolerance)
    if not missing:
        assert found.n_prompts == row["prompts"]


def test_the_default() -> None:
    trace = load_bundled()
    assert trace.name == DEFAULT_TRACE == "gpqa-deepseek-reasoner"
    found = statistics(trace)
    assert (found.n_requests, found.n_prompts, found.p50, found.max) == (1578, 198, 4713.5, 40634)
    assert round(found.p90) == 18307
    assert found.between_prompt_share == pytest.approx(0.861, abs=5e-4)
    batches = sample_batches(trace, batches=20, prompts=32, samples=8, seed=0)
    assert len({batch.trace.sha256 for batch in batches}) == 20


def test_both_regimes_are_there() -> None:
    """The tail between prompts, and within them; caps that matter; checkpoints; arrivals."""
    assert statistics(load_bundled("gpqa-deepseek-reasoner")).icc > 0.8
    steps = load_bundled("aime24-llama-3.2-3b-rl")
    assert steps.step is not None
    assert set(steps.step) == {400, 800}
    assert statistics(steps).icc < 0.3
    assert statistics(load_bundled("mgsm-th-r1-distill-1.5b")).capped_share > 0.4
    assert load_bundled("mooncake-conversation").arrival_s.max() > 800


def test_size_and_credit() -> None:
    files = list((PACKAGE / "data").iterdir())
    assert sum(file.stat().st_size for file in files) < 2.5e6
    assert {file.name for file in files} == {"traces.toml"} | {entry.file for entry in bundled_traces()}
    notice = " ".join((ROOT / "NOTICE").read_text().split())
    for entry in bundled_traces():
        assert entry.file in notice
        assert entry.commit in notice
        assert entry.licence in ("CC BY 4.0", "Apache-2.0")
        assert entry.attribution
        assert entry.caveats
        assert entry.source


def test_no_text_in_the_data() -> None:
    for file in {entry.file for entry in bundled_traces()}:
        table = pl.read_parquet(PACKAGE / "data" / file)
        texts = [name for name, kind in table.schema.items() if kind == pl.String]
        assert set(texts) == {"run", "prompt_id"}
        assert table["prompt_id"].str.len_chars().max() <= 40


def test_unknown_names() -> None:
    with pytest.raises(InputError, match=r"trace 'gpqa-gpt-5': unknown; did you mean .*gpqa-gpt-5-high"):
        load_bundled("gpqa-gpt-5")
    with pytest.raises(InputError, match="trace 'zzz': unknown; `tailopt traces` lists"):
        load_bundled("zzz")


def test_the_bundling_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up source table: names, medians of prompt tokens, and a catalogue that can be read."""
    spec = importlib.util.spec_from_file_location("bundle", ROOT / "scripts" / "bundle_traces.py")
    assert spec is not None
    assert spec.loader is not None
    bundle = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "bundle", bundle)
    spec.loader.exec_module(bundle)
    samples = range(4)
    source = pl.DataFrame(
        {
            "dataset": "gpqa_diamond",
            "prompt_id": [f"q{i % 3}" for i in range(12)],
            "sample_idx": [s + 1 for s in samples for _ in range(3)],
            "prompt_tokens": [100, 50, 60] * 3 + [9000, 50, 60],
            "response_tokens": range(10, 22),
            "model": "lab/model-x-2025-08-07",
            "reasoning_effort": "high",
            "thinking_budget": None,
            "eval_id": "e",
            "correct": 1.0,
            "at_cap": 0,
        },
        schema_overrides={"thinking_budget": pl.Int64},
    )
    (tmp_path / "epoch_benchhub").mkdir()
    source.write_parquet(tmp_path / "epoch_benchhub" / "single_turn.parquet")
    monkeypatch.setattr(bundle, "DATA", tmp_path)
    monkeypatch.setattr(bundle, "SOURCES", bundle.SOURCES[:1])
    bundle.main(tmp_path)
    made = pl.read_parquet(tmp_path / "epoch.parquet")
    assert made["run"].unique().to_list() == ["gpqa-model-x-high"]
    assert made["prompt_tokens"].to_list() == [100] * 4 + [50] * 4 + [60] * 4
    assert made["output_tokens"].to_list() == [10, 13, 16, 19, 11, 14, 17, 20, 12, 15, 18, 21]
    catalogue = tomllib.loads((tmp_path / "traces.toml").read_text())
    assert catalogue["trace"]["gpqa-model-x-high"]["responses"] == 12
    first = (tmp_path / "epoch.parquet").read_bytes()
    bundle.main(tmp_path)
    assert (tmp_path / "epoch.parquet").read_bytes() == first
