"""Tables of learned vectors, for tokens and for positions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def look_up(table: nn.Embedding, indices: Tensor, refuse: Callable[[int, int, int], None]) -> Tensor:
    """Return the table's rows; say in words which index it does not have.

    In words on the CPU alone, where PyTorch looks at every index by itself. Elsewhere a look would make each step wait
    for the device, and what it does then is PyTorch's own.

    refuse : raises, given the smallest and the largest index and the size of the table
    """
    try:
        return table(indices)
    except IndexError:
        refuse(int(indices.min()), int(indices.max()), table.num_embeddings)
        raise
