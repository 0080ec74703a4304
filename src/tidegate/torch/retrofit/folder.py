"""Save and load a whole gated model: the files of transformers, and the files of its gates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tidegate._files import fix_permissions
from tidegate._text import list_some
from tidegate._validation import InputError
from tidegate.gates import Gates
from tidegate.torch.retrofit.files import DESCRIPTION, fill, load_gates, require_savable, save_gates
from tidegate.torch.retrofit.install import RECORD_NAME, install_gates
from tidegate.torch.retrofit.layer import GATES_NAME, acting_layers
from tidegate.torch.retrofit.probe import keep_random_state
from tidegate.torch.retrofit.wrappers import has_adapters, unwrap_model

VARIANT = "without_gates"
"""transformers' variant of the weights, so that it does not load them by default and ignore the gates."""


def save_pretrained(model: nn.Module, directory: str | Path) -> None:
    """Write a gated model into a directory: its weights and configuration as transformers does, then its gates.

    `load_pretrained` reads the directory. `from_pretrained` of transformers would ignore the gates and finds no weights
    there; with `variant="without_gates"` it loads the model without gates.

    Args:
        model: A transformers model with gates and without adapters; merge adapters first.
        directory: Created if it does not exist.
    """
    base = unwrap_model(model)
    if base is not model or has_adapters(base):
        hint = (
            "Write them with model.save_pretrained(DIR), load them around the gated model with peft's "
            "PeftModel.from_pretrained(model, DIR), and save the result of merge_and_unload."
            if base is model
            else "Save the result of merge_and_unload; or use save_pretrained of peft, and save_gates for the gates."
        )
        raise InputError("model", expected="without adapters, which would be lost", got=type(model).__name__, hint=hint)
    require_savable(base, acting_layers(base))
    if others := _weight_files(Path(directory), variant=None):
        hint = f"transformers would load {others[0].name} without the gates. Choose another, or remove the file."
        raise InputError("directory", expected="one without another model", got=Path(directory), hint=hint)
    plain = {name: weight for name, weight in base.state_dict().items() if not _belongs_to_gates(name)}
    _require_own_weights(base, plain)
    base.save_pretrained(directory, state_dict=plain, variant=VARIANT)
    fix_permissions(directory)
    save_gates(base, directory)


def _require_own_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Raise InputError if the model's class cannot load the weights, for example parametrized ones."""
    if getattr(model, "hf_quantizer", None) is not None:
        return
    with torch.device("meta"), keep_random_state(model):
        expected = type(model)(copy.deepcopy(model.config)).state_dict()
    if differing := sorted(expected.keys() ^ weights.keys()):
        raise InputError(
            "model",
            expected="one whose weights its class can load",
            got=type(model).__name__,
            hint=f"Its weights differ in {list_some(differing)}. Remove parametrizations such as weight_norm with "
            "torch.nn.utils.parametrize.remove_parametrizations, and save before quantizing; or use save_gates.",
        )


def load_pretrained(
    directory: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Load a gated model from a directory, with its original class, in evaluation mode.

    The directory was written by `save_pretrained`, with gates and weights saved together; or by transformers from a
    gated model, with `model.save_pretrained` or as a trainer's checkpoint. Nothing is downloaded, no code from the
    directory is run and nothing is unpickled.

    Args:
        directory: The directory.
        device: The device of the model; None is the CPU.
        dtype: The dtype of all weights, including gates; None is that of the configuration, as in `from_pretrained`,
            and for gates the saved one.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point dtype, such as torch.bfloat16, or None; got {dtype!r}.")
    if device is not None:
        # A missing device fails here, before the model is read.
        torch.empty(0, device=device)
    folder = Path(directory)
    if not folder.is_dir():
        raise _no_gated_model(
            folder,
            "It is not a directory; download a model of the hub first, with snapshot_download of huggingface_hub.",
        )
    if not (folder / "config.json").is_file():
        raise _no_gated_model(folder, "config.json is missing.")
    model = _load_with_gates(folder)
    if dtype is not None:
        # Buffers such as rotary frequencies are not cast, as in `from_pretrained`.
        for weight in model.parameters():
            if weight.is_floating_point():
                weight.data = weight.data.to(dtype)
        model.config.dtype = dtype
    if device is not None:
        nn.Module.to(model, device)
    return model


def _no_gated_model(folder: Path, problem: str) -> InputError:
    hint = f"{problem} Write one with save_pretrained of tidegate.torch.retrofit."
    return InputError("directory", expected="one with a gated model", got=folder, hint=hint)


def _load_with_gates(folder: Path) -> PreTrainedModel:
    if has_gates(folder):
        model = _load_plain(folder, weights_variant(folder))
        load_gates(model, folder)
        return model
    saved: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names: list[str] = list(opened.keys())
            saved |= {name: opened.get_tensor(name) for name in names if _belongs_to_gates(name)}
    found: Any = getattr(_config(folder), RECORD_NAME, {})
    if not isinstance(found, dict) or not all(isinstance(each, str) for pair in found.items() for each in pair):
        raise InputError(RECORD_NAME, expected="an object from paths of layers to spellings of gates", got=found)
    layers = {path: Gates.parse(spelling) for path, spelling in found.items()}
    if not saved:
        raise _no_gated_model(folder, "It has neither files of gates nor gates among the weights.")
    if not layers:
        raise InputError(
            RECORD_NAME,
            expected=f"in {folder / 'config.json'}, with the gates of the saved weights",
            hint="Load the model with from_pretrained, add the same gates with add_gates, and load the weights with "
            "load_state_dict.",
        )
    # transformers would report the gates as unexpected weights.
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        model = _load_plain(folder, variant=None)
    finally:
        transformers.logging.set_verbosity(verbosity)
    install_gates(model, layers)
    own = {name: weight for name, weight in model.state_dict(keep_vars=True).items() if _belongs_to_gates(name)}
    fill(revert_weight_conversion(model, own), saved, folder, new=True)
    return model.eval()


def _load_plain(folder: Path, variant: str | None) -> PreTrainedModel:
    names: list[str] = _config(folder).architectures or ["none"]
    kind = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        expected = f"a class of transformers {transformers.__version__}"
        raise InputError("architectures", expected=expected, got=names[0], hint=f"See {folder / 'config.json'}.")
    loaded: Any = kind.from_pretrained(
        folder, variant=variant, dtype="auto", local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers initializes them at random.
        raise _no_gated_model(folder, f"Its files have no {list_some(missing)}.")
    return model


def has_gates(folder: Path) -> bool:
    """Return whether a directory contains files of gates."""
    return (folder / DESCRIPTION).exists()


def weights_variant(folder: Path) -> str | None:
    """Return transformers' variant of the weights in a directory with files of gates; None for the default.

    Raises:
        InputError: If there are both.
    """
    ours, others = (_weight_files(folder, variant) for variant in (VARIANT, None))
    if ours and others:
        hint = f"The gates belong to one of {ours[0].name} and {others[0].name}. Remove the other."
        raise InputError("directory", expected="one with a single model", got=folder, hint=hint)
    return VARIANT if ours else None


def _weight_files(folder: Path, variant: str | None) -> list[Path]:
    """List the weights files and indices that transformers would read."""
    return [folder / name for name in weight_file_names(variant) if (folder / name).is_file()]


def weight_file_names(variant: str | None) -> tuple[str, str]:
    """Return transformers' names of a weights file, and of the index of several."""
    middle = "" if variant is None else f".{variant}"
    return f"model{middle}.safetensors", f"model.safetensors.index{middle}.json"


def _belongs_to_gates(name: str) -> bool:
    return GATES_NAME in name.split(".")


def _config(folder: Path) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(folder, local_files_only=True)
