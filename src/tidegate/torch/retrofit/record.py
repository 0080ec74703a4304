"""The record of a model's gates in its configuration.

transformers writes a model's configuration into every directory, a trainer's checkpoint too, so that `load_pretrained`
knows the gates of the weights in it.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from tidegate._validation import InputError
from tidegate.gates import Gates
from tidegate.torch.retrofit.layer import acting_layers

RECORD_NAME = "tidegate_gates"
"""The option of a configuration that holds the gates, as they are spelled, by the paths of their attention modules."""


def record_gates(model: PreTrainedModel) -> None:
    """Write the gates that a model has now into its configuration; without gates the option goes.

    The name by which adapters say what they belong to is that of a model without gates: a gated one has none.
    """
    config: Any = model.config
    layers = acting_layers(model)
    if layers:
        setattr(config, RECORD_NAME, {path: str(layer.gates) for path, layer in layers.items()})
    elif hasattr(config, RECORD_NAME):
        delattr(config, RECORD_NAME)
    model.name_or_path = "" if layers else config.name_or_path


def recorded_gates(config: PreTrainedConfig) -> dict[str, Gates]:
    """Return the gates that a configuration names, by the paths of their attention modules; empty if it names none."""
    found: Any = getattr(config, RECORD_NAME, {})
    if not isinstance(found, dict) or not all(isinstance(each, str) for pair in found.items() for each in pair):
        raise InputError(RECORD_NAME, expected="an object of spellings of gates by the layers' paths", got=found)
    return {path: Gates.parse(spelling) for path, spelling in found.items()}
