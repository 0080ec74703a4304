"""The array libraries that every law runs on: NumPy, JAX eager, JAX jitted, PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch


@dataclass(frozen=True)
class Library:
    """One way to call a function of arrays. `call` hands it arrays of its kind and returns what comes back."""

    name: str
    array: Callable[[np.ndarray], Any]
    kind: type
    jitted: bool = False

    def call(self, function, *arguments, **options):
        """Call with every NumPy array turned into this library's; jitted libraries trace the arrays alone."""
        arguments = [self._own(value) for value in arguments]
        options = {name: self._own(value) for name, value in options.items()}
        if not self.jitted:
            return function(*arguments, **options)
        positions = [i for i, value in enumerate(arguments) if isinstance(value, self.kind)]
        names = [name for name, value in options.items() if isinstance(value, self.kind)]

        def traced(arrays, named):
            filled = list(arguments)
            for i, array in zip(positions, arrays, strict=True):
                filled[i] = array
            return function(*filled, **{**options, **named})

        return jax.jit(traced)([arguments[i] for i in positions], {name: options[name] for name in names})

    def _own(self, value):
        return self.array(value) if isinstance(value, np.ndarray) else value


NUMPY = Library("numpy", np.asarray, np.ndarray)
JAX = Library("jax", jnp.asarray, jax.Array)
JAX_JIT = Library("jax-jit", jnp.asarray, jax.Array, jitted=True)
TORCH = Library("torch", lambda array: torch.from_numpy(np.ascontiguousarray(array)), torch.Tensor)
LIBRARIES = (NUMPY, JAX, JAX_JIT, TORCH)
