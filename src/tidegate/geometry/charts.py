"""Charts of attention: what moves, what stays, and whether there is room to bend.

Every chart takes one layer as plain arrays, with any gates, and one sequence x of shape (T, d) of PyTorch or JAX. A
chart of one head gives that head's gated output; a chart of all heads gives the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from tidegate._validation import InputError
from tidegate.geometry.chart import Chart
from tidegate.geometry.differentiation import Function
from tidegate.tensors.attention import attention_output, attention_scores, attention_weights
from tidegate.tensors.gating import GateSources
from tidegate.tensors.heads import repeat_heads
from tidegate.tensors.layer import AttentionArrays, LayerTrace, project
from tidegate.tensors.namespace import Array, namespace_of
from tidegate.tensors.softmax import log_partition


def weight_chart(layer: AttentionArrays, x: Array, *, position: int = -1, head: int | None = None) -> Chart:
    """Return the chart of one position's output as a function of its attention weights, with the values fixed.

    The weights lie on a simplex: the coordinates are those of all visible keys but the last, which has the rest. The
    output is affine in them without a gate, and with every gate that does not read the output. What a sink leaves the
    keys stays as it is.

    Args:
        layer: The layer.
        x: (T, d), the sequence
        position: Index of the query whose weights move.
        head: Index of the head whose weights move; None moves those of all heads together.
    """
    at = _Position.of(layer, x, position, head)
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
    """Return the chart of one position's output as a function of its raw query, with all keys and values fixed.

    Gates that read the query move with it, except at the key and value sites. One head's chart maps h coordinates to h
    outputs: its full curvature is 0 for want of codimension, whatever the gate; slices of two dimensions can bend.

    Args:
        layer: The layer.
        x: (T, d), the sequence
        position: Index of the query that moves.
        head: Index of the head whose query moves; None moves those of all heads together.
    """
    at = _Position.of(layer, x, position, head)
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
    """Return the chart of the layer's output as a function of its input, with the attention weights fixed at x's.

    Without a gate it is affine. Gates on the value, the output and the dense site bend it, if they read something that
    moves; gates on query and key change only the weights, which stay, and so does what a sink leaves the keys.

    Args:
        layer: The layer.
        x: (T, d), the sequence
        moving: Position whose input moves, seen at all positions that attend to it; None moves the whole sequence.
    """
    layer, x, _, _ = layer.of_kind(x, None, None)
    _require_sequence(x)
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
    """Return the chart of the layer's output as a function of its input, with everything that depends on it moving.

    Args:
        layer: The layer.
        x: (T, d), the sequence
        moving: Position whose input moves, seen at all positions that attend to it; None moves the whole sequence.
    """
    layer, x, _, _ = layer.of_kind(x, None, None)
    _require_sequence(x)
    return _sequence_chart("input chart", layer, x, moving, _onlookers(layer, x, moving), "all else follows")


def depth_chart(
    stack: Sequence[AttentionArrays] | Callable[[Any], Any],
    x: Array,
    *,
    moving: int | None = None,
    outputs: Sequence[int] | None = None,
    residual: bool = True,
) -> Chart:
    """Return the chart of a stack's output as a function of its input.

    Args:
        stack: Layers, applied in turn, or any function from a sequence (T, d) to one.
        x: (T, d), the sequence
        moving: Position whose input moves; None moves the whole sequence.
        outputs: Positions whose outputs count; None takes all that some layer lets see the moving one, and all
            positions for a function. Outputs that never move give room in name only: leave them out.
        residual: Whether each layer's output is added to its input; no effect for a function.
    """
    _require_sequence(x)
    every = list(range(x.shape[0]))
    if callable(stack):
        rows = every if outputs is None else list(outputs)
        return _sequence_chart("depth chart", stack, x, moving, rows, "all else follows through a function")
    if not stack:
        raise InputError("stack", expected="at least one layer", got=stack)

    def run(inputs: Array) -> Array:
        for layer in stack:
            inputs = inputs + layer(inputs) if residual else layer(inputs)
        return inputs

    seen = every if moving is None else [_index("moving", moving, x.shape[0])]
    for layer in stack:
        seen = sorted({onlooker for row in seen for onlooker in _onlookers(layer, x, row)})
    rows = seen if outputs is None else list(outputs)
    return _sequence_chart("depth chart", run, x, moving, rows, f"all else follows through {len(stack)} layers")


def _sequence_chart(
    name: str, run: Callable[[Any], Any], x: Array, moving: int | None, rows: list[int], rest: str
) -> Chart:
    """Return the chart of a function of sequences along one position's input, or all of it, seen at some rows."""
    xp = namespace_of(x)
    first = None if moving is None else _index("moving", moving, x.shape[0])

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
    """Return the positions that attend to the moving one; all positions if all move."""
    mask = layer.combined_mask(None, like=x)
    if moving is None or mask is None:
        return list(range(x.shape[0]))
    column = _index("moving", moving, x.shape[0])
    return [row for row in range(x.shape[0]) if bool(mask[row, column])]


def _rows(x: Array, rows: list[int]) -> Array:
    if rows == list(range(rows[0], rows[-1] + 1)):
        return x[rows[0] : rows[-1] + 1]
    return namespace_of(x).stack([x[row] for row in rows])


@dataclass(frozen=True, kw_only=True)
class _Position:
    """One position of a layer's forward pass, and what of it stays while a chart moves the rest."""

    layer: AttentionArrays
    x: Array
    trace: LayerTrace
    position: int
    head: int | None
    visible: slice
    """The keys that the position may see: causality and a window leave a run of them."""

    @classmethod
    def of(cls, layer: AttentionArrays, x: Array, position: int, head: int | None) -> _Position:
        layer, x, _, _ = layer.of_kind(x, None, None)
        _require_sequence(x)
        trace, position = layer.trace(x), _index("position", position, x.shape[0])
        if head is not None:
            head = _index("head", head, layer.shape.num_heads)
            if layer.gates.at("dense") is not None:
                raise InputError("head", expected="None for a layer with a dense gate, which reads all heads", got=head)
        mask = None if trace.mask is None else trace.mask[position]
        visible = [key for key in range(x.shape[0]) if mask is None or bool(mask[key])]
        if len(visible) < 2:
            expected = "one that sees at least two keys, so that weights can move"
            raise InputError("position", expected=expected, got=position, hint="Choose a later one.")
        run = slice(visible[0], visible[-1] + 1)
        return cls(layer=layer, x=x, trace=trace, position=position, head=head, visible=run)

    @property
    def heads(self) -> slice:
        return slice(None) if self.head is None else slice(self.head, self.head + 1)

    @property
    def values(self) -> Array:
        """(G, visible keys, h), gated."""
        return self.trace.value[:, self.visible, :]

    @property
    def sources(self) -> GateSources:
        """What gates read at this position, on the attending side."""
        here, whole = slice(self.position, self.position + 1), self.trace.sources
        return GateSources(
            input=whole.input[here],
            query=whole.query[:, here],
            value=whole.value[:, here],
            output=whole.output[:, here],
            partition=None if whole.partition is None else whole.partition[:, here],
        )

    def among_heads(self, moved: Array, whole: Array) -> Array:
        """Put the moving heads (moving, 1, h) among those that stay, taken from (H, T, h): (H, 1, h)."""
        if self.head is None:
            return moved
        here = whole[:, self.position : self.position + 1]
        return namespace_of(moved).concat([here[: self.head], moved, here[self.head + 1 :]])

    def finish(self, output: Array, query: Array | None = None) -> Array:
        """Turn the attention output (H, 1, h) before its gates, a sink's share taken off, into the chart's outputs."""
        xp = namespace_of(output)
        sources = replace(self.sources, output=output)
        sources = sources if query is None else replace(sources, query=query)
        heads = self.layer.apply_gate_at("output", output, sources)
        if self.head is not None:
            return heads[self.head, 0]
        projected = xp.einsum("htk,hkd->td", heads, self.layer.W_O)
        projected = projected if self.layer.b_O is None else projected + self.layer.b_O
        return self.layer.apply_gate_at("dense", projected, sources)[0]

    def chart(self, name: str, function: Function, free: Array, note: str) -> Chart:
        start = namespace_of(free).reshape(free, (-1,))
        whose = "All heads" if self.head is None else f"Head {self.head}"
        return Chart(
            name=name,
            function=function,
            start=start,
            ambient_dimension=int(function(start).shape[0]),
            note=f"{whose} at position {self.position}. {note}",
        )


def _require_sequence(x: Array) -> None:
    if x.ndim != 2:
        raise InputError("x", expected="one sequence (positions, width), without a batch", got=tuple(x.shape))


def _index(name: str, given: int, size: int) -> int:
    if isinstance(given, bool) or not -size <= cast("Any", given) < size:
        raise InputError(name, expected=f"an integer from {-size} to {size - 1}", got=given)
    return given % size
