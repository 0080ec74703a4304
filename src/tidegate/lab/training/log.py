"""A run's log: a line of JSON for each step, and a copy for TensorBoard if it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, final

from tidegate._files import write_content
from tidegate._json import finite, parse_json
from tidegate.lab.training.events import Notice, Progress, RunEvent


def log_path(folder: Path) -> Path:
    """Return where the log of a run lies in its folder."""
    return folder / "log.jsonl"


@final
class RunLog:
    """Writes what a run reports to `log.jsonl`, and to event files of TensorBoard if asked to.

    A run that goes on from a checkpoint repeats the steps after it: what the log has of those is dropped.
    """

    def __init__(self, folder: Path, *, peak: float | None = None, tensorboard: bool = False) -> None:
        """Open the log of a run's folder.

        peak        : operations a second that the device can do; None leaves out the share of it
        tensorboard : whether to write event files too; a `ModuleNotFoundError` if the package is missing
        """
        self._path = log_path(folder)
        self._peak = peak
        self._new_writer: Callable[..., Any] | None = None
        self._writer: Any = None
        self._begun = False
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._new_writer = partial(SummaryWriter, str(folder / "tensorboard"))

    def report(self, event: RunEvent) -> None:
        """Write down an event."""
        if isinstance(event, Notice):
            self._append({"notice": event.text})
            return
        if not self._begun:
            self._begun = True
            self._drop_from(event.step)
            # Steps from this one on hide those that an earlier file has.
            self._writer = self._new_writer and self._new_writer(purge_step=event.step)
        line = progress_figures(event, peak=self._peak)
        self._append(line)
        if self._writer is not None:
            for name in ("loss", "tokens_per_second", "share_of_peak"):
                if line.get(name) is not None:
                    self._writer.add_scalar(name, line[name], event.step)

    def close(self) -> None:
        """See all of it on the disk."""
        if self._writer is not None:
            self._writer.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def _drop_from(self, step: int) -> None:
        """Keep the lines of earlier steps alone; one that a crash cut off is dropped too."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_bytes().split(b"\n") if _step_of(line) < step]
        write_content(self._path, b"".join(line + b"\n" for line in kept))


def progress_figures(event: Progress, *, peak: float | None) -> dict[str, Any]:
    """Return what is said of a step: loss, speed, share of the peak, and the time that is left."""
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
    """The step of a line, 0 for a notice; infinite for what is no whole line."""
    try:
        return float(parse_json(line).get("step", 0))
    except (ValueError, AttributeError, TypeError):
        return float("inf")
