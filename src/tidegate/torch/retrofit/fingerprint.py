"""A hash by which gates know the model that they were trained in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidegate.torch.retrofit.wrappers import base_modules

_CIRCUMSTANCE = (
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
)
"""What a configuration says about where a model comes from or how it is called, and not about what it computes.

Trainers write the special tokens of a tokenizer there.
"""


def base_fingerprint(model: PreTrainedModel) -> str:
    """A hash of the model's class, configuration, weights and persistent buffers, gates and adapters left out.

    It depends on the dtype: the same weights rounded are other weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(type(model).__name__.encode())
    digest.update(json.dumps(_substance(model.config.to_dict()), sort_keys=True, default=str).encode())
    for name, tensor in _base_tensors(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_content(tensor))
    return digest.hexdigest()


def _substance(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without its circumstances, and so the configurations inside it."""
    return {
        name: _substance(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _CIRCUMSTANCE
    }


def _base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in base_modules(model):
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", tensor


def _content(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
