r"""Apply or draw changes of basis that leave a layer's function unchanged.

value side : $W_V \to W_V R$, $b_V \to b_V R$, $W_O \to R^{-1} W_O$
query side : $W_Q \to W_Q S$, $b_Q \to b_Q S$, $W_K \to W_K S^{-\top}$, $b_K \to b_K S^{-\top}$

Gates that read transformed channels change their rows; elementwise gates on transformed channels permute their columns.
Shapes: `H` query heads, `G` key/value groups, `h` channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tidegate._validation import InputError
from tidegate.experts.gauge_theory import SIDES, Basis, Side, basis_gauge, reads_values
from tidegate.experts.layers import Floats, Layer, as_layer_arrays
from tidegate.gate import Gate, GatePath
from tidegate.tensors.heads import repeat_heads
from tidegate.tensors.layer import AttentionArrays

_ROUNDING = 1e-9


def change_basis(layer: Layer, *, value: Floats | None = None, query: Floats | None = None) -> AttentionArrays:
    """Return the layer at other parameters with the same function.

    Args:
        layer: `AttentionArrays`, or a layer whose `arrays()` returns them.
        value: (G, h, h), R of each key/value group; None does not change the value side.
        query: (G, h, h), S of each group.

    Raises:
        InputError: The change would alter the function.
    """
    arrays = as_layer_arrays(layer)
    if value is not None:
        _require_allowed(arrays, "value-output", value)
        if basis_gauge(arrays, "value-output") != "fixed":
            arrays = _change_value(arrays, value)
    if query is not None:
        _require_allowed(arrays, "query-key", query)
        if basis_gauge(arrays, "query-key") != "fixed":
            arrays = _change_query(arrays, query)
    return arrays


def random_gauge(layer: Layer, rng: np.random.Generator) -> AttentionArrays:
    """Return the layer at a random point of its gauge orbit: other parameters with the same function."""
    arrays = as_layer_arrays(layer)
    draws = {
        side: np.stack([_random_basis(arrays, side, rng) for _ in range(arrays.shape.num_kv_heads)])
        for side in ("value-output", "query-key")
    }
    return change_basis(arrays, value=draws["value-output"], query=draws["query-key"])


def channels_may_move(layer: AttentionArrays, side: Side) -> bool:
    """Return whether each group's channels may be permuted.

    They may not in rotating pairs, under norms, or if all groups share the columns of an elementwise gate.
    """
    if side == "query-key" and (layer.rotary is not None or layer.q_norm is not None or layer.k_norm is not None):
        return False
    gates = (layer.gates.at(site) for site in SIDES[side])
    shared = [gate for gate in gates if gate is not None and gate.grain == "element" and gate.share == "layer"]
    return not shared or layer.shape.num_kv_heads == 1


def _change_value(arrays: AttentionArrays, basis: Floats) -> AttentionArrays:
    inverse = np.linalg.inv(basis)
    heads = arrays.shape.num_heads
    moved: dict[str, Any] = {"W_V": arrays.W_V @ basis, "W_O": repeat_heads(inverse, heads) @ arrays.W_O}
    if arrays.b_V is not None:
        moved["b_V"] = (arrays.b_V[:, None, :] @ basis)[:, 0, :]
    return replace(arrays, **moved, gate_parameters=_moved_gates(arrays, "value-output", basis, inverse))


def _change_query(arrays: AttentionArrays, basis: Floats) -> AttentionArrays:
    inverse = np.linalg.inv(basis)
    heads, dual = arrays.shape.num_heads, np.swapaxes(inverse, -1, -2)
    moved: dict[str, Any] = {"W_Q": arrays.W_Q @ repeat_heads(basis, heads), "W_K": arrays.W_K @ dual}
    if arrays.b_Q is not None:
        moved["b_Q"] = (arrays.b_Q[:, None, :] @ repeat_heads(basis, heads))[:, 0, :]
    if arrays.b_K is not None:
        moved["b_K"] = (arrays.b_K[:, None, :] @ dual)[:, 0, :]
    return replace(arrays, **moved, gate_parameters=_moved_gates(arrays, "query-key", basis, inverse))


def _moved_gates(arrays: AttentionArrays, side: Side, basis: Floats, inverse: Floats) -> dict[GatePath, Any]:
    """Return the parameters of all gates after a change of basis on one side."""
    order = (np.abs(basis) > 0).astype(np.float64) if channels_may_move(arrays, side) else None
    return {gate.path: _follow(arrays, gate, side, inverse, order) for gate in arrays.gates}


def _follow(
    arrays: AttentionArrays, gate: Gate, side: Side, inverse: Floats, order: Floats | None
) -> Mapping[str, Floats]:
    """Return a gate's parameters after a change of basis of its input, or a permutation of its target."""
    parameters = {name: np.asarray(array) for name, array in arrays.gate_parameters[gate.path].items()}
    if reads_values(gate) if side == "value-output" else gate.reads == "query":
        name = "weight" if gate.rank is None else "weight_down"
        matrices = parameters[name].shape[0]
        blocks = parameters[name].reshape(matrices, -1, arrays.shape.head_dim, parameters[name].shape[-1])
        groups = _group_of_block(arrays, gate, blocks.shape[0], blocks.shape[1])
        parameters[name] = (inverse[groups] @ blocks).reshape(parameters[name].shape)
    # Only elementwise gates act on single channels.
    if order is not None and gate.site in SIDES[side] and gate.grain == "element":
        for name in ("weight", "weight_up"):
            if name in parameters:
                parameters[name] = parameters[name] @ repeat_heads(order, parameters[name].shape[0])
        if "bias" in parameters:
            columns = repeat_heads(order, parameters["bias"].shape[0])
            parameters["bias"] = (parameters["bias"][:, None, :] @ columns)[:, 0, :]
    return parameters


def _group_of_block(arrays: AttentionArrays, gate: Gate, matrices: int, blocks: int) -> Any:
    """Return the key/value group that each block of h rows of the gate's matrices reads, (matrices, blocks)."""
    groups = arrays.shape.num_kv_heads
    if gate.site == "dense":
        return (np.arange(blocks) * groups // blocks)[None, :]
    return np.broadcast_to((np.arange(matrices) * groups // matrices)[:, None], (matrices, blocks))


def _require_allowed(arrays: AttentionArrays, side: Side, basis: Floats) -> None:
    name = "value" if side == "value-output" else "query"
    groups, width = arrays.shape.num_kv_heads, arrays.shape.head_dim
    if basis.shape != (groups, width, width):
        raise InputError(name, expected=f"an array of shape {(groups, width, width)}", got=basis.shape)
    identity = np.eye(width)
    gauge: Basis = basis_gauge(arrays, side)
    if gauge == "fixed" and not np.array_equal(basis, np.broadcast_to(identity, basis.shape)):
        raise InputError(name, expected="identity matrices: the layer's gates or metric allow no known change of basis")
    if gauge == "scaling" and np.any((np.abs(basis) > 0).sum(axis=-1) != 1):
        raise InputError(name, expected="scalings and permutations of channels, because of an elementwise gate")
    if gauge != "linear" and not channels_may_move(arrays, side) and np.any(basis * (1 - identity)):
        raise InputError(name, expected="diagonal, because heads share the order of channels or a rotation pairs them")
    if side == "query-key":
        # The generator of the rotation by position must commute with the basis.
        turning = np.zeros((width, width))
        frequencies = [] if arrays.rotary is None else arrays.rotary.frequencies(width)
        for first, frequency in enumerate(frequencies):
            second = first + len(frequencies)
            turning[first, second], turning[second, first] = frequency, -frequency
        if np.max(np.abs(basis @ turning - turning @ basis)) > _ROUNDING * np.max(np.abs(basis)):
            raise InputError("query", expected="one complex factor per pair, because of the rotary embedding")
        normed = arrays.q_norm is not None or arrays.k_norm is not None
        if normed and not np.array_equal(np.abs(basis), np.broadcast_to(identity, basis.shape)):
            raise InputError("query", expected="signs of channels, because of query and key norms")


def _random_basis(arrays: AttentionArrays, side: Side, rng: np.random.Generator) -> Floats:
    """Return a random change of basis (h, h) that the side allows."""
    width, gauge = arrays.shape.head_dim, basis_gauge(arrays, side)
    if gauge == "fixed":
        return np.eye(width)
    turned = 0
    if side == "query-key" and arrays.rotary is not None:
        turned = arrays.rotary.width(width)
    normed = side == "query-key" and (arrays.q_norm is not None or arrays.k_norm is not None)
    basis = np.zeros((width, width))
    pairs = turned // 2
    for first in range(pairs):
        basis[np.ix_((first, first + pairs), (first, first + pairs))] = _random_pair(rng, gauge, normed=normed)
    still = width - turned
    if gauge == "linear" and not normed:
        # Singular values between 1/e and e.
        left, right = (np.linalg.qr(rng.standard_normal((still, still)))[0] for _ in range(2))
        basis[turned:, turned:] = left * np.exp(rng.uniform(-1, 1, still)) @ right
    else:
        sizes = np.ones(still) if normed else np.exp(rng.uniform(-1, 1, still))
        signs = rng.choice((-1.0, 1.0), still)
        order = rng.permutation(still) if channels_may_move(arrays, side) else np.arange(still)
        basis[turned:, turned:] = np.diag(sizes * signs)[:, order]
    return basis


def _random_pair(rng: np.random.Generator, gauge: Basis, *, normed: bool) -> Floats:
    if normed:
        return rng.choice((-1.0, 1.0)) * np.eye(2)
    size = np.exp(rng.uniform(-1, 1))
    angle = rng.uniform(0, 2 * np.pi) if gauge == "linear" else np.pi * rng.integers(2)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return size * (turn if gauge == "linear" else np.round(turn))
