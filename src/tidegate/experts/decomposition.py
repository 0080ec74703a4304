r"""Decompose attention exactly into a hierarchical mixture of experts over heads, channels and tokens.

$$Y_{il} = \gamma_{il} \Big( \sum_h \pi_h \sum_c \omega_{hcl}\, \delta_{ihc} \sum_j a^h_{ij}\, s_{jhc}\, e_{hc}(x_j)
   + b_l \Big), \qquad e_{hc}(x) = x \cdot w_{hc}$$

A sink is an additional expert of each head with output 0: its weight and those of the tokens sum to 1.

Shapes: `H` heads, `T` query and `S` key positions, `h` channels of a head, `d` model width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from tidegate._validation import InputError, require_choice
from tidegate.experts.layers import Floats, Layer, as_float64, as_layer_arrays
from tidegate.gate import Gate, GatePath
from tidegate.gates import Gates
from tidegate.tensors.gating import GateSources, gate_reads, gate_values
from tidegate.tensors.heads import merge_groups, repeat_heads
from tidegate.tensors.layer import AttentionArrays

Form: TypeAlias = Literal["signed", "convex"]
ExpertKind: TypeAlias = Literal["linear", "gated"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decomposition:
    """The decomposition of a layer's output on one input, in NumPy float64; absent gates are None."""

    form: Form
    expert_kind: ExpertKind
    """`gated` with a gate between value and output projection, `linear` otherwise."""
    head_weights: Floats
    """(H, 1): 1/H each; in the convex form (H, d), probabilities over the heads for each output feature."""
    channel_weights: Floats
    """(H, h, d): H times the output projection; in the convex form probabilities over each head's channels."""
    expert_scale: Floats | None
    """(H, h, d): signed factor of the experts in the convex form; None in the signed form."""
    token_weights: Floats
    """(..., H, T, S): softmax; fully masked rows are 0."""
    sink_weights: Floats | None
    """(..., H, T): weight of the sink."""
    linear_experts: Floats
    """(..., H, S, h): each channel's linear map of each key position."""
    source_gate: Floats | None
    """(..., H, S, h or 1): value gate at the key position, inside the expert."""
    source_shift: Floats | None
    """(..., H, S, h or 1): addend of a value gate with the op `add`."""
    destination_gate: Floats | None
    """(..., H, T, h or 1): output gate at the query position; part of the expert or of the channel weight."""
    destination_shift: Floats | None
    """(..., H, T, h or 1): addend of an output gate with the op `add`."""
    outside_gate: Floats | None
    """(..., T, d): dense gate, outside the mixture."""
    outside_shift: Floats | None
    """(..., T, d): addend of a dense gate with the op `add`."""
    bias: Floats | None
    """(d,): bias of the output projection, inside the dense gate."""

    def experts(self) -> Floats:
        """Return every expert with its gates, (..., H, T, S, h), a large tensor for inspection.

        The addend of an output gate with the op `add` is not included; it is in `destination_shift`.
        """
        per_source = self._source_experts()[..., None, :, :]
        if self.destination_gate is None:
            shape = (*self.token_weights.shape, per_source.shape[-1])
            return np.broadcast_to(per_source, shape).copy()
        return per_source * self.destination_gate[..., :, None, :]

    def reconstruct(self) -> Floats:
        """Compute the layer's output (..., T, d) from the parts."""
        channels = self.token_weights @ self._source_experts()
        channels = _scale_and_shift(channels, self.destination_gate, self.destination_shift)
        mixing = self.head_weights[:, None, :] * self.channel_weights
        mixing = mixing if self.expert_scale is None else mixing * self.expert_scale
        output = np.einsum("...htc,hcl->...tl", channels, mixing)
        output = output if self.bias is None else output + self.bias
        return _scale_and_shift(output, self.outside_gate, self.outside_shift)

    def max_error(self, output: Any) -> float:
        """Return the largest distance between the reconstruction and an output of the layer."""
        return float(np.max(np.abs(self.reconstruct() - as_float64(output))))

    def _source_experts(self) -> Floats:
        return _scale_and_shift(self.linear_experts, self.source_gate, self.source_shift)


def decompose(
    layer: Layer,
    x: Any,
    *,
    form: Form = "signed",
    mask: Any | None = None,
    context: Any | None = None,
    positions: Any | None = None,
) -> Decomposition:
    """Return the layer's output on x as a mixture over heads, channels and tokens.

    Args:
        layer: `AttentionArrays`, or a layer whose `arrays()` returns them.
        x: (..., T, d).
        form: `signed` has signed channel weights; `convex` has probabilities, with the signs in the experts.
        mask: Bool, broadcasts to (..., H, T, S); True marks a key the query may attend to.
        context: (..., S, d) for cross-attention.
        positions: For the rotary embedding; None counts from 0.

    Raises:
        InputError: `layer` has a gate with the op `replace`, which is not a factor of an expert.
    """
    require_choice("form", form, get_args(Form))
    arrays = as_layer_arrays(layer)
    allowed = None if mask is None else np.asarray(mask.detach().cpu() if hasattr(mask, "detach") else mask)
    steps = None if positions is None else np.asarray(positions)
    attended = None if context is None else as_float64(context)
    trace = arrays.trace(as_float64(x), context=attended, mask=allowed, positions=steps)
    num_heads = arrays.shape.num_heads
    source_gate, source_shift = (
        None if part is None else repeat_heads(part, num_heads) for part in _gate_parts(arrays, "value", trace.sources)
    )
    kept, _ = _gate_parts(arrays, "partition", trace.sources)
    destination_gate, destination_shift = _gate_parts(arrays, "output", trace.sources)
    outside_gate, outside_shift = (
        None if part is None else part[..., 0, :, :] for part in _gate_parts(arrays, "dense", trace.sources)
    )
    weights, channels, scale = _mixing_weights(np.asarray(arrays.W_O), form)
    return Decomposition(
        form=form,
        expert_kind="gated" if any(arrays.gates.at(site) for site in ("value", "output")) else "linear",
        head_weights=weights,
        channel_weights=channels,
        expert_scale=scale,
        token_weights=trace.weights if kept is None else trace.weights * kept,
        sink_weights=None if kept is None else 1 - kept[..., 0],
        linear_experts=repeat_heads(trace.sources.value, num_heads),
        source_gate=source_gate,
        source_shift=source_shift,
        destination_gate=destination_gate,
        destination_shift=destination_shift,
        outside_gate=outside_gate,
        outside_shift=outside_shift,
        bias=arrays.b_O,
    )


def with_input_gates(layer: Layer) -> AttentionArrays:
    r"""Rewrite every gate that reads the query as one that reads the input, $\theta = W_Q w_g$, with the same function.

    `bma-query` becomes `g1` and `bma` becomes `g2`, with matrices of rank at most h per head. A query bias becomes a
    bias of the gate.

    Raises:
        InputError: A gate that reads the query has a rank or a width, or heads share it.
    """
    arrays = as_layer_arrays(layer)
    gates: list[Gate] = []
    parameters: dict[GatePath, Any] = dict(arrays.gate_parameters)
    for gate in arrays.gates:
        if gate.reads != "query":
            gates.append(gate)
            continue
        if gate.rank is not None or gate.width is not None or gate.share != "head":
            expected = "a layer whose query-reading gates have a full matrix for each head"
            hint = "Leave rank and width at None and share at 'head'."
            raise InputError("layer", expected=expected, got=str(gate), hint=hint)
        gates.append(replace(gate, reads="input", bias=0.0 if arrays.b_Q is not None else gate.bias))
        parameters[gate.path] = _input_parameters(arrays, gate)
    return replace(arrays, gates=Gates(gates), gate_parameters=parameters)


def _input_parameters(arrays: AttentionArrays, gate: Gate) -> dict[str, Floats]:
    own = arrays.gate_parameters[gate.path]
    heads = gate.num_heads_at_site(arrays.shape)
    found = {"weight": merge_groups(arrays.W_Q, heads) @ own["weight"]}
    if arrays.b_Q is not None:
        shift = merge_groups(arrays.b_Q[:, None, :], heads) @ own["weight"]
        found["bias"] = shift[:, 0, :] + own.get("bias", 0.0)
    elif "bias" in own:
        found["bias"] = own["bias"]
    return found


def _gate_parts(arrays: AttentionArrays, path: GatePath, sources: GateSources) -> tuple[Floats | None, Floats | None]:
    """Return the factor and the addend of the gate at a path, (..., heads, positions, width)."""
    gate = arrays.gates.at(path)
    if gate is None:
        return None, None
    heads = gate.num_heads_at_site(arrays.shape)
    values = gate_values(gate, gate_reads(gate, sources), arrays.gate_parameters[path], num_heads=heads)
    if gate.op == "replace":
        raise InputError("layer", expected="a layer whose gates multiply or add", got=str(gate))
    return (values, None) if gate.op == "multiply" else (None, values)


def _scale_and_shift(array: Floats, factor: Floats | None, addend: Floats | None) -> Floats:
    array = array if factor is None else array * factor
    return array if addend is None else array + addend


def _mixing_weights(W_O: Floats, form: Form) -> tuple[Floats, Floats, Floats | None]:
    """Return head weights, channel weights and scale of the experts; a feature with zero weights gets uniform ones."""
    num_heads, width, _ = W_O.shape
    if form == "signed":
        return np.full((num_heads, 1), 1 / num_heads), num_heads * W_O, None
    magnitude = np.abs(W_O)
    by_head = magnitude.sum(axis=1)
    total = by_head.sum(axis=0)
    heads = np.divide(by_head, total, out=np.full_like(by_head, 1 / num_heads), where=total > 0)
    head_total = by_head[:, None, :]
    channels = np.divide(magnitude, head_total, out=np.full_like(W_O, 1 / width), where=head_total > 0)
    return heads, channels, np.sign(W_O) * total
