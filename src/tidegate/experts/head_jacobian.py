r"""Compute the singular values of the Jacobian by one group's value and output projections, without building it.

Where no gate reads values, the output is linear in each of the two, and the Jacobian has structure: the part by the
output projection repeats the head's output for each feature, and the part by the value projection leaves through the
span of the output projection. Orthogonal changes of outputs and parameters make most of it triangular or a repetition,
and change no singular value.

Shapes: `N` positions, `R` heads of the group, `h` channels, `d` model width, `q` features that the group can reach.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tidegate.experts.decomposition import decompose
from tidegate.experts.layers import Floats
from tidegate.tensors.layer import AttentionArrays


def value_singular_values(arrays: AttentionArrays, x: Floats) -> Floats:
    """Return the singular values of each group's Jacobian by its `W_V` and `W_O`: (G, parameters of a group), falling.

    Outputs are taken at 1.5 (d + R h) positions, evenly spread over all of them, or at all if there are fewer.

    Args:
        arrays: Of NumPy float64, without a gate that reads values or attention outputs.
        x: (..., T, d).
    """
    inputs = x.reshape(-1, *x.shape[-2:])
    parts, heads = decompose(arrays, inputs), arrays.trace(inputs).heads
    shape = arrays.shape
    size = shape.num_heads // shape.num_kv_heads
    chosen = evenly_spaced_positions(inputs.shape[:2], 3 * (shape.d_model + size * shape.head_dim) // 2)
    outside = None if parts.outside_gate is None else parts.outside_gate[chosen]
    rows: list[Floats] = []
    for group in range(shape.num_kv_heads):
        own = slice(group * size, (group + 1) * size)
        gate = None if parts.source_gate is None else parts.source_gate[:, own.start]
        taken = _channel_inputs(parts.token_weights[:, own], inputs, gate, shape.head_dim, chosen)
        if parts.destination_gate is not None:
            taken = taken * parts.destination_gate[:, own][chosen[0], :, chosen[1], None]
        rows.append(_singular_values(taken, heads[:, own][chosen[0], :, chosen[1]], arrays.W_O[own], outside))
    return np.stack(rows)


def evenly_spaced_positions(shape: tuple[int, ...], number: int) -> Any:
    """Return the indices, one array for each axis, of `number` evenly spaced places, or of all if there are fewer."""
    total = int(np.prod(shape))
    places = np.unique(np.linspace(0, total - 1, min(number, total)).round().astype(int))
    return np.unravel_index(places, shape)


def _channel_inputs(weights: Floats, x: Floats, gate: Floats | None, width: int, chosen: Any) -> Floats:
    """Return what reaches each channel from each input feature, before the value projection: (N, R, d, h).

    Args:
        weights: (B, R, T, S).
        x: (B, S, d).
        gate: (B, S, h or 1).
        width: h.
        chosen: Indices of sequences and of positions.
    """
    rows: list[Floats] = []
    for sequence in np.unique(chosen[0]):
        at = chosen[1][chosen[0] == sequence]
        passed = np.ones((len(x[sequence]), width)) if gate is None else gate[sequence] * np.ones(width)
        entering = (x[sequence][:, :, None] * passed[:, None, :]).reshape(len(passed), -1)
        taken = weights[sequence][:, at] @ entering
        rows.append(np.swapaxes(taken, 0, 1).reshape(len(at), len(taken), -1, width))
    return np.concatenate(rows)


def _singular_values(taken: Floats, heads: Floats, W_O: Floats, outside: Floats | None) -> Floats:
    """Of one group: taken (N, R, d, h), heads (N, R, h), W_O (R, h, d), outside gate (N, d)."""
    d_model = W_O.shape[-1]
    heads = heads.reshape(len(heads), -1)
    out = W_O.reshape(-1, d_model)
    if outside is None and len(out) < d_model:
        # Features outside the span of W_O see the head's output alone, each in the same way.
        out = out @ np.linalg.qr(out.T)[0]
        repeated = np.tile(np.linalg.svd(heads, compute_uv=False), d_model - out.shape[1])
    else:
        repeated = np.zeros(0)
    by_value = np.einsum("nrpc,rcq->qnpc", taken, out.reshape(*W_O.shape[:2], -1), optimize=True)
    by_value = by_value.reshape(*by_value.shape[:2], -1)
    if outside is not None:
        by_value = by_value * outside.T[:, :, None]
        heads = heads * outside.T[:, :, None]
    reduced = _reduce_rows(by_value, np.broadcast_to(heads, (len(by_value), *heads.shape[-2:])))
    found = np.concatenate([np.linalg.svd(reduced, compute_uv=False), repeated])
    values = np.zeros(by_value.shape[-1] + heads.shape[-1] * d_model)
    values[: len(found)] = np.sort(found)[::-1]
    return values


def _reduce_rows(by_value: Floats, heads: Floats) -> Floats:
    """Return a smaller matrix with the same nonzero singular values; by_value (q, N, d h), heads (q, N, R h)."""
    features, _, channels = heads.shape
    turn, triangle = np.linalg.qr(heads, mode="complete")
    turned = np.swapaxes(turn, 1, 2) @ by_value
    kept = min(triangle.shape[1], channels)
    rest = np.linalg.qr(turned[:, kept:].reshape(-1, by_value.shape[-1]), mode="r")
    own = np.zeros((features, kept, features, channels))
    own[np.arange(features), :, np.arange(features)] = triangle[:, :kept]
    top = np.hstack([turned[:, :kept].reshape(features * kept, -1), own.reshape(features * kept, -1)])
    return np.vstack([top, np.hstack([rest, np.zeros((len(rest), features * channels))])])
