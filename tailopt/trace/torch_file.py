"""What ``torch.save`` wrote, read without torch and without running any of its code.

The file is a zip archive with a pickle in it, and a pickle is a program. The few instructions that build
plain data are carried out here, each by a line of its own; there is none that imports or calls. Where a
pickle would do so, a name that tensors, arrays and the like are made of leaves an inert :class:`Made`, and
any other name is refused, as is every other instruction. The archive must be uncompressed, as ``torch.save``
writes it, so that nothing in it is larger than the file.

Nothing that the pickle builds is hashed, compared, copied or printed: values that hold one another many times
over or millions deep cost nothing until somebody walks through them. Keys of dicts are texts or whole
numbers, items under any other key are dropped. Numbers in lists (token ids, log-probabilities) are counted
and dropped as they come, a thousand at a time.
"""

import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailopt.errors import InputError

MOST_INSTRUCTIONS = 50_000_000
"""Of a pickle, numbers in lists not counted; some 20 s. A rollout of 8192 samples has about a million."""

MOST_CONTAINERS = 2_000_000
"""Lists, dicts, tuples and objects that a pickle may build."""

_MODULES = ("torch", "numpy", "slime")
_NAMES = {
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    *((module, name) for module in ("builtins", "__builtin__") for name in ("set", "frozenset", "bytearray")),
}
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_NUMBERS = {
    b"K": struct.Struct("<B"),
    b"M": struct.Struct("<H"),
    b"J": struct.Struct("<i"),
    b"G": struct.Struct(">d"),
}
_NUMBER = re.compile(rb"K.|M..|J....|G.{8}", re.DOTALL)
_NUMBERS_OF_A_LIST = re.compile(rb"((?:K.|M..|J....|G.{8}){1,1000}+)e", re.DOTALL)
"""What stands between a mark and the instruction that appends all since then."""


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _latin1(raw: bytes) -> str:
    return raw.decode("latin-1")


_SIZED: dict[bytes, tuple[struct.Struct, Callable[[bytes], Any]]] = {
    b"X": (struct.Struct("<I"), _utf8),
    b"\x8c": (struct.Struct("<B"), _utf8),
    b"U": (struct.Struct("<B"), _latin1),
    b"T": (struct.Struct("<I"), _latin1),
    b"C": (struct.Struct("<B"), bytes),
    b"B": (struct.Struct("<I"), bytes),
    b"\x8a": (struct.Struct("<B"), lambda raw: int.from_bytes(raw, "little", signed=True)),
}
"""Values that stand after their own length: instruction -> length, and what makes the value."""

_MEMO = {b"q": struct.Struct("<B"), b"r": struct.Struct("<I")}
_RECALL = {b"h": struct.Struct("<B"), b"j": struct.Struct("<I")}
_PASSED_OVER = {b"\x80": 1, b"\x95": 8}  # version, frame


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
    except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
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
    except (zipfile.BadZipFile, EOFError, RuntimeError) as error:
        raise InputError(f"{path}: expected a zip archive as torch.save writes it ({error})") from None


def _run(program: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = instructions = containers = 0

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    while at < len(program):
        code = program[at : at + 1]
        at += 1
        instructions += 1
        if number := _NUMBERS.get(code):
            stack += number.unpack_from(program, at)
            at += number.size
        elif sized := _SIZED.get(code):
            length, value = sized
            start = at + length.size
            at = start + length.unpack_from(program, at)[0]
            if at > len(program):
                break
            stack.append(value(program[start:at]))
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif memorized := _MEMO.get(code):
            memo[memorized.unpack_from(program, at)[0]] = stack[-1]
            at += memorized.size
        elif recalled := _RECALL.get(code):
            stack.append(memo[recalled.unpack_from(program, at)[0]])
            at += recalled.size
        elif code in _TUPLES:
            stack.append(tuple(stack.pop() for _ in range(_TUPLES[code]))[::-1])
            containers += 1
        elif code in _PASSED_OVER:
            at += _PASSED_OVER[code]
        else:
            match code:
                case b"(":
                    numbers = _NUMBERS_OF_A_LIST.match(program, at)
                    if numbers and stack and isinstance(stack[-1], Items):
                        stack[-1].length += len(_NUMBER.findall(numbers[1]))
                        at = numbers.end()
                    else:
                        marks.append(len(stack))
                case b"\x94":
                    memo[len(memo)] = stack[-1]
                case b"]":
                    stack.append(Items())
                    containers += 1
                case b"}":
                    stack.append({})
                    containers += 1
                case b"t":
                    stack.append(tuple(since_mark()))
                    containers += 1
                case b"e":
                    items = since_mark()
                    _list(stack).take(items)
                case b"a":
                    item = stack.pop()
                    _list(stack).take([item])
                case b"u":
                    items = since_mark()
                    _set(stack, zip(items[::2], items[1::2], strict=True))
                case b"s":
                    item, key = stack.pop(), stack.pop()
                    _set(stack, [(key, item)])
                case b"c":
                    module_end = program.index(b"\n", at)
                    name_end = program.index(b"\n", module_end + 1)
                    stack.append(
                        _named(_utf8(program[at:module_end]), _utf8(program[module_end + 1 : name_end]))
                    )
                    at = name_end + 1
                case b"\x93":
                    called, module = stack.pop(), stack.pop()
                    stack.append(_named(module, called))
                case b"R" | b"\x81":
                    arguments, called = stack.pop(), stack.pop()
                    stack.append(_made(called, arguments))
                    containers += 1
                case b"b":
                    state = stack.pop()
                    if not isinstance(stack[-1], Made):
                        raise _Refused("it changes what is not an object")
                    stack[-1].state = state
                case b"Q":
                    stack.append(Made(Name("torch", "storage"), stack.pop()))
                    containers += 1
                case b".":
                    return stack.pop()
                case _:
                    raise _Refused(f"it has the instruction {_called(code)}, which plain data does not need")
        if instructions > MOST_INSTRUCTIONS or containers > MOST_CONTAINERS:
            raise _Refused("it has more instructions, or builds more lists and objects, than any rollout")
    raise ValueError("no end")


def _called(code: bytes) -> str:
    return next((op.name for op in pickletools.opcodes if op.code.encode("latin-1") == code), repr(code))


def _named(module: object, name: object) -> Name:
    if type(module) is not str or type(name) is not str:
        raise _Refused("it names what is not a text")
    if module.split(".")[0] not in _MODULES and (module, name) not in _NAMES:
        raise _Refused(f"it names {module}.{name}, which plain data does not need")
    return Name(module, name)


def _made(called: object, arguments: object) -> Any:
    if type(called) is not Name:
        raise _Refused("it calls what is not a function")
    return {} if called == Name("collections", "OrderedDict") else Made(called, arguments)


def _list(stack: list[Any]) -> Items:
    if not isinstance(stack[-1], Items):
        raise _Refused("it appends to what is not a list")
    return stack[-1]


def _set(stack: list[Any], items: Iterable[tuple[Any, Any]]) -> None:
    if type(stack[-1]) is not dict:
        raise _Refused("it sets items of what is not a dict")
    stack[-1].update((key, value) for key, value in items if type(key) is str or type(key) is int)
