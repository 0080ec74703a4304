"""Gradients by the arrays' own library, to check hand-derived ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from tidegate.tensors.namespace import Array, namespace_of


def gradients(function: Callable[[Mapping[str, Array]], Array], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the gradient of a scalar function for each of its named arrays, by JAX or PyTorch.

    For NumPy, which has no automatic differentiation, use central differences.
    """
    match namespace_of(*arrays.values()).__name__.split(".")[-1]:
        case "torch":
            import torch

            leaves = {name: array.detach().clone().requires_grad_() for name, array in arrays.items()}
            with torch.enable_grad():
                return dict(zip(leaves, torch.autograd.grad(function(leaves), list(leaves.values())), strict=True))
        case "numpy" if all(isinstance(array, np.ndarray) for array in arrays.values()):
            return central_differences(function, arrays)
        case _:
            import jax

            return cast("Any", jax).grad(function)(dict(arrays))


def central_differences(
    function: Callable[[Mapping[str, Array]], Array], arrays: Mapping[str, Array], *, eps: float = 1e-5
) -> dict[str, Array]:
    r"""Return the gradient by $(f(x + \epsilon e_i) - f(x - \epsilon e_i)) / 2\epsilon$, for any array library."""

    def slope(name: str, index: int) -> float:
        array = arrays[name]
        step = np.zeros(array.shape)
        step.flat[index] = eps
        shift = namespace_of(array).asarray(step, dtype=array.dtype)
        ahead, behind = (function({**arrays, name: array + sign * shift}) for sign in (1, -1))
        return float(ahead - behind) / (2 * eps)

    def gradient(name: str, array: Array) -> Array:
        slopes = np.asarray([slope(name, index) for index in range(math.prod(array.shape))])
        return namespace_of(array).asarray(slopes.reshape(array.shape), dtype=array.dtype)

    return {name: gradient(name, array) for name, array in arrays.items()}
