"""How a command ends when it cannot go on."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import typer
from rich.text import Text

from tidegate._text import printable
from tidegate.cli.console import new_console

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

_LONGEST = 4000
"""Letters of a message; what is longer loses its middle."""

# What it calls bad options is not exported, but for this kind of them.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

_EXTRAS = {
    "transformers": "hf",
    "datasets": "hf",
    "ray": "cluster",
    "tensorboard": "tensorboard",
    "lm_eval": "eval",
}
"""Extras that bring a package; all else that a command needs comes with lab."""


def stop(message: object, *, code: int = BAD_INPUT) -> NoReturn:
    """Say why on the error stream, in one line, and end."""
    line = printable(" ".join(str(message).split()))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    label = ("stopped: ", "bold yellow") if code == INTERRUPTED else ("error: ", "bold red")
    new_console(stderr=True).print(Text.assemble(label, line), soft_wrap=True)
    raise typer.Exit(code)


def stop_interrupted(command: str, *, begun: bool) -> NoReturn:
    """Say after Ctrl-C how to go on, and end.

    begun : whether there is anything to go on from
    """
    words = "nothing is lost. Go on with" if begun else "before anything was kept. Start again with"
    stop(f"{words}: {command}", code=INTERRUPTED)


@contextmanager
def errors_in_one_line() -> Generator[None]:
    """End the command with one line for what its user can mend; any other exception is a bug and shows its traceback.

    What a user can mend is raised as one of these, with the remedy:

    ValueError  : options, data, models or records that cannot be used, `DataError` and `GeometryError` among them
    OSError     : files that cannot be read or written
    ImportError : a package that is not installed
    MemoryError : more asked for than the machine has
    """
    try:
        yield
    except BrokenPipeError:
        # The reader of the pipe has closed it, as `head` does.
        raise
    except _UsageError as problem:
        usage: Any = problem
        stop(f"{usage.format_message().rstrip('.')}. See {_command(usage)} --help.")
    except ModuleNotFoundError as problem:
        stop(f"{problem}. Install it: pip install 'tidegate[{_extra(problem)}]'")
    except OSError as problem:
        stop(problem if problem.filename is None else f"{problem.filename}: {problem.strerror}")
    except (ValueError, ImportError) as problem:
        stop(problem)
    except MemoryError as problem:
        stop(f"this machine has too little memory for that. {problem}")
    except KeyboardInterrupt:
        stop("before its end. Run the command again.", code=INTERRUPTED)


def _command(problem: Any) -> str:
    return "tidegate" if problem.ctx is None else problem.ctx.command_path


def _extra(problem: ModuleNotFoundError) -> str:
    return _EXTRAS.get((problem.name or "").partition(".")[0], "lab")
