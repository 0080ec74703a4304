"""One attention layer as plain arrays with a reference forward pass: the interchange between frameworks.

Shapes: `H` query heads, `G` key/value heads, `T` positions, `S` attended positions, `h` head width, `d` model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from tidegate._validation import InputError, require_bool, require_positive, require_size
from tidegate.gate import GatePath
from tidegate.gates import Gates
from tidegate.sizes import HeadShape
from tidegate.tensors._checks import broadcast_batches, check_arrays, require_head_mask, require_rank
from tidegate.tensors.attention import attention_output, attention_scores, attention_weights
from tidegate.tensors.gating import GateSources, apply_gate
from tidegate.tensors.heads import repeat_heads
from tidegate.tensors.masking import causal_mask, causal_mask_with_window
from tidegate.tensors.namespace import Array, accumulate, namespace_of, unify
from tidegate.tensors.rotary import Rotary, rotary_angles, rotate
from tidegate.tensors.softmax import log_partition

_AXES = {
    "W_Q": "heads, d, h",
    "W_K": "groups, d, h",
    "W_V": "groups, d, h",
    "W_O": "heads, h, d",
    "b_Q": "heads, h",
    "b_K": "groups, h",
    "b_V": "groups, h",
    "b_O": "d",
    "q_norm": "h",
    "k_norm": "h",
    "metric_diagonal": "heads, h",
    "metric_factor": "heads, m, h",
}

METRIC_FIELDS = {"diagonal": "metric_diagonal", "learned": "metric_factor"}
"""The field of `AttentionArrays` that holds the parameters of a learned metric, by the metric's kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTrace:
    """Every intermediate of one forward pass, heads first."""

    query: Array
    """(..., H, T, h): gated, normalized, rotated, lowered by the metric."""
    key: Array
    """(..., G, S, h): gated, normalized, rotated."""
    value: Array
    """(..., G, S, h), gated."""
    sources: GateSources
    """The arrays that gates read: raw projections and the raw attention output."""
    mask: Array | None
    """(..., T, S) bool: causality, window and the caller's mask; None without a restriction."""
    weights: Array
    """(..., H, T, S), of the keys, without any sink"""
    heads: Array
    """(..., H, T, h): the attention output, gated."""
    projected: Array
    """(..., T, d): the output projection, before a dense gate."""
    output: Array
    """(..., T, d)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionArrays:
    """Weights and options of one attention layer; call it on an input for its output.

    A forward pass projects, gates query, key and value, normalizes, rotates, applies metric and temperature, attends,
    gates the output, projects, and gates the result. Every gate reads raw projections.
    """

    W_Q: Array
    """(H, d, h)"""
    W_K: Array
    """(G, d, h)"""
    W_V: Array
    """(G, d, h)"""
    W_O: Array
    """(H, h, d)"""
    b_Q: Array | None = None
    """(H, h)"""
    b_K: Array | None = None
    """(G, h)"""
    b_V: Array | None = None
    """(G, h)"""
    b_O: Array | None = None
    """(d,)"""
    gates: Gates = field(default_factory=Gates)
    gate_parameters: Mapping[GatePath, Mapping[str, Array]] = field(default_factory=dict[GatePath, Mapping[str, Array]])
    """For each gate's path, its parameters by name."""
    rotary: Rotary | None = None
    q_norm: Array | None = None
    """(h,): scale of the queries' root-mean-square norm; None has no norm."""
    k_norm: Array | None = None
    """(h,): scale of the keys' norm."""
    norm_epsilon: float = 1e-6
    metric_diagonal: Array | None = None
    """(H, h): scores become q · (m ⊙ k) / sqrt(h)."""
    metric_factor: Array | None = None
    """(H, m, h): scores become (W q) · (W k) / sqrt(h), the learned metric Wᵀ W."""
    temperature: float = 1.0
    causal: bool = True
    window: int | None = None
    """Number of keys that a query sees, including itself; only backward if causal. None has no limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gates", Gates.parse(self.gates))
        unify(**self.parameters())
        check_arrays(**{name: (getattr(self, name), axes) for name, axes in _AXES.items()})
        require_positive("norm_epsilon", self.norm_epsilon)
        if self.metric_diagonal is not None and self.metric_factor is not None:
            raise InputError("metric_factor", expected="None beside metric_diagonal", hint="A layer has one metric.")
        require_bool("causal", self.causal)
        require_size("window", self.window, optional=True)
        require_positive("temperature", self.temperature)
        if self.rotary is not None:
            self.rotary.width(self.W_Q.shape[-1])
        paths = [gate.path for gate in self.gates]
        if set(self.gate_parameters) != set(paths):
            given = sorted(self.gate_parameters)
            raise InputError("gate_parameters", expected=f"one entry for each gate, {paths}", got=given)
        for gate in self.gates:
            expected = gate.parameter_shapes(**asdict(self.shape))
            given = {name: tuple(array.shape) for name, array in self.gate_parameters[gate.path].items()}
            if given != expected:
                raise InputError(f"gate_parameters[{gate.path!r}]", expected=f"of shapes {expected}", got=given)

    @property
    def shape(self) -> HeadShape:
        """The layer's sizes, for its gates."""
        heads, d_model, head_dim = self.W_Q.shape
        return HeadShape(d_model=d_model, num_heads=heads, num_kv_heads=self.W_K.shape[0], head_dim=head_dim)

    def parameters(self) -> dict[str, Array]:
        """Return every array by a flat name, `gate.<path>.<name>` for those of gates."""
        named = {name: getattr(self, name) for name in _AXES}
        gates = {
            f"gate.{path}.{name}": array
            for path, arrays in self.gate_parameters.items()
            for name, array in arrays.items()
        }
        return {name: array for name, array in named.items() if array is not None} | gates

    def with_parameters(self, parameters: Mapping[str, Array]) -> AttentionArrays:
        """Return the layer with some arrays replaced, named as `parameters()` names them."""
        known = self.parameters()
        if unknown := set(parameters) - set(known):
            raise InputError("parameters", expected=f"among {sorted(known)}", got=sorted(unknown))
        own = {name: array for name, array in parameters.items() if not name.startswith("gate.")}
        gates = {
            path: {name: parameters.get(f"gate.{path}.{name}", array) for name, array in arrays.items()}
            for path, arrays in self.gate_parameters.items()
        }
        return replace(self, **own, gate_parameters=gates)

    def __call__(
        self, x: Array, *, context: Array | None = None, mask: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Compute the layer's output; arguments as in `trace`."""
        return self.trace(x, context=context, mask=mask, positions=positions).output

    def trace(
        self, x: Array, *, context: Array | None = None, mask: Array | None = None, positions: Array | None = None
    ) -> LayerTrace:
        """Run the forward pass and return all its intermediates.

        Args:
            x: (..., T, d)
            context: (..., S, d) for cross-attention; None attends to x
            mask: bool, broadcasts to (..., H, T, S), True = may attend; a fully masked row gives 0
            positions: (T,) or (batch, T) for the rotary embedding; None counts from 0
        """
        layer, x, context, mask = self.of_kind(x, context, mask)
        xp = namespace_of(x)
        attended = x if context is None else context
        query = project(x, layer.W_Q, layer.b_Q)
        key, value = project(attended, layer.W_K, layer.b_K), project(attended, layer.W_V, layer.b_V)
        sources = GateSources(input=x, context=context, query=query, value=value)
        query = layer.norm_and_rotate(layer.apply_gate_at("query", query, sources), layer.q_norm, positions)
        query = layer.under_metric(query)
        key_positions = positions if context is None else None
        key = layer.norm_and_rotate(layer.apply_gate_at("key", key, sources), layer.k_norm, key_positions)
        value = layer.apply_gate_at("value", value, sources)
        allowed = layer.combined_mask(mask, like=x)
        num_heads = layer.W_Q.shape[0]
        scores = attention_scores(query, repeat_heads(key, num_heads))
        weights = attention_weights(scores, allowed, layer.temperature)
        raw_output = attention_output(weights, repeat_heads(value, num_heads))
        if (sink := layer.gates.at("partition")) is not None:
            # A placebo has scores of 0, so it reads the logarithm of the number of visible keys.
            seen = scores if sink.placebo is None else xp.zeros_like(scores)
            partition = log_partition(accumulate(seen), layer.temperature, allowed)
            sources = replace(sources, partition=partition)
            raw_output = layer.apply_gate_at("partition", raw_output, sources)
        sources = replace(sources, output=raw_output)
        heads = layer.apply_gate_at("output", raw_output, sources)
        projected = xp.einsum("...htk,hkd->...td", heads, layer.W_O)
        projected = projected if layer.b_O is None else projected + layer.b_O
        return LayerTrace(
            query=query,
            key=key,
            value=value,
            sources=sources,
            mask=allowed,
            weights=weights,
            heads=heads,
            projected=projected,
            output=layer.apply_gate_at("dense", projected, sources),
        )

    def apply_gate_at(self, path: GatePath, target: Array, sources: GateSources) -> Array:
        """Apply the gate at a path to the target; without a gate there, return the target."""
        gate = self.gates.at(path)
        return target if gate is None else apply_gate(gate, target, sources, self.gate_parameters[path])

    def norm_and_rotate(self, x: Array, norm: Array | None, positions: Array | None) -> Array:
        """Apply the layer's norm and rotation, if any, to queries or keys (..., heads, T, h)."""
        x = x if norm is None else rms_norm(x, norm, epsilon=self.norm_epsilon)
        if self.rotary is None:
            return x
        return namespace_of(x).astype(rotate(x, self.angles(x, positions)), x.dtype, copy=False)

    def angles(self, x: Array, positions: Array | None) -> Array:
        """Compute rotary angles (..., 1, T, pairs) for queries or keys (..., heads, T, h); None counts from 0."""
        assert self.rotary is not None
        xp = namespace_of(x)
        if positions is None:
            positions = np.arange(x.shape[-2], dtype=np.int64)
        _, steps = unify(positions=positions)
        require_rank("..., position", positions=steps)
        if steps.shape[-1] != x.shape[-2]:
            raise InputError("positions", expected=f"of length {x.shape[-2]}, like x", got=int(steps.shape[-1]))
        angles = rotary_angles(steps, x.shape[-1], self.rotary, like=x)
        return xp.expand_dims(angles, axis=-3)

    def under_metric(self, query: Array) -> Array:
        """Lower the index of queries (..., H, T, h) with the layer's metric, for contraction with the keys."""
        xp = namespace_of(query)
        if self.metric_diagonal is not None:
            return query * self.metric_diagonal[:, None, :]
        if self.metric_factor is not None:
            return xp.einsum("...htk,hmk,hml->...htl", query, self.metric_factor, self.metric_factor)
        return query

    def combined_mask(self, mask: Array | None, *, like: Array) -> Array | None:
        """Combine causality, window and the caller's mask for inputs like (..., T, d); None without a restriction."""
        num_queries = like.shape[-2]
        if self.window is not None:
            back = causal_mask_with_window(num_queries, self.window)
            reach = back if self.causal else back | back.T
        elif self.causal:
            reach = causal_mask(num_queries)
        else:
            return mask
        _, reach, _ = unify(reach=reach, like=like)
        return reach if mask is None else reach & mask

    def of_kind(
        self, x: Array, context: Array | None, mask: Array | None
    ) -> tuple[AttentionArrays, Array, Array, Array]:
        """Check the inputs, and convert NumPy constants among layer and inputs to the caller's kind of array."""
        own = self.parameters()
        _, x, context, mask, *arrays = unify(x=x, context=context, mask=mask, **own)
        check_arrays(
            W_Q=(self.W_Q, _AXES["W_Q"]), x=(x, "..., position, d"), context=(context, "..., position of context, d")
        )
        if context is not None and (self.causal or self.window is not None):
            hint = "Both compare positions of one sequence. Use causal=False and window=None for cross-attention."
            raise InputError("context", expected="None in a layer that is causal or has a window", hint=hint)
        attended = x if context is None else context
        batch = broadcast_batches(x=tuple(x.shape)[:-2], context=tuple(attended.shape)[:-2])
        require_head_mask(mask, (*batch, self.W_Q.shape[0], x.shape[-2], attended.shape[-2]))
        return self.with_parameters(dict(zip(own, arrays, strict=True))), x, context, mask


def project(x: Array, weight: Array, bias: Array | None) -> Array:
    """Project (..., T, d) by one matrix per head, (heads, d, h), to (..., heads, T, h)."""
    projected = namespace_of(x).einsum("...td,hdk->...htk", x, weight)
    return projected if bias is None else projected + bias[:, None, :]


def rms_norm(x: Array, scale: Array, *, epsilon: float = 1e-6) -> Array:
    r"""Return $x / \sqrt{\mathrm{mean}(x^2) + \epsilon} \odot s$ over the last axis, computed in float32 or better.

    Args:
        x: (..., h)
        scale: (h,)
        epsilon: Added to the mean square.
    """
    xp, x, scale = unify(x=x, scale=scale)
    wide = accumulate(x)
    normed = wide / xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return xp.astype(normed, x.dtype, copy=False) * scale
