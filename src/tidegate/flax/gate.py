"""Gates as pure functions of JAX arrays.

Legend: B batch, T positions, S attended positions, H query heads, G key/value heads, M model width, R read width,
D gated width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
from jax import Array

from tidegate.gate import Activation, Gate
from tidegate.sizes import HeadShape
from tidegate.tensors.gating import init_gate_parameters

_ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "tanh1": lambda z: 1 + jnp.tanh(z),
    "twosigmoid": lambda z: 2 * jax.nn.sigmoid(z),
    "identity": lambda z: z,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "tanh": jnp.tanh,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReads:
    """The arrays that a gate may read, before other gates, norms and rotation. Positions first, then heads."""

    input: Array
    """(B, T, M): the layer's input."""
    context: Array
    """(B, S, M): the attended sequence; the input itself in self-attention."""
    query: Array
    """(B, T, H, D)"""
    value: Array
    """(B, S, G, D)"""
    output: Array | None = None
    """(B, T, H, D): the attention output, including any sink; None before it is computed."""
    partition: Array | None = None
    """(B, T, H): the logarithm of the partition function of the keys, for a trace."""


def init_gate(
    key: Array, gate: Gate, shape: HeadShape, *, dtype: jax.typing.DTypeLike = jnp.float32
) -> dict[str, Array]:
    """Return initial parameters by name, as `tidegate.tensors.init_gate_parameters` draws them."""
    return {name: array.astype(dtype) for name, array in init_gate_parameters(key, gate, **asdict(shape)).items()}


def apply_gate(gate: Gate, target: Array, reads: GateReads, parameters: Mapping[str, Array]) -> Array:
    """Return the gated target (B, T, heads, D), or (B, T, M) at the dense site, in the target's dtype."""
    values = gate_values(gate, reads, parameters)
    match gate.op:
        case "multiply":
            gated = target * values
        case "add":
            gated = target + values
        case "replace":
            gated = values
    return gated.astype(target.dtype)


def gate_values(gate: Gate, reads: GateReads, parameters: Mapping[str, Array]) -> Array:
    """Return the gate's values (B, T, heads, D), D = 1 for the grain `head`; at the dense site (B, T, M)."""
    values = activate(gate.activation, gate_logits(gate, reads, parameters))
    return values[..., 0, :] if gate.site == "dense" else values


def gate_logits(gate: Gate, reads: GateReads, parameters: Mapping[str, Array]) -> Array:
    """Return the logits (B, T, heads, D), in float32 or better for any dtype of the layer."""
    matrices = [parameters[name] for name in ("weight", "weight_down", "weight_up") if name in parameters]
    num_heads = 1 if gate.site == "dense" else (reads.value if gate.on_source else reads.query).shape[-2]
    if gate.is_input_independent:
        positions = (reads.context if gate.on_source else reads.input).shape[:2]
        logits = widen(jnp.zeros((*positions, 1, 1, 1), reads.input.dtype))
    else:
        # Without a matrix each head has its own source, such as its partition function.
        num_matrices = matrices[0].shape[0] if matrices else num_heads
        logits = widen(_source(gate, reads, num_heads, num_matrices=num_matrices))
    for weight in matrices:
        logits = _product(logits, widen(weight))
    if gate.has_bias:
        logits = logits + widen(parameters["bias"])[:, None, :]
    elif gate.bias:
        logits = logits + gate.bias
    *leading, num_matrices, _, width = logits.shape
    every_head = (*leading, num_matrices, num_heads // num_matrices, width)
    return jnp.broadcast_to(logits, every_head).reshape(*leading, num_heads, width)


def sink_logits(gate: Gate, parameters: Mapping[str, Array], num_heads: int) -> Array:
    """Return the logit of each head's sink, (H,): minus the bias of a gate that reads the partition function."""
    return -parameters["bias"][:, 0] if gate.has_bias else jnp.zeros(num_heads)


def activate(activation: Activation, logits: Array) -> Array:
    """Apply an activation as `tidegate.tensors.activate` does, by JAX's own functions."""
    return _ACTIVATIONS[activation](logits)


def widen(x: Array) -> Array:
    """Convert x to float32 or better."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _source(gate: Gate, reads: GateReads, num_heads: int, *, num_matrices: int) -> Array:
    """Return the gate's source: (B, T, R), shared by all heads, or (B, T, matrices, heads of each, R)."""
    match gate.reads:
        case "input":
            source = reads.context if gate.on_source else reads.input
        case "query":
            # The heads of a group are adjacent, so merging them is a reshape.
            source = _merge_heads(reads.query, num_heads)
        case "value":
            source = jnp.repeat(reads.value, num_heads // reads.value.shape[-2], axis=-2)
        case "output":
            assert reads.output is not None
            source = _merge_heads(reads.output, 1)[..., 0, :] if gate.site == "dense" else reads.output
        case "partition":
            assert reads.partition is not None
            source = reads.partition[..., None]
        case "nothing":
            raise AssertionError("a gate that reads nothing has no source")
    if gate.placebo == "shuffled":
        source = jax.lax.stop_gradient(jnp.roll(source, -1, axis=0))
    source = source if gate.width is None else source[..., : gate.width]
    if source.ndim == reads.input.ndim:
        return source
    *leading, _, width = source.shape
    return source.reshape(*leading, num_matrices, num_heads // num_matrices, width)


def _merge_heads(x: Array, num_heads: int) -> Array:
    """Concatenate adjacent heads of (B, T, heads, D) into `num_heads`; works for an empty batch."""
    *leading, heads, width = x.shape
    return x.reshape(*leading, num_heads, heads // num_heads * width)


def _product(reads: Array, weight: Array) -> Array:
    """Multiply (B, T, R) or (B, T, matrices, heads of each, R) by (matrices, R, D): (B, T, matrices, heads, D)."""
    if reads.ndim == 3:
        return jnp.einsum("btr,nrd->btnd", reads, weight)[..., None, :]
    return jnp.einsum("btnmr,nrd->btnmd", reads, weight)
