"""Differentiate layers exactly with PyTorch, and find the attention layers of its models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tidegate._validation import InputError
from tidegate.experts.canonical import canonical_layer
from tidegate.experts.layers import Floats
from tidegate.tensors.layer import AttentionArrays
from tidegate.torch.attention import PROJECTIONS, GatedAttention, bias_by_head, weight_by_head
from tidegate.torch.kernel import load_forward_mode

_CHUNK = 256
"""Directions per chunk; memory is proportional to it."""
_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoundLayer:
    """An attention layer inside a model."""

    name: str
    arrays: AttentionArrays
    """Views of the module's parameters: writing to them changes the module."""
    query_side_known: bool
    """Whether the arrays describe the query side; for foreign modules only the value side is known."""


def layer_jacobian(layer: AttentionArrays, x: Floats, entries: Mapping[str, Any]) -> dict[str, Floats]:
    """Differentiate all outputs by some of the layer's parameters, in forward mode and float64.

    Args:
        layer: A layer of NumPy arrays.
        x: (..., T, d).
        entries: Flat indices of the entries to differentiate by, by name as in `layer.parameters()`.

    Returns:
        (outputs, number of entries) by name.
    """
    own = {name: torch.tensor(np.asarray(array), dtype=torch.float64) for name, array in layer.parameters().items()}
    inputs = torch.tensor(x, dtype=torch.float64)
    places = {name: torch.tensor(np.asarray(indices)) for name, indices in entries.items()}
    sizes = [len(indices) for indices in places.values()]

    def split_by_name(flat: Any) -> dict[str, Tensor]:
        return dict(zip(places, flat.split(sizes), strict=True))

    def output(flat: Tensor) -> Tensor:
        moved = {
            name: own[name].flatten().index_copy(0, places[name], part).view(own[name].shape)
            for name, part in split_by_name(flat).items()
        }
        return layer.with_parameters(own | moved)(inputs).flatten()

    def slope(direction: Tensor) -> Tensor:
        return torch.func.jvp(output, (point,), (direction,))[1]

    load_forward_mode()
    point = torch.cat([own[name].flatten()[indices] for name, indices in places.items()])
    columns = torch.func.vmap(slope, chunk_size=_CHUNK)(torch.eye(len(point), dtype=torch.float64))
    return {name: part.numpy().T for name, part in split_by_name(columns).items()}


def attention_layers(model: Any) -> list[FoundLayer]:
    """List the attention layers of a model in order: ours by type, others by their four projections.

    A Llama-like module has linear `q_proj`, `k_proj`, `v_proj` and `o_proj`, optionally `q_norm` and `k_norm`, and no
    other parameters, which could act between value and output.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be AttentionArrays or a PyTorch module; got {type(model).__name__}.")
    found = list(_walk(model, ""))
    if not found:
        expected = f"a model with attention layers: GatedAttention, or modules with {', '.join(PROJECTIONS)}"
        raise InputError("model", expected=expected, got=type(model).__name__)
    return found


@torch.no_grad()
def canonical_model(model: Any) -> Any:
    """Copy the model with every attention layer at its canonical parameters, computed in float64."""
    result = copy.deepcopy(model)
    for layer in attention_layers(result):
        canonical = canonical_layer(layer.arrays, query_side=layer.query_side_known).parameters()
        for name, view in layer.arrays.parameters().items():
            view.copy_(torch.tensor(canonical[name]))
    return result


@torch.no_grad()
def attention_inputs(model: Any, tokens: Any) -> list[tuple[str, AttentionArrays, Floats]]:
    """Run the model on the tokens; return name, arrays and input (B, T, M) of every `GatedAttention` layer."""
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, GatedAttention)]
    if not layers:
        raise InputError("model", expected="a model with GatedAttention layers", got=type(model).__name__)
    inputs: dict[str, Tensor] = {}

    def keep_as(name: str) -> Any:
        def keep(_module: object, given: tuple[Tensor, ...]) -> None:
            inputs[name] = given[0].clone()

        return keep

    hooks = [layer.register_forward_pre_hook(keep_as(name)) for name, layer in layers]
    training = model.training
    try:
        model.eval()
        model(tokens)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return [(name, layer.arrays(), inputs[name].double().cpu().numpy()) for name, layer in layers]


def _walk(module: nn.Module, name: str) -> Iterator[FoundLayer]:
    if isinstance(module, GatedAttention):
        yield FoundLayer(name=name, arrays=module.arrays(), query_side_known=True)
    elif all(isinstance(getattr(module, projection, None), nn.Linear) for projection in PROJECTIONS):
        yield FoundLayer(name=name, arrays=_foreign_arrays(module, name), query_side_known=False)
    else:
        for child_name, child in module.named_children():
            yield from _walk(child, f"{name}.{child_name}" if name else child_name)


def _foreign_arrays(module: nn.Module, name: str) -> AttentionArrays:
    known = (*PROJECTIONS, *_NORMS)
    if strange := [own for own, _ in module.named_parameters() if own.split(".")[0] not in known]:
        expected = f"a model whose attention {name!r} has only projections and norms as parameters"
        raise InputError("model", expected=expected, got=", ".join(strange))
    q, k, v, o = (cast("nn.Linear", getattr(module, projection)) for projection in PROJECTIONS)
    width = getattr(module, "head_dim", None)
    if not isinstance(width, int) or q.out_features != o.in_features or k.out_features != v.out_features:
        raise InputError(
            "model",
            expected=f"a model whose attention {name!r} has an integer head_dim, a query as wide as its output "
            "projection reads, and a key as wide as its value",
            got={"head_dim": width, "q": q.out_features, "k": k.out_features, "v": v.out_features, "o": o.in_features},
        )
    return AttentionArrays(
        W_Q=weight_by_head(q.weight, width),
        W_K=weight_by_head(k.weight, width),
        W_V=weight_by_head(v.weight, width),
        W_O=o.weight.t().unflatten(0, (-1, width)),
        b_Q=bias_by_head(q.bias, width),
        b_K=bias_by_head(k.bias, width),
        b_V=bias_by_head(v.bias, width),
        b_O=o.bias,
    )
