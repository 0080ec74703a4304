"""Checkpoints, from which a run resumes with bit-equal results.

A checkpoint is one safetensors file for any number of processes: the first process gathers the shards and writes it.
The last two checkpoints are kept. Each has a checksum of all its bytes, which is verified before use.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from os.path import samestat
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tidegate._files import TensorFormat, read_tensor_header, require_shapes, write_tensors
from tidegate._json import decode, parse_json
from tidegate._text import shorten
from tidegate._validation import InputError
from tidegate.lab.training.optimizers import OptimizerState, empty_state
from tidegate.lab.training.parallel import Processes, copy_whole, whole_tensor
from tidegate.lab.training.records import ObservationSummary, Point
from tidegate.lab.training.run import Run

_FORMAT = TensorFormat(
    name="tidegate-checkpoint",
    version="2",
    keys=frozenset(("run", "options", "state")),
    holds="checkpoint",
    writer="the same command",
)
_NAME = re.compile(r"([0-9a-f]{16})(?:\.previous)?\.safetensors")


@dataclass(kw_only=True, slots=True)
class TrainingState:
    """The progress of a run, which a checkpoint stores as JSON beside the tensors."""

    step: int = 0
    elapsed: float = 0.0
    started: str = ""
    sums_since_point: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Sums of loss, gradient norm and the gates' gradient norm since the last point."""
    num_summed: int = 0
    """Steps in these sums."""
    batches: str = ""
    """Hash of all batches so far."""
    last_losses: list[float] = field(default_factory=list[float])
    """Losses of the last steps, for `is_spike`."""
    num_spikes: int = 0
    curve: list[Point] = field(default_factory=list[Point])
    seconds: list[float] = field(default_factory=list[float])
    observations: list[ObservationSummary] = field(default_factory=list[ObservationSummary])


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """The result of loading a checkpoint."""

    state: TrainingState | None
    """None if there is no usable checkpoint."""
    problems: tuple[str, ...]
    """Reasons why checkpoints could not be used, as sentences."""


def checkpoint_path(folder: Path, run: str) -> Path:
    """Return the path of the last checkpoint of a run."""
    return folder / f"{run}.safetensors"


def previous_path(path: Path) -> Path:
    """Return the path of the checkpoint before the last."""
    return path.with_suffix(f".previous{path.suffix}")


def has_checkpoint(folder: Path, run: str) -> bool:
    """Return whether a run has a checkpoint."""
    path = checkpoint_path(folder, run)
    return path.exists() or previous_path(path).exists()


def saved_runs(folder: Path) -> dict[str, Run | None]:
    """Return the runs that have checkpoints in a folder, by id; None for one whose checkpoints cannot be read.

    Files with other names are ignored.
    """
    found: dict[str, Run | None] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if name := _NAME.fullmatch(file.name):
            found.setdefault(name[1], None)
            with suppress(OSError, ValueError, KeyError):
                found[name[1]] = Run.from_dict(parse_json(_metadata(file)["options"]))
    return found


def saved_step(folder: Path, run: str) -> int | None:
    """Return the step of the last checkpoint, without verifying its checksum; None if there is none."""
    path = checkpoint_path(folder, run)
    for place in (path, previous_path(path)):
        with suppress(OSError, ValueError, KeyError):
            return parse_json(_metadata(place)["state"])["step"]
    return None


def _metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file, without verifying its checksum."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError as problem:
        raise ValueError(str(problem)) from None


def forget_checkpoint(folder: Path, run: str) -> None:
    """Remove a run's checkpoints, and the partial files of killed writers."""
    for file in folder.glob(f"{run}.*"):
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of checkpoints if it is empty. Do not call this while runs save."""
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run: Run,
    state: TrainingState,
    processes: Processes | None = None,
) -> None:
    """Save everything that a run needs to resume, as tensors and JSON.

    The last checkpoint becomes the previous one; at any moment at least one of them is intact. Several processes must
    call this together, each with its shard of the model: the first one writes, and the others wait.
    """
    is_first = processes is None or processes.is_first
    tensors: dict[str, Tensor] = {}
    for name, value in _named_tensors(model, optimizer.state).items():
        whole = whole_tensor(value)
        if is_first:
            tensors[name] = whole.cpu().contiguous()
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        path = checkpoint_path(folder, run.id)
        write_tensors(
            path,
            lambda file, metadata: save_file(tensors, file, metadata=metadata),
            _FORMAT,
            {
                "run": run.id,
                "options": json.dumps(run.to_dict(), allow_nan=False),
                "state": json.dumps(asdict(state), allow_nan=False),
            },
            num_bytes=sum(value.nbytes for value in tensors.values()),
            previous=previous_path(path),
        )
    if processes is not None:
        processes.wait()


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, run: str
) -> LoadedCheckpoint:
    """Restore the model, and the optimizer if it is given, from the last intact checkpoint.

    Each of several processes loads its own shard. A checkpoint that is damaged or of another run is removed, and the
    previous one is loaded. Without a checkpoint, nothing changes.
    """
    problems: list[str] = []
    path = checkpoint_path(folder, run)
    for place in (path, previous_path(path)):
        moments = {} if optimizer is None else empty_state(optimizer)
        targets = _named_tensors(model, moments)
        try:
            state, tensors = _read(place, targets, run, with_optimizer=optimizer is not None)
        except FileNotFoundError:
            continue
        except ValueError as problem:
            problems.append(str(problem))
            # At the next save it would replace the intact previous one.
            place.unlink(missing_ok=True)
            continue
        for name, target in targets.items():
            copy_whole(tensors[name], target)
        if optimizer is not None:
            optimizer.state.update(moments)
        return LoadedCheckpoint(state=state, problems=tuple(problems))
    return LoadedCheckpoint(state=None, problems=tuple(problems))


def _named_tensors(model: nn.Module, moments: OptimizerState) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name; they share their memory with the model and the optimizer's state."""
    found = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for part, value in moments.get(parameter, {}).items():
            found[f"optimizer.{name}.{part}"] = value.detach()
    return found


def _read(
    path: Path, targets: dict[str, Tensor], run: str, *, with_optimizer: bool
) -> tuple[TrainingState, dict[str, Tensor]]:
    """Read a checkpoint after verifying all of it."""
    file = path.stat()
    header = read_tensor_header(path, _FORMAT)
    if header.metadata["run"] != run:
        hint = f"It belongs to the run {shorten(header.metadata['run'])}."
        raise InputError("checkpoint", expected=f"of the run {run}", got=path, hint=hint)
    require_shapes(
        {name: shape for name, shape in header.shapes.items() if with_optimizer or name.startswith("model.")},
        {name: tuple(value.shape) for name, value in targets.items()},
        complaint=f"{path} does not fit the run",
    )
    try:
        state = decode(TrainingState, parse_json(header.metadata["state"]), where="state")
        tensors = load_file(path)
    except (ValueError, SafetensorError) as problem:
        raise InputError("checkpoint", expected="readable", got=path, hint=f"{problem}") from None
    # A disconnected machine may still save: then state and tensors are of two checkpoints.
    if not samestat(file, path.stat()):
        return _read(path, targets, run, with_optimizer=with_optimizer)
    return state, tensors
