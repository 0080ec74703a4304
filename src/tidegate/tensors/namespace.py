"""Find the caller's array library, convert NumPy constants to it, and add what the array API lacks."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import array_api_compat
import numpy as np

Array: TypeAlias = Any
"""An array of NumPy, JAX or PyTorch."""

Namespace: TypeAlias = Any
"""An array API namespace: `array_api_compat.numpy`, `jax.numpy`, `array_api_compat.torch`."""

# The compatibility layer's own types mention libraries that are not installed.
_compat: Any = array_api_compat


def namespace_of(*arrays: Array) -> Namespace:
    """Return the namespace that all these arrays share."""
    return _compat.array_namespace(*arrays)


def is_floating(array: Array) -> bool:
    """Return whether the array holds real floating-point numbers."""
    return bool(namespace_of(array).isdtype(array.dtype, "real floating"))


def unify(**arrays: Array | None) -> tuple[Any, ...]:
    """Return the caller's namespace, then the arrays, all of the caller's library, device and floating dtype.

    NumPy arrays mixed with JAX or PyTorch ones count as constants and are converted, including their floating dtype;
    arrays of one library are promoted. None stays None. The keywords name the arguments in errors.
    """
    for name, array in arrays.items():
        if array is not None and not _compat.is_array_api_obj(array):
            raise TypeError(
                f"{name} must be an array of NumPy, JAX or PyTorch, got {type(array).__name__}. "
                f"Wrap it, for instance with numpy.asarray({name})."
            )
    present = {name: array for name, array in arrays.items() if array is not None}
    callers = {name: array for name, array in present.items() if not isinstance(array, np.ndarray | np.generic)}
    leading = callers or present
    try:
        xp = namespace_of(*leading.values())
    except TypeError as error:
        kinds = ", ".join(f"{name} is {type(array).__module__.split('.')[0]}" for name, array in leading.items())
        raise TypeError(
            f"Arrays must be of one library (NumPy constants may be mixed in): {kinds}. "
            "Convert them to one kind, for instance with numpy.asarray."
        ) from error
    floats = [array for array in leading.values() if is_floating(array)]
    dtype = xp.result_type(*floats) if floats else None
    device = _compat.device(next(iter(leading.values()))) if _compat.is_torch_namespace(xp) else None

    def convert(array: Array | None) -> Array | None:
        if array is None:
            return None
        if isinstance(array, np.ndarray | np.generic):
            array = xp.asarray(array, device=device)
        return xp.astype(array, dtype, copy=False) if dtype is not None and is_floating(array) else array

    return xp, *(convert(array) for array in arrays.values())


def accumulate(array: Array) -> Array:
    """Return the array in float32 or better, for sums over half-precision numbers."""
    xp = namespace_of(array)
    return xp.astype(array, xp.float32) if xp.finfo(array.dtype).bits < 32 else array


def stop_gradient(array: Array) -> Array:
    """Return the same array without a gradient."""
    if hasattr(array, "detach"):
        return array.detach()
    if isinstance(array, np.ndarray):
        return cast("Array", array)
    import jax

    return jax.lax.stop_gradient(array)


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of this shape was broadcast to x's: the transpose of broadcasting."""
    xp = namespace_of(x)
    extra = x.ndim - len(shape)
    repeated = tuple(extra + axis for axis, size in enumerate(shape) if size == 1 and x.shape[extra + axis] != 1)
    axes = (*range(extra), *repeated)
    return xp.reshape(xp.sum(x, axis=axes), shape) if axes else x
