"""Models with `g1` gates in the layouts of Step-3.7 and Laguna, which keep the matrix of the gate apart as `g_proj`.

Legend: M model width, H query heads, W numbers that a gate has for each head, one or the head's width.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tidegate.gate import Activation
from tidegate.torch.precision import widen
from tidegate.torch.retrofit.export import (
    AS_SIGMOID,
    common_options,
    require_equal_answers,
    require_exportable,
    require_output_gate,
    to_qwen3_next,
    written_gate,
)
from tidegate.torch.retrofit.interface import calls_interface, implementation_in, stock_implementation
from tidegate.torch.retrofit.layer import GATES_NAME, GatedLayer, gated_layers

if TYPE_CHECKING:
    from transformers import LagunaForCausalLM, Qwen3NextForCausalLM, Step3p7ForConditionalGeneration

_IDLE_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """How an architecture keeps the gate of its attention."""

    name: str
    config_class: str
    model_class: str
    """Classes of transformers, from some release on."""
    activations: dict[Activation, tuple[float, float]]
    """Activations that are the architecture's own of `a z` times b: the factors a and b."""
    gate_at_zero: float
    """Its gate where the logits are zero."""
    by_channel: bool
    """Whether a head may have a number for each channel."""


_STEP = _Architecture(
    name="Step-3.7",
    config_class="Step3p7Config",
    model_class="Step3p7ForConditionalGeneration",
    activations=AS_SIGMOID,
    gate_at_zero=0.5,
    by_channel=False,
)
_LAGUNA = _Architecture(
    name="Laguna",
    config_class="LagunaConfig",
    model_class="LagunaForCausalLM",
    activations={"softplus": (1, 1)},
    gate_at_zero=math.log(2),
    by_channel=True,
)


def export_gated(
    model: PreTrainedModel,
) -> Qwen3NextForCausalLM | Step3p7ForConditionalGeneration | LagunaForCausalLM:
    """Convert a gated model to the first architecture of transformers that has a place for its gates.

    Qwen3-Next takes sigmoid gates of all kinds in models without windows, Step-3.7 those with one number for each head,
    windows included, and Laguna softplus gates. Each is compared with the model by a probe. Step-3.7 comes with a
    warning: of transformers' automatic classes `AutoModelForImageTextToText` alone loads it.

    Raises:
        ValueError: if none fits; it says why for each.
    """
    require_exportable(model)
    reasons: list[str] = []
    for convert in (to_qwen3_next, to_step3p7, to_laguna):
        try:
            return convert(model)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(
        f"{type(model).__name__} fits no architecture that has a place for its gates; keep them with save_pretrained. "
        + " ".join(dict.fromkeys(reasons))
    )


def to_step3p7(model: PreTrainedModel) -> Step3p7ForConditionalGeneration:
    """Convert a causal language model built like Qwen3, with one sigmoid gate for each head, to Step-3.7.

    Windows stay. The 2 of `twosigmoid` and `tanh1` goes into `o_proj`. Step-3.7 takes images too: its vision tower is
    the smallest that can be built, untrained, and text does not come to it. For the same reason
    `AutoModelForImageTextToText` loads it from a folder, and `AutoModelForCausalLM` does not, which a warning says.

    Raises:
        ValueError: if the model or its gates are built in another way; or if the answers to a probe differ.
    """
    state, _ = _state(model, _STEP)
    options, config = common_options(model), cast("Any", model.config)
    kinds = _layer_types(config)
    rope = {kind: {**config.rope_parameters, "partial_rotary_factor": 1.0} for kind in dict.fromkeys(kinds)}
    text = {
        **options,
        "gating": True,
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * config.num_hidden_layers,
        "sliding_window": _window(config),
        "attention_bias": any(name.endswith("_proj.bias") for name in state),
        "rope_parameters": rope,
    }
    vision = {**_IDLE_VISION, "image_size": 28, "patch_size": 14}
    tied = {"tie_word_embeddings": options["tie_word_embeddings"]}
    exported = _build(_STEP, text_config=text, vision_config=vision, **tied)
    # Norms there scale by 1 + weight.
    renamed = {
        name.replace("model.", "model.language_model.", 1): (widen(tensor) - 1).to(tensor.dtype)
        if name.endswith(("norm.weight", "layernorm.weight"))
        else tensor
        for name, tensor in state.items()
    }
    own = {name: tensor for name, tensor in exported.state_dict().items() if name not in renamed and _of_images(name)}
    loaded = _loaded(model, exported, {**own, **renamed}, _STEP)
    warnings.warn(
        f"{type(model).__name__} is exported to {type(loaded).__name__}, which takes images too: load it from a folder "
        "by AutoModelForImageTextToText. AutoModelForCausalLM does not know it.",
        stacklevel=2,
    )
    return loaded


def to_laguna(model: PreTrainedModel) -> LagunaForCausalLM:
    """Convert a causal language model built like Qwen3, with softplus gates like `output:input:softplus`, to Laguna.

    Gates may have a number for each channel or one for each head. Windows stay.

    Raises:
        ValueError: if the model or its gates are built in another way; or if the answers to a probe differ.
    """
    state, width = _state(model, _LAGUNA)
    config: Any = model.config
    kinds = _layer_types(config)
    rope = {**config.rope_parameters, "partial_rotary_factor": 1.0}
    exported = _build(
        _LAGUNA,
        **common_options(model),
        gating="per-head" if width == 1 else "per-element",
        layer_types=kinds,
        mlp_layer_types=["dense"] * config.num_hidden_layers,
        sliding_window=_window(config),
        attention_bias=any(name.endswith("_proj.bias") for name in state),
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
    )
    return _loaded(model, exported, state, _LAGUNA)


def _build(target: _Architecture, **options: Any) -> Any:
    """Build a model of the architecture, or refuse it where the transformers that is installed lacks it."""
    if not hasattr(transformers, target.model_class):
        raise ValueError(f"transformers {transformers.__version__} has no {target.name}; install a newer one.")
    config = getattr(transformers, target.config_class)(**options)
    return getattr(transformers, target.model_class)(config)


def _of_images(name: str) -> bool:
    return not name.startswith(("model.language_model.", "lm_head."))


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _window(config: Any) -> int:
    """Return the length of the window; where no layer has one, the architectures still want a number."""
    return getattr(config, "sliding_window", None) or config.max_position_embeddings


def _loaded(model: PreTrainedModel, exported: Any, state: dict[str, Tensor], target: _Architecture) -> Any:
    """Fill the new model, and refuse it if its answers differ by more than rounding."""
    exported = exported.to(device=model.device, dtype=model.dtype)
    exported.set_attn_implementation(stock_implementation(implementation_in(model)))
    try:
        exported.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{type(model).__name__} is not built like Qwen3: {error}") from error
    require_equal_answers(model, exported, target.name)
    return exported.train(model.training)


@torch.no_grad()
def _state(model: PreTrainedModel, target: _Architecture) -> tuple[dict[str, Tensor], int]:
    """Return the model's weights with `g_proj` for the gates, and the numbers that a gate has for each head."""
    require_exportable(model)
    layers = {layer.layout.module: layer for layer in gated_layers(model)}
    written = {module: _written(layer, target) for module, layer in layers.items()}
    width = max(weight_HMW.shape[-1] for weight_HMW, _ in written.values())
    state = {name: tensor for name, tensor in model.state_dict().items() if f".{GATES_NAME}." not in name}
    for path, attention in model.named_modules():
        if not calls_interface(type(attention)):
            continue
        shape = next(iter(layers.values())).layout.shape
        constant = (torch.zeros(shape.num_heads, shape.d_model, 1, device=model.device), 1 / target.gate_at_zero)
        weight_HMW, scale = written.get(attention, constant)
        rows = weight_HMW.expand(-1, -1, width).transpose(1, 2).flatten(0, 1)
        state[f"{path}.g_proj.weight"] = rows.to(model.dtype)
        state[f"{path}.o_proj.weight"] = state[f"{path}.o_proj.weight"] * scale
    return state, width


def _written(layer: GatedLayer, target: _Architecture) -> tuple[Tensor, float]:
    """Write the gate as factor · the architecture's own: return its matrices (H, M, W) and the factor."""
    gate = require_output_gate(layer, target.name, target.activations)
    if gate.bias is not None:
        raise ValueError(f"{layer.layout.name} has a gate with a bias; that of {target.name} has none.")
    if gate.grain != "head" and not target.by_channel:
        raise ValueError(f"{layer.layout.name} has a gate for each channel; {target.name} has one for each head.")
    inner, outer = target.activations[gate.activation]
    weight_HMW, _ = written_gate(layer)
    return inner * weight_HMW, outer
