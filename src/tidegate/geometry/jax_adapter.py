"""Forward-mode derivatives by JAX. Each call compiles the function anew, since what it refers to may have changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax as _typed_jax
import numpy as np

from tidegate.geometry.differentiation import Function, Numbers, refuse_dtype, refuse_step

# The annotations of JAX are partial.
jax: Any = _typed_jax


@dataclass(frozen=True)
class JaxDifferentiator:
    """Derivatives by JAX in one dtype."""

    dtype: Any

    @classmethod
    def of(cls, x: Any, name: str) -> tuple[JaxDifferentiator, Numbers]:
        """For an array, and the array's numbers in float64."""
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"{name} is being traced. Curvature checks the numbers that it gets: call it outside jit and vmap, "
                "with a batch of points; f itself is compiled."
            )
        if x.dtype not in (np.float32, np.float64):
            refuse_dtype(name, x.dtype)
        return cls(x.dtype), np.asarray(x, dtype=np.float64)

    @property
    def single_precision(self) -> bool:
        """Whether the dtype is float32."""
        return bool(self.dtype == np.float32)

    def values(self, f: Function, points: Numbers) -> Numbers:
        """The map itself: (P, n) to (P, N)."""
        return self._run(jax.vmap(self._flat(f)), points)

    def first(self, f: Function, points: Numbers, directions: Numbers) -> Numbers:
        """Df along directions (P, k, n): (P, k, N)."""
        along = _derivative(self._flat(f))
        return self._run(jax.vmap(jax.vmap(along, in_axes=(None, 0))), points, directions)

    def second(self, f: Function, points: Numbers, left: Numbers, right: Numbers) -> tuple[Numbers, Numbers]:
        """Df along `left` and D²f along `left` and `right`, both (P, k, n): twice (P, k, N)."""
        along = _derivative(self._flat(f))

        def twice(point: Any, one: Any, other: Any) -> Any:
            return jax.jvp(partial(along, direction=one), (point,), (other,))

        return self._run(jax.vmap(jax.vmap(twice, in_axes=(None, 0, 0))), points, left, right)

    def metric_jet(self, f: Function, point: Numbers, whitening: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The metric g = (W J)ᵀ (W J) at one point with its derivatives: (n, n), (n, n, n) and (n, n, n, n)."""
        flat, whiten = self._flat(f), self.restore(whitening)

        def metric(at: Any) -> Any:
            jacobian = whiten @ jax.jacfwd(flat)(at)
            found = jacobian.T @ jacobian
            return found, found

        def slope(at: Any) -> Any:
            found, value = jax.jacfwd(metric, has_aux=True)(at)
            return found, (value, found)

        def jet(at: Any) -> Any:
            found, lower = jax.jacfwd(slope, has_aux=True)(at)
            return *lower, found

        return self._run(jet, point)

    def footprint(self, f: Function, point: Numbers) -> tuple[int, int]:
        """Most bytes of intermediates that are alive at once in one evaluation of f, and the number of outputs."""
        with _translate_errors():
            jaxpr = jax.make_jaxpr(self._flat(f))(self.restore(point)).jaxpr
        return _peak_bytes(jaxpr), jaxpr.outvars[0].aval.shape[0]

    def restore(self, numbers: Numbers) -> Any:
        """NumPy numbers as an array of the caller's dtype."""
        return jax.numpy.asarray(numbers, dtype=self.dtype)

    def _run(self, function: Callable[..., Any], *arrays: Numbers) -> Any:
        with _translate_errors():
            return jax.tree.map(np.asarray, jax.jit(function)(*map(self.restore, arrays)))

    def _flat(self, f: Function) -> Function:
        def flat_function(point: Any) -> Any:
            result = f(point)
            if not isinstance(result, jax.Array):
                raise TypeError(
                    f"f must return one array; got {type(result).__name__}. Choose one, as in lambda x: f(x)[0]."
                )
            if result.dtype != self.dtype:
                raise TypeError(
                    f"f must return numbers of x's dtype, {self.dtype}; got {result.dtype}. Convert what is inside f, "
                    "and return real numbers rather than indices."
                )
            return result.reshape(-1)

        return flat_function


def _derivative(flat: Function) -> Callable[..., Any]:
    def along(point: Any, direction: Any) -> Any:
        return jax.jvp(flat, (point,), (direction,))[1]

    return along


@contextmanager
def _translate_errors() -> Generator[None]:
    try:
        yield
    except (NotImplementedError, TypeError) as error:
        if isinstance(error, TypeError) and "forward-mode" not in str(error):
            raise
        refuse_step(error)


def _peak_bytes(jaxpr: Any) -> int:
    """Most bytes of results that a later step of the trace still needs."""
    last_use = {variable: step for step, equation in enumerate(jaxpr.eqns) for variable in _variables(equation.invars)}
    last_use |= dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns))
    alive: dict[Any, int] = {}
    peak = 0
    for step, equation in enumerate(jaxpr.eqns):
        alive |= {variable: _size(variable) for variable in equation.outvars}
        inner = max((_peak_bytes(jaxpr) for jaxpr in _inner_traces(equation)), default=0)
        peak = max(peak, sum(alive.values()) + inner)
        alive = {variable: size for variable, size in alive.items() if last_use.get(variable, -1) > step}
    return peak


def _inner_traces(equation: Any) -> list[Any]:
    """The traces inside an equation: of a jitted function, of a loop."""
    found = [getattr(parameter, "jaxpr", parameter) for parameter in equation.params.values()]
    return [jaxpr for jaxpr in found if hasattr(jaxpr, "eqns")]


def _variables(atoms: Any) -> list[Any]:
    """Those that are not literals, which alone have a value."""
    return [atom for atom in atoms if not hasattr(atom, "val")]


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
