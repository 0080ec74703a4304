"""Refuse models and layers that cannot take a gate, or whose gate cannot be merged, and say why."""

# A module that stands in several places: `named_children` gives the first alone.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidegate.gate import Gate
from tidegate.gates import Gates
from tidegate.torch.retrofit.interface import (
    STOCK_IMPLEMENTATIONS,
    calls_interface,
    implementation_in,
    stock_implementation,
)
from tidegate.torch.retrofit.layer import GATES_NAME
from tidegate.torch.retrofit.layout import AttentionLayout, PartKind, Slot

_INPUTS = ("input_ids", "pixel_values", "input_values", "input_features")
"""What models of transformers call tokens, images and sound."""


def refusal(model: nn.Module, reason: str) -> ValueError:
    """Return the error that says why a model cannot take gates."""
    return ValueError(f"{type(model).__name__} cannot take gates: {reason}.")


def require_model(model: PreTrainedModel) -> None:
    """Refuse a model that cannot take gates, as far as can be told without running it."""
    if torch.is_inference_mode_enabled():
        raise refusal(
            model,
            "its projections are found by gradients, which torch.inference_mode() does without; leave that mode first",
        )
    if any(weight.is_meta for weight in model.parameters()):
        raise refusal(
            model,
            "some of its weights are on the meta device, not loaded or offloaded, and have no values; load the whole "
            "model onto a device first",
        )
    config: Any = model.config
    for flag in ("is_encoder_decoder", "add_cross_attention"):
        if getattr(config, flag, False):
            raise refusal(model, f"its configuration says {flag}, and cross-attention has no input of its own to read")
    if not any(calls_interface(type(module)) for module in model.modules()):
        raise refusal(model, "none of its modules calls attention through transformers' ALL_ATTENTION_FUNCTIONS")
    if (name := stock_implementation(implementation_in(model))) not in STOCK_IMPLEMENTATIONS:
        known = " or ".join(map(repr, STOCK_IMPLEMENTATIONS))
        raise refusal(model, f"it uses the attention implementation {name!r}; set_attn_implementation({known}) first")


def failure_reason(model: PreTrainedModel, error: Exception) -> str:
    """Say why the model failed on a small made-up input, in words where they are known."""
    places: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if calls_interface(type(module)):
            places.setdefault(module, []).append(path)
    if shared := next((paths for paths in places.values() if len(paths) > 1), None):
        return (
            f"one module is {' and '.join(shared)}, so that both write to one place in the cache, and a small made-up "
            f"input fails ({error}); give each place a copy with a `layer_idx` of its own"
        )
    wanted = [name for name in _INPUTS if name in inspect.signature(model.forward).parameters]
    parts = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    if len(wanted) > 1 and parts:
        return (
            f"it takes {' and '.join(wanted)} at once, and only one of them can be made up; add gates to its parts, "
            f"{' and '.join(f'model.{name}' for name in parts)}"
        )
    return f"a small made-up input fails: {error}"


def require_reached(model: PreTrainedModel, layers: Sequence[AttentionLayout]) -> None:
    """Refuse a model with an attention module that the probe did not reach as self-attention."""
    reached = {layer.module for layer in layers}
    missed = [name for name, module in model.named_modules() if calls_interface(type(module)) and module not in reached]
    if missed:
        raise refusal(
            model,
            f"a plain input does not come to the attention function of {', '.join(missed)}, or not as self-attention, "
            "or without the keywords of the module's call",
        )


def require_gateable(model: PreTrainedModel, layers: Sequence[AttentionLayout], gates: Gates) -> None:
    """Refuse gates of which one layer lacks what they gate or read."""
    for layer in layers:
        if GATES_NAME in dict(layer.module.named_children()):
            raise refusal(model, f"{layer.name} has a child {GATES_NAME!r} already; remove_gates(model) first")
        for gate in gates:
            if (reason := _objection(layer, gate) or _sharing_objection(model, layer, gate)) is not None:
                raise refusal(model, f"{gate} does not fit {layer.name}, where {reason}")


def _objection(layer: AttentionLayout, gate: Gate) -> str | None:
    parts: dict[str, PartKind] = {"query": "query", "key": "key", "value": "value"}
    for needed in (gate.site, gate.reads):
        if needed in parts and parts[needed] not in layer.parts:
            return f"no single projection of the layer's input gives the {needed}"
    if gate.site == "dense" and layer.output is None:
        return "no projection takes the attention output as it is"
    if gate.site in parts and gate.reads in parts:
        site, reads = layer.parts[parts[gate.site]], layer.parts[parts[gate.reads]]
        if site.order < reads.order:
            return f"the {gate.site} is projected before the {gate.reads} is there to read"
    return None


def _sharing_objection(model: PreTrainedModel, layer: AttentionLayout, gate: Gate) -> str | None:
    slots: dict[str, Slot | None] = {kind: part.slot for kind, part in layer.parts.items()}
    hooked = {**slots, "dense": layer.output}
    for needed in (gate.site, gate.reads):
        slot = hooked.get(needed)
        places = [] if slot is None else places_of_module(model, slot.module)
        if len(places) > 1:
            return f"one module is {' and '.join(places)}; give each place a copy of its own"
    return None


def places_of_module(model: nn.Module, module: nn.Module) -> list[str]:
    """List the paths at which a module stands; a layer that runs several times has one."""
    return list(_places(model, lambda child: child is module))


def places_of_weights(model: nn.Module, module: nn.Module) -> list[str]:
    """List the paths of all modules that share a parameter with this one, its own included."""
    own = list(module.parameters(recurse=False))
    return list(
        _places(model, lambda child: any(_share_memory(a, b) for a in child.parameters(recurse=False) for b in own)),
    )


def _places(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[str]:
    for path, owner in model.named_modules():
        for name, child in owner._modules.items():
            if child is not None and wanted(child):
                yield f"{path}.{name}" if path else name


def _share_memory(ours: Tensor, theirs: Tensor) -> bool:
    return ours is theirs or (ours.data_ptr() == theirs.data_ptr() != 0)
