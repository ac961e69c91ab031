"""The catalogue of engines: TOML files on one side, :class:`EngineProfile` on the other.

An engine is named either by a bundled profile (``h100-llama-3.1-8b``) or by the path of a TOML file::

    name = "my-engine"
    hardware = "H100 SXM 80 GB"
    model = "org/model"
    precision = "bf16"
    engine = "vLLM"
    engine_version = "0.12.0"
    date = "2026-01-31"
    licence = "CC0-1.0"
    sources = ["measured by me"]
    kv_bytes_per_token = 131072

    [[shape]]
    tp = 1
    prefill_tokens_per_s = 40000
    kv_capacity_tokens = 400000
    max_running = 256
    fit = "least squares over 40 runs, n = 1 to 128, median residual 1 %"
    step_time = { kind = "affine", a_s = 6e-3, b_s = 1e-4, c_s = 5e-8 }

Times are seconds and rates per second, as everywhere in tailopt, so a number is written as it is held and a
profile read back equals the one written. The kinds of step time are ``affine`` (a_s, b_s, c_s), ``power``
(a_s, b_s, p, c_s), ``max_affine`` (pieces = [[a_s, b_s, c_s], ...]) and ``table`` (running, seconds, c_s,
padded). The schema is checked in :mod:`tailopt.engine.schema`, loaded only when a file is read or written.
"""

import os
import re
import tomllib
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from tailopt.engine.profile import EngineProfile
from tailopt.errors import InputError
from tailopt.files import whole_file

MOST_BYTES = 1_000_000
"""Of an engine file."""

_MOST_PARTS = 20
_NESTED_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}""", re.ASCII
)
"""``a.b.c``, which takes the TOML parser time and memory that grow with the square of the depth."""


def bundled_engines() -> tuple[str, ...]:
    """Names of the profiles that come with tailopt, sorted.

    >>> "h100-llama-3.1-8b" in bundled_engines()
    True
    """
    files = resources.files("tailopt.engine").joinpath("profiles").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_engine(spec: str) -> EngineProfile:
    """The engine that ``spec`` names: a bundled profile, or a TOML file (a path with a slash or ``.toml``).

    Raises:
        InputError: unknown name (with the nearest names and the whole list), or as :func:`read_profile`.

    >>> load_engine("h100-llama-3.1-8b").shape(1).tp
    1
    """
    bundled = bundled_engines()
    if spec in bundled:
        file = resources.files("tailopt.engine").joinpath("profiles", f"{spec}.toml")
        return _parse(file.read_text(encoding="utf-8"), f"{spec}.toml")
    if spec.endswith(".toml") or "/" in spec or os.sep in spec:
        return read_profile(spec)
    near = get_close_matches(spec.lower(), bundled, n=3, cutoff=0.5)
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    known = ", ".join(bundled)
    raise InputError(f"engine {spec!r}: unknown{meant}; known: {known}, or the path of a .toml file")


def read_profile(path: str | Path) -> EngineProfile:
    """Read an engine profile from a TOML file.

    Raises:
        InputError: one line with the file, the key, the value and what was expected; also if the file is
            missing, is not text, or is not TOML.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected a TOML text file in UTF-8") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(raw) > MOST_BYTES:
        raise InputError(f"{path}: larger than {MOST_BYTES} bytes, expected an engine profile")
    return _parse(text, str(path))


def write_profile(profile: EngineProfile, path: str | Path) -> None:
    """Write ``profile`` as TOML, whole or not at all; :func:`read_profile` gives an equal one back.

    Raises:
        InputError: if the profile could not be read back (a date that is no date, an unknown kind of step
            time), or the file cannot be written.

    >>> import tempfile
    >>> profile = load_engine("h100-llama-3.1-8b")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_profile(profile, f"{folder}/copy.toml")
    ...     read_profile(f"{folder}/copy.toml") == profile
    True
    """
    from tailopt.engine.schema import to_toml

    text = to_toml(profile)
    if _parse(text, f"engine {profile.name!r}") != profile:
        raise InputError(f"engine {profile.name!r}: its step times would not read back equal; use numbers")
    with whole_file(path) as temporary:
        try:
            temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def _parse(text: str, where: str) -> EngineProfile:
    from tailopt.engine.schema import to_profile

    if _NESTED_KEY.search(text):
        raise InputError(f"{where}: a key of more than {_MOST_PARTS} parts, expected an engine profile")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also numbers of thousands of digits
        raise InputError(f"{where}: not TOML: {error}") from None
    return to_profile(data, where)
