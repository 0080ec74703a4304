import pytest
import torch
from closeness import assert_close
from torch_layers import ROTARY, make, sample

from tidegate.tensors import rotary as reference
from tidegate.tensors.rotary import Rotary
from tidegate.torch import GatedAttention
from tidegate.torch.rotary import rotary_tables, rotate

VARIANTS = [Rotary(), Rotary(base=50.0), ROTARY, Rotary(fraction=0.25, scale=0.5, offset=-3)]
POSITIONS = [torch.arange(5), torch.tensor([7, 0, 3, 3, 100]), torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])]


@pytest.mark.parametrize("rotary", VARIANTS, ids=str)
@pytest.mark.parametrize("positions", POSITIONS, ids=["count", "row", "rows"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_rotation_is_that_of_the_tensors(rotary, positions, dtype):
    x = sample(2, 5, 3, 8, dtype=dtype)
    angles = reference.rotary_angles(positions, 8, rotary, like=x)
    expected = reference.rotate(x.transpose(1, 2), angles.unsqueeze(-3)).transpose(1, 2)
    assert_close(rotate(x, rotary_tables(positions, rotary.width(8), rotary, dtype)), expected)


@pytest.mark.parametrize("rotary", VARIANTS, ids=str)
def test_scores_depend_on_the_difference_of_positions_only(rotary):
    layer, x = make("g1+bma", head_dim=8, rope=rotary), sample(2, 5, 24)
    assert_close(layer(x, positions=torch.arange(5) + 11), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_are_wide_and_what_is_turned_keeps_its_dtype(dtype):
    tables = rotary_tables(torch.arange(4096), 8, Rotary(), dtype)
    assert tables.own.dtype == tables.partner.dtype == torch.float32
    assert tables.own.shape == tables.partner.shape == (4096, 1, 8)
    assert_close(tables.own[:, 0, 0], torch.arange(4096.0).cos())
    assert_close(tables.partner[:, 0, 4], torch.arange(4096.0).sin())
    assert rotate(sample(1, 4096, 1, 8, dtype=dtype), tables).dtype == dtype


@pytest.mark.parametrize(("rope", "expected"), [(None, None), (False, None), (True, Rotary()), (ROTARY, ROTARY)])
def test_a_rotary_embedding_is_given_or_switched_on(rope, expected):
    assert GatedAttention(32, 4, rope=rope).rotary == expected
