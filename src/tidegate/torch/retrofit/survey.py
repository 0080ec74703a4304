"""Find all attention of a model that gates can act on, and say what is left alone and why."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tidegate.torch.retrofit.flow import find_attention
from tidegate.torch.retrofit.interface import (
    calls_interface,
    gated_implementation,
    implementation_in,
    keeps_to_stock,
    remember_functions,
    stock_implementation,
)
from tidegate.torch.retrofit.layer import gated_layers
from tidegate.torch.retrofit.layout import AttentionLayout, Part
from tidegate.torch.retrofit.probe import (
    answer_in_two,
    answers,
    bitwise_equal,
    evaluation_mode,
    has_cache,
    keep_random_state,
)
from tidegate.torch.retrofit.refusal import require_reached
from tidegate.torch.retrofit.spelled import find_spelled_attention

NOT_REACHED = "a plain input does not come there, or the model runs it without gradients"

UNFIT = "it spells out its attention, and its heads come to no output projection as they are"


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The attention modules of a model."""

    layers: tuple[AttentionLayout, ...]
    """Those that a small input has reached, in the order in which they run."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """The paths of the others, and why they cannot take gates."""


def survey_attention(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Survey:
    """Find the attention modules of a model by sending an input through it.

    Raises a `ValueError` if it reaches none.
    """
    with evaluation_mode(model), keep_random_state(model):
        found = _find_on_interface(model, inputs)
        calling = {module: name for name, module in model.named_modules() if calls_interface(type(module))}
        known = {layer.module for layer in found}
        spelled, unfit = find_spelled_attention(model, lambda: model(**inputs), known=known)
        found += [replace(layer, in_function=False) for layer in spelled]
        require_reached(model, found)
        layers = tuple(_note_cache(model, inputs, found))
    reached = {layer.module for layer in layers}
    left_out = {name: NOT_REACHED for module, name in calling.items() if module not in reached}
    return Survey(layers=layers, left_out=left_out | dict.fromkeys(unfit, UNFIT))


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Generator[None]:
    """Switch the model to another attention implementation for a while."""
    before = implementation_in(model)
    if name == before:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _find_on_interface(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[AttentionLayout]:
    if not any(calls_interface(type(module)) for module in model.modules()):
        return []
    with implementation(model, gated_implementation(stock_implementation(implementation_in(model)))):
        found = find_attention(model, lambda: model(**inputs))
    for layer in found:
        remember_functions(type(layer.module))
    in_function = _bears_gated_twin(model, inputs)
    return [replace(layer, in_function=in_function) for layer in found]


def _bears_gated_twin(model: PreTrainedModel, inputs: dict[str, Tensor]) -> bool:
    """Tell whether the gated implementation, without gates, does what the stock one does.

    Some modules compare the name of the implementation with those that they know.
    """
    if any(layer.acts_in_function for layer in gated_layers(model)):
        return True
    if any(keeps_to_stock(type(module)) for module in model.modules()):
        return False
    stock = stock_implementation(implementation_in(model))
    with implementation(model, stock):
        before = answers(model, inputs)
    with implementation(model, gated_implementation(stock)):
        return bitwise_equal(answers(model, inputs), before)


def _note_cache(
    model: PreTrainedModel, inputs: dict[str, Tensor], layers: Sequence[AttentionLayout]
) -> Generator[AttentionLayout]:
    """Note which projections run over all positions of a cache."""
    inner = [part for layer in layers for part in layer.parts.values() if part.source == "inner"]
    spanning = _spanning_cache(model, inputs, inner) if inner and has_cache(model, inputs) else set[nn.Module]()
    for layer in layers:
        parts = {kind: replace(part, spans_cache=part.slot.module in spanning) for kind, part in layer.parts.items()}
        yield replace(layer, parts=parts)


def _spanning_cache(model: PreTrainedModel, inputs: dict[str, Tensor], parts: Sequence[Part]) -> set[nn.Module]:
    """Return the projections that are given more than one position when a single one is new."""
    lengths: dict[nn.Module, int] = {}

    def note(module: nn.Module, _args: Any, output: Tensor) -> None:
        lengths[module] = output.shape[-2]

    handles = [module.register_forward_hook(note) for module in {part.slot.module for part in parts}]
    try:
        for _ in answer_in_two(model, inputs):
            pass
    finally:
        for handle in handles:
            handle.remove()
    return {module for module, length in lengths.items() if length > 1}
