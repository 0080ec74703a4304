"""The folder of one training: its log, checkpoints and record, and the trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from tidegate._files import remove_partial_files, write_atomically, write_content
from tidegate._json import finite, parse_json
from tidegate._validation import InputError
from tidegate.lab.training.checkpoint import forget_checkpoint, load_checkpoint, remove_if_empty, saved_runs
from tidegate.lab.training.events import Notice, Progress, RunEvent
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import Record, RecordFile, records_path
from tidegate.lab.training.run import Run
from tidegate.torch.weights import Model, load_model, save_model

MODEL_FILE, TOKENIZER_FILE = "model.safetensors", "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TrainingFolder:
    """The output folder of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the run saves its checkpoints."""
        return self.path.absolute() / "checkpoints"

    @property
    def model(self) -> Path:
        """Where the trained model is written."""
        return self.path / MODEL_FILE

    @property
    def tokenizer(self) -> str:
        """The model's BPE tokenizer, as JSON; empty if its tokens are bytes, or unknown."""
        file = self.path / TOKENIZER_FILE
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @property
    def records(self) -> RecordFile:
        """The file with the record of the run."""
        return RecordFile(records_path(self.path))

    def finished(self, run: Run) -> Record | None:
        """Return the record of the run if it ended here, with a model or by diverging; None if it did not.

        Raises:
            InputError: The folder belongs to another run or to a comparison, or the trained model is damaged.
        """
        lines = self.records.read()
        records = [line for line in lines if isinstance(line, Record)]
        if len(records) < len(lines):
            raise InputError("out", expected="a folder without a comparison", got=self.path)
        ended = [record for record in records if record.status != "failed"]
        others: dict[str, Run | None] = saved_runs(self.checkpoints) | {record.id: record.run for record in ended}
        others.pop(run.id, None)
        for other, described in others.items():
            which = "its options or data differ" if described is None else run.describe_differences(described)
            hint = f"It belongs to the run {other}: {which}. Use the options of that run, or choose another folder."
            raise InputError("out", expected=f"the folder of the run {run.id}", got=self.path, hint=hint)
        if not ended or (ended[-1].status == "finished" and not self.model.exists()):
            return None
        if ended[-1].status == "finished":
            try:
                load_model(self.model)
            except ValueError as problem:
                hint = f"{problem} Remove that file, and rerun the command to train the model again."
                raise InputError("out", expected="a folder with an intact model", got=self.path, hint=hint) from None
        return ended[-1]

    def has_begun(self) -> bool:
        """Return whether there is a record, or a checkpoint to resume from."""
        return self.records.has_lines() or bool(saved_runs(self.checkpoints))

    def remove_partial_files(self) -> None:
        """Remove the partial files of killed commands. Call this only while the records are locked."""
        for folder in (self.path, self.checkpoints):
            remove_partial_files(folder)

    def keep(self, run: Run, record: Record) -> None:
        """Write the trained model, if the run has one, and the record.

        The model comes first: a record without a model would mark the run as done.
        """
        if record.status == "finished":
            save_model(trained_model(run, self.checkpoints), self.model)
            if tokenizer := getattr(run.task.load(), "tokenizer", ""):
                write_atomically(self.path / TOKENIZER_FILE, lambda file: file.write_text(tokenizer, encoding="utf-8"))
        self.records.append(record)
        if record.status != "failed":
            self.forget_checkpoints(run)

    def forget_checkpoints(self, run: Run) -> None:
        """Remove the checkpoints of a run that has ended."""
        forget_checkpoint(self.checkpoints, run.id)
        remove_if_empty(self.checkpoints)


def trained_model(run: Run, checkpoints: Path) -> Model:
    """Return the model that a finished run left in its last checkpoint."""
    model = build_model(run.model)
    loaded = load_checkpoint(checkpoints, model, run=run.id)
    if loaded.state is None or loaded.state.step != run.training.steps:
        reasons = " ".join(loaded.problems) or f"{checkpoints} holds none."
        hint = f"{reasons} Run the command again."
        raise InputError("checkpoints", expected="a folder with the trained model", got=checkpoints, hint=hint)
    return model


def log_path(folder: Path) -> Path:
    """Return the path of the log in a run's folder."""
    return folder / "log.jsonl"


@final
class RunLog:
    """Writes the events of a run to `log.jsonl`, and optionally to TensorBoard's event files.

    A run that resumes from a checkpoint repeats the steps after it: their old lines are dropped.
    """

    def __init__(self, folder: Path, *, peak: float | None = None, tensorboard: bool = False) -> None:
        """Open the log of a run's folder, with event files too if `tensorboard`.

        `peak` is the peak FLOP/s of the device; None leaves out the share of it.

        Raises:
            ModuleNotFoundError: TensorBoard is not installed.
        """
        self._path = log_path(folder)
        self._peak = peak
        self._new_writer: Callable[..., Any] | None = None
        self._writer: Any = None
        self._has_steps = False
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._new_writer = partial(SummaryWriter, str(folder / "tensorboard"))

    def report(self, event: RunEvent) -> None:
        """Write an event."""
        if isinstance(event, Notice):
            self._append({"notice": event.text})
            return
        if not self._has_steps:
            self._has_steps = True
            if self._path.exists():
                # Keep only the lines of earlier steps; one that a crash truncated is dropped too.
                kept = [line for line in self._path.read_bytes().split(b"\n") if _step_of(line) < event.step]
                write_content(self._path, b"".join(line + b"\n" for line in kept))
            # TensorBoard hides the steps of earlier files from this one on.
            self._writer = self._new_writer and self._new_writer(purge_step=event.step)
        line = progress_figures(event, peak=self._peak)
        self._append(line)
        if self._writer is not None:
            for name in ("loss", "tokens_per_second", "share_of_peak"):
                if line.get(name) is not None:
                    self._writer.add_scalar(name, line[name], event.step)

    def close(self) -> None:
        """Flush the event files."""
        if self._writer is not None:
            self._writer.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def progress_figures(event: Progress, *, peak: float | None) -> dict[str, Any]:
    """Return the log line of a step: loss, tokens per second, share of the peak, and time left."""
    speed = event.tokens / event.seconds if event.seconds else 0.0
    share = event.flops / event.seconds / peak if peak and event.seconds else None
    return {
        "step": event.step,
        "tokens": event.tokens,
        "loss": finite(event.loss),
        "tokens_per_second": speed,
        "share_of_peak": share,
        "seconds": event.seconds,
        "seconds_left": event.seconds / event.step * (event.steps - event.step),
    }


def _step_of(line: bytes) -> float:
    """Return the step of a line, 0 for a notice, infinity for a line that is damaged."""
    try:
        return float(parse_json(line).get("step", 0))
    except (ValueError, AttributeError, TypeError):
        return float("inf")
