r"""Predict the directions in a layer's parameters that change no output, without data.

Between value and output projection a head may change basis, $W_V \to W_V R$, $W_O \to R^{-1} W_O$; between query and
key, $W_Q \to W_Q S$, $W_K \to W_K S^{-\top}$. The heads of a key/value group share one $R$ and one $S$. Gates, norms
and rotations between the two projections restrict $R$ and $S$; a gate that reads a vector follows its basis.

Shapes: `H` query heads, `G` key/value groups, `h` channels of a head, `d` model width, `w` channels that rotate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from tidegate.experts.layers import Layer, as_layer_arrays
from tidegate.gate import Gate, GatePath, Site
from tidegate.gates import Gates
from tidegate.tensors.layer import AttentionArrays

Basis: TypeAlias = Literal["linear", "scaling", "fixed"]
"""The gauge of a head's channels: any invertible matrix, scalings and permutations, or none that is known."""
Side: TypeAlias = Literal["query-key", "value-output"]

SIDES: dict[Side, tuple[Site, ...]] = {"query-key": ("query", "key"), "value-output": ("value", "output")}
"""Sites between the two projections of each side."""

_SAME = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class GaugePrediction:
    """The number of independent directions that change no output, by origin."""

    query_key: int
    """Changes of basis between query and key."""
    value_output: int
    """Changes of basis between value and output projection."""
    key_bias: int = 0
    """Key biases that shift all scores of a query equally, which the softmax ignores."""
    value_bias: int = 0
    """Value biases that the output bias can undo, because weights sum to 1; with a sink they do not."""
    norm_scales: int = 0
    """Factors that the scales of the query and key norms can exchange."""
    gate_factors: int = 0
    """Changes of basis between the two factors of low-rank gates."""
    value_gate_factors: int = 0
    """The part of `gate_factors` in gates that read values or attention outputs."""
    gate_reads: int = 0
    """Unread directions of gates that read the concatenated queries of a group, if these exceed the input's width."""
    soft: int = 0
    """Further directions that are determined only by the epsilon of query and key norms."""

    @property
    def nullity(self) -> int:
        """Return the nullity of the whole layer, without soft directions."""
        bases = self.query_key + self.value_output
        biases = self.key_bias + self.value_bias
        return bases + biases + self.norm_scales + self.gate_factors + self.gate_reads

    @property
    def value_block_nullity(self) -> int:
        """Return the nullity within value and output projections, their biases, and gates that read either."""
        return self.value_output + self.value_bias + self.value_gate_factors


def predict_gauge(layer: Layer) -> GaugePrediction | None:
    """Count the layer's flat directions at generic parameters; None if `why_unpredicted` returns a reason.

    The scales of norms need not be generic: channels with equal scales, as at initialization, may still rotate.
    """
    arrays = as_layer_arrays(layer)
    if why_unpredicted(arrays) is not None:
        return None
    shape = arrays.shape
    groups, width = shape.num_kv_heads, shape.head_dim
    turned = 0 if arrays.rotary is None else arrays.rotary.width(width)
    # A sink responds to shifts that the softmax over keys ignores.
    unseen = arrays.gates.at("key") is None and arrays.gates.at("partition") is None
    key_bias_free = arrays.b_K is not None and unseen and arrays.k_norm is None
    strict = GaugePrediction(
        query_key=groups * _query_key_directions(arrays, turned),
        value_output=groups * (width**2 if basis_gauge(arrays, "value-output") == "linear" else width),
        key_bias=groups * (width - turned) if key_bias_free else 0,
        value_bias=_value_bias_directions(arrays),
        norm_scales=0 if arrays.q_norm is None else width - turned // 2,
        gate_factors=sum(_factor_directions(arrays, gate) for gate in arrays.gates),
        value_gate_factors=sum(_factor_directions(arrays, gate) for gate in arrays.gates if reads_values(gate)),
        gate_reads=sum(_unread_directions(arrays, gate) for gate in arrays.gates),
    )
    return strict if arrays.q_norm is None else replace(strict, soft=_soft_directions(arrays, strict))


def basis_gauge(layer: AttentionArrays, side: Side) -> Basis:
    """Return the changes of basis that one side allows; an elementwise gate leaves only scalings and permutations.

    `fixed` also covers cases without a theory: gates with the op `add`, gates that read only some channels or tie all
    groups together, a metric, and heads wider than the model.
    """
    between = [gate for site in SIDES[side] if (gate := layer.gates.at(site)) is not None]
    if any(gate.op != "multiply" for gate in between) or any(_reads_in_part(layer, gate, side) for gate in layer.gates):
        return "fixed"
    metric = layer.metric_diagonal is not None or layer.metric_factor is not None
    if (side == "query-key" and metric) or layer.shape.head_dim > layer.shape.d_model:
        return "fixed"
    return "scaling" if any(gate.grain == "element" for gate in between) else "linear"


def _reads_in_part(layer: AttentionArrays, gate: Gate, side: Side) -> bool:
    reads_side = gate.reads == "query" if side == "query-key" else reads_values(gate)
    tied = gate.share == "layer" and layer.shape.num_kv_heads > 1
    return reads_side and (gate.width is not None or tied)


def reads_values(gate: Gate) -> bool:
    """Return whether the gate reads values or attention outputs, so that it follows a change of their basis."""
    return gate.reads in ("value", "output")


def why_unpredicted(layer: Layer) -> str | None:
    """Return the reason why there is no prediction for the layer; None if there is one."""
    arrays = as_layer_arrays(layer)
    if arrays.metric_diagonal is not None or arrays.metric_factor is not None:
        return "the directions of a learned metric of the scores are not counted"
    if arrays.shape.head_dim > arrays.shape.d_model:
        return "the additional directions of heads wider than the model are not counted"
    if (arrays.q_norm is None) != (arrays.k_norm is None):
        return "only one of query and key is normalized"
    if arrays.q_norm is not None and arrays.rotary is not None and arrays.rotary.base == 1:
        return "pairs with equal frequencies under query and key norms are not counted"
    reasons = (_why_gate_unpredicted(gate, arrays.shape.num_kv_heads) for gate in arrays.gates)
    return next((reason for reason in reasons if reason is not None), None)


def _why_gate_unpredicted(gate: Gate, num_groups: int) -> str | None:
    if gate.op == "replace":
        return f"gate {gate} is not a factor"
    if gate.op == "add":
        return f"gate {gate} adds"
    if gate.placebo is not None:
        return f"gate {gate} is a placebo"
    if gate.reads == "nothing":
        return f"gate {gate} is constant, so that its scale is not identified"
    if gate.activation == "identity":
        return f"gate {gate} is linear, so that its scale is not identified"
    if gate.reads != "input" and gate.width is not None:
        return f"gate {gate} reads only some channels of a head"
    if gate.reads != "input" and gate.share == "layer" and num_groups > 1:
        return f"gate {gate} ties the bases of all heads together"
    return None


def _query_key_directions(arrays: AttentionArrays, turned: int) -> int:
    """Count for one group: a rotation leaves a complex factor per pair, a norm only rotations among equal scales."""
    still = arrays.shape.head_dim - turned
    mixing = basis_gauge(arrays, "query-key") == "linear"
    if arrays.q_norm is not None:
        return _turns_under_norms(arrays, turned) if mixing else 0
    if not mixing:
        return turned // 2 + still
    frequencies = [] if arrays.rotary is None else arrays.rotary.frequencies(arrays.shape.head_dim)
    return sum(2 * count**2 for count in Counter(frequencies).values()) + still**2


def _turns_under_norms(arrays: AttentionArrays, turned: int) -> int:
    query, key = np.abs(np.asarray(arrays.q_norm)), np.abs(np.asarray(arrays.k_norm))
    first, second = slice(0, turned // 2), slice(turned // 2, turned)
    alike = [np.isclose(scale[first], scale[second], rtol=_SAME, atol=0) for scale in (query, key)]
    # Rotations in the plane of two channels with equal scales change no score.
    scales = query[turned:] * key[turned:]
    equal = np.isclose(scales[:, None], scales[None, :], rtol=_SAME, atol=0)
    return int(np.sum(alike[0] & alike[1])) + (int(np.sum(equal)) - len(scales)) // 2


def _value_bias_directions(arrays: AttentionArrays) -> int:
    """Count shifts of the value biases that `b_O` undoes; gates that read them must ignore them or have a bias."""
    paths: tuple[GatePath, ...] = ("value", "partition", "output")
    if arrays.b_V is None or arrays.b_O is None or any(arrays.gates.at(path) for path in paths):
        return 0
    shape = arrays.shape
    seen = [gate for gate in arrays.gates if reads_values(gate) and gate.bias is None]
    by_group = sum(
        _matrix_rank(arrays, gate) * gate.num_matrices(shape) // shape.num_kv_heads
        for gate in seen
        if gate.site != "dense"
    )
    left = shape.num_kv_heads * max(shape.head_dim - by_group, 0)
    return max(left - sum(_matrix_rank(arrays, gate) for gate in seen if gate.site == "dense"), 0)


def _matrix_rank(arrays: AttentionArrays, gate: Gate) -> int:
    read, gated = gate.read_width(arrays.shape), gate.gated_width(arrays.shape)
    return min(read, gated, gate.rank or gated)


def _factor_directions(arrays: AttentionArrays, gate: Gate) -> int:
    """Count the excess of a low-rank gate's numbers over the degrees of freedom of the product."""
    if gate.rank is None:
        return 0
    read, gated, rank = gate.read_width(arrays.shape), gate.gated_width(arrays.shape), _matrix_rank(arrays, gate)
    return gate.num_matrices(arrays.shape) * (gate.rank * (read + gated) - rank * (read + gated - rank))


def _unread_directions(arrays: AttentionArrays, gate: Gate) -> int:
    """Count directions beyond the rank of a group's concatenated queries, which are a linear map of the input."""
    if gate.reads != "query" or not gate.on_source:
        return 0
    spanned = arrays.shape.d_model + (arrays.b_Q is not None and gate.bias is None)
    excess = max(gate.read_width(arrays.shape) - spanned, 0)
    return gate.num_matrices(arrays.shape) * excess * _matrix_rank(arrays, gate)


def _soft_directions(arrays: AttentionArrays, strict: GaugePrediction) -> int:
    """Count the scales of queries and keys, and headwise gates on either, which a norm without epsilon undoes."""
    undone = [gate for gate in arrays.gates if gate.site in ("query", "key") and gate.grain == "head"]
    left = Gates(gate for gate in arrays.gates if gate not in undone)
    sizes = [sum(array.size for array in arrays.gate_parameters[gate.path].values()) for gate in undone]
    if undone:
        parameters = {gate.path: arrays.gate_parameters[gate.path] for gate in left}
        without = predict_gauge(replace(arrays, gates=left, gate_parameters=parameters))
        assert without is not None
        return without.nullity + without.soft + sum(sizes) - strict.nullity
    # Query heads that share a gate that reads them can only be scaled together.
    readers = [gate for gate in arrays.gates if gate.reads == "query" and not gate.on_source]
    sizes_of_queries = min([arrays.shape.num_heads, *(gate.num_matrices(arrays.shape) for gate in readers)])
    return sizes_of_queries + arrays.shape.num_kv_heads
