"""Plans as JSON: round trip, published schema, and every way a document can be wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.errors import InputError
from tailopt.plan import Engine, Plan
from tailopt.plan_file import plan_from_json, plan_schema, plan_to_json, read_plan, write_plan

SCHEMA = Path(__file__).parent.parent / "docs" / "plan.schema.json"

GOOD = {
    "format": "tailopt.plan/1",
    "engines": [{"tp": 1}, {"tp": 2, "max_running": 8}],
    "engine_of": [0, 1, -1],
    "order": [2, 0, 1],
    "atomic": True,
    "note": "by hand",
}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    limits = st.none() | st.integers(1, 1000)
    engines = draw(st.lists(st.builds(Engine, st.integers(1, 16), limits), min_size=1, max_size=5))
    n = draw(st.integers(0, 20))
    engine_of = draw(st.lists(st.integers(-1, len(engines) - 1), min_size=n, max_size=n))
    order = draw(st.permutations(range(n)))
    return Plan(tuple(engines), engine_of, order, draw(st.booleans()), draw(st.text(max_size=9)))


def assert_equal(one: Plan, other: Plan) -> None:
    assert (one.engines, one.atomic, one.note) == (other.engines, other.atomic, other.note)
    assert np.array_equal(one.engine_of, other.engine_of)
    assert np.array_equal(one.order, other.order)


@given(plans())
def test_round_trip(plan):
    assert_equal(plan_from_json(plan_to_json(plan)), plan)


def test_files(tmp_path):
    plan = plan_from_json(json.dumps(GOOD))
    write_plan(plan, tmp_path / "plan.json")
    assert_equal(read_plan(tmp_path / "plan.json"), plan)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(InputError, match=r"missing.json: cannot be read \(No such file"):
        read_plan(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot be written"):
        write_plan(plan, tmp_path / "no" / "folder.json")


def untitled(schema: object) -> object:
    """Without titles, which pydantic makes up."""
    if isinstance(schema, dict):
        return {key: untitled(value) for key, value in schema.items() if key != "title"}
    return [untitled(value) for value in schema] if isinstance(schema, list) else schema


def test_published_schema_is_the_models():
    assert untitled(json.loads(SCHEMA.read_text())) == untitled(plan_schema())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine_of": [0, 7, 1]}, "plan: request 1 goes to engine 7, there are 2"),
        ({"order": [0, 0, 1]}, "plan: request 0 is assigned twice, expected once"),
        ({"order": [0, 1]}, "request 2 is assigned to no engine, expected one"),
        ({"order": [0, 1, 3]}, "request 3 does not exist, there are 3"),
        ({"engine_of": [0, -2, 1]}, "engine_of[1]: Input should be greater than or equal to -1, got -2"),
        ({"engine_of": [0, 0.5, 1]}, "engine_of[1]: Input should be a valid integer, got 0.5"),
        ({"engine_of": None}, "engine_of: Input should be a valid array, got null"),
        ({"engines": [{"tp": 0}]}, "engines[0].tp: Input should be greater than or equal to 1, got 0"),
        ({"engines": [{"tp": 1, "tpp": 1}]}, "engines[0].tpp: Extra inputs are not permitted, got 1"),
        ({"engines": []}, "engines: List should have at least 1 item"),
        ({"format": "tailopt.plan/2"}, "format: Input should be 'tailopt.plan/1', got \"tailopt.plan/2\""),
        ({"atomic": 1}, "atomic: Input should be a valid boolean, got 1"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
    ],
)
def test_bad_documents_are_one_line(change, message):
    with pytest.raises(InputError) as error:
        plan_from_json(json.dumps(GOOD | change), where="my.json")
    assert str(error.value).startswith("my.json: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["format", "engines", "engine_of", "order"])
def test_missing_keys(key):
    with pytest.raises(InputError, match=f"{key}: Field required"):
        plan_from_json(json.dumps({name: value for name, value in GOOD.items() if name != key}))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", b"\xff\xfe", "null"])
def test_what_is_no_document(text):
    with pytest.raises(InputError) as error:
        plan_from_json(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("note", ["\ud800", 5, None])
def test_notes_that_no_file_can_hold(note):
    with pytest.raises(InputError, match="note"):
        Plan((Engine(1),), [0], [0], note=note)


def test_numbers_too_large_for_any_array():
    for change in ({"order": [0, 1, 2**40]}, {"order": [0, 1, 2**70]}, {"engine_of": [0, 0, 2**70]},
                   {"engines": [{"tp": 2**70}]}, {"engines": [{"tp": 1, "max_running": 2**70}]}):  # fmt: skip
        with pytest.raises(InputError, match=r"^my\.json: ") as error:
            plan_from_json(json.dumps(GOOD | change), where="my.json")
        assert "\n" not in str(error.value)
