"""PyTorch's own layers: `nn.MultiheadAttention`, with and without its weights, and `nn.TransformerEncoder`."""

import pytest
import torch
from closeness import assert_close
from observed import assert_curves, assert_moments, several_keys
from torch import nn

from tidegate.torch.observing.sums import RunningRank
from tidegate.torch.observing.watcher import observe


def mha_case(kind):
    rng = torch.Generator().manual_seed(3)
    x = 2 * torch.randn(3, 6, 16, generator=rng, dtype=torch.float64)
    real = torch.arange(6) < torch.tensor([[4], [6], [2]])
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    return x, {
        "plain": ({}, None),
        "padding": ({"key_padding_mask": ~real}, real),
        "causal": ({"attn_mask": causal, "is_causal": True}, None),
        "causal and padding": ({"attn_mask": causal < 0, "key_padding_mask": ~real}, real),
    }[kind]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["plain", "padding", "causal", "causal and padding"])
@torch.no_grad()
def test_multihead_attention_of_pytorch_is_equal_to_its_own_weights(kind, batch_first, need_weights):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=batch_first, dtype=torch.float64, dropout=0.5).eval()
    x, (options, real) = mha_case(kind)
    _, weights = model(*[x if batch_first else x.transpose(0, 1)] * 3, average_attn_weights=False, **options)
    x = x if batch_first else x.transpose(0, 1)
    with observe(model) as watcher:
        _, returned = model(x, x, x, need_weights=need_weights, average_attn_weights=False, **options)
    (layer,) = watcher.observation().layers
    assert layer.name == "MultiheadAttention"
    assert (returned is not None) == need_weights
    real = torch.ones(3, 6, dtype=torch.bool) if real is None else real
    entropy = -torch.xlogy(weights, weights).sum(-1)
    counted = real[:, None].expand(entropy.shape)
    for statistic, values in (("entropy", entropy), ("effective_keys", entropy.exp()), ("mass", weights[..., 0])):
        assert_moments(layer, statistic, values, counted & several_keys(weights))
        assert_curves(layer, statistic, values, counted)


def test_observing_returned_weights_uses_the_same_random_numbers():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, dropout=0.5)
    x = torch.randn(5, 2, 16)
    torch.manual_seed(1)
    expected = model(x, x, x), model(x, x, x)
    torch.manual_seed(1)
    with observe(model) as watcher:
        actual = model(x, x, x), model(x, x, x)
    assert all(torch.equal(mine[i], theirs[i]) for mine, theirs in zip(actual, expected, strict=True) for i in (0, 1))
    assert model.dropout == 0.5
    assert watcher.observation().num_batches == 2


@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_the_encoder_of_pytorch_is_observed_without_its_fast_path(batch_first):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first, dtype=torch.float64)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=batch_first).eval()
    x, (options, real) = mha_case("padding")
    x = x if batch_first else x.transpose(0, 1)
    padding = options["key_padding_mask"]
    assert torch.backends.mha.get_fastpath_enabled()
    with observe(model) as watcher:
        output = model(x, src_key_padding_mask=padding)
    assert torch.backends.mha.get_fastpath_enabled()
    found = watcher.observation()
    assert [layer.name for layer in found.layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    _, weights = model.layers[0].self_attn(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    assert_moments(found.layers[0], "entropy", entropy, real[:, None] & several_keys(weights))
    stream = RunningRank()
    stream.add((output if batch_first else output.transpose(0, 1))[real])
    assert_close(found.layers[1].residual.largest, stream.largest)
    assert_close(found.layers[1].residual.effective_rank, stream.effective_rank(), what="finite difference")


class Counting(nn.MultiheadAttention):
    num_calls = 0

    def forward(self, *args, **options):
        self.num_calls += 1
        return super().forward(*args, **options)


def test_a_subclass_with_its_own_forward_is_not_called_again():
    model, x = Counting(16, 4), torch.randn(5, 2, 16)
    with torch.no_grad(), observe(model):
        model(x, x, x)
    assert model.num_calls == 1
