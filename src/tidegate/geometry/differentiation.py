"""Ask a framework for derivatives of a map, in forward mode only, as NumPy arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.geometry.errors import GeometryError, PrecisionWarning
from tidegate.tensors.namespace import Array

Function: TypeAlias = Callable[[Any], Any]
"""A map from one point, an array (n,) of PyTorch or JAX, to one array of the same kind; its result is flattened."""

Numbers: TypeAlias = NDArray[np.floating[Any]]


class Differentiator(Protocol):
    """Derivatives by one framework, in the dtype and on the device of the array that it was chosen for.

    `P` points, `n` coordinates, `k` directions at each point, `N` outputs.
    """

    @property
    def single_precision(self) -> bool:
        """Whether the dtype is float32."""
        ...

    def values(self, f: Function, points: Numbers) -> Numbers:
        """The map itself: (P, n) to (P, N)."""
        ...

    def first(self, f: Function, points: Numbers, directions: Numbers) -> Numbers:
        """Df along directions (P, k, n): (P, k, N)."""
        ...

    def second(self, f: Function, points: Numbers, left: Numbers, right: Numbers) -> tuple[Numbers, Numbers]:
        """Df along `left` and D²f along `left` and `right`, both (P, k, n): twice (P, k, N)."""
        ...

    def metric_jet(self, f: Function, point: Numbers, whitening: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The metric g = (W J)ᵀ (W J) at one point with its derivatives: (n, n), (n, n, n) and (n, n, n, n).

        Derivatives come last: `[i, j, k]` is ∂_k g_ij.
        """
        ...

    def footprint(self, f: Function, point: Numbers) -> tuple[int, int]:
        """Most bytes of intermediates that are alive at once in one evaluation of f, and the number of outputs."""
        ...

    def restore(self, numbers: Numbers) -> Array:
        """NumPy numbers as an array of the caller's kind, dtype and device."""
        ...


def differentiator(x: Array, *, name: str = "x") -> tuple[Differentiator, Numbers]:
    """The framework that an array belongs to, and the array's numbers in float64.

    NumPy has no derivatives and is refused, as are integers and half precision.
    """
    kind = type(x).__module__.split(".")[0]
    if kind == "torch":
        from tidegate.geometry.torch_adapter import TorchDifferentiator

        return TorchDifferentiator.of(x, name)
    if kind in ("jax", "jaxlib"):
        from tidegate.geometry.jax_adapter import JaxDifferentiator

        return JaxDifferentiator.of(x, name)
    raise TypeError(
        f"{name} must be an array of PyTorch or JAX, whose derivatives are used; got {type(x).__name__}. "
        f"Convert it, for instance with torch.tensor({name}) or jax.numpy.asarray({name})."
    )


def refuse_dtype(name: str, dtype: object) -> NoReturn:
    """Refuse integers, complex numbers and half precision."""
    raise TypeError(f"{name} must be float64, or float32 at less accuracy; got {dtype}. Convert it to float64.")


def refuse_step(error: Exception) -> NoReturn:
    """Translate a framework's complaint about an operation that has no forward derivative."""
    raise GeometryError(
        f"f cannot be differentiated twice in forward mode: {str(error).strip().splitlines()[0]} "
        "Replace that step by plain array operations."
    ) from error


@lru_cache(maxsize=1)
def warn_of_single_precision() -> None:
    """Warn that the numbers are float32; a second call is silent."""
    warnings.warn(
        "Curvature in float32 keeps about three digits and cannot tell a small curvature from none. Convert x, and the "
        "weights inside f, to float64 (in JAX after jax.config.update('jax_enable_x64', True)).",
        PrecisionWarning,
        stacklevel=4,
    )
