"""The keys that each query may see, in the cheapest form that the attention kernel supports.

Legend: B batch, T query positions, S attended positions, H query heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tidegate._validation import InputError, require_mask_shape
from tidegate.torch.precision import require_tensor


class AttentionMask(NamedTuple):
    """All restrictions on the keys that a query may see."""

    causal: bool
    """No later key."""
    window: int | None
    """Only keys fewer than this many positions away."""
    mask: Tensor | None = None
    """bool (True = attend) or additive float, broadcasting to (B, H, T, S), as checked by `require_mask`."""
    documents: Tensor | None = None
    """(B, T) ids, or boundaries of a single row, as checked by `require_documents`: only keys of the same document."""


def combine_masks(
    allowed: AttentionMask, *, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Return the mask for the kernel, and whether the kernel's own causal mode suffices; never both.

    Queries are the last positions of the keys. No (T, S) tensor is built for plain causal attention, for one query, nor
    for a window that covers all keys.
    """
    causal, window, mask, documents = allowed
    banded = window is not None and window < num_keys
    if mask is None and documents is None and not banded and num_queries == num_keys:
        return None, causal
    ordered = causal and num_queries > 1
    visible = _band(num_queries, num_keys, causal, window, device) if ordered or banded else None
    if documents is not None:
        ids = document_ids(documents, num_positions=num_queries)
        together = (ids[:, :, None] == ids[:, None, :]).unsqueeze(1)
        visible = together if visible is None else visible & together
    if mask is None or visible is None:
        return (mask if visible is None else visible), False
    if mask.dtype == torch.bool:
        return mask & visible, False
    return torch.where(visible, mask, float("-inf")), False


def document_ids(documents: Tensor, *, num_positions: int) -> Tensor:
    """Return document ids (B, T), from ids or from the boundaries `cu_seqlens` of a single packed row."""
    if documents.ndim > 1:
        return documents
    positions = torch.arange(num_positions, device=documents.device)
    return torch.bucketize(positions, documents[1:-1].contiguous(), right=True).unsqueeze(0)


def require_documents(documents: Tensor, *, batch: int, num_positions: int) -> None:
    """Raise unless documents are ids (B, T), or boundaries (documents + 1,) from 0 to T of a single packed row."""
    require_tensor("documents", documents)
    if documents.is_floating_point() or documents.dtype == torch.bool:
        raise TypeError(f"documents must be integer ids or boundaries, got {documents.dtype}.")
    if documents.ndim == 1:
        if batch != 1:
            expected = f"ids (batch, positions) for a batch of {batch}"
            hint = "Boundaries describe a single packed row."
            raise InputError("documents", expected=expected, got=tuple(documents.shape), hint=hint)
        # On other devices, reading the values would make every step wait.
        if torch.compiler.is_compiling() or documents.device.type != "cpu":
            return
        given = documents.tolist()
        if given[:1] != [0] or given[-1:] != [num_positions] or given != sorted(given):
            expected = f"boundaries rising from 0 to {num_positions} if it has one axis"
            hint = "Pass ids with one row for each of the batch, as in documents[None]."
            raise InputError("documents", expected=expected, got=given, hint=hint)
    elif documents.shape != (batch, num_positions):
        raise InputError("documents", expected=f"of shape {(batch, num_positions)}", got=tuple(documents.shape))


def require_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless the mask is a tensor, bool or floating, and broadcasts to (B, H, T, S)."""
    require_tensor("mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"mask must be bool, True where a query may attend, or floating, added to the scores, got {mask.dtype}. "
            "Compare it, as in mask != 0."
        )
    require_mask_shape(tuple(mask.shape), shape)


def _band(num_queries: int, num_keys: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return (T, S) bool: no key ahead if causal, and only keys fewer than `window` positions away."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = queries[:, None] - torch.arange(num_keys, device=device)
    if not causal:
        assert window is not None
        return distance.abs() < window
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
