"""The folder of one training: its checkpoints, its record, and the model that came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate._files import write_atomically
from tidegate._validation import InputError
from tidegate.lab.training.checkpoint import forget_checkpoint, load_checkpoint, remove_if_empty
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import Record, RecordFile, records_path
from tidegate.lab.training.run import Run
from tidegate.torch.weights import Model, save_model

MODEL_FILE, TOKENIZER_FILE = "model.safetensors", "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TrainingFolder:
    """Where one run keeps what it makes."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the run saves what it needs to go on."""
        return self.path.absolute() / "checkpoints"

    @property
    def model(self) -> Path:
        """Where the trained model is written."""
        return self.path / MODEL_FILE

    @property
    def tokenizer(self) -> str:
        """The byte pairs of the model's tokens, as JSON; empty where a token is a byte, or not known."""
        file = self.path / TOKENIZER_FILE
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @property
    def records(self) -> RecordFile:
        """The file with the record of the run."""
        return RecordFile(records_path(self.path))

    def finished(self, run: Run) -> Record | None:
        """Return the record of a run that ended here, with a model or by diverging; None if there is none.

        Raise InputError if the folder belongs to another run.
        """
        lines = self.records.read()
        records = [line for line in lines if isinstance(line, Record)]
        if len(records) < len(lines):
            raise InputError("out", expected="a folder without a comparison", got=self.path)
        ended = [record for record in records if record.status != "failed"]
        others = {record.id for record in ended} | {file.name.split(".")[0] for file in self._checkpoint_files()}
        if others - {run.id}:
            hint = (
                f"It belongs to another training, {sorted(others - {run.id})[0]}: options or data differ. Go on with "
                "the options of that one, or choose another folder."
            )
            raise InputError("out", expected=f"the folder of the run {run.id}", got=self.path, hint=hint)
        return ended[-1] if ended and (ended[-1].status == "diverged" or self.model.exists()) else None

    def has_begun(self) -> bool:
        """Whether there is a record, or a checkpoint to go on from."""
        return self.records.has_lines() or bool(self._checkpoint_files())

    def keep(self, run: Run, record: Record) -> None:
        """Write the trained model, if the run has one to give, and the record.

        The model comes first: a record without a model would be taken for a run that is done.
        """
        if record.status == "finished":
            save_model(trained_model(run, self.checkpoints), self.model)
            if tokenizer := getattr(run.task.load(), "tokenizer", ""):
                write_atomically(self.path / TOKENIZER_FILE, lambda file: file.write_text(tokenizer, encoding="utf-8"))
        self.records.append(record)
        if record.status != "failed":
            self.forget_checkpoints(run)

    def forget_checkpoints(self, run: Run) -> None:
        """Remove what a run needed to go on: it is done."""
        forget_checkpoint(self.checkpoints, run.id)
        remove_if_empty(self.checkpoints)

    def _checkpoint_files(self) -> list[Path]:
        return list(self.checkpoints.iterdir()) if self.checkpoints.is_dir() else []


def trained_model(run: Run, checkpoints: Path) -> Model:
    """Return the model that a finished run left in its last checkpoint."""
    model = build_model(run.model)
    loaded = load_checkpoint(checkpoints, model, run=run.id)
    if loaded.state is None or loaded.state.step != run.training.steps:
        reasons = " ".join(loaded.problems) or f"{checkpoints} holds none."
        hint = f"{reasons} Run the command again."
        raise InputError("checkpoints", expected="a folder with the trained model", got=checkpoints, hint=hint)
    return model
