import pytest
import torch
from closeness import assert_close
from errors import rejects
from torch.nn import functional as F

from tidegate import PRESETS, Gates
from tidegate.config import VisionConfig
from tidegate.torch.vit import VisionTransformer

EVERY_GATE = ["none", *PRESETS]
every_gate = pytest.mark.parametrize("gate", EVERY_GATE)
every_pooling = pytest.mark.parametrize("pooling", ["class", "mean"])


def make(*, dtype=torch.float64, **options):
    sizes = {"image_size": 15, "patch_size": 5, "channels": 2, "num_classes": 3, "d_model": 24, "num_layers": 2}
    model = VisionTransformer(VisionConfig(**sizes | options), dtype=dtype)
    model.reset_parameters(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model


def sample(batch, *, size=15, channels=2, dtype=torch.float64):
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1), dtype=dtype)


@every_pooling
def test_the_model_is_its_formula(pooling):
    model, images = make(pooling=pooling), sample(2)
    filters = model.patch_embedding.weight.unflatten(1, (2, 5, 5))
    patches = F.conv2d(images, filters, model.patch_embedding.bias, stride=5).flatten(2).transpose(1, 2)
    places = model.position_embedding.weight
    if pooling == "mean":
        x = model.stack(patches + places)
        pooled = x.mean(1)
    else:
        token = places[0].expand(2, 1, -1)
        x = model.stack(torch.cat((token, patches + places[1:]), dim=1))
        pooled = x[:, 0]
    assert_close(model(images), pooled @ model.head.weight.T + model.head.bias)


@every_pooling
@every_gate
def test_parameters_are_as_many_as_the_closed_form_says(gate, pooling):
    d, H, f, n = 24, 4, 40, 2
    model = make(gate=gate, pooling=pooling, d_ff=f, bias=True)
    gates = Gates.parse(gate).num_parameters(d_model=d, num_heads=H)
    block = 4 * (d * d + d) + 2 * d * f + f + d + 2 * 2 * d + gates
    without_embeddings = n * block + 2 * d + 3 * d + 3
    assert model.num_parameters(embeddings=False) == without_embeddings
    assert model.num_parameters() == without_embeddings + (50 * d + d) + (9 + (pooling == "class")) * d


@every_pooling
def test_flops_of_an_image_are_those_of_its_matrices(pooling):
    model = make(gate="none", pooling=pooling, d_ff=40)
    tokens = 9 + (pooling == "class")
    blocks = tokens * 2 * (2 * (4 * 24 * 24 + 2 * 24 * 40) + 4 * 24 * tokens)
    assert model.flops_per_token() * tokens == pytest.approx(blocks + 2 * 9 * 50 * 24 + 2 * 24 * 3)


def test_traces_come_with_the_logits_and_see_both_ways():
    model, images = make(gate="bma"), sample(2)
    logits, traces = model.trace(images)
    assert torch.equal(logits, model(images))
    assert [(trace.causal, trace.mask) for trace in traces] == [(False, None)] * 2
    assert traces[0].gates["value"].shape == (2, 10, 4, 6)


@pytest.mark.parametrize("shape", [(2, 15, 15), (1, 3, 15, 15), (1, 2, 15, 10)])
def test_images_of_another_shape_are_refused(shape):
    with rejects("images"):
        make()(torch.zeros(shape, dtype=torch.float64))
