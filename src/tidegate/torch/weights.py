"""Save and load models: safetensors files that include the configuration. Nothing is ever unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tidegate._files import write_tensors
from tidegate._model_files import Shapes, model_format, read_model_config
from tidegate._text import shorten
from tidegate._validation import InputError
from tidegate.config import StackConfig, TransformerConfig
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.vit import VisionTransformer

Model: TypeAlias = TransformerLM | VisionTransformer

_KINDS = ("TransformerLM", "VisionTransformer")


def save_model(model: Model, path: str | Path) -> None:
    """Write parameters, configuration, version and a digest of the file into one safetensors file, atomically.

    Raises:
        TypeError: The model is of another class, such as a wrapper.
        InputError: Its tensors have other names than `load_model` expects, as after `weight_norm` or quantization.
    """
    if type(model).__name__ not in _KINDS:
        raise TypeError(
            f"model must be one of {', '.join(_KINDS)}; got {type(model).__name__}. Save what a wrapper wraps."
        )
    state, expected = model.state_dict(), _shapes(model.config)
    if changed := sorted(state.keys() ^ expected.keys()):
        hint = f"Different: {shorten(', '.join(changed))}. Remove parametrizations, adapters and quantization first."
        raise InputError("model", expected="one with the tensors of its configuration", hint=hint)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    write_tensors(
        path,
        lambda file, metadata: save_file(tensors, file, metadata=metadata),
        model_format("save_model"),
        {"model": type(model).__name__, "config": model.config.to_json()},
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
    )


def load_model(
    path: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Model:
    """Load a model that `save_model` wrote, in training mode like every new module.

    Args:
        path: The file.
        device: Of the parameters; None is the CPU.
        dtype: Of the parameters; None keeps that of the file.

    Raises:
        ValueError: The file was changed or damaged, even by a single bit, or its tensors do not match its
            configuration. This is checked before any tensor is loaded.
    """
    config = read_model_config(path, kinds=_KINDS, writer="save_model", shapes_of=_shapes)
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            # Without the copy a parameter would be a view of the file and change with it.
            tensors = {name: file.get_tensor(name).to(dtype=dtype, copy=True) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise InputError("path", expected="a safetensors file", got=Path(path), hint=f"{error}.") from error
    model = _build_on_meta(config)
    model.load_state_dict(tensors, assign=True)
    return model


def _build_on_meta(config: StackConfig) -> Model:
    kind: Any = TransformerLM if isinstance(config, TransformerConfig) else VisionTransformer
    return kind(config, device="meta")


def _shapes(config: StackConfig) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in _build_on_meta(config).state_dict().items()}
