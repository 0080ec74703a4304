"""PyTorch's own multi-head attention: where it returns its weights, and so makes no attention call; its added keys."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

_forward = nn.MultiheadAttention.forward
_signature = inspect.signature(_forward)


@torch.no_grad()
def attend_without_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Repeat a call of `nn.MultiheadAttention` that asked for weights as one that does not, for its attention call.

    Any other module, and a call that asked for none, is left alone. The result is dropped, no random number drawn.
    """
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward is not _forward:
        return
    call = _signature.bind(module, *args, **kwargs)
    call.apply_defaults()
    if not call.arguments["need_weights"]:
        return
    call.arguments["need_weights"] = False
    dropout, module.dropout = module.dropout, 0.0
    try:
        _forward(*call.args, **call.kwargs)
    finally:
        module.dropout = dropout


def num_added_keys(module: nn.Module) -> int:
    """How many keys `nn.MultiheadAttention` puts behind those that it is given: `add_bias_kv`, `add_zero_attn`."""
    if not isinstance(module, nn.MultiheadAttention):
        return 0
    return (module.bias_k is not None) + bool(module.add_zero_attn)
