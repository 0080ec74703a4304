"""Add gates to a loaded Hugging Face model, in place, and remove them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tidegate._text import list_some
from tidegate._validation import InputError
from tidegate.gate import Activation, Gate
from tidegate.gates import GateLike, Gates
from tidegate.torch.gate import AttentionGates
from tidegate.torch.retrofit.checks import cannot_gate, explain_failure, require_fitting, require_model
from tidegate.torch.retrofit.interface import (
    gated_implementation,
    implementation_in,
    stock_implementation,
    supported_implementations,
)
from tidegate.torch.retrofit.layer import GatedLayer, gated_layers
from tidegate.torch.retrofit.layout import AttentionLayout
from tidegate.torch.retrofit.probe import (
    answers,
    bitwise_equal,
    evaluation_mode,
    keep_random_state,
    largest_change,
    probe_inputs,
)
from tidegate.torch.retrofit.record import record_gates
from tidegate.torch.retrofit.survey import Survey, implementation, survey_attention
from tidegate.torch.retrofit.wrappers import unwrap_model

_CROSSING = "cross-attention has no query at the positions of its keys"
_NEUTRAL: dict[str, tuple[Activation, ...]] = {"multiply": ("tanh1", "twosigmoid"), "add": ("identity", "silu")}
"""The activations whose value at zero changes nothing: 1 for a gate that multiplies, 0 for one that adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrofitReport:
    """The layers that have gates now, and a comparison of the probe's answers before and after."""

    model: str
    """The model's class."""
    gates: str
    """Their spelling."""
    layers: tuple[str, ...]
    """The paths of the gated attention modules."""
    num_parameters: int
    """Numbers that the gates added to the model."""
    implementations: tuple[str, ...]
    """The attention implementations that the probe was run with."""
    dtype: str
    """The dtype that the probe was run in, the model's own."""
    bitwise_equal: bool
    """Whether the probe's answers have the same bits as before."""
    largest_change: float
    """The largest difference between the answers; 0 if they are bitwise equal."""
    left_alone: dict[str, str] = field(default_factory=dict[str, str])
    """The paths of attention modules that have no gates, and why: other parts of the model, unused cross-attention."""

    def __str__(self) -> str:
        """Return two lines, and a third if some attention was left alone."""
        found = (
            "gave the same bits as before"
            if self.bitwise_equal
            else f"changed by up to {self.largest_change:.3g}, since these gates do not start at the identity"
        )
        text = (
            f"{self.model}: {self.gates} in {len(self.layers)} layers, {self.num_parameters:,} parameters.\n"
            f"A padded probe in {self.dtype}, with {' and '.join(self.implementations)}, {found}."
        )
        if not self.left_alone:
            return text
        first, *others = self.left_alone
        names = f"{first} and {len(others)} more" if others else first
        return f"{text}\nLeft alone: {names} ({'; '.join(sorted(set(self.left_alone.values())))})."


def add_gates(
    model: nn.Module,
    gate: GateLike = "g1",
    activation: Activation | None = "twosigmoid",
    layers: Iterable[int | str] | None = None,
) -> RetrofitReport:
    """Give the attention of a loaded model gates, in place.

    With an activation that is exactly 1 at zero, `twosigmoid` or `tanh1`, the gates start at zero and the model's
    answers keep their bits; a probe makes sure, and if it fails the gates are removed again. With another activation
    the gates start as they are spelled, and the report says how much the probe's answers changed. Gates are children
    `attn_gate` of the attention modules, trainable, with the device and dtype of the layer's weights. After an error
    the model is as it was. Gates that start at random are drawn by PyTorch's global generator, whose state afterwards
    is the one before.

    A gate at the output acts inside an attention implementation of its own, or before the output projection where a
    model decomposes its attention or depends on the implementation's name. The model's modules are given a copy of
    their configuration, where the gates are written down, so that other models that were built from the same object
    stay as they are; `model.name_or_path` is empty as long as there are gates, since what has that name has none.

    Gates go where a small made-up input comes: tokens, images or sound, to an encoder and its decoder. Cross-attention
    takes those that can act there. The report names the attention modules that were left alone.

    Args:
        model: A model of transformers, or adapters around one.
        gate: A spelling such as `"g1"` or `"bma+g1"`, a `Gate`, or several.
        activation: The activation of all the gates; None leaves each as it is spelled.
        layers: The model's attention modules that get gates, by number, counted from 0 in the order in which they run,
            or by path as in `report.layers`; None is all. Other layers can be given other gates later.

    Returns:
        The gated layers, and the result of the probe.

    Raises:
        InputError: If the model cannot take these gates; the hint gives the reason.
    """
    gates = starting_gates(gate, activation)
    base = unwrap_model(model)
    require_model(base)
    inputs = probe_inputs(base)
    with evaluation_mode(base), keep_random_state(base):
        before = _answers_before(base, inputs)
        survey = survey_attention(base, inputs)
        added = _install(model, gates, _choose_layouts(survey, gates, layers))
        try:
            after = {stock: _answers_with(base, stock, inputs) for stock in before}
            equal = all(bitwise_equal(after[name], before[name]) for name in before)
            change = 0.0 if equal else max(largest_change(after[name], before[name]) for name in before)
            if not equal and all(map(_is_neutral, gates)):
                raise cannot_gate(base, f"with {gates}, which is neutral, its answers changed by up to {change:.3g}")
        except BaseException:
            _remove(base, added)
            raise
    # The layers were in evaluation mode until now.
    for layer in added:
        layer.modules.train(layer.layout.module.training)
    gated = {layer.layout.module for layer in gated_layers(base)}
    crossing = {layer.name: _CROSSING for layer in survey.layers if layer.cross and layer.module not in gated}
    return RetrofitReport(
        model=type(base).__name__,
        gates=str(gates),
        layers=tuple(layer.layout.name for layer in added),
        num_parameters=sum(weight.numel() for layer in added for weight in layer.modules.parameters()),
        implementations=tuple(before),
        dtype=str(base.dtype).removeprefix("torch."),
        bitwise_equal=equal,
        largest_change=change,
        left_alone={**survey.left_out, **crossing},
    )


def install_gates(model: nn.Module, layers: dict[str, Gates]) -> None:
    """Add gates to the layers at these paths as they are, without comparing the model's answers."""
    base = unwrap_model(model)
    require_model(base)
    with keep_random_state(base):
        for gates in dict.fromkeys(layers.values()):
            paths = [path for path, own in layers.items() if own == gates]
            _install(model, gates, _choose_layouts(survey_attention(base, probe_inputs(base)), gates, paths))


def _install(model: nn.Module, gates: Gates, chosen: Sequence[AttentionLayout]) -> list[GatedLayer]:
    base = unwrap_model(model)
    require_fitting(base, chosen, gates)
    added = {GatedLayer(layout, gates): _new_gates(base, layout, gates) for layout in chosen}
    if not any(gated_layers(base)):
        _copy_configuration(model)
    if any(layer.acts_in_function for layer in added):
        base.set_attn_implementation(gated_implementation(stock_implementation(implementation_in(base))))
    for layer, modules in added.items():
        layer.install(modules)
    record_gates(base)
    return list(added)


def remove_gates(model: nn.Module) -> None:
    """Remove all gates: the model is as it was before, with its stock attention implementation.

    A model without gates stays as it is.

    Args:
        model: A model of transformers, or adapters around one.
    """
    base = unwrap_model(model)
    _remove(base, list(gated_layers(base)))


def _remove(model: PreTrainedModel, layers: Sequence[GatedLayer]) -> None:
    for layer in layers:
        layer.remove()
    if not layers:
        return
    now = implementation_in(model)
    acts_in_function = any(layer.acts_in_function for layer in gated_layers(model))
    if not acts_in_function and now != stock_implementation(now):
        model.set_attn_implementation(stock_implementation(now))
    record_gates(model)


def _copy_configuration(model: nn.Module) -> None:
    """Give the modules of a model a copy of their configuration, the same to all that share one."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def _answers_before(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the model's answers by stock implementation: its own, and every other that runs."""
    own = stock_implementation(implementation_in(model))
    found: dict[str, list[Tensor]] = {}
    for stock in supported_implementations(model):
        try:
            found[stock] = _answers_with(model, stock, inputs)
        except Exception as error:
            # A model may raise anything for an input that it cannot take.
            if stock == own:
                raise explain_failure(model, error) from error
    return found


def _answers_with(model: PreTrainedModel, stock: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the model's answers with a stock implementation, or with its gated twin if a gate needs that."""
    gated = implementation_in(model) != stock_implementation(implementation_in(model))
    with implementation(model, gated_implementation(stock) if gated else stock):
        return answers(model, inputs)


def _choose_layouts(survey: Survey, gates: Gates, layers: Iterable[int | str] | None) -> list[AttentionLayout]:
    """Return the requested layers; by default those whose kind of attention these gates can act on."""
    found = survey.layers
    if layers is None:
        needs_self_attention = any(gate.needs_self_attention for gate in gates)
        return [layer for layer in found if not (layer.cross and needs_self_attention)] or list(found)
    if isinstance(layers, int | str):
        raise TypeError(f"layers must be a list of numbers or paths, such as [{layers!r}]; got {layers!r}.")
    known: dict[int | str, AttentionLayout] = {**dict(enumerate(found)), **{layer.name: layer for layer in found}}
    wanted = list(layers)
    wrong = [layer for layer in wanted if isinstance(layer, bool) or layer not in known]
    if wrong or not wanted:
        paths = list_some([layer.name for layer in found])
        raise InputError(
            "layers",
            expected=f"numbers from 0 to {len(found) - 1} or paths, at least one",
            got=wrong or wanted,
            hint=f"The paths are {paths}.",
        )
    return list({known[layer].name: known[layer] for layer in wanted}.values())


def _new_gates(model: PreTrainedModel, layout: AttentionLayout, gates: Gates) -> AttentionGates:
    """Make gates with the device and dtype of the layer's weights; float32 if these are quantized."""
    weights = list(layout.module.parameters())
    # Dynamically quantized layers have no parameters.
    device = weights[0].device if weights else model.device
    dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)
    modules = AttentionGates(gates, layout.shape, device=device, dtype=dtype)
    return modules.train(layout.module.training)


def starting_gates(gate: GateLike, activation: Activation | None) -> Gates:
    """Return the gates with this activation, started at zero if they change nothing there.

    A bias stays, but starts at zero too. The activation None leaves each gate as it is spelled.
    """
    gates = Gates.parse(gate)
    if not gates:
        raise InputError("gate", expected="at least one gate", got=gate, hint="Write for example 'g1' or 'bma'.")
    suitable = "a gate that can be added to a trained model"
    if (sink := gates.at("partition")) is not None:
        raise InputError(
            "gate",
            expected=suitable,
            got=str(sink),
            hint="A closed sink keeps the answers, but has no gradient and never opens; an open one changes them. "
            "Train with the sink from the start, or add another gate, such as 'g1'.",
        )
    if control := next((each for each in gates if each.placebo is not None or each.op == "replace"), None):
        hint = f"Controls train from the start; as a control for added gates use '{control.site}:nothing'."
        raise InputError("gate", expected=suitable, got=str(control), hint=hint)
    if activation is None:
        return gates
    if activation not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise InputError("activation", expected=f"one of {known}, or None for the gate's own", got=activation)
    return Gates(_start_neutral(replace(each, activation=activation)) for each in gates)


def _is_neutral(gate: Gate) -> bool:
    """Return whether the gate, as it starts, changes nothing."""
    starts_at_zero = (gate.init_std == 0 or not gate.has_matrix) and not gate.bias
    return gate.activation in _NEUTRAL[gate.op] and starts_at_zero


def _start_neutral(gate: Gate) -> Gate:
    if gate.activation not in _NEUTRAL[gate.op]:
        return gate
    bias = None if gate.bias is None else 0.0
    return replace(gate, init_std=0.0, bias=bias) if gate.has_matrix else replace(gate, bias=bias)
