"""Blockwise attention is observed as the single call that it computes."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from closeness import assert_close
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_layers import make, sample

from tidegate.torch import observe, windows
from tidegate.torch.observing.calls import AttentionCalls

EVERYTHING = torch.ones(1, 300, dtype=torch.bool)
"""A mask that forbids nothing: with it a layer attends under a mask, without it by blocks."""


@pytest.fixture(autouse=True)
def _blocks_at_every_length(monkeypatch):
    monkeypatch.setattr(windows, "_WORK_OF_CALLS", 0)
    monkeypatch.setattr(windows, "_MOST_WORK", float("inf"))


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("documents", [None, torch.tensor([0, 1, 120, 300])])
def test_a_blockwise_call_is_reported_once_like_one_with_a_mask(documents, mode):
    layer, x, seen = make("g1+bma", window=20, num_kv_heads=2), sample(1, 300, 24), []
    with mode(), AttentionCalls(seen.append, seen.append):
        by_blocks = layer(x, documents=documents)
        under_mask = layer(x, documents=documents, mask=EVERYTHING)
    assert_close(by_blocks, under_mask)
    found, expected = seen
    assert torch.equal(found.mask.expand(1, 1, 300, 300), expected.mask.expand(1, 1, 300, 300))
    assert (found.causal, found.scale) == (expected.causal, expected.scale)
    for name in ("query", "key", "value", "output"):
        assert_close(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("options", [{"window": 20}, {"window": 290}, {"window": 20, "causal": False}])
def test_blockwise_observations_equal_those_with_a_mask(options):
    layer, x = make("g1", num_kv_heads=2, **options), sample(2, 300, 24)
    found, expected = [], []
    for observations, given in ((found, {}), (expected, {"mask": EVERYTHING})):
        with torch.no_grad(), observe(nn.ModuleDict({"layer": layer}), heat=True) as watcher:
            layer(x, **given)
        observations += _numbers(dataclasses.asdict(watcher.observation()))
    assert len(found) == len(expected) > 300
    assert_close(np.array(found), np.array(expected))


def _numbers(tree):
    """All numbers of nested dictionaries and sequences, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, np.ndarray | torch.Tensor):
        tree = tree.tolist()
    if isinstance(tree, list | tuple):
        return [number for branch in tree for number in _numbers(branch)]
    return [float(tree)] if isinstance(tree, int | float) else []


def test_a_checkpoint_can_be_differentiated_after_observing():
    layer, x = make("g1", window=20), sample(1, 300, 24, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    with observe(model := Checkpointed(layer)):
        y = model(x)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    assert_close(found, expected, what="gradient")
