"""Specs: how policies and predictors are named on the command line and in :func:`tailopt.compare.compare`.

=========================  ======================================================================
``NAME``                   a known function with its defaults: ``lpt``
``NAME(arg=value, ...)``   with options: ``top_k(k=4, tail_engines=2)``
``FILE.py:FUNCTION``       a function of your own file, options as above: ``mine.py:rule(alpha=0.5)``
=========================  ======================================================================

Options are the function's keyword-only parameters; their values are Python literals, never code. A user's
file runs in this process: what it raises is caught, but nothing can catch ``os._exit`` or a crash in C code.
"""

import ast
import difflib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from tailopt.errors import InputError, one_line
from tailopt.files import is_file

_SPEC = re.compile(r"(?:(?P<file>.+\.py):)?(?P<name>[^():]+?)\s*(?:\((?P<options>.*)\))?", re.DOTALL)

T = TypeVar("T")
R = TypeVar("R")

_LONGEST = 10_000
"""Characters of a spec."""


@dataclass(frozen=True)
class Spec(Generic[T]):
    """A function and its options, as a spec names them.

    Attributes:
        text: the spec as given; it names the function in tables and in errors.
        function: what it names.
        options: keyword arguments for it.
        file: the user's file, or None for a function of tailopt.
    """

    text: str
    function: Callable[..., T]
    options: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None

    def call(self, what: str, *arguments: Any, read: Callable[[Any], R]) -> R:
        """Call the function and read its answer; what goes wrong in a user's file is one InputError line.

        ``read`` turns the answer into what is expected, or raises InputError. It runs under the same guard as
        the function, because looking at a user's object may run the user's code.
        """

        def answer() -> R:
            found: Any = self.function(*arguments, **self.options)
            if inspect.iscoroutine(found):
                found.close()
                raise InputError("is an async function, expected a plain one")
            return read(found)

        return _guarded(f"{what} {self.text}", self.file, answer)

    def mark(self, what: str, name: str) -> object:
        """An attribute of the function, None if it has none of this name."""
        return _guarded(f"{what} {self.text}", self.file, lambda: getattr(self.function, name, None))


def parse(what: str, text: str, known: Mapping[str, Callable[..., T]]) -> Spec[T]:
    """The function and options that a spec names.

    Args:
        what: the kind of thing, for errors (``"policy"``).
        text: the spec.
        known: functions by name.

    Raises:
        InputError: if the spec is malformed, names nothing known, its file cannot be loaded or has no such
            function, or an option is unknown or of the wrong type.

    >>> def scale(x, *, by: int = 2): return x * by
    >>> parse("function", "scale(by=3)", {"scale": scale}).call("function", 14, read=int)
    42
    >>> parse("function", "scale(bye=3)", {"scale": scale})
    Traceback (most recent call last):
        ...
    tailopt.errors.InputError: function scale(bye=3): has no option 'bye'; options: by
    """
    match = _SPEC.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise InputError(f"{what} {text!r}: expected NAME, NAME(arg=value) or FILE.py:FUNCTION")
    text, name = match[0], match["name"]
    if match["file"]:
        file = Path(match["file"])
        function = _load(what, text, file, name)
    elif name in known:
        file, function = None, known[name]
    elif name.endswith(".py"):
        raise InputError(f"{what} {text}: names no function, expected {name}:FUNCTION")
    else:
        raise InputError(unknown(what, name, known))
    where, options = f"{what} {text}", _values(f"{what} {text}", match["options"] or "")
    takes, types = _guarded(where, file, lambda: (parameters(function), _hints(function)))
    _check_options(where, options, takes, types)
    return Spec(text, function, options, file)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The error line for a name that is not known, with the closest known names first.

    >>> unknown("policy", "ltp", ["lpt", "uniform"])
    "policy 'ltp': unknown; did you mean lpt? known: lpt, uniform"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{what} {name!r}: unknown; {hint}known: {', '.join(names)}"


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The options that a function takes: its keyword-only parameters."""
    try:
        found = inspect.signature(function).parameters
    except (ValueError, TypeError):  # some functions written in C have none
        return {}
    return {name: one for name, one in found.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}


def _values(where: str, text: str) -> dict[str, Any]:
    """The options that a text gives, read as Python literals."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        names = [word.arg for word in call.keywords]
        if None in names or len(set(names)) < len(names):
            raise ValueError
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise InputError(f"{where}: expected options as name=value with plain values") from None


def _check_options(
    where: str,
    options: Mapping[str, Any],
    takes: Mapping[str, inspect.Parameter],
    types: Mapping[str, Any],
) -> None:
    for name, value in options.items():
        if name not in takes:
            raise InputError(f"{where}: has no option {name!r}; options: {', '.join(takes) or 'none'}")
        if not _is_a(value, types.get(name, Any)):
            raise InputError(f"{where}: {name}: expected {_type_text(types[name])}, got {value!r}")
    for name, parameter in takes.items():
        if parameter.default is parameter.empty and name not in options:
            raise InputError(f"{where}: needs option {name!r}")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The type hints that can be evaluated: none if one names what is imported for type checkers only."""
    try:
        return get_type_hints(function)
    except Exception:  # whatever a user's annotation raises, it only costs the check
        return {}


def _is_a(value: object, hint: Any) -> bool:
    """Whether a value fits a plain type hint; hints that are not plain types are not checked."""
    allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if not set(allowed) <= {int, float, str, bool, NoneType}:
        return True
    return type(value) in allowed or (type(value) is int and float in allowed)


def _type_text(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}
    return " or ".join(words[one] for one in (get_args(hint) or (hint,)))


def _load(what: str, text: str, file: Path, name: str) -> Callable[..., Any]:
    where = f"{what} {text}"
    if not is_file(file):
        raise InputError(f"{where}: file {file} does not exist")
    module = _guarded(f"{where}: {file} cannot be loaded", file, lambda: _execute(file), raised="")
    function = _guarded(where, file, lambda: getattr(module, name, None))
    if not callable(function):
        own = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
        found = [one.__name__ for one in own if inspect.isfunction(one)]
        known = f"; it has {', '.join(found)}" if found else ""
        raise InputError(f"{where}: {file} has no function {name!r}{known}")
    return function  # type: ignore[no-any-return]


def _execute(file: Path) -> ModuleType:
    """Run the user's file as a module of its own; files beside it can be imported, as in a script."""
    module_name = f"tailopt_user_{file.stem}"
    source = importlib.util.spec_from_file_location(module_name, file)
    assert source is not None
    assert source.loader is not None  # both are there for any name that ends in .py
    module = importlib.util.module_from_spec(source)
    sys.modules[module_name] = module  # where dataclasses and pickle look a class up
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        source.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _guarded(where: str, file: Path | None, action: Callable[[], R], raised: str = "raised ") -> R:
    """What the action answers; whatever a user's code raises in it, but Ctrl-C, is one InputError line."""
    try:
        return action()
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, GeneratorExit and classes of the user's own among them
        if file is None:
            raise
        raise InputError(f"{where}: {raised}{_raised(error, file)}") from error


def _raised(error: BaseException, file: Path) -> str:
    """Type, message and line of an exception, in one line; the line is the innermost in the user's file."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    try:
        message = one_line(str(error))
    except BaseException:  # its own __str__ raises
        message = "(its message cannot be read)"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file.resolve()]
    where = f" (line {inside[-1]})" if inside else ""
    return f"{type(error).__name__}: {message}{where}"
