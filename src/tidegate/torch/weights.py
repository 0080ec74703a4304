"""Models as files: safetensors with the configuration inside. Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tidegate._files import file_metadata, require_metadata, require_shapes, write_atomically
from tidegate.config import TransformerConfig, VisionConfig
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.vit import VisionTransformer

Model: TypeAlias = TransformerLM | VisionTransformer

_KINDS: dict[str, Callable[[str], Model]] = {
    "TransformerLM": lambda config: TransformerLM(TransformerConfig.from_json(config), device="meta"),
    "VisionTransformer": lambda config: VisionTransformer(VisionConfig.from_json(config), device="meta"),
}


def save_model(model: Model, path: str | Path) -> None:
    """Write the parameters, the configuration and a version into one safetensors file, all of it or nothing."""
    if type(model).__name__ not in _KINDS:
        raise TypeError(
            f"model must be one of {', '.join(_KINDS)}; got {type(model).__name__}. Save what a wrapper wraps."
        )
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    metadata = file_metadata(type(model).__name__, model.config.to_json())
    write_atomically(path, lambda file: save_file(tensors, file, metadata=metadata))


def load_model(
    path: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Model:
    """Read what `save_model` wrote, in training mode like every new module.

    device : where the parameters go; None is the CPU
    dtype  : of the parameters; None keeps what the file has
    """
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            kind, config = require_metadata(file.metadata() or {}, path, kinds=_KINDS, writer="save_model")
            model = _KINDS[kind](config)
            # Without the copy a parameter would be a view of the file, and change when the file does.
            tensors = {name: file.get_tensor(name).to(dtype=dtype, copy=True) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}.") from error
    given, expected = (
        {name: tuple(tensor.shape) for name, tensor in state.items()} for state in (tensors, model.state_dict())
    )
    require_shapes(given, expected, complaint=f"{path} does not fit its own configuration")
    model.load_state_dict(tensors, assign=True)
    return model
