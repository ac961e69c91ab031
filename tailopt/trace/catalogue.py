"""The bundled traces: real rollouts and serving logs that come with tailopt, found by name.

``tailopt/data/traces.toml`` lists them with source, licence and caveats; ``scripts/bundle_traces.py`` wrote
it and the Parquet files beside it. One file holds the runs of one source, told apart by the column ``run``.
"""

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from tailopt.errors import InputError
from tailopt.trace.assembly import trace_of
from tailopt.trace.trace import Trace

DEFAULT_TRACE = "gpqa-deepseek-reasoner"


@dataclass(frozen=True)
class BundledTrace:
    """One entry of the catalogue.

    Attributes:
        name: what to load it by.
        title: one line for people.
        dataset, model: what was asked, and who answered.
        file: Parquet file that holds it; its rows are those whose column ``run`` is ``run``.
        run: see ``file``.
        responses, prompts: how many.
        p50, p90, max: of the output tokens.
        source, commit: where the lengths come from.
        licence: licence of the data.
        attribution: whom to credit.
        caveats: what to know before trusting it.
        synthetic: True if the lengths were drawn from published distributions.
    """

    name: str
    title: str
    dataset: str
    model: str
    file: str
    run: str
    responses: int
    prompts: int
    p50: float
    p90: float
    max: int
    source: str
    commit: str
    licence: str
    attribution: str
    caveats: str
    synthetic: bool


@cache
def bundled_traces() -> tuple[BundledTrace, ...]:
    """Every bundled trace.

    >>> next(entry for entry in bundled_traces() if entry.name == DEFAULT_TRACE).responses
    1578
    """
    catalogue = tomllib.loads((resources.files("tailopt") / "data" / "traces.toml").read_text("utf-8"))
    return tuple(
        BundledTrace(name=name, **(catalogue["source"][entry["from"]] | _without(entry, "from")))
        for name, entry in catalogue["trace"].items()
    )


def is_bundled(name: str) -> bool:
    """Whether there is a bundled trace of this name.

    >>> is_bundled(DEFAULT_TRACE), is_bundled("rollouts.csv")
    (True, False)
    """
    return any(entry.name == name for entry in bundled_traces())


def load_bundled(name: str = DEFAULT_TRACE) -> Trace:
    """A bundled trace by name.

    Raises:
        InputError: if there is none of this name; the message lists close ones.

    >>> trace = load_bundled("gpqa-deepseek-reasoner")
    >>> trace.n_prompts, trace.n_requests, trace.licence
    (198, 1578, 'CC BY 4.0')
    """
    entry = next((entry for entry in bundled_traces() if entry.name == name), None)
    if entry is None:
        raise InputError(f"trace {name!r}: unknown{_close(name, [e.name for e in bundled_traces()])}")
    return _load(entry)


@cache
def _load(entry: BundledTrace) -> Trace:
    import polars as pl

    with (resources.files("tailopt") / "data" / entry.file).open("rb") as file:
        rows = pl.read_parquet(file).filter(pl.col("run") == entry.run)
    return trace_of(
        rows,
        {
            "name": entry.name,
            "source": f"{entry.source}, commit {entry.commit}",
            "licence": entry.licence,
            "synthetic": str(entry.synthetic).lower(),
        },
    )


def _without(entry: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in entry.items() if name != key}


def _close(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    close += [other for other in known if name.lower() in other and other not in close][: 5 - len(close)]
    return f"; did you mean {', '.join(close)}?" if close else "; `tailopt traces` lists the bundled ones"
