"""Which module of a model is at work, which block holds it, and whether it attends to another sequence.

PyTorch's own multi-head attention is treated apart: where it returns its weights it makes no attention call.
"""

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

from tidegate._text import list_some
from tidegate.torch.observing.calls import AttentionCall

_OTHER = ("key_value_states", "encoder_hidden_states", "context")
"""What attention modules call the other sequence: those of transformers, and ours."""

_forward = nn.MultiheadAttention.forward
_signature = inspect.signature(_forward)


class ModuleCall(NamedTuple):
    """A module's forward that runs now, and what it was given."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ModuleFollower(Protocol):
    """Who follows a model's module calls."""

    def begin(self) -> None:
        """A module is called while no other is at work."""
        ...

    def leave(self, call: ModuleCall, result: Any) -> None:
        """A module's forward has returned; it is still on the stack."""
        ...

    def end(self) -> None:
        """No module is at work any more: the outermost has been left, or has raised."""
        ...


@contextmanager
def follow_modules(model: nn.Module, follower: ModuleFollower) -> Generator[list[ModuleCall]]:
    """Yield the stack of the model's modules whose forward runs now, outermost first.

    Names are paths within the model, whose own is empty; a module that is in it twice has its first. A module whose
    forward raises is not left, but taken off the stack. What other threads call is no part of it, nor what a copy of
    the model does that was made meanwhile.
    """
    stack: list[ModuleCall] = []
    handles = [handle for name, module in model.named_modules() for handle in _hooks(stack, name, module, follower)]
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def _hooks(
    stack: list[ModuleCall], name: str, module: nn.Module, follower: ModuleFollower
) -> tuple[RemovableHandle, ...]:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not stack:
            follower.begin()
        stack.append(ModuleCall(name, module, args, kwargs))

    def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        follower.leave(ModuleCall(name, module, args, kwargs), result)

    def drop(_module: nn.Module, _args: Any, _result: Any) -> None:
        # A hook before ours may have raised, so that the module never came onto the stack.
        if stack and stack[-1].name == name:
            stack.pop()
            if not stack:
                follower.end()

    return (
        module.register_forward_pre_hook(_Hook(enter), with_kwargs=True),
        module.register_forward_hook(_Hook(leave), with_kwargs=True),
        # Called also if the forward, or the hook before, raises.
        module.register_forward_hook(_Hook(drop), always_call=True),
    )


class _Hook:
    """A hook that runs only in the thread that made it, and does nothing in a copy of its module."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act
        self._thread = threading.get_ident()

    def __call__(self, *arguments: Any) -> None:
        if threading.get_ident() == self._thread:
            self._act(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """What a deep copy and a pickle of it are."""
        return _idle_hook, ()


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_arguments: Any) -> None: ...


def block_of(model: nn.Module, name: str) -> str | None:
    """Return the block that holds a layer: of the modules around it, the innermost that stands in an `nn.ModuleList`.

    Where there is no such list an `nn.Sequential` serves; None if there is neither. The layer itself does not count: a
    list of attention heads is no list of blocks.
    """
    parts = name.split(".")
    for kind in (nn.ModuleList, nn.Sequential):
        for length in range(len(parts) - 1, 0, -1):
            if isinstance(model.get_submodule(".".join(parts[: length - 1])), kind):
                return ".".join(parts[:length])
    return None


def attends_across(call: ModuleCall) -> bool:
    """Whether the call of a module names another sequence to attend to.

    `nn.MultiheadAttention` does if its key is not the very tensor that its query is. Any other module does if its
    `forward` has an argument `key_value_states`, `encoder_hidden_states` or `context`, and it is given.
    """
    given = _given(call)
    if isinstance(call.module, nn.MultiheadAttention):
        return given.get("key") is not given.get("query")
    names = _argument_names(type(call.module).forward)
    return any(name in names and given.get(name) is not None for name in _OTHER)


def _given(call: ModuleCall) -> dict[str, Any]:
    """What a module was given, by the names of its `forward`."""
    return dict(zip(_argument_names(type(call.module).forward), call.args, strict=False)) | call.kwargs


def require_names(crossing: Sequence[str], model: nn.Module) -> None:
    """Refuse what is no sequence of names of the model's modules, or of their endings."""
    if not isinstance(crossing, tuple | list) or not all(isinstance(name, str) and name for name in crossing):
        raise TypeError(
            f"crossing must be a tuple of names of layers, or of their endings; got {crossing!r}. "
            'Write ("encoder_attn",) for a single one.'
        )
    names = [name for name, _ in model.named_modules()]
    if strays := [ending for ending in crossing if not any(name.endswith(ending) for name in names)]:
        raise ValueError(
            f"crossing names {list_some([repr(stray) for stray in strays])}, and no module of "
            f"{type(model).__name__} has a name that ends so. Take names from model.named_modules()."
        )


@lru_cache(maxsize=1024)
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


@torch.no_grad()
def attend_without_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Repeat a call of `nn.MultiheadAttention` that asked for weights as one that does not, for its attention call.

    Any other module, and a call that asked for none, is left alone. The result is dropped, no random number drawn.
    """
    if not projects_itself(module):
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


def projects_itself(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether the module is `nn.MultiheadAttention`, which applies its own output projection without a gate."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is _forward


def num_added_keys(call: ModuleCall, num_keys: int) -> int:
    """How many keys stand behind those of the sequence, which the module adds.

    `nn.MultiheadAttention` adds some by `add_bias_kv` and `add_zero_attn`. Any other module adds what its keys have
    more than the mask that it is given, such as summaries of the sequence.
    """
    module = call.module
    if isinstance(module, nn.MultiheadAttention):
        return (module.bias_k is not None) + bool(module.add_zero_attn)
    mask = _given(call).get("attention_mask")
    num_masked = mask.shape[-1] if isinstance(mask, Tensor) and mask.ndim == 4 else num_keys
    return num_keys - num_masked if 1 < num_masked < num_keys else 0


def given_padding(stack: Sequence[ModuleCall]) -> Tensor | None:
    """(B, P) bool: which tokens are no padding, by the innermost `attention_mask` with two axes; None if there is none.

    A mask is of ones and zeros: bool, whole numbers from 0, or 0.0 and 1.0; others are added to scores. It speaks of
    modules that it can be passed down to: all further ones on the stack have an argument for a mask. So the padding of
    a text is not that of an image beside it. Of a decoder that attends to an encoder it says nothing: there it is the
    encoder's.
    """
    if any(map(attends_across, stack)):
        return None
    for call in reversed(stack):
        mask = _given(call).get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and _says_padding(mask):
            return mask.detach().bool()
        if not _takes_mask(call):
            return None
    return None


def _says_padding(mask: Tensor) -> bool:
    if mask.dtype == torch.bool:
        return True
    return bool(((mask == 0) | (mask == 1)).all() if mask.is_floating_point() else (mask >= 0).all())


def _takes_mask(call: ModuleCall) -> bool:
    names = (*_argument_names(type(call.module).forward), *call.kwargs)
    return any(name.endswith(("mask", "bias")) for name in names)


def first_tensor(call: ModuleCall) -> Tensor | None:
    """The first tensor that a module was given: its tokens."""
    return next((x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)), None)


def with_rows_of(module: ModuleCall, call: AttentionCall) -> AttentionCall | None:
    """The call with the module's rows as its batch; None if it is not certain that its queries are all of its tokens.

    A module is given its tokens as its first tensor: (B, T, M), or with B and T changed about, or as heads
    (B, H, T, D). There are at least as many keys as queries unless the module attends to another sequence. So parts of
    attention that is computed in blocks, and attention to landmarks, are no calls.
    """
    tokens = first_tensor(module)
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if tokens is None or tokens.ndim not in (3, 4) or (num_keys < num_queries and not attends_across(module)):
        return None
    rows, length = tokens.shape[0], tokens.shape[-2]
    if length != num_queries:
        rows, length = tokens.shape[1], tokens.shape[0]
    if length != num_queries or call.query.shape[0] % rows:
        return None
    if call.query.shape[0] == rows:
        return call
    if call.query.shape[1] > 1:
        return None

    def split(x: Tensor) -> Tensor:
        return x.reshape(rows, -1, *x.shape[2:])

    assert call.mask is not None
    assert call.output is not None
    return call._replace(
        query=split(call.query),
        key=split(call.key),
        value=split(call.value),
        mask=split(call.mask),
        output=split(call.output),
    )
