"""Progress of all verbs: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, final

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBars
from rich.table import Column
from rich.text import Text

from tidegate._text import number_of

if TYPE_CHECKING:
    from tidegate.lab.training.events import Ended, Event, Notice, PartsDone, Phase
    from tidegate.lab.training.events import Progress as RunProgress

_SECONDS_BETWEEN_LINES = 15.0
"""Between two lines about work that goes on; what ends has a line of its own at once."""


class Display(Protocol):
    """Shows the events of the lab."""

    def show(self, event: Event) -> None:
        """Show an event."""
        ...


@contextmanager
def display(
    console: Console, *, quiet: bool, examples: str = "tokens", peak: float | None = None
) -> Generator[Display]:
    """Give a display: bars on a terminal, lines elsewhere, nothing with `quiet`.

    examples : what the speed of runs is counted in, such as "images"
    peak     : operations a second that the device can do; None leaves out the share of it that runs reach
    """
    if quiet:
        yield _Silence()
    elif console.is_terminal:
        with _bars(console) as bars, _logged_lines(console):
            yield _Bars(bars, _Speed(examples, peak))
    else:
        with _logged_lines(console):
            yield _Lines(console, _Speed(examples, peak))


@contextmanager
def _logged_lines(console: Console) -> Generator[None]:
    """Print what tasks log while they prepare data."""
    logger, handler = logging.getLogger("tidegate.lab.tasks"), _LineHandler(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@final
class _LineHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print its message as a line."""
        _print(self.console, record.getMessage())


@final
class _Speed:
    """The speed of a run in words, and the share of the device's that it is, if that is known."""

    def __init__(self, examples: str, peak: float | None) -> None:
        self.examples = examples
        self.peak = peak

    def of(self, event: RunProgress) -> str:
        """Return words such as "12,000 tokens/s, 41 % of this machine's peak"."""
        if not event.seconds:
            return f"0 {self.examples}/s"
        share = f", {event.flops / event.seconds / self.peak:.0%} of this machine's peak" if self.peak else ""
        return f"{event.tokens / event.seconds:,.0f} {self.examples}/s{share}"


@final
class _Silence:
    def show(self, event: Event) -> None:
        """Say nothing."""


@final
class _Remaining:
    """How long a phase and those after it still take, judged by the work done since it began."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.total = 0
        self.later = 0
        self.ended = 0
        self.shares: dict[str, float] = {}
        self.begun: dict[str, float] = {}

    def phase(self, event: Phase) -> None:
        """Note that a phase begins."""
        self.start, self.total, self.later, self.ended = time.monotonic(), event.num_runs, event.num_later, 0
        self.shares.clear()
        self.begun.clear()

    def progress(self, event: RunProgress) -> None:
        """Note that a run went on; what it had done before this phase is not counted as work."""
        share = event.step / event.steps
        self.begun.setdefault(event.run, share)
        self.shares[event.run] = share

    def end(self, event: Ended) -> None:
        """Note that a run is over."""
        self.begun.setdefault(event.run, 0.0)
        self.shares[event.run] = 1.0
        self.ended += 1

    def seconds(self) -> float | None:
        """Until the end of all runs; None before anything is known."""
        done = sum(share - self.begun[run] for run, share in self.shares.items())
        left = self.total + self.later - sum(self.shares.values())
        return left * (time.monotonic() - self.start) / done if done > 0 else None


@final
class _PartsClock:
    """How long work that is counted in parts still takes, judged by the parts that are done."""

    def __init__(self) -> None:
        self.starts: dict[str, float] = {}

    def seconds(self, event: PartsDone) -> float | None:
        """Until the end of the work; None before any part is done."""
        start = self.starts.setdefault(event.work, time.monotonic())
        return (time.monotonic() - start) / event.done * (event.total - event.done) if event.done else None


@final
class _Bars:
    """One bar a run and one for all; one bar for each work that is counted in parts."""

    def __init__(self, bars: ProgressBars, speed: _Speed) -> None:
        self.bars = bars
        self.speed = speed
        self.tasks: dict[str, TaskID] = {}
        self.overall: TaskID | None = None
        self.remaining = _Remaining()
        self.clock = _PartsClock()

    def show(self, event: Event) -> None:
        """Draw it."""
        from tidegate.lab.training.events import Notice, PartsDone, Phase, Progress

        if isinstance(event, Phase):
            self._phase(event)
        elif isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, PartsDone):
            self._parts(event)
        elif isinstance(event, Notice):
            _print(self.bars.console, _notice_line(event))
        else:
            self._show_end(event)

    def _parts(self, event: PartsDone) -> None:
        if event.work not in self.tasks:
            self.tasks[event.work] = self.bars.add_task(event.work, total=event.total, note="", style="")
        words = [_parts_words(event)]
        seconds = self.clock.seconds(event)
        if event.done < event.total:
            words += [f"{_clock(seconds)} left"] if seconds is not None else []
            words += [event.item] if event.item else []
        self.bars.update(self.tasks[event.work], completed=event.done, note="  ".join(words))

    def _phase(self, event: Phase) -> None:
        if self.overall is not None:
            self.bars.remove_task(self.overall)
        self.remaining.phase(event)
        before = f"{event.num_done} there already" if event.num_done else ""
        self.overall = self.bars.add_task(event.name, total=event.num_runs or None, note=before, style="bold")

    def _progress(self, event: RunProgress) -> None:
        if event.run not in self.tasks:
            self.tasks[event.run] = self.bars.add_task(_run_words(event), total=1.0, note="", style="")
        self.remaining.progress(event)
        note = f"loss {event.loss:.3f}  {self.speed.of(event)}  {_clock(_seconds_left(event))} left"
        self.bars.update(self.tasks[event.run], completed=event.step / event.steps, note=note)
        self._overall()

    def _show_end(self, event: Ended) -> None:
        if (task := self.tasks.pop(event.run, None)) is not None:
            self.bars.remove_task(task)
        self.remaining.end(event)
        _print(self.bars.console, _end_line(event))
        self._overall()

    def _overall(self) -> None:
        assert self.overall is not None
        seconds = self.remaining.seconds()
        left = "" if seconds is None else f", {_clock(seconds)} left in all"
        note = f"{self.remaining.ended} of {number_of(self.remaining.total, 'run')}{left}"
        self.bars.update(self.overall, completed=sum(self.remaining.shares.values()), note=note)


@final
class _Lines:
    """A line when something ends, and now and then in between."""

    def __init__(self, console: Console, speed: _Speed) -> None:
        self.console = console
        self.speed = speed
        self.remaining = _Remaining()
        self.clock = _PartsClock()
        self.last = time.monotonic()

    def show(self, event: Event) -> None:
        """Write it."""
        from tidegate.lab.training.events import Notice, PartsDone, Phase, Progress

        if isinstance(event, Phase):
            self.remaining.phase(event)
            self._write(_phase_line(event))
        elif isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, PartsDone):
            self._parts(event)
        elif isinstance(event, Notice):
            self._write(_notice_line(event))
        else:
            self.remaining.end(event)
            count = f"{self.remaining.ended} of {self.remaining.total}"
            self._write(f"{_end_line(event)} ({count}{self._time_left()})")

    def _progress(self, event: RunProgress) -> None:
        self.remaining.progress(event)
        if time.monotonic() - self.last > _SECONDS_BETWEEN_LINES:
            run = f"{_run_words(event)}: step {event.step} of {event.steps}"
            self._write(f"{run}, loss {event.loss:.3f}, {self.speed.of(event)}{self._time_left()}")

    def _parts(self, event: PartsDone) -> None:
        seconds = self.clock.seconds(event)
        if event.done == event.total:
            self._write(f"{event.work}: {_parts_words(event)}")
        elif time.monotonic() - self.last > _SECONDS_BETWEEN_LINES:
            left = "" if seconds is None else f", about {_clock(seconds)} left"
            item = f" ({event.item})" if event.item else ""
            self._write(f"{event.work}: {_parts_words(event)}{item}{left}")

    def _time_left(self) -> str:
        seconds = self.remaining.seconds()
        return "" if not seconds else f", about {_clock(seconds)} left in all"

    def _write(self, line: str) -> None:
        self.last = time.monotonic()
        _print(self.console, line)


@final
class _Name(ProgressColumn):
    """Shows a bar's name without reading markup in it: names of variants may look like markup."""

    def render(self, task: Task) -> Text:
        """Return the name in the style of the task."""
        return Text(task.description, style=task.fields["style"])


def _bars(console: Console) -> ProgressBars:
    return ProgressBars(
        _Name(table_column=Column(no_wrap=True)),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        console=console,
    )


def _print(console: Console, line: str) -> None:
    """Print the line without markup, colours or wrapping."""
    console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _phase_line(event: Phase) -> str:
    before = f" ({event.num_done} there already)" if event.num_done else ""
    if not event.num_runs and not event.num_done:
        return f"{event.name}..."
    return f"{event.name}: {number_of(event.num_runs, 'run')}{before}"


def _parts_words(event: PartsDone) -> str:
    return f"{event.done:,} of {number_of(event.total, event.unit)}"


def _end_line(event: Ended) -> str:
    result = event.status if event.loss is None else f"validation loss {event.loss:.4f}"
    return f"{_run_words(event)}: {result}"


def _notice_line(event: Notice) -> str:
    return f"{_run_words(event)}: {event.text}" if event.run else event.text


def _run_words(event: RunProgress | Notice | Ended) -> str:
    return f"{event.variant}, seed {event.seed}"


def _seconds_left(event: RunProgress) -> float:
    return event.seconds / event.step * (event.steps - event.step)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
