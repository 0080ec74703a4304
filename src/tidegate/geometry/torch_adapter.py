"""Forward-mode derivatives by PyTorch, on the plain attention kernel: the fused one has no forward mode."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # PyTorch has no public way to observe its operations.

from tidegate.geometry.differentiation import Differentiator, Function, Numbers, raise_for_dtype, raise_for_step
from tidegate.torch import plain_kernel
from tidegate.torch.kernel import load_forward_mode


def torch_differentiator(x: torch.Tensor, name: str) -> tuple[Differentiator, Numbers]:
    """Return derivatives for a tensor, and the tensor's numbers in float64."""
    if x.dtype not in (torch.float32, torch.float64):
        raise_for_dtype(name, x.dtype)
    load_forward_mode()
    restore = partial(torch.tensor, dtype=x.dtype, device=x.device)

    def measure(flat: Function, point: Numbers) -> tuple[int, int]:
        with _Allocations() as allocations:
            outputs = _run(flat, restore(point))
        return allocations.num_bytes, len(outputs)

    by = Differentiator(
        transforms=torch.func, array_type=torch.Tensor, dtype=x.dtype, restore=restore, run=_run, measure=measure
    )
    return by, _numbers(x.double())


def _run(function: Callable[..., Any], *arrays: torch.Tensor) -> Any:
    with torch.no_grad(), plain_kernel(), _translate_errors():
        result = function(*arrays)
    return tuple(map(_numbers, _tensors(result))) if isinstance(result, tuple) else _numbers(result)


def _numbers(tensor: torch.Tensor) -> Numbers:
    return cast("Numbers", tensor.detach().numpy(force=True))


@contextmanager
def _translate_errors() -> Generator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise_for_step(error)
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in ("forward ad", "forward mode", "forward-mode", "jvp")):
            raise
        raise_for_step(error)


class _Allocations(TorchDispatchMode):
    """Counts the bytes of all results of operations, except views of their arguments."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
        storages = (tensor.untyped_storage() for tensor in _tensors(result))
        self.num_bytes += sum(storage.nbytes() for storage in storages if storage.data_ptr() not in given)
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for branch in cast("Iterable[Any]", tree):
            yield from _tensors(branch)
