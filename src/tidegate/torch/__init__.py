"""Gated attention in PyTorch: the layer, models made of it, and statistics of attention.

`tidegate.torch.convert` converts checkpoints, `tidegate.torch.retrofit` adds gates to loaded Hugging Face models.
"""

import importlib
from typing import TYPE_CHECKING

from tidegate.config import AttentionConfig, Rotary, StackConfig, TransformerConfig, VisionConfig
from tidegate.torch.attention import AttentionTrace, GatedAttention
from tidegate.torch.block import TransformerBlock, TransformerStack
from tidegate.torch.cache import KVCache
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.gate import gate_parameters
from tidegate.torch.gate_groups import freeze_all_but_gates, gate_optimizer_groups
from tidegate.torch.kernel import plain_kernel
from tidegate.torch.observing import AttentionStatistics, Observation, Observer, attention_statistics, observe
from tidegate.torch.vit import VisionTransformer
from tidegate.torch.weights import load_model, save_model

if TYPE_CHECKING:
    from tidegate.torch.observing.trainer_callback import ObserverCallback

__all__ = [
    "AttentionConfig",
    "AttentionStatistics",
    "AttentionTrace",
    "GatedAttention",
    "KVCache",
    "Observation",
    "Observer",
    "ObserverCallback",
    "Rotary",
    "StackConfig",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLM",
    "TransformerStack",
    "VisionConfig",
    "VisionTransformer",
    "attention_statistics",
    "freeze_all_but_gates",
    "gate_optimizer_groups",
    "gate_parameters",
    "load_model",
    "observe",
    "plain_kernel",
    "save_model",
]


def __getattr__(name: str) -> object:
    # It needs transformers: import it at its first use.
    if name == "ObserverCallback":
        return importlib.import_module("tidegate.torch.observing.trainer_callback").ObserverCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
