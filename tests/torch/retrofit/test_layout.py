import pytest
import torch

from tidegate.torch.retrofit.layout import Columns

LAYOUTS = {
    "whole": (Columns(start=0, stride=3, num_heads=4, head_dim=3), 12),
    "slice": (Columns(start=12, stride=3, num_heads=4, head_dim=3), 30),
    "interleaved": (Columns(start=3, stride=9, num_heads=4, head_dim=3), 36),
    "interleaved further on": (Columns(start=15, stride=9, num_heads=2, head_dim=3), 30),
    "one head": (Columns(start=4, stride=3, num_heads=1, head_dim=3), 9),
}


@pytest.mark.parametrize(("layout", "width"), LAYOUTS.values(), ids=LAYOUTS)
def test_columns_are_found_taken_and_put_back(layout, width):
    assert Columns.of(layout.heads(), width=width) == layout
    result = torch.arange(2.0 * width).view(1, 2, width)
    taken = layout.take(result)
    assert torch.equal(taken, torch.stack([result[..., columns] for columns in layout.heads()], dim=-2))
    sign = torch.ones(width).index_fill(0, torch.tensor(layout.heads()).flatten(), -1)
    assert torch.equal(layout.put(result, -taken), result * sign)


@pytest.mark.parametrize(
    ("heads", "width"),
    [
        ([[0, 1], [1, 2]], 8),
        ([[0, 1], [2, 3], [6, 7]], 8),
        ([[0, 2], [4, 6]], 8),
        ([[2, 3], [0, 1]], 8),
        ([[1, 2], [4, 5]], 5),
        ([[2, 3], [5, 6]], 9),
    ],
    ids=["overlapping", "irregular", "with gaps", "backwards", "too wide", "across blocks"],
)
def test_columns_in_no_order_have_no_layout(heads, width):
    assert Columns.of(heads, width=width) is None
