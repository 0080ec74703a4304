"""Gated attention in PyTorch."""

from tidegate.torch.attention import AttentionTrace, GatedAttention
from tidegate.torch.cache import KVCache
from tidegate.torch.gate import gate_parameters
from tidegate.torch.kernel import plain_kernel

__all__ = ["AttentionTrace", "GatedAttention", "KVCache", "gate_parameters", "plain_kernel"]
