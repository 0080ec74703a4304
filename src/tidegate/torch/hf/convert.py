"""Convert our decoder language model to the interface of transformers and back."""

from __future__ import annotations

import torch

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
