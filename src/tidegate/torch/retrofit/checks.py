"""Check which gates a model and its layers support."""

# `named_children` yields a module that has several places only once.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tidegate._validation import InputError
from tidegate.gate import Gate
from tidegate.gates import Gates
from tidegate.torch.retrofit.interface import (
    STOCK_IMPLEMENTATIONS,
    calls_interface,
    implementation_in,
    stock_implementation,
)
from tidegate.torch.retrofit.layer import GATES_NAME
from tidegate.torch.retrofit.layout import AttentionLayout, Part, Slot


def cannot_gate(model: nn.Module, reason: str) -> InputError:
    """Return the error with the reason why a model cannot take gates."""
    hint = f"{reason[:1].upper()}{reason[1:]}."
    return InputError("model", expected="one that can take these gates", got=type(model).__name__, hint=hint)


def require_model(model: PreTrainedModel) -> None:
    """Raise InputError for a model that cannot take gates, as far as that is known without running it."""
    if torch.is_inference_mode_enabled():
        raise cannot_gate(model, "its projections are found by gradients; leave torch.inference_mode() first")
    if any(weight.is_meta for weight in model.parameters()):
        raise cannot_gate(
            model, "some of its weights are on the meta device and have no values; load the whole model onto a device"
        )
    require_whole_weights(model, "New gates would not be sharded. Add gates first, then call fully_shard.")
    if (name := stock_implementation(implementation_in(model))) not in STOCK_IMPLEMENTATIONS:
        known = " or ".join(map(repr, STOCK_IMPLEMENTATIONS))
        raise cannot_gate(
            model, f"it uses the attention implementation {name!r}; call model.set_attn_implementation({known}) first"
        )
    if hasattr(model.base_model, "set_attention_type"):
        raise cannot_gate(model, "it replaces its attention modules as its inputs grow, and gates would be lost")


def require_whole_weights(model: PreTrainedModel, hint: str) -> None:
    """Raise InputError if weights are sharded, as by fully_shard or FullyShardedDataParallel."""
    # DTensors exist only after this import, which takes a tenth of a second. FullyShardedDataParallel marks weights.
    sharded: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if any(isinstance(weight, sharded) or hasattr(weight, "_fsdp_flattened") for weight in model.parameters()):
        raise InputError("model", expected="one whose weights are not sharded", got=type(model).__name__, hint=hint)


def explain_failure(model: PreTrainedModel, error: Exception) -> InputError:
    """Return the error for a model that failed on the probe's input."""
    places: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if calls_interface(type(module)):
            places.setdefault(module, []).append(path)
    if shared := next((paths for paths in places.values() if len(paths) > 1), None):
        return cannot_gate(
            model,
            f"one module is {' and '.join(shared)}, so that both write to the same place in the cache and a small "
            f"synthetic input fails ({error}); give each place a copy with its own `layer_idx`",
        )
    return cannot_gate(model, f"a small synthetic input fails: {error}")


def require_attention(model: PreTrainedModel, layers: Sequence[AttentionLayout]) -> None:
    """Raise InputError for a model in which the probe reached no attention module."""
    if layers:
        return
    if any(calls_interface(type(module)) for module in model.modules()):
        raise cannot_gate(model, "a small synthetic input reaches none of its attention modules")
    raise cannot_gate(
        model,
        "none of its modules calls attention through transformers' ALL_ATTENTION_FUNCTIONS, and none takes a softmax "
        "over keys, multiplies it by values and passes the heads to an output projection unchanged",
    )


def require_fitting(model: PreTrainedModel, layers: Sequence[AttentionLayout], gates: Gates) -> None:
    """Raise InputError for gates whose site or input a layer does not have."""
    for layer in layers:
        if GATES_NAME in dict(layer.module.named_children()):
            raise cannot_gate(
                model, f"the module {layer.name} already has a child {GATES_NAME!r}; call remove_gates(model) first"
            )
        for gate in gates:
            if (reason := next(_obstacles(model, layer, gate), None)) is not None:
                raise cannot_gate(model, f"the gate {gate} does not fit {layer.name}, where {reason}")


def _obstacles(model: PreTrainedModel, layer: AttentionLayout, gate: Gate) -> Iterator[str]:
    """Yield the reasons why a gate does not fit; each assumes that those before do not hold."""
    if layer.cross and gate.needs_self_attention:
        yield f"attention goes to something else than the input, and a key's position has no {gate.reads}"
    yield from _missing_parts(layer, gate.site, gate.reads)
    yield from _conflicts({**layer.parts}, gate.site, gate.reads)
    hooked: dict[str, Slot | None] = {kind: part.slot for kind, part in layer.parts.items()}
    hooked |= {"dense": layer.output} | ({} if layer.in_function else {"output": layer.output})
    for slot in (hooked.get(gate.site), hooked.get(gate.reads)):
        places = [] if slot is None else find_places(model, lambda child, own=slot.module: child is own)
        if len(places) > 1:
            yield f"one module is {' and '.join(places)}; give each place a copy of its own"


def _missing_parts(layer: AttentionLayout, site: str, reads: str) -> Iterator[str]:
    parts: dict[str, Part] = {**layer.parts}
    for needed in (site, reads):
        if needed in ("query", "key", "value") and needed not in parts:
            yield f"no single projection gives the {needed} with columns for each head, as wide as the heads' outputs"
        if needed == site in parts and parts[site].spans_cache and reads not in ("nothing", site):
            yield (
                f"the {site} is recomputed from the cache for all its positions, and only the current one has "
                f"{'an' if reads == 'input' else 'a'} {reads} to read"
            )
    if site == "dense" and layer.output is None:
        yield "no projection takes the attention output unchanged"
    if "output" in (site, reads) and not layer.in_function and layer.output is None:
        yield (
            "no projection takes the attention output unchanged, and the model depends on the name of its attention "
            "implementation, so that no gate can act inside that"
        )


def _conflicts(parts: dict[str, Part], site: str, reads: str) -> Iterator[str]:
    own, other = parts.get(site), parts.get(reads)
    if own is None:
        if other is not None and other.spans_cache:
            yield f"the {reads} is recomputed for all positions of the cache, not only for the current one"
        return
    columns = set(chain(*own.columns.heads()))
    for kind, part in parts.items():
        if kind != site and part.slot == own.slot and not columns.isdisjoint(chain(*part.columns.heads())):
            yield f"the {site} and the {kind} are the same numbers, and a gate on one would act on both"
    if other is not None and own.order < other.order:
        yield f"the {site} is projected before the {reads}, which cannot be read yet"


def find_places(model: nn.Module, matches: Callable[[nn.Module], bool]) -> list[str]:
    """List the paths of the modules that match, one for each place of a shared module; a cycle counts once."""
    return [
        f"{path}.{name}" if path else name
        for path, owner in model.named_modules()
        for name, child in owner._modules.items()
        if child is not None and matches(child)
    ]
