"""Where in its sequence an attention call stands, if a cache hands over fewer keys, or more, than have gone by.

Legend: B batch, T query positions, S attended positions, P positions gone by, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tidegate.torch.observing.dispatch import AttentionCall


class Past(NamedTuple):
    """What is kept of a layer's sequence to know its next call by."""

    key_BD: Tensor
    """The last key, of one head."""
    real_BP: Tensor
    """Bool: which positions are no padding."""


def past_after(call: AttentionCall, real_BP: Tensor) -> Past:
    """The past of the call that comes next; the last key is that of the last position."""
    # A view would keep all keys, and a static cache writes over them.
    return Past(call.key[:, 0, -1].clone(), real_BP)


def gone_by(past: Past | None, call: AttentionCall) -> Tensor | None:
    """(B, P) bool, which positions before the call's queries are no padding; None if it does not follow that past.

    A call follows if the key before those of its queries is the last key of the past. Rows may come in another order
    and number, as in a search with beams. A cache that was cut back does not follow.
    """
    num_before = call.key.shape[2] - call.query.shape[2]
    if past is None or num_before < 1:
        return None
    before_BD = call.key[:, 0, num_before - 1]
    last_BD = past.key_BD
    if before_BD.shape[1:] != last_BD.shape[1:] or before_BD.device != last_BD.device:
        return None
    if torch.equal(before_BD, last_BD):
        return past.real_BP
    same = torch.stack([(row == last_BD).all(dim=-1) for row in before_BD])
    return past.real_BP[same.int().argmax(dim=1)] if bool(same.any(dim=1).all()) else None
