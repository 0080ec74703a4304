"""Small PyTorch attention layers, for laws, parity and transforms."""

import pytest
import torch
from layers import EXOTIC, GATES, TOGETHER

from tidegate.tensors.rotary import Rotary
from tidegate.torch import GatedAttention

ROTARY = Rotary(base=100.0, fraction=0.5, scale=2.0, offset=3)

OPTIONS = {
    "plain": {},
    "everything": {
        "num_kv_heads": 2,
        "head_dim": 4,
        "bias": True,
        "rope": ROTARY,
        "qk_norm": True,
        "window": 3,
        "metric": "learned",
        "temperature": 0.7,
    },
    "multi-query": {"num_kv_heads": 1, "head_dim": 6, "causal": False, "rope": True, "metric": "diagonal"},
    "band": {"num_kv_heads": 2, "causal": False, "window": 2, "qk_norm": True},
}
"""Option sets that together enable every option of a layer that is not random."""

SPELLINGS = ("none", *map(str, GATES), *EXOTIC, *(spelling for spelling in TOGETHER if "+" in spelling))
"""No gate, every legal gate, odd ones, and several at once."""

every_gate = pytest.mark.parametrize("gate", list(map(str, GATES)))
every_spelling = pytest.mark.parametrize("gate", SPELLINGS)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)


def make(gate="none", *, seed=0, dtype=torch.float64, d_model=24, num_heads=4, **options):
    """Return a layer far from its initial values: gates far from 1/2, norms, metrics and biases of every size."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = GatedAttention(d_model, num_heads, gate=gate, dtype=torch.float64, **options)
        for name, parameter in layer.named_parameters():
            noise = torch.randn_like(parameter)
            if name.startswith("attn_gate") or name.endswith("bias"):
                parameter.data.add_(0.5 * noise)
            elif "norm" in name or name.startswith("metric"):
                parameter.data.add_(0.3 * noise)
            else:
                parameter.data.mul_(3)
    return layer.to(dtype)


def options_of(layer):
    """Return the options of a layer that both frameworks have, without its gates."""
    return {
        "d_model": layer.shape.d_model,
        "num_heads": layer.shape.num_heads,
        "num_kv_heads": layer.shape.num_kv_heads,
        "head_dim": layer.shape.head_dim,
        "bias": layer.q_proj.bias is not None,
        "rope": layer.rotary,
        "qk_norm": layer.q_norm is not None,
        "window": layer.window,
        "metric": None if layer.metric is None else layer.metric.kind,
        "temperature": layer.temperature,
    }


def ungated(layer):
    """Return the same layer with the same weights, without gates."""
    plain = GatedAttention(**options_of(layer), gate="none", causal=layer.causal, dtype=layer.q_proj.weight.dtype)
    own = {name: value for name, value in layer.state_dict().items() if not name.startswith("attn_gate")}
    plain.load_state_dict(own)
    return plain


def sample(*shape, seed=0, dtype=torch.float64, requires_grad=False):
    """Return normal numbers, the same for every dtype up to rounding."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(dtype).requires_grad_(requires_grad)


def gradients(layer, y, *inputs):
    """Return the gradients of a fixed random combination of y by inputs and parameters, 0 for unused ones."""
    by = {f"input {i}": tensor for i, tensor in enumerate(inputs)} | dict(layer.named_parameters())
    weights = sample(*y.shape, seed=99, dtype=y.dtype)
    found = torch.autograd.grad((y * weights).sum(), list(by.values()), materialize_grads=True)
    return dict(zip(by, found, strict=True))


def largest_gap(actual, expected):
    """Return the largest difference; shapes must be equal."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    return (actual.double() - expected.double()).abs().max().item()


def rounding(dtype, expected, *, times=8):
    """Return the error of a number of roundings of values as large as the expected ones."""
    return times * torch.finfo(dtype).eps * (1 + expected.abs().max().item())
