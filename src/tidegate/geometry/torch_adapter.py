"""Forward-mode derivatives by PyTorch, on the plain attention kernel: the fused one has no forward mode."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # PyTorch has no public way to watch its allocations.

from tidegate.geometry.differentiation import Function, Numbers, refuse_dtype, refuse_step
from tidegate.torch import plain_kernel
from tidegate.torch.forward_mode import load_forward_mode

# The annotations of these transforms are partial.
_func: Any = torch.func


@dataclass(frozen=True)
class TorchDifferentiator:
    """Derivatives by `torch.func` in one dtype, on one device."""

    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor, name: str) -> tuple[TorchDifferentiator, Numbers]:
        """For a tensor, and the tensor's numbers in float64."""
        if x.dtype not in (torch.float32, torch.float64):
            refuse_dtype(name, x.dtype)
        load_forward_mode()
        return cls(x.dtype, x.device), _numbers(x.double())

    @property
    def single_precision(self) -> bool:
        """Whether the dtype is float32."""
        return self.dtype == torch.float32

    def values(self, f: Function, points: Numbers) -> Numbers:
        """The map itself: (P, n) to (P, N)."""
        flat = self._flat(f)

        def value(point: Any) -> Any:
            # Some views have a batching rule only below a derivative.
            return _func.jvp(flat, (point,), (torch.zeros_like(point),))[0]

        return self._run(_func.vmap(value), points)

    def first(self, f: Function, points: Numbers, directions: Numbers) -> Numbers:
        """Df along directions (P, k, n): (P, k, N)."""
        along = _derivative(self._flat(f))
        return self._run(_func.vmap(_func.vmap(along, in_dims=(None, 0))), points, directions)

    def second(self, f: Function, points: Numbers, left: Numbers, right: Numbers) -> tuple[Numbers, Numbers]:
        """Df along `left` and D²f along `left` and `right`, both (P, k, n): twice (P, k, N)."""
        along = _derivative(self._flat(f))

        def twice(point: Any, one: Any, other: Any) -> Any:
            return _func.jvp(partial(along, direction=one), (point,), (other,))

        return self._run(_func.vmap(_func.vmap(twice, in_dims=(None, 0, 0))), points, left, right)

    def metric_jet(self, f: Function, point: Numbers, whitening: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The metric g = (W J)ᵀ (W J) at one point with its derivatives: (n, n), (n, n, n) and (n, n, n, n)."""
        flat, whiten = self._flat(f), self.restore(whitening)

        def metric(at: Any) -> Any:
            jacobian = whiten @ _func.jacfwd(flat)(at)
            found = jacobian.T @ jacobian
            return found, found

        def slope(at: Any) -> Any:
            found, value = _func.jacfwd(metric, has_aux=True)(at)
            return found, (value, found)

        def jet(at: Any) -> Any:
            found, lower = _func.jacfwd(slope, has_aux=True)(at)
            return *lower, found

        return self._run(jet, point)

    def footprint(self, f: Function, point: Numbers) -> tuple[int, int]:
        """Most bytes of intermediates that are alive at once in one evaluation of f, and the number of outputs."""
        with _Allocations() as allocations:
            outputs = self._run(self._flat(f), point)
        return allocations.peak, len(outputs)

    def restore(self, numbers: Numbers) -> torch.Tensor:
        """NumPy numbers as a tensor of the caller's dtype and device."""
        return torch.tensor(numbers, dtype=self.dtype, device=self.device)

    def _run(self, function: Callable[..., Any], *arrays: Numbers) -> Any:
        with torch.no_grad(), plain_kernel(), _translate_errors():
            result = function(*map(self.restore, arrays))
        return tuple(map(_numbers, _tensors(result))) if isinstance(result, tuple) else _numbers(result)

    def _flat(self, f: Function) -> Function:
        def flat_function(point: torch.Tensor) -> torch.Tensor:
            result = f(point)
            if not isinstance(result, torch.Tensor):
                raise TypeError(
                    f"f must return one tensor; got {type(result).__name__}. Choose one, as in lambda x: f(x)[0]."
                )
            if result.dtype != self.dtype:
                raise TypeError(
                    f"f must return numbers of x's dtype, {self.dtype}; got {result.dtype}. Convert what is inside f, "
                    "as in model.double(), and return real numbers rather than indices."
                )
            return result.reshape(-1)

        return flat_function


def _derivative(flat: Function) -> Callable[..., Any]:
    def along(point: Any, direction: Any) -> Any:
        return _func.jvp(flat, (point,), (direction,))[1]

    return along


def _numbers(tensor: torch.Tensor) -> Numbers:
    return cast("Numbers", tensor.detach().numpy(force=True))


@contextmanager
def _translate_errors() -> Generator[None]:
    try:
        yield
    except NotImplementedError as error:
        refuse_step(error)
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in ("forward ad", "forward mode", "forward-mode", "jvp")):
            raise
        refuse_step(error)


class _Allocations(TorchDispatchMode):
    """Counts the bytes of new storages that are still referred to, and remembers the most there were."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.alive = self.peak = 0
        self._references: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(tensor) for tensor in _tensors(args)}
        for tensor in _tensors(result):
            # A view of something older, say of a weight, adds nothing.
            if _storage(tensor) in self._references or _storage(tensor) not in given:
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage, size = _storage(tensor), tensor.untyped_storage().nbytes()
        self.alive += 0 if storage in self._references else size
        self.peak = max(self.peak, self.alive)
        self._references[storage] += 1
        weakref.finalize(tensor, self._release, storage, size)

    def _release(self, storage: int, size: int) -> None:
        self._references[storage] -= 1
        if not self._references[storage]:
            del self._references[storage]
            self.alive -= size


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for branch in cast("Iterable[Any]", tree):
            yield from _tensors(branch)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
