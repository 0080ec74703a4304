"""Convert models with gates at the attention output to architectures of transformers that have such gates.

In Qwen3-Next the gate is part of the query's projection; in Step-3.7 and Laguna it is `g_proj`.

Legend: M model width, H query heads, D head width, R channels that a gate reads, W numbers per head, 1 or D.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tidegate._validation import InputError
from tidegate.gate import Activation
from tidegate.torch.attention import PROJECTIONS
from tidegate.torch.convert import to_fused_query_gate
from tidegate.torch.gate import AttentionGate
from tidegate.torch.precision import widen
from tidegate.torch.retrofit.interface import calls_interface, implementation_in, stock_implementation
from tidegate.torch.retrofit.layer import GATES_NAME, GatedLayer, gated_layers, require_gates
from tidegate.torch.retrofit.probe import evaluation_mode, exceeds_rounding, largest_change, probe_inputs, run_probe
from tidegate.torch.retrofit.wrappers import has_adapters, unwrap_model

if TYPE_CHECKING:
    from transformers import LagunaForCausalLM, Qwen3NextForCausalLM, Step3p7ForConditionalGeneration

_SHARED_OPTIONS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id"),
)
"""Options of Qwen3's configuration that all targets have."""
_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16} | {
    "image_size": 28,
    "patch_size": 14,
}
"""The smallest vision tower that Step-3.7 can be built with."""


@dataclass(frozen=True, slots=True)
class _Target:
    """An architecture of transformers whose attention has a gate at the output that reads the input."""

    name: str
    class_name: str
    """Prefix of the names of its classes, which older releases of transformers lack."""
    activations: Mapping[Activation, tuple[float, float]]
    """Factors a and b of activations that are b times the architecture's own activation of `a z`."""
    value_at_zero: float
    """The value of its gate at a logit of 0."""
    head: str = "ForCausalLM"
    """Suffix of the name of its model class."""
    by_channel: bool = True
    """Whether a gate may have one value per channel."""
    fused: bool = False
    """Whether `q_proj` contains the gate, and its bias if any; otherwise `g_proj` does, without a bias."""
    windows: bool = True
    shifted_norms: bool = True
    """Whether norms scale by 1 + weight."""
    prefix: str = "model."
    """Prefix of its parameter names, in place of `model.` in Qwen3."""


_SIGMOIDS: dict[Activation, tuple[float, float]] = {"sigmoid": (1, 1), "twosigmoid": (1, 2), "tanh1": (2, 2)}
_QWEN3_NEXT = _Target("Qwen3-Next", "Qwen3Next", _SIGMOIDS, 0.5, fused=True, windows=False)
_STEP = _Target(
    "Step-3.7", "Step3p7", _SIGMOIDS, 0.5, "ForConditionalGeneration", by_channel=False, prefix="model.language_model."
)
_LAGUNA = _Target("Laguna", "Laguna", {"softplus": (1, 1)}, math.log(2), shifted_norms=False)


def export_gated(model: PreTrainedModel) -> Qwen3NextForCausalLM | Step3p7ForConditionalGeneration | LagunaForCausalLM:
    """Convert a gated model to the first architecture of transformers that can express its gates.

    Qwen3-Next supports all sigmoid gates but no windows, Step-3.7 sigmoid gates with one value per head, and Laguna
    softplus gates. A probe compares the outputs with those of the model.

    Raises:
        InputError: If none fits; the hint gives the reasons.
    """
    _require_exportable(model)
    reasons: list[str] = []
    for convert in (to_qwen3_next, to_step3p7, to_laguna):
        try:
            return convert(model)
        except InputError as error:
            reasons.append(str(error))
    raise _not_exportable(model, " ".join(dict.fromkeys(reasons)))


def to_qwen3_next(model: PreTrainedModel) -> Qwen3NextForCausalLM:
    """Convert a causal language model built like Qwen3, with sigmoid gates, to Qwen3-Next with full attention only.

    Raises:
        InputError: If the model or its gates are built differently, a layer has a window, or outputs differ.
    """
    return _export(model, _QWEN3_NEXT)


def to_step3p7(model: PreTrainedModel) -> Step3p7ForConditionalGeneration:
    """Convert a causal language model built like Qwen3, with sigmoid gates of one value per head, to Step-3.7.

    Windows are kept. Step-3.7 also takes images: its vision tower is the smallest possible, untrained, and not used for
    text. A warning says to load it from a directory with `AutoModelForImageTextToText`.

    Raises:
        InputError: If the model or its gates are built differently, or outputs differ.
    """
    exported = _export(model, _STEP)
    warnings.warn(
        f"{type(model).__name__} is exported to {type(exported).__name__}, which also takes images: load it with "
        "AutoModelForImageTextToText. AutoModelForCausalLM does not support it.",
        stacklevel=2,
    )
    return exported


def to_laguna(model: PreTrainedModel) -> LagunaForCausalLM:
    """Convert a causal language model built like Qwen3, with softplus gates like `output:input:softplus`, to Laguna.

    Gates may have one value per channel or per head. Windows are kept.

    Raises:
        InputError: If the model or its gates are built differently, or outputs differ.
    """
    return _export(model, _LAGUNA)


def to_qwen3_next_attention(module: nn.Module) -> dict[str, Tensor]:
    """Convert the attention of a layer, or of all layers of a model, to the state dict of Qwen3-Next attention.

    There `q_proj` returns each head's query and then its gate's logits, the gate is a sigmoid, and the norms of queries
    and keys scale by 1 + weight. The factor 2 of `twosigmoid` and `tanh1` is folded into `o_proj`; gates of grain
    `head`, with a rank, a width or shared matrices are expanded. A layer without a gate gets a constant one.

    Args:
        module: An attention module like that of Qwen3, or a model of them, with a gate at the output that reads the
            input. It has `q_proj`, `k_proj`, `v_proj`, `o_proj` and, by head, `q_norm` and `k_norm`.

    Returns:
        New tensors; for a model their names start with the paths of its attention modules.
    """
    gated = {layer.layout.module: layer for layer in gated_layers(module)}
    require_gates(module, gated)
    if module in gated:
        return _attention_state(module, gated[module], _QWEN3_NEXT, by_head=False)
    return _attention_states(module, gated, _QWEN3_NEXT, by_head=False)


def _export(model: PreTrainedModel, target: _Target) -> Any:
    """Build a model of the target with the weights of this one, and compare their outputs."""
    _require_exportable(model)
    config: Any = model.config
    if missing := [name for name in _SHARED_OPTIONS if not hasattr(config, name)]:
        raise _not_exportable(model, f"Its configuration has no {missing[0]}, so it is not built like Qwen3.", target)
    if not target.windows and (kinds := set(_layer_types(config))) != {"full_attention"}:
        raise _not_exportable(model, f"It has layers of {', '.join(sorted(kinds))}.", target)
    layers = {layer.layout.module: layer for layer in gated_layers(model)}
    by_head = not target.fused and all(gate.grain == "head" for layer in layers.values() for gate in layer.gates)
    attention = _attention_states(model, layers, target, by_head=by_head)
    state = {name: tensor for name, tensor in model.state_dict().items() if f".{GATES_NAME}." not in name}
    bias = any(name.endswith("_proj.bias") for name in state | attention)
    exported = _build(model, target, bias=bias, by_head=by_head)
    for name, tensor in state.items():
        if target.shifted_norms and name.endswith("norm.weight"):
            state[name] = (widen(tensor) - 1).to(tensor.dtype)
    state = {name.replace("model.", target.prefix, 1): tensor for name, tensor in (state | attention).items()}
    # Other parts than the language model, such as a vision tower, keep their initial weights.
    others = exported.state_dict().items()
    state |= {name: tensor for name, tensor in others if not name.startswith((target.prefix, "lm_head."))}
    try:
        exported.load_state_dict(state)
    except RuntimeError as error:
        raise _not_exportable(model, f"It is not built like Qwen3: {error}.", target) from error
    inputs = probe_inputs(model)
    with evaluation_mode(model), evaluation_mode(exported):
        theirs, ours = run_probe(model, inputs), run_probe(exported, inputs)
    if exceeds_rounding(ours, theirs, model.dtype):
        change = largest_change(ours, theirs)
        raise _not_exportable(model, f"With the same weights, its outputs differ by up to {change:.3g}.", target)
    return exported.train(model.training)


def _build(model: PreTrainedModel, target: _Target, *, bias: bool, by_head: bool) -> Any:
    """Build an untrained model of the target with the sizes, dtype and device of this one."""
    if not hasattr(transformers, f"{target.class_name}Config"):
        reason = f"transformers {transformers.__version__} has no {target.name}; install a newer release."
        raise _not_exportable(model, reason, target)
    options = _config_options(target, model.config, bias=bias, by_head=by_head)
    config = getattr(transformers, f"{target.class_name}Config")(**options)
    exported = getattr(transformers, f"{target.class_name}{target.head}")(config)
    exported = exported.to(device=model.device, dtype=model.dtype)
    exported.set_attn_implementation(stock_implementation(implementation_in(model)))
    return exported


def _config_options(target: _Target, config: Any, *, bias: bool, by_head: bool) -> dict[str, Any]:
    """Return the options of the target's configuration from that of the source."""
    shared = {name: getattr(config, name) for name in _SHARED_OPTIONS} | {"attention_bias": bias}
    shared["layer_types"] = kinds = _layer_types(config)
    rope = {**config.rope_parameters, "partial_rotary_factor": 1.0}
    num_layers = config.num_hidden_layers
    if target is _QWEN3_NEXT:
        return {**shared, "rope_parameters": rope, "num_experts": 0, "mlp_only_layers": list(range(num_layers))}
    shared["mlp_layer_types"] = ["dense"] * num_layers
    # The architectures need a number even if no layer has a window.
    shared["sliding_window"] = getattr(config, "sliding_window", None) or config.max_position_embeddings
    if target is _LAGUNA:
        ropes = dict.fromkeys(("full_attention", "sliding_attention"), rope)
        return {**shared, "gating": "per-head" if by_head else "per-element", "rope_parameters": ropes}
    text = {**shared, "gating": True, "rope_parameters": dict.fromkeys(kinds, rope)}
    return {"text_config": text, "vision_config": _VISION, "tie_word_embeddings": shared["tie_word_embeddings"]}


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _attention_states(
    model: nn.Module, gated: Mapping[nn.Module, GatedLayer], target: _Target, *, by_head: bool
) -> dict[str, Tensor]:
    return {
        f"{path}.{name}": tensor
        for path, attention in model.named_modules()
        if calls_interface(type(attention))
        for name, tensor in _attention_state(attention, gated.get(attention), target, by_head=by_head).items()
    }


@torch.no_grad()
def _attention_state(
    attention: nn.Module, layer: GatedLayer | None, target: _Target, *, by_head: bool
) -> dict[str, Tensor]:
    """Return the weights of an attention module that differ in the target; a missing layer gives a constant gate."""
    state = {name: tensor for name, tensor in attention.state_dict().items() if not name.startswith(f"{GATES_NAME}.")}
    if missing := [name for name in ("q_norm", "k_norm", *PROJECTIONS) if f"{name}.weight" not in state]:
        got, hint = type(attention).__name__, f"It has no {', '.join(missing)}."
        raise InputError("module", expected="attention like that of Qwen3", got=got, hint=hint)
    query_weight, head_dim = state["q_proj.weight"], len(state["q_norm.weight"])
    width = 1 if by_head else head_dim
    if layer is None:
        bias_HW, scale = None, 1 / target.value_at_zero
        weight_HMW = query_weight.new_zeros(len(query_weight) // head_dim, query_weight.shape[1], 1)
    else:
        weight_HMW, bias_HW, scale = _written_gate(layer, target)
    weight_HMW = weight_HMW.expand(-1, -1, width).to(query_weight.dtype)
    state["o_proj.weight"] = state["o_proj.weight"] * scale
    if not target.fused:
        g_proj = weight_HMW.transpose(1, 2).flatten(0, 1)
        return {"g_proj.weight": g_proj, "o_proj.weight": state["o_proj.weight"]}
    state["attn_gate.output.weight"] = weight_HMW
    if bias_HW is not None or any(f"{name}.bias" in state for name in PROJECTIONS):
        bias_HW = weight_HMW.new_zeros(len(weight_HMW), 1) if bias_HW is None else bias_HW
        state["attn_gate.output.bias"] = bias_HW.expand(-1, width).to(query_weight.dtype)
        for name in PROJECTIONS:
            weight = state[f"{name}.weight"]
            state.setdefault(f"{name}.bias", weight.new_zeros(len(weight)))
    return to_fused_query_gate(state)


def _written_gate(layer: GatedLayer, target: _Target) -> tuple[Tensor, Tensor | None, float]:
    """Return matrices (H, M, W), a bias (H, W) and a factor, so that the gate is the factor times the target's gate.

    Low-rank factors are multiplied, shared matrices repeated, and channels that are not read get zeros.
    """
    layer.require_plain_gates()
    gate = layer.gates.at("output")
    if not (
        len(layer.gates) == 1
        and gate is not None
        and gate.reads == "input"
        and gate.op == "multiply"
        and gate.activation in target.activations
        and (target.by_channel or gate.grain == "head")
        and (target.fused or gate.bias is None)
    ):
        kind = "" if target.by_channel else " with one value per head"
        kind += "" if target.fused else " without a bias"
        expected = f"one gate like 'g1'{kind}, with activation {' or '.join(target.activations)}, for {target.name}"
        raise InputError("gates", expected=expected, got=str(layer.gates), hint=f"See {layer.layout.name}.")
    inner, outer = target.activations[gate.activation]
    module, shape = cast("AttentionGate", layer.modules.at("output")), layer.layout.shape
    first, *rest = module.matrices()
    weight = widen(first)
    for factor in rest:
        weight = weight @ widen(factor)
    weight = F.pad(weight, (0, 0, 0, shape.d_model - weight.shape[1]))
    repeats = module.num_heads // module.num_matrices
    bias = None if gate.bias is None else inner * widen(module.get_parameter("bias")).repeat_interleave(repeats, dim=0)
    return inner * weight.repeat_interleave(repeats, dim=0), bias, outer


def _require_exportable(model: PreTrainedModel) -> None:
    """Raise InputError if the model cannot be exported to any target, with any gates."""
    base = unwrap_model(model)
    if base is not model or has_adapters(base):
        raise InputError("model", expected="without adapters", hint="Export the result of merge_and_unload of peft.")
    require_gates(model, gated_layers(model))
    if experts := next((path for path, _ in model.named_modules() if path.split(".")[-1] == "experts"), None):
        raise _not_exportable(model, f"{experts} is a mixture of experts.")
    for layer in gated_layers(model):
        norm = getattr(layer.layout.module, "q_norm", None)
        if norm is not None and norm.weight.numel() != layer.layout.shape.head_dim:
            raise _not_exportable(model, f"q_norm of {layer.layout.name} normalizes all heads together.")


def _not_exportable(model: PreTrainedModel, reason: str, target: _Target | None = None) -> InputError:
    name = "an architecture with gates" if target is None else target.name
    hint = (
        reason if target is not None else f"{reason} Save it with save_pretrained of tidegate.torch.retrofit instead."
    )
    return InputError("model", expected=f"one that can be exported to {name}", got=type(model).__name__, hint=hint)
