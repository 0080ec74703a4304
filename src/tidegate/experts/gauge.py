"""Count the directions in a layer's parameters that change no output by the rank of its Jacobian, and predict them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tidegate._validation import InputError
from tidegate.experts.gauge_theory import predict_gauge, reads_values, why_unpredicted
from tidegate.experts.layers import Floats, Layer, as_float64, as_layer_arrays
from tidegate.gate import GatePath
from tidegate.gates import GateLike, Gates
from tidegate.sizes import HeadShape
from tidegate.tensors.layer import AttentionArrays
from tidegate.tensors.rotary import Rotary

FREE_BELOW = 1e-11
"""Directions with a smaller singular value relative to the largest are free: above rounding error, below soft ones."""
_CLEAR_GAP = 100.0
_MARGIN = 1.5
"""Outputs per parameter in the table."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GaugeReport:
    """Rank and nullity of a layer's Jacobian, measured and predicted."""

    num_parameters: int
    rank: int
    nullity: int
    """Number of directions that change no output."""
    value_block_nullity: int
    """Nullity within value and output projections, their biases, and gates that read values or outputs."""
    predicted: int | None
    """Predicted nullity; None without a prediction, for the reason in `unpredicted`."""
    predicted_value_block: int | None
    soft: int | None
    """Predicted further directions that are determined only by the epsilon of query and key norms."""
    unpredicted: str | None
    singular_gap: float
    """Ratio of the smallest nonzero singular value to the largest zero one; infinite if all are nonzero."""
    singular_values: Floats
    """Singular values of the whole layer, descending."""

    @property
    def agrees(self) -> bool:
        """Return whether prediction and measurement are equal for layer and value block; False without a prediction."""
        found = (self.nullity, self.value_block_nullity)
        return found == (self.predicted, self.predicted_value_block)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GaugeRow:
    """One line of the table."""

    gate: str
    report: GaugeReport


def gauge_report(layer: Layer, x: Any) -> GaugeReport:
    """Measure the rank of the exact Jacobian of all outputs by all parameters, in float64 with PyTorch.

    The input must be generic, with several sequences, more outputs than parameters and, with a rotary embedding, more
    positions than rotating pairs. The cost grows with the cube of the number of parameters. A warning is issued if the
    singular values have no clear gap.

    Args:
        layer: `AttentionArrays`, or a layer whose `arrays()` returns them.
        x: (..., T, d).
    """
    # PyTorch is loaded only where it is needed.
    from tidegate.experts.torch_adapter import layer_jacobian

    arrays, inputs = as_layer_arrays(layer), as_float64(x)
    entries: dict[str, Any] = {name: np.arange(array.size) for name, array in arrays.parameters().items()}
    num_parameters = sum(map(len, entries.values()))
    if inputs.size < num_parameters:
        expected = f"an input with at least as many outputs as parameters, {num_parameters}"
        raise InputError("x", expected=expected, got=inputs.size, hint="Add sequences or positions.")
    jacobian = layer_jacobian(arrays, inputs, entries)
    columns = np.concatenate(list(jacobian.values()), axis=1)
    values = np.linalg.svd(columns, compute_uv=False)
    columns = np.concatenate([jacobian[name] for name in _value_block(arrays)], axis=1)
    block = np.linalg.svd(columns, compute_uv=False)
    rank, gap = _rank(values), _gap(values)
    if gap < _CLEAR_GAP:
        warnings.warn(
            f"The singular values of the Jacobian have no clear gap at rank {rank}: {gap:.3g}. Give a richer x, or "
            "look at singular_values.",
            stacklevel=2,
        )
    prediction = predict_gauge(arrays)
    return GaugeReport(
        num_parameters=len(values),
        rank=rank,
        nullity=len(values) - rank,
        value_block_nullity=len(block) - _rank(block),
        predicted=None if prediction is None else prediction.nullity,
        predicted_value_block=None if prediction is None else prediction.value_block_nullity,
        soft=None if prediction is None else prediction.soft,
        unpredicted=why_unpredicted(arrays),
        singular_gap=gap,
        singular_values=values,
    )


def gauge_table(
    gates: Iterable[GateLike] = ("none", "g1", "g1-head", "g2", "g3", "g4", "g5", "bma", "bma-query", "vga"),
    *,
    d_model: int = 6,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    bias: bool = False,
    rotary: Rotary | None = None,
    qk_norm: bool = False,
    seed: int = 0,
) -> list[GaugeRow]:
    """Compare theory and measurement for a random layer with each of the gates, on random inputs."""
    shape = HeadShape.of(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    rows: list[GaugeRow] = []
    for gate in gates:
        rng = np.random.default_rng(seed)
        layer = random_layer(gate, shape, rng, bias=bias, rotary=rotary, qk_norm=qk_norm)
        num_parameters = sum(array.size for array in layer.parameters().values())
        length = shape.head_dim + 3
        sequences = int(np.ceil(_MARGIN * num_parameters / (length * d_model))) + 2
        report = gauge_report(layer, rng.standard_normal((sequences, length, d_model)))
        rows.append(GaugeRow(gate=str(layer.gates), report=report))
    return rows


def random_layer(
    gate: GateLike,
    shape: HeadShape,
    rng: np.random.Generator,
    *,
    bias: bool = False,
    rotary: Rotary | None = None,
    qk_norm: bool = False,
    causal: bool = True,
) -> AttentionArrays:
    """Draw a layer at generic parameters, with scores and gate logits of order 1."""
    gates = Gates.parse(gate)
    d, h, H, G = shape.d_model, shape.head_dim, shape.num_heads, shape.num_kv_heads

    def normal(*size: int, deviation: float = 1.0) -> Floats:
        return deviation * rng.standard_normal(size)

    parameters: dict[GatePath, dict[str, Floats]] = {
        spec.path: {
            name: normal(*size, deviation=1.0 if name == "bias" else size[-2] ** -0.5)
            for name, size in spec.parameter_shapes(**asdict(shape)).items()
        }
        for spec in gates
    }
    biases: dict[str, Any] = (
        {"b_Q": normal(H, h), "b_K": normal(G, h), "b_V": normal(G, h), "b_O": normal(d)} if bias else {}
    )
    norms: dict[str, Any] = {"q_norm": rng.uniform(0.5, 2, h), "k_norm": rng.uniform(0.5, 2, h)} if qk_norm else {}
    return AttentionArrays(
        W_Q=normal(H, d, h, deviation=d**-0.5),
        W_K=normal(G, d, h, deviation=d**-0.5),
        W_V=normal(G, d, h, deviation=d**-0.5),
        W_O=normal(H, h, d, deviation=(H * h) ** -0.5),
        gates=gates,
        gate_parameters=parameters,
        rotary=rotary,
        causal=causal,
        **biases,
        **norms,
    )


def _value_block(arrays: AttentionArrays) -> list[str]:
    followers = tuple(f"gate.{gate.path}." for gate in arrays.gates if reads_values(gate))
    projections = ("W_V", "W_O", "b_V", "b_O")
    return [name for name in arrays.parameters() if name in projections or name.startswith(followers)]


def _rank(values: Floats) -> int:
    return int(np.sum(values > FREE_BELOW * values[0]))


def _gap(values: Floats) -> float:
    rank = _rank(values)
    if rank == len(values):
        return float("inf")
    return float(values[rank - 1] / max(values[rank], np.finfo(np.float64).tiny))
