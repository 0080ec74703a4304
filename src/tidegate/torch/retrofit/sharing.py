"""Projections that stand in a model more than once, so that what is done to one is done to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn


def places_of_module(model: nn.Module, module: nn.Module) -> list[str]:
    """The paths at which a module stands; a layer that runs several times is one place."""
    return list(_places(model, lambda child: child is module))


def places_of_weights(model: nn.Module, module: nn.Module) -> list[str]:
    """The paths of all modules with a parameter of this one, itself among them."""
    own = list(module.parameters(recurse=False))
    return list(
        _places(model, lambda child: any(_same(a, b) for a in child.parameters(recurse=False) for b in own)),
    )


def _places(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[str]:
    for path, owner in model.named_modules():
        for name, child in owner._modules.items():
            if child is not None and wanted(child):
                yield f"{path}.{name}" if path else name


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return ours is theirs or (ours.data_ptr() == theirs.data_ptr() != 0)
