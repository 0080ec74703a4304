"""Check the arguments of public functions: InputError for shapes and values, TypeError for kinds and dtypes."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from tidegate._validation import InputError
from tidegate.tensors.namespace import Array, is_floating, namespace_of, unify


def check_arrays(**arrays: tuple[Array | None, str]) -> tuple[Any, ...]:
    """Convert arrays to one kind, as `unify` does, and check their dtypes and shapes; None passes through.

    Args:
        **arrays: Each array with its axes, as in `Q=(Q, "..., query, width")`. Axes of one name must have one size; the
            axes of "..." must broadcast.

    Returns:
        The namespace, then the arrays.

    Raises:
        InputError: If a shape does not fit.
        TypeError: If an array is of another library or its dtype is not real floating.
    """
    xp, *own = unify(**{name: array for name, (array, _) in arrays.items()})
    sizes: dict[str, tuple[str, int]] = {}
    batches: dict[str, tuple[int, ...]] = {}
    for (name, (_, axes)), array in zip(arrays.items(), own, strict=True):
        if array is None:
            continue
        require_floating(**{name: array})
        require_rank(axes, **{name: array})
        named = axes.removeprefix("...").removeprefix(", ").split(", ")
        batches[name] = tuple(array.shape)[: array.ndim - len(named)]
        for axis, size in zip(named, tuple(array.shape)[array.ndim - len(named) :], strict=True):
            first, expected = sizes.setdefault(axis, (name, size))
            if size != expected:
                wanted = f"of shape ({axes}) with {axis} = {expected}, as in {first}"
                raise InputError(name, expected=wanted, got=tuple(array.shape))
    broadcast_batches(**batches)
    return xp, *own


def require_floating(**arrays: Array | None) -> None:
    """Raise TypeError unless each array has a real floating dtype."""
    for name, array in arrays.items():
        if array is not None and not is_floating(array):
            raise TypeError(
                f"{name} must have a real floating dtype, got {array.dtype}. Convert it to float32 or float64."
            )


def require_rank(axes: str, **arrays: Array | None) -> None:
    """Raise InputError unless each array has these axes; a leading "..." allows any number of others."""
    rank = len(axes.removeprefix("..., ").split(", "))
    for name, array in arrays.items():
        if array is not None and (array.ndim < rank or (array.ndim > rank and not axes.startswith("..."))):
            raise InputError(name, expected=f"of shape ({axes})", got=tuple(array.shape))


def require_same_shape(**arrays: Array) -> None:
    """Raise InputError for an array whose shape differs from the first one's."""
    (first, array), *others = arrays.items()
    for name, other in others:
        if tuple(other.shape) != tuple(array.shape):
            raise InputError(name, expected=f"of {first}'s shape, {tuple(array.shape)}", got=tuple(other.shape))


def broadcast_batches(**shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that leading axes broadcast to; raise InputError for the first that does not broadcast."""
    together: tuple[int, ...] = ()
    for name, shape in shapes.items():
        try:
            together = np.broadcast_shapes(together, shape)
        except ValueError:
            wanted = f"an array whose leading axes broadcast with {together}"
            raise InputError(name, expected=wanted, got=shape) from None
    return together


def require_mask(mask: Array | None, shape: tuple[int, ...], *, axes: str = "query, key") -> None:
    """Raise an error unless a mask is bool, has at least the trailing `axes`, and broadcasts to the scores' shape."""
    if mask is None:
        return
    if not namespace_of(mask).isdtype(mask.dtype, "bool"):
        raise TypeError(
            f"mask must be bool, True where a query may attend, got {mask.dtype}. Compare it, as in mask != 0."
        )
    given = tuple(mask.shape)
    fits = len(axes.split(",")) <= len(given) <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(given, shape[len(shape) - len(given) :], strict=True)
    )
    if not fits:
        raise InputError("mask", expected=f"broadcastable to the scores' shape (..., {axes}) = {shape}", got=given)


def require_head_mask(mask: Array | None, shape: tuple[int, ...]) -> None:
    """Raise an error unless a mask has two axes or all of (..., head, query, key): a third could be heads or batch."""
    if mask is not None and mask.ndim not in (2, len(shape)):
        expected = f"of shape (query, key), or with every axis of the weights (..., head, query, key) = {shape}"
        hint = "Give a mask per batch a head axis of size 1, as in mask[..., None, :, :]."
        raise InputError("mask", expected=expected, got=tuple(mask.shape), hint=hint)
    require_mask(mask, shape)


def require_positive(**values: Array | float) -> None:
    """Raise InputError unless each value is above zero; traced values pass."""
    for name, value in values.items():
        if is_false(value > 0):
            raise InputError(name, expected="above 0", got=value)


def require_count(at_least: int, **counts: int) -> None:
    """Raise an error unless each count is an integer, of Python or NumPy, of at least `at_least`."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral):
            raise TypeError(f"{name} must be an integer, got {count!r}.")
        if count < at_least:
            raise InputError(name, expected=f"at least {at_least}", got=count)


def is_false(condition: Array | bool) -> bool:
    """Return True if a condition is known to be False somewhere; values may be abstract (jit, vmap, meta)."""
    try:
        return not bool(condition if isinstance(condition, bool) else condition.all())
    # bool() of a JAX tracer raises TypeError, of a PyTorch one RuntimeError.
    except (TypeError, RuntimeError):
        return False
