r"""Count the free mixtures of a head's channels in layers of any size, along the gauge orbit only.

A small mixture of the channels, $W_V \to W_V (1 + \epsilon A)$, changes the output by

$$\epsilon \sum_{ab} A_{ab} \sum_r \delta^r_{tb} P^r_{tab}\, W^r_{O,bl}, \qquad
  P^r_{tab} = \sum_j a^r_{tj} s_{jb}\, v_{ja}.$$

The output projection may compensate by any change $\sum_{ra} X^r_{ta}\, dW^r_{O,al}$, where
$X^r_{ta} = \delta^r_{ta} P^r_{taa}$ is the head's gated output; the remainder is orthogonal to all of these. It is 0
without a gate between the two projections, or with constant gates. With gates that depend on the token, the singular
values measure how well the data distinguish channels.

Shapes: `N` positions, `R` heads of a group, `h` channels, `d` model width, `q` features that the group can reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate._validation import InputError
from tidegate.experts.decomposition import Decomposition, decompose
from tidegate.experts.gauge import FREE_BELOW
from tidegate.experts.gauge_theory import basis_gauge, reads_values, why_unpredicted
from tidegate.experts.layers import Floats, Layer, as_float64, as_layer_arrays
from tidegate.sizes import HeadShape

_FEWEST_POSITIONS = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChannelGauge:
    """The mixtures of each head's channels that change no output, and the sensitivity to the others."""

    layer: str
    """Name of the layer in the model; empty for a single layer."""
    gate: str
    free: tuple[int, ...]
    """For each key/value group, the number of the h² mixtures that the output projection can undo."""
    predicted: int | None
    """The theoretical number for every group: h² or h; None without a prediction."""
    singular_values: Floats
    """(G, h²), descending: change of the output that W_O cannot undo, for a unit change of W_V, relative to the largest
    change by a unit change of W_O."""


def channel_gauge(layer: Layer, x: Any, *, name: str = "") -> ChannelGauge:
    """Count the free directions of one layer's channels on an input, exactly.

    The cost grows with the sixth power of a head's channels and the memory with the fourth.

    Args:
        layer: `AttentionArrays`, or a layer whose `arrays()` returns them.
        x: (..., T, d); outputs are taken at (R + 2) h positions, at least 64, evenly spread.
        name: Name of the layer in the model.

    Raises:
        InputError: `layer` has a gate that reads values or attention outputs, which would have to follow the change of
            basis; or `x` has fewer than (R + 1) h positions, so that the output projection can undo every change.
    """
    arrays, inputs = as_layer_arrays(layer), as_float64(x)
    shape = arrays.shape
    if followers := [str(gate) for gate in arrays.gates if reads_values(gate)]:
        expected = "a layer whose gates read neither values nor outputs"
        raise InputError("layer", expected=expected, got=followers[0], hint="Use gauge_report, on a small layer.")
    inputs = inputs.reshape(-1, *inputs.shape[-2:])
    size = shape.num_heads // shape.num_kv_heads
    if (positions := int(inputs.shape[0] * inputs.shape[1])) < (needed := positions_needed(shape)):
        raise InputError("x", expected=f"an input of at least (R + 1) h = {needed} positions in all", got=positions)
    parts = decompose(arrays, inputs)
    number = min(max((size + 2) * shape.head_dim, _FEWEST_POSITIONS), positions)
    places = np.unique(np.linspace(0, positions - 1, number).round().astype(int))
    chosen = np.unravel_index(places, inputs.shape[:2])
    rows: list[Floats] = []
    for group in range(shape.num_kv_heads):
        own = slice(group * size, (group + 1) * size)
        left, scale = _changes_left(parts, own, arrays.W_O[own], chosen)
        unit = np.einsum("qnab,ac->qncb", left, _to_unit(arrays.W_V[group]), optimize=True)
        rows.append(_singular_values(unit.reshape(-1, shape.head_dim**2)) / max(scale, np.finfo(np.float64).tiny))
    mixing = basis_gauge(arrays, "value-output")
    return ChannelGauge(
        layer=name,
        gate=str(arrays.gates),
        free=tuple(int(np.sum(row <= FREE_BELOW)) for row in rows),
        predicted=None if why_unpredicted(arrays) else shape.head_dim ** (2 if mixing == "linear" else 1),
        singular_values=np.stack(rows),
    )


def positions_needed(shape: HeadShape) -> int:
    """Return the minimum number of positions that distinguish a mixture of channels from a change of W_O: (R + 1) h."""
    return (shape.num_heads // shape.num_kv_heads + 1) * shape.head_dim


def model_gauge(model: Any, tokens: Any) -> list[ChannelGauge]:
    """Count the free directions of every attention layer of a model, on its own inputs for these tokens.

    Args:
        model: A PyTorch model of `GatedAttention` layers, such as `TransformerLM` or `VisionTransformer`.
        tokens: The model's input: (B, T) tokens, or images.
    """
    from tidegate.experts.torch_adapter import attention_inputs

    return [channel_gauge(arrays, x, name=name) for name, arrays, x in attention_inputs(model, tokens)]


def _changes_left(parts: Decomposition, own: slice, W_O: Floats, chosen: Any) -> tuple[Floats, float]:
    """Return the part of the change by each entry of A that W_O cannot undo, (q, N, h, h), and the largest by W_O."""
    weights = parts.token_weights[:, own][chosen[0], :, chosen[1]]
    values = parts.linear_experts[:, own.start][chosen[0]]
    width = values.shape[-1]
    gate = np.ones((1, 1, width)) if parts.source_gate is None else parts.source_gate[:, own.start]
    gate = np.broadcast_to(gate, (len(parts.token_weights), *gate.shape[1:]))[chosen[0]] * np.ones(width)
    change = np.einsum("nrj,njb,nja->nrab", weights, np.broadcast_to(gate, values.shape), values, optimize=True)
    if parts.destination_gate is not None:
        change = change * (parts.destination_gate[:, own][chosen[0], :, chosen[1]] * np.ones(width))[:, :, None, :]
    heads = np.einsum("nraa->nra", change).reshape(len(change), -1)
    outward: Any = W_O.reshape(-1, W_O.shape[-1]).T
    if parts.outside_gate is None:
        # The change lies in the span of W_O: an orthonormal basis of the span has fewer features and the same norms.
        outward, outside = np.linalg.qr(outward, mode="r"), np.ones((1, len(change)))
    else:
        outside = parts.outside_gate[chosen].T
    moved = np.einsum("nrab,qrb->qnab", change, outward.reshape(len(outward), -1, width), optimize=True)
    moved = (moved * outside[:, :, None, None]).reshape(*moved.shape[:2], -1)
    # Each feature has its own column of W_O, which adds any combination of the head's channels.
    basis, sizes, _ = np.linalg.svd(outside[:, :, None] * heads, full_matrices=False)
    basis = basis * (sizes > FREE_BELOW * sizes[:, :1])[:, None, :]
    left = moved - basis @ (np.swapaxes(basis, 1, 2) @ moved)
    return left.reshape(*left.shape[:2], width, width), float(np.linalg.norm(heads, ord=2))


def _to_unit(W_V: Floats) -> Floats:
    """Return the map (h, h) after which the entries of A change W_V by orthonormal amounts."""
    sizes, turn = np.linalg.eigh(W_V.T @ W_V)
    seen = sizes > FREE_BELOW * sizes[-1]
    return turn * np.where(seen, 1 / np.sqrt(np.where(seen, sizes, 1.0)), 0.0)


def _singular_values(matrix: Floats) -> Floats:
    """Return the singular values (columns,), descending, padded with zeros if there are fewer rows."""
    found = np.linalg.svd(np.linalg.qr(matrix, mode="r"), compute_uv=False)
    return np.concatenate([found, np.zeros(matrix.shape[1] - len(found))])
