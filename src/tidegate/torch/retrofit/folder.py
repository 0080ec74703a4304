"""Save a gated model whole, and load it again: transformers' own files, and those of the gates beside them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tidegate._files import give_usual_modes
from tidegate._text import echo
from tidegate.torch.retrofit.files import DESCRIPTION, fill, load_gates, save_gates
from tidegate.torch.retrofit.install import install_gates
from tidegate.torch.retrofit.layer import GATES_NAME, acting_layers
from tidegate.torch.retrofit.record import RECORD_NAME, recorded_gates
from tidegate.torch.retrofit.wrappers import has_adapters, unwrap_model

VARIANT = "without_gates"
"""In the names of the files that hold the model: transformers, which would leave the gates out, passes them over."""


def save_pretrained(model: nn.Module, directory: str | Path) -> None:
    """Write a gated model into a folder: its weights and configuration as transformers does, then its gates.

    `load_pretrained` reads the folder. `from_pretrained` of transformers does not find weights in it, since it would
    leave the gates out; with `variant="without_gates"` it does, and gives the model without gates.

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
    if others := _weight_files(Path(directory), variant=None):
        raise ValueError(
            f"{directory} holds {others[0].name} already, which transformers would load without a word of the gates. "
            "Give another folder, or remove the file."
        )
    plain = {name: weight for name, weight in base.state_dict().items() if not _is_of_gates(name)}
    base.save_pretrained(directory, state_dict=plain, variant=VARIANT)
    give_usual_modes(directory)
    save_gates(base, directory)


def load_pretrained(
    directory: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Return a gated model from a folder, with the class that it had, in evaluation mode.

    The folder is one that `save_pretrained` wrote, and its gates are refused if the weights are not those that they
    were saved with; or one that transformers wrote of a gated model, by `model.save_pretrained` or as a trainer's
    checkpoint. Nothing is fetched, no code of the folder is run and nothing is unpickled.

    device : where the model goes; None is the CPU
    dtype  : of all weights, gates included; None is the model's, as its configuration says and `from_pretrained` gives
             it, and for the gates the one that they were saved in
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be one of floating point, such as torch.bfloat16, or None; got {dtype!r}.")
    if device is not None:
        # A device that is not there fails here, and not after the whole model has been read.
        torch.empty(0, device=device)
    folder = Path(directory)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder. Name one that save_pretrained wrote; a model of the hub is not fetched: bring it "
            "here first, with snapshot_download of huggingface_hub."
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no model: config.json is missing. Write it with save_pretrained.")
    model = _load_with_gates(folder)
    if dtype is not None:
        _cast_weights(model, dtype)
    if device is not None:
        nn.Module.to(model, device)
    return model


def _load_with_gates(folder: Path) -> PreTrainedModel:
    if has_gates(folder):
        model = _load_plain(folder, weights_variant(folder))
        load_gates(model, folder)
        return model
    saved = dict(_saved_gates(folder))
    layers = recorded_gates(_config(folder))
    if not saved:
        raise ValueError(
            f"{folder} holds no gates, neither in files of their own nor among the weights of the model. Write them "
            "with save_pretrained of tidegate.torch."
        )
    if not layers:
        raise ValueError(
            f"{folder} holds weights of gates, such as {next(iter(saved))}, but its config.json does not say which "
            f"gates these are ({RECORD_NAME}). Load the model by from_pretrained, give it the gates that it had by "
            "add_gates, and the weights by load_state_dict."
        )
    with _without_load_report():
        model = _load_plain(folder, variant=None)
    for gates in dict.fromkeys(layers.values()):
        install_gates(model, gates, [path for path, own in layers.items() if own == gates])
    own = {name: weight for name, weight in model.state_dict(keep_vars=True).items() if _is_of_gates(name)}
    fill(revert_weight_conversion(model, own), saved, folder, new=True)
    return model.eval()


def _load_plain(folder: Path, variant: str | None) -> PreTrainedModel:
    kind = _model_class(folder)
    return kind.from_pretrained(folder, variant=variant, dtype="auto", local_files_only=True, use_safetensors=True)


def has_gates(folder: Path) -> bool:
    """Tell whether a folder has files of gates."""
    return (folder / DESCRIPTION).exists()


def weights_variant(folder: Path) -> str | None:
    """Return what transformers calls the variant of the weights in a folder with files of gates; None for the usual.

    Raises a `ValueError` if both are there.
    """
    ours, others = (_weight_files(folder, variant) for variant in (VARIANT, None))
    if ours and others:
        raise ValueError(
            f"{folder} holds two models, {ours[0].name} and {others[0].name}, and its gates belong to one of them. "
            "Remove the other."
        )
    return VARIANT if ours else None


def _weight_files(folder: Path, variant: str | None) -> list[Path]:
    """List the files with weights, or with the names of such files, that transformers would read."""
    return [folder / name for name in weight_file_names(variant) if (folder / name).is_file()]


def weight_file_names(variant: str | None) -> tuple[str, str]:
    """Return the names that transformers gives a file of weights, and the index of several."""
    middle = "" if variant is None else f".{variant}"
    return f"model{middle}.safetensors", f"model.safetensors.index{middle}.json"


def _saved_gates(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the gates among the weights that transformers wrote."""
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dictionary
                if _is_of_gates(name):
                    yield name, opened.get_tensor(name)


def _is_of_gates(name: str) -> bool:
    return GATES_NAME in name.split(".")


@contextmanager
def _without_load_report() -> Generator[None]:
    """Keep transformers from reporting weights that the model's class does not know: they are those of the gates."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


@torch.no_grad()
def _cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the weights as `from_pretrained` does: buffers, such as the frequencies of rotations, stay as they are."""
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    model.config.dtype = dtype


def _config(folder: Path) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _model_class(folder: Path) -> type[PreTrainedModel]:
    names: list[str] = _config(folder).architectures or ["none"]
    kind = getattr(transformers, names[0], None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise ValueError(
            f"{folder / 'config.json'} names the architecture {echo(names[0])}, which transformers "
            f"{transformers.__version__} does not have."
        )
    return kind
