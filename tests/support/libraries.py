"""The array libraries that every law runs on: NumPy, JAX eager, JAX jitted, PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import torch


@dataclass(frozen=True)
class Library:
    """One way to call a function of arrays: `call` converts NumPy arrays to this library's."""

    name: str
    array: Callable[[np.ndarray], Any]
    kind: type
    jitted: bool = False

    def call(self, function, *arguments, **options):
        """Call with every NumPy array converted to this library's; jitted libraries trace only the arrays."""
        arguments = [self._own(value) for value in arguments]
        options = {name: self._own(value) for name, value in options.items()}
        if not self.jitted:
            return function(*arguments, **options)
        traced = {i: value for i, value in enumerate(arguments) if isinstance(value, self.kind)}
        traced |= {name: value for name, value in options.items() if isinstance(value, self.kind)}
        # The types are part of the key: 1, 1.0 and True are equal, and not the same option.
        fixed = tuple((i, value, type(value)) for i, value in enumerate(arguments) if i not in traced)
        fixed += tuple((name, value, type(value)) for name, value in options.items() if name not in traced)
        try:
            compiled = _jitted(function, fixed)
        except TypeError:
            compiled = _jitted.__wrapped__(function, fixed)  # an option cannot be hashed
        return compiled({str(name): value for name, value in traced.items()})

    def _own(self, value):
        return self.array(value) if isinstance(value, np.ndarray) else value


@lru_cache(maxsize=512)
def _jitted(function, fixed):
    """`function` compiled with some arguments fixed, as a function of the others by position (a digit) or name."""

    def call(traced):
        given = {name: value for name, value, _ in fixed}
        given |= {int(name) if name.isdigit() else name: value for name, value in traced.items()}
        places = sorted(name for name in given if isinstance(name, int))
        named = {name: value for name, value in given.items() if isinstance(name, str)}
        return function(*(given[place] for place in places), **named)

    return jax.jit(call)


NUMPY = Library("numpy", np.asarray, np.ndarray)
# jnp.asarray would compile a copy for every new shape.
JAX = Library("jax", jax.device_put, jax.Array)
JAX_JIT = Library("jax-jit", jax.device_put, jax.Array, jitted=True)
TORCH = Library("torch", lambda array: torch.from_numpy(np.asarray(array, order="C")), torch.Tensor)
LIBRARIES = (NUMPY, JAX, JAX_JIT, TORCH)
