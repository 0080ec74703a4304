"""Find all attention of a model that gates can act on, and the reasons why the rest cannot have gates."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tidegate.torch.retrofit.checks import require_attention
from tidegate.torch.retrofit.decomposed import find_decomposed_attention
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
from tidegate.torch.retrofit.layout import AttentionLayout
from tidegate.torch.retrofit.probe import (
    answer_in_two,
    answers,
    bitwise_equal,
    evaluation_mode,
    has_cache,
    keep_random_state,
)

NOT_REACHED = "a plain input does not reach it, or the model runs it without gradients"
UNFIT = "its attention is decomposed, and its heads are not the input of an output projection unchanged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The attention modules of a model."""

    layers: tuple[AttentionLayout, ...]
    """Those that a small input has reached, in the order in which they run."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """The paths of the others, and why they cannot take gates."""


def survey_attention(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Survey:
    """Find the attention modules of a model by sending an input through it.

    Raises:
        InputError: If the input reaches none.
    """
    with evaluation_mode(model), keep_random_state(model):
        calling = {module: name for name, module in model.named_modules() if calls_interface(type(module))}
        found = _find_on_interface(model, inputs) if calling else []
        known = {layer.module for layer in found}
        decomposed, unfit = find_decomposed_attention(model, lambda: model(**inputs), known=known)
        found += [replace(layer, in_function=False) for layer in decomposed]
        require_attention(model, found)
        layers = _note_cache(model, inputs, found)
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
    with implementation(model, gated_implementation(stock_implementation(implementation_in(model)))):
        found = find_attention(model, lambda: model(**inputs))
    for layer in found:
        remember_functions(type(layer.module))
    in_function = _supports_gated_twin(model, inputs)
    return [replace(layer, in_function=in_function) for layer in found]


def _supports_gated_twin(model: PreTrainedModel, inputs: dict[str, Tensor]) -> bool:
    """Return whether the gated implementation, without gates, computes what the stock one does.

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
    model: PreTrainedModel, inputs: dict[str, Tensor], layers: list[AttentionLayout]
) -> tuple[AttentionLayout, ...]:
    """Note which projections are given all positions of a cache when a single one is new."""
    inner = {part.slot.module for layer in layers for part in layer.parts.values() if part.source == "inner"}
    if not inner or not has_cache(model, inputs):
        return tuple(layers)
    lengths: dict[nn.Module, int] = {}

    def note(module: nn.Module, _args: Any, output: Tensor) -> None:
        lengths[module] = output.shape[-2]

    with ExitStack() as stack:
        for projection in inner:
            stack.enter_context(projection.register_forward_hook(note))
        # The last length counts: that of the pass over one new position.
        list(answer_in_two(model, inputs))
    return tuple(
        replace(
            layer,
            parts={
                kind: replace(part, spans_cache=lengths.get(part.slot.module, 0) > 1)
                for kind, part in layer.parts.items()
            },
        )
        for layer in layers
    )
