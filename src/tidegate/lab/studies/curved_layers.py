"""What the studies of curvature share: how strong gates are made, and which curvature is rounding."""

from __future__ import annotations

import torch

from tidegate.tensors.gating import gate_logits, gate_reads
from tidegate.tensors.layer import AttentionArrays

FLAT = 1e-9
"""A relative curvature below this is rounding."""


def with_strength(layer: AttentionArrays, x: torch.Tensor, strength: float) -> AttentionArrays:
    """Return the layer with every gate's matrix scaled until its logits over x have that standard deviation.

    A sink has no matrix, and stays as it is.
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
