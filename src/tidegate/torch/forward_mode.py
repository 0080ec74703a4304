"""Load PyTorch's forward mode without its warnings."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch


@cache
def load_forward_mode() -> None:
    """Differentiate once in forward mode, ignoring the deprecation warning that PyTorch's own decompositions raise.

    PyTorch loads them at the first use, so that later uses are quiet.
    """
    # The annotations of these transforms are partial.
    jvp: Any = torch.func.jvp
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))
