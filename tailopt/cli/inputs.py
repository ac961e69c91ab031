"""From options to what they name: traces and fleets."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tailopt.cli.options import DEFAULT_GPUS, MOST_GPUS

if TYPE_CHECKING:
    from tailopt.plan import Fleet
    from tailopt.trace import Trace


def read_traces(
    specs: Sequence[str], format_: str | None, cap: int | None, skip_bad: bool, tokenizer: str | None
) -> tuple["Trace", list[str]]:
    """The trace that the specs name, and what there is to say about reading it."""
    from tailopt.errors import InputError, one_line
    from tailopt.trace.reading import ReadReport, read_trace, resolve_trace
    from tailopt.trace.rows import MOST_TOKENS
    from tailopt.trace.tokenizer import load_tokenizer

    if cap is not None:
        check_range("--cap", cap, 1, MOST_TOKENS)
    count = None if tokenizer is None else load_tokenizer(tokenizer)
    report: ReadReport | None
    if len(specs) > 1:
        rollouts, report = read_trace(specs, format=format_, cap=cap, skip_bad=skip_bad, tokenizer=count)
    else:
        rollouts, report = resolve_trace(
            specs[0], format=format_, cap=cap, skip_bad=skip_bad, tokenizer=count
        )
    if report is None:
        if format_ is not None:
            raise InputError(f"--format {format_}: trace {rollouts.name!r} is bundled, expected no format")
        return rollouts, _about_cap(rollouts, cap)
    first = [f"first bad row: {one_line(report.first_skipped)}"] if report.first_skipped else []
    return rollouts, [str(report), *first, *_about_cap(rollouts, cap)]


def _about_cap(rollouts: "Trace", cap: int | None) -> list[str]:
    """What --cap flagged, if that was nothing, or if it can hardly have been the cap of the run."""
    if cap is None:
        return []
    flagged, longer = int((rollouts.output_tokens >= cap).sum()), int((rollouts.output_tokens > cap).sum())
    if not flagged:
        return [f"--cap {cap}: no response is that long"]
    if longer <= 0.01 * flagged:
        return []
    return [
        f"--cap {cap}: {longer} of the {flagged} responses flagged as censored are longer than the cap; "
        "none is cut, --truncate does that"
    ]


def check_range(option: str, value: int, least: int, most: int | None = None) -> None:
    """Refuse a number outside ``least..most``, in the name of its option."""
    from tailopt.errors import InputError

    if value < least:
        raise InputError(f"{option}: expected at least {least}, got {value}")
    if most is not None and value > most:
        raise InputError(f"{option}: expected at most {most}, got {value}")


def transformed(rollouts: "Trace", truncate: int | None, tail: float | None) -> "Trace":
    """The trace cut, then reshaped, where the options say so."""
    from tailopt.errors import InputError
    from tailopt.trace import transforms
    from tailopt.trace.rows import MOST_TOKENS

    if truncate is not None:
        check_range("--truncate", truncate, 1, MOST_TOKENS)
        rollouts = transforms.truncate(rollouts, truncate)
    if tail is not None:
        try:
            rollouts = transforms.reshape_tail(rollouts, tail)
        except InputError as error:
            raise InputError(f"--tail {tail:g}: {error}") from None
    return rollouts


def fleet_of(engine: str, shape: str | None, gpus: int | None) -> "Fleet":
    """The fleet that the options describe: by default as many of the smallest engines as the GPUs hold."""
    from tailopt.engine.catalogue import load_engine
    from tailopt.errors import InputError
    from tailopt.plan import Fleet

    if gpus is not None:
        check_range("--gpus", gpus, 1, MOST_GPUS)
    profile = load_engine(engine)
    if shape is not None:
        try:
            return Fleet.of(profile, shape, gpus)
        except InputError as error:
            options = "--shape" if gpus is None else f"--shape {shape} --gpus {gpus}"
            raise InputError(f"{options}: {error}") from None
    gpus, smallest = gpus or DEFAULT_GPUS, min(profile.shapes)
    if gpus < smallest:
        raise InputError(
            f"--gpus: engine {profile.name!r} needs at least {smallest} GPUs (TP{smallest}), got {gpus}"
        )
    return Fleet.of(profile, f"{gpus // smallest}xTP{smallest}", gpus)


def check_target(out: Path, sources: Sequence[str], force: bool) -> None:
    """Refuse a folder that is not there, to write over what is read, or, unless told to, over anything."""
    from tailopt.errors import InputError
    from tailopt.files import is_file, is_folder

    if not is_folder(out.parent):
        raise InputError(f"{out}: cannot be written (there is no folder {out.parent})")
    if not is_file(out):
        return
    for source in map(Path, sources):
        if (is_file(source) and source.samefile(out)) or (is_folder(source) and source.samefile(out.parent)):
            raise InputError(f"{out}: is also read, expected another file to write")
    if not force:
        raise InputError(f"{out}: exists, expected a new file, or --force to overwrite it")
