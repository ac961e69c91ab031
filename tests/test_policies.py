"""Every policy on every kind of view; each policy's own rule; policies of a user's own file."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.engine.catalogue import load_engine
from tailopt.engine.decode_time import decode_time_s
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, Power, Table
from tailopt.errors import InputError
from tailopt.plan import SHARED_QUEUE, Engine, Fleet, Plan, View
from tailopt.policies import POLICIES, resolve_policy
from tailopt.policies.example import example_view
from tailopt.policies.units import longest_first, predicted_times_s, predicted_work
from tailopt.simulate import simulate
from tailopt.trace import Trace
from tailopt.trace.catalogue import load_bundled
from tailopt.trace.transforms import sample_batches

STEP_TIMES = {
    1: Affine(10e-3, 5e-4, 1e-7),
    2: Power(4e-3, 1e-3, 0.6, 5e-8),
    4: MaxAffine(((8e-3, 0.0, 0.0), (3e-3, 4e-4, 1e-6))),
    8: Table([1, 4, 16], [3e-3, 4e-3, 9e-3], padded=True),
}


def fleet_of(degrees: list[int], max_running: int = 64, kv_capacity_tokens: int = 10**6) -> Fleet:
    shapes = {
        tp: ShapeProfile(tp, step_time, 1e4, kv_capacity_tokens, max_running)
        for tp, step_time in STEP_TIMES.items()
    }
    profile = EngineProfile(
        name="four-shapes", hardware="-", model="-", precision="-", engine="-", engine_version="-",
        date="2026-01-01", sources=("made up",), licence="", kv_bytes_per_token=1, shapes=shapes,
    )  # fmt: skip
    return Fleet(profile, tuple(Engine(tp) for tp in degrees), sum(degrees))


groups = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=5), min_size=1, max_size=12)
fleets = st.builds(
    fleet_of,
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=5),
    st.sampled_from([2, 64]),
    st.sampled_from([500, 10**6]),
)


@st.composite
def views(draw: st.DrawFn, fleets: st.SearchStrategy[Fleet] = fleets, atomic: bool | None = None) -> View:
    trace = Trace.of(draw(groups), prompt_tokens=draw(st.integers(0, 100)))
    atomic = draw(st.booleans()) if atomic is None else atomic
    seed = draw(st.integers(0, 2**32))
    return View.at_start(trace, draw(fleets), trace.output_tokens, atomic=atomic, seed=seed)


@given(views())
@pytest.mark.parametrize("name", [*POLICIES, "shared_queue(max_running=3)", "top_k(k=2)"])
def test_every_policy_answers_every_view_and_again_the_same(name, view):
    policy = resolve_policy(name)
    plan, again = policy(view), policy(view)  # the call checks the plan against the view
    assert np.array_equal(plan.engine_of, again.engine_of)
    assert np.array_equal(plan.order, again.order)
    if policy.needs_predictions:
        assert (np.diff(view.predictions()[plan.order]) <= 0).all()  # longest first


@pytest.mark.parametrize("name", POLICIES)
def test_only_marked_policies_do_without_predictions(name):
    view = example_view([[5, 6], [7, 8], [9, 9]])
    blind = View(**{**vars(view), "predicted_tokens": None})
    policy = resolve_policy(name)
    if policy.needs_predictions:
        with pytest.raises(InputError, match=f"^policy {name}: .*choose a predictor"):
            policy(blind)
    else:
        assert np.array_equal(policy(blind).engine_of, policy(view).engine_of)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_what_it_does_and_where_it_comes_from(name):
    text = POLICIES[name].__doc__
    assert text
    assert "Source: " in text
    assert ">>> " in text


def units_per_engine(view: View, plan: Plan) -> list[int]:
    return [len(set(view.unit[plan.engine_of == e])) for e in range(len(plan.engines))]


@given(views())
@pytest.mark.parametrize("name", ["uniform", "round_robin"])
def test_dealing_is_even(name, view):
    counts = units_per_engine(view, resolve_policy(name)(view))
    assert max(counts) - min(counts) <= 1


def test_uniform_is_a_seeded_draw():
    samples = {tuple(POLICIES["uniform"](example_view([[1]] * 12, seed=s)).engine_of) for s in range(20)}
    assert len(samples) > 10
    share = np.mean([POLICIES["uniform"](example_view([[1]] * 3, seed=s)).engine_of for s in range(2000)], 0)
    assert share == pytest.approx([1 / 3] * 3, abs=0.05)  # every unit is as likely the odd one out


@given(views())
def test_least_loaded_balances_requests(view):
    count = np.bincount(POLICIES["least_loaded"](view).engine_of, minlength=len(view.fleet.engines))
    assert count.max() - count.min() <= np.bincount(view.unit).max()


@given(views(), st.integers(1, 100))
def test_shared_queue_lowers_limits_only(view, max_running):
    plan = resolve_policy(f"shared_queue(max_running={max_running})")(view)
    assert (plan.engine_of == SHARED_QUEUE).all()
    for e, engine in enumerate(plan.engines):
        assert engine.max_running == min(max_running, view.fleet.max_running(e))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_lpt_additive_keeps_grahams_ratio_on_additive_loads(tokens, m):
    def largest_load(engine_of: Sequence[int]) -> float:
        return float(np.bincount(engine_of, weights=tokens, minlength=m).max())

    optimum = min(map(largest_load, product(range(m), repeat=len(tokens))))
    plan = POLICIES["lpt_additive"](example_view([[length] for length in tokens], engines=(1,) * m))
    assert largest_load(plan.engine_of) <= optimum * (4 / 3 - 1 / (3 * m)) * (1 + 1e-12)


@given(views(st.builds(fleet_of, st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4))))
def test_lpt_puts_each_unit_where_it_is_done_first(view):
    """Replayed in plain Python: units by longest request, each to the engine that is then done first."""
    plan = POLICIES["lpt"](view)
    context, tokens = predicted_work(view)
    members = {u: np.flatnonzero(view.unit == u) for u in set(view.unit.tolist())}
    queue = sorted(members, key=lambda u: (-tokens[members[u]].max(), -tokens[members[u]].sum(), u))
    held: list[list[int]] = [[] for _ in view.fleet.engines]

    def time_s(engine: int, requests: list[int]) -> float:
        return float(
            decode_time_s(view.fleet.shape_of(engine).step_time, context[requests], tokens[requests])
        )

    for unit in queue:
        after = [time_s(e, [*held[e], *members[unit]]) for e in range(len(held))]
        (engine,) = set(plan.engine_of[members[unit]].tolist())
        assert after[engine] <= min(after) * (1 + 1e-9)
        held[engine].extend(members[unit].tolist())


@given(views(), st.integers(0, 6), st.integers(1, 3))
def test_top_k_isolates_the_longest(view, k, tail_engines):
    engines = len(view.fleet.engines)
    policy = resolve_policy(f"top_k(k={k}, tail_engines={tail_engines})")
    if tail_engines >= engines > 1:
        with pytest.raises(InputError, match="tail_engines: expected 1 to"):
            policy(view)
        return
    plan = policy(view)
    longest = [view.predictions()[view.unit == u].max() for u in range(int(view.unit.max()) + 1)]
    if k == 0 or engines == 1:
        assert np.array_equal(plan.engine_of, POLICIES["uniform"](view).engine_of)
        return
    alone = [float(view.fleet.shape_of(e).step_time(1, 1)) for e in range(engines)]
    tail = set(np.argsort(alone, kind="stable")[:tail_engines].tolist())
    isolated = {u for u in range(len(longest)) if plan.engine_of[view.unit == u][0] in tail}
    assert len(isolated) == min(k, len(longest))
    rest = set(range(len(longest))) - isolated
    assert not rest or not isolated or min(longest[u] for u in isolated) >= max(longest[u] for u in rest)


@given(views())
def test_best_k_is_the_best_of_all_top_k(view):
    def predicted_s(plan: Plan) -> float:
        context, tokens = predicted_work(view)
        chosen = plan.engine_of == np.arange(len(plan.engines))[:, None]
        return float(predicted_times_s(view.fleet, context, tokens, chosen).max())

    units, engines = int(view.unit.max()) + 1, len(view.fleet.engines)
    choices = [resolve_policy("top_k(k=0)")] + [
        resolve_policy(f"top_k(k={k}, tail_engines={t})")
        for k in range(1, units + 1)
        for t in range(1, engines)
    ]
    least = min(predicted_s(policy(view)) for policy in choices)
    assert predicted_s(POLICIES["best_k"](view)) == pytest.approx(least, rel=1e-12)


def test_best_k_with_many_units_is_no_worse_than_a_plain_scan():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 300).astype(int) + 1, 3000)
    view = example_view([[length] for length in lengths.tolist()], engines=(1,) * 4)
    context, tokens = predicted_work(view)

    def predicted_s(name: str) -> float:
        chosen = resolve_policy(name)(view).engine_of == np.arange(4)[:, None]
        return float(predicted_times_s(view.fleet, context, tokens, chosen).max())

    scan = min(predicted_s(f"top_k(k={k}, tail_engines={t})") for k in range(0, 300, 7) for t in (1, 2, 3))
    assert predicted_s("best_k") <= scan * 1.001


def with_instant_prefill(fleet: Fleet) -> Fleet:
    """The same engines, which compute prompts for nothing: policies do not predict prefill."""
    shapes = {
        tp: replace(shape, prefill_tokens_per_s=1e300, token_budget=10**9)
        for tp, shape in fleet.profile.shapes.items()
    }
    return replace(fleet, profile=replace(fleet.profile, shapes=shapes))


def predicted_and_simulated_s(
    trace: Trace, fleet: Fleet, name: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each busy engine's time as the policies predict it from the true lengths, and as it is."""
    view = View.at_start(trace, fleet, trace.output_tokens, atomic=True, seed=seed)
    engine_of = resolve_policy(name)(view).engine_of
    plan = Plan(fleet.engines, engine_of, longest_first(view), atomic=True)
    chosen = engine_of == np.arange(len(fleet.engines))[:, None]
    predicted = predicted_times_s(fleet, *predicted_work(view), chosen)
    busy = chosen.any(axis=1)
    return predicted[busy], simulate(trace, fleet, plan).engine_finish_s[busy]


@given(
    groups,
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=5),
    st.sampled_from(sorted(POLICIES.keys() - {"shared_queue"})),
)
def test_predicted_times_are_the_simulators_where_all_fits(groups, degrees, name):
    predicted, simulated = predicted_and_simulated_s(
        Trace.of(groups, prompt_tokens=9), with_instant_prefill(fleet_of(degrees)), name, 0
    )
    assert predicted == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize(
    ("trace", "engine", "shape"),
    [
        ("gpqa-deepseek-reasoner", "h100-llama-3.1-8b", "8xTP1"),
        ("gpqa-claude-haiku-4-5", "a100-llama-7b", "4xTP1+2xTP2"),
        ("gpqa-deepseek-reasoner", "h100-gpt-oss-120b-vllm", "2xTP2"),
    ],
)
@pytest.mark.parametrize("name", ["uniform", "lpt", "best_k"])
def test_predicted_times_are_close_where_requests_wait(trace, engine, shape, name):
    """160 groups of real rollouts: hundreds of requests wait or lose their cache; within 5 %."""
    (batch,) = sample_batches(load_bundled(trace), batches=1, prompts=160, samples=8, seed=0)
    fleet = with_instant_prefill(Fleet.of(load_engine(engine), shape))
    assert batch.trace.n_requests / len(fleet.engines) >= 160
    predicted, simulated = predicted_and_simulated_s(batch.trace, fleet, name, batch.seed)
    assert predicted == pytest.approx(simulated, rel=0.05)


def test_a_tail_pool_pays_on_a_long_tail():
    view = example_view([[4000]] + [[200]] * 63, engines=(1,) * 4, atomic=False)
    context, tokens = predicted_work(view)
    makespan = {}
    for name in ("uniform", "top_k(k=1)", "best_k", "lpt"):
        chosen = resolve_policy(name)(view).engine_of == np.arange(4)[:, None]
        makespan[name] = float(predicted_times_s(view.fleet, context, tokens, chosen).max())
    assert makespan["top_k(k=1)"] < 0.95 * makespan["uniform"]
    assert makespan["best_k"] <= makespan["top_k(k=1)"]
    assert makespan["lpt"] <= makespan["top_k(k=1)"]


# Specs


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lptt", "policy 'lptt': unknown; did you mean lpt"),
        ("nothing_like_it", "known: uniform, round_robin"),
        ("", "policy '': expected NAME"),
        ("lpt(", "expected NAME, NAME(arg=value) or FILE.py:FUNCTION"),
        ("top_k(k=2)(k=3)", "expected options as name=value"),
        ("top_k(3)", "top_k(3): expected options as name=value with plain values"),
        ("top_k(k=2, k=3)", "expected options as name=value"),
        ("top_k(k=len)", "expected options as name=value"),
        ("top_k(**{})", "expected options as name=value"),
        ("top_k(kk=3)", "top_k(kk=3): has no option 'kk'; options: k, tail_engines"),
        ("lpt(k=3)", "has no option 'k'; options: none"),
        ("top_k(k=2.5)", "k: expected a whole number or None, got 2.5"),
        ("top_k(k=True)", "k: expected a whole number or None, got True"),
        ("top_k(tail_engines='1')", "tail_engines: expected a whole number, got '1'"),
        ("mine.py", "policy mine.py: names no function, expected mine.py:FUNCTION"),
        ("missing/mine.py:f", "policy missing/mine.py:f: file missing/mine.py does not exist"),
    ],
)
def test_bad_specs_are_one_line(spec, message):
    with pytest.raises(InputError) as error:
        resolve_policy(spec)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("top_k(k=-1)", "policy top_k(k=-1): k: expected at least 0, got -1"),
        ("top_k(tail_engines=2)", "tail_engines: expected 1 to 1 of 2, got 2"),
        ("shared_queue(max_running=0)", "max_running: expected at least 1, got 0"),
    ],
)
def test_options_out_of_range(spec, message):
    with pytest.raises(InputError) as error:
        resolve_policy(spec)(example_view([[1, 2], [3, 4]]))
    assert message in str(error.value)


# A user's own policy

OWN = """
from tailopt.plan import Plan
from tailopt.policies import ignores_predictions
import numpy as np

def good(view, *, engine: int = 0):
    return Plan(view.fleet.engines, [engine] * view.n_requests, range(view.n_requests), atomic=view.atomic)

@ignores_predictions
def blind(view):
    assert view.predicted_tokens is None
    return good(view)

def raises(view):
    rows = {}
    return rows["no\\nsuch key"]

def leaves(view):
    raise SystemExit(3)

def returns_none(view):
    pass

def returns_array(view):
    return np.zeros(view.n_requests, dtype=int)

def too_few(view):
    return Plan(view.fleet.engines, [0], [0])

def twice(view):
    return Plan.of_queues(view.fleet.engines, [range(view.n_requests), [0]])

def unassigned(view):
    return Plan(view.fleet.engines, [0] * view.n_requests, [1] + list(range(1, view.n_requests)))

def no_such_engine(view):
    return Plan(view.fleet.engines, [7] * view.n_requests, range(view.n_requests))

def splits_groups(view):
    return Plan(view.fleet.engines, np.arange(view.n_requests) % 2, range(view.n_requests))

def other_fleet(view):
    return Plan(view.fleet.engines[:1], [0] * view.n_requests, range(view.n_requests))

def fractions(view):
    return Plan(view.fleet.engines, [0.5] * view.n_requests, range(view.n_requests))

def writes(view):
    view.prompt_tokens[0] = 0

def needs_more(view, other):
    return good(view)

value = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_own_policy_runs(own):
    view = example_view([[1, 2], [3, 4]])
    assert resolve_policy(f"{own}:good")(view).engine_of.tolist() == [0, 0, 0, 0]
    assert resolve_policy(f"{own}:good(engine=1)")(view).engine_of.tolist() == [1, 1, 1, 1]
    assert resolve_policy(f"{own}:good").needs_predictions
    assert not resolve_policy(f"{own}:blind").needs_predictions


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raised KeyError: 'no\\nsuch key' (line 16)"),
        ("leaves", "raised SystemExit: 3 (line 19)"),
        ("returns_none", "returned NoneType, expected a tailopt.plan.Plan"),
        ("returns_array", "returned ndarray of shape (4,), expected a tailopt.plan.Plan"),
        ("too_few", "plan: has 1 requests, expected 4"),
        ("twice", "request 0 is assigned twice, expected once"),
        ("unassigned", "request 1 is assigned twice, expected once"),
        ("no_such_engine", "request 0 goes to engine 7, there are 2"),
        ("splits_groups", "group 0 is spread over engines [0, 1], expected one"),
        ("other_fleet", "engines of TP [1], expected the fleet's, 2xTP1"),
        ("fractions", "engine_of[0]: expected a whole number, got 0.5"),
        ("writes", "raised ValueError: assignment destination is read-only (line 49)"),
        ("needs_more", "raised TypeError: "),
    ],
)
def test_own_policy_that_goes_wrong_is_one_line(own, name, message):
    with pytest.raises(InputError) as error:
        resolve_policy(f"{own}:{name}")(example_view([[1, 2], [3, 4]]))
    assert str(error.value).startswith(f"policy {own}:{name}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def f(view:\n", "f", "cannot be loaded: SyntaxError: "),
        (
            "import no_such_module_at_all\n",
            "f",
            "ModuleNotFoundError: No module named 'no_such_module_at_all' ",
        ),
        ("x = 1\n\ny = x / 0\n", "f", "cannot be loaded: ZeroDivisionError: division by zero (line 3)"),
        ("import sys\nsys.exit(0)\n", "f", "cannot be loaded: SystemExit: 0 (line 2)"),
        ("def g(view): ...\n", "f", "has no function 'f'; it has g"),
        ("f = 3\n", "f", "has no function 'f'"),
        ("\0", "f", "cannot be loaded: "),
    ],
)
def test_own_file_that_cannot_be_loaded_is_one_line(tmp_path, source, name, message):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(InputError) as error:
        resolve_policy(f"{path}:{name}")
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_own_annotations_need_not_be_importable(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from tailopt.plan import Plan\n"
        "def f(view: 'NotImported', *, engine: int = 0) -> 'NotImported':\n"
        "    return Plan(view.fleet.engines, [engine] * view.n_requests, range(view.n_requests))\n"
    )
    assert resolve_policy(f"{path}:f(engine=1)")(example_view([[1], [2]])).engine_of.tolist() == [1, 1]


def test_own_file_may_import_its_neighbour_and_hold_dataclasses(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("ENGINE = 1\n")
    (tmp_path / "own.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import replace, dataclass\n"
        "from neighbour_of_mine import ENGINE\n"
        "from tailopt.plan import Plan\n"
        "@dataclass\n"
        "class Choice:\n"
        "    engine: int\n"
        "def f(view):\n"
        "    engine = Choice(ENGINE).engine\n"
        "    return Plan(view.fleet.engines, [engine] * view.n_requests, range(view.n_requests))\n"
    )
    plan = resolve_policy(f"{tmp_path / 'own.py'}:f")(example_view([[1], [2]]))
    assert plan.engine_of.tolist() == [1, 1]
