"""Layers with gates of a given strength, and the relative curvature of their charts."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.geometry import Chart, sectional_curvature
from tidegate.tensors.gating import gate_logits, gate_reads
from tidegate.tensors.layer import AttentionArrays
from tidegate.torch import GatedAttention

FLAT = 1e-9
"""A relative curvature below this is rounding error."""


def relative_curvature(
    chart: Chart, u: NDArray[np.float64], v: NDArray[np.float64], *, tangent: Literal["plane", "full"]
) -> NDArray[np.float64]:
    """Return the curvature of the planes of u and v at the chart's start, times the squared length of its output."""
    size = float((chart(chart.start) ** 2).sum())
    return sectional_curvature(chart, chart.start, u, v, covariance=size, tangent=tangent).numpy()


def initialized_layer(gate: str, x: torch.Tensor, strength: float, *, num_heads: int) -> AttentionArrays:
    """Return a freshly initialized layer in float64 without gradients, with gates of that strength over x."""
    layer = GatedAttention(x.shape[-1], num_heads, gate=gate, dtype=torch.float64).arrays()
    detached = layer.with_parameters({name: array.detach() for name, array in layer.parameters().items()})
    return with_strength(detached, x, strength)


def with_strength(layer: AttentionArrays, x: torch.Tensor, strength: float) -> AttentionArrays:
    """Return the layer with each gate matrix scaled so that its logits over x have that standard deviation.

    A sink has no matrix and is not changed.
    """
    sources = layer.trace(x).sources
    scaled: dict[str, torch.Tensor] = {}
    for gate in layer.gates:
        arrays = layer.gate_parameters[gate.path]
        if "weight" not in arrays:
            continue
        heads = 1 if gate.site == "dense" else layer.shape.num_heads
        logits = gate_logits(gate, gate_reads(gate, sources), arrays, num_heads=heads)
        scaled[f"gate.{gate.path}.weight"] = arrays["weight"] * (strength / float(logits.std()))
    return layer.with_parameters(scaled)
