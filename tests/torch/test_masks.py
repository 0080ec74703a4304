from itertools import pairwise

import pytest
import torch
from closeness import assert_close
from errors import rejects
from observed import LargestTensor
from torch_layers import every_dtype, every_option, make, sample

from tidegate import PRESETS
from tidegate.torch.masks import AttentionMask, combine_masks, require_documents


def combine(*, num_queries, num_keys, causal=True, window=None):
    allowed = AttentionMask(causal, window)
    return combine_masks(allowed, num_queries=num_queries, num_keys=num_keys, device=torch.device("cpu"))


def additive(mask, dtype=torch.float64):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))


def test_an_additive_mask_is_added_to_the_scores():
    layer, x, mask = make("bma"), sample(2, 5, 24), sample(2, 4, 5, 5, seed=6, requires_grad=True)
    y, trace = layer.trace(x, mask=mask)
    scores = trace.scale * trace.query @ trace.key.transpose(-1, -2) + mask
    ahead = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1) @ trace.value
    assert_close(trace.output.transpose(1, 2), expected)
    weights = sample(2, 5, 24, seed=7)
    (by_mask,) = torch.autograd.grad((y * weights).sum(), mask, retain_graph=True)
    (by_hand,) = torch.autograd.grad((layer.o_proj(expected.transpose(1, 2).flatten(-2)) * weights).sum(), mask)
    assert_close(by_mask, by_hand, what="gradient")


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@every_dtype
def test_an_additive_mask_may_have_any_floating_dtype(dtype, given):
    layer, x, mask = make("bma", dtype=dtype), sample(2, 5, 24, dtype=dtype), sample(5, 5, seed=4) > -1
    assert torch.equal(layer(x, mask=additive(mask, given)), layer(x, mask=additive(mask, dtype)))


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@every_dtype
def test_a_row_that_sees_nothing_gives_zero_with_gradient_zero(dtype, num_kv_heads, T, kind):
    layer = make("bma-query+bma", num_kv_heads=num_kv_heads, bias=True, dtype=dtype)
    x = sample(2, T, 24, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 1, T, T, dtype=torch.bool)
    mask[0, :, -1] = False
    mask[1] = False
    y, trace = layer.trace(x, mask=mask if kind == "bool" else additive(mask, dtype))
    assert (trace.output[0, -1] == 0).all()
    assert (trace.output[1] == 0).all()
    bias = layer.o_proj.bias
    assert torch.equal(y[1], bias.expand(T, 24))
    empty = torch.cat([y[0, -1:], y[1]])
    others = [parameter for name, parameter in layer.named_parameters() if name != "o_proj.bias"]
    for gradient in torch.autograd.grad(empty.square().sum(), [x, *others], retain_graph=True, materialize_grads=True):
        assert (gradient == 0).all()
    for gradient in torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("gate", ["none", *PRESETS, "g1+g2+g3+g4+g5"])
@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 1, "rope": True, "qk_norm": True, "window": 512}, {"causal": False}]
)
def test_nothing_of_the_size_of_the_scores_is_built(gate, options):
    T = 512
    layer, x = make(gate, d_model=16, num_heads=2, **options), sample(1, T, 16, requires_grad=True)
    with LargestTensor() as largest:
        layer(x).sum().backward()
    assert T * 16 <= largest.num_elements < T * T


@every_option
def test_documents_never_see_each_other(options):
    layer, x = make("g1+bma+g3", **options), sample(1, 9, 24, requires_grad=True)
    bounds = [0, 2, 2, 3, 9]
    ids = torch.tensor([[5, 5, 2, 5, 5, 5, 5, 5, 5]]) + torch.tensor([0, 0, 0, 4, 4, 4, 4, 4, 4])
    y = layer(x, documents=torch.tensor(bounds))
    assert torch.equal(layer(x, documents=ids), y)
    for start, end in pairwise(bounds):
        (by_x,) = torch.autograd.grad(y[:, start:end].square().sum(), x, retain_graph=True)
        assert (by_x[:, :start] == 0).all()
        assert (by_x[:, end:] == 0).all()
        assert_close(y[:, start:end], layer(x[:, start:end], positions=torch.arange(start, end)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
def test_whole_numbers_are_no_mask(dtype):
    with pytest.raises(TypeError, match=r"^mask must be .* mask != 0"):
        make("bma")(sample(2, 5, 24), mask=torch.ones(5, 5, dtype=dtype))


@pytest.mark.parametrize("documents", [torch.ones(2, 3), torch.ones(2, 3) > 0])
def test_documents_are_integers(documents):
    with pytest.raises(TypeError, match=r"^documents must be integer"):
        require_documents(documents, batch=2, num_positions=3)


@pytest.mark.parametrize("shape", [(5,), (5, 4), (2, 5), (4, 5, 5), (2, 5, 5), (3, 1, 5, 5), (1, 1, 1, 5, 5), ()])
def test_a_mask_that_does_not_broadcast_is_refused(shape):
    with rejects("mask", hint="mask[:, None, None, :]"):
        make("bma")(sample(2, 5, 24), mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("window", [None, 6, 7])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernels_own_causality_is_used_where_it_does_all(window, causal):
    assert combine(num_queries=6, num_keys=6, causal=causal, window=window) == (None, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 7])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(6, 6), (2, 6), (1, 6), (1, 1)])
def test_queries_are_the_last_positions_of_the_keys(num_queries, num_keys, window, causal):
    mask, by_kernel = combine(num_queries=num_queries, num_keys=num_keys, window=window, causal=causal)
    found = torch.ones(num_queries, num_keys, dtype=torch.bool) if mask is None else mask
    found = found.tril() if by_kernel else found
    assert mask is None or not by_kernel
    for query in range(num_queries):
        for key in range(num_keys):
            distance = num_keys - num_queries + query - key
            near = window is None or abs(distance) < window
            assert found.expand(num_queries, num_keys)[query, key] == (near and (distance >= 0 or not causal))


@pytest.mark.parametrize(
    ("documents", "batch"),
    [
        (torch.tensor([0, 3]), 2),
        (torch.zeros(2, 4, dtype=torch.long), 2),
        *((torch.tensor(given, dtype=torch.long), 1) for given in ([0, 0, 1], [0, 2], [1, 3], [0, 2, 1, 3], [])),
    ],
)
def test_documents_that_do_not_fit_are_rejected(documents, batch):
    hint = "documents[None]" if batch == 1 else ""
    with rejects("documents", hint=hint):
        require_documents(documents, batch=batch, num_positions=3)
