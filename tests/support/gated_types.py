"""The checks of gates on a tiny model of each causal type, for docs/models-supported.md."""

import warnings

import model_types
import torch
from retrofit_models import stir

from tidegate.torch.retrofit import add_gates, remove_gates
from tidegate.torch.retrofit.probe import has_cache

CACHED = 3
"""Tokens that are read one by one with a cache, after the others."""


def check_gates(model_type, gate):
    """Add gates to a tiny model and check everything that `add_gates` promises.

    Raises ValueError if the model cannot take them, and AssertionError if a promise does not hold.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_types.build(model_type)
        inputs = model_types.inputs_of(model, padded=True)
        before = _logits(model, inputs)
        report = add_gates(model, gate)
        assert report.bitwise_equal
        assert torch.equal(_logits(model, inputs), before), "other bits"
        stir(model)
        assert not torch.equal(_logits(model, inputs), before), "gates that do nothing"
        _require_gradients(model, inputs)
        # Without gates, a few models already give different outputs with a cache.
        own = _largest_step(model_types.build(model_type))
        assert _largest_step(model) <= max(1e-4, 2 * own), "other answers with a cache"
        remove_gates(model)
        assert torch.equal(_logits(model, inputs), before), "other bits without the gates"
    return report


def _logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def _require_gradients(model, inputs):
    model.zero_grad()
    model(**inputs).logits.float().logsumexp(-1).sum().backward()
    modules = [module for module in model.modules() if "attn_gate" in dict(module.named_children())]
    assert modules
    for module in modules:
        moved = {
            name: weight.grad is not None and bool(weight.grad.any()) for name, weight in module.named_parameters()
        }
        gates = [name for name in moved if name.startswith("attn_gate.")]
        # A module that makes discrete choices, such as patches of bytes, has no gradients in its own weights either.
        others = any(moved[name] for name in moved if name not in gates)
        assert all(moved[name] == others for name in gates), f"no gradient in {type(module).__name__}: {moved}"
    model.zero_grad()


def steps_with_a_cache(model):
    """Return whether the model has a cache, so that the check includes tokens that are read one by one."""
    return has_cache(model, {"input_ids": model_types.inputs_of(model)["input_ids"]})


@torch.no_grad()
def _largest_step(model):
    """Return the largest relative difference between logits of tokens read one by one and in one pass."""
    if not steps_with_a_cache(model):
        return 0.0
    tokens = model_types.inputs_of(model)["input_ids"]
    whole = model(input_ids=tokens)
    step = model(input_ids=tokens[:, :-CACHED], use_cache=True)
    largest = 0.0
    for position in range(tokens.shape[1] - CACHED, tokens.shape[1]):
        token = tokens[:, position : position + 1]
        step = model(input_ids=token, past_key_values=step.past_key_values, use_cache=True)
        difference = (step.logits[:, -1] - whole.logits[:, position]).abs().max()
        largest = max(largest, float(difference / whole.logits.abs().max()))
    return largest
