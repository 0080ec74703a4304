"""Forward-mode derivatives by JAX. Each call compiles the function anew, since what it refers to may have changed."""

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
            f"{name} is being traced. Curvature checks the numbers that it gets: call it outside jit and vmap, "
            "with a batch of points; f itself is compiled."
        )
    if x.dtype not in (np.float32, np.float64):
        raise_for_dtype(name, x.dtype)
    restore = partial(jax.numpy.asarray, dtype=x.dtype)
    by = Differentiator(
        transforms=jax,
        array_type=jax.Array,
        dtype=x.dtype,
        restore=restore,
        run=_run,
        measure=lambda flat, point: _measure(flat, restore(point)),
    )
    return by, np.asarray(x, dtype=np.float64)


def _run(function: Callable[..., Any], *arrays: Any) -> Any:
    with _translate_errors():
        return jax.tree.map(np.asarray, jax.jit(function)(*arrays))


def _measure(flat: Function, point: Any) -> tuple[int, int]:
    with _translate_errors():
        jaxpr = jax.make_jaxpr(flat)(point).jaxpr
    return _peak_bytes(jaxpr), jaxpr.outvars[0].aval.shape[0]


@contextmanager
def _translate_errors() -> Generator[None]:
    try:
        yield
    except (NotImplementedError, TypeError) as error:
        if isinstance(error, TypeError) and "forward-mode" not in str(error):
            raise
        raise_for_step(error)


def _peak_bytes(jaxpr: Any) -> int:
    """Return the most bytes of results that a later step of the trace still needs."""
    last_use = {variable: step for step, equation in enumerate(jaxpr.eqns) for variable in _variables(equation.invars)}
    last_use |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    alive: dict[Any, int] = {}
    peak = 0
    for step, equation in enumerate(jaxpr.eqns):
        sizes = ((variable, variable.aval) for variable in equation.outvars)
        alive |= {variable: math.prod(aval.shape) * aval.dtype.itemsize for variable, aval in sizes}
        # The traces inside an equation: of a jitted function, of a loop.
        inner = (getattr(parameter, "jaxpr", parameter) for parameter in equation.params.values())
        most = max((_peak_bytes(trace) for trace in inner if hasattr(trace, "eqns")), default=0)
        peak = max(peak, sum(alive.values()) + most)
        alive = {variable: size for variable, size in alive.items() if last_use.get(variable, -1) > step}
    return peak


def _variables(atoms: Any) -> list[Any]:
    """Return those that are not literals, which alone have a value."""
    return [atom for atom in atoms if not hasattr(atom, "val")]
