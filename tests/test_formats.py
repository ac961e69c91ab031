"""Every format: the sample file reads as it should, is known by its content, and our own comes back equal."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailopt.errors import InputError
from tailopt.files import whole_file
from tailopt.trace.formats import FORMATS
from tailopt.trace.reading import read_trace, resolve_trace, write_trace
from tailopt.trace.trace import Trace

DATA = Path(__file__).parent / "data"


def words(text: str) -> int:
    return len(text.split())


# File, format, then what it must read as: prompt tokens, output tokens, prompts, capped, arrivals, left out.
# slime_7.pt was written by torch.save of torch 2.13, with lists, tensors and arrays of tokens and rewards.
SAMPLES = {
    "own.csv": ("csv", [10, 10, 12, 10], [30, 64, 7, 31], [0, 0, 1, 0], [0, 1, 0, 0], [0.0] * 4, {}),
    "azure2023.csv": (
        "azure2023", [374, 396, 879], [44, 109, 55], [0, 1, 2], [0] * 3, [0, 4.314579, 4.541877], {}
    ),
    "burstgpt.csv": (
        "burstgpt", [472, 1087, 417], [18, 230, 276], [0, 1, 2], [0] * 3, [0, 40, 115],
        {"failed requests (0 response tokens)": 1},
    ),
    "vidur.csv": ("vidur", [591, 547], [140, 248], [0, 1], [0] * 2, [0, 0.028486639895327726], {}),
    "mooncake.jsonl": ("mooncake", [6758, 7322], [500, 490], [0, 1], [0] * 2, [0, 27.482], {}),
    "vllm_bench.json": ("vllm-bench", [12, 9], [64, 31], [0, 1], [0] * 2, [0, 0.5], {"failed requests": 1}),
    "verl_3.jsonl": ("verl", [6, 6, 3], [3, 5, 1], [0, 0, 1], [0] * 3, [0] * 3, {}),
    "slime_7.pt": (
        "slime", [5, 5, 7, 4, 4], [12, 40, 9, 6, 8], [0, 0, 1, 2, 2], [0, 1, 0, 0, 0], [0] * 5,
        {"aborted samples": 1},
    ),
    "openai_batch.jsonl": (
        "openai-batch", [22, 22, 36], [10, 4096, 87], [0, 0, 1], [0, 1, 1], [0] * 3, {"failed requests": 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_files(name: str) -> None:
    format, prompt_tokens, output_tokens, prompt, capped, arrival, left_out = SAMPLES[name]
    trace, report = read_trace(DATA / name, tokenizer=words)
    assert report.format == format
    assert report.left_out == left_out
    assert report.skipped == {}
    assert report.responses == trace.n_requests == len(output_tokens)
    assert trace.prompt_tokens.tolist() == prompt_tokens
    assert trace.output_tokens.tolist() == output_tokens
    assert trace.prompt.tolist() == prompt
    assert trace.capped.tolist() == capped
    assert trace.arrival_s.tolist() == arrival


def test_what_else_the_samples_say() -> None:
    own, _ = read_trace(DATA / "own.csv")
    assert (own.name, own.source, own.licence, own.synthetic) == ("little", "written by hand", "CC0", True)
    assert own.step is not None
    assert own.step.tolist() == [1, 1, 1, 2]
    assert own.correct is not None
    assert own.correct.tolist() == [1, 0, -1, 1]
    verl, _ = read_trace(DATA / "verl_3.jsonl", tokenizer=words)
    assert verl.step is not None
    assert verl.step.tolist() == [3, 3, 3]
    assert verl.correct is not None
    assert verl.correct.tolist() == [1, 0, -1]
    slime, _ = read_trace(DATA / "slime_7.pt")
    assert slime.step is not None
    assert slime.step.tolist() == [7] * 5
    assert slime.correct is not None
    assert slime.correct.tolist() == [1, 0, -1, -1, -1]
    batch, _ = read_trace(DATA / "openai_batch.jsonl")
    assert batch.prompt_ids == ("q1", "request-4")
    assert batch.sample.tolist() == [0, 1, 0]


def test_every_format_has_a_sample_and_knows_only_its_own() -> None:
    assert {sample[0] for sample in SAMPLES.values()} == set(FORMATS) - {"parquet"}
    for name, (format, *_) in SAMPLES.items():
        start = (DATA / name).read_bytes()
        assert [known for known in FORMATS if FORMATS[known].detect(start)] == [format]


@pytest.mark.parametrize(
    ("custom_id", "prompt", "sample"),
    [
        ("q7#3", "q7", 3),
        ("set/q7/12", "set/q7", 12),
        ("q7-sample-2", "q7", 2),
        ("q7_sample_2", "q7", 2),
        ("q7-s2", "q7", 2),
        ("q7_s10", "q7", 10),
        ("request-3", "request-3", 0),
        ("tests3", "tests3", 0),
        ("q#x", "q#x", 0),
    ],
)
def test_custom_ids(tmp_path: Path, custom_id: str, prompt: str, sample: int) -> None:
    line = (DATA / "openai_batch.jsonl").read_text().splitlines()[0].replace("q1#0", custom_id)
    (tmp_path / "b.jsonl").write_text(line)
    trace, _ = read_trace(tmp_path / "b.jsonl")
    assert (trace.prompt_ids, trace.sample.tolist()) == ((prompt,), [sample])


def test_several_choices_are_bad(tmp_path: Path) -> None:
    text = (DATA / "openai_batch.jsonl").read_text()
    choice = '{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}'
    (tmp_path / "b.jsonl").write_text(text.replace(choice, f"{choice}, {choice}"))
    with pytest.raises(
        InputError, match=r"line 1, column 'response.body.choices': got 2 choices, expected one"
    ):
        read_trace(tmp_path / "b.jsonl")
    trace, report = read_trace(tmp_path / "b.jsonl", skip_bad=True)
    assert trace.n_requests == 2
    assert sum(report.skipped.values()) == 1


def test_appended_vllm_runs(tmp_path: Path) -> None:
    text = (DATA / "vllm_bench.json").read_text()
    (tmp_path / "r.json").write_text(text + "\n" + text)
    trace, report = read_trace(tmp_path / "r.json")
    assert trace.output_tokens.tolist() == [64, 31, 64, 31]
    assert report.left_out == {"failed requests": 2}


def test_vllm_without_detail(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"date": "x", "completed": 2}')
    with pytest.raises(InputError, match="save-detailed"):
        read_trace(tmp_path / "r.json", format="vllm-bench")
    (tmp_path / "r.json").write_text('{"input_lens": [1, 2], "output_lens": [3]}')
    with pytest.raises(InputError, match="input_lens: expected a list of 1 like output_lens"):
        read_trace(tmp_path / "r.json")
    (tmp_path / "r.json").write_text('{"input_lens": [1, 2], "output_lens": [3')
    with pytest.raises(InputError, match="broken JSON"):
        read_trace(tmp_path / "r.json")


def test_vidur_without_arrivals(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n10,20,0.5\n")
    trace, report = read_trace(tmp_path / "t.csv")
    assert report.format == "vidur"
    assert trace.arrival_s.tolist() == [0.0]


def test_folder_of_steps(tmp_path: Path) -> None:
    text = (DATA / "verl_3.jsonl").read_text()
    for step in (2, 10, 1):
        (tmp_path / f"{step}.jsonl").write_text(text.replace('"step": 3', f'"step": {step}'))
    (tmp_path / ".hidden").write_text("no trace")
    trace, report = read_trace(tmp_path, tokenizer=words)
    assert trace.step is not None
    assert trace.step.tolist() == [1] * 3 + [2] * 3 + [10] * 3
    assert report.files == 3
    assert trace.n_prompts == 2
    assert trace.name == tmp_path.name


def test_verl_step_from_the_file_name(tmp_path: Path) -> None:
    (tmp_path / "12.jsonl").write_text('{"input": "a", "output": "b c", "score": 1}\n')
    trace, _ = read_trace(tmp_path / "12.jsonl", tokenizer=words)
    assert trace.step is not None
    assert trace.step.tolist() == [12]
    (tmp_path / "x.jsonl").write_text('{"input": "a", "output": "b c", "score": 1}\n')
    trace, _ = read_trace(tmp_path / "x.jsonl", tokenizer=words)
    assert trace.step is None


ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    prompt_ids = draw(st.lists(ids, min_size=1, max_size=5, unique=True))
    n = draw(st.integers(len(prompt_ids), 12))
    rest = draw(
        st.lists(
            st.integers(0, len(prompt_ids) - 1), min_size=n - len(prompt_ids), max_size=n - len(prompt_ids)
        )
    )
    prompt = draw(st.permutations([*range(len(prompt_ids)), *rest]))

    def column(values: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(values, min_size=n, max_size=n))

    return Trace(
        name=draw(st.text(st.characters(exclude_categories=["Cs"]))),
        source=draw(ids),
        prompt=np.array(prompt),
        prompt_ids=tuple(prompt_ids),
        sample=np.array(draw(st.permutations(range(n)))),
        prompt_tokens=np.array(column(st.integers(0, 2**31 - 1))),
        output_tokens=np.array(column(st.integers(1, 2**31 - 1))),
        capped=np.array(column(st.booleans())),
        arrival_s=np.array(column(st.floats(0, 1e12))),
        step=draw(st.none() | st.just(np.array(column(st.integers(-5, 5))))),
        correct=draw(st.none() | st.just(np.array(column(st.integers(-1, 1))))),
        synthetic=draw(st.booleans()),
        licence=draw(ids),
    )


@pytest.mark.parametrize("format", ["parquet", "csv"])
@given(trace=traces())
def test_own_formats_come_back_equal(
    tmp_path_factory: pytest.TempPathFactory, format: str, trace: Trace
) -> None:
    path = tmp_path_factory.mktemp("own") / f"trace.{format}"
    write_trace(trace, path)
    again, report = read_trace(path)
    assert report.format == format
    assert again.sha256 == trace.sha256
    assert again.prompt_ids == trace.prompt_ids
    assert (again.name, again.source, again.licence, again.synthetic) == (
        trace.name, trace.source, trace.licence, trace.synthetic,
    )  # fmt: skip
    before = path.read_bytes()
    write_trace(again, path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_writing_refuses(tmp_path: Path) -> None:
    trace = Trace.of([[1]])
    with pytest.raises(InputError, match=r"expected a name that ends in .parquet, .csv"):
        write_trace(trace, tmp_path / "t.txt")
    with pytest.raises(InputError, match="format to write 'verl': unknown"):
        write_trace(trace, tmp_path / "t.csv", format="verl")
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(trace, tmp_path / "nowhere" / "t.csv")
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(trace, tmp_path, format="csv")
    write_trace(trace, tmp_path / "t.txt", format="csv")
    assert read_trace(tmp_path / "t.txt")[1].format == "csv"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    write_trace(Trace.of([[1]]), path)
    before = path.read_bytes()
    monkeypatch.setattr("tailopt.trace.formats.csv.table_of", lambda trace: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_trace(Trace.of([[2]]), path)
    with (
        pytest.raises(InputError, match=r"t.csv: cannot be written \(No space left on device\)"),
        whole_file(path),
    ):
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(Trace.of([[5, 70]]), tmp_path / "mine.csv")
    monkeypatch.chdir(tmp_path)
    trace, report = resolve_trace("mine.csv", cap=70)
    assert trace.capped.tolist() == [False, True]
    assert report is not None
    with pytest.raises(InputError, match=r"missing.csv: no such file or folder"):
        resolve_trace("missing.csv")
    with pytest.raises(InputError, match=r"unknown; did you mean .*gpqa-deepseek-reasoner"):
        resolve_trace("deepseek-reasoner")
    trace, report = resolve_trace("gpqa-deepseek-reasoner", cap=20_000)
    assert report is None
    assert trace.capped.tolist() == (trace.output_tokens >= 20_000).tolist()
