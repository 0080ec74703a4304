"""Convert our decoder to the interface of transformers and back, and without gates to Llama or Qwen3."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tidegate._validation import InputError
from tidegate.config import Rotary, TransformerConfig
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.hf.config import TidegateConfig
from tidegate.torch.hf.model import TidegateForCausalLM


def from_transformer_lm(model: TransformerLM) -> TidegateForCausalLM:
    """Return the same model for transformers: copies of the weights, equal logits, the same training mode."""
    config = TidegateConfig.from_transformer_config(model.config)
    with torch.device("meta"):
        converted = TidegateForCausalLM(config)
    state = {_OWN_HEAD if name == _HEAD else f"model.{name}": value for name, value in model.state_dict().items()}
    state.setdefault(_OWN_HEAD, state[_OWN_EMBEDDING])
    converted.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    converted.tie_weights()
    return converted.train(model.training)


def to_transformer_lm(model: TidegateForCausalLM) -> TransformerLM:
    """Return the same model without transformers: copies of the weights, equal logits, the same training mode.

    Raises:
        TypeError: The model is of another class, such as a wrapper.
    """
    if not isinstance(model, TidegateForCausalLM):
        raise TypeError(
            f"model must be a TidegateForCausalLM; got {type(model).__name__}. Convert what a wrapper wraps."
        )
    converted = TransformerLM(model.config.transformer_config(), device="meta")
    state = {
        _HEAD if name == _OWN_HEAD else name.removeprefix("model."): value.clone()
        for name, value in model.state_dict().items()
        if name != _OWN_HEAD or converted.head is not None
    }
    converted.load_state_dict(state, assign=True)
    return converted.train(model.training)


_HEAD, _OWN_HEAD, _OWN_EMBEDDING = "head.weight", "lm_head.weight", "model.embedding.weight"


def to_stock_model(model: TransformerLM) -> PreTrainedModel:
    """Return the same model as a Llama or Qwen3: copies of the weights, equal logits, the same training mode.

    `tidegate.torch.retrofit.add_gates` can then add gates.

    Raises:
        InputError: An option of the model has no counterpart in Llama and Qwen3.
    """
    config = model.config
    _require_stock(config)
    options: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.feedforward_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.shape.num_kv_heads,
        "head_dim": config.shape.head_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary.base},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": config.attention_dropout,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }
    stock = Qwen3ForCausalLM(Qwen3Config(**options)) if config.qk_norm else LlamaForCausalLM(LlamaConfig(**options))
    weight = model.embedding.weight
    stock = cast("Any", stock).to(device=weight.device, dtype=weight.dtype)
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        for own, theirs in _STOCK_NAMES.items():
            name = name.replace(own, theirs)
        state[name] = value
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    stock.load_state_dict(state)
    return stock.train(model.training)


def _require_stock(config: TransformerConfig) -> None:
    """Raise InputError for options that neither Llama nor Qwen3 has."""
    expected = {
        "gate": ("none", str(config.gate)),
        "feedforward": ("swiglu", config.feedforward),
        "norm": ("rms", config.norm),
        "positions": ("rotary", config.positions),
        "rotary": (Rotary(base=config.rotary.base), config.rotary),
        "window": (None, config.window),
        "metric": (None, config.metric),
        "temperature": (1.0, config.temperature),
        "bias": (False, config.bias),
        "dropout": (0.0, config.dropout),
    }
    for name, (wanted, found) in expected.items():
        if wanted != found:
            raise InputError(name, expected=repr(wanted), got=found, hint=_HINT)
    if isinstance(config.d_ff, tuple) and len(set(config.d_ff)) > 1:
        raise InputError("d_ff", expected="one width for all layers", got=config.d_ff, hint=_HINT)


_HINT = "transformers has no other decoder of this kind."
_STOCK_NAMES = {
    "stack.blocks": "model.layers",
    "stack.norm": "model.norm",
    "attention_norm": "input_layernorm",
    "feedforward_norm": "post_attention_layernorm",
    ".attention.": ".self_attn.",
    ".feedforward.": ".mlp.",
    "embedding.": "model.embed_tokens.",
    "head.": "lm_head.",
}
