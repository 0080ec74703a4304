"""Follow the running modules of a model: their arguments, blocks, padding masks, and cross-attention."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tidegate.torch.observing.statistics import AttentionCall

_SOURCES = ("key_value_states", "encoder_hidden_states", "context")
"""Arguments for the other sequence, in attention modules of this library and of transformers."""

_forward = nn.MultiheadAttention.forward
_signature = inspect.signature(_forward)


class ModuleCall(NamedTuple):
    """A running forward of a module, and its arguments."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def given(self) -> dict[str, Any]:
        """Return all arguments by the names in the module's `forward`."""
        return dict(zip(_argument_names(type(self.module).forward), self.args, strict=False)) | self.kwargs


class ModuleFollower(Protocol):
    """Receives the module calls of a model."""

    def begin(self) -> None:
        """Handle the call of an outermost module."""

    def leave(self, call: ModuleCall, result: Any) -> None:
        """Handle the return of a module, which is still on the stack."""

    def end(self) -> None:
        """Handle the end of the outermost module, by return or by an error."""


@contextmanager
def follow_modules(model: nn.Module, follower: ModuleFollower) -> Generator[list[ModuleCall]]:
    """Yield the stack of the model's modules whose forward is running, outermost first.

    Names are paths within the model, empty for the model itself; a module that occurs twice has its first path. A
    module whose forward raises is removed from the stack without `leave`. Other threads and copies of the model are
    ignored.
    """
    stack: list[ModuleCall] = []

    def hooks(name: str, module: nn.Module) -> tuple[RemovableHandle, ...]:
        def push(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not stack:
                follower.begin()
            stack.append(ModuleCall(name, module, args, kwargs))

        def report(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            follower.leave(ModuleCall(name, module, args, kwargs), result)

        def pop(_module: nn.Module, _args: Any, _result: Any) -> None:
            # If a hook before ours raised, the module was never pushed.
            if stack and stack[-1].name == name:
                stack.pop()
                if not stack:
                    follower.end()

        return (
            module.register_forward_pre_hook(_Hook(push), with_kwargs=True),
            module.register_forward_hook(_Hook(report), with_kwargs=True),
            # Also called if the forward or an earlier hook raises.
            module.register_forward_hook(_Hook(pop), always_call=True),
        )

    handles = [handle for name, module in model.named_modules() for handle in hooks(name, module)]
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


class _Hook:
    """A hook that runs only in the thread that made it; copies of it, as in a copied model, have no effect."""

    def __init__(self, act: Callable[..., None] | None) -> None:
        self._act = act
        self._thread = threading.get_ident()

    def __call__(self, *arguments: Any) -> None:
        if self._act is not None and threading.get_ident() == self._thread:
            self._act(*arguments)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None]]:
        return _Hook, (None,)


def block_of(model: nn.Module, name: str) -> str | None:
    """Return the block that contains a layer: the innermost module around it that is an item of an `nn.ModuleList`.

    Without such a list, use an `nn.Sequential`; return None if there is neither. The layer itself does not count: a
    list of attention heads is not a list of blocks.
    """
    for kind in (nn.ModuleList, nn.Sequential):
        block = name.rpartition(".")[0]
        while block:
            around = block.rpartition(".")[0]
            if isinstance(model.get_submodule(around), kind):
                return block
            block = around
    return None


def is_cross_attention(call: ModuleCall) -> bool:
    """Return whether a module is called with another sequence to attend to.

    For `nn.MultiheadAttention`, this is a key that is not the same tensor as the query; for any other module, an
    argument `key_value_states`, `encoder_hidden_states` or `context` of its `forward`.
    """
    given = call.given()
    if isinstance(call.module, nn.MultiheadAttention):
        return given.get("key") is not given.get("query")
    names = _argument_names(type(call.module).forward)
    return any(name in names and given.get(name) is not None for name in _SOURCES)


@lru_cache(maxsize=1024)
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


@torch.no_grad()
def attend_without_weights(call: ModuleCall) -> None:
    """Repeat a call of `nn.MultiheadAttention` that returned weights so that it makes an attention call.

    Do nothing for other modules and calls. The result is discarded, and no random number is drawn.
    """
    module = call.module
    if not is_torch_multihead(module):
        return
    bound = _signature.bind(module, *call.args, **call.kwargs)
    bound.apply_defaults()
    if not bound.arguments["need_weights"]:
        return
    bound.arguments["need_weights"] = False
    dropout, module.dropout = module.dropout, 0.0
    try:
        _forward(*bound.args, **bound.kwargs)
    finally:
        module.dropout = dropout


def is_torch_multihead(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether this is PyTorch's `nn.MultiheadAttention`, which projects its own output, without a gate."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is _forward


def num_added_keys(call: ModuleCall, num_keys: int) -> int:
    """Return the number of keys that the module appends to those of the sequence.

    `nn.MultiheadAttention` does so for `add_bias_kv` and `add_zero_attn`. In any other module they are the keys beyond
    the last column of its mask, such as summaries of the sequence.
    """
    module = call.module
    if isinstance(module, nn.MultiheadAttention):
        return (module.bias_k is not None) + bool(module.add_zero_attn)
    mask = call.given().get("attention_mask")
    num_masked = mask.shape[-1] if isinstance(mask, Tensor) and mask.ndim == 4 else num_keys
    return num_keys - num_masked if 1 < num_masked < num_keys else 0


def given_padding(stack: Sequence[ModuleCall]) -> tuple[Tensor | None, bool]:
    """Return the real tokens, (B, P) bool, by the innermost `attention_mask`, and whether that mask is passed on.

    A padding mask has two axes and contains bool, integers from 0, or 0.0 and 1.0; any other is added to scores. It is
    passed on if all further modules on the stack have an argument whose name ends with `mask` or `bias`. If not, it may
    belong to another sequence, such as the text beside an image, or the argument may have another name: then it applies
    only if the attention call hides its padding. In cross-attention, the mask belongs to the keys, not to the queries.
    """
    if any(map(is_cross_attention, stack)):
        return None, False
    passed_on = True
    for call in reversed(stack):
        mask = call.given().get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and _marks_padding(mask):
            return mask.detach().bool(), passed_on
        names = (*_argument_names(type(call.module).forward), *call.kwargs)
        passed_on = passed_on and any(name.endswith(("mask", "bias")) for name in names)
    return None, False


def _marks_padding(mask: Tensor) -> bool:
    return bool(((mask == 0) | (mask == 1)).all() if mask.is_floating_point() else (mask >= 0).all())


def with_rows_of(module: ModuleCall, call: AttentionCall) -> AttentionCall | None:
    """Return the call with the module's rows as its batch; None unless its queries are all of the module's tokens.

    The first tensor argument of a module is its tokens: (B, T, M), or (T, B, M), or heads (B, H, T, D). There are at
    least as many keys as queries, except in cross-attention. This excludes attention to landmarks and the parts of
    blockwise attention.
    """
    tokens = next((x for x in (*module.args, *module.kwargs.values()) if isinstance(x, Tensor)), None)
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if tokens is None or tokens.ndim not in (3, 4) or (num_keys < num_queries and not is_cross_attention(module)):
        return None
    rows, length = tokens.shape[0], tokens.shape[-2]
    if length != num_queries:
        rows, length = tokens.shape[1], tokens.shape[0]
    if length == num_queries and call.query.shape[0] == rows:
        return call
    # Heads may be in the batch axis.
    if length != num_queries or call.query.shape[0] % rows or call.query.shape[1] > 1:
        return None
    tensors = {name: getattr(call, name) for name in ("query", "key", "value", "mask", "output")}
    return call._replace(**{name: x.reshape(rows, -1, *x.shape[2:]) for name, x in tensors.items()})
