"""Random arrays of the kind that the source of randomness belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidegate.tensors.namespace import Array


def normal(key: Any, shape: tuple[int, ...]) -> Array:
    """Draw standard normal numbers, in the default floating dtype of the key's library.

    Args:
        key: A NumPy `Generator`, a PyTorch `Generator` (which gives its device) or a JAX key.
        shape: Of the result.
    """
    match _library(key):
        case "numpy":
            return key.standard_normal(shape)
        case "torch":
            import torch

            return torch.randn(shape, generator=key, device=key.device)
        case _:
            import jax

            return jax.random.normal(key, shape)


def split(key: Any, count: int) -> list[Any]:
    """Return `count` sources of independent numbers: new keys in JAX, elsewhere the same generator, which moves on."""
    if _library(key) == "jax":
        import jax

        return list(jax.random.split(key, count))
    return [key] * count


def _library(key: Any) -> str:
    if isinstance(key, np.random.Generator):
        return "numpy"
    module = type(key).__module__.split(".")[0]
    if module == "torch" and type(key).__name__ == "Generator":
        return "torch"
    if module in ("jax", "jaxlib"):
        return "jax"
    raise TypeError(
        f"key must be a numpy.random.Generator, a torch.Generator or a JAX key, got {type(key).__name__}. "
        "For a seed write numpy.random.default_rng(seed)."
    )
