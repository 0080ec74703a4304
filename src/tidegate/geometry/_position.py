"""Hold one position of a layer's forward pass for the charts that move something there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from tidegate.geometry.chart import Chart
from tidegate.geometry.differentiation import Function
from tidegate.tensors.gating import GateSources
from tidegate.tensors.layer import AttentionArrays, LayerTrace
from tidegate.tensors.namespace import Array, namespace_of


@dataclass(frozen=True, kw_only=True)
class Position:
    """One position of a layer's forward pass, and what of it stays while a chart moves the rest."""

    layer: AttentionArrays
    x: Array
    trace: LayerTrace
    position: int
    head: int | None
    visible: slice
    """The keys that the position may see: causality and a window leave a run of them."""

    @classmethod
    def of(cls, layer: AttentionArrays, x: Array, position: int, head: int | None) -> Position:
        layer, x, _, _ = layer.of_kind(x, None, None)
        require_sequence(x)
        trace, position = layer.trace(x), index("position", position, x.shape[0])
        if head is not None:
            head = index("head", head, layer.shape.num_heads)
            if layer.gates.at("dense") is not None:
                raise ValueError(
                    "head names one head, whose output the dense gate never sees. Use head=None for a layer with a "
                    "dense gate."
                )
        mask = None if trace.mask is None else trace.mask[position]
        visible = [key for key in range(x.shape[0]) if mask is None or bool(mask[key])]
        if len(visible) < 2:
            raise ValueError(
                f"position {position} sees {len(visible)} of {x.shape[0]} keys, which leaves no weight to move. Choose "
                "a later one."
            )
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


def require_sequence(x: Array) -> None:
    if x.ndim != 2:
        raise ValueError(f"x must be one sequence (positions, width); got {tuple(x.shape)}. Charts take no batches.")


def index(name: str, given: int, size: int) -> int:
    if isinstance(given, bool) or not -size <= cast("Any", given) < size:
        raise ValueError(f"{name} must be a whole number from {-size} to {size - 1}; got {given!r}.")
    return given % size
