"""Charts of attention: maps from varying parts of a layer to its outputs.

Each function takes one layer as plain arrays, with any gates, and one sequence x (T, d) of PyTorch or JAX. A chart of
one head returns that head's gated output; a chart of all heads returns the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from tidegate._validation import InputError
from tidegate.geometry.differentiation import Function
from tidegate.tensors.attention import attention_output, attention_scores, attention_weights
from tidegate.tensors.gating import GateSources
from tidegate.tensors.heads import repeat_heads
from tidegate.tensors.layer import AttentionArrays, LayerTrace, project
from tidegate.tensors.namespace import Array, namespace_of
from tidegate.tensors.softmax import log_partition


@dataclass(frozen=True, kw_only=True, eq=False)
class Chart:
    """A map from coordinates to outputs, with its base point."""

    name: str
    function: Function
    """Takes coordinates (dimension,) and returns outputs (ambient_dimension,)."""
    start: Array
    """(dimension,): the coordinates at which the layer's own output is computed."""
    ambient_dimension: int
    note: str
    """A description of the varying and fixed tensors and of the outputs."""

    def __call__(self, x: Array) -> Array:
        """Return the outputs at coordinates (dimension,)."""
        return self.function(x)

    @property
    def dimension(self) -> int:
        """The number of coordinates."""
        return self.start.shape[-1]

    @property
    def codimension(self) -> int:
        """The number of outputs beyond the coordinates; if negative, the Jacobian cannot have full rank."""
        return self.ambient_dimension - self.dimension

    @property
    def says_something(self) -> bool:
        """Whether full curvature can be nonzero, which needs two coordinates and a codimension of at least 1."""
        return self.dimension >= 2 and self.codimension >= 1

    def slice(self, u: Array, v: Array) -> Chart:
        """Return the two-dimensional surface through the start along u and v, (dimension,), as a chart.

        Its Gaussian curvature at the start is the sectional curvature with `tangent="plane"`.
        """

        def surface(at: Array) -> Array:
            return self.function(self.start + at[0] * u + at[1] * v)

        name, note = f"slice of {self.name}", f"A two-dimensional slice. {self.note}"
        return replace(self, name=name, function=surface, start=0 * self.start[:2], note=note)


def weight_chart(layer: AttentionArrays, x: Array, *, position: int = -1, head: int | None = None) -> Chart:
    """Return the chart of one position's output as a function of its attention weights, with fixed values.

    The weights lie on a simplex: the coordinates are the weights of all visible keys except the last, whose weight is 1
    minus their sum. Without a gate, and with any gate that does not read the output, the chart is affine. The fraction
    that a sink leaves to the keys is fixed.

    Args:
        layer: The layer.
        x: (T, d), the sequence
        position: Index of the query whose weights vary.
        head: Index of the head whose weights vary; None varies those of all heads together.
    """
    at = _Position.of(layer, x, position, head)
    xp = namespace_of(at.values)
    num_heads = at.layer.shape.num_heads
    free = at.trace.weights[at.heads, at.position, at.visible][:, :-1]
    raw = attention_output(at.trace.weights, repeat_heads(at.trace.value, num_heads))

    def function(coordinates: Array) -> Array:
        weights = xp.reshape(coordinates, free.shape)
        weights = xp.concat([weights, 1 - xp.sum(weights, axis=-1, keepdims=True)], axis=-1)[:, None, :]
        moved = attention_output(weights, repeat_heads(at.values, num_heads)[at.heads])
        return at.finish(at.layer.apply_gate_at("partition", at.among_heads(moved, raw), at.sources))

    return at.chart(
        "weight chart", function, free, f"The weights over {free.shape[-1] + 1} keys vary; the values are fixed."
    )


def query_chart(layer: AttentionArrays, x: Array, *, position: int = -1, head: int | None = None) -> Chart:
    """Return the chart of one position's output as a function of its raw query, with fixed keys and values.

    Gates that read the query vary with it, except at the key and value sites. One head's chart maps h coordinates to h
    outputs, so its full curvature is 0 with any gate; two-dimensional slices of it can be curved.

    Args:
        layer: The layer.
        x: (T, d), the sequence
        position: Index of the query that varies.
        head: Index of the head whose query varies; None varies those of all heads together.
    """
    at = _Position.of(layer, x, position, head)
    xp = namespace_of(at.values)
    raw = at.trace.sources.query
    free = raw[at.heads, at.position, :]
    num_heads = at.layer.shape.num_heads

    def function(coordinates: Array) -> Array:
        query = at.among_heads(xp.reshape(coordinates, (*free.shape[:1], 1, free.shape[-1])), raw)
        sources = replace(at.sources, query=query)
        gated = at.layer.apply_gate_at("query", query, sources)
        rotated = at.layer.norm_and_rotate(gated, at.layer.q_norm, np.asarray([at.position]))
        keys = repeat_heads(at.trace.key[:, at.visible, :], num_heads)
        scores = attention_scores(at.layer.under_metric(rotated), keys)
        weights = attention_weights(scores, None, at.layer.temperature)
        sources = replace(sources, partition=log_partition(scores, at.layer.temperature))
        output = attention_output(weights, repeat_heads(at.values, num_heads))
        return at.finish(at.layer.apply_gate_at("partition", output, sources), query)

    return at.chart("query chart", function, free, "The query varies; the keys and values are fixed.")


def frozen_weight_chart(layer: AttentionArrays, x: Array, *, moving: int | None = None) -> Chart:
    """Return the chart of the layer's output as a function of its input, with the attention weights of x.

    Without a gate it is affine. Gates on the value, the output and the dense site can curve it if they read something
    that varies. Gates on the query and key change only the weights, which are fixed, as is the fraction that a sink
    leaves to the keys.

    Args:
        layer: The layer.
        x: (T, d), the sequence
        moving: Position whose input varies, seen at all positions that attend to it; None varies the whole sequence.
    """
    layer, x, _, _ = layer.of_kind(x, None, None)
    _require_sequence(x)
    trace = layer.trace(x)
    num_heads = layer.shape.num_heads

    def run(inputs: Array) -> Array:
        query, value = project(inputs, layer.W_Q, layer.b_Q), project(inputs, layer.W_V, layer.b_V)
        sources = GateSources(input=inputs, query=query, value=value, partition=trace.sources.partition)
        gated = repeat_heads(layer.apply_gate_at("value", value, sources), num_heads)
        output = layer.apply_gate_at("partition", attention_output(trace.weights, gated), sources)
        sources = replace(sources, output=output)
        return _project_heads(layer, layer.apply_gate_at("output", output, sources), sources)

    return _sequence_chart(
        "frozen-weight chart", run, x, moving, _onlookers(layer, x, moving), "the attention weights are fixed"
    )


def input_chart(layer: AttentionArrays, x: Array, *, moving: int | None = None) -> Chart:
    """Return the chart of the layer's output as a function of its input.

    Args:
        layer: The layer.
        x: (T, d), the sequence
        moving: Position whose input varies, seen at all positions that attend to it; None varies the whole sequence.
    """
    layer, x, _, _ = layer.of_kind(x, None, None)
    _require_sequence(x)
    return _sequence_chart("input chart", layer, x, moving, _onlookers(layer, x, moving), "nothing is fixed")


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
        moving: Position whose input varies; None varies the whole sequence.
        outputs: Positions whose outputs count. None takes all positions that the varying one reaches through the
            layers, or all positions for a function. Leave out outputs that are constant: they add to the codimension
            but cannot contribute curvature.
        residual: Whether each layer's output is added to its input; no effect for a function.
    """
    _require_sequence(x)
    rows = list(range(x.shape[0]))
    if callable(stack):
        rows = rows if outputs is None else list(outputs)
        return _sequence_chart("depth chart", stack, x, moving, rows, "through a function")
    if not stack:
        raise InputError("stack", expected="at least one layer", got=stack)

    def run(inputs: Array) -> Array:
        for layer in stack:
            inputs = inputs + layer(inputs) if residual else layer(inputs)
        return inputs

    if moving is not None:
        rows = [_index("moving", moving, x.shape[0])]
    for layer in stack:
        rows = sorted({onlooker for row in rows for onlooker in _onlookers(layer, x, row)})
    rows = rows if outputs is None else list(outputs)
    return _sequence_chart("depth chart", run, x, moving, rows, f"through {len(stack)} layers")


def _sequence_chart(
    name: str, run: Callable[[Any], Any], x: Array, moving: int | None, rows: list[int], rest: str
) -> Chart:
    """Return the chart of some output rows of a function of sequences, by the input of one position or of all."""
    xp = namespace_of(x)
    first = None if moving is None else _index("moving", moving, x.shape[0])

    def function(coordinates: Array) -> Array:
        if first is None:
            inputs = xp.reshape(coordinates, x.shape)
        else:
            inputs = xp.concat([x[:first], coordinates[None, :], x[first + 1 :]])
        found = run(inputs)
        if rows == list(range(rows[0], rows[-1] + 1)):
            found = found[rows[0] : rows[-1] + 1]
        else:
            found = xp.stack([found[row] for row in rows])
        return xp.reshape(found, (-1,))

    start = xp.reshape(x if first is None else x[first], (-1,))
    varies = "The input of every position varies" if first is None else f"The input of position {first} varies"
    return Chart(
        name=name,
        function=function,
        start=start,
        ambient_dimension=int(function(start).shape[0]),
        note=f"{varies}, {rest}; the output at {len(rows)} positions.",
    )


def _onlookers(layer: AttentionArrays, x: Array, moving: int | None) -> list[int]:
    """Return the positions that attend to the moving one; all positions if all move."""
    mask = layer.combined_mask(None, like=x)
    if moving is None or mask is None:
        return list(range(x.shape[0]))
    column = _index("moving", moving, x.shape[0])
    return [row for row in range(x.shape[0]) if bool(mask[row, column])]


@dataclass(frozen=True, kw_only=True)
class _Position:
    """One position of a layer's forward pass, of which a chart varies a part."""

    layer: AttentionArrays
    trace: LayerTrace
    position: int
    head: int | None
    visible: slice
    """The keys that the position sees, which causality and a window leave contiguous."""

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
            expected = "one that sees at least two keys, so that weights can vary"
            raise InputError("position", expected=expected, got=position, hint="Choose a later one.")
        run = slice(visible[0], visible[-1] + 1)
        return cls(layer=layer, trace=trace, position=position, head=head, visible=run)

    @property
    def heads(self) -> slice:
        return slice(None) if self.head is None else slice(self.head, self.head + 1)

    @property
    def values(self) -> Array:
        """(G, visible keys, h), gated."""
        return self.trace.value[:, self.visible, :]

    @property
    def sources(self) -> GateSources:
        """The inputs of gates at this position, as a query."""
        here, whole = slice(self.position, self.position + 1), self.trace.sources
        return GateSources(
            input=whole.input[here],
            query=whole.query[:, here],
            value=whole.value[:, here],
            output=whole.output[:, here],
            partition=None if whole.partition is None else whole.partition[:, here],
        )

    def among_heads(self, moved: Array, whole: Array) -> Array:
        """Put the varying heads (varying, 1, h) among the fixed ones, taken from (H, T, h): (H, 1, h)."""
        if self.head is None:
            return moved
        here = whole[:, self.position : self.position + 1]
        return namespace_of(moved).concat([here[: self.head], moved, here[self.head + 1 :]])

    def finish(self, output: Array, query: Array | None = None) -> Array:
        """Return the chart's outputs from the attention output (H, 1, h) after a sink and before its gates."""
        sources = replace(self.sources, output=output)
        sources = sources if query is None else replace(sources, query=query)
        heads = self.layer.apply_gate_at("output", output, sources)
        return _project_heads(self.layer, heads, sources)[0] if self.head is None else heads[self.head, 0]

    def chart(self, name: str, function: Function, free: Array, note: str) -> Chart:
        start = namespace_of(free).reshape(free, (-1,))
        heads = "All heads" if self.head is None else f"Head {self.head}"
        return Chart(
            name=name,
            function=function,
            start=start,
            ambient_dimension=int(function(start).shape[0]),
            note=f"{heads} at position {self.position}. {note}",
        )


def _project_heads(layer: AttentionArrays, heads: Array, sources: GateSources) -> Array:
    """Return the layer's output (T, d) from the gated heads (H, T, h)."""
    projected = namespace_of(heads).einsum("htk,hkd->td", heads, layer.W_O)
    projected = projected if layer.b_O is None else projected + layer.b_O
    return layer.apply_gate_at("dense", projected, sources)


def _require_sequence(x: Array) -> None:
    if x.ndim != 2:
        raise InputError("x", expected="one sequence (positions, width), without a batch", got=tuple(x.shape))


def _index(name: str, given: int, size: int) -> int:
    if isinstance(given, bool) or not -size <= cast("Any", given) < size:
        raise InputError(name, expected=f"an integer from {-size} to {size - 1}", got=given)
    return given % size
