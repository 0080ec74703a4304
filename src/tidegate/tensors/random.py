"""Random arrays of the same library as their key."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidegate.tensors.namespace import Array


def normal(key: Any, shape: tuple[int, ...]) -> Array:
    """Draw standard normal numbers in the default floating dtype of the key's library.

    The key is a NumPy `Generator`, a PyTorch `Generator`, whose device the result has, or a JAX key.
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
    """Return `count` keys for independent numbers: new keys in JAX, elsewhere the same stateful generator."""
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
