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
from torch import nn
from torch.utils.hooks import RemovableHandle

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
    """Who is told of a model's module calls."""

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
    names = _argument_names(type(call.module).forward)
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    if isinstance(call.module, nn.MultiheadAttention):
        return given.get("key") is not given.get("query")
    return any(name in names and given.get(name) is not None for name in _OTHER)


def require_names(crossing: Sequence[str]) -> None:
    """Refuse what is no sequence of names of layers."""
    if isinstance(crossing, str) or not all(isinstance(name, str) and name for name in crossing):
        raise TypeError(
            f"crossing must be a tuple of names of layers, or of their endings; got {crossing!r}. "
            'Write ("encoder_attn",) for a single one.'
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


def num_added_keys(module: nn.Module) -> int:
    """How many keys `nn.MultiheadAttention` puts behind those that it is given: `add_bias_kv`, `add_zero_attn`."""
    if not isinstance(module, nn.MultiheadAttention):
        return 0
    return (module.bias_k is not None) + bool(module.add_zero_attn)
