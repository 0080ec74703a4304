"""The decoder language model in transformers: `from_pretrained`, `generate`, `Trainer`.

Importing this module registers the model, so that `AutoModelForCausalLM` loads its checkpoints without remote code.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tidegate.torch.hf.config import TidegateConfig
from tidegate.torch.hf.convert import from_transformer_lm, to_stock_model, to_transformer_lm
from tidegate.torch.hf.model import TidegateForCausalLM, TidegateModel, TidegatePreTrainedModel

__all__ = [
    "TidegateConfig",
    "TidegateForCausalLM",
    "TidegateModel",
    "TidegatePreTrainedModel",
    "from_transformer_lm",
    "to_stock_model",
    "to_transformer_lm",
]

AutoConfig.register(TidegateConfig.model_type, TidegateConfig, exist_ok=True)
AutoModel.register(TidegateConfig, TidegateModel, exist_ok=True)
AutoModelForCausalLM.register(TidegateConfig, TidegateForCausalLM, exist_ok=True)
