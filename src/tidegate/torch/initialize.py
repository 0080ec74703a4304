"""The values that a model starts from."""

from __future__ import annotations

import copy
import hashlib
import math

import torch
from torch import nn

from tidegate.torch.block import TransformerBlock
from tidegate.torch.gate import AttentionGate
from tidegate.torch.metric import HeadMetric


def initialize(model: nn.Module, *, seed: int | None = None) -> None:
    """Start a model of transformer blocks anew.

    Matrices and embeddings come from N(0, 0.02²), those that write to the residual stream of n blocks from
    N(0, 0.02² / 2n); biases are 0; gates, norms and metrics start as they say themselves.

    Without a seed all is drawn from PyTorch's global generators. With one, each module draws from a generator of its
    own, on the CPU and in float32, that depends on the seed and on the module's name alone: models of any device and
    dtype that are made with the same seed start with equal values in every module that they have in common, and
    feed-forward layers of different widths in the channels that they have in common.
    """
    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    writers = {writer for block in blocks for writer in (block.attention.o_proj, block.feedforward.down_proj)}
    for name, module in model.named_modules():
        if not isinstance(module, _RESET_HERE):
            continue
        std = _STD / math.sqrt(2 * len(blocks)) if module in writers else _STD
        if seed is None:
            _reset(module, std, writes=module in writers)
            continue
        twin = copy.deepcopy(module).to(device="cpu", dtype=torch.float32)
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(_module_seed(seed, name))
            _reset(twin, std, writes=module in writers)
        module.load_state_dict(twin.state_dict())


_STD = 0.02
_RESET_HERE = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm, AttentionGate, HeadMetric)


def _reset(module: nn.Module, std: float, *, writes: bool) -> None:
    assert isinstance(module, _RESET_HERE)
    if not isinstance(module, nn.Linear | nn.Embedding):
        module.reset_parameters()
        return
    with torch.no_grad():
        weight = module.weight
        weight.copy_(_rows_in_turn(weight.t(), std).t() if writes else _rows_in_turn(weight, std))
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _rows_in_turn(like: torch.Tensor, std: float) -> torch.Tensor:
    """Normal numbers, of which the first rows do not depend on how many follow."""
    rows, columns = like.shape
    # PyTorch draws sixteen at a time, and the last sixteen anew if the number is no multiple.
    padded = 16 * math.ceil(columns / 16)
    return torch.empty(rows, padded, device=like.device, dtype=like.dtype).normal_(std=std)[:, :columns]


def _module_seed(seed: int, name: str) -> int:
    """A seed for one module, the same in every process; 32 bits are all that PyTorch's generator takes."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest())
