"""Report errors in one line, and exit."""

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
"""Characters of a message; longer ones lose their middle."""

# Typer does not export its base class of usage errors, only subclasses.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

_EXTRAS = {
    "transformers": "hf",
    "datasets": "hf",
    "ray": "cluster",
    "tensorboard": "tensorboard",
    "lm_eval": "eval",
}
"""The extra that installs each package; all others come with lab."""


def stop(message: object, *, code: int = BAD_INPUT) -> NoReturn:
    """Print the message on stderr in one line, and exit."""
    line = printable(" ".join(str(message).split()))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    label = ("Interrupted. ", "bold yellow") if code == INTERRUPTED else ("error: ", "bold red")
    new_console(stderr=True).print(Text.assemble(label, line), soft_wrap=True)
    raise typer.Exit(code)


def stop_interrupted(command: str, *, begun: bool) -> NoReturn:
    """Exit after Ctrl-C, and print the command that resumes or restarts the work."""
    words = "All progress is saved; resume with" if begun else "Nothing was saved yet; start again with"
    stop(f"{words}: {command}", code=INTERRUPTED)


_OPTIONS = {
    "num_seeds": "seeds",
    "budget": "tokens",
    "num_final_tokens": "final_tokens",
    "cpus": "cpus_per_run",
    "gpus": "gpus_per_run",
    "processes": "procs_per_run",
    "nproc": "procs_per_run",
    "num_processes": "nproc",
    "variant": "gate",
    "record": "again",
}
"""Option for the field of a library error, where the two names differ."""


def _in_terms_of_flags(error: ValueError, command: Any) -> str:
    """Return the error's message with its field replaced by the flag, if the click command has such an option."""
    parameters = {parameter.name: parameter for parameter in getattr(command, "params", ())}
    field, _, rest = str(error).partition(" ")
    found = parameters.get(field) or parameters.get(_OPTIONS.get(field, ""))
    if found is None:
        return str(error)
    flag = found.opts[0] if found.param_type_name == "option" else found.name.upper()
    return f"{flag} {rest}"


@contextmanager
def errors_in_one_line(context: Any = None) -> Generator[None]:
    """Print an error that the user can fix in one line, and exit; any other exception shows its traceback.

    Errors that the user can fix:

    - ValueError (`InputError` and `GeometryError` among them): unusable options, data, models or records
    - OSError: files that cannot be read or written
    - ImportError: a package that is not installed
    - MemoryError: too little memory

    Args:
        context: The click context of the group of verbs; None leaves the fields of errors as they are.
    """
    try:
        yield
    except BrokenPipeError:
        # The reader of the pipe, such as `head`, has closed it.
        raise
    except _UsageError as problem:
        usage: Any = problem
        command = "tidegate" if usage.ctx is None else usage.ctx.command_path
        stop(f"{usage.format_message().rstrip('.')}. See {command} --help.")
    except ModuleNotFoundError as problem:
        extra = _EXTRAS.get((problem.name or "").partition(".")[0], "lab")
        stop(f"{problem}. Install it: pip install 'tidegate[{extra}]'")
    except OSError as problem:
        stop(problem if problem.filename is None else f"{problem.filename}: {problem.strerror}")
    except ValueError as problem:
        verb = context and context.invoked_subcommand and context.command.commands[context.invoked_subcommand]
        stop(_in_terms_of_flags(problem, verb))
    except ImportError as problem:
        stop(problem)
    except MemoryError as problem:
        stop(f"not enough memory. {problem}")
    except KeyboardInterrupt:
        stop("Rerun the command to start again.", code=INTERRUPTED)
