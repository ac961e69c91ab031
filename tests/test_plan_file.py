"""Plans as JSON: round trip, published schema, and every way a document can be wrong."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.engine.speculation import Speculation
from tailopt.errors import InputError
from tailopt.plan import DROPPED, Engine, Plan, ReviewPoint
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


limits = st.none() | st.integers(1, 1000)
speculations = st.builds(
    Speculation, st.text(min_size=1, max_size=5), st.none() | st.integers(0, 64),
    st.none() | st.floats(0, 1), st.integers(0, 10**6),
)  # fmt: skip


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    tp = draw(st.integers(1, 16))
    gpus = draw(st.none() | st.lists(st.integers(0, 10**6), min_size=tp, max_size=tp, unique=True))
    scheduling = draw(st.sampled_from(["fcfs", "priority"]))
    finished = sorted(draw(st.sets(st.integers(1, 1000), max_size=3)))
    changes = tuple((f, draw(st.integers(1, 1000))) for f in finished)
    return Engine(tp, draw(limits), gpus, draw(st.none() | speculations), scheduling, changes)


points = st.one_of(
    st.builds(ReviewPoint, st.sampled_from(["unfinished", "tokens", "idle"]), st.integers(1, 10**6)),
    st.builds(ReviewPoint, st.just("time"), st.floats(0, 1e9)),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    fleet = draw(st.lists(engines(), min_size=1, max_size=5))
    n = draw(st.integers(0, 20))
    return Plan(
        tuple(fleet),
        draw(st.lists(st.integers(DROPPED, len(fleet) - 1), min_size=n, max_size=n)),
        draw(st.permutations(range(n))),
        draw(st.booleans()),
        draw(st.text(max_size=9)),
        tuple(draw(st.lists(points, max_size=3))),
        draw(st.none() | st.lists(st.integers(1, 2**40), min_size=n, max_size=n)),
        draw(st.none() | st.floats(0, 1e9)),
        draw(st.sampled_from(["cheaper", "recompute", "migrate"])),
    )


def assert_equal(one: object, other: object) -> None:
    """Equal field by field, arrays and nested dataclasses included."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(one, Plan):
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(other, field.name))
    else:
        assert one == other


@given(plans())
def test_round_trip(plan):
    assert_equal(plan_from_json(plan_to_json(plan)), plan)


def test_a_plan_without_limits_is_written_without_them():
    plan = Plan((Engine(1, 4),), [0], [0])
    assert "limits" not in plan_to_json(plan)
    assert '"limits":[[1,3],[7,2]]' in plan_to_json(Plan((Engine(1, 4, limits=((1, 3), (7, 2))),), [0], [0]))


@pytest.mark.parametrize(
    "given",
    [
        ((1,),),
        ((0, 1),),
        ((1, 0),),
        ((2, 1), (1, 1)),
        ((1, True),),
        "ab",
        5,
        ((1, 2**31),),
        ((1, 10**5000),),
    ],
)
def test_limits_that_no_engine_can_have(given):
    with pytest.raises(
        InputError, match="engine: limits: expected pairs of whole numbers from 1 on, finished rising, got"
    ):
        Engine(1, limits=given)


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
        ({"engine_of": [0, -3, 1]}, "engine_of[1]: Input should be greater than or equal to -2, got -3"),
        ({"engines": [{"tp": 1, "gpus": [0, 1]}]}, "engine: gpus: expected 1 values, got 2"),
        ({"engines": [{"tp": 2, "gpus": [1, 1]}]}, "engine: gpus: expected different ones, got [1, 1]"),
        ({"engines": [{"tp": 1, "scheduling": "lifo"}]}, "engines[0].scheduling: Input should be 'fcfs' or"),
        (
            {"engines": [{"tp": 1, "limits": [[2, 0]]}]},
            "engines[0].limits[0][1]: Input should be greater than or",
        ),
        (
            {"engines": [{"tp": 1, "limits": [[0, 2]]}]},
            "engines[0].limits[0][0]: Input should be greater than or",
        ),
        ({"engines": [{"tp": 1, "limits": [[2]]}]}, "engines[0].limits[0][1]: Field required"),
        (
            {"engines": [{"tp": 1, "limits": [[2, 5], [2, 6]]}]},
            "limits: expected pairs of whole numbers from 1 on, finished rising, got (2, 6) as number 1",
        ),
        ({"engines": [{"tp": 1, "speculation": {}}]}, "engines[0].speculation.method: Field required"),
        (
            {"engines": [{"tp": 1, "speculation": {"method": "mtp", "draft_tokens": 100}}]},
            "speculation: draft_tokens: expected 0 to 64, got 100",
        ),
        ({"review": [{"when": "never"}]}, "review[0].when: Input should be 'unfinished', 'tokens', 'idle'"),
        (
            {"review": [{"when": "tokens", "value": 0.5}]},
            "review point: value[0]: expected at least 1, got 0.5",
        ),
        ({"review": [{"when": "unfinished", "value": 1.5}]}, "unfinished: expected a whole number, got 1.5"),
        ({"max_tokens": [1, 2]}, "plan: max_tokens: expected 3 values, got 2"),
        ({"max_tokens": [1, 2, 0]}, "max_tokens[2]: Input should be greater than or equal to 1, got 0"),
        ({"deadline_s": -1}, "deadline_s: Input should be greater than or equal to 0, got -1"),
        ({"deadline_s": 1e999}, "deadline_s: Input should be a finite number"),
        ({"move": "fly"}, "move: Input should be 'cheaper', 'recompute' or 'migrate', got \"fly\""),
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
