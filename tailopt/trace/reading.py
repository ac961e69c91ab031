"""Reading and writing traces: files and folders of any known format, and bundled traces by name."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailopt.errors import InputError
from tailopt.files import is_file, is_folder
from tailopt.spec import unknown
from tailopt.trace.assembly import check_rows, renumbered, trace_of
from tailopt.trace.catalogue import is_bundled, load_bundled
from tailopt.trace.format import Format, Tokenizer
from tailopt.trace.formats import FORMATS
from tailopt.trace.rows import Rows, check
from tailopt.trace.tokenizer import counted
from tailopt.trace.trace import Trace

if TYPE_CHECKING:
    import polars as pl

_START_BYTES = 4 * 2**20
_SUFFIXES = (".csv", ".json", ".jsonl", ".parquet", ".pt")


@dataclass(frozen=True)
class ReadReport:
    """What reading files took, and what it left.

    Attributes:
        format: name of the format.
        files: how many.
        responses: rows that are in the trace.
        skipped: bad rows that were skipped, by what was wrong with them.
        left_out: rows that are no responses (failed requests, aborted samples), by what they are.
        first_skipped: the message of the first bad row, empty if there was none.
    """

    format: str
    files: int
    responses: int
    skipped: Mapping[str, int]
    left_out: Mapping[str, int]
    first_skipped: str = ""

    def __str__(self) -> str:
        counts = [f"{count} {reason}" for reason, count in self.left_out.items()]
        counts += [f"{count} bad ({reason})" for reason, count in self.skipped.items()]
        rest = f"; without {', '.join(counts)}" if counts else ""
        files = "1 file" if self.files == 1 else f"{self.files} files"
        return f"{self.responses} responses from {files} of format {self.format}{rest}"


def read_trace(
    paths: str | Path | Sequence[str | Path],
    *,
    format: str | None = None,
    cap: int | None = None,
    skip_bad: bool = False,
    tokenizer: Tokenizer | None = None,
    name: str | None = None,
) -> tuple[Trace, ReadReport]:
    """Read a trace from a file, several files, or the files of a folder, all of one format.

    A group (the samples of one prompt at one training step) must lie in one file. In formats that know no
    prompts, each row is a prompt of its own. Arrival times of server logs are counted from the first request.

    Args:
        paths: what to read; of a folder, all files but hidden ones, ordered by the numbers in their names.
        format: a key of ``FORMATS``; None finds it out from the content of each file.
        cap: the length cap of the run in tokens. Responses of that length or more are flagged as capped,
            beside those that the file itself flags; lengths stay as they are
            (:func:`tailopt.trace.transforms.truncate` cuts).
        skip_bad: leave bad rows out and count them, instead of refusing the file.
        tokenizer: number of tokens of a text, for formats that hold texts.
        name: what to call the trace; None takes what the file says, else the first file's or folder's name.

    Raises:
        InputError: if there is nothing to read, a format is unknown, or a row is bad; the line names the
            file, the row, the column, the value and what was expected.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "mine.csv"
    ...     _ = file.write_text("prompt_id,output_tokens\\nq1,30\\nq1,50\\nq2,oops\\n")
    ...     trace, report = read_trace(file, skip_bad=True, cap=50)
    >>> trace.output_tokens, trace.capped
    (array([30, 50]), array([False,  True]))
    >>> print(report)  # doctest: +ELLIPSIS
    2 responses from 1 file of format csv; without 1 bad (output_tokens: expected a whole number ...)
    """
    import polars as pl

    if cap is not None and cap < 1:
        raise InputError(f"cap: expected at least 1 token, got {cap}")
    given = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    files = [file for path in given for file in _files(path)]
    if not files:
        raise InputError("trace: expected at least one file")
    known = _format(files, format)
    tables, skipped, left_out = [], Counter[str](), Counter[str]()
    abouts: list[Mapping[str, str]] = []
    first_skipped = ""
    for number, file in enumerate(files):
        for rows in _rows(known, file, tokenizer and counted(tokenizer)):
            good, bad, failed = check(rows)
            bad = sorted([*rows.bad, *bad], key=lambda one: one.row)
            if bad and not skip_bad:
                raise InputError(bad[0].message(str(file), known.unit))
            if bad and not first_skipped:
                first_skipped = bad[0].message(str(file), known.unit)
            skipped.update(one.reason for one in bad)
            left_out.update(failed)
            tables.append(good.with_columns(file=pl.lit(number)))
            abouts.append(rows.about)
    table = _concat(tables, files)
    if not len(table):
        counts = f" ({skipped.total()} bad, {left_out.total()} left out)" if skipped or left_out else ""
        raise InputError(f"{given[0]}: no responses{counts}, expected at least one")
    if len(files) > 1:
        table = _joined(table, files)
    if cap is not None:
        long = pl.col("output_tokens") >= cap
        table = table.with_columns(capped=long | pl.col("capped") if "capped" in table.columns else long)
    if not known.keeps_arrivals and "arrival_s" in table.columns:
        table = table.with_columns(pl.col("arrival_s") - pl.col("arrival_s").min())
    if skipped and "prompt" in table.columns:
        table = renumbered(table)
    check_rows(table, files, known.unit)
    trace = trace_of(table, _about(abouts, known, given, name))
    report = ReadReport(known.name, len(files), len(table), dict(skipped), dict(left_out), first_skipped)
    return trace, report


def write_trace(trace: Trace, path: str | Path, format: str | None = None) -> None:
    """Write a trace in tailopt's own schema, whole or not at all; reading it back gives an equal trace.

    Args:
        trace: what to write.
        path: where; the suffix says the format unless ``format`` does.
        format: ``"parquet"`` or ``"csv"``.

    Raises:
        InputError: if the format is unknown or cannot be written, or the file cannot.

    >>> import tempfile
    >>> trace = Trace.of([[30, 50], [7, 9]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_trace(trace, Path(folder) / "mine.parquet")
    ...     again, _ = read_trace(Path(folder) / "mine.parquet")
    >>> again.sha256 == trace.sha256
    True
    """
    path = Path(path)
    writable = {known.name: known for known in FORMATS.values() if known.write}
    if format is None:
        found = [known for known in writable.values() if known.suffix == path.suffix.lower()]
        if not found:
            suffixes = ", ".join(known.suffix for known in writable.values())
            raise InputError(
                f"{path}: cannot tell the format to write, expected a name that ends in {suffixes}"
            )
        chosen = found[0]
    elif format in writable:
        chosen = writable[format]
    else:
        raise InputError(unknown("format to write", format, writable))
    assert chosen.write is not None
    chosen.write(trace, path)


def resolve_trace(
    spec: str,
    *,
    format: str | None = None,
    cap: int | None = None,
    skip_bad: bool = False,
    tokenizer: Tokenizer | None = None,
) -> tuple[Trace, ReadReport | None]:
    """The trace that a spec names: a file or folder, with the report of reading it, or a bundled trace.

    What has a slash or the suffix of a trace file in its name is a path; so is any other name that no bundled
    trace has, if there is such a file or folder. The options are those of :func:`read_trace`; of a bundled
    trace, ``cap`` alone makes sense.

    Raises:
        InputError: as :func:`read_trace`; or if there is no bundled trace of this name.

    >>> trace, report = resolve_trace("gpqa-deepseek-reasoner")
    >>> trace.n_requests, report
    (1578, None)
    """
    path = Path(spec)
    a_path = any(mark in spec for mark in ("/", os.sep)) or path.suffix in _SUFFIXES
    if a_path or (not is_bundled(spec) and (is_file(path) or is_folder(path))):
        return read_trace(path, format=format, cap=cap, skip_bad=skip_bad, tokenizer=tokenizer)
    trace = load_bundled(spec)
    if cap is None:
        return trace, None
    return replace(trace, capped=trace.capped | (trace.output_tokens >= cap)), None


def _files(path: Path) -> list[Path]:
    """The file, or the files of a folder in the order of the numbers in their names."""
    if is_file(path):
        return [path]
    if not is_folder(path):
        raise InputError(f"{path}: no such file or folder")
    try:
        files = [file for file in path.iterdir() if is_file(file) and not file.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not files:
        raise InputError(f"{path}: an empty folder, expected trace files")
    return sorted(
        files, key=lambda file: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", file.name)]
    )


def _format(files: Sequence[Path], name: str | None) -> Format:
    """The named format, or the one that all files are of."""
    if name is not None:
        if name not in FORMATS:
            raise InputError(unknown("format", name, FORMATS))
        return FORMATS[name]
    first, *others = (_detected(file) for file in files)
    for file, other in zip(files[1:], others, strict=True):
        if other is not first:
            raise InputError(f"{file}: of format {other.name}, expected {first.name} like {files[0].name}")
    return first


def _detected(file: Path) -> Format:
    try:
        with file.open("rb") as opened:
            start = opened.read(_START_BYTES)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None
    if not start.strip():
        raise InputError(f"{file}: empty, expected a trace")
    found = next((known for known in FORMATS.values() if known.detect(start)), None)
    if found is None:
        raise InputError(f"{file}: unknown format; known: {', '.join(FORMATS)}")
    return found


def _rows(known: Format, file: Path, tokenizer: Tokenizer | None) -> Iterator[Rows]:
    try:
        yield from known.read(file, tokenizer)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error})") from None


def _concat(tables: Sequence["pl.DataFrame"], files: Sequence[Path]) -> "pl.DataFrame":
    import polars as pl

    if not tables:
        return pl.DataFrame()
    for table in tables:
        differing = set(table.columns) ^ set(tables[0].columns)
        if differing:
            file = files[table["file"].item(0)] if len(table) else files[-1]
            raise InputError(f"{file}: {min(differing)} is in some rows only, expected it in all or none")
    return pl.concat(tables)


def _joined(table: "pl.DataFrame", files: Sequence[Path]) -> "pl.DataFrame":
    """Prompts are told apart by name once there are several files; no group may be split over two of them."""
    import polars as pl

    if "prompt" in table.columns:
        names = pl.col("prompt_id" if "prompt_id" in table.columns else "prompt").cast(pl.String)
        table = table.with_columns(prompt_id=names).drop("prompt")
    if "prompt_id" not in table.columns:
        return table
    group = [column for column in ("step", "prompt_id") if column in table.columns]
    ends = table.group_by(group, maintain_order=True).agg(a=pl.min("file"), b=pl.max("file"))
    for split in ends.filter(pl.col("a") != pl.col("b")).head(1).iter_rows(named=True):
        step = f" at step {split['step']}" if "step" in split else ""
        a, b = files[split["a"]], files[split["b"]]
        places = f"{a.name} and {b.name}" if a.name != b.name else f"{a} and {b}"
        raise InputError(f"prompt {split['prompt_id']!r}{step} is split over {places}, expected in one file")
    return table


def _about(
    abouts: Sequence[Mapping[str, str]], known: Format, given: Sequence[Path], name: str | None
) -> dict[str, str]:
    """Name, source, licence, synthetic: what all files say alike, or else what can be said."""
    said = {key: {about[key] for about in abouts if key in about} for key in ("name", "source", "licence")}
    places = [path.resolve() for path in given]
    default = places[0].name if places[0].is_dir() else places[0].stem
    names = said["name"] if len(said["name"]) == 1 else {default}
    sources = said["source"] or {f"{known.title}, {', '.join(path.name for path in places)}"}
    return {
        "name": min(names) if name is None else name,
        "source": "; ".join(sorted(sources)),
        "licence": "; ".join(sorted(said["licence"])),
        "synthetic": "true" if any(about.get("synthetic") == "true" for about in abouts) else "false",
    }
