"""Models with `g1` gates in the layout of Qwen3-Next, whose attention has such a gate of its own.

Legend: M model width, H query heads, D head width, R channels that a gate reads.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from tidegate.gate import Activation, Gate
from tidegate.torch.attention import PROJECTIONS
from tidegate.torch.convert import to_fused_query_gate
from tidegate.torch.gate import AttentionGate
from tidegate.torch.precision import widen
from tidegate.torch.retrofit.interface import calls_interface, implementation_in, stock_implementation
from tidegate.torch.retrofit.layer import GATES_NAME, GatedLayer, gated_layers
from tidegate.torch.retrofit.probe import (
    answers,
    evaluation_mode,
    exceeds_rounding,
    largest_change,
    largest_number,
    probe_inputs,
)
from tidegate.torch.retrofit.wrappers import has_adapters, unwrap_model

AS_SIGMOID: dict[Activation, tuple[float, float]] = {"sigmoid": (1, 1), "twosigmoid": (1, 2), "tanh1": (2, 2)}
"""Activations that are a sigmoid of `a z` times b: the factors a and b."""


def to_qwen3_next_attention(module: nn.Module) -> dict[str, Tensor]:
    """Convert the attention of a layer, or of all layers of a model, to the state dict of Qwen3-Next attention.

    There `q_proj` gives each head's query and then its gate's logits, the gate is a sigmoid, and the norms of queries
    and keys scale by 1 + weight. The 2 of `twosigmoid` and `tanh1` goes into `o_proj`; gates of grain `head`, with a
    rank, a width or shared matrices are written out. A layer of the model that has no gate gets one that is constant.

    module  : an attention module, or a model of them, with `q_proj`, `k_proj`, `v_proj`, `o_proj` and, by head,
              `q_norm` and `k_norm`, as Qwen3 has; and with a gate at the output that reads the input
    returns : new tensors; for a model with the paths of its attention modules in front
    """
    gated = {layer.layout.module: layer for layer in gated_layers(module)}
    if not gated:
        raise ValueError(f"{type(module).__name__} has no gates to export; call add_gates(model) first.")
    if module in gated:
        return _export_attention(module, gated[module])
    return {
        f"{path}.{name}": tensor
        for path, attention in module.named_modules()
        if calls_interface(type(attention))
        for name, tensor in _export_attention(attention, gated.get(attention)).items()
    }


def to_qwen3_next(model: PreTrainedModel) -> Qwen3NextForCausalLM:
    """Convert a causal language model built like Qwen3, with `g1` gates, to Qwen3-Next with full attention only.

    A probe compares the two models' logits; they differ by rounding alone, or the export is refused.

    Raises:
        ValueError: if the model is built in another way, or attends through a window.
    """
    require_exportable(model)
    attention = to_qwen3_next_attention(model)
    config = _config(model, bias=any(name.endswith("_proj.bias") for name in attention))
    exported: Any = cast("Any", Qwen3NextForCausalLM)(config).to(device=model.device, dtype=model.dtype)
    exported.set_attn_implementation(stock_implementation(implementation_in(model)))
    scales = {f"{path}.weight" for path, part in exported.named_modules() if isinstance(part, Qwen3NextRMSNorm)}
    state = dict(attention)
    for name, tensor in model.state_dict().items():
        if f".{GATES_NAME}." not in name and name not in state:
            state[name] = (widen(tensor) - 1).to(tensor.dtype) if name in scales else tensor
    try:
        exported.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{type(model).__name__} is not built like Qwen3: {error}") from error
    require_equal_answers(model, exported)
    return exported.train(model.training)


def require_exportable(model: PreTrainedModel) -> None:
    """Refuse a model that no architecture here can take, whatever its gates."""
    base = unwrap_model(model)
    if base is not model or has_adapters(base):
        where = (
            f"is a {type(model).__name__} around a {type(base).__name__}"
            if base is not model
            else "has adapters inside"
        )
        raise ValueError(f"model {where}. Merge the adapters first, and export what merge_and_unload of peft gives.")
    if not any(gated_layers(model)):
        raise ValueError(f"{type(model).__name__} has no gates to export; call add_gates(model) first.")
    if experts := next((path for path, _ in model.named_modules() if path.split(".")[-1] == "experts"), None):
        raise _not_exportable(model, f"{experts} is a mixture of experts, and feed-forward layers there are plain ones")
    for layer in gated_layers(model):
        norm, head_dim = getattr(layer.layout.module, "q_norm", None), layer.layout.shape.head_dim
        width = None if norm is None else norm.weight.numel()
        if width not in (None, head_dim):
            raise _not_exportable(
                model,
                f"q_norm of {layer.layout.name} normalises {width} channels of all heads together, and each head "
                f"has {head_dim}, which have a norm of their own there",
            )


def _not_exportable(model: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} cannot be exported: {reason}. Keep it with save_pretrained of tidegate.torch, which "
        "load_pretrained reads."
    )


def _export_attention(attention: nn.Module, layer: GatedLayer | None) -> dict[str, Tensor]:
    state = {name: tensor for name, tensor in attention.state_dict().items() if not name.startswith(f"{GATES_NAME}.")}
    missing = [name for name in ("q_norm", "k_norm", *PROJECTIONS) if f"{name}.weight" not in state]
    if missing:
        raise ValueError(f"{type(attention).__name__} has no {', '.join(missing)}, which Qwen3-Next attention needs.")
    width, model_width = state["q_proj.weight"].shape
    head_dim = state["q_norm.weight"].shape[0]
    weight_HMD, bias_HD, scale = (
        (state["q_proj.weight"].new_zeros(width // head_dim, model_width, head_dim), None, 2.0)
        if layer is None
        else _sigmoid_gate(layer)
    )
    state["attn_gate.output.weight"] = weight_HMD.to(state["q_proj.weight"].dtype)
    state["o_proj.weight"] = state["o_proj.weight"] * scale
    if bias_HD is not None or any(f"{name}.bias" in state for name in PROJECTIONS):
        bias_HD = weight_HMD.new_zeros(weight_HMD.shape[0], head_dim) if bias_HD is None else bias_HD
        state["attn_gate.output.bias"] = bias_HD.to(state["q_proj.weight"].dtype)
        for name in PROJECTIONS:
            weight = state[f"{name}.weight"]
            state.setdefault(f"{name}.bias", weight.new_zeros(weight.shape[0]))
    return to_fused_query_gate(state)


def _sigmoid_gate(layer: GatedLayer) -> tuple[Tensor, Tensor | None, float]:
    """Write the gate as factor · sigmoid: return its matrices (H, M, D), its bias (H, D) and the factor."""
    gate = require_output_gate(layer, "Qwen3-Next", AS_SIGMOID)
    inner, outer = AS_SIGMOID[gate.activation]
    weight_HMW, bias_HW = written_gate(layer)
    width = layer.layout.shape.head_dim
    bias = None if bias_HW is None else inner * bias_HW.expand(-1, width)
    return inner * weight_HMW.expand(-1, -1, width), bias, outer


def require_output_gate(layer: GatedLayer, target: str, activations: Collection[Activation]) -> Gate:
    """Return the layer's gate; refuse what is not one gate like `g1` with one of these activations."""
    layer.require_plain_gates()
    gate = layer.gates.at("output")
    if len(layer.gates) != 1 or gate is None or gate.reads != "input" or gate.op != "multiply":
        raise ValueError(
            f"{layer.layout.name} has the gates {layer.gates}; {target} has one, at the output, that reads the input"
            " and multiplies, like 'g1'."
        )
    if gate.activation not in activations:
        raise ValueError(
            f"{layer.layout.name} has a gate with the activation {gate.activation!r}; "
            f"only {', '.join(activations)} can be written as that of {target}."
        )
    return gate


@torch.no_grad()
def written_gate(layer: GatedLayer) -> tuple[Tensor, Tensor | None]:
    """Write out the output gate's matrices (H, M, W) and its bias (H, W), by head, W the head's width or 1.

    Factors of low rank are multiplied, shared matrices repeated, and channels that are not read have zeros.
    """
    module, shape = cast("AttentionGate", layer.modules.at("output")), layer.layout.shape
    first, *rest = module.matrices()
    weight = widen(first)
    for factor in rest:
        weight = weight @ widen(factor)
    weight = F.pad(weight, (0, 0, 0, shape.d_model - weight.shape[1]))
    repeats = module.num_heads // module.num_matrices
    bias = None if module.gate.bias is None else widen(module.get_parameter("bias"))
    bias = None if bias is None else bias.repeat_interleave(repeats, dim=0)
    return weight.repeat_interleave(repeats, dim=0), bias


def _config(model: PreTrainedModel, *, bias: bool) -> Qwen3NextConfig:
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"{type(model).__name__} has layers of {', '.join(sorted(kinds))}; Qwen3-Next attends to all positions."
        )
    return Qwen3NextConfig(
        **common_options(model),
        rope_parameters={**config.rope_parameters, "partial_rotary_factor": 1.0},
        attention_bias=bias,
        layer_types=["full_attention"] * config.num_hidden_layers,
        num_experts=0,
        mlp_only_layers=list(range(config.num_hidden_layers)),
    )


def common_options(model: PreTrainedModel) -> dict[str, Any]:
    """Return the options of a model's configuration that all targets share; refuse one that is not like Qwen3's."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
        *("tie_word_embeddings", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id"),
    )
    missing = [name for name in names if not hasattr(model.config, name)]
    if missing:
        raise ValueError(f"{type(model).__name__} is not built like Qwen3: its configuration has no {missing[0]}.")
    return {name: getattr(model.config, name) for name in names}


def require_equal_answers(model: PreTrainedModel, exported: PreTrainedModel, target: str = "Qwen3-Next") -> None:
    """Refuse an export whose answers differ by more than rounding."""
    inputs = probe_inputs(model)
    with evaluation_mode(model), evaluation_mode(exported):
        theirs, ours = answers(model, inputs), answers(exported, inputs)
    change, size = largest_change(ours, theirs), largest_number(theirs)
    if exceeds_rounding(change, size, model.dtype):
        raise ValueError(
            f"{type(model).__name__} computes something else than {target} does with the same weights: answers of "
            f"size {size:.3g} differ by up to {change:.3g}."
        )
