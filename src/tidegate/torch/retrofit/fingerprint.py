"""A hash by which gates know the model that they were trained in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidegate.torch.gate import AttentionGates

__all__ = ["base_fingerprint"]

_ADAPTED = "base_layer"
"""The child under which adapters keep the layer that they stand around."""

_CIRCUMSTANCE = (
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict"),
)
"""What a configuration says about where a model comes from or how it is called, and not about what it computes."""


def base_fingerprint(model: PreTrainedModel) -> str:
    """A hash of the model's class, configuration, weights and persistent buffers, gates and adapters left out.

    It depends on the dtype: the same weights rounded are other weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(type(model).__name__.encode())
    config = {name: value for name, value in model.config.to_dict().items() if name not in _CIRCUMSTANCE}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in _base_tensors(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_content(tensor))
    return digest.hexdigest()


def _base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in _base_modules(model, ""):
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", tensor


def _base_modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module by its path, as if no adapter stood around any."""
    if isinstance(module, AttentionGates):
        return
    adapted = module._modules.get(_ADAPTED)
    if adapted is not None:
        yield from _base_modules(adapted, path)
        return
    yield path, module
    for name, child in module.named_children():
        yield from _base_modules(child, f"{path}.{name}")


def _content(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
