"""Which module of a model is at work: a stack of names, kept by hooks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["ModuleFollower", "block_of", "followed"]


class ModuleFollower(Protocol):
    """Who is told of a model's module calls."""

    def begin(self) -> None:
        """A module is called while no other is at work."""
        ...

    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A module's forward has returned; it is still on the stack."""
        ...


@contextmanager
def followed(model: nn.Module, follower: ModuleFollower) -> Generator[list[str]]:
    """The names of the model's modules whose forward runs now, outermost first, as long as this is entered.

    Names are paths within the model, whose own is empty; a module that is in it twice has its first. A module whose
    forward raises is not left, but taken off the stack.
    """
    stack: list[str] = []
    handles = [handle for name, module in model.named_modules() for handle in _hooks(stack, name, module, follower)]
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def _hooks(stack: list[str], name: str, module: nn.Module, follower: ModuleFollower) -> tuple[RemovableHandle, ...]:
    def enter(_module: nn.Module, _args: Any) -> None:
        if not stack:
            follower.begin()
        stack.append(name)

    def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        follower.leave(name, module, args, kwargs, result)

    def drop(_module: nn.Module, _args: Any, _result: Any) -> None:
        # A hook before ours may have raised, so that the module never came onto the stack.
        if stack[-1:] == [name]:
            stack.pop()

    return (
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, with_kwargs=True),
        # Called also if the forward, or the hook before, raises.
        module.register_forward_hook(drop, always_call=True),
    )


def block_of(model: nn.Module, name: str) -> str | None:
    """The block that holds a layer: of the modules around it, the innermost that stands in an `nn.ModuleList`.

    Where there is no such list an `nn.Sequential` serves; None if there is neither. The layer itself does not count: a
    list of attention heads is no list of blocks.
    """
    parts = name.split(".")
    for kind in (nn.ModuleList, nn.Sequential):
        for length in range(len(parts) - 1, 0, -1):
            if isinstance(model.get_submodule(".".join(parts[: length - 1])), kind):
                return ".".join(parts[:length])
    return None
