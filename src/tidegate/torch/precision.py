"""Where half precision is not enough: float32 or better."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tidegate._validation import require_array

_WIDE = (torch.float32, torch.float64)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself if it is float32 or better, else float32."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """The same numbers in float32 or better."""
    return x if x.dtype in _WIDE else x.to(wide_dtype(x.dtype))


def is_under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; not every device has it: the meta device has none."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Keep autocast off on the tensor's device, if it has it."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def like_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast, if it is on, hands them to an attention call; it does not know the kernels by name."""
    if not is_under_autocast(tensors[0]) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(tensors[0].device.type)) for x in tensors)


def require_dtype(dtype: torch.dtype, **inputs: Tensor | None) -> None:
    """Refuse inputs that are no tensors of this dtype, that of the weights: for a layer that has failed on them."""
    for name, given in inputs.items():
        if given is None:
            continue
        require_tensor(name, given)
        if given.dtype != dtype:
            raise TypeError(
                f"{name} must be {dtype}, like the weights; got {given.dtype}. Convert it with {name}.to({dtype}), or "
                f"the module with .to({given.dtype if given.is_floating_point() else torch.float32})."
            )


def require_tensor(name: str, given: object) -> None:
    """Refuse what is no tensor, such as an array of NumPy or a list."""
    require_array(name, given, fits=isinstance(given, Tensor), kind="a tensor", remedy="torch.as_tensor")
