"""Command-line options, declared once: each is a field of a frozen dataclass, with its help beside it."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tidegate._text import list_some
from tidegate.cli.console import new_console

if TYPE_CHECKING:
    from tidegate.lab.models.language_models import LanguageModel


def option(default: Any, help: str, *flags: str, panel: str | None = None, **how: Any) -> Any:  # noqa: A002
    """Declare an option of a verb: a dataclass field whose flag is its name, unless `flags` say otherwise.

    `panel` is the heading of its group in `--help`; `how` has further arguments of `typer.Option`, such as `min`.
    """
    # A flag takes no value.
    how = {"metavar": "", **how} if isinstance(default, bool) else how
    return field(default=default, metadata={"typer": typer.Option(*flags, help=help, rich_help_panel=panel, **how)})


def argument(help: str) -> Any:  # noqa: A002
    """Declare a required positional argument of a verb."""
    return field(metadata={"typer": typer.Argument(help=help, show_default=False)})


def verb(run: Callable[[Any], None]) -> Callable[..., None]:
    """Return a typer command for a function of one dataclass of options; its docstring is the help."""
    (hint,) = (kind for name, kind in get_type_hints(run).items() if name != "return")
    hints = get_type_hints(hint)

    def command(**values: Any) -> None:
        run(hint(**values))

    # Rich keeps the line breaks of a docstring.
    paragraphs = inspect.cleandoc(run.__doc__ or "").split("\n\n")
    command.__name__, command.__doc__ = run.__name__, "\n\n".join(" ".join(text.split()) for text in paragraphs)
    output = {item.name for item in fields(Output)}
    own_first = sorted(fields(hint), key=lambda item: item.name in output)
    command.__dict__["__signature__"] = inspect.Signature(
        [
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if item.default in (MISSING, ...) else item.default,
                annotation=Annotated[hints[item.name], item.metadata["typer"]],
            )
            for item in own_first
        ]
    )
    return command


OWN_MODEL = "A folder written by tidegate train, a file written by save_model, or an exported folder in our own class."
DATA = "Data"
"""Heading of the options of `TrainingData`."""


def this_command() -> str:
    """Return the running command line, quoted for a shell."""
    return shlex.join(["tidegate", *sys.argv[1:]])


@dataclass(frozen=True, kw_only=True)
class JsonOutput:
    """Output format of the result."""

    as_json: bool = option(False, "Print only the result, as JSON.", "--json")


@dataclass(frozen=True, kw_only=True)
class Output(JsonOutput):
    """Output of a verb that shows progress."""

    quiet: bool = option(False, "Print only the result, without progress.", "--quiet")


@dataclass(frozen=True, kw_only=True)
class TrainingData(Output):
    """Data to train on."""

    data: str | None = option(
        None,
        "A text file, a folder, a quoted glob, .jsonl, .npy tokens, shards from tidegate tokenize, or hf:NAME for a "
        "Hugging Face dataset. Default: Python's own sources.",
        panel=DATA,
    )
    tokenizer: str | None = option(
        None,
        "bytes, or bpe:4096 to train a BPE of that size. Default: the preset's, bytes for tiny, small and base; tokens "
        "and shards have their own.",
        panel=DATA,
    )
    field: str | None = option(
        None, "Field of .jsonl records and datasets that contains the text. Default: text.", panel=DATA
    )


@dataclass(frozen=True, kw_only=True)
class ModelAndText:
    """A trained model and a text to evaluate it on."""

    model: Path = argument(
        "A folder written by tidegate train, a file written by save_model, or a Hugging Face model folder."
    )
    data: str | None = option(
        None,
        "A text file, a folder, a quoted glob, .jsonl, .npy tokens, or shards from tidegate tokenize. Default: "
        "Python's own sources.",
    )
    field: str | None = option(None, "Field of .jsonl records that contains the text.")


@dataclass(frozen=True, kw_only=True)
class GatedModelAndText(ModelAndText):
    """A trained model, which may have added gates, and a text."""

    gates: Path | None = option(
        None,
        "A folder written by save_gates, for a Hugging Face model with added gates. Default: the gates in the "
        "model's folder, if save_pretrained wrote any.",
    )


def note_unread(model: LanguageModel) -> None:
    """Print a note on stderr if the model's files contain tensors that its class does not use."""
    if model.unread:
        new_console(stderr=True).print(
            f"note: {model.name} has tensors that its class does not use: {list_some(model.unread)}.", soft_wrap=True
        )
