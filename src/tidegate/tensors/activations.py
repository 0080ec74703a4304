"""The activations of the gate vocabulary, each beside its slope."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.gate import Activation
from tidegate.tensors.namespace import Array, Namespace, namespace_of


def activate(activation: Activation, logits: Array) -> Array:
    r"""$\phi(z)$: sigmoid, silu $z\sigma(z)$, softplus, tanh1 $1+\tanh z$, twosigmoid $2\sigma(z)$, or identity.

    A sigmoid lies in [0, 1], ends included in floating point; `tanh1` and `twosigmoid` are exactly 1 at zero.
    """
    return _ACTIVATIONS[activation][0](namespace_of(logits), logits)


def activation_slope(activation: Activation, logits: Array) -> Array:
    r"""$\phi'(z)$, by hand."""
    return _ACTIVATIONS[activation][1](namespace_of(logits), logits)


def _sigmoid(xp: Namespace, z: Array) -> Array:
    # Each side by the exponential that cannot overflow there, so that small gates keep all their digits.
    above, below = xp.exp(-xp.where(z >= 0, z, 0.0)), xp.exp(xp.where(z < 0, z, 0.0))
    return xp.where(z >= 0, 1 / (1 + above), below / (1 + below))


def _sigmoid_slope(xp: Namespace, z: Array) -> Array:
    return _sigmoid(xp, z) * _sigmoid(xp, -z)


_ACTIVATIONS: dict[Activation, tuple[Callable[[Namespace, Array], Array], Callable[[Namespace, Array], Array]]] = {
    "sigmoid": (_sigmoid, _sigmoid_slope),
    "silu": (lambda xp, z: z * _sigmoid(xp, z), lambda xp, z: _sigmoid(xp, z) + z * _sigmoid_slope(xp, z)),
    "softplus": (lambda xp, z: xp.logaddexp(z, xp.zeros_like(z)), _sigmoid),
    "tanh1": (lambda xp, z: 1 + xp.tanh(z), lambda xp, z: 1 - xp.tanh(z) ** 2),
    "twosigmoid": (lambda xp, z: 2 * _sigmoid(xp, z), lambda xp, z: 2 * _sigmoid_slope(xp, z)),
    "identity": (lambda _, z: z, lambda xp, z: xp.ones_like(z)),
}
