"""Checked, read-only NumPy arrays: what every frozen dataclass of tailopt holds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailopt.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def assign(instance: object, **fields: object) -> None:
    """Set fields of a frozen dataclass while it is being constructed (in its ``__post_init__`` only)."""
    for name, value in fields.items():
        object.__setattr__(instance, name, value)


def ints(what: str, values: Any, length: int | None = None, *, minimum: int | None = None) -> Ints:
    """Copy ``values`` into a read-only 1-D int64 array.

    Raises :class:`InputError` naming ``what`` and the first offending position if a value is not a whole
    number, is below ``minimum``, or if there are not ``length`` of them.

    >>> ints("output_tokens", [3, 5], 2, minimum=1)
    array([3, 5])
    """
    given = _one_dimensional(what, values, length)
    if given.dtype.kind == "f":
        _refuse(what, given, ~np.isfinite(given) | (given != np.floor(given)), "a whole number")
        _refuse(what, given, np.abs(given) >= 2.0**53, "a whole number below 2**53")
    elif given.dtype.kind == "u":
        _refuse(what, given, given > np.iinfo(np.int64).max, "a number that fits 64 bits")
    elif given.dtype.kind not in "ib":
        raise InputError(f"{what}: expected whole numbers, got {given.dtype}")
    array = given.astype(np.int64)
    if minimum is not None:
        _refuse(what, array, array < minimum, f"at least {minimum}")
    array.flags.writeable = False
    return array


def floats(
    what: str,
    values: Any,
    length: int | None = None,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Floats:
    """Copy ``values`` into a read-only 1-D float64 array of finite numbers; errors as in :func:`ints`.

    >>> floats("arrival_s", [0, 1.5], minimum=0)
    array([0. , 1.5])
    """
    given = _one_dimensional(what, values, length)
    if given.dtype.kind not in "fiub":
        raise InputError(f"{what}: expected numbers, got {given.dtype}")
    array = given.astype(np.float64)
    _refuse(what, array, ~np.isfinite(array), "a finite number")
    if minimum is not None:
        _refuse(what, array, array < minimum, f"at least {minimum}")
    if maximum is not None:
        _refuse(what, array, array > maximum, f"at most {maximum:g}")
    array.flags.writeable = False
    return array


def bools(what: str, values: Any, length: int | None = None) -> Bools:
    """Copy ``values`` into a read-only 1-D array of truth values; 0 and 1 are taken too.

    >>> bools("capped", [0, 1])
    array([False,  True])
    """
    given = _one_dimensional(what, values, length)
    if given.dtype.kind not in "biu":
        raise InputError(f"{what}: expected true or false, got {given.dtype}")
    _refuse(what, given, (given != 0) & (given != 1), "0 or 1")
    array = given.astype(np.bool_)
    array.flags.writeable = False
    return array


def _one_dimensional(what: str, values: Any, length: int | None) -> NDArray[Any]:
    try:
        given = np.asarray(values)
    except ValueError as error:
        raise InputError(f"{what}: expected a flat list of numbers ({error})") from None
    if given.ndim != 1:
        raise InputError(f"{what}: expected a flat list of numbers, got shape {given.shape}")
    if given.size == 0:
        given = given.astype(np.int64)
    if length is not None and given.size != length:
        raise InputError(f"{what}: expected {length} values, got {given.size}")
    return given


def _refuse(what: str, values: NDArray[Any], bad: NDArray[np.bool_], expected: str) -> None:
    if bad.any():
        first = int(np.argmax(bad))
        raise InputError(f"{what}[{first}]: expected {expected}, got {values[first]}")
