"""How numerical kernels are compiled."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])

# Numba counts references to every array that a call passes on, with an atomic addition: three quarters of the
# time of functions as small as the simulator's. Without its runtime (nrt) it does not; such functions cannot
# make arrays.
_OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy", "_nrt": False}


def compiled(function: Function) -> Function:
    """Compile a function that makes no arrays; the compiled code is kept for the next process."""
    decorated: Function = njit(**_OPTIONS)(function)
    return decorated


def inlined(function: Function) -> Function:
    """The same, for a function that becomes part of each that calls it.

    An array is passed as seven numbers, so that a call with four of them can cost as much as what it does.
    """
    decorated: Function = njit(**_OPTIONS, forceinline=True)(function)
    return decorated
