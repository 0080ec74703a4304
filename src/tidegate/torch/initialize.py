"""The values that a model starts from."""

from __future__ import annotations

import copy
import hashlib
import math

import torch
from torch import nn

from tidegate.config import Init, embedding_std, init_std
from tidegate.torch.block import TransformerBlock
from tidegate.torch.gate import AttentionGate
from tidegate.torch.metric import HeadMetric


def initialize(model: nn.Module, *, init: Init, seed: int | None = None) -> None:
    """Start a model of transformer blocks anew.

    Matrices and embeddings start as `tidegate.config.init_std` and `embedding_std` say; biases are 0,
    and uniform like the matrix beside them with `torch`; gates, norms and metrics start as they say themselves.

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
        writes = module in writers
        if seed is None:
            _reset(module, init, num_layers=len(blocks), writes=writes)
            continue
        twin = copy.deepcopy(module).to(device="cpu", dtype=torch.float32)
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(_module_seed(seed, name))
            _reset(twin, init, num_layers=len(blocks), writes=writes)
        module.load_state_dict(twin.state_dict())


_RESET_HERE = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm, AttentionGate, HeadMetric)


def _reset(module: nn.Module, init: Init, *, num_layers: int, writes: bool) -> None:
    assert isinstance(module, _RESET_HERE)
    if not isinstance(module, nn.Linear | nn.Embedding):
        module.reset_parameters()
        return
    is_matrix = isinstance(module, nn.Linear)
    uniform = is_matrix and init == "torch"
    if is_matrix:
        std = init_std(init, fan_in=module.in_features, num_layers=num_layers, writes=writes)
    else:
        std = embedding_std(init)
    with torch.no_grad():
        weight = module.weight.t() if writes else module.weight
        weight.copy_(_rows_in_turn(weight, std, uniform=uniform))
        if is_matrix and module.bias is not None:
            module.bias.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std) if uniform else module.bias.zero_()


def _rows_in_turn(like: torch.Tensor, std: float, *, uniform: bool) -> torch.Tensor:
    """Random numbers, of which the first rows do not depend on how many follow."""
    rows, columns = like.shape
    # PyTorch draws sixteen at a time, and the last sixteen anew if the number is no multiple.
    padded = 16 * math.ceil(columns / 16)
    drawn = torch.empty(rows, padded, device=like.device, dtype=like.dtype)
    drawn = drawn.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std) if uniform else drawn.normal_(std=std)
    return drawn[:, :columns]


def _module_seed(seed: int, name: str) -> int:
    """A seed for one module, the same in every process; 32 bits are all that PyTorch's generator takes."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest())
