"""Gated attention in PyTorch: the layer, models made of it, what can be seen in them, and gates for those of others.

What needs transformers is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING

from tidegate.config import AttentionConfig, Rotary, StackConfig, TransformerConfig, VisionConfig
from tidegate.torch.attention import AttentionTrace, GatedAttention
from tidegate.torch.block import TransformerBlock, TransformerStack
from tidegate.torch.cache import KVCache
from tidegate.torch.convert import (
    from_fused_query_gate,
    from_gpt_oss,
    from_stacked_qkv,
    gpt_oss_layer,
    to_fused_query_gate,
    to_gpt_oss,
)
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.gate import gate_parameters
from tidegate.torch.gate_groups import freeze_all_but_gates, gate_optimizer_groups
from tidegate.torch.kernel import plain_kernel
from tidegate.torch.observing import AttentionStatistics, Observation, Observer, attention_statistics, observe
from tidegate.torch.vit import VisionTransformer
from tidegate.torch.weights import load_model, save_model

if TYPE_CHECKING:
    from tidegate.torch.observing.trainer_callback import ObserverCallback
    from tidegate.torch.retrofit import (
        RetrofitReport,
        add_gates,
        export_gated,
        load_gates,
        load_pretrained,
        merge_gates,
        remove_gates,
        save_gates,
        save_pretrained,
        to_laguna,
        to_qwen3_next,
        to_qwen3_next_attention,
        to_step3p7,
    )

__all__ = [
    "AttentionConfig",
    "AttentionStatistics",
    "AttentionTrace",
    "GatedAttention",
    "KVCache",
    "Observation",
    "Observer",
    "ObserverCallback",
    "RetrofitReport",
    "Rotary",
    "StackConfig",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLM",
    "TransformerStack",
    "VisionConfig",
    "VisionTransformer",
    "add_gates",
    "attention_statistics",
    "export_gated",
    "freeze_all_but_gates",
    "from_fused_query_gate",
    "from_gpt_oss",
    "from_stacked_qkv",
    "gate_optimizer_groups",
    "gate_parameters",
    "gpt_oss_layer",
    "load_gates",
    "load_model",
    "load_pretrained",
    "merge_gates",
    "observe",
    "plain_kernel",
    "remove_gates",
    "save_gates",
    "save_model",
    "save_pretrained",
    "to_fused_query_gate",
    "to_gpt_oss",
    "to_laguna",
    "to_qwen3_next",
    "to_qwen3_next_attention",
    "to_step3p7",
]


def __getattr__(name: str) -> object:
    # Public names not imported above need transformers: import them now.
    if name == "ObserverCallback":
        return importlib.import_module("tidegate.torch.observing.trainer_callback").ObserverCallback
    if name in __all__:
        return getattr(importlib.import_module("tidegate.torch.retrofit"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
