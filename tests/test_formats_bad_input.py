"""Bad files: each kind is a one-line error of what, where and what was expected; or skipped and counted."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailopt.errors import InputError
from tailopt.trace import Trace, text_rows
from tailopt.trace.formats import FORMATS
from tailopt.trace.reading import read_trace, resolve_trace, write_trace
from tailopt.trace.tokenizer import load_tokenizer

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TIME = "2023-11-16 18:15:46.6805900"
MOONCAKE = '{"timestamp": 0, "input_length": 5, "output_length": %s, "hash_ids": []}\n'


def refusal(path: Path | list[Path], **options: Any) -> str:
    """The one line that reading the file is refused with."""
    with pytest.raises(InputError) as caught:
        read_trace(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


LENGTHS = [
    ("-3", "-3"),
    ("0", "0"),
    ("12.5", "12.5"),
    ("NaN", "NaN"),
    ("1e400", ("1e400", "Infinity")),
    ("2147483648", "2147483648"),
    ("9" * 400, ("9" * 57 + "...",)),
]


@pytest.mark.parametrize(("value", "shown"), [*LENGTHS, ("abc", "abc"), ("", None), ("0x10", "0x10")])
def test_lengths_in_csv(tmp_path: Path, value: str, shown: str | tuple[str, ...] | None) -> None:
    path = file(tmp_path, "a.csv", f"{AZURE}{TIME},1,2\n{TIME},1,{value}\n{TIME},3,4\n")
    got = "nothing" if shown is None else repr(shown if isinstance(shown, str) else shown[0])
    assert refusal(path) == (
        f"{path}: line 3, column 'GeneratedTokens': got {got}, expected a whole number from 1 to 2147483647"
    )
    trace, report = read_trace(path, skip_bad=True)
    assert trace.output_tokens.tolist() == [2, 4]
    assert report.skipped == {"GeneratedTokens: expected a whole number from 1 to 2147483647": 1}
    assert report.first_skipped.startswith(f"{path}: line 3, column 'GeneratedTokens'")


@pytest.mark.parametrize(
    ("value", "shown"), [*LENGTHS, ('"abc"', "abc"), ("null", None), ("[7]", "[7]"), ("true", "true")]
)
def test_lengths_in_jsonl(tmp_path: Path, value: str, shown: str | tuple[str, ...] | None) -> None:
    path = file(tmp_path, "m.jsonl", MOONCAKE % 2 + MOONCAKE % value + MOONCAKE % 4)
    message = refusal(path)
    assert message.startswith(f"{path}: line 2, column 'output_length': got ")
    assert message.endswith(", expected a whole number from 1 to 2147483647")
    got = message.split("got ")[1].split(", expected")[0]
    if shown is None:
        assert got == "nothing"
    elif not value.startswith("9" * 400):  # any spelling of it will do
        assert got.strip("'") in ((shown,) if isinstance(shown, str) else shown)
    trace, report = read_trace(path, skip_bad=True)
    assert trace.output_tokens.tolist() == [2, 4]
    assert sum(report.skipped.values()) == 1


def test_missing_field_in_jsonl(tmp_path: Path) -> None:
    path = file(tmp_path, "m.jsonl", MOONCAKE % 2 + '{"timestamp": 1, "input_length": 5}\n')
    assert refusal(path) == (
        f"{path}: line 2, column 'output_length': got nothing, expected a whole number from 1 to 2147483647"
    )


@pytest.mark.parametrize(
    "broken", ['{"timestamp": 0, "inp', "[1, 2]", "7", "nonsense", '{"a": 1} {"b": 2}', "[" * 100_000]
)
def test_broken_json_lines(tmp_path: Path, broken: str) -> None:
    path = file(tmp_path, "m.jsonl", MOONCAKE % 2 + broken + "\n" + MOONCAKE % 4)
    assert f"{path}: line 2: got " in refusal(path)
    assert refusal(path).endswith("expected a JSON object")
    trace, report = read_trace(path, skip_bad=True)
    assert trace.output_tokens.tolist() == [2, 4]
    assert report.skipped == {"row: expected a JSON object": 1}


def test_first_line_broken(tmp_path: Path) -> None:
    path = file(tmp_path, "m.jsonl", "{oops\n" + MOONCAKE % 4)
    assert "line 1: got '{oops', expected a JSON object" in refusal(path)


def test_nested_field_of_another_kind(tmp_path: Path) -> None:
    line = '{"custom_id": "a", "error": null, "response": {"status_code": 200, "body": {"usage": 5}}}\n'
    path = file(tmp_path, "b.jsonl", line)
    assert "column 'response.body.usage.prompt_tokens': got nothing" in refusal(path) or (
        "column 'response.body.usage.completion_tokens': got nothing" in refusal(path)
    )


@pytest.mark.parametrize(("row", "fields"), [("1,2,3,4", 4), (f"{TIME},1", 2), ("x", 1)])
def test_ragged_csv(tmp_path: Path, row: str, fields: int) -> None:
    path = file(tmp_path, "a.csv", f"{AZURE}{TIME},1,2\n\n{row}\n{TIME},3,4\n")
    assert refusal(path) == f"{path}: line 4: got {fields} fields, expected 3 fields"
    trace, report = read_trace(path, skip_bad=True)
    assert trace.output_tokens.tolist() == [2, 4]
    assert report.skipped == {"row: expected 3 fields": 1}


def test_quotes_across_lines_keep_line_numbers(tmp_path: Path) -> None:
    path = file(tmp_path, "o.csv", 'prompt_id,output_tokens\n"a\nb",3\n"c",0\n')
    assert f"{path}: line 4, column 'output_tokens': got '0'" in refusal(path)
    path = file(tmp_path, "o.csv", 'prompt_id,output_tokens\na,3\n"c,4\nd,5\n')
    assert refusal(path) == f"{path}: line 3: got '\"c,4', expected a closing quote"
    trace, report = read_trace(path, skip_bad=True)
    assert (trace.prompt_ids, report.skipped) == (("a", "d"), {"row: expected a closing quote": 1})


def test_missing_columns(tmp_path: Path) -> None:
    path = file(tmp_path, "a.csv", "TIMESTAMP,ContextTokens\n1,2\n")
    assert refusal(path, format="azure2023") == (
        f"{path}: no column 'GeneratedTokens', expected TIMESTAMP, ContextTokens, GeneratedTokens; "
        "found TIMESTAMP, ContextTokens"
    )
    path = file(tmp_path, "a.csv", "prompt_id,length\na,1\n")
    assert "no column 'output_tokens'" in refusal(path, format="csv")
    path = file(tmp_path, "a.csv", "output_tokens,output_tokens\n1,2\n")
    assert "column 'output_tokens' appears twice" in refusal(path)


def test_times(tmp_path: Path) -> None:
    path = file(tmp_path, "a.csv", f"{AZURE}yesterday,1,2\n")
    assert "column 'TIMESTAMP': got 'yesterday', expected a time like 2023-11-16" in refusal(path)
    path = file(tmp_path, "v.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n-1,1,2\n")
    assert "column 'arrived_at': got '-1', expected seconds from 0 on" in refusal(path)
    path = file(tmp_path, "v.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\nnan,1,2\n")
    assert "column 'arrived_at': got 'nan'" in refusal(path)
    path = file(tmp_path, "a.csv", f"{AZURE}2024-05-10 00:00:00.009930+00:00,1,2\n2024-05-10T00:00:01,1,2\n")
    assert read_trace(path)[0].arrival_s.tolist() == [0.0, 0.99007]


@pytest.mark.parametrize("content", ["", "\n\n", AZURE, "# name: x\n"])
def test_empty_files(tmp_path: Path, content: str) -> None:
    path = file(tmp_path, "a.csv", content)
    assert str(path) in refusal(path, format="azure2023")
    assert "expected" in refusal(path, format="azure2023")
    assert str(path) in refusal(path)


def test_nothing_left(tmp_path: Path) -> None:
    path = file(tmp_path, "a.csv", f"{AZURE}{TIME},1,0\n")
    with pytest.raises(InputError, match=r"no responses \(1 bad, 0 left out\), expected at least one"):
        read_trace(path, skip_bad=True)
    path = file(tmp_path, "m.jsonl", "")
    assert "empty" in refusal(path)
    assert "no responses" in refusal(path, format="mooncake")


def test_unknown_formats(tmp_path: Path) -> None:
    path = file(tmp_path, "a.csv", "x,y\n1,2\n")
    assert refusal(path).startswith(
        f"{path}: unknown format; known: parquet, csv, azure2023, burstgpt, mooncake"
    )
    assert refusal(path, format="azur2023").startswith(
        "format 'azur2023': unknown; did you mean azure2023? known: parquet"
    )
    assert "no such file or folder" in refusal(tmp_path / "nowhere")
    assert "empty folder" in refusal(Path(tempfolder(tmp_path)))
    assert "expected at least one file" in refusal([])
    other = file(tmp_path, "b.jsonl", MOONCAKE % 3)
    own = file(tmp_path, "c.csv", "output_tokens\n3\n")
    assert refusal([own, other]) == f"{other}: of format mooncake, expected csv like c.csv"


def tempfolder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    text = f"{AZURE}{TIME},1,2\n{TIME},3,4\n".replace("\n", "\r\n")
    trace, _ = read_trace(file(tmp_path, "a.csv", b"\xef\xbb\xbf" + text.encode()))
    assert trace.output_tokens.tolist() == [2, 4]
    lines = (MOONCAKE % 2 + MOONCAKE % 4).replace("\n", "\r\n")
    trace, _ = read_trace(file(tmp_path, "m.jsonl", b"\xef\xbb\xbf" + lines.encode()))
    assert trace.output_tokens.tolist() == [2, 4]
    trace, _ = read_trace(file(tmp_path, "m.jsonl", (MOONCAKE % 2 + "\n\r\n" + MOONCAKE % 4).encode()))
    assert trace.output_tokens.tolist() == [2, 4]


def test_no_utf8(tmp_path: Path) -> None:
    path = file(tmp_path, "o.csv", b"prompt_id,output_tokens\na,1\n\xff\xfe,2\nb,3\n")
    assert refusal(path) == f"{path}: line 3: got other bytes, expected text in UTF-8"
    trace, report = read_trace(path, skip_bad=True)
    assert trace.output_tokens.tolist() == [1, 3]
    assert report.skipped == {"row: expected text in UTF-8": 1}
    path = file(tmp_path, "m.jsonl", (MOONCAKE % 2).encode() + b'{"timestamp": "\xff"}\n')
    assert refusal(path) == f"{path}: line 2: got other bytes, expected text in UTF-8"
    path = file(tmp_path, "o.csv", "prompt_id,output_tokens\na,1\n".encode("utf-16"))
    assert "unknown format" in refusal(path)
    assert "expected text in UTF-8" in refusal(path, format="csv")


def test_group_split_over_files(tmp_path: Path) -> None:
    a = file(tmp_path, "a.csv", "prompt_id,output_tokens\nq1,1\nq2,2\n")
    b = file(tmp_path, "b.csv", "prompt_id,output_tokens\nq3,1\nq1,2\n")
    assert refusal([a, b]) == "prompt 'q1' is split over a.csv and b.csv, expected in one file"
    a = file(tmp_path, "a.csv", "prompt_id,step,output_tokens\nq1,1,1\nq1,2,1\n")
    b = file(tmp_path, "b.csv", "prompt_id,step,output_tokens\nq1,3,1\nq1,2,2\n")
    assert refusal([a, b]) == "prompt 'q1' at step 2 is split over a.csv and b.csv, expected in one file"
    b = file(tmp_path, "b.csv", "prompt_id,step,output_tokens\nq1,3,1\n")
    trace, _ = read_trace([a, b])
    assert trace.n_prompts == 1
    b = file(tmp_path, "b.csv", "prompt_id,output_tokens\nq9,3\n")
    assert refusal([a, b]) == f"{b}: step is in some rows only, expected it in all or none"
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        file(tmp_path / name, "a.csv", "prompt_id,output_tokens\nq1,1\n")
    x, y = tmp_path / "x", tmp_path / "y"
    assert refusal([x, y]) == f"prompt 'q1' is split over {x}/a.csv and {y}/a.csv, expected in one file"


@pytest.mark.parametrize("name", ["x" * 5000 + ".csv", "a\0b.csv", "", "\udcff.csv", "no\n such.csv"])
def test_names_that_no_file_has(name: str) -> None:
    with pytest.raises(InputError, match=r"no such file|unknown"):
        resolve_trace(name)
    with pytest.raises(InputError, match="no such file"):
        read_trace(f"./{name}" if name else "./no such")
    with pytest.raises(InputError, match=r"cannot be written|cannot tell"):
        write_trace(Trace.of([[1]]), f"no such folder/{name}")


def test_bundled_names_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpqa-deepseek-reasoner", "mine"):
        file(tmp_path, name, "output_tokens\n3\n")
    assert resolve_trace("gpqa-deepseek-reasoner")[0].n_requests > 1000
    assert resolve_trace("./gpqa-deepseek-reasoner")[0].n_requests == 1
    assert resolve_trace("mine")[0].n_requests == 1


def test_samples_twice_and_gaps(tmp_path: Path) -> None:
    path = file(tmp_path, "o.csv", "prompt_id,sample,output_tokens\nq1,0,1\nq1,0,2\n")
    assert refusal(path) == f"{path}: line 3: sample 0 of prompt 'q1' appears twice, expected once"
    path = file(tmp_path, "o.csv", "prompt,prompt_id,output_tokens\n2,b,2\n0,a,1\n")
    assert refusal(path) == (
        f"{path}: line 2, column 'prompt': got 2, expected numbers from 0 without gaps, one per prompt_id"
    )
    path = file(tmp_path, "o.csv", "prompt,prompt_id,output_tokens\n0,a,1\n0,b,2\n")
    assert refusal(path) == (
        f"{path}: line 3: prompt 0 has another prompt_id before, 'b' here; expected one per prompt"
    )
    path = file(tmp_path, "o.csv", "prompt,prompt_id,output_tokens\n0,a,1\n1,a,2\n")
    assert "line 3: prompt_id 'a' has another prompt before, 1 here" in refusal(path)
    path = file(tmp_path, "o.csv", "prompt,sample,output_tokens\n0,0,5\n1,0,-1\n2,0,7\n")
    trace, _ = read_trace(path, skip_bad=True)
    assert (trace.prompt.tolist(), trace.prompt_ids) == ([0, 1], ("0", "2"))
    path = file(tmp_path, "o.csv", "output_tokens,capped\n5,maybe\n")
    assert "column 'capped': got 'maybe', expected true or false" in refusal(path)
    path = file(tmp_path, "o.csv", "output_tokens,correct\n5,2\n")
    assert "column 'correct': got '2', expected 1, 0 or -1 (unknown)" in refusal(path)


def test_cap(tmp_path: Path) -> None:
    path = file(tmp_path, "o.csv", "output_tokens,capped\n5,true\n8,false\n9,false\n7,false\n")
    trace, _ = read_trace(path, cap=8)
    assert trace.capped.tolist() == [True, True, True, False]
    assert trace.output_tokens.tolist() == [5, 8, 9, 7]
    assert "cap: expected at least 1 token, got 0" in refusal(path, cap=0)


def test_unreadable(tmp_path: Path) -> None:
    path = file(tmp_path, "t.parquet", b"PAR1 and no more")
    assert f"{path}: broken Parquet" in refusal(path)
    import polars as pl

    pl.DataFrame({"a": [1]}).write_parquet(path)
    assert refusal(path) == f"{path}: no column 'output_tokens'; found a"
    pl.DataFrame({"output_tokens": [[1]]}).write_parquet(path)
    assert refusal(path) == f"{path}: column 'output_tokens': expected plain values, got List(Int64)"
    pl.DataFrame({"output_tokens": [5, None]}).write_parquet(path)
    assert "row 2, column 'output_tokens': got nothing" in refusal(path)
    if os.geteuid():  # root may read anything
        path.chmod(0)
        assert "cannot be read" in refusal(path)


@pytest.mark.parametrize("size", [1, 40, 200])
def test_blocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    rows = "".join(f'"p{i}\n",{i},{i + 1}\n' for i in range(20))
    own = file(tmp_path, "o.csv", "# name: x\nprompt_id,sample,output_tokens\n" + rows)
    plain = file(tmp_path, "p.csv", "output_tokens\n" + "".join(f"{i + 1}\n" for i in range(50)))
    lines = file(tmp_path, "m.jsonl", "".join(MOONCAKE % (i + 1) for i in range(50)) + "{")
    whole = [read_trace(path, skip_bad=True) for path in (own, plain, lines)]
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", size)
    cut = [read_trace(path, skip_bad=True) for path in (own, plain, lines)]
    assert [trace.sha256 for trace, _ in whole] == [trace.sha256 for trace, _ in cut]
    assert [report for _, report in whole] == [report for _, report in cut]
    assert whole[2][1].first_skipped.startswith(f"{lines}: line 51: ")


def test_quotes_that_never_close_take_their_line_only(tmp_path: Path) -> None:
    rows = "".join(f"{i + 1},x\n" for i in range(5000))
    path = file(tmp_path, "o.csv", f'output_tokens,note\n1,"a\nb"\n2,"c\n{rows}9,"d"\n7,"e\n')
    trace, report = read_trace(path, skip_bad=True)
    assert trace.output_tokens.tolist() == [1, *range(1, 5001), 9]
    assert report.skipped == {"row: expected a closing quote": 2}
    assert report.first_skipped == f"{path}: line 4: got '2,\"c', expected a closing quote"


HEADERS: dict[str, bytes] = {
    "carriage returns": b"output_tokens\r5\r6\r",
    "long field": b"output_tokens," + b"x" * 200_000 + b"\n5,6\n",
    "long quoted field": b'output_tokens,"' + b"x" * 200_000 + b'"\n5,6\n',
    "long line": b"x" * 5_000_000,
    "deep JSON": b'{"timestamp": 0, "input_length": 3, "output_length": '
    + b"[" * 200_000
    + b"]" * 200_000
    + b"}\n",
    "zeros": bytes(10_000),
    "a zip archive": b"PK\x03\x04" + b"\r" * 10,
}


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_first_lines_of_no_format(tmp_path: Path, case: str, format: str | None) -> None:
    path = file(tmp_path, "a.csv", HEADERS[case])
    assert str(path) in refusal(path, format=format, tokenizer=len)


def test_columns_by_any_name(tmp_path: Path) -> None:
    for header in ("row,row 0,output_tokens", "x,x,output_tokens", "0,1,output_tokens", "row,,output_tokens"):
        for value in ("7", '"7"'):
            path = file(tmp_path, "o.csv", f"{header}\na,b,{value}\n")
            assert read_trace(path)[0].output_tokens.tolist() == [7]


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    half = r"\ud800"
    path = file(tmp_path, "v.json", f'{{"input_lens": [1], "output_lens": ["{half}"]}}')
    assert r"got '\\ud800'" in refusal(path)
    path = file(tmp_path, "m.jsonl", MOONCAKE % f'"{half}"' + "\n")
    assert r"column 'output_length': got '\\ud800'" in refusal(path)
    path = file(tmp_path, "1.jsonl", f'{{"input": "{half}", "output": "b", "score": 1, "step": 1}}\n\n')
    assert read_trace(path, tokenizer=len)[0].prompt_tokens.tolist() == [len(half)]
    sample = {"group_index": "\ud800", "response_length": 2, "status": "completed"}
    path = torch_file(tmp_path / "r.pt", pickle.dumps({"rollout_id": 1, "samples": [sample]}, 2))
    assert read_trace(path)[0].prompt_ids == (half,)


def test_benchmark_results_appended_and_empty(tmp_path: Path) -> None:
    empty = '{"input_lens": [], "output_lens": [], "start_times": []}'
    path = file(tmp_path, "v.json", empty)
    assert "no responses" in refusal(path)
    run = '{"input_lens": [1, 2], "output_lens": [3, 4], "errors": ["", "x"]}\n'
    path = file(tmp_path, "v.json", (run + empty) * 5_000)
    trace, report = read_trace(path)
    assert trace.output_tokens.tolist() == [3] * 5_000
    assert report.left_out == {"failed requests": 5_000}


@pytest.mark.parametrize("column", ["output_tokens", "prompt_id", "capped", "arrival_s"])
def test_parquet_of_other_types(tmp_path: Path, column: str) -> None:
    import polars as pl

    path = tmp_path / "t.parquet"
    for values in ([b"\xff\xfe"], pl.Series([5], dtype=pl.Duration("us")), [[1]], [{"a": 1}]):
        pl.DataFrame({"output_tokens": [5]} | {column: values}).write_parquet(path)
        assert refusal(path).startswith(f"{path}: column {column!r}: expected plain values, got ")


def test_damaged_parquet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import polars as pl

    path = tmp_path / "t.parquet"
    pl.DataFrame({"output_tokens": [5, 6], "prompt_id": ["a", "b"]}).write_parquet(path)
    whole = path.read_bytes()
    refused = []
    for at in range(4, len(whole) - 8, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        try:
            read_trace(path)  # may well be readable
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(path) in line and "\n" not in line for line in refused)
    assert capfd.readouterr().err == ""


# Tokenizers


def test_verl_needs_a_tokenizer(tmp_path: Path) -> None:
    path = file(tmp_path, "1.jsonl", '{"input": "a", "output": "b", "score": 1, "step": 1}\n')
    assert "expected a tokenizer" in refusal(path)
    for answer in ("x", -1, 1.5, True, 10**30):
        message = refusal(path, tokenizer=lambda text, answer=answer: answer)
        assert message == f"tokens of a text: expected 0 to 2147483647, got {answer!r}"
    trace, _ = read_trace(path, tokenizer=lambda text: np.int32(7))
    assert trace.output_tokens.tolist() == [7]
    path = file(tmp_path, "2.jsonl", '{"input": null, "output": "b", "score": 1, "step": 1}\n')
    assert "line 1, column 'input': got nothing, expected a text" in refusal(path, tokenizer=len)


def test_load_tokenizer(tmp_path: Path) -> None:
    mine = file(
        tmp_path, "mine.py", "def words(text): return len(text.split())\ndef bad(text): return 1 / 0\n"
    )
    assert load_tokenizer(f"{mine}:words")("a b c") == 3
    with pytest.raises(InputError, match=r"tokenizer .*mine.py:bad: raised ZeroDivisionError"):
        load_tokenizer(f"{mine}:bad")("a")
    with pytest.raises(InputError, match="no function 'other'"):
        load_tokenizer(f"{mine}:other")
    with pytest.raises(InputError, match="no such file"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_tokenizer_json(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path))("a b a c") == 4
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


# Pickles


def torch_file(path: Path, program: bytes, **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("x/data.pkl", program)
        archive.writestr("x/version", "3\n")
    return path


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def deep(levels: int) -> bytes:
    return b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."


HOSTILE = {
    "system": pickle.dumps(Calls(os.system, "touch hacked"), 2),
    "eval": pickle.dumps(Calls(eval, "open('hacked', 'w')"), 2),
    "inside a rollout": pickle.dumps({"samples": [{"reward": Calls(open, "hacked", "w")}]}, 2),
    "protocol 0": pickle.dumps(Calls(os.system, "touch hacked"), 0),
    "protocol 4": pickle.dumps(Calls(os.system, "touch hacked"), 4),
    "getattr": pickle.dumps(Calls(getattr, "x", "upper"), 2),
    "numpy runs strings": b"\x80\x02cnumpy.testing._private.utils\nrunstring\nX\x04\x00\x00\x00hack}\x86R.",
    "torch loads": b"\x80\x02ctorch\nload\nX\x06\x00\x00\x00hacked\x85R.",
    "instruction of old": b"(S'touch hacked'\nios\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "memo of 16 GB": b"\x80\x02]r\xff\xff\xff\x7f0.",
    "bytes of 1 TB": b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00.",
    "text of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "integer of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "empty": b"",
    "stops at once": b".",
    "no end": b"\x80\x02]",
    "not a pickle": b"hello",
    "stack runs out": b"\x80\x02R.",
    "sets items of a list": b"\x80\x02](K\x01K\x02u.",
    "builds a list": b"\x80\x02]}b.",
    "unhashable key": b"\x80\x02}(]K\x02u.",
    "odd items": b"\x80\x02}(K\x02u.",
    "another object": pickle.dumps([1, 2], 2),
    "no samples": pickle.dumps({"rollout_id": 1}, 2),
    "samples of another kind": pickle.dumps({"samples": [1, "x"]}, 2),
    "deep": deep(200_000),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = torch_file(tmp_path / "r.pt", HOSTILE[case])
    assert refusal(path).startswith(f"{path}: ")
    assert not (tmp_path / "hacked").exists()


def test_what_is_refused_is_named(tmp_path: Path) -> None:
    path = torch_file(tmp_path / "r.pt", HOSTILE["system"])
    assert refusal(path) == f"{path}: refused, it names posix.system, which plain data does not need"


def test_self_reference_and_huge_numbers(tmp_path: Path) -> None:
    loop: list[Any] = ["x"]
    loop.append(loop)
    sample = {"group_index": 1, "tokens": [1, 2], "response_length": 2, "status": "completed", "reward": loop}
    path = torch_file(tmp_path / "r.pt", pickle.dumps({"rollout_id": 1, "samples": [sample]}, 2))
    assert read_trace(path)[0].output_tokens.tolist() == [2]
    nameless = {"group_index": None, "response_length": 2, "status": "completed"}
    chats = [[{"role": "user", "content": text}] for text in ("a", "b", "a")]
    samples = [nameless | {"prompt": prompt} for prompt in (*chats, "b", "c")]
    path = torch_file(tmp_path / "r.pt", pickle.dumps({"rollout_id": 1, "samples": samples}, 2))
    assert read_trace(path)[0].prompt.tolist() == [0, 1, 0, 1, 2]
    laughs: list[Any] = ["x"]
    for _ in range(100):
        laughs = [laughs, laughs]
    program = pickle.dumps({"rollout_id": 1, "samples": [nameless | {"prompt": laughs, "reward": laughs}]}, 2)
    assert "column 'group_index': got nothing" in refusal(torch_file(tmp_path / "r.pt", program))
    huge = pickle.dumps({"rollout_id": 1, "samples": [sample | {"response_length": 2**1900}]}, 2)
    assert "response_length" in refusal(torch_file(tmp_path / "r.pt", huge))
    text = pickle.dumps({"rollout_id": 1, "samples": [sample | {"response_length": "many"}]}, 2)
    assert "sample 1, column 'response_length': got 'many'" in refusal(torch_file(tmp_path / "r.pt", text))


def shared_tuples(levels: int) -> bytes:
    """``x = (x, x)`` over and over: as long to hash or to print as 2**levels, and a few bytes a level."""
    steps = (b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(levels))
    return b"X\x01\x00\x00\x00xq\x00" + b"".join(steps)


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02" + shared_tuples(100) + b"}h\x64K\x01s.",
        b"\x80\x04" + shared_tuples(100) + b"h\x64h\x64\x93.",
        b"\x80\x02" + shared_tuples(100) + b"ctorch\nx\nh\x64Rh\x64b.",
        b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",
        b"\x80\x02(" + b"}" * 3_000_000 + b"t.",
    ],
)
def test_shared_and_deep_values_cost_nothing(tmp_path: Path, program: bytes) -> None:
    assert "r.pt: " in refusal(torch_file(tmp_path / "r.pt", program))


@pytest.mark.parametrize(
    "arguments",
    [b"K\x05", b"N", b"}", b")", b"NK\x01\x86", b"(NK\x00N\x85t", b"(NK\x00J\xff\xff\xff\xff\x85t"],
)
def test_tensors_with_other_arguments(tmp_path: Path, arguments: bytes) -> None:
    def text(word: str) -> bytes:
        return b"X" + len(word).to_bytes(4, "little") + word.encode()

    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"
    fields = {
        "group_index": b"K\x01",
        "response_length": b"K\x02",
        "tokens": tensor,
        "status": text("completed"),
    }
    sample = b"}(" + b"".join(text(name) + value for name, value in fields.items()) + b"u"
    program = b"\x80\x02}(" + text("rollout_id") + b"K\x01" + text("samples") + b"]" + sample + b"au."
    trace, _ = read_trace(torch_file(tmp_path / "r.pt", program))
    assert (trace.output_tokens.tolist(), trace.prompt_tokens.tolist()) == ([2], [0])


@pytest.mark.parametrize("length", [0, 1, 3, 999, 1000, 1001, 2500])
@pytest.mark.parametrize("value", [7, 300, 70_000, -5, 2**40, 0.5, None])
def test_lists_are_counted_whatever_their_length(tmp_path: Path, length: int, value: float | None) -> None:
    sample = {"group_index": 1, "tokens": [value] * length, "response_length": 2, "status": "completed"}
    path = torch_file(tmp_path / "r.pt", pickle.dumps({"rollout_id": 1, "samples": [sample]}, 2))
    assert read_trace(path)[0].prompt_tokens.tolist() == [max(0, length - 2)]


def test_zip_bombs_and_other_archives(tmp_path: Path) -> None:
    bomb = torch_file(tmp_path / "r.pt", b"\0" * 10_000_000, compression=zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 20_000
    assert "compressed" in refusal(bomb)
    with zipfile.ZipFile(tmp_path / "z.pt", "w") as archive:
        archive.writestr("a.txt", "hello")
    assert "expected one data.pkl, as torch.save writes it, got 0" in refusal(tmp_path / "z.pt")
    legacy = file(tmp_path, "l.pt", pickle.dumps(0x1950A86A20F9469CFC6C, 2) + HOSTILE["system"])
    assert "unknown format" in refusal(legacy)
    assert "expected a zip archive" in refusal(legacy, format="slime")
    cut = tmp_path / "c.pt"
    cut.write_bytes((Path(__file__).parent / "data" / "slime_7.pt").read_bytes()[:2000])
    assert "expected a zip archive" in refusal(cut)
    damaged = bytearray((Path(__file__).parent / "data" / "slime_7.pt").read_bytes())
    damaged[200:300] = bytes(100)
    cut.write_bytes(damaged)
    assert f"{cut}: " in refusal(cut)


def test_entry_that_lies_about_its_size(tmp_path: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02].")
    raw = data.getvalue().replace((4).to_bytes(4, "little") * 2, (2**31).to_bytes(4, "little") * 2)
    path = file(tmp_path, "r.pt", raw)
    assert f"{path}: " in refusal(path)
