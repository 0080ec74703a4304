"""Initialization of models."""

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
    """Initialize a model of transformer blocks.

    Matrices and embeddings follow `tidegate.config.init_std` and `embedding_std`; biases are 0, or with `torch` uniform
    like the module's matrix; gates, norms and metrics use their own `reset_parameters`.

    Without a seed, PyTorch's global generators are used. With a seed, each module has its own generator, on the CPU and
    in float32, that depends only on the seed and the module's name: models of any device and dtype with the same seed
    have equal values in every module that they have in common, and in the common channels of feed-forward layers of
    different widths.
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
            # The generator takes 32 bits; unlike `hash`, a digest is the same in every process.
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest))
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
        weight.copy_(_draw_rows(weight, std, uniform=uniform))
        if is_matrix and module.bias is not None:
            module.bias.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std) if uniform else module.bias.zero_()


def _draw_rows(like: torch.Tensor, std: float, *, uniform: bool) -> torch.Tensor:
    """Return random numbers whose first rows do not depend on the number of rows."""
    rows, columns = like.shape
    # PyTorch draws sixteen numbers at a time, and redraws the last sixteen unless the size is a multiple.
    padded = 16 * math.ceil(columns / 16)
    drawn = torch.empty(rows, padded, device=like.device, dtype=like.dtype)
    drawn = drawn.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std) if uniform else drawn.normal_(std=std)
    return drawn[:, :columns]
