"""Charts of attention: what moves, what stays, and whether there is room to bend.

Every chart takes one layer as plain arrays, with any gates, and one sequence x of shape (T, d) of PyTorch or JAX. A
chart of one head gives that head's gated output; a chart of all heads gives the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tidegate.geometry._position import Position, index, require_sequence
from tidegate.geometry.chart import Chart
from tidegate.tensors.attention import attention_output, attention_scores, attention_weights
from tidegate.tensors.gating import GateSources
from tidegate.tensors.heads import repeat_heads
from tidegate.tensors.layer import AttentionArrays, project
from tidegate.tensors.namespace import Array, namespace_of
from tidegate.tensors.softmax import log_partition


def weight_chart(layer: AttentionArrays, x: Array, *, position: int = -1, head: int | None = None) -> Chart:
    """One position's output as a function of its attention weights, with the values fixed.

    The weights lie on a simplex: the coordinates are those of all visible keys but the last, which has the rest. The
    output is affine in them without a gate, and with every gate that does not read the output. What a sink leaves the
    keys stays as it is.

    position : which query's weights move
    head     : which head's weights move; None moves those of all heads together
    """
    at = Position.of(layer, x, position, head)
    xp = namespace_of(at.x)
    free = at.trace.weights[at.heads, at.position, at.visible][:, :-1]
    raw = attention_output(at.trace.weights, repeat_heads(at.trace.value, at.layer.shape.num_heads))

    def function(coordinates: Array) -> Array:
        moved = xp.reshape(coordinates, free.shape)
        full = xp.concat([moved, 1 - xp.sum(moved, axis=-1, keepdims=True)], axis=-1)[:, None, :]
        values = repeat_heads(at.values, at.layer.shape.num_heads)[at.heads]
        taken_in = at.among_heads(attention_output(full, values), raw)
        return at.finish(at.layer.apply_gate_at("partition", taken_in, at.sources))

    return at.chart(
        "weight chart", function, free, f"The weights over {free.shape[-1] + 1} keys move, the values stay."
    )


def query_chart(layer: AttentionArrays, x: Array, *, position: int = -1, head: int | None = None) -> Chart:
    """One position's output as a function of its raw query, with all keys and values fixed.

    Gates that read the query move with it, except at the key and value sites. One head's chart maps h coordinates to h
    outputs: its full curvature is 0 for want of codimension, whatever the gate; slices of two dimensions can bend.

    position : which query moves
    head     : which head's query moves; None moves those of all heads together
    """
    at = Position.of(layer, x, position, head)
    xp = namespace_of(at.x)
    raw = at.trace.sources.query
    free = raw[at.heads, at.position, :]
    num_heads = at.layer.shape.num_heads

    def function(coordinates: Array) -> Array:
        query = at.among_heads(xp.reshape(coordinates, (*free.shape[:1], 1, free.shape[-1])), raw)
        sources = replace(at.sources, query=query)
        seen = at.layer.norm_and_rotate(
            at.layer.apply_gate_at("query", query, sources), at.layer.q_norm, np.asarray([at.position])
        )
        keys = repeat_heads(at.trace.key[:, at.visible, :], num_heads)
        scores = attention_scores(at.layer.under_metric(seen), keys)
        weights = attention_weights(scores, None, at.layer.temperature)
        sources = replace(sources, partition=log_partition(scores, at.layer.temperature))
        taken_in = attention_output(weights, repeat_heads(at.values, num_heads))
        return at.finish(at.layer.apply_gate_at("partition", taken_in, sources), query)

    return at.chart("query chart", function, free, "The query moves, the keys and values stay.")


def frozen_weight_chart(layer: AttentionArrays, x: Array, *, moving: int | None = None) -> Chart:
    """The layer's output as a function of its input, with the attention weights fixed at those of x.

    Without a gate it is affine. Gates on the value, the output and the dense site bend it, if they read something that
    moves; gates on query and key change only the weights, which stay, and so does what a sink leaves the keys.

    moving : the position whose input moves, seen at all positions that attend to it; None moves the whole sequence
    """
    layer, x, _, _ = layer.of_kind(x, None, None)
    require_sequence(x)
    trace = layer.trace(x)
    num_heads = layer.shape.num_heads

    def output_at(inputs: Array) -> Array:
        xp = namespace_of(inputs)
        query, value = project(inputs, layer.W_Q, layer.b_Q), project(inputs, layer.W_V, layer.b_V)
        sources = GateSources(input=inputs, query=query, value=value, partition=trace.sources.partition)
        gated = repeat_heads(layer.apply_gate_at("value", value, sources), num_heads)
        output = layer.apply_gate_at("partition", attention_output(trace.weights, gated), sources)
        sources = replace(sources, output=output)
        projected = xp.einsum("htk,hkd->td", layer.apply_gate_at("output", output, sources), layer.W_O)
        projected = projected if layer.b_O is None else projected + layer.b_O
        return layer.apply_gate_at("dense", projected, sources)

    return _sequence_chart(
        "frozen-weight chart", output_at, x, moving, _onlookers(layer, x, moving), "the attention weights stay"
    )


def input_chart(layer: AttentionArrays, x: Array, *, moving: int | None = None) -> Chart:
    """The layer's output as a function of its input, with everything moving: queries, keys, values, weights, gates.

    moving : the position whose input moves, seen at all positions that attend to it; None moves the whole sequence
    """
    layer, x, _, _ = layer.of_kind(x, None, None)
    require_sequence(x)
    return _sequence_chart("input chart", layer, x, moving, _onlookers(layer, x, moving), "all else follows")


def depth_chart(
    stack: Sequence[AttentionArrays] | Callable[[Any], Any],
    x: Array,
    *,
    moving: int | None = None,
    outputs: Sequence[int] | None = None,
    residual: bool = True,
) -> Chart:
    """A stack's output as a function of its input.

    stack    : layers, applied in turn, or any function from a sequence (T, d) to one
    moving   : the position whose input moves; None moves the whole sequence
    outputs  : the positions whose outputs count; None takes all that some layer lets see the moving one, and all
               positions for a function. Outputs that never move give room in name only: leave them out.
    residual : whether each layer's output is added to its input; of no effect for a function
    """
    require_sequence(x)
    every = list(range(x.shape[0]))
    if callable(stack):
        rows = every if outputs is None else list(outputs)
        return _sequence_chart("depth chart", stack, x, moving, rows, "all else follows through a function")
    if not stack:
        raise ValueError("stack must have at least one layer; got none.")

    def run(inputs: Array) -> Array:
        for layer in stack:
            inputs = inputs + layer(inputs) if residual else layer(inputs)
        return inputs

    seen = every if moving is None else [index("moving", moving, x.shape[0])]
    for layer in stack:
        seen = sorted({onlooker for row in seen for onlooker in _onlookers(layer, x, row)})
    rows = seen if outputs is None else list(outputs)
    return _sequence_chart("depth chart", run, x, moving, rows, f"all else follows through {len(stack)} layers")


def _sequence_chart(
    name: str, run: Callable[[Any], Any], x: Array, moving: int | None, rows: list[int], rest: str
) -> Chart:
    """The chart of a function of sequences along one position's input, or all of it, seen at some rows."""
    xp = namespace_of(x)
    first = None if moving is None else index("moving", moving, x.shape[0])

    def function(coordinates: Array) -> Array:
        if first is None:
            inputs = xp.reshape(coordinates, x.shape)
        else:
            inputs = xp.concat([x[:first], coordinates[None, :], x[first + 1 :]])
        return xp.reshape(_rows(run(inputs), rows), (-1,))

    start = xp.reshape(x if first is None else x[first], (-1,))
    moves = "The input of every position moves" if first is None else f"The input of position {first} moves"
    return Chart(
        name=name,
        function=function,
        start=start,
        ambient_dimension=int(function(start).shape[0]),
        note=f"{moves}, {rest}; the output at {len(rows)} positions.",
    )


def _onlookers(layer: AttentionArrays, x: Array, moving: int | None) -> list[int]:
    """The positions that attend to the moving one; all positions if all move."""
    mask = layer.combined_mask(None, like=x)
    if moving is None or mask is None:
        return list(range(x.shape[0]))
    column = index("moving", moving, x.shape[0])
    return [row for row in range(x.shape[0]) if bool(mask[row, column])]


def _rows(x: Array, rows: list[int]) -> Array:
    if rows == list(range(rows[0], rows[-1] + 1)):
        return x[rows[0] : rows[-1] + 1]
    return namespace_of(x).stack([x[row] for row in rows])
