"""Tokenizers for formats that hold texts: any Python function from a text to its number of tokens."""

from pathlib import Path

from tailopt.errors import InputError
from tailopt.spec import Spec, parse
from tailopt.trace.format import Tokenizer


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
    if path.is_dir():
        path /= "tokenizer.json"
    if path.suffix == ".json":
        return _tokenizer_json(path)
    if ".py" not in spec:
        raise InputError(f"tokenizer {spec!r}: expected FILE.py:FUNCTION or a tokenizer.json")
    function: Spec[int] = parse("tokenizer", spec, {})
    return lambda text: function.call("tokenizer", text)


def counted(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with its answers checked: InputError unless it says a whole number, from 0 on."""

    def count(text: str) -> int:
        tokens = tokenizer(text)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise InputError(f"tokenizer: expected a number of tokens, got {tokens!r:.60}")
        return tokens

    return count


def _tokenizer_json(path: Path) -> Tokenizer:
    if not path.is_file():
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
