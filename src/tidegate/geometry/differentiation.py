"""Forward-mode derivatives of a map by PyTorch or JAX, as NumPy arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.geometry.errors import GeometryError, PrecisionWarning
from tidegate.tensors.namespace import Array

Function: TypeAlias = Callable[[Any], Any]
"""A map from one point, an array (n,) of PyTorch or JAX, to one array of the same kind; its result is flattened."""

Numbers: TypeAlias = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Differentiator:
    """Derivatives by one framework, in one dtype and on one device.

    Legend: P points, n coordinates, k directions at each point, N outputs.
    """

    transforms: Any
    """The framework's module with `jvp`, `jacfwd` and `vmap`."""
    array_type: type
    dtype: Any
    restore: Callable[[Numbers], Array]
    """Convert NumPy numbers to an array of the caller's kind, dtype and device."""
    run: Callable[..., Any]
    """Call a function with arrays, and return its result or its tuple of results in NumPy."""
    measure: Callable[[Function, Numbers], tuple[int, int]]
    """Return the `footprint` of a function that returns a flat array."""

    def values(self, f: Function, points: Numbers) -> Numbers:
        """Evaluate the map: (P, n) to (P, N)."""

        def value(point: Any) -> Any:
            # In PyTorch some views have a batching rule only inside a derivative.
            return self._push(f, point, 0 * point)[0]

        return self._run(self.transforms.vmap(value), points)

    def first(self, f: Function, points: Numbers, directions: Numbers) -> Numbers:
        """Return Df along directions (P, k, n): (P, k, N)."""

        def along(point: Any, direction: Any) -> Any:
            return self._push(f, point, direction)[1]

        vmap = self.transforms.vmap
        return self._run(vmap(vmap(along, (None, 0))), points, directions)

    def second(self, f: Function, points: Numbers, left: Numbers, right: Numbers) -> tuple[Numbers, Numbers]:
        """Return Df along `left` and D²f along `left` and `right`, both (P, k, n): twice (P, k, N)."""

        def along(direction: Any, point: Any) -> Any:
            return self._push(f, point, direction)[1]

        def twice(point: Any, one: Any, other: Any) -> Any:
            return self.transforms.jvp(partial(along, one), (point,), (other,))

        vmap = self.transforms.vmap
        return self._run(vmap(vmap(twice, (None, 0, 0))), points, left, right)

    def metric_jet(self, f: Function, point: Numbers, whitening: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return the metric g = (W J)ᵀ (W J) at one point and its derivatives: (n, n), (n, n, n) and (n, n, n, n).

        Derivatives come last: `[i, j, k]` is ∂_k g_ij.
        """
        flat, whiten = partial(self._flat, f), self.restore(whitening)
        jacfwd = self.transforms.jacfwd

        def metric(at: Any) -> Any:
            jacobian = whiten @ jacfwd(flat)(at)
            found = jacobian.T @ jacobian
            return found, found

        def slope(at: Any) -> Any:
            found, value = jacfwd(metric, has_aux=True)(at)
            return found, (value, found)

        def jet(at: Any) -> Any:
            found, lower = jacfwd(slope, has_aux=True)(at)
            return *lower, found

        return self._run(jet, point)

    def footprint(self, f: Function, point: Numbers) -> tuple[int, int]:
        """Return the bytes of all intermediate results of one evaluation of f, and the number of outputs."""
        return self.measure(partial(self._flat, f), point)

    def _run(self, function: Callable[..., Any], *arrays: Numbers) -> Any:
        return self.run(function, *map(self.restore, arrays))

    def _push(self, f: Function, point: Any, direction: Any) -> Any:
        return self.transforms.jvp(partial(self._flat, f), (point,), (direction,))

    def _flat(self, f: Function, point: Any) -> Any:
        result = f(point)
        if not isinstance(result, self.array_type):
            raise TypeError(
                f"f must return one array, got {type(result).__name__}. Choose one, as in lambda x: f(x)[0]."
            )
        if result.dtype != self.dtype:
            raise TypeError(
                f"f must return x's dtype, {self.dtype}, got {result.dtype}. Convert the weights inside f, as in "
                "model.double(), and return real numbers, not indices."
            )
        return result.reshape(-1)


def differentiator(x: Array, *, name: str = "x") -> tuple[Differentiator, Numbers]:
    """Return the derivatives of the framework that an array belongs to, and the array's numbers in float64.

    Raises:
        TypeError: If it is a NumPy array, which has no derivatives, or not float64 or float32.
    """
    kind = type(x).__module__.split(".")[0]
    if kind == "torch":
        from tidegate.geometry.torch_adapter import torch_differentiator

        return torch_differentiator(x, name)
    if kind in ("jax", "jaxlib"):
        from tidegate.geometry.jax_adapter import jax_differentiator

        return jax_differentiator(x, name)
    raise TypeError(
        f"{name} must be an array of PyTorch or JAX, which differentiate f, got {type(x).__name__}. "
        f"Convert it, for instance with torch.tensor({name}) or jax.numpy.asarray({name})."
    )


def raise_for_dtype(name: str, dtype: object) -> NoReturn:
    """Raise TypeError for integers, complex numbers and half precision."""
    raise TypeError(f"{name} must be float64, or float32 with less accuracy, got {dtype}. Convert it to float64.")


def raise_for_step(error: Exception) -> NoReturn:
    """Raise GeometryError for a framework's error about an operation that has no forward derivative."""
    raise GeometryError(
        f"f cannot be differentiated twice in forward mode: {str(error).strip().splitlines()[0]} "
        "Replace that step with plain array operations."
    ) from error


@lru_cache(maxsize=1)
def warn_of_single_precision() -> None:
    """Warn about float32, once in a process."""
    warnings.warn(
        "Curvature in float32 has about three correct digits, and a small one is indistinguishable from 0. Convert x "
        "and the weights inside f to float64 (in JAX after jax.config.update('jax_enable_x64', True)).",
        PrecisionWarning,
        stacklevel=4,
    )
