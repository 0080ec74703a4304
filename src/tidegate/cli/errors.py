"""How a command ends when it cannot go on."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def stop(message: object, *, code: int = BAD_INPUT) -> NoReturn:
    """Say why on the error stream, in one line, and end."""
    line = " ".join(str(message).split())
    label = ("stopped: ", "bold yellow") if code == INTERRUPTED else ("error: ", "bold red")
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble(label, line))
    raise typer.Exit(code)
