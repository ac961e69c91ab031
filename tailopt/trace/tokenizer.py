"""Tokenizers for formats that hold texts: any Python function from a text to its number of tokens."""

from numbers import Integral
from pathlib import Path
from typing import Any

from tailopt.errors import InputError
from tailopt.files import is_file
from tailopt.spec import Spec, parse
from tailopt.trace.format import Tokenizer
from tailopt.trace.rows import MOST_TOKENS


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that a spec names.

    ``FILE.py:FUNCTION`` is a function of your own, ``(text) -> number of tokens``. A path to a
    ``tokenizer.json`` (or a folder with one) is loaded with the package ``tokenizers``; special tokens are
    not added.

    Raises:
        InputError: if the file is not there or not a tokenizer, or the package is not installed.

    >>> load_tokenizer("words.txt")
    Traceback (most recent call last):
        ...
    tailopt.errors.InputError: tokenizer 'words.txt': expected FILE.py:FUNCTION or a tokenizer.json
    """
    path = Path(spec)
    if is_file(path / "tokenizer.json"):
        path /= "tokenizer.json"
    if path.suffix == ".json":
        return _tokenizer_json(path)
    if ".py" not in spec:
        raise InputError(f"tokenizer {spec!r}: expected FILE.py:FUNCTION or a tokenizer.json")
    function: Spec[int] = parse("tokenizer", spec, {})
    return lambda text: function.call("tokenizer", text, read=_tokens)


def counted(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with its answers checked: InputError unless it says a whole number of tokens."""
    return lambda text: _tokens(tokenizer(text))


def _tokens(answer: Any) -> int:
    """A count of any integral type, NumPy's among them, as an int."""
    whole = isinstance(answer, Integral) and not isinstance(answer, bool)
    if not whole or not 0 <= int(answer) <= MOST_TOKENS:
        raise InputError(f"tokens of a text: expected 0 to {MOST_TOKENS}, got {answer!r:.60}")
    return int(answer)


def _tokenizer_json(path: Path) -> Tokenizer:
    if not is_file(path):
        raise InputError(f"tokenizer {str(path)!r}: no such file")
    try:
        from tokenizers import Tokenizer as Loaded
    except ModuleNotFoundError:
        raise InputError(
            f"tokenizer {str(path)!r}: needs the package tokenizers (pip install 'tailopt[tokenizers]')"
        ) from None
    try:
        loaded = Loaded.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise InputError(f"tokenizer {str(path)!r}: not a tokenizer.json ({error})") from None
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)
