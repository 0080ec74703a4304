"""A training run on the disk, so that it can go on after a stop as if there had been none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tidegate._files import write_atomically

_MODEL, _OPTIMIZER = "model", "optimizer"


def checkpoint_path(folder: Path, run: str) -> Path:
    """Where the checkpoint of a run lies."""
    return folder / f"{run}.safetensors"


def forget_checkpoint(folder: Path, run: str) -> None:
    """Remove a run's checkpoint, what a kill in the middle of saving has left, and the folder if it is empty."""
    for file in folder.glob(f"{run}.*"):
        file.unlink(missing_ok=True)
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write all that is needed to go on, whole or not at all; tensors and JSON, nothing that runs when it is read."""
    tensors: dict[str, Tensor] = {f"{_MODEL}.{name}": value for name, value in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"{_OPTIMIZER}.{index}.{name}": value for name, value in values.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    metadata = {"state": json.dumps(state, allow_nan=False)}
    write_atomically(path, lambda file: save_file(contiguous, file, metadata=metadata))


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any] | None:
    """Put the model, and the optimiser if there is one, back where they were, and return the state of the training.

    Without a checkpoint, return None and change nothing.
    """
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        state = json.loads(file.metadata()["state"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, the file is no mapping
    parts = {part: _below(part, tensors) for part in (_MODEL, _OPTIMIZER)}
    model.load_state_dict(parts[_MODEL])
    if optimizer is None:
        return state
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in parts[_OPTIMIZER].items():
        index, _, own = name.partition(".")
        states.setdefault(int(index), {})[own] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    return state


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
