"""Where models are trained."""

from __future__ import annotations

import torch


def require_device(name: str) -> None:
    """Refuse a device that PyTorch does not know, or that this machine does not have."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        reason = str(problem).splitlines()[0].rstrip(".")
        raise ValueError(f"--device {name} cannot be used here: {reason}. Leave it out to train on the CPU.") from None
