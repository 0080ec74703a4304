"""Gated attention in PyTorch: the layer, models made of it, and what can be seen in them."""

from tidegate.config import StackConfig, TransformerConfig, VisionConfig
from tidegate.tensors.rotary import Rotary
from tidegate.torch.attention import AttentionTrace, GatedAttention
from tidegate.torch.block import TransformerBlock, TransformerStack
from tidegate.torch.cache import KVCache
from tidegate.torch.convert import from_fused_query_gate, from_stacked_qkv, to_fused_query_gate
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.gate import gate_parameters
from tidegate.torch.kernel import plain_kernel
from tidegate.torch.named import BilinearlyModulatedAttention, MultiHeadAttention, PostGatedAttention
from tidegate.torch.statistics import AttentionStatistics, attention_statistics
from tidegate.torch.vit import VisionTransformer
from tidegate.torch.weights import load_model, save_model

__all__ = [
    "AttentionStatistics",
    "AttentionTrace",
    "BilinearlyModulatedAttention",
    "GatedAttention",
    "KVCache",
    "MultiHeadAttention",
    "PostGatedAttention",
    "Rotary",
    "StackConfig",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLM",
    "TransformerStack",
    "VisionConfig",
    "VisionTransformer",
    "attention_statistics",
    "from_fused_query_gate",
    "from_stacked_qkv",
    "gate_parameters",
    "load_model",
    "plain_kernel",
    "save_model",
    "to_fused_query_gate",
]
