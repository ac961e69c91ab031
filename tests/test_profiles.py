"""Engine profiles: the bundled ones and how they were derived, the TOML schema and its errors."""

import importlib.util
import json
import pickle
import sys
import tomllib
from copy import deepcopy
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.engine.catalogue import bundled_engines, load_engine, read_profile, write_profile
from tailopt.engine.profile import Draft, EngineProfile, ShapeProfile
from tailopt.engine.schema import to_profile, to_toml
from tailopt.engine.step_time import Affine, MaxAffine, Power, Table
from tailopt.errors import InputError

ROOT = Path(__file__).parent.parent
DENSE = {
    "h100-llama-3.1-8b": (1, 2, 4, 8),
    "h100-qwen3-32b-vllm": (2, 4, 8),
    "h200-llama-3.1-70b-fp8-trtllm": (1, 2, 4, 8),
    "h200-llama-3.1-70b-fp8-vllm": (1, 2, 4, 8),
}
MIXTURES = {
    "h100-gpt-oss-120b-vllm": (2, 4, 8),
    "h100-qwen3-235b-fp8-trtllm": (4, 8),
    "h200-deepseek-r1-sglang": (8,),
}
A100 = {"a100-llama-13b": (1, 2, 4, 8), "a100-llama-7b": (1, 2, 4, 8)}
BUNDLED = DENSE | MIXTURES | A100


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("derive_profiles", ROOT / "scripts" / "derive_profiles.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["derive_profiles"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The bundled profiles


def test_what_is_bundled() -> None:
    assert bundled_engines() == tuple(sorted(BUNDLED))
    for name, tps in BUNDLED.items():
        assert tuple(load_engine(name).shapes) == tps


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_profile_says_where_it_comes_from(name: str) -> None:
    profile = load_engine(name)
    assert profile.name == name
    assert all("commit" in source or "sha256" in source for source in profile.sources)
    assert profile.licence == "Apache-2.0"
    assert date(2024, 1, 1) <= date.fromisoformat(profile.date) <= date(2026, 12, 31)
    assert "prefill" in profile.notes
    for shape in profile.shapes.values():
        for stated in ("relative residual median", "worst", "n <= 8", "prefill"):
            assert stated in shape.fit
        assert "extrapolated" in shape.fit or name in A100


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_profile_round_trips(name: str, tmp_path: Path) -> None:
    profile = load_engine(name)
    write_profile(profile, tmp_path / "copy.toml")
    assert read_profile(tmp_path / "copy.toml") == profile
    bundled = ROOT / "tailopt" / "engine" / "profiles" / f"{name}.toml"
    assert (tmp_path / "copy.toml").read_bytes() == bundled.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["copy.toml"]


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_are_strictly_concave(name: str) -> None:
    for shape in load_engine(name).shapes.values():
        assert isinstance(shape.step_time, Power)
        marginal = np.diff(shape.step_time(np.arange(1, shape.max_running + 1), 50_000))
        assert (marginal > 0).all()
        assert (np.diff(marginal) < 0).all()
        assert "affine instead" in shape.fit


@pytest.mark.parametrize("name", A100)
def test_a100_has_a_floor_and_a_kink(name: str) -> None:
    for shape in load_engine(name).shapes.values():
        assert isinstance(shape.step_time, MaxAffine)
        floor, work = shape.step_time.pieces
        assert floor[0] > work[0]
        assert floor[1] < work[1] / 2
        kink = (floor[0] - work[0]) / (work[1] - floor[1])
        assert 32 < kink < 512 < 2048
        few, many = shape.step_time([1, int(kink)], 0)
        assert many < 1.2 * few


def test_tensor_parallel_curves_cross_where_the_data_do() -> None:
    # Measured: TP8 6.7 ms against TP4 8.2 at n = 8, but 21.6 against 19.3 at n = 128 (1024/1024).
    profile = load_engine("h200-llama-3.1-70b-fp8-trtllm")
    four, eight = profile.shape(4).step_time, profile.shape(8).step_time
    context = 0.9 * 1536
    assert eight(8, 8 * context) < four(8, 8 * context)
    assert eight(128, 128 * context) > four(128, 128 * context)


@pytest.mark.parametrize("name", DENSE | MIXTURES)
def test_more_gpus_serve_one_request_faster(name: str) -> None:
    alone = [float(shape.step_time(1, 1000)) for shape in load_engine(name).shapes.values()]
    assert alone == sorted(alone, reverse=True)


@pytest.mark.parametrize("name", DENSE | A100)
def test_more_gpus_prefill_faster(name: str) -> None:
    prefill = [shape.prefill_tokens_per_s for shape in load_engine(name).shapes.values()]
    assert prefill == sorted(prefill)


@pytest.mark.parametrize("name", BUNDLED)
def test_reading_the_context_is_not_faster_than_memory(name: str, script: ModuleType) -> None:
    recipes = {recipe.name: recipe for recipe in (*script.RECIPES, *script.MUXSERVE_RECIPES.values())}
    recipe, profile = recipes[name], load_engine(name)
    assert recipe.kv_bytes_per_token == profile.kv_bytes_per_token
    for tp, shape in profile.shapes.items():
        slope = shape.step_time.lines(1).slope_s.max()
        floor = profile.kv_bytes_per_token * recipe.kv_share(tp) / recipe.gpu.bandwidth_bytes_per_s
        assert floor * (1 - 1e-3) <= slope < 3 * floor
        assert shape.kv_capacity_tokens == recipe.kv_capacity_tokens(tp)


# How they were derived


@pytest.fixture(scope="module")
def derived(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("derived")
    assert script.main(["--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("name", DENSE | MIXTURES)
def test_profiles_follow_from_the_bundled_rows(name: str, derived: Path) -> None:
    bundled = ROOT / "tailopt" / "engine" / "profiles" / f"{name}.toml"
    assert (derived / f"{name}.toml").read_bytes() == bundled.read_bytes()


def test_without_the_muxserve_table_the_a100_profiles_are_left_alone(derived: Path) -> None:
    assert {file.stem for file in derived.iterdir()} == set(DENSE | MIXTURES)


def test_documented_table_is_up_to_date(script: ModuleType) -> None:
    page = script.DOCS.read_text(encoding="utf-8")
    assert script.with_table(page) == page


@pytest.mark.parametrize("concave", [False, True])
def test_closed_loop_fit_recovers_what_generated_the_runs(script: ModuleType, concave: bool) -> None:
    """The reference is a closed loop simulated by its definition: tpot solves its own equation."""
    recipe = script.RECIPES[0]
    truth = {1: (8e-3, 2e-4, 3e-5), 2: (5e-3, 3e-4, 2e-5)}
    p, c = (0.6, 6e-8) if concave else (1.0, 6e-8)
    runs = {}
    for tp, (a, b, d) in truth.items():
        rows = []
        for isl, osl in ((1024, 1024), (1024, 8192), (8192, 1024), (4096, 512)):
            for n in (4, 8, 16, 32, 64, 128):
                ttft, tpot = 0.05 + 2e-5 * isl, 0.01
                for _ in range(500):
                    share = osl * tpot / (osl * tpot + ttft)
                    decoding = share * n
                    tau = a + b * decoding**p + c / tp * decoding * (isl + osl / 2)
                    tpot = tau + d * share * (n - 1) * isl / osl
                rows.append((n, isl, osl, tpot, ttft))
        n, isl, osl, tpot, ttft = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        pairs = tuple((int(i), int(o)) for i, o in zip(isl, osl, strict=True))
        runs[tp] = script.Runs(n, isl, osl, pairs, tpot, ttft)
    for tp, fit in script.fit_closed_loop(recipe, runs, concave=concave).items():
        a, b, d = truth[tp]
        assert (fit.a_s, fit.b_s, fit.d_s) == pytest.approx((a, b, d), rel=2e-3)
        assert (fit.p, fit.c_s) == pytest.approx((p, c / tp), rel=2e-3)


def test_decode_grid_fit_recovers_floor_and_kink(script: ModuleType, tmp_path: Path) -> None:
    truth = MaxAffine(((13e-3, 5e-6, 1e-8), (8e-3, 6e-5, 1.5e-7)))
    lengths, batches = (32, 64, 128, 256, 512), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    grid = {
        str(n): {
            str(length): {"prefill": 9 + 0.02 * n * length, "decoding": 1e3 * float(truth(n, n * length))}
            for length in lengths
        }
        for n in batches
    }
    grid["2048"] = {"32": {"prefill": -1, "decoding": -1}}
    by_sms = {"100": grid, "50": {"1": {"32": {"prefill": 1.0, "decoding": 999.0}}}}
    table = {"llama-7b": {"4": by_sms}, "llama-13b": {"4": by_sms}}
    (tmp_path / "llama.json").write_text(json.dumps(table))
    rows = [
        (model, 4, sm, n, length, cost["prefill"], cost["decoding"])
        for model in table
        for sm, by_n in by_sms.items()
        for n, by_length in by_n.items()
        for length, cost in by_length.items()
    ]
    text = "model,tp,sm_pct,batch,kv_len,prefill_ms,decode_ms\n" + "".join(
        ",".join(map(str, row)) + "\n" for row in rows
    )
    (tmp_path / "llama.csv").write_text(text)
    from_json, from_csv = (script.read_muxserve(tmp_path / name) for name in ("llama.json", "llama.csv"))
    assert from_json.equals(from_csv.select(from_json.columns))
    assert from_json.height == 2 * len(lengths) * len(batches)

    assert script.main(["--muxserve", str(tmp_path / "llama.json"), "--out", str(tmp_path)]) == 0
    shape = read_profile(tmp_path / "a100-llama-7b.toml").shape(4)
    assert isinstance(shape.step_time, MaxAffine)
    for found, true in zip(shape.step_time.pieces, truth.pieces, strict=True):
        assert found == pytest.approx(true, rel=1e-3)
    assert shape.prefill_tokens_per_s == pytest.approx(1e3 / 0.02, rel=1e-3)


# Names and files


def test_unknown_engine_names_the_nearest_and_all() -> None:
    with pytest.raises(InputError) as error:
        load_engine("h100-llama-8b")
    assert "did you mean h100-llama-3.1-8b" in str(error.value)
    assert all(name in str(error.value) for name in bundled_engines())
    with pytest.raises(InputError, match="engine 'zzz': unknown; known: a100"):
        load_engine("zzz")


def test_an_engine_can_be_a_file(tmp_path: Path) -> None:
    profile = replace(load_engine("h100-llama-3.1-8b"), name="mine")
    write_profile(profile, tmp_path / "mine.toml")
    assert load_engine(str(tmp_path / "mine.toml")) == profile


def with_host(shape: ShapeProfile, fixed: float, each: float) -> ShapeProfile:
    """The shape with a host that takes these shares of what it may."""
    base_s = shape.step_time.lines(shape.max_running + 1).base_s[:, 1:]
    alone = base_s[:, 0].max()
    each = 0.999 * each * min(alone, np.diff(base_s).min())
    return replace(shape, host_s=0.999 * fixed * (alone - each), host_per_request_s=float(each))


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
number = st.floats(1e-9, 1e3)
step_time = st.one_of(
    st.builds(Affine, number, number, number),
    st.builds(Power, number, number, st.floats(0.01, 1), number),
    st.builds(MaxAffine, st.lists(st.tuples(number, number, number), min_size=1, max_size=3).map(tuple)),
    st.builds(
        Table, st.just([1, 7, 9]), st.lists(number, min_size=3, max_size=3).map(sorted), number, st.booleans()
    ),
)
term = st.floats(0, 1e3)
draft = st.builds(
    Draft, text, st.floats(0, 1), st.none() | step_time, term, term, term, st.integers(1, 64),
    st.just("") | text,
)  # fmt: skip
shape = st.builds(
    ShapeProfile, st.integers(1, 64), step_time, number, st.integers(1, 2**40), st.integers(1, 5000),
    token_budget=st.integers(5000, 2**40), block_tokens=st.integers(1, 256),
    prefix_caching=st.booleans(), fit=text, overlapped=st.booleans(), sleep_s=term, wake_s=term,
    drafts=st.lists(draft, max_size=2, unique_by=lambda draft: draft.method).map(tuple),
)  # fmt: skip
shape = st.builds(with_host, shape, st.floats(0, 1), st.floats(0, 1))
profiles = st.builds(
    EngineProfile, text, text, text, text, text, text, st.dates().map(date.isoformat),
    st.lists(text, min_size=1, max_size=3).map(tuple), text, st.integers(1, 2**40),
    st.lists(shape, min_size=1, max_size=3).map(lambda shapes: {shape.tp: shape for shape in shapes}), text,
    st.none() | number, term,
)  # fmt: skip


@given(profiles)
def test_any_profile_round_trips(profile: EngineProfile) -> None:
    assert to_profile(tomllib.loads(to_toml(profile)), "file") == profile
    assert deepcopy(profile) == pickle.loads(pickle.dumps(profile)) == profile


GOOD = """\
name = "x"
hardware = "H100"
model = "m"
precision = "bf16"
engine = "vLLM"
engine_version = "1"
date = "2026-01-31"
licence = "CC0-1.0"
sources = ["me"]
kv_bytes_per_token = 1000
notes = "none"

[[shape]]
tp = 1
prefill_tokens_per_s = 40000
kv_capacity_tokens = 400000
max_running = 256
step_time = { kind = "affine", a_s = 6e-3, b_s = 1e-4 }
"""
DRAFT = """
[[shape.drafts]]
method = "mtp"
acceptance = {}
"""
STEP = '{ kind = "affine", a_s = 6e-3, b_s = 1e-4 }'


def test_the_good_file_is_good(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(GOOD)
    profile = read_profile(tmp_path / "x.toml")
    assert profile.shape(1).step_time == Affine(6e-3, 1e-4)
    for again in (
        GOOD.replace('"2026-01-31"', "2026-01-31"),
        GOOD.replace('"2026-01-31"', "2026-01-31T07:32:00Z"),
    ):
        (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf" + again.encode())
        assert read_profile(tmp_path / "x.toml") == profile
    assert deepcopy(profile) == pickle.loads(pickle.dumps(profile)) == profile


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "x"\n', "", "name: missing, expected this key"),
        ('name = "x"', 'name = ""', "name: expected "),
        ('name = "x"', "name = 5", "name: expected a valid string, got 5"),
        (
            'date = "2026-01-31"',
            'date = "31.1.2026"',
            "date: expected a date such as '2026-01-31', got '31.1",
        ),
        ('date = "2026-01-31"', "date = 5", "date: expected a valid string, got 5"),
        ('sources = ["me"]', "sources = []", "sources: expected "),
        ('sources = ["me"]', 'sources = ["me", 3]', "sources[1]: expected a valid string, got 3"),
        ('sources = ["me"]', 'sources = "me"', "sources: expected a valid list, got 'me'"),
        ("_token = 1000", "_token = 0", "kv_bytes_per_token: expected greater than or equal to 1, got 0"),
        ("_token = 1000", "_token = 1000.5", "kv_bytes_per_token: expected a valid integer, got 1000.5"),
        ('notes = "none"', 'colour = "red"', "colour: unknown key (value 'red')"),
        ('notes = "none"', '"a\\nb" = 1', "'a\\nb': unknown key (value 1)"),
        ('notes = "none"', "affine = 1", "affine: unknown key (value 1)"),
        ("tp = 1\n", "", "shape[0].tp: missing, expected this key"),
        ("tp = 1\n", "tp = -1\n", "shape[0].tp: expected greater than or equal to 1, got -1"),
        ("tp = 1\n", "tp = true\n", "shape[0].tp: expected a valid integer, got True"),
        ("tp = 1\n", 'tp = "1"\n', "shape[0].tp: expected a valid integer, got '1'"),
        ("tp = 1\n", "tp = 1\ntpp = 2\n", "shape[0].tpp: unknown key (value 2)"),
        ("_s = 40000", "_s = -1", "shape[0].prefill_tokens_per_s: expected greater than 0, got -1"),
        ("_s = 40000", "_s = inf", "shape[0].prefill_tokens_per_s: expected a finite number, got inf"),
        ("_s = 40000", f"_s = 1{'0' * 400}", "shape[0].prefill_tokens_per_s: expected "),
        (
            "_running = 256",
            "_running = 0",
            "shape[0].max_running: expected greater than or equal to 1, got 0",
        ),
        (
            "= 400000",
            f"= {2**63}",
            "shape[0].kv_capacity_tokens: expected less than or equal to 1099511627776",
        ),
        ("= 400000", f"= 1{'0' * 5000}", "not TOML: Exceeds the limit (4300 digits)"),
        ("a_s = 6e-3", "a_s = 1e300", "shape[0].step_time.a_s: expected less than or equal to 1000000"),
        ('name = "x"', "name" + ".a" * 20_000 + " = 1", "a key of more than 20 parts"),
        (
            'name = "x"',
            "name = 1\n" + "k" * 100_000 + " = 1",
            "name: expected a valid string, got 1 (and 1 more)",
        ),
        ('name = "x"', 'name = "' + "x" * 1_000_000 + '"', "larger than 1000000 bytes"),
        ("[[shape]]", "[shape]", "shape: expected a valid list, got {'tp': 1"),
        (GOOD[GOOD.index("[[shape]]") :], "", "shape: missing, expected this key"),
        (GOOD[GOOD.index("[[shape]]") :], "shape = []", "shape: expected "),
        (STEP, STEP + "\nhost_s = -1", "shape[0].host_s: expected greater than or equal to 0, got -1"),
        (STEP, STEP + "\nhost_s = 1", "shape[0]: engine profile TP1: the host takes 1 s of a step of 1 "),
        (STEP, STEP + "\noverlapped = 1", "shape[0].overlapped: expected a valid boolean, got 1"),
        (STEP, STEP + "\nwake_s = inf", "shape[0].wake_s: expected a finite number, got inf"),
        (
            STEP,
            STEP + DRAFT.format(2),
            "shape[0].drafts[0].acceptance: expected less than or equal to 1, got",
        ),
        (STEP, STEP + 2 * DRAFT.format(0.5), "shape[0]: engine profile TP1: draft 'mtp' is given twice"),
        (STEP, STEP + DRAFT.format(0.5) + "k = 1", "shape[0].drafts[0].k: unknown key (value 1)"),
        (
            STEP,
            STEP + DRAFT.format(0.5) + 'step_time = { kind = "cubic" }',
            "shape[0].drafts[0].step_time: unknown kind 'cubic'",
        ),
        (
            STEP,
            STEP + DRAFT.format(0.5) + 'step_time = { kind = "affine", a_s = -1, b_s = 0 }',
            "shape[0].drafts[0].step_time: affine step time: expected a positive time",
        ),
        ('notes = "none"', "link_bytes_per_s = 0", "link_bytes_per_s: expected greater than 0, got 0"),
        (STEP, '"fast"', "shape[0].step_time: expected "),
        (STEP, "{ a_s = 1.0 }", "step_time: expected kind = one of 'affine', 'power', "),
        (STEP, '{ kind = "cubic" }', "step_time: unknown kind 'cubic', expected one of 'affine', "),
        (STEP, '{ kind = "affine", a_s = 1.0 }', "shape[0].step_time.b_s: missing, expected this key"),
        (STEP, '{ kind = "affine", a_s = "6", b_s = 0 }', "step_time.a_s: expected a valid number, got '6'"),
        (STEP, '{ kind = "affine", a_s = nan, b_s = 0 }', "step_time.a_s: expected a finite number, got nan"),
        (STEP, '{ kind = "affine", a_s = 1, b_s = -1 }', "step_time: affine step time: expected finite"),
        (STEP, '{ kind = "affine", a_s = 1, b_s = 1, p = 1 }', "step_time.p: unknown key (value 1)"),
        (
            STEP,
            '{ kind = "power", a_s = 1, b_s = 1, p = 2 }',
            "power step time: expected 0 < p <= 1, got 2.0",
        ),
        (STEP, '{ kind = "max_affine", pieces = [] }', "max-of-affine step time: expected at least"),
        (STEP, '{ kind = "max_affine", pieces = [[1, 2]] }', "shape[0].step_time.pieces[0]: expected "),
        (STEP, '{ kind = "table", running = [1, 8], seconds = [2, 1] }', "seconds that never fall"),
        (
            STEP,
            '{ kind = "table", running = [1, 8.5], seconds = [1, 2] }',
            "running[1]: expected a valid int",
        ),
        (
            STEP,
            f'{{ kind = "table", running = [1, {10**30}], seconds = [1, 2] }}',
            "step_time.running[1]: expected less than or equal to 1099511627776",
        ),
        (GOOD, GOOD + GOOD[GOOD.index("[[shape]]") :], "shape[1].tp: 1 is given twice, expected once"),
        ('model = "m"', "model = ", "not TOML: Invalid value (at line 3, column 9)"),
        ('model = "m"', 'model = "m"\nmodel = "n"', "not TOML: Cannot overwrite a value"),
        (GOOD, "[" * 100_000, "not TOML: "),
        (GOOD, "", "name: missing, expected this key (and 10 more)"),
    ],
)
def test_malformed_files(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        read_profile(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 250


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read (No such file or directory)"),
        (lambda path: path.mkdir(), "cannot be read (Is a directory)"),
        (lambda path: path.write_bytes(bytes(range(256))), "expected a TOML text file in UTF-8"),
    ],
)
def test_files_that_cannot_be_read(make, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "bad.toml")
    with pytest.raises(InputError) as error:
        load_engine(str(tmp_path / "bad.toml"))
    assert str(error.value) == f"{tmp_path / 'bad.toml'}: {message}"


def test_writing_fails_in_one_line_and_leaves_the_old_file(tmp_path: Path) -> None:
    profile = load_engine("h100-llama-3.1-8b")
    with pytest.raises(InputError, match="cannot be written"):
        write_profile(profile, tmp_path / "no" / "folder.toml")
    path = tmp_path / "kept.toml"
    path.write_text("old")
    for bad in (
        replace(profile, date="yesterday"),
        replace(profile, sources=()),
        replace(profile, name="\ud800"),
    ):
        with pytest.raises(InputError) as error:
            write_profile(bad, path)
        assert "\n" not in str(error.value)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["kept.toml"]


def test_a_step_time_of_ones_own_cannot_be_written(tmp_path: Path) -> None:
    class Mine:
        pass

    profile = load_engine("h100-llama-3.1-8b")
    shapes = {1: replace(profile.shape(1), step_time=Mine())}  # type: ignore[arg-type]
    with pytest.raises(InputError, match="step time of type Mine: cannot be written; known: affine, power"):
        write_profile(replace(profile, shapes=shapes), tmp_path / "x.toml")
