"""Find models and modules inside the wrappers of adapters.

A wrapper has a model under `get_base_model()`, a layer under `base_layer`, or a module under `original_module` with
trained copies under `modules_to_save`.
"""

# `getattr` would also find the children of the wrapped module.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedModel

from tidegate.torch.gate import AttentionGates

_ADAPTED, _ORIGINAL, _COPIES = "base_layer", "original_module", "modules_to_save"
_Inside: TypeAlias = Callable[[nn.Module], nn.Module | None]
"""From a wrapper to the module inside it; None for other modules."""


def unwrap_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a wrapper with adapters, or the model itself."""
    get_base_model = None if isinstance(model, PreTrainedModel) else getattr(model, "get_base_model", None)
    inner = model if get_base_model is None else get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"model must be a PreTrainedModel of transformers, or adapters around one; got {type(inner).__name__}. "
            "Pass the model inside a wrapper, such as `module` of a parallel or `_orig_mod` of a compiled model."
        )
    return inner


def acting_module(module: nn.Module) -> nn.Module:
    """Return the module that runs here: the active copy of a wrapper with trained copies, or the original."""
    return _innermost(module, _acting_inside)


def base_module(module: nn.Module) -> nn.Module:
    """Return the module inside all adapters around it."""
    return _innermost(module, _base_inside)


def acting_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that runs, except those inside gates, by its path without wrappers of trained copies."""
    return _walk(model, "", _acting_inside)


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module except gates, by its path without adapters."""
    return ((path, each) for path, each in _walk(model, "", _base_inside) if not isinstance(each, AttentionGates))


def has_adapters(model: nn.Module) -> bool:
    """Return whether there is an adapter around a module inside the model."""
    return any(_base_inside(module) is not None for module in model.modules())


def _walk(module: nn.Module, path: str, inside: _Inside) -> Iterator[tuple[str, nn.Module]]:
    module = _innermost(module, inside)
    yield path, module
    if not isinstance(module, AttentionGates):
        for name, child in module.named_children():
            yield from _walk(child, f"{path}.{name}" if path else name, inside)


def _innermost(module: nn.Module, inside: _Inside) -> nn.Module:
    while (inner := inside(module)) is not None:
        module = inner
    return module


def _base_inside(module: nn.Module) -> nn.Module | None:
    inner = module._modules.get(_ADAPTED)
    return module._modules.get(_ORIGINAL) if inner is None else inner


def _acting_inside(module: nn.Module) -> nn.Module | None:
    original = module._modules.get(_ORIGINAL)
    copies: Any = module._modules.get(_COPIES)
    if original is None or copies is None:
        return original
    names = [] if getattr(module, "disable_adapters", False) else getattr(module, "active_adapters", [])
    active = [name for name in names if name in copies]
    return copies[active[0]] if active else original
