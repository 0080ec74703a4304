"""Save a gated model whole, and load it again: transformers' own files, and those of the gates beside them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from tidegate._text import echo
from tidegate.torch.retrofit.files import load_gates, save_gates
from tidegate.torch.retrofit.layer import GATES_NAME, acting_layers
from tidegate.torch.retrofit.wrappers import has_adapters, unwrap_model


def save_pretrained(model: nn.Module, directory: str | Path) -> None:
    """Write a gated model into a folder: its weights and configuration as transformers does, then its gates.

    `load_pretrained` reads the folder. `from_pretrained` of transformers reads it too, as the model without gates.

    model : of transformers, with gates and without adapters: merge those first
    """
    base = unwrap_model(model)
    layers = acting_layers(base)
    if not layers:
        raise ValueError(
            f"{type(base).__name__} has no gates; call add_gates(model) first, or model.save_pretrained for a model "
            "without."
        )
    if base is not model:
        raise ValueError(
            f"model is a {type(model).__name__} around a {type(base).__name__}, and its adapters would be lost. Merge "
            "them first, with merge_and_unload, or write them with their own save_pretrained and the gates with "
            "save_gates."
        )
    if has_adapters(base):
        raise ValueError(
            f"{type(base).__name__} has adapters inside, and transformers would write those alone. Merge them first: "
            "write them with model.save_pretrained(DIR), load them around the gated model with peft's "
            "PeftModel.from_pretrained(model, DIR), and take what merge_and_unload gives."
        )
    for layer in layers.values():
        layer.require_plain_gates()
    plain = {name: weight for name, weight in base.state_dict().items() if f".{GATES_NAME}." not in f".{name}"}
    base.save_pretrained(directory, state_dict=plain)
    save_gates(base, directory)


def load_pretrained(directory: str | Path, *, device: torch.device | str | None = None) -> PreTrainedModel:
    """Return the gated model that `save_pretrained` wrote, with the class and dtype that it had, in evaluation mode.

    Nothing is fetched, no code of the folder is run and nothing is unpickled. The gates are refused if the weights are
    not those that they were saved with.

    device : where the model goes; None is the CPU
    """
    folder = Path(directory)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no model: config.json is missing. Write it with save_pretrained.")
    kind = _model_class(folder)
    model = kind.from_pretrained(folder, dtype="auto", local_files_only=True, use_safetensors=True)
    load_gates(model, folder)
    if device is not None:
        nn.Module.to(model, device)
    return model


def _model_class(folder: Path) -> type[PreTrainedModel]:
    names: list[str] = AutoConfig.from_pretrained(folder, local_files_only=True).architectures or ["none"]
    kind = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise ValueError(
            f"{folder / 'config.json'} names the architecture {echo(names[0])}, which transformers "
            f"{transformers.__version__} does not have."
        )
    return kind
