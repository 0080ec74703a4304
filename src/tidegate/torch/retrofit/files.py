"""Save gates to files of their own, and load them into the same model, without pickle."""

# There is no public list of the buffers that are not part of the state dict.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidegate._files import TensorFormat, read_tensor_header, require_shapes, write_content, write_tensors
from tidegate._json import add_checksum, decode, parse_json, verify_checksum
from tidegate._validation import InputError
from tidegate.gate import Gate
from tidegate.gates import Gates
from tidegate.torch.retrofit.checks import require_model, require_whole_weights
from tidegate.torch.retrofit.install import RECORD_NAME, install_gates, remove_gates
from tidegate.torch.retrofit.layer import GatedLayer, acting_layers, require_gates
from tidegate.torch.retrofit.layout import weight_of
from tidegate.torch.retrofit.wrappers import base_modules, unwrap_model

_WEIGHTS, DESCRIPTION = "gates.safetensors", "gates.json"
_FORMAT, _VERSION = "tidegate-gates", 2
_TENSORS = TensorFormat(
    name=_FORMAT, version=str(_VERSION), keys=frozenset(), holds="gates of save_gates", writer="save_gates"
)
_CIRCUMSTANCES = (
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    RECORD_NAME,
)
"""Options that do not change the computation: origin, output format, special tokens, the record of gates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Description:
    """The contents of `gates.json`."""

    format: str
    version: int
    model: str
    """Class of the base model."""
    dtype: str
    fingerprint: str
    """Fingerprint of the base model."""
    weights: str
    """Checksum of the weights file that belongs to it."""
    layers: dict[str, tuple[Gate, ...]]


def save_gates(model: nn.Module, directory: str | Path) -> None:
    """Write the gates of a model, and a fingerprint of the model instead of its weights.

    `gates.safetensors` contains the weights; `gates.json` the gates of each layer, the fingerprint of the model, and
    the checksum of the weights file. Each is written atomically, the description last, with a checksum of its contents.
    Adapters are not part of the fingerprint: the gates can be loaded with or without them. If an adapter has its own
    copies of the gates, those of the active adapter are written.

    Args:
        model: A transformers model, or adapters around one.
        directory: Created if it does not exist.
    """
    base = unwrap_model(model)
    layers = acting_layers(base)
    require_savable(base, layers)
    weights = {name: weight.detach().contiguous() for name, weight in _weights(base).items()}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    digest = write_tensors(
        folder / _WEIGHTS,
        lambda path, metadata: save_file(weights, path, metadata=metadata),
        _TENSORS,
        {},
        num_bytes=sum(weight.nbytes for weight in weights.values()),
    )
    description = _Description(
        format=_FORMAT,
        version=_VERSION,
        model=type(base).__name__,
        dtype=str(base.dtype),
        fingerprint=base_fingerprint(base),
        weights=digest,
        layers={path: tuple(layer.gates) for path, layer in layers.items()},
    )
    write_content(folder / DESCRIPTION, json.dumps(add_checksum(asdict(description)), indent=1).encode())


def require_savable(model: PreTrainedModel, layers: dict[str, GatedLayer]) -> None:
    """Raise InputError unless the model has gates, without adapters around them, and whole weights."""
    require_gates(model, layers)
    for layer in layers.values():
        layer.require_plain_gates()
    require_whole_weights(
        model,
        "Load its full state dict into a copy that is not sharded, and save that; "
        "get_model_state_dict of torch.distributed.checkpoint.state_dict gathers it.",
    )


def load_gates(model: nn.Module, directory: str | Path) -> None:
    """Load the gates that `save_gates` wrote into a model, in place.

    Except for gates and adapters, the model must be the one that they were saved from: same class, configuration, dtype
    and weights. New gates have the saved dtype. If the model has gates already, they must be the same in the same
    layers; they get the saved values and keep their dtype, which must not round them.

    Args:
        model: A transformers model, or adapters around one.
        directory: A directory that `save_gates` wrote.

    Raises:
        InputError: If the files are damaged, or belong to another model.
    """
    description, weights = _read(Path(directory))
    base = unwrap_model(model)
    require_model(base)
    if description.fingerprint != base_fingerprint(base):
        own = f"{type(base).__name__} in {base.dtype}"
        saved = f"{description.model} in {description.dtype}"
        other = "one with another configuration or other weights" if own == saved else f"a {saved}"
        hint = f"The gates in {directory} belong to {other}. Load the model that they were trained in."
        raise InputError("model", expected="the one that the gates were saved from", got=own, hint=hint)
    layers = {name: Gates(gates) for name, gates in description.layers.items()}
    present = acting_layers(base)
    for layer in present.values():
        layer.require_plain_gates()
    if present and {path: layer.gates for path, layer in present.items()} != layers:
        expected = f"one with the gates of {directory}, or without gates"
        raise InputError("model", expected=expected, hint="Call remove_gates(model) before loading.")
    try:
        if not present:
            install_gates(model, layers)
        fill(_weights(base), weights, directory, new=not present)
    except Exception:
        if not present:
            remove_gates(base)
        raise


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters of all acting gates, by their names."""
    return {
        f"{path}.{name}": weight
        for path, layer in acting_layers(model).items()
        for name, weight in layer.modules.named_parameters()
    }


@torch.no_grad()
def fill(own: dict[str, Tensor], given: dict[str, Tensor], directory: str | Path, *, new: bool) -> None:
    """Copy values into the parameters of gates. Raise InputError for other names, shapes or dtypes.

    `directory` is the source of the values, for errors. With `new` the parameters take the dtype of the values;
    otherwise they keep theirs, which must not round.
    """
    shapes = [{name: tuple(weight.shape) for name, weight in weights.items()} for weights in (given, own)]
    require_shapes(*shapes, complaint=f"{directory} does not match its own description")
    for name, weight in own.items():
        saved = given[name].dtype
        if not saved.is_floating_point:
            raise InputError(name, expected=f"floating point in {directory}", got=str(saved), hint="Save gates again.")
        if not new and saved != weight.dtype and torch.promote_types(saved, weight.dtype) != weight.dtype:
            expected = f"one whose gates can store the {saved} of {directory} without rounding"
            hint = "Call remove_gates(model) before loading."
            raise InputError("model", expected=expected, got=str(weight.dtype), hint=hint)
    for name, weight in own.items():
        if new:
            weight.data = weight.data.to(given[name].dtype)
        weight.copy_(given[name])


def _read(folder: Path) -> tuple[_Description, dict[str, Tensor]]:
    try:
        description = _read_description(folder / DESCRIPTION)
        header = read_tensor_header(folder / _WEIGHTS, _TENSORS)
        if description.weights != header.digest:
            expected = f"one whose {_WEIGHTS} and {DESCRIPTION} were saved together"
            raise InputError("directory", expected=expected, got=folder, hint="Save the gates again.")
        return description, load_file(folder / _WEIGHTS)
    except FileNotFoundError as error:
        hint = f"{error.filename} is missing. Write gates with save_gates."
        raise InputError("directory", expected="one with gates", got=folder, hint=hint) from error
    except SafetensorError as error:
        raise InputError(_WEIGHTS, expected="a safetensors file", got=folder / _WEIGHTS, hint=f"{error}.") from error


def _read_description(path: Path) -> _Description:
    expected, hint = f"a description of gates, version {_VERSION}", "Write it with save_gates."
    try:
        value = parse_json(path.read_bytes())
        if isinstance(value, dict) and (value.get("format"), value.get("version")) == (_FORMAT, _VERSION):
            return decode(_Description, verify_checksum(value))
    except ValueError as problem:
        raise InputError(DESCRIPTION, expected=expected, got=path, hint=f"{problem} {hint}") from None
    raise InputError(DESCRIPTION, expected=expected, got=path, hint=hint)


def base_fingerprint(model: PreTrainedModel) -> str:
    """Hash the model's class, configuration, weights and persistent buffers, without gates and adapters.

    The same weights in another dtype have another hash.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(type(model).__name__.encode())
    digest.update(json.dumps(_drop_circumstances(model.config.to_dict()), sort_keys=True, default=str).encode())
    for path, module in base_modules(model):
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        names = [name for name in own if name not in module._non_persistent_buffers_set]
        tensors = {name: own[name] for name in names if own[name] is not None}
        if not own and (weight := weight_of(module)) is not None:
            tensors = {"weight": weight.dequantize()}
        for name, tensor in tensors.items():
            digest.update(f"{path}.{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _drop_circumstances(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the options that do not change the computation, in nested configurations too."""
    return {
        name: _drop_circumstances(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _CIRCUMSTANCES
    }
