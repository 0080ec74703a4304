"""Our decoder without gates as a model that transformers has itself: Llama, or Qwen3 with norms of queries and keys."""

from __future__ import annotations

from typing import Any, cast

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tidegate._validation import InputError
from tidegate.config import Rotary, TransformerConfig
from tidegate.torch.decoder import TransformerLM


def to_stock_model(model: TransformerLM) -> PreTrainedModel:
    """Return the same model without our code: copies of the weights, equal logits, the same training mode.

    Gates may then be added by `tidegate.torch.retrofit.add_gates`.

    Raises:
        InputError: An option of the model has no counterpart in Llama and Qwen3.
    """
    config = model.config
    require_stock(config)
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
    state = {_stock_name(name): value for name, value in model.state_dict().items()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    stock.load_state_dict(state)
    return stock.train(model.training)


def require_stock(config: TransformerConfig) -> None:
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


def _stock_name(name: str) -> str:
    """Return the name in transformers of one of our tensors."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, part, *rest = name.split(".")
    place = {"attention": "self_attn", "feedforward": "mlp", **_BLOCK_NORMS}[part]
    return ".".join(("model.layers", layer, place, *rest))


_HINT = "transformers has no other decoder of this kind."
_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "stack.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK_NORMS = {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"}
