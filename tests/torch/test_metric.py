import pytest
import torch
from closeness import assert_close
from torch_layers import sample

from tidegate import HeadShape
from tidegate.tensors.bilinear import bilinear_form_batch, learned_metric
from tidegate.torch import GatedAttention
from tidegate.torch.metric import HeadMetric

SHAPE = HeadShape.of(d_model=24, num_heads=4)


def metric(kind, *, seed=0):
    made = HeadMetric(kind, SHAPE, dtype=torch.float64)
    made.weight.data = sample(*made.weight.shape, seed=seed)
    return made


@pytest.mark.parametrize("kind", ["diagonal", "learned"])
def test_a_metric_starts_as_the_identity(kind):
    q = sample(2, 5, 4, 6)
    assert torch.equal(HeadMetric(kind, SHAPE, dtype=torch.float64)(q), q)
    layer = GatedAttention(24, 4, gate="none", metric=kind, dtype=torch.float64)
    x = sample(2, 5, 24)
    plain = GatedAttention(24, 4, gate="none", dtype=torch.float64)
    plain.load_state_dict(layer.state_dict(), strict=False)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("kind", ["diagonal", "learned"])
def test_the_product_with_keys_is_the_bilinear_form_of_each_head(kind):
    lowered, q, k = metric(kind), sample(2, 5, 4, 6, seed=1), sample(2, 5, 4, 6, seed=2)
    scores = torch.einsum("bthk,bshk->bhts", lowered(q), k)
    for head, weight in enumerate(lowered.weight):
        g = learned_metric(weight) if kind == "learned" else torch.diag(weight)
        assert_close(scores[:, head], bilinear_form_batch(q[:, :, head], k[:, :, head], g))
