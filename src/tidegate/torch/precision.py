"""Precision: dtypes of at least float32, autocast, and the dtypes of inputs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tidegate._validation import require_array

_WIDE = (torch.float32, torch.float64)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype if it is float32 or better, else float32."""
    return torch.promote_types(dtype, torch.float32)


def widen(x: Tensor) -> Tensor:
    """Return the same numbers in float32 or better."""
    return x if x.dtype in _WIDE else x.to(wide_dtype(x.dtype))


def is_under_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the tensor's device; some devices, such as meta, do not have it."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast on the tensor's device, if it has it."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def like_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast, if on, does for an attention call: it does not know the kernels' own operators."""
    if not is_under_autocast(tensors[0]) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(tensors[0].device.type)) for x in tensors)


def require_dtype(dtype: torch.dtype, **inputs: Tensor | None) -> None:
    """Raise TypeError unless the inputs are tensors of the weights' dtype; for a layer that has failed on them."""
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
    """Raise TypeError for anything but a tensor, such as a NumPy array or a list."""
    require_array(name, given, fits=isinstance(given, Tensor), kind="a tensor", remedy="torch.as_tensor")
