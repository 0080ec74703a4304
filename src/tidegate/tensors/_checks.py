"""Check arguments of public functions: errors name the argument, what was expected, what came, and often the remedy."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

from tidegate.tensors.namespace import is_floating, namespace_of

if TYPE_CHECKING:
    from tidegate.tensors.namespace import Array


def require_floating(**arrays: Array | None) -> None:
    """Each array has a real floating dtype."""
    for name, array in arrays.items():
        if array is not None and not is_floating(array):
            raise TypeError(
                f"{name} must have a real floating dtype; got {array.dtype}. Convert it to float32 or float64."
            )


def require_rank(axes: str, *, exact: bool = False, **arrays: Array | None) -> None:
    """Each array has at least the trailing `axes`, written like "query, width"; leading axes are batch axes."""
    rank = len(axes.split(","))
    for name, array in arrays.items():
        if array is not None and (array.ndim < rank or (exact and array.ndim != rank)):
            expected = f"({axes})" if exact else f"(..., {axes})"
            raise ValueError(f"{name} must have shape {expected}; got {tuple(array.shape)}.")


def require_equal(what: str, **sizes: int | tuple[int, ...]) -> None:
    """All the sizes agree, e.g. `require_equal("width", Q=Q.shape[-1], K=K.shape[-1])`."""
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"{' and '.join(sizes)} must have the same {what}; {listed}.")


def require_batches_broadcast(trailing: int, **arrays: Array | None) -> tuple[int, ...]:
    """The axes before the last `trailing` ones broadcast against each other; returns what they broadcast to."""
    leading = {name: tuple(array.shape)[: array.ndim - trailing] for name, array in arrays.items() if array is not None}
    width = max((len(shape) for shape in leading.values()), default=0)
    padded = [(1,) * (width - len(shape)) + shape for shape in leading.values()]
    together: list[int] = []
    for sizes in zip(*padded, strict=True):
        distinct = {size for size in sizes if size != 1}
        if len(distinct) > 1:
            listed = ", ".join(f"{name} has {shape}" for name, shape in leading.items())
            raise ValueError(f"The leading axes of {' and '.join(leading)} must be equal or broadcast; {listed}.")
        together.append(distinct.pop() if distinct else 1)
    return tuple(together)


def require_mask(mask: Array | None, shape: tuple[int, ...], *, name: str = "mask", axes: str = "query, key") -> None:
    """The mask is bool, has at least the trailing `axes`, and broadcasts without new axes to the scores' shape."""
    if mask is None:
        return
    if not namespace_of(mask).isdtype(mask.dtype, "bool"):
        raise TypeError(
            f"{name} must be bool, True where a query may attend; got {mask.dtype}. Compare it, as in {name} != 0."
        )
    given = tuple(mask.shape)
    fits = len(axes.split(",")) <= len(given) <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(given, shape[len(shape) - len(given) :], strict=True)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to the scores' shape (..., {axes}) = {shape}; got {given}.")


def require_head_mask(mask: Array | None, shape: tuple[int, ...]) -> None:
    """The mask fits weights (..., head, query, key), with two axes or all of them.

    With three axes beside a batch, nobody could tell heads from batches.
    """
    if mask is not None and mask.ndim not in (2, len(shape)):
        raise ValueError(
            f"mask must be (query, key) or have every axis of the weights (..., head, query, key) = {shape}; "
            f"got {tuple(mask.shape)}. For a mask per batch give it a head axis of size 1, as in mask[..., None, :, :]."
        )
    require_mask(mask, shape)


def require_positive(**values: Array | float) -> None:
    """Each value is above zero; values that are still being traced pass."""
    for name, value in values.items():
        if is_false(value > 0):
            raise ValueError(f"{name} must be above 0; got {value!r}.")


def require_count(at_least: int, **counts: int) -> None:
    """Each count is a whole number, not smaller than `at_least`."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral):
            raise TypeError(f"{name} must be a whole number; got {count!r}.")
        if count < at_least:
            raise ValueError(f"{name} must be at least {at_least}; got {count!r}.")


def is_false(condition: Array | bool) -> bool:
    """Whether a condition is known to fail somewhere; False while its values are abstract (jit, vmap, meta)."""
    try:
        return not bool(condition if isinstance(condition, bool) else condition.all())
    # A JAX tracer refuses bool() with a TypeError, a PyTorch one with a RuntimeError.
    except (TypeError, RuntimeError):
        return False
