"""Precision: every dtype, autocast, and very large numbers."""

import copy

import pytest
import torch
from closeness import assert_close
from covers import DTYPE, HALF, SEVERAL, SPELLING, axis, every_half_layer, every_layer, over
from torch_layers import (
    OPTIONS,
    SPELLINGS,
    every_option,
    largest_gap,
    make,
    rounding,
    sample,
)

BOUNDED = [spelling for spelling in SPELLINGS if not any(word in spelling for word in ("silu", "softplus", "identity"))]


@every_half_layer
def test_half_precision_is_float32_up_to_rounding(gate, dtype, options):
    half, x = make(gate, dtype=dtype, **options), sample(2, 5, 24, dtype=dtype)
    wide = copy.deepcopy(half).float()
    y, expected = half(x), wide(x.float())
    assert y.dtype == dtype
    assert largest_gap(y, expected) <= rounding(dtype, expected)


@every_layer
def test_float32_is_float64_up_to_rounding(gate, options):
    single, x = make(gate, dtype=torch.float32, **options), sample(2, 5, 24, dtype=torch.float32)
    double = copy.deepcopy(single).double()
    assert_close(single(x), double(x.double()))


@over(gate=SPELLING, dtype=HALF)
def test_autocast_is_float32_up_to_rounding(gate, dtype):
    layer, x = make(gate, dtype=torch.float32, **OPTIONS["everything"]), sample(2, 5, 24, dtype=torch.float32)
    expected = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
        masked = layer(x, mask=torch.zeros(5, 5))
    assert y.dtype == dtype
    assert largest_gap(y, expected) <= rounding(dtype, expected)
    assert largest_gap(masked, expected) <= rounding(dtype, expected)
    found = torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in found)


@over(gate=axis(BOUNDED, *SEVERAL[1:]), dtype=DTYPE)
def test_very_large_logits_stay_finite(gate, dtype):
    layer, x = make(gate, dtype=dtype), sample(2, 5, 24, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        for parameter in layer.attn_gate.parameters():
            parameter.mul_(torch.finfo(dtype).max ** 0.5 / 10)
    y = layer(x)
    assert y.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), [x, *layer.parameters()]))


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_very_large_scores_attend_to_one_key(size):
    layer, x = make("none", dtype=torch.float32), sample(2, 5, 24, dtype=torch.float32, requires_grad=True)
    with torch.no_grad():
        layer.q_proj.weight.mul_(size)
    y, trace = layer.trace(x)
    scores = (trace.query @ trace.key.mT).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    chosen = trace.value.gather(2, scores.argmax(dim=-1)[..., None].expand_as(trace.value))
    if size >= 1e4:
        assert_close(trace.output.transpose(1, 2), chosen)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), [x, *layer.parameters()]))


@pytest.mark.gpu
@every_option
@pytest.mark.parametrize("gate", ["none", "bma", "bma-query", "g1+g2+g3+g4+g5"])
def test_a_gpu_computes_what_the_cpu_does(gate, options):
    layer, x = make(gate, dtype=torch.float32, **options), sample(2, 63, 24, dtype=torch.float32)
    on_gpu = copy.deepcopy(layer).cuda()
    y, z = layer(x), on_gpu(x.cuda())
    assert_close(z, y)
    for found, expected in zip(
        torch.autograd.grad(z.square().sum(), list(on_gpu.parameters())),
        torch.autograd.grad(y.square().sum(), list(layer.parameters())),
        strict=True,
    ):
        assert_close(found, expected, what="gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["none", "bma", "bma-query", "g1"])
def test_on_a_gpu_an_empty_row_gives_the_bias(gate):
    layer = make(gate, dtype=torch.float32, bias=True).cuda()
    x = sample(2, 5, 24, dtype=torch.float32).cuda().requires_grad_()
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool, device="cuda")
    mask[1] = False
    y = layer(x, mask=mask)
    assert torch.equal(y[1], layer.o_proj.bias.expand(5, 24))
    assert (torch.autograd.grad(y[1].square().sum(), x)[0] == 0).all()
