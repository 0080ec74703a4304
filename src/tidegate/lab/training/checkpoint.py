"""A training run on the disk, so that it can go on after a stop as if there had been none.

Two checkpoints are kept, the last and the one before. Each has a digest of all of its bytes inside, and is checked
before anything of it is used.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from os.path import samestat
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tidegate._files import TensorFormat, read_tensor_header, require_shapes, write_tensors
from tidegate._json import decode, parse_json
from tidegate._text import shorten
from tidegate._validation import InputError
from tidegate.lab.training.records import ObservationSummary, Point

_Value = TypeVar("_Value")

_MODEL, _OPTIMIZER = "model", "optimizer"
_FORMAT = TensorFormat(
    name="tidegate-checkpoint",
    version="1",
    keys=frozenset(("run", "state")),
    holds="checkpoint",
    writer="the same command",
)


@dataclass(kw_only=True, slots=True)
class TrainingState:
    """Where a run stands, as JSON: what a checkpoint holds besides tensors."""

    step: int = 0
    elapsed: float = 0.0
    started: str = ""
    sums_since_point: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Of loss, gradient norm and the gates' gradient norm since the last point."""
    num_summed: int = 0
    """Steps in these sums."""
    batches: str = ""
    """Hash of all batches so far."""
    last_losses: list[float] = field(default_factory=list[float])
    """Of the last steps, by which a spike is told."""
    num_spikes: int = 0
    curve: list[Point] = field(default_factory=list[Point])
    seconds: list[float] = field(default_factory=list[float])
    observations: list[ObservationSummary] = field(default_factory=list[ObservationSummary])


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """What was found where a run keeps its checkpoints."""

    state: TrainingState | None
    """None where no checkpoint could be used."""
    problems: tuple[str, ...]
    """Why a checkpoint that is there could not be used, in sentences."""


def checkpoint_path(folder: Path, run: str) -> Path:
    """Where the checkpoint of a run lies."""
    return folder / f"{run}.safetensors"


def previous_path(path: Path) -> Path:
    """Where the checkpoint before the last lies."""
    return path.with_suffix(f".previous{path.suffix}")


def forget_checkpoint(folder: Path, run: str) -> None:
    """Remove a run's checkpoints, and what a kill in the middle of saving has left."""
    for file in folder.glob(f"{run}.*"):
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of checkpoints if there is none left; not while runs save, which need it there."""
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, run: str, state: TrainingState
) -> None:
    """Write all that is needed to go on; tensors and JSON, nothing that runs when it is read.

    The checkpoint that was there becomes the previous one. At every moment at least one of them is whole.

    run : the id of the run that it belongs to
    """
    tensors: dict[str, Tensor] = {f"{_MODEL}.{name}": value for name, value in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"{_OPTIMIZER}.{index}.{name}": value for name, value in values.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    write_tensors(
        path,
        lambda file, metadata: save_file(contiguous, file, metadata=metadata),
        _FORMAT,
        {"run": run, "state": json.dumps(asdict(state), allow_nan=False)},
        num_bytes=sum(value.nbytes for value in contiguous.values()),
        previous=previous_path(path),
    )


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, run: str
) -> LoadedCheckpoint:
    """Put the model, and the optimiser if there is one, back where they were at the last checkpoint that is whole.

    A checkpoint that is damaged, or not of this run, is removed, and the previous one is taken. Without any, nothing
    changes.
    """
    problems: list[str] = []
    for place in (path, previous_path(path)):
        try:
            state, parts = _read(place, model, optimizer, run)
        except FileNotFoundError:
            continue
        except ValueError as problem:
            problems.append(str(problem))
            # Left there, it would become the previous one in the place of one that is whole.
            place.unlink(missing_ok=True)
            continue
        model.load_state_dict(parts[_MODEL])
        if optimizer is not None:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": _by_index(parts[_OPTIMIZER])})
        return LoadedCheckpoint(state=state, problems=tuple(problems))
    return LoadedCheckpoint(state=None, problems=tuple(problems))


def _read(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, run: str
) -> tuple[TrainingState, dict[str, dict[str, Tensor]]]:
    """Read a checkpoint after checking that all of it can be used."""
    file = path.stat()
    header = read_tensor_header(path, _FORMAT)
    if header.metadata["run"] != run:
        hint = f"It belongs to the run {shorten(header.metadata['run'])}."
        raise InputError("checkpoint", expected=f"of the run {run}", got=path, hint=hint)
    shapes = {part: _below(part, header.shapes) for part in (_MODEL, _OPTIMIZER)}
    require_shapes(
        shapes[_MODEL],
        {name: tuple(value.shape) for name, value in model.state_dict().items()},
        complaint=f"{path} does not fit the run",
    )
    if optimizer is not None:
        _require_optimizer_shapes(shapes[_OPTIMIZER], optimizer, path)
    try:
        state = decode(TrainingState, parse_json(header.metadata["state"]), where="state")
        tensors = load_file(path)
    except (ValueError, SafetensorError) as problem:
        raise InputError("checkpoint", expected="readable", got=path, hint=f"{problem}") from None
    # A process of a machine that is cut off may still save: state and tensors would be of two checkpoints.
    if not samestat(file, path.stat()):
        return _read(path, model, optimizer, run)
    return state, {part: _below(part, tensors) for part in (_MODEL, _OPTIMIZER)}


def _require_optimizer_shapes(shapes: dict[str, tuple[int, ...]], optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Raise InputError unless the state has for each parameter single numbers, and tensors of its shape, alone."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {str(index): tuple(parameter.shape) for index, parameter in enumerate(parameters)}
    if {name.partition(".")[0] for name in shapes} != set(own):
        hint = "Its optimizer has other parameters."
        raise InputError("checkpoint", expected="one that fits the run", got=path, hint=hint)
    for name, shape in shapes.items():
        if shape not in ((), expected := own[name.partition(".")[0]]):
            hint = f"{_OPTIMIZER}.{name} has shape {shape}, expected {expected}."
            raise InputError("checkpoint", expected="one that fits the run", got=path, hint=hint)


def _by_index(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, own = name.partition(".")
        states.setdefault(int(index), {})[own] = value
    return states


def _below(prefix: str, values: dict[str, _Value]) -> dict[str, _Value]:
    return {name.removeprefix(f"{prefix}."): value for name, value in values.items() if name.startswith(f"{prefix}.")}
