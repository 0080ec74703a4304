"""The layers that Tidegate's are compared with, each as a function of its input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tidegate.config import TransformerConfig
from tidegate.gate import PRESETS
from tidegate.tensors.rotary import Rotary
from tidegate.torch import GatedAttention

D_MODEL, NUM_HEADS, HEAD_DIM = 512, 8, 64
OURS = ("none", *PRESETS)
RECOMPUTING = ("bma", "bma-query")


class ScoreMatrixAttention(nn.Module):
    """Source-indexed BMA with an explicit score matrix: `softmax(mask(Q Kᵀ)) (G ⊙ V)`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.W_g = nn.Parameter(0.02 * torch.randn(NUM_HEADS, HEAD_DIM, HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, NUM_HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)
        heads = weights @ ((q @ self.W_g).sigmoid() * v)
        return self.out(heads.transpose(1, 2).flatten(-2))


class TorchAttention(nn.Module):
    """`torch.nn.MultiheadAttention`, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D_MODEL, NUM_HEADS, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.inner(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class XTransformersAttention(nn.Module):
    """x-transformers' attention with its gate on the aggregated values, on the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        from x_transformers.x_transformers import Attention

        self.inner = Attention(D_MODEL, heads=NUM_HEADS, dim_head=HEAD_DIM, causal=True, flash=True, gate_values=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out[0] if isinstance(out, tuple) else out


class Qwen3NextAttention(nn.Module):
    """transformers' Qwen3-Next attention: query/key norm, partial rotary embedding and a gate on the output."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.qwen3_next import modeling_qwen3_next as source
        from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

        config = Qwen3NextConfig(
            hidden_size=D_MODEL, num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_HEADS, head_dim=HEAD_DIM
        )
        config._attn_implementation = "sdpa"
        self.inner = source.Qwen3NextAttention(config, layer_idx=0)
        self.rotary = source.Qwen3NextRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return self.inner(x, position_embeddings=self.rotary(x, positions), attention_mask=None)[0]


def llama(config: TransformerConfig) -> nn.Module:
    """Return transformers' Llama with our sizes: rotary positions, root-mean-square norms, swiglu, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.feedforward_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def contenders() -> dict[str, Callable[[], nn.Module]]:
    """Return a builder for each layer by name."""

    def ours(gate: str, *, recompute: bool = False) -> Callable[[], nn.Module]:
        return lambda: GatedAttention(D_MODEL, NUM_HEADS, gate=gate, recompute_gate=recompute)

    return {
        **{name: ours(name) for name in OURS},
        **{f"{name} recomputed": ours(name, recompute=True) for name in RECOMPUTING},
        # For comparison with the Qwen3-Next layer, which has the same parts.
        "g1, norm and rotary": lambda: GatedAttention(
            D_MODEL, NUM_HEADS, gate="g1", qk_norm=True, rope=Rotary(fraction=0.25)
        ),
        "score matrix": ScoreMatrixAttention,
        "nn.MultiheadAttention": TorchAttention,
        "x-transformers gated": XTransformersAttention,
        "Qwen3-Next": Qwen3NextAttention,
        "matmul alone": lambda: nn.Linear(D_MODEL, D_MODEL, bias=False),
    }
