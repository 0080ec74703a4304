"""Expected statistics from the whole matrix of weights in float64, and their comparison with an observation."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INF = float("inf")
TOLERANCE = 1e-6
"""Largest allowed difference of a statistic from the plain computation in float64."""


class Attention(nn.Module):
    """A bare attention call as a model."""

    def forward(self, q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)


def qkv(B=2, H=4, G=4, T=7, S=7, D=8, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, D))
    return tuple((1.5 * torch.randn(shape, generator=rng, dtype=torch.float64)).to(dtype) for shape in shapes)


def weights_and_scores(q, k, v, *, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """(B, H, T, S) each in float64, by PyTorch's definition; checked against PyTorch's own output."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -INF)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -INF)
    elif attn_mask is not None:
        # Values up to -10,000, such as the smallest number of a dtype, hide a key.
        scores = scores + attn_mask.double().masked_fill(attn_mask <= -1e4, -INF)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights, scores.masked_fill(scores == -INF, 0.0)


def plain_statistics(weights, scores, norms_BHS, in_set):
    """Every statistic (B, H, T); the key set as (S,) or (B, 1, 1, S)."""
    entropy = -torch.xlogy(weights, weights).sum(-1)
    mean = (weights * scores).sum(-1)
    received = weights * norms_BHS[:, :, None]
    capacity = (weights * (scores - mean[..., None]) ** 2).sum(-1)
    return {
        "entropy": entropy,
        "effective_keys": entropy.exp(),
        "mass": (weights * in_set).sum(-1),
        "impact": (received * in_set).sum(-1) / received.sum(-1),
        "mean_score": mean,
        "max_score": scores.masked_fill(weights == 0, -INF).amax(-1),
        "heat_capacity": capacity,
    }


def several_keys(weights):
    """(B, H, T) bool: queries with weight on more than one key, which enter means."""
    return (weights > 0).sum(-1) > 1


def assert_moments(layer, statistic, values_BHT, counted_BHT):
    """The layer's moments of one statistic are those of the counted values."""
    for head, moments in enumerate(layer.heads[statistic]):
        chosen = values_BHT[:, head][counted_BHT[:, head]]
        assert moments.count == len(chosen)
        expected = (chosen.mean(), chosen.std(correction=0), chosen.min(), chosen.max())
        found = (moments.mean, moments.std, moments.low, moments.high)
        for mine, theirs in zip(found, expected, strict=True):
            assert abs(mine - float(theirs)) < TOLERANCE * (1 + abs(float(theirs))), (statistic, head)
        # The unit of a contribution is known only at the end, so that it has no histogram.
        assert sum(moments.histogram) == (0 if statistic == "contribution" else len(chosen))


def assert_curves(layer, statistic, values_BHT, counted_BHT, first=0):
    """The layer's means by position are those of the counted values."""
    assert layer.positions == tuple(
        first + i for i in range(values_BHT.shape[2]) if counted_BHT[:, :, i].any(dim=0).all()
    )
    for head, curve in enumerate(layer.by_position[statistic]):
        for position, mine in zip(layer.positions, curve, strict=True):
            chosen = values_BHT[:, head, position - first][counted_BHT[:, head, position - first]]
            assert abs(mine - float(chosen.mean())) < TOLERANCE * (1 + abs(float(chosen.mean()))), (statistic, position)


class LargestTensor(TorchDispatchMode):
    """Record the largest number of elements of a new tensor; a view is not new."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in _tensors_in((args, kwargs))}
        for x in _tensors_in(result):
            if x.untyped_storage().data_ptr() not in given:
                self.num_elements = max(self.num_elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def _tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
