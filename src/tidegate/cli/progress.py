"""Progress of all verbs: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBars
from rich.table import Column

from tidegate._text import number_of

if TYPE_CHECKING:
    from tidegate.lab.training.events import Ended, Event, Notice, PartsDone, Phase, Progress, Tell

_SECONDS_BETWEEN_LINES = 15.0
"""Minimum time between two lines about running work; ends are printed at once."""


@contextmanager
def display(console: Console, *, quiet: bool, examples: str = "tokens", peak: float | None = None) -> Generator[Tell]:
    """Yield a callback that shows the lab's events: as bars on a terminal, as lines elsewhere.

    `examples` is the unit of the throughput, such as "images". `peak` is the peak FLOP/s of the device; None omits the
    utilization.
    """
    if quiet:
        yield lambda _event: None
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
        )
        with ProgressBars(*columns, console=console) as bars, _logged_lines(console):
            yield _Bars(bars, examples, peak).show
    else:
        with _logged_lines(console):
            yield _Lines(console, examples, peak).show


@contextmanager
def _logged_lines(console: Console) -> Generator[None]:
    """Print the log messages of tasks that prepare data."""
    logger, handler = logging.getLogger("tidegate.lab.tasks"), logging.Handler()
    handler.emit = lambda record: _print(console, record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@final
class _Remaining:
    """Estimate of the remaining time, from the work done in the current phase."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.total = 0
        self.later = 0
        self.ended = 0
        self.done: dict[str, float] = {}
        """Fraction of each run that is done."""
        self.done_before: dict[str, float] = {}
        """Fraction of each run that was done before this phase; it does not count as work."""
        self.starts_of_parts: dict[str, float] = {}

    def begin(self, phase: Phase) -> None:
        """Start a phase."""
        self.start, self.total, self.later, self.ended = time.monotonic(), phase.num_runs, phase.num_later, 0
        self.done.clear()
        self.done_before.clear()

    def progress(self, event: Progress) -> None:
        """Record the progress of a run."""
        self.done[event.run] = event.step / event.steps
        self.done_before.setdefault(event.run, self.done[event.run])

    def end(self, event: Ended) -> None:
        """Record the end of a run."""
        self.done[event.run] = 1.0
        self.done_before.setdefault(event.run, 0.0)
        self.ended += 1

    def seconds(self) -> float | None:
        """Return the time until all runs end, later phases included; None if there is no progress yet."""
        done = sum(share - self.done_before[run] for run, share in self.done.items())
        left = self.total + self.later - sum(self.done.values())
        return left * (time.monotonic() - self.start) / done if done > 0 else None

    def seconds_of_parts(self, event: PartsDone) -> float | None:
        """Return the time until the end of work that is counted in parts; None before the first part is done."""
        start = self.starts_of_parts.setdefault(event.work, time.monotonic())
        return (time.monotonic() - start) / event.done * (event.total - event.done) if event.done else None


@final
class _Bars:
    """One bar per run and one for the phase; one bar for each work that is counted in parts."""

    def __init__(self, bars: ProgressBars, examples: str, peak: float | None) -> None:
        self.bars = bars
        self.examples = examples
        self.peak = peak
        self.tasks: dict[str, TaskID] = {}
        self.overall: TaskID | None = None
        self.remaining = _Remaining()

    def show(self, event: Event) -> None:
        """Draw an event."""
        from tidegate.lab.training.events import Notice, PartsDone, Phase, Progress

        if isinstance(event, Phase):
            if self.overall is not None:
                self.bars.remove_task(self.overall)
            self.remaining.begin(event)
            before = f"{event.num_done} already done" if event.num_done else ""
            self.overall = self.bars.add_task(event.name, total=event.num_runs or None, note=before)
        elif isinstance(event, Progress):
            self.remaining.progress(event)
            left = _clock(event.seconds / event.step * (event.steps - event.step))
            note = f"loss {event.loss:.3f}  {_speed(event, self.examples, self.peak)}  {left} left"
            self._update(event.run, _run_name(event), event.step / event.steps, 1.0, note)
            self._update_overall()
        elif isinstance(event, PartsDone):
            words = [_parts(event)]
            seconds = self.remaining.seconds_of_parts(event)
            if event.done < event.total:
                words += [f"{_clock(seconds)} left"] if seconds is not None else []
                words += [event.item] if event.item else []
            self._update(event.work, event.work, event.done, event.total, "  ".join(words))
        elif isinstance(event, Notice):
            _print(self.bars.console, _notice_line(event))
        else:
            if (task := self.tasks.pop(event.run, None)) is not None:
                self.bars.remove_task(task)
            self.remaining.end(event)
            _print(self.bars.console, _end_line(event))
            self._update_overall()

    def _update(self, key: str, name: str, done: float, total: float, note: str) -> None:
        if key not in self.tasks:
            self.tasks[key] = self.bars.add_task(name, total=total, note="")
        self.bars.update(self.tasks[key], completed=done, note=note)

    def _update_overall(self) -> None:
        assert self.overall is not None
        seconds = self.remaining.seconds()
        left = "" if seconds is None else f", {_clock(seconds)} left in total"
        note = f"{self.remaining.ended} of {number_of(self.remaining.total, 'run')}{left}"
        self.bars.update(self.overall, completed=sum(self.remaining.done.values()), note=note)


@final
class _Lines:
    """A line for each end, and progress lines in between."""

    def __init__(self, console: Console, examples: str, peak: float | None) -> None:
        self.console = console
        self.examples = examples
        self.peak = peak
        self.remaining = _Remaining()
        self.last = time.monotonic()

    def show(self, event: Event) -> None:
        """Print a line for the event; skip progress that follows the last line too soon."""
        from tidegate.lab.training.events import Notice, PartsDone, Phase, Progress

        is_time = time.monotonic() - self.last > _SECONDS_BETWEEN_LINES
        if isinstance(event, Phase):
            self.remaining.begin(event)
            before = f" ({event.num_done} already done)" if event.num_done else ""
            has_runs = event.num_runs or event.num_done
            runs = f": {number_of(event.num_runs, 'run')}{before}" if has_runs else "..."
            self._write(f"{event.name}{runs}")
        elif isinstance(event, Progress):
            self.remaining.progress(event)
            if is_time:
                speed = _speed(event, self.examples, self.peak)
                run = f"{_run_name(event)}: step {event.step} of {event.steps}"
                self._write(f"{run}, loss {event.loss:.3f}, {speed}{self._time_left()}")
        elif isinstance(event, PartsDone):
            seconds = self.remaining.seconds_of_parts(event)
            if event.done == event.total:
                self._write(f"{event.work}: {_parts(event)}")
            elif is_time:
                left = "" if seconds is None else f", about {_clock(seconds)} left"
                item = f" ({event.item})" if event.item else ""
                self._write(f"{event.work}: {_parts(event)}{item}{left}")
        elif isinstance(event, Notice):
            self._write(_notice_line(event))
        else:
            self.remaining.end(event)
            count = f"{self.remaining.ended} of {self.remaining.total}"
            self._write(f"{_end_line(event)} ({count}{self._time_left()})")

    def _time_left(self) -> str:
        seconds = self.remaining.seconds()
        return "" if not seconds else f", about {_clock(seconds)} left in total"

    def _write(self, line: str) -> None:
        self.last = time.monotonic()
        _print(self.console, line)


def _print(console: Console, line: str) -> None:
    """Print the line without markup, colors or wrapping."""
    console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _speed(event: Progress, examples: str, peak: float | None) -> str:
    """Return the throughput, such as "12,000 tokens/s, 41% of peak FLOP/s"."""
    if not event.seconds:
        return f"0 {examples}/s"
    share = f", {event.flops / event.seconds / peak:.0%} of peak FLOP/s" if peak else ""
    return f"{event.tokens / event.seconds:,.0f} {examples}/s{share}"


def _parts(event: PartsDone) -> str:
    return f"{event.done:,} of {number_of(event.total, event.unit)}"


def _end_line(event: Ended) -> str:
    result = event.status if event.loss is None else f"validation loss {event.loss:.4f}"
    return f"{_run_name(event)}: {result}"


def _notice_line(event: Notice) -> str:
    return f"{_run_name(event)}: {event.text}" if event.run else event.text


def _run_name(event: Progress | Notice | Ended) -> str:
    return f"{event.variant}, seed {event.seed}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
