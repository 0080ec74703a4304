"""Compare what `observe` sees of a tiny model of each causal type with the weights that its layers return."""

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
"""How far a statistic may be from that of the materialised weights, relative to 1 + its size."""
LENGTH = 12
REASONS = {
    "prophetnet": "its layers attend from several streams of queries at once",
    "reformer": "it hashes keys into buckets, and has no softmax over keys",
}
"""Why a type with softmax attention is not observed."""
ATTENDS_TWICE = ("diffllama",)
"""Types whose layers attend twice with the same weights, and return them once."""


class Examined(NamedTuple):
    """What was found of one type."""

    model_type: str
    observed: bool
    why: str = ""
    """Why it is not observed; empty if it is."""
    num_layers: int = 0
    apart: float = 0.0
    """Largest distance of a statistic to that of the materialised weights, relative to 1 + its size."""


def examine(model_type, *, as_built_alone=False):
    """Observe a tiny model as it is built, and once more with `eager` attention, beside the weights of that run.

    Raises AssertionError if a statistic is not that of the weights, if a layer that attends was not seen, or if
    observing changes what the model says.
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
        every = [as_built]
        if not as_built_alone:
            every.append(spelled_out := observed(eager, inputs))
            require_every_layer(eager, inputs, spelled_out)
        weights = layer_weights(eager, inputs, [layer.name for layer in every[-1].layers])
    times = 1 + (model_type in ATTENDS_TWICE)
    apart = max(distance(layer, weights[layer.name] * times) for found in every for layer in found.layers)
    assert apart <= CLOSE, f"{model_type}: a statistic is {apart:.2g} away from that of the weights"
    return Examined(model_type, observed=True, num_layers=len(as_built.layers), apart=apart)


@torch.no_grad()
def observed(model, inputs, **options):
    """What is observed of one forward pass, which is held against one that nobody observes."""
    before = model(**inputs).logits
    with observe(model, **options) as watcher:
        after = model(**inputs).logits
    assert torch.equal(before, after), f"observing changes {type(model).__name__}"
    return watcher.observation()


@torch.no_grad()
def require_every_layer(model, inputs, found):
    """Raise AssertionError unless all modules that ran and look their attention up are in `found`."""
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
    assert attended <= seen, f"{type(model).__name__}: not seen are {sorted(attended - seen)}"


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
    """The tensors with four axes in what a layer returns."""
    for each in result if isinstance(result, tuple | list) else (result,):
        if isinstance(each, Tensor) and each.ndim == 4:
            yield each
        elif isinstance(each, tuple | list):
            yield from matrices(each)


class LogSums(TorchFunctionMode):
    """Keep the log-partitions that a model asks PyTorch for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.logsumexp:
            self.found.append(result)
        return result


def with_sink_mass(module, weights, log_partitions):
    """The weights with the sink in their denominator, and its own."""
    weights = weights.double()
    kind = type(module).__name__
    if kind == "XLNetRelativeAttention":
        weights = weights.permute(2, 3, 0, 1)
    if kind == "BltCrossAttention":
        # A patch without bytes may see nothing, for which there are equal weights on all.
        weights = weights.masked_fill((weights == weights[..., :1]).all(-1, keepdim=True), 0)
    if getattr(module, "sinks", None) is None:
        return weights, None
    if log_partitions:
        # The sink scales the output, after the softmax.
        weights = weights * (log_partitions[0].double() - module.sinks[:, None]).sigmoid()[..., None]
    return weights, 1 - weights.sum(-1)


def distance(layer, calls):
    """How far the layer's means by head are from those of the weights, at most."""
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
