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
from tidegate.torch.retrofit.layer import GatedLayer, acting_layers, gated_layers
from tidegate.torch.retrofit.layout import AttentionLayout
from tidegate.torch.retrofit.probe import (
    bitwise_equal,
    evaluation_mode,
    keep_random_state,
    largest_change,
    probe_inputs,
    run_probe,
)
from tidegate.torch.retrofit.survey import Survey, implementation, survey_attention
from tidegate.torch.retrofit.wrappers import unwrap_model

RECORD_NAME = "tidegate_gates"
"""The option of a configuration with the spellings of gates by the paths of their attention modules."""

_CROSSING = "cross-attention has no query at the positions of its keys"
_NEUTRAL: dict[str, tuple[Activation, ...]] = {"multiply": ("tanh1", "twosigmoid"), "add": ("identity", "silu")}
"""The activations whose value at zero is neutral: 1 for a gate that multiplies, 0 for one that adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrofitReport:
    """The layers that got gates, and the change of the model's outputs on a small synthetic input, the probe."""

    model: str
    """The model's class."""
    gates: str
    """The spelling of the gates."""
    layers: tuple[str, ...]
    """The paths of the gated attention modules."""
    num_parameters: int
    """Parameters that the gates add to the model."""
    implementations: tuple[str, ...]
    """The attention implementations that the probe ran with."""
    dtype: str
    """The model's dtype."""
    bitwise_equal: bool
    """Whether the outputs on the probe are bitwise unchanged."""
    largest_change: float
    """The largest difference between the outputs; 0 if they are bitwise equal."""
    left_alone: dict[str, str] = field(default_factory=dict[str, str])
    """The reasons why other attention modules have no gates, by their paths."""

    def __str__(self) -> str:
        """Return two lines, and a third if some attention modules have no gates."""
        found = (
            "is bitwise unchanged"
            if self.bitwise_equal
            else f"changed by up to {self.largest_change:.3g}, because these gates do not start at the identity"
        )
        text = (
            f"{self.model}: {self.gates} in {len(self.layers)} layers, {self.num_parameters:,} parameters.\n"
            f"The output on a small padded test batch in {self.dtype}, with {' and '.join(self.implementations)}, "
            f"{found}."
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
    """Add gates to the attention of a loaded model, in place.

    With an activation that is exactly 1 at zero, `twosigmoid` or `tanh1`, the parameters of gates start at zero and the
    model's outputs are bitwise unchanged; a probe checks this, and removes the gates if it fails. With another
    activation the gates start as spelled, and the report gives the change of the outputs. Gates are children
    `attn_gate` of the attention modules, trainable, with the device and dtype of the layer's weights. After an error
    the model is unchanged. Random initial values come from PyTorch's global generator, whose state is restored.

    Gates are added to the attention modules that a small synthetic input reaches: tokens, images or audio, in the
    encoder and the decoder. Cross-attention takes the gates that can act there. The report names the other modules.
    A gate at the output acts inside a gated attention implementation, or before the output projection if a model
    decomposes its attention or depends on the implementation's name.

    The model gets its own copy of its configuration, which records the gates; other models built from the same
    configuration do not change. `model.name_or_path` is empty while there are gates, because the model of that name has
    none.

    Args:
        model: A transformers model, or adapters around one.
        gate: A spelling such as `"g1"` or `"bma+g1"`, a `Gate`, or several.
        activation: The activation of all gates; None keeps that of each spelling.
        layers: The attention modules that get gates, by index in the order in which they run, or by path as in
            `report.layers`; None is all. Other layers can get other gates later.

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
        before = _outputs_before(base, inputs)
        survey = survey_attention(base, inputs)
        added = _install(model, gates, _choose_layouts(survey, gates, layers))
        try:
            after = {stock: _outputs_with(base, stock, inputs) for stock in before}
            equal = all(bitwise_equal(after[name], before[name]) for name in before)
            change = 0.0 if equal else max(largest_change(after[name], before[name]) for name in before)
            if not equal and all(map(_is_neutral, gates)):
                raise cannot_gate(base, f"with the neutral gates {gates}, its outputs changed by up to {change:.3g}")
        except BaseException:
            _remove(base, added)
            raise
    # Gates were built while the layers were in evaluation mode.
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
    """Add gates to the layers at these paths as they are, without comparing outputs."""
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
        # Modules that shared a configuration share its copy.
        copies: dict[int, Any] = {}
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, PreTrainedConfig):
                    setattr(module, name, copy.deepcopy(value, copies))
    if any(layer.acts_in_function for layer in added):
        base.set_attn_implementation(gated_implementation(stock_implementation(implementation_in(base))))
    for layer, modules in added.items():
        layer.install(modules)
    record_gates(base)
    return list(added)


def remove_gates(model: nn.Module) -> None:
    """Remove all gates and restore the stock attention implementation; a model without gates does not change.

    Args:
        model: A transformers model, or adapters around one.
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


def record_gates(model: PreTrainedModel) -> None:
    """Write the gates of a model into its configuration; without gates the option is removed.

    transformers writes the configuration into every directory, including a trainer's checkpoints, so that
    `load_pretrained` knows which gates the weights belong to. Adapters store the name of the model that they belong to,
    which is the name of a model without gates: a gated model has an empty name.
    """
    config: Any = model.config
    layers = acting_layers(model)
    if layers:
        setattr(config, RECORD_NAME, {path: str(layer.gates) for path, layer in layers.items()})
    elif hasattr(config, RECORD_NAME):
        delattr(config, RECORD_NAME)
    model.name_or_path = "" if layers else config.name_or_path


def _outputs_before(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the model's outputs with its own stock implementation, and with each of the others that runs."""
    own = stock_implementation(implementation_in(model))
    found: dict[str, list[Tensor]] = {}
    for stock in supported_implementations(model):
        try:
            found[stock] = _outputs_with(model, stock, inputs)
        except Exception as error:
            # A model may raise any error for an input that it does not support.
            if stock == own:
                raise explain_failure(model, error) from error
    return found


def _outputs_with(model: PreTrainedModel, stock: str, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the model's outputs with a stock implementation, or with its gated version if a gate needs that."""
    gated = implementation_in(model) != stock_implementation(implementation_in(model))
    with implementation(model, gated_implementation(stock) if gated else stock):
        return run_probe(model, inputs)


def _choose_layouts(survey: Survey, gates: Gates, layers: Iterable[int | str] | None) -> list[AttentionLayout]:
    """Return the requested layers; by default those that these gates can act on."""
    found = survey.layers
    if layers is None:
        needs_self_attention = any(gate.needs_self_attention for gate in gates)
        return [layer for layer in found if not (layer.cross and needs_self_attention)] or list(found)
    if isinstance(layers, int | str):
        raise TypeError(f"layers must be a list of indices or paths, such as [{layers!r}]; got {layers!r}.")
    known: dict[int | str, AttentionLayout] = {**dict(enumerate(found)), **{layer.name: layer for layer in found}}
    wanted = list(layers)
    wrong = [layer for layer in wanted if isinstance(layer, bool) or layer not in known]
    if wrong or not wanted:
        expected = f"indices from 0 to {len(found) - 1} or paths, at least one"
        hint = f"The paths are {list_some([layer.name for layer in found])}."
        raise InputError("layers", expected=expected, got=wrong or wanted, hint=hint)
    return list({known[layer].name: known[layer] for layer in wanted}.values())


def _new_gates(model: PreTrainedModel, layout: AttentionLayout, gates: Gates) -> AttentionGates:
    """Build gates with the device and dtype of the layer's weights; float32 if these are quantized."""
    weights = list(layout.module.parameters())
    # Dynamically quantized layers have no parameters.
    device = weights[0].device if weights else model.device
    dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)
    modules = AttentionGates(gates, layout.shape, device=device, dtype=dtype)
    return modules.train(layout.module.training)


def starting_gates(gate: GateLike, activation: Activation | None) -> Gates:
    """Return the gates with this activation; matrices and biases start at zero if the gates are then neutral.

    The activation None leaves each gate as it is spelled.
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
            hint="A closed sink leaves the outputs unchanged, but has no gradient and never opens; an open one changes "
            "them. Train with the sink from the start, or add another gate, such as 'g1'.",
        )
    if control := next((each for each in gates if each.placebo is not None or each.op == "replace"), None):
        hint = f"Controls are trained from the start; as a control for added gates use '{control.site}:nothing'."
        raise InputError("gate", expected=suitable, got=str(control), hint=hint)
    if activation is None:
        return gates
    if activation not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise InputError("activation", expected=f"one of {known}, or None for the gate's own", got=activation)
    return Gates(_start_neutral(replace(each, activation=activation)) for each in gates)


def _start_neutral(gate: Gate) -> Gate:
    if gate.activation not in _NEUTRAL[gate.op]:
        return gate
    bias = None if gate.bias is None else 0.0
    return replace(gate, init_std=0.0, bias=bias) if gate.has_matrix else replace(gate, bias=bias)


def _is_neutral(gate: Gate) -> bool:
    """Return whether the gate is the identity at the start."""
    starts_at_zero = (gate.init_std == 0 or not gate.has_matrix) and not gate.bias
    return gate.activation in _NEUTRAL[gate.op] and starts_at_zero
