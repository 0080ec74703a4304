"""How far work has come that is done part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def parts_display(
    console: Console, doing: str, parts: str, *, quiet: bool = False
) -> Generator[Callable[[int, int], None]]:
    """A bar if the console is a terminal, a line now and then if not, nothing if it is to be quiet.

    It gives a function that is to be told how many parts of how many are done.

    doing : what is done, such as "observing"
    parts : what is counted, such as "sequences"
    """
    if quiet:
        yield lambda _done, _whole: None
    elif console.is_terminal:
        columns = (TextColumn(doing), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn(parts))
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bars:
            task = bars.add_task("", total=None)
            yield lambda done, whole: bars.update(task, completed=done, total=whole)
    else:
        yield _lines(console, doing, parts)


def _lines(console: Console, doing: str, parts: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def tell(done: int, whole: int) -> None:
        nonlocal last
        if done == whole or time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            console.print(f"{doing}: {done} of {whole} {parts}", soft_wrap=True)

    return tell
