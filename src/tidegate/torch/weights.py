"""Models as files: safetensors with the configuration inside. Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tidegate.config import TransformerConfig, VisionConfig
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.vit import VisionTransformer

__all__ = ["load_model", "save_model"]

Model: TypeAlias = TransformerLM | VisionTransformer

_FORMAT = "tidegate"
_VERSION = "1"
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
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": type(model).__name__,
        "config": model.config.to_json(),
    }
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    partial = Path(path).with_name(f"{Path(path).name}.partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)


def load_model(
    path: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Model:
    """Read what `save_model` wrote, in training mode like every new module.

    device : where the parameters go; None is the CPU
    dtype  : of the parameters; None keeps what the file has
    """
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            model = _described(file.metadata() or {}, path)
            # Without the copy a parameter would be a view of the file, and change when the file does.
            tensors = {name: file.get_tensor(name).to(dtype=dtype, copy=True) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}.") from error
    _check_tensors(tensors, model, path)
    model.load_state_dict(tensors, assign=True)
    return model


def _described(metadata: dict[str, str], path: str | Path) -> Model:
    """The model that the metadata describes, on the meta device."""
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{path} holds no Tidegate model: its format is {metadata.get('format')!r}, not {_FORMAT!r}. "
            "Write it with save_model."
        )
    if metadata.get("version") != _VERSION:
        raise ValueError(f"{path} has the format version {metadata.get('version')!r}; this library reads {_VERSION!r}.")
    kind = metadata.get("model", "")
    if kind not in _KINDS:
        raise ValueError(f"{path} holds a model {kind!r}; this library knows {', '.join(_KINDS)}.")
    return _KINDS[kind](metadata.get("config", ""))


def _check_tensors(tensors: dict[str, Tensor], model: Model, path: str | Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    complaints = [
        *(f"{name} is missing" for name in expected if name not in given),
        *(f"{name} is unexpected" for name in given if name not in expected),
        *(
            f"{name} has shape {given[name]}, expected {shape}"
            for name, shape in expected.items()
            if name in given and given[name] != shape
        ),
    ]
    if complaints:
        raise ValueError(f"{path} does not fit its own configuration: {'; '.join(complaints)}.")
