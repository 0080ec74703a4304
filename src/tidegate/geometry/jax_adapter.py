"""Forward-mode derivatives by JAX. Each call compiles the function again, since captured values may have changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax as _typed_jax
import numpy as np

from tidegate.geometry.differentiation import Differentiator, Function, Numbers, raise_for_dtype, raise_for_step

# The annotations of JAX are partial.
jax: Any = _typed_jax


def jax_differentiator(x: Any, name: str) -> tuple[Differentiator, Numbers]:
    """Return derivatives for an array, and the array's numbers in float64."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} is being traced. Curvature depends on the values of its inputs: call it outside jit and vmap, "
            "with a batch of points; f itself is compiled."
        )
    if x.dtype not in (np.float32, np.float64):
        raise_for_dtype(name, x.dtype)
    restore = partial(jax.numpy.asarray, dtype=x.dtype)

    def measure(flat: Function, point: Numbers) -> tuple[int, int]:
        with _translate_errors():
            jaxpr = jax.make_jaxpr(flat)(restore(point)).jaxpr
        return _bytes_of_results(jaxpr), jaxpr.outvars[0].aval.shape[0]

    by = Differentiator(transforms=jax, array_type=jax.Array, dtype=x.dtype, restore=restore, run=_run, measure=measure)
    return by, np.asarray(x, dtype=np.float64)


def _run(function: Callable[..., Any], *arrays: Any) -> Any:
    with _translate_errors():
        return jax.tree.map(np.asarray, jax.jit(function)(*arrays))


@contextmanager
def _translate_errors() -> Generator[None]:
    try:
        yield
    except (NotImplementedError, TypeError) as error:
        if isinstance(error, TypeError) and "forward-mode" not in str(error):
            raise
        raise_for_step(error)


def _bytes_of_results(jaxpr: Any) -> int:
    """Return the bytes of the results of all operations, including those inside jitted functions and loop bodies."""
    num_bytes = 0
    for equation in jaxpr.eqns:
        arrays = (variable.aval for variable in equation.outvars)
        num_bytes += sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
        inner = (getattr(parameter, "jaxpr", parameter) for parameter in equation.params.values())
        num_bytes += sum(_bytes_of_results(trace) for trace in inner if hasattr(trace, "eqns"))
    return num_bytes
