"""Refuse models and layers that cannot take a gate, or whose gate cannot be merged, and say why."""

# A module that stands in several places: `named_children` gives the first alone.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
from tidegate.torch.retrofit.layout import AttentionLayout, Part, PartKind, Slot


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
    if (name := stock_implementation(implementation_in(model))) not in STOCK_IMPLEMENTATIONS:
        known = " or ".join(map(repr, STOCK_IMPLEMENTATIONS))
        raise refusal(model, f"it uses the attention implementation {name!r}; set_attn_implementation({known}) first")
    if hasattr(model.base_model, "set_attention_type"):
        raise refusal(model, "it exchanges its attention modules as its inputs grow, and gates would be lost")


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
    return f"a small made-up input fails: {error}"


def require_reached(model: PreTrainedModel, layers: Sequence[AttentionLayout]) -> None:
    """Refuse a model without an attention module that the probe reached."""
    if layers:
        return
    if any(calls_interface(type(module)) for module in model.modules()):
        raise refusal(model, "a small made-up input comes to none of its attention modules")
    raise refusal(
        model,
        "none of its modules calls attention through transformers' ALL_ATTENTION_FUNCTIONS, and none takes a softmax "
        "over keys, multiplies it by values and hands the heads to an output projection as they are",
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
    if layer.cross and gate.needs_self_attention:
        return f"attention goes to something else than the input, and a key's position has no {gate.reads}"
    for needed in (gate.site, gate.reads):
        if needed in parts and parts[needed] not in layer.parts:
            return f"no single projection gives the {needed} with columns for each head, as wide as the heads' outputs"
        if needed == gate.site in parts and (reason := _cache_objection(layer.parts[parts[needed]], gate)):
            return reason
    if gate.site == "dense" and layer.output is None:
        return "no projection takes the attention output as it is"
    if "output" in (gate.site, gate.reads) and not layer.in_function and layer.output is None:
        return (
            "no projection takes the attention output as it is, and the model goes by the name of its attention "
            "implementation, so that no gate can act inside that"
        )
    if gate.site in parts:
        return _part_objection(layer, gate, parts[gate.site])
    reads = layer.parts[parts[gate.reads]] if gate.reads in parts else None
    if reads is not None and reads.spans_cache:
        return f"the {gate.reads} is made anew for all positions of the cache, and not for the current one alone"
    return None


def _part_objection(layer: AttentionLayout, gate: Gate, kind: PartKind) -> str | None:
    site = layer.parts[kind]
    if twin := next((other for other in layer.parts if other != kind and _overlap(site, layer.parts[other])), None):
        return f"the {kind} and the {twin} are the same numbers, and a gate on one would act on both"
    reads = next((part for other, part in layer.parts.items() if other == gate.reads), None)
    if reads is not None and site.order < reads.order:
        return f"the {kind} is projected before the {gate.reads} is there to read"
    return None


def _cache_objection(site: Part, gate: Gate) -> str | None:
    if not site.spans_cache or gate.reads in ("nothing", gate.site):
        return None
    return (
        f"the {gate.site} is made anew from the cache for all its positions, and only the current one has "
        f"{'an' if gate.reads == 'input' else 'a'} {gate.reads} to read"
    )


def _overlap(ours: Part, theirs: Part) -> bool:
    columns = ({column for head in part.columns.heads() for column in head} for part in (ours, theirs))
    return ours.slot == theirs.slot and not set.isdisjoint(*columns)


def _sharing_objection(model: PreTrainedModel, layer: AttentionLayout, gate: Gate) -> str | None:
    slots: dict[str, Slot | None] = {kind: part.slot for kind, part in layer.parts.items()}
    hooked = {**slots, "dense": layer.output} | ({} if layer.in_function else {"output": layer.output})
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
