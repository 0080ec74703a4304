"""The record of a model's gates in its configuration.

transformers writes the configuration into every directory, including a trainer's checkpoints, so that `load_pretrained`
knows which gates the weights belong to.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from tidegate._validation import InputError
from tidegate.gates import Gates
from tidegate.torch.retrofit.layer import acting_layers

RECORD_NAME = "tidegate_gates"
"""The option of a configuration with the spellings of gates by the paths of their attention modules."""


def record_gates(model: PreTrainedModel) -> None:
    """Write the gates of a model into its configuration; without gates the option is removed.

    Adapters store the name of the model that they belong to. It is the name of a model without gates, so that a gated
    one has an empty name.
    """
    config: Any = model.config
    layers = acting_layers(model)
    if layers:
        setattr(config, RECORD_NAME, {path: str(layer.gates) for path, layer in layers.items()})
    elif hasattr(config, RECORD_NAME):
        delattr(config, RECORD_NAME)
    model.name_or_path = "" if layers else config.name_or_path


def recorded_gates(config: PreTrainedConfig) -> dict[str, Gates]:
    """Return the gates in a configuration by the paths of their attention modules; empty if there are none."""
    found: Any = getattr(config, RECORD_NAME, {})
    if not isinstance(found, dict) or not all(isinstance(each, str) for pair in found.items() for each in pair):
        raise InputError(RECORD_NAME, expected="an object from paths of layers to spellings of gates", got=found)
    return {path: Gates.parse(spelling) for path, spelling in found.items()}
