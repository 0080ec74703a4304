import copy

import pytest
import torch
from closeness import assert_close
from covers import axis, over
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


@over(gate=axis(EVERY_GATE, "bma", "g1"), pooling=axis(["class", "mean"]), batch=axis([0, 1, 63], 1))
def test_every_image_gets_logits(gate, pooling, batch):
    assert make(gate=gate, pooling=pooling)(sample(batch)).shape == (batch, 3)


def test_the_default_model_is_small_and_runs():
    model = VisionTransformer(VisionConfig())
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert model.num_parameters() < 300_000


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
def test_every_pixel_reaches_every_class(gate, pooling):
    images = sample(2).requires_grad_()
    logits = make(gate=gate, pooling=pooling)(images)
    for k in range(3):
        (gradient,) = torch.autograd.grad(logits[:, k].sum(), images, retain_graph=True)
        assert (gradient != 0).all()


def test_images_of_a_batch_do_not_meet():
    model, images = make(), sample(3)
    assert_close(model(images), torch.cat([model(image[None]) for image in images]))


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


@every_gate
def test_a_few_steps_lower_the_loss_on_a_batch(gate):
    model = VisionTransformer(VisionConfig(gate=gate, image_size=8, d_model=16, num_layers=1))
    model.reset_parameters(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, labels = sample(10, size=8, channels=3, dtype=torch.float32), torch.arange(10)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@every_pooling
def test_single_precision_is_double_precision_rounded(pooling):
    single = make(pooling=pooling, dtype=torch.float32)(sample(2, dtype=torch.float32))
    assert single.dtype == torch.float32
    assert_close(single, make(pooling=pooling)(sample(2, dtype=torch.float32).double()))


def test_dropout_acts_in_training_only():
    model, images = make(dropout=0.5), sample(2)
    torch.manual_seed(0)
    assert not torch.equal(model(images), model(images))
    assert torch.equal(model.eval()(images), make()(images))


def test_variants_with_one_seed_share_every_weight_that_they_have_in_common():
    plain, gated = make(gate="none").state_dict(), make(gate="bma").state_dict()
    assert all(torch.equal(plain[name], gated[name]) for name in plain)


def test_traces_come_with_the_logits_and_see_both_ways():
    model, images = make(gate="bma"), sample(2)
    logits, traces = model.trace(images)
    assert torch.equal(logits, model(images))
    assert [(trace.causal, trace.mask) for trace in traces] == [(False, None)] * 2
    assert traces[0].gates["value"].shape == (2, 10, 4, 6)


def test_a_deep_copy_and_checkpointed_blocks_give_the_same():
    model, images = make(), sample(2)
    assert torch.equal(copy.deepcopy(model)(images), model(images))
    assert torch.equal(make(checkpoint_blocks=True)(images), model(images))


@pytest.mark.parametrize("shape", [(2, 15, 15), (1, 3, 15, 15), (1, 2, 15, 10)])
def test_images_of_another_shape_are_refused(shape):
    with rejects("images"):
        make()(torch.zeros(shape, dtype=torch.float64))


def test_images_of_another_dtype_are_refused_by_name():
    message = (
        r"^images must be torch\.float64, like the weights; got torch\.uint8\. Convert it with "
        r"images\.to\(torch\.float64\), or the module with \.to\(torch\.float32\)\.$"
    )
    with pytest.raises(TypeError, match=message):
        make()(sample(2).to(torch.uint8))
