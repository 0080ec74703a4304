"""Put gates into a loaded Hugging Face model, in place, and take them out again."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tidegate.gate import Activation, Gate
from tidegate.gates import GateLike, Gates
from tidegate.torch.gate import AttentionGates
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
from tidegate.torch.retrofit.refusal import (
    failure_reason,
    refusal,
    require_gateable,
    require_model,
)
from tidegate.torch.retrofit.survey import Survey, implementation, survey_attention
from tidegate.torch.retrofit.wrappers import unwrap_model

_CROSSING = "cross-attention has no query at the positions of its keys"
_NEUTRAL: dict[str, tuple[Activation, ...]] = {"multiply": ("tanh1", "twosigmoid"), "add": ("identity", "silu")}
"""The activations whose value at zero changes nothing: 1 where it multiplies, 0 where it adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrofitReport:
    """Which layers have gates now, and what a probe of the model answered before and after."""

    model: str
    """The model's class."""
    gates: str
    """The gates as they are spelled."""
    layers: tuple[str, ...]
    """The paths of the gated attention modules."""
    num_parameters: int
    """Numbers that the gates added to the model."""
    implementations: tuple[str, ...]
    """The attention implementations that the probe was run with."""
    dtype: str
    """The dtype that the probe was run in, the model's own."""
    bitwise_equal: bool
    """Whether the answers to the probe have the same bits as before."""
    largest_change: float
    """The largest difference between the answers; 0 if they are bitwise equal."""
    left_alone: dict[str, str] = field(default_factory=dict[str, str])
    """The paths of attention modules that have no gates, and why: other parts of the model, unused cross-attention."""

    def __str__(self) -> str:
        """Describe the report in two lines, three if some attention was left alone."""
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
    answers keep their bits; a probe makes sure, and if it fails the gates are taken out again. With another activation
    the gates start as they are spelled, and the report says how much the probe's answers changed. Gates are children
    `attn_gate` of the attention modules, trainable, with the device and dtype of the layer's weights. After an error
    the model is as it was. Gates that start at random are drawn by PyTorch's global generator, whose state afterwards
    is the one before.

    A gate at the output acts inside an attention implementation of its own, or before the output projection where a
    model spells out its attention or goes by the implementation's name. The model's modules are given a copy of their
    configuration, where the gates are written down, so that other models that were built from the same object are left
    alone; `model.name_or_path` is empty as long as there are gates, since what has that name has none.

    Gates go where a small made-up input comes: tokens, images or sound, to an encoder and its decoder. Cross-attention
    takes those that can act there. The report names the attention modules that were left alone.

    model      : of transformers, or adapters around one
    gate       : a spelling such as `"g1"` or `"bma+g1"`, a `Gate`, or several
    activation : of all the gates; None leaves each as it is spelled
    layers     : which of the model's attention modules, by number, counted from 0 in the order in which they run, or by
                 path as in `report.layers`; None is all. Other layers can be given other gates later.
    returns    : what was done, and what the probe has shown

    Raises a `ValueError` if the model cannot take these gates; the message says why.
    """
    gates = starting_gates(gate, activation)
    base = unwrap_model(model)
    require_model(base)
    inputs = _inputs(base)
    with evaluation_mode(base), keep_random_state(base):
        before = _answers_before(base, inputs)
        survey = survey_attention(base, inputs)
        added = _install(model, gates, _choose_layouts(survey, gates, layers))
        with _take_out_on_error(base, added):
            after = {stock: _answers_with(base, stock, inputs) for stock in before}
            report = _report(base, gates, added, before, after, left_alone=_left_alone(survey, base))
            _require_unchanged(base, gates, report)
    # Their layers were in evaluation mode until now.
    for layer in added:
        layer.modules.train(layer.layout.module.training)
    return report


def install_gates(model: nn.Module, gates: Gates, layers: Iterable[int | str] | None) -> list[GatedLayer]:
    """Add the gates as they are, without comparing the model's answers, and return the layers that have them.

    layers : by number or by path; None is all
    """
    base = unwrap_model(model)
    require_model(base)
    with keep_random_state(base):
        return _install(model, gates, _choose_layouts(survey_attention(base, _inputs(base)), gates, layers))


def _install(model: nn.Module, gates: Gates, chosen: Sequence[AttentionLayout]) -> list[GatedLayer]:
    base = unwrap_model(model)
    require_gateable(base, chosen, gates)
    added = {GatedLayer(layout, gates): _new_gates(layout, gates) for layout in chosen}
    if not any(gated_layers(base)):
        _own_configuration(model)
    if any(layer.acts_in_function for layer in added):
        base.set_attn_implementation(gated_implementation(stock_implementation(implementation_in(base))))
    for layer, modules in added.items():
        layer.install(modules)
    record_gates(base)
    return list(added)


def remove_gates(model: nn.Module) -> None:
    """Remove all gates: the model is as it was before, with its stock attention implementation.

    A model without gates is left alone.

    model : of transformers, or adapters around one
    """
    base = unwrap_model(model)
    _take_out(base, list(gated_layers(base)))


def _take_out(model: PreTrainedModel, layers: Sequence[GatedLayer]) -> None:
    for layer in layers:
        layer.remove()
    now = implementation_in(model)
    if layers and not _acts_in_function(model) and now != stock_implementation(now):
        model.set_attn_implementation(stock_implementation(now))
    if layers:
        record_gates(model)


@contextmanager
def _take_out_on_error(model: PreTrainedModel, layers: Sequence[GatedLayer]) -> Generator[None]:
    try:
        yield
    except BaseException:
        _take_out(model, layers)
        raise


def _require_unchanged(model: PreTrainedModel, gates: Gates, report: RetrofitReport) -> None:
    if all(map(is_neutral, gates)) and not report.bitwise_equal:
        raise refusal(
            model,
            f"with {gates} its answers changed by up to {report.largest_change:.3g}, though every gate is neutral",
        )


def _acts_in_function(model: PreTrainedModel) -> bool:
    return any(layer.acts_in_function for layer in gated_layers(model))


def _own_configuration(model: nn.Module) -> None:
    """Give the modules of a model a copy of their configuration, the same to all that share one."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    try:
        return probe_inputs(model)
    except ValueError as error:
        raise refusal(model, str(error)) from error


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
                raise refusal(model, failure_reason(model, error)) from error
    return found


def _answers_with(model: PreTrainedModel, stock: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the model's answers with a stock implementation, or with its gated twin if a gate needs that."""
    gated = implementation_in(model) != stock_implementation(implementation_in(model))
    with implementation(model, gated_implementation(stock) if gated else stock):
        return answers(model, inputs)


def _report(
    model: PreTrainedModel,
    gates: Gates,
    layers: Sequence[GatedLayer],
    before: dict[str, list[Tensor]],
    after: dict[str, list[Tensor]],
    *,
    left_alone: dict[str, str],
) -> RetrofitReport:
    equal = all(bitwise_equal(after[name], before[name]) for name in before)
    return RetrofitReport(
        model=type(model).__name__,
        gates=str(gates),
        layers=tuple(layer.layout.name for layer in layers),
        num_parameters=sum(weight.numel() for layer in layers for weight in layer.modules.parameters()),
        implementations=tuple(before),
        dtype=str(model.dtype).removeprefix("torch."),
        bitwise_equal=equal,
        largest_change=0.0 if equal else max(largest_change(after[name], before[name]) for name in before),
        left_alone=left_alone,
    )


def _left_alone(survey: Survey, model: PreTrainedModel) -> dict[str, str]:
    """Return the attention modules without gates that only a choice of layers or of gates does not explain."""
    gated = {layer.layout.module for layer in gated_layers(model)}
    crossing = {layer.name: _CROSSING for layer in survey.layers if layer.cross and layer.module not in gated}
    return {**survey.left_out, **crossing}


def _choose_layouts(survey: Survey, gates: Gates, layers: Iterable[int | str] | None) -> list[AttentionLayout]:
    """Return the layers that were asked for; of all, those whose kind of attention these gates can act on."""
    found = survey.layers
    if layers is None:
        needs_self_attention = any(gate.needs_self_attention for gate in gates)
        return [layer for layer in found if not (layer.cross and needs_self_attention)] or list(found)
    if isinstance(layers, int | str):
        raise TypeError(f"layers must be a list of numbers or paths, such as [{layers!r}]; got {layers!r}.")
    known: dict[int | str, AttentionLayout] = {**dict(enumerate(found)), **{layer.name: layer for layer in found}}
    wanted = list(layers)
    wrong = [layer for layer in wanted if isinstance(layer, bool) or layer not in known]
    if paths := [layer for layer in wrong if isinstance(layer, str)]:
        raise ValueError(
            f"The model has no attention at {', '.join(paths)}; it has {', '.join(layer.name for layer in found)}."
        )
    if wrong or not wanted:
        raise ValueError(
            f"layers must be numbers from 0 to {len(found) - 1} or paths, at least one; got {wrong or wanted}."
        )
    return list({known[layer].name: known[layer] for layer in wanted}.values())


def _new_gates(layout: AttentionLayout, gates: Gates) -> AttentionGates:
    """Make gates with the device and dtype of the layer's weights; float32 if these are quantised."""
    weights = list(layout.module.parameters())
    floating = [weight.dtype for weight in weights if weight.is_floating_point()]
    dtype = floating[0] if floating else torch.float32
    modules = AttentionGates(gates, layout.shape, device=weights[0].device, dtype=dtype)
    return modules.train(layout.module.training)


def starting_gates(gate: GateLike, activation: Activation | None) -> Gates:
    """Return the gates with this activation, started at zero if they change nothing there.

    A bias stays, but starts at zero too. The activation None leaves each gate as it is spelled.
    """
    gates = Gates.parse(gate)
    if not gates:
        raise ValueError("gate must name at least one gate; got none. Write for example 'g1' or 'bma'.")
    if (sink := gates.at("partition")) is not None:
        raise ValueError(
            f"gate {sink} cannot be added to a trained model. A sink that is closed, so that the answers keep their "
            "bits, has no gradient and never opens; one that is open changes them. Train with the sink from the start, "
            "or add another gate, such as 'g1'."
        )
    if placebo := next((each for each in gates if each.placebo is not None or each.op == "replace"), None):
        raise ValueError(
            f"gate {placebo} cannot be added to a trained model: it is a control for models that train from the start. "
            f"As a control for gates that are added, use '{placebo.site}:nothing'."
        )
    if activation is None:
        return gates
    if activation not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise ValueError(f"activation must be one of {known}, or None for the gate's own; got {activation!r}.")
    return Gates(_start_neutral(replace(each, activation=activation)) for each in gates)


def is_neutral(gate: Gate) -> bool:
    """Tell whether the gate, as it starts, changes nothing."""
    return gate.activation in _NEUTRAL[gate.op] and _starts_at_zero(gate)


def _start_neutral(gate: Gate) -> Gate:
    if gate.activation not in _NEUTRAL[gate.op]:
        return gate
    bias = None if gate.bias is None else 0.0
    return replace(gate, init_std=0.0, bias=bias) if gate.has_matrix else replace(gate, bias=bias)


def _starts_at_zero(gate: Gate) -> bool:
    return (gate.init_std == 0 or not gate.has_matrix) and not gate.bias
