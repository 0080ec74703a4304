"""Compare observations of a tiny model of each causal type with the weights that its layers return."""

import warnings
from contextlib import ExitStack
from typing import NamedTuple

import model_types
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tidegate.torch.observing import observe
from tidegate.torch.retrofit.interface import calls_interface

CLOSE = 1e-5
"""Largest allowed difference of a statistic from that of the returned weights, relative to 1 + its size."""
LENGTH = 12
REASONS = {
    "prophetnet": "its layers attend from several streams of queries at once",
    "reformer": "it hashes keys into buckets, and has no softmax over keys",
}
"""Types that are not observed, with the reason."""
ATTENDS_TWICE = ("diffllama",)
"""Types whose layers attend twice with the same weights, and return them once."""


class Examined(NamedTuple):
    """The result for one type."""

    model_type: str
    observed: bool
    why: str = ""
    """Why it is not observed; empty if it is."""
    num_layers: int = 0
    apart: float = 0.0
    """Largest difference of a statistic from that of the returned weights, relative to 1 + its size."""


def examine(model_type):
    """Observe a tiny model with its default attention and with `eager` attention, and compare with the eager weights.

    Raises AssertionError if a statistic differs from that of the weights, if a layer that attends was not observed, or
    if observing changes the logits.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_types.build(model_type)
        inputs = model_types.inputs_of(model, length=LENGTH)
        try:
            as_built = observed(model, inputs)
        except RuntimeError as error:
            return Examined(model_type, observed=False, why=REASONS.get(model_type, str(error)))
        eager = model_types.build(model_type, attn_implementation="eager")
        require_every_layer(model, inputs, as_built)
        with_eager = observed(eager, inputs)
        require_every_layer(eager, inputs, with_eager)
        weights = layer_weights(eager, inputs, [layer.name for layer in with_eager.layers])
    times = 1 + (model_type in ATTENDS_TWICE)
    layers = (*as_built.layers, *with_eager.layers)
    apart = max(distance(layer, weights[layer.name] * times) for layer in layers)
    assert apart <= CLOSE, f"{model_type}: a statistic is {apart:.2g} away from that of the weights"
    return Examined(model_type, observed=True, num_layers=len(as_built.layers), apart=apart)


@torch.no_grad()
def observed(model, inputs, **options):
    """The observation of one forward pass, whose logits are compared with an unobserved one."""
    before = model(**inputs).logits
    with observe(model, **options) as watcher:
        after = model(**inputs).logits
    assert torch.equal(before, after), f"observing changes {type(model).__name__}"
    return watcher.observation()


@torch.no_grad()
def require_every_layer(model, inputs, found):
    """Raise AssertionError unless `found` has all modules that ran and call the attention interface."""
    attended = set()
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def note(module, args, result, name=name):
                del args
                if calls_interface(type(module)):
                    attended.add(name)

            hooks.callback(module.register_forward_hook(note).remove)
        model(**inputs)
    seen = {layer.name.split(" (")[0] for layer in found.layers}
    assert attended <= seen, f"{type(model).__name__}: {sorted(attended - seen)} were not observed"


@torch.no_grad()
def layer_weights(model, inputs, names):
    """By layer, the weights (B, H, T, S) that it returns at each of its calls, and those on its sink (B, H, T)."""
    found = {name: [] for name in names}
    logarithms = LogSums()
    with ExitStack() as hooks:
        for name in names:

            def keep(module, args, result, name=name):
                del args
                sums, logarithms.found = logarithms.found, []
                found[name].append(with_sink_mass(module, next(matrices(result)), sums))

            handle = model.get_submodule(name).register_forward_hook(keep)
            hooks.callback(handle.remove)
        hooks.enter_context(logarithms)
        model(**inputs, output_attentions=True)
    return found


def matrices(result):
    """The tensors with four axes in the result of a layer."""
    for each in result if isinstance(result, tuple | list) else (result,):
        if isinstance(each, Tensor) and each.ndim == 4:
            yield each
        elif isinstance(each, tuple | list):
            yield from matrices(each)


class LogSums(TorchFunctionMode):
    """Record the log-partitions that a model computes with `torch.logsumexp`."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.logsumexp:
            self.found.append(result)
        return result


def with_sink_mass(module, weights, log_partitions):
    """The weights with the sink in their denominator, and the weight on the sink."""
    weights = weights.double()
    kind = type(module).__name__
    if kind == "XLNetRelativeAttention":
        weights = weights.permute(2, 3, 0, 1)
    if kind == "BltCrossAttention":
        # A patch without bytes may see nothing; its weights are equal for all keys.
        weights = weights.masked_fill((weights == weights[..., :1]).all(-1, keepdim=True), 0)
    if getattr(module, "sinks", None) is None:
        return weights, None
    if log_partitions:
        # The sink scales the output, after the softmax.
        weights = weights * (log_partitions[0].double() - module.sinks[:, None]).sigmoid()[..., None]
    return weights, 1 - weights.sum(-1)


def distance(layer, calls):
    """Largest difference of the layer's means by head from those of the weights."""
    by_call = [from_weights(*call) for call in calls]
    apart = 0.0
    for statistic in by_call[0]:
        if statistic == "counted":
            continue
        for head, moments in enumerate(layer.heads[statistic]):
            values = torch.cat([call[statistic][:, head][call["counted"][:, head]] for call in by_call])
            assert moments.count == len(values), (layer.name, statistic, moments.count, len(values))
            if len(values):
                apart = max(apart, abs(moments.mean - float(values.mean())) / (1 + abs(float(values.mean()))))
    return apart


def from_weights(weights, sink):
    """Statistics (B, H, T) without padding, and which queries count: those that see more than one key."""
    entropy = -torch.xlogy(weights, weights).sum(-1)
    found = {"mass": weights[..., 0]}
    if sink is not None:
        entropy = entropy - torch.xlogy(sink, sink)
        found["sink"] = sink
    counted = (weights > 0).sum(-1) > 1
    return found | {"entropy": entropy, "effective_keys": entropy.exp(), "counted": counted}
