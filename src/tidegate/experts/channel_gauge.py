r"""Count the free mixtures of a head's channels in layers of any size, along the directions of the gauge orbit alone.

A small change of basis, $W_V \to W_V (1 + \epsilon A)$ and $W_O \to (1 - \epsilon A) W_O$, moves the output by

$$\epsilon \sum_{ab} A_{ab} \sum_r (\delta^r_{tb} P^r_{tab} - \delta^r_{ta} P^r_{taa})\, W^r_{O,bl}, \qquad
  P^r_{tab} = \sum_j a^r_{tj} s_{jb}\, v_{ja},$$

which is 0 without gates between the two. With them, the singular values say how well the data tell channels apart.

Shapes: `N` positions, `R` heads of a group, `h` channels, `d` model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate.experts.decomposition import Decomposition, decompose
from tidegate.experts.gauge import FREE_BELOW
from tidegate.experts.gauge_theory import basis_gauge, reads_values, why_unpredicted
from tidegate.experts.head_jacobian import evenly_spaced_positions
from tidegate.experts.layers import Floats, Layer, as_float64, as_layer_arrays

_FEWEST_POSITIONS = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChannelGauge:
    """Which mixtures of each head's channels no output shows, and how well the others are told."""

    layer: str
    """The layer's name in its model; empty for a layer alone."""
    gate: str
    free: tuple[int, ...]
    """For each key/value group, how many of the h² directions are free."""
    predicted: int | None
    """The theory's number for every group: h² or h; None where it is silent."""
    singular_values: Floats
    """(G, h²), falling: change of the output along the orbit for a unit change of the parameters, relative to the
    largest change that a unit change of W_O causes."""


def channel_gauge(layer: Layer, x: Any, *, name: str = "") -> ChannelGauge:
    """Count the free directions of one layer's channels on an input, exactly.

    The cost grows with the sixth power of a head's channels and the memory with the fourth. A gate that reads values or
    attention outputs would have to follow the change of basis, and is refused.

    layer : `AttentionArrays`, or a layer whose `arrays()` gives them
    x     : (..., T, d); outputs are taken at 2h positions, at least 64, evenly spread; there must be h
    """
    arrays, inputs = as_layer_arrays(layer), as_float64(x)
    shape = arrays.shape
    if followers := [str(gate) for gate in arrays.gates if reads_values(gate)]:
        raise ValueError(f"Gate {followers[0]} reads what changes basis. Use gauge_report, on a small layer.")
    inputs = inputs.reshape(-1, *inputs.shape[-2:])
    if (positions := inputs.shape[0] * inputs.shape[1]) < shape.head_dim:
        raise ValueError(f"x must hold at least h = {shape.head_dim} positions in all; got {positions}.")
    parts, heads = decompose(arrays, inputs), arrays.trace(inputs).heads
    chosen = evenly_spaced_positions(inputs.shape[:2], max(2 * shape.head_dim, _FEWEST_POSITIONS))
    size = shape.num_heads // shape.num_kv_heads
    rows: list[Floats] = []
    for group in range(shape.num_kv_heads):
        own = slice(group * size, (group + 1) * size)
        moved = _output_changes(parts, own, arrays.W_O[own], chosen)
        scale = np.linalg.norm(heads[:, own][chosen[0], :, chosen[1]].reshape(len(moved), -1), ord=2)
        unit = moved.reshape(-1, shape.head_dim**2) @ _to_unit(arrays.W_V[group], arrays.W_O[own])
        rows.append(_singular_values(unit) / max(float(scale), np.finfo(np.float64).tiny))
    mixing = basis_gauge(arrays, "value-output")
    return ChannelGauge(
        layer=name,
        gate=str(arrays.gates),
        free=tuple(int(np.sum(row <= FREE_BELOW)) for row in rows),
        predicted=None if why_unpredicted(arrays) else shape.head_dim ** (2 if mixing == "linear" else 1),
        singular_values=np.stack(rows),
    )


def model_gauge(model: Any, tokens: Any) -> list[ChannelGauge]:
    """Count the free directions of every attention layer of a model, on the inputs that it has for these tokens.

    model  : a PyTorch model of `GatedAttention` layers, such as `TransformerLM` or `VisionTransformer`
    tokens : what the model is called with: (B, T) tokens, or images
    """
    from tidegate.experts.torch_adapter import attention_inputs

    return [channel_gauge(arrays, x, name=name) for name, arrays, x in attention_inputs(model, tokens)]


def _output_changes(parts: Decomposition, own: slice, W_O: Floats, chosen: Any) -> Floats:
    """Return the change of the output at the chosen positions for each entry of A, (N, R h or d, h, h)."""
    weights = parts.token_weights[:, own][chosen[0], :, chosen[1]]
    values = parts.linear_experts[:, own.start][chosen[0]]
    width = values.shape[-1]
    gate = np.ones((1, 1, width)) if parts.source_gate is None else parts.source_gate[:, own.start]
    gate = np.broadcast_to(gate, (len(parts.token_weights), *gate.shape[1:]))[chosen[0]] * np.ones(width)
    passing = np.einsum("nrj,njb,nja->nrab", weights, np.broadcast_to(gate, values.shape), values, optimize=True)
    opened = (
        np.ones((*passing.shape[:2], width))
        if parts.destination_gate is None
        else parts.destination_gate[:, own][chosen[0], :, chosen[1]] * np.ones(width)
    )
    through = opened * np.einsum("nraa->nra", passing)
    change = opened[:, :, None, :] * passing - through[:, :, :, None]
    # The change lies in the span of W_O: an orthogonal basis of the span has fewer features and the same lengths.
    outward = W_O.reshape(-1, W_O.shape[-1]).T[None]
    outward = outward if parts.outside_gate is None else outward * parts.outside_gate[chosen][:, :, None]
    turned: Any = np.linalg.qr(outward, mode="r")
    turned = np.broadcast_to(turned, (len(change), *turned.shape[1:]))
    turned = turned.reshape(*turned.shape[:2], *change.shape[1:2], width)
    return np.einsum("nrab,nqrb->nqab", change, turned)


def _to_unit(W_V: Floats, W_O: Floats) -> Floats:
    """Return the map (h², h²) after which changes A move the parameters by unit, orthogonal amounts."""
    width = W_V.shape[1]
    inward, outward = W_V.T @ W_V, np.einsum("rbl,rcl->bc", W_O, W_O)
    by_inward = np.einsum("ac,bd->abcd", inward, np.eye(width))
    by_outward = np.einsum("ac,bd->abcd", np.eye(width), outward)
    sizes, turn = np.linalg.eigh((by_inward + by_outward).reshape(width**2, width**2))
    seen = sizes > FREE_BELOW * sizes[-1]
    return turn * np.where(seen, 1 / np.sqrt(np.where(seen, sizes, 1.0)), 0.0)


def _singular_values(matrix: Floats) -> Floats:
    """Return the singular values (columns,), falling, with zeros where there are fewer rows."""
    found = np.linalg.svd(np.linalg.qr(matrix, mode="r"), compute_uv=False)
    return np.concatenate([found, np.zeros(matrix.shape[1] - len(found))])
