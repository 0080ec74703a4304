"""Checkpoints of several processes, by `torch.distributed.checkpoint`, that any number of processes can go on from.

A checkpoint is a folder: safetensors files, of which each process writes its own, and `state.json` with all else and
the digest of each file. Nothing in it is unpickled. Two are kept, the last and the one before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, distribute_tensor

from tidegate._files import write_content
from tidegate._json import add_checksum, decode, parse_json, verify_checksum
from tidegate._text import shorten
from tidegate._validation import InputError
from tidegate.lab.training.checkpoint import (
    LoadedCheckpoint,
    TrainingState,
    checkpoint_path,
    load_checkpoint,
    previous_path,
)
from tidegate.lab.training.engine.optimizers import make_empty_state, make_optimizer
from tidegate.lab.training.engine.parallel import Processes
from tidegate.lab.training.model import build_model
from tidegate.lab.training.run import Run

_STATE = "state.json"
_KEPT = 2


def save_distributed(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run: str,
    state: TrainingState,
    processes: Processes,
) -> None:
    """Write a checkpoint of all processes; it is there when all of it is, and not before."""
    partial = folder / f"{run}.partial"
    if processes.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    processes.wait()
    writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
    state_dict_saver.save(_tensors(model, optimizer), storage_writer=writer)
    processes.wait()
    if processes.is_first:
        files = {file.name: _digest(file) for file in partial.glob("*.safetensors")}
        content = {"run": run, "state": asdict(state), "files": files}
        write_content(partial / _STATE, json.dumps(add_checksum(content), allow_nan=False).encode())
        place = folder / f"{run}.step-{state.step:09}"
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
        places = _places(folder, run)
        # The training would have gone on from a later one if that were whole.
        last = places.index(place)
        for old in (*places[:last], *places[last + _KEPT :]):
            shutil.rmtree(old)
        # What a process alone has saved is older than this.
        for file in (path := checkpoint_path(folder, run), previous_path(path)):
            file.unlink(missing_ok=True)
    processes.wait()


def forget_distributed(folder: Path, run: str) -> None:
    """Remove the checkpoints of several processes: a process alone has saved a later one."""
    for place in _places(folder, run):
        shutil.rmtree(place, ignore_errors=True)


def load_latest(
    folder: Path,
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    processes: Processes | None = None,
) -> LoadedCheckpoint:
    """Put model and optimiser where they were at the last checkpoint, whichever number of processes has saved it.

    A checkpoint that is damaged is passed over, and the one before is taken. Without any, nothing changes.
    """
    problems: list[str] = []
    for place in _places(folder, run.id):
        try:
            state = _read(place, run.id, model, optimizer, processes)
        except ValueError as problem:
            problems.append(str(problem))
            continue
        return LoadedCheckpoint(state=state, problems=tuple(problems))
    loaded = _load_file(folder, run, model, optimizer, processes)
    return LoadedCheckpoint(state=loaded.state, problems=(*problems, *loaded.problems))


def _load_file(
    folder: Path, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer | None, processes: Processes | None
) -> LoadedCheckpoint:
    """Load what a process alone has saved: in several, each takes its own part of it."""
    path = checkpoint_path(folder, run.id)
    if processes is None:
        return load_checkpoint(path, model, optimizer, run=run.id)
    whole = build_model(run.model).to(run.training.device)
    whole_optimizer = make_optimizer(whole, run)
    loaded = load_checkpoint(path, whole, whole_optimizer, run=run.id)
    if loaded.state is not None:
        assert optimizer is not None
        make_empty_state(optimizer)
        source = _tensors(whole, whole_optimizer)
        for name, target in _tensors(model, optimizer).items():
            _copy_part(target, source[name])
    return loaded


def _read(
    place: Path, run: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, processes: Processes | None
) -> TrainingState:
    try:
        content = verify_checksum(parse_json((place / _STATE).read_bytes()))
        state: TrainingState = decode(TrainingState, content["state"], where="state")
        damaged = [name for name, digest in content["files"].items() if _digest(place / Path(name).name) != digest]
    except (OSError, ValueError, KeyError, AttributeError) as problem:
        raise InputError("checkpoint", expected="whole", got=place, hint=f"{problem}") from None
    if damaged:
        raise InputError("checkpoint", expected="whole", got=place, hint=f"{damaged[0]} does not fit its digest.")
    if content["run"] != run:
        hint = f"It belongs to the run {shorten(str(content['run']))}."
        raise InputError("checkpoint", expected=f"of the run {run}", got=place, hint=hint)
    if optimizer is not None:
        make_empty_state(optimizer)
    targets = _tensors(model, optimizer)
    # Whole and of this run it fits: what goes wrong from here on is no reason to begin anew.
    with warnings.catch_warnings(action="ignore"):
        # Alone, it warns that it is.
        reader = HuggingFaceStorageReader(str(place))
        state_dict_loader.load(targets, storage_reader=reader, no_dist=processes is None)
    return state


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """All tensors of a checkpoint by name; they share their memory with the model and the optimiser."""
    found = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for part, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{part}"] = value.detach()
    return found


def _copy_part(target: Tensor, whole: Tensor) -> None:
    if isinstance(target, DTensor):
        part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(whole)


def saved_step(folder: Path, run: str) -> int | None:
    """The step of the last checkpoint that several processes have saved; None if there is none."""
    places = _places(folder, run)
    return int(places[0].name.rpartition("-")[2]) if places else None


def has_checkpoint(folder: Path, run: str) -> bool:
    """Whether a run has left a checkpoint, of one process or of several."""
    return checkpoint_path(folder, run).exists() or saved_step(folder, run) is not None


def _places(folder: Path, run: str) -> list[Path]:
    """The checkpoints of a run, the last first."""
    return sorted(folder.glob(f"{run}.step-*"), reverse=True) if folder.is_dir() else []


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
