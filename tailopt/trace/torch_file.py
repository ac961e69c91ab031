"""What ``torch.save`` wrote, read without torch and without running any of its code.

The file is a zip archive with a pickle in it, and a pickle is a program. The standard library disassembles
it (:func:`pickletools.genops`, which runs nothing), and the few instructions that build plain data are
carried out here. There is no instruction that imports or calls: where a pickle would do so, a name that
tensors, arrays and the like are made of leaves an inert :class:`Made`, and any other name is refused, as is
every other instruction. The archive must be uncompressed, as ``torch.save`` writes it, so that nothing in
it is larger than the file. Numbers in lists (token ids, log-probabilities) are counted and dropped as they
come.
"""

import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.errors import InputError

_MODULES = ("torch", "numpy", "slime")
_NAMES = {
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    *((module, name) for module in ("builtins", "__builtin__") for name in ("set", "frozenset", "bytearray")),
}
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING",
    "BINSTRING", "SHORT_BINBYTES", "BINBYTES",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names."""

    module: str
    name: str


@dataclass
class Made:
    """What the pickle would have called or built: a name with its arguments and state, never carried out."""

    name: Name
    arguments: Any
    state: Any = None


class Items(list[Any]):
    """A list of a pickle without its numbers; ``length`` counts them too."""

    length = 0

    def take(self, items: list[Any]) -> None:
        """Append the items that are no numbers, count all."""
        self.length += len(items)
        self.extend(item for item in items if type(item) is not int and type(item) is not float)


class _Refused(Exception):
    """The pickle does what plain data does not need."""


def load(path: Path) -> Any:
    """The object in a file of ``torch.save``: plain data, :class:`Items` for lists, :class:`Made` for others.

    Raises:
        InputError: if the file is no such archive, or its pickle is broken or builds more than plain data.
    """
    program = _program(path)
    try:
        return _run(program)
    except _Refused as refused:
        raise InputError(f"{path}: refused, {refused}") from None
    except (ValueError, IndexError, KeyError, TypeError, MemoryError) as error:
        raise InputError(f"{path}: broken pickle ({type(error).__name__}: {error})") from None


def _program(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [info for info in archive.infolist() if info.filename.split("/")[1:] == ["data.pkl"]]
            if len(entries) != 1:
                raise InputError(
                    f"{path}: expected one data.pkl, as torch.save writes it, got {len(entries)}"
                )
            if entries[0].compress_type != zipfile.ZIP_STORED:
                raise InputError(f"{path}: compressed, expected an archive as torch.save writes it")
            return archive.read(entries[0])
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"{path}: expected a zip archive as torch.save writes it ({error})") from None


def _run(program: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(program):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            items = stack[-_TUPLES[name] :]
            del stack[-_TUPLES[name] :]
            stack.append(tuple(items))
        else:
            match name:
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "MARK":
                    marks.append(len(stack))
                case "EMPTY_LIST":
                    stack.append(Items())
                case "EMPTY_DICT":
                    stack.append({})
                case "TUPLE":
                    stack.append(tuple(since_mark()))
                case "APPENDS":
                    items = since_mark()
                    _list(stack).take(items)
                case "APPEND":
                    item = stack.pop()
                    _list(stack).take([item])
                case "SETITEMS":
                    items = since_mark()
                    _dict(stack).update(zip(items[::2], items[1::2], strict=True))
                case "SETITEM":
                    value, key = stack.pop(), stack.pop()
                    _dict(stack)[key] = value
                case "GLOBAL":
                    stack.append(_named(*argument.split(" ", 1)))
                case "STACK_GLOBAL":
                    called, module = stack.pop(), stack.pop()
                    stack.append(_named(module, called))
                case "REDUCE" | "NEWOBJ":
                    arguments, called = stack.pop(), stack.pop()
                    stack.append(_made(called, arguments))
                case "BUILD":
                    state = stack.pop()
                    if not isinstance(stack[-1], Made):
                        raise _Refused("it changes what is not an object")
                    stack[-1].state = state
                case "BINPERSID":
                    stack.append(Made(Name("torch", "storage"), stack.pop()))
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    return stack.pop()
                case _:
                    raise _Refused(f"it has the instruction {name}, which plain data does not need")
    raise ValueError("no end")


def _named(module: str, name: str) -> Name:
    if str(module).split(".")[0] not in _MODULES and (module, name) not in _NAMES:
        raise _Refused(f"it names {module}.{name}, which plain data does not need")
    return Name(module, name)


def _made(called: Any, arguments: Any) -> Any:
    if not isinstance(called, Name):
        raise _Refused("it calls what is not a function")
    return {} if called == Name("collections", "OrderedDict") else Made(called, arguments)


def _list(stack: list[Any]) -> Items:
    if not isinstance(stack[-1], Items):
        raise _Refused("it appends to what is not a list")
    return stack[-1]


def _dict(stack: list[Any]) -> dict[Any, Any]:
    if not isinstance(stack[-1], dict):
        raise _Refused("it sets items of what is not a dict")
    return stack[-1]
