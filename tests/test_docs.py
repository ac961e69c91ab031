"""The pages in docs/: their examples run, and they leave nothing out."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tailopt.engine.catalogue import read_profile
from tailopt.engine.schema import STEP_TIMES, DraftModel, ProfileModel, ShapeModel
from tailopt.engine.step_time import Table
from tailopt.plan import Fleet, Plan, View
from tailopt.policies import resolve_policy
from tailopt.policies.example import example_view
from tailopt.simulate import simulate_policy
from tailopt.trace import Trace
from tailopt.trace.formats import FORMATS
from tailopt.trace.own_schema import NAMES
from tailopt.trace.reading import read_trace

DOCS = Path(__file__).parent.parent / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)


def test_the_example_profile_is_read_and_complete(tmp_path: Path) -> None:
    (block,) = blocks("profiles.md", "toml")
    (tmp_path / "mine.toml").write_text(block)
    profile = read_profile(tmp_path / "mine.toml")
    assert {type(shape.step_time) for shape in profile.shapes.values()} == set(STEP_TIMES.values())
    table = profile.shape(8).step_time
    assert isinstance(table, Table)
    assert table.padded
    assert Fleet.of(profile, "2xTP2+1xTP4").gpus == 8
    keys = set(ProfileModel.model_fields) | set(ShapeModel.model_fields) | set(DraftModel.model_fields)
    assert keys - {"shape"} <= set(re.findall(r"`(\w+)`", page("profiles.md")))
    written = set(re.findall(r"^(\w+) = |kind", block, re.MULTILINE))
    assert keys - {"shape", "drafts"} <= written | {"step_time"}
    assert [draft.method for draft in profile.shape(1).drafts] == ["mtp", "ngram", "draft"]


def test_profile_defaults_are_as_said() -> None:
    said = dict(re.findall(r"^\| `(\w+)` \|.*\| no: (\w+) \|$", page("profiles.md"), re.MULTILINE))
    optional = {
        name: f"{field.default:g}" if isinstance(field.default, float) else str(field.default).lower()
        for model in (ProfileModel, ShapeModel, DraftModel)
        for name, field in model.model_fields.items()
        if not field.is_required() and field.default not in ("", None, [])
    }
    assert said == optional | {"drafts": "none"}


def test_the_example_of_speculation_runs() -> None:
    first, second = blocks("profiles.md", "python")
    exec(first + second, {})


def test_the_example_traces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("traces.md", "csv")
    Path("mine.csv").write_text(text)
    trace, report = read_trace("mine.csv")
    assert (trace.name, trace.licence, report.format) == ("my-rollouts", "CC0-1.0", "csv")
    assert (trace.n_prompts, trace.output_tokens.tolist()) == (2, [830, 4096, 310, 295])
    assert trace.capped.tolist() == [False, True, False, False]
    (program,) = blocks("traces.md", "python")
    exec(program, {})
    assert read_trace("mine.parquet")[0].output_tokens.tolist() == trace.output_tokens.tolist()


def test_the_trace_page_names_every_column_and_format() -> None:
    named = set(re.findall(r"`([\w-]+)`", page("traces.md")))
    assert set(NAMES) | set(FORMATS) <= named


def test_the_example_policy_runs(tmp_path: Path) -> None:
    policy, trial, _, _ = blocks("policies.md", "python")
    scope: dict[str, object] = {}
    exec(policy + trial, scope)
    assert isinstance(scope["plan"], Plan)
    (tmp_path / "mine.py").write_text(policy)
    resolved = resolve_policy(f"{tmp_path / 'mine.py'}:by_prompt_length(reverse=True)")
    assert not resolved.needs_predictions
    resolved(example_view([[90, 80], [10, 20], [5, 5]]))


def test_the_example_policy_that_is_asked_again_runs(tmp_path: Path) -> None:
    _, _, policy, trial = blocks("policies.md", "python")
    exec(policy + trial, {})
    (tmp_path / "again.py").write_text(policy)
    trace = Trace.of([[900, 80], [30, 20], [50, 400]], prompt_tokens=10)
    fleet = example_view([[1]]).fleet
    for spec, given_up in (("by_age", 0), ("by_age(drop_after=45)", 3)):
        resolved = resolve_policy(f"{tmp_path / 'again.py'}:{spec}")
        run = simulate_policy(trace, resolved, View.at_start(trace, fleet))
        assert len(run.reviews) == 1
        assert (~run.completed).sum() == given_up
        assert (run.output_tokens[run.completed] == trace.output_tokens[run.completed]).all()


def test_the_policy_page_names_every_field() -> None:
    named = set(re.findall(r"`(\w+)`", page("policies.md")))
    assert {field.name for kind in (View, Plan) for field in fields(kind)} <= named
