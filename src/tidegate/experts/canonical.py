"""Choose a canonical representative of each gauge orbit, to compare heads between checkpoints and seeds.

If channels may mix, the value (and key) channels become orthonormal, ordered by the norms of their outputs. If a gate
leaves only scalings, each value (and key) channel gets norm 1, ordered in the same way if the order is free. In
rotating pairs the key's pair gets norm 1 and its largest entry becomes real. With query and key norms only signs and
the exchange of scales between the two norms remain. Signs make each channel's largest entry positive.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from tidegate._validation import InputError
from tidegate.experts.gauge_theory import basis_gauge
from tidegate.experts.layers import Floats, as_layer_arrays
from tidegate.experts.transform import change_basis, channels_may_move
from tidegate.tensors.layer import AttentionArrays

_Model = TypeVar("_Model")
# The annotations of scipy are partial.
_optimize: Any = optimize
_LARGEST_CONDITION = 1e10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadMatch:
    """The pairing of the heads of two layers."""

    layer: str
    """Name of the layer in the model; empty for a single layer."""
    assignment: NDArray[np.int64]
    """(H,): for each head of the first layer, the paired head of the second."""
    similarity: Floats
    """(H, H): mean cosine of value and output projections, heads of the first layer by heads of the second."""

    @property
    def share_in_place(self) -> float:
        """Return the share of heads paired with the head of the same index; 1/H on average by chance."""
        in_place = np.equal(self.assignment, np.arange(len(self.assignment)))
        return float(np.count_nonzero(in_place)) / len(self.assignment)


def canonicalize(model: _Model) -> _Model:
    """Return a copy of a model with the same function at the canonical parameters.

    Args:
        model: `AttentionArrays`; a PyTorch `GatedAttention`, or a model that contains some, such as `TransformerLM`; or
            a model with Llama-like attention modules, recognized by their `q_proj`, `k_proj`, `v_proj` and `o_proj`.
            In these only the value side changes, because their treatment of queries and keys is not known.
    """
    if isinstance(model, AttentionArrays):
        return canonical_layer(model)
    from tidegate.experts.torch_adapter import canonical_model

    return canonical_model(model)


def canonical_layer(layer: AttentionArrays, *, query_side: bool = True) -> AttentionArrays:
    """Return a layer at its canonical parameters, as NumPy float64 arrays; optionally only its value side."""
    arrays = as_layer_arrays(layer)
    outputs = _by_group(arrays.W_O, arrays.shape.num_kv_heads)
    value = np.stack([_value_basis(arrays, W_V, W_O) for W_V, W_O in zip(arrays.W_V, outputs, strict=True)])
    arrays = change_basis(arrays, value=value)
    if not query_side:
        return arrays
    queries = _by_group(np.swapaxes(arrays.W_Q, 1, 2), arrays.shape.num_kv_heads)
    key = np.stack([_key_basis(arrays, W_K, W_Q) for W_K, W_Q in zip(arrays.W_K, queries, strict=True)])
    return _canonical_norms(change_basis(arrays, query=np.swapaxes(np.linalg.inv(key), -1, -2)))


def match_heads(a: Any, b: Any) -> list[HeadMatch]:
    """Pair the heads of two models layer by layer, maximizing the mean cosine of their value and output projections.

    The models are as for `canonicalize`, with the same layers and sizes. Parameters are compared directly: equal heads
    in different bases look different unless both models are canonical.
    """
    first, second = _layers(a), _layers(b)
    if [name for name, _ in first] != [name for name, _ in second]:
        names = [name for name, _ in second]
        raise InputError("b", expected=f"a model with the attention layers of a, {len(first)} in all", got=names)
    return [_match(name, left, right) for (name, left), (_, right) in zip(first, second, strict=True)]


def _layers(model: Any) -> list[tuple[str, AttentionArrays]]:
    if isinstance(model, AttentionArrays):
        return [("", as_layer_arrays(model))]
    from tidegate.experts.torch_adapter import attention_layers

    return [(found.name, as_layer_arrays(found.arrays)) for found in attention_layers(model)]


def _match(name: str, a: AttentionArrays, b: AttentionArrays) -> HeadMatch:
    if a.shape != b.shape:
        raise InputError("b", expected=f"a model with the sizes of a; at layer {name!r} {a.shape}", got=b.shape)
    repeats = a.shape.num_heads // a.shape.num_kv_heads
    values = [np.repeat(arrays.W_V, repeats, axis=0) for arrays in (a, b)]
    similarity = (_cosines(values[0], values[1]) + _cosines(a.W_O, b.W_O)) / 2
    assignment: Any = _optimize.linear_sum_assignment(similarity, maximize=True)[1]
    return HeadMatch(layer=name, assignment=assignment, similarity=similarity)


def _cosines(a: Floats, b: Floats) -> Floats:
    rows = [array.reshape(len(array), -1) for array in (a, b)]
    unit = [row / np.maximum(np.linalg.norm(row, axis=1, keepdims=True), np.finfo(np.float64).tiny) for row in rows]
    return unit[0] @ unit[1].T


def _by_group(outward: Floats, groups: int) -> Floats:
    """Concatenate the output maps of each group's heads: (H, h, d) gives (G, h, heads of a group · d)."""
    heads, width, d_model = outward.shape
    return np.swapaxes(outward.reshape(groups, heads // groups, width, d_model), 1, 2).reshape(groups, width, -1)


def _value_basis(arrays: AttentionArrays, inward: Floats, outward: Floats) -> Floats:
    """Return R of one group from the maps into its channels (d, h) and out of them (h, ...)."""
    match basis_gauge(arrays, "value-output"):
        case "linear":
            return _orthonormal_basis(inward, outward)
        case "scaling":
            return _unit_basis(inward, outward, ordered=channels_may_move(arrays, "value-output"))
        case "fixed":
            return np.eye(arrays.shape.head_dim)


def _key_basis(arrays: AttentionArrays, inward: Floats, outward: Floats) -> Floats:
    """Return the matrix for the keys of one group; rotating channels change in pairs."""
    width, gauge = arrays.shape.head_dim, basis_gauge(arrays, "query-key")
    basis = np.eye(width)
    if gauge == "fixed":
        return basis
    turned = 0 if arrays.rotary is None else arrays.rotary.width(width)
    normed = arrays.q_norm is not None or arrays.k_norm is not None
    for first in range(turned // 2):
        pair = np.ix_((first, first + turned // 2), (first, first + turned // 2))
        columns = inward[:, [first, first + turned // 2]]
        basis[pair] = _pair_basis(columns, turns=gauge == "linear" and not normed, scales=not normed)
    still = slice(turned, width)
    if normed:
        basis[still, still] = np.diag(_signs(inward[:, still]))
    elif gauge == "linear":
        basis[still, still] = _orthonormal_basis(inward[:, still], outward[still])
    else:
        ordered = channels_may_move(arrays, "query-key")
        basis[still, still] = _unit_basis(inward[:, still], outward[still], ordered=ordered)
    return basis


def _orthonormal_basis(inward: Floats, outward: Floats) -> Floats:
    """Return R with inward R orthonormal and the rows of R⁻¹ outward orthogonal, by descending norm."""
    if inward.shape[1] == 0:
        return np.eye(0)
    directions, triangle = np.linalg.qr(inward)
    if np.linalg.cond(triangle) > _LARGEST_CONDITION:
        warnings.warn(
            "A head's channels are linearly dependent, so that it has no canonical basis; it is not changed.",
            stacklevel=2,
        )
        return np.eye(inward.shape[1])
    turn = np.linalg.svd(triangle @ outward)[0]
    turn = turn * _signs(directions @ turn)
    return np.linalg.solve(triangle, turn)


def _unit_basis(inward: Floats, outward: Floats, *, ordered: bool) -> Floats:
    """Return R that scales each column of inward to norm 1 with a positive largest entry, ordered by outward norms."""
    norms = np.linalg.norm(inward, axis=0)
    norms = np.where(norms > 0, norms, 1.0)
    strengths = norms * np.linalg.norm(outward, axis=1)
    order = np.argsort(-strengths, kind="stable") if ordered else np.arange(len(norms))
    return np.diag(_signs(inward) / norms)[:, order]


def _pair_basis(columns: Floats, *, turns: bool, scales: bool) -> Floats:
    """Return a complex factor, as a real matrix, for the two columns (d, 2) of a rotating pair."""
    numbers = columns[:, 0] + 1j * columns[:, 1]
    largest = numbers[np.argmax(np.abs(numbers))]
    if turns and largest != 0:
        factor = np.conj(largest) / np.abs(largest)
    else:
        factor = complex(_signs(columns.reshape(-1, 1))[0])
    size = float(np.linalg.norm(numbers))
    factor = factor / size if scales and size > 0 else factor
    return np.array([[factor.real, factor.imag], [-factor.imag, factor.real]])


def _signs(columns: Floats) -> Floats:
    """Return the sign of the largest entry of each column; 1 for a column of zeros."""
    largest = np.take_along_axis(columns, np.argmax(np.abs(columns), axis=0)[None, :], axis=0)[0]
    return np.where(largest < 0, -1.0, 1.0)


def _canonical_norms(arrays: AttentionArrays) -> AttentionArrays:
    """Move the scale of the keys' norm to the queries' norm; a rotating pair moves its geometric mean."""
    if arrays.q_norm is None or arrays.k_norm is None or basis_gauge(arrays, "query-key") == "fixed":
        return arrays
    factor = np.abs(arrays.k_norm)
    if np.any(factor == 0):
        return arrays
    turned = 0 if arrays.rotary is None else arrays.rotary.width(arrays.shape.head_dim)
    half = turned // 2
    mean = np.sqrt(factor[:half] * factor[half:turned])
    factor = np.concatenate([mean, mean, factor[turned:]])
    return replace(arrays, q_norm=arrays.q_norm * factor, k_norm=arrays.k_norm / factor)
