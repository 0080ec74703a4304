import pytest
import torch
from closeness import assert_close
from torch_layers import ROTARY, make, sample

from tidegate.tensors.rotary import Rotary
from tidegate.torch import GatedAttention
from tidegate.torch.rotary import rotary_tables, rotate

VARIANTS = [Rotary(), Rotary(base=50.0), ROTARY, Rotary(fraction=0.25, scale=0.5, offset=-3)]


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
