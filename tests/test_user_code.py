"""A user's policies and predictors: whatever they raise, answer or change is one line, or changes nothing."""

from pathlib import Path

import numpy as np
import pytest

from tailopt.errors import InputError
from tailopt.plan import Plan, View
from tailopt.policies import resolve_policy
from tailopt.policies.example import example_view
from tailopt.predict import resolve_predictor
from tailopt.trace import Trace
from tailopt.trace.transforms import Batch

HEAD = "import numpy as np\nfrom tailopt.plan import Engine, Plan\n"
GOOD = "Plan(view.fleet.engines, [0] * view.n_requests, range(view.n_requests), atomic=view.atomic)"


def policy_file(folder: Path, text: str) -> str:
    (folder / "own.py").write_text(HEAD + text)
    return f"{folder / 'own.py'}:f"


def body(text: str) -> str:
    return "def f(view):\n" + "".join(f"    {line}\n" for line in text.splitlines())


def refusal(spec: str) -> str:
    """The one line that a policy is refused with."""
    with pytest.raises(InputError) as caught:
        resolve_policy(spec)(example_view([[90, 80], [10, 20]]))
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"policy {spec}")
    return line


RAISES = {
    "raise ValueError('a\\nb')": "raised ValueError: a b (line 4)",
    "raise GeneratorExit": "raised GeneratorExit:",
    "raise SystemExit(0)": "raised SystemExit: 0",
    "raise StopIteration": "raised StopIteration:",
    "raise type('Own', (BaseException,), {})('x')": "raised Own: x",
    "raise type('Mute', (Exception,), {'__str__': lambda self: 5})()": "Mute: (its message cannot be read)",
    "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})()": "(its message cannot be read)",
    "raise ValueError('x' * 10_000_000)": "raised ValueError: xxx",
    "return f(view)": "raised RecursionError",
    "return np.empty(2**50)": "raised",
}
ANSWERS = {
    "return None": "returned NoneType, expected a tailopt.plan.Plan",
    "yield 1": "returned generator",
    "return type('Odd', (), {'shape': property(lambda self: 1 / 0)})()": "raised ZeroDivisionError",
    "return Plan((1, 2), [0] * 4, range(4))": "engines: expected each to be a tailopt.plan.Engine",
    "return Plan(None, [0] * 4, range(4))": "raised TypeError",
    f"return {GOOD.replace('view.atomic', '3')}": "expected atomic to be True or False",
    "return Plan((Engine(1, 2.5),) * 2, [0] * 4, range(4))": "max_running: expected a whole number",
    "return Plan((Engine(1, 10**30),) * 2, [0] * 4, range(4))": "max_running: expected a whole number",
    "return Plan(view.fleet.engines, [0] * 4, [0, 1, 2, 2**62])": "does not exist",
    "return Plan(view.fleet.engines, [0, 0, 1, 0], range(4))": "is spread over engines",
    f"p = {GOOD}\nobject.__setattr__(p, 'order', np.zeros(4, int))\nreturn p": "is assigned twice",
    f"p = {GOOD}\nobject.__setattr__(p, 'engine_of', p.engine_of + 0.5)\nreturn p": "expected a whole number",
    f"p = {GOOD}\nobject.__setattr__(p, 'engine_of', np.full(4, 7 * 10**9))\nreturn p": "there are 2",
    f"p = {GOOD}\nobject.__setattr__(p.engines[0], 'max_running', -3)\nreturn p": "max_running: expected",
    "class Q(Plan):\n    def __post_init__(self): pass\n    def check(self, view): pass\n"
    "return Q(view.fleet.engines, np.full(4, 50), np.zeros(4, int))": "there are 2",
    "class Q(Plan):\n    @property\n    def note(self): raise OSError('no')\n"
    "q = object.__new__(Q)\nq.__dict__.update(engines=(), engine_of=[], order=[], atomic=True)\n"
    "return q": "raised OSError: no",
}


@pytest.mark.parametrize("text", [*RAISES, *ANSWERS])
def test_what_goes_wrong_is_one_line(tmp_path: Path, text: str) -> None:
    assert (RAISES | ANSWERS)[text] in refusal(policy_file(tmp_path, body(text)))


FILES = {
    "async def f(view): return 1\n": "is an async function, expected a plain one",
    "raise BaseException('x')\n": "cannot be loaded: BaseException: x (line 3)",
    "raise SystemExit(0)\n": "cannot be loaded: SystemExit",
    "def __getattr__(name): raise RuntimeError(name)\n": "raised RuntimeError: f",
    "class C:\n    __signature__ = 5\n    def __call__(self, view): return 1\nf = C()\n": "returned int",
    "class C:\n    def __call__(self, view): return 1\n"
    "    def __getattr__(self, name): raise RuntimeError(name)\nf = C()\n": "RuntimeError",
    "x = " + "-" * 200_000 + "1\n": "cannot be loaded: ",
    "def f(view): return 1\0\n": "cannot be loaded: ",
}


@pytest.mark.parametrize("text", FILES)
def test_files_that_go_wrong_are_one_line(tmp_path: Path, text: str) -> None:
    assert FILES[text] in refusal(policy_file(tmp_path, text))


def test_ctrl_c_is_left_alone(tmp_path: Path) -> None:
    policy = resolve_policy(policy_file(tmp_path, body("raise KeyboardInterrupt")))
    with pytest.raises(KeyboardInterrupt):
        policy(example_view([[90, 80]]))


def test_whether_predictions_are_needed_is_said_by_false_alone(tmp_path: Path) -> None:
    odd = "class X:\n    def __bool__(self): raise ValueError\n"
    odd += body("return None") + "f.needs_predictions = X()\n"
    assert resolve_policy(policy_file(tmp_path, odd)).needs_predictions
    worse = "class C:\n    def __call__(self, view): return 1\n"
    worse += "    @property\n    def needs_predictions(self): raise OSError('no')\nf = C()\n"
    with pytest.raises(InputError, match="raised OSError: no"):
        _ = resolve_policy(policy_file(tmp_path, worse)).needs_predictions
    plain = body("return None") + "f.needs_predictions = False\n"
    assert not resolve_policy(policy_file(tmp_path, plain)).needs_predictions


CHANGES = [
    "object.__setattr__(view, 'atomic', False)",
    "view.prompt.flags.writeable = True; view.prompt[:] = [0, 1, 2, 3]",
    "object.__setattr__(view, 'prompt', np.arange(4)); object.__setattr__(view, 'atomic', False)",
    "object.__setattr__(view.fleet, 'engines', (Engine(1),) * 4)",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_policy_cannot_switch_off_its_check(tmp_path: Path, change: str) -> None:
    split = "return Plan(view.fleet.engines[:2], [0, 1, 0, 1], range(4), atomic=True)"
    assert "is spread over engines" in refusal(policy_file(tmp_path, body(f"{change}\n{split}")))


def test_a_policy_changes_a_copy_only(tmp_path: Path) -> None:
    text = (
        "view.fleet.profile.shapes[1].step_time.__dict__['a_s'] = 0.0\n"
        "object.__setattr__(view.fleet, 'gpus', -5)\n"
        "view.predicted_tokens.flags.writeable = True\nview.predicted_tokens[:] = 1\n"
        f"global kept\nkept = {GOOD}\nreturn kept"
    )
    view = example_view([[90, 80], [10, 20]])
    policy = resolve_policy(policy_file(tmp_path, body(text)))
    plan = policy(view)
    assert float(view.fleet.profile.shape(1).step_time(1, 0)) == pytest.approx(0.011)
    assert (view.fleet.gpus, view.predicted_tokens.tolist()) == (2, [90, 80, 10, 20])
    kept = policy.spec.function.__globals__["kept"]
    assert type(plan) is Plan
    assert plan is not kept
    assert not np.shares_memory(plan.engine_of, kept.engine_of)


PREDICTORS = {
    "raise ValueError('x')": "raised ValueError: x",
    "return [1]": "expected 4 values, got 1",
    "return [0] * 4": "expected at least 1, got 0.0",
    "return [float('nan')] * 4": "expected a finite number, got nan",
    "return [1e300] * 4": "expected at most 1.09951e+12, got 1e+300",
    "return [[1.7e308] * 4] * 2": "expected at most 1.09951e+12, got 1.7e+308",
    "return [10**400] * 4": "expected numbers, got object",
    "return ['5'] * 4": "expected numbers, got <U1",
    "return [['5'] * 4]": "expected numbers, got <U1",
    "return [[], [1]]": "raised ValueError",
    "return type('Odd', (), {'__array__': lambda self, *a, **k: 1 / 0})()": "raised ZeroDivisionError",
}


@pytest.mark.parametrize("text", PREDICTORS)
def test_predictors_that_go_wrong_are_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.py").write_text(f"def f(batch, rng):\n    {text}\n")
    spec = f"{tmp_path / 'own.py'}:f"
    batch = Batch(Trace.of([[90, 80], [10, 20]]), None, seed=0)
    with pytest.raises(InputError) as caught:
        resolve_predictor(spec)(batch)
    assert str(caught.value).startswith(f"predictor {spec}: ")
    assert PREDICTORS[text] in str(caught.value)


@pytest.mark.parametrize("spec", ["noisy_truth(sigma=50)", "constant(tokens=1e300)"])
def test_known_predictors_that_are_off_the_scale(spec: str) -> None:
    with pytest.raises(InputError, match=r"predicted tokens.*: expected at most 1.09951e\+12"):
        resolve_predictor(spec)(Batch(Trace.of([[90, 80]] * 20), None, seed=0))


@pytest.mark.parametrize("change", ["object.__setattr__(batch.trace, 'output_tokens', lengths * 0 + 1)",
                                    "lengths.flags.writeable = True; lengths[:] = 1"])  # fmt: skip
def test_a_predictor_cannot_change_the_truth(tmp_path: Path, change: str) -> None:
    (tmp_path / "own.py").write_text(
        f"def f(batch, rng):\n    lengths = batch.trace.output_tokens\n    {change}\n    return [5.0] * 4\n"
    )
    batch = Batch(Trace.of([[90, 80], [10, 20]]), None, seed=0)
    assert resolve_predictor(f"{tmp_path / 'own.py'}:f")(batch).tolist() == [5.0] * 4
    assert batch.trace.output_tokens.tolist() == [90, 80, 10, 20]


def test_the_largest_predictions_are_no_trouble() -> None:
    from tailopt.policies import POLICIES

    view = example_view([[90, 80], [10, 20]])
    huge = View(**(vars(view) | {"predicted_tokens": np.full(4, 2.0**40)}))
    for name in POLICIES:
        plan = resolve_policy(name)(huge)
        assert sorted(plan.order.tolist()) == [0, 1, 2, 3]
    assert plan.engines == view.fleet.engines
