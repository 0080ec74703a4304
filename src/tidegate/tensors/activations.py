"""The activations of the gate vocabulary and their slopes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from tidegate.gate import Activation
from tidegate.tensors.namespace import Array, Namespace, namespace_of


def activate(activation: Activation, logits: Array) -> Array:
    r"""Return $\phi(z)$ for one of the activations of `Gate`.

    They are sigmoid, silu $z\sigma(z)$, softplus, the exact gelu $z\Phi(z)$, tanh, tanh1 $1+\tanh z$, twosigmoid
    $2\sigma(z)$ and identity $z$. In floating point a sigmoid reaches 0 and 1; `tanh1` and `twosigmoid` are exactly 1
    at zero.
    """
    return _ACTIVATIONS[activation][0](namespace_of(logits), logits)


def activation_slope(activation: Activation, logits: Array) -> Array:
    r"""Return $\phi'(z)$, derived by hand."""
    return _ACTIVATIONS[activation][1](namespace_of(logits), logits)


def _sigmoid(xp: Namespace, z: Array) -> Array:
    # The exponent is never positive, so nothing overflows and small gates keep full precision.
    above, below = xp.exp(-xp.where(z >= 0, z, 0.0)), xp.exp(xp.where(z < 0, z, 0.0))
    return xp.where(z >= 0, 1 / (1 + above), below / (1 + below))


def _sigmoid_slope(xp: Namespace, z: Array) -> Array:
    return _sigmoid(xp, z) * _sigmoid(xp, -z)


def _normal_below(z: Array) -> Array:
    """Return the distribution function of the standard normal."""
    return (1 + _erf(z * math.sqrt(0.5))) / 2


def _erf(array: Array) -> Array:
    if isinstance(array, np.ndarray):
        values: Array = np.vectorize(math.erf, otypes=[np.float64])(array)
        return values.astype(cast("Any", array).dtype)
    if hasattr(array, "erf"):
        return array.erf()
    import jax

    return jax.lax.erf(array)


def _gelu_slope(xp: Namespace, z: Array) -> Array:
    # The density is 0 beyond 40 in any dtype; the square of a huge float32 would overflow.
    near = xp.where(xp.abs(z) < 40, z, 0.0)
    return _normal_below(z) + near * xp.exp(-(near**2) / 2) / math.sqrt(2 * math.pi)


_ACTIVATIONS: dict[Activation, tuple[Callable[[Namespace, Array], Array], Callable[[Namespace, Array], Array]]] = {
    "sigmoid": (_sigmoid, _sigmoid_slope),
    "silu": (lambda xp, z: z * _sigmoid(xp, z), lambda xp, z: _sigmoid(xp, z) + z * _sigmoid_slope(xp, z)),
    "softplus": (lambda xp, z: xp.logaddexp(z, xp.zeros_like(z)), _sigmoid),
    "tanh1": (lambda xp, z: 1 + xp.tanh(z), lambda xp, z: 1 - xp.tanh(z) ** 2),
    "twosigmoid": (lambda xp, z: 2 * _sigmoid(xp, z), lambda xp, z: 2 * _sigmoid_slope(xp, z)),
    "identity": (lambda _, z: z, lambda xp, z: xp.ones_like(z)),
    "gelu": (lambda _, z: z * _normal_below(z), _gelu_slope),
    "tanh": (lambda xp, z: xp.tanh(z), lambda xp, z: 1 - xp.tanh(z) ** 2),
}
