"""Convert layers of any framework to NumPy arrays in float64."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from tidegate.tensors.layer import AttentionArrays

Layer: TypeAlias = Any
"""An attention layer with a method `arrays()`, or its `AttentionArrays`."""

Floats: TypeAlias = NDArray[np.floating[Any]]
"""Real numbers, float64 unless otherwise noted."""


def as_layer_arrays(layer: Layer) -> AttentionArrays:
    """Return a layer, `AttentionArrays` or anything whose `arrays()` returns them, with arrays of NumPy float64."""
    if not isinstance(layer, AttentionArrays):
        if not callable(getattr(layer, "arrays", None)):
            raise TypeError(
                f"layer must be AttentionArrays or have a method arrays(); got {type(layer).__name__}. "
                "For parameters of JAX use tidegate.flax.attention_arrays(params, config)."
            )
        layer = layer.arrays()
    arrays = cast("AttentionArrays", layer)
    return arrays.with_parameters({name: as_float64(array) for name, array in arrays.parameters().items()})


def as_float64(array: Any) -> Floats:
    """Return an array of NumPy, JAX or PyTorch as NumPy float64."""
    if hasattr(array, "detach"):
        # NumPy has no bfloat16, so PyTorch converts first.
        array = array.detach().cpu().double()
    return np.asarray(array, dtype=np.float64)
