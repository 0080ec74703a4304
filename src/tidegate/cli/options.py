"""What several verbs ask for and say: which trained model, which text it reads, how much is shown."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from tidegate._text import list_some
from tidegate.cli.console import new_console

if TYPE_CHECKING:
    from tidegate.lab.models.language_models import LanguageModel

ModelArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(
        help="A file of save_model or a folder with one, or a folder with a Hugging Face model.", show_default=False
    ),
]
OwnModelArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(
        help="A folder of tidegate train, a file of save_model, or a folder of tidegate export that needs "
        "tidegate.torch.hf.",
        show_default=False,
    ),
]
DataOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="A text file, a folder, a quoted glob, .jsonl, .npy tokens or shards of tidegate tokenize. Without it: "
        "Python's own sources.",
        show_default=False,
    ),
]
GatesOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="A folder of save_gates, for a Hugging Face model with added gates. Without it: those in the model's own "
        "folder, if save_pretrained put any there.",
        show_default=False,
    ),
]
FieldOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Where .jsonl lines have their text.", show_default=False)
]
JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and nothing else, for other programs.")
]
QuietOption: TypeAlias = Annotated[bool, typer.Option("--quiet", help="Show the result alone.")]


@contextmanager
def options_named(options: Mapping[str, str]) -> Generator[None]:
    """Replace the field that an error's message begins with by its option; other messages stay as they are.

    options : the options by what the checks behind them call them
    """
    try:
        yield
    except ValueError as problem:
        field, space, rest = str(problem).partition(" ")
        if field not in options:
            raise
        raise ValueError(f"{options[field]}{space}{rest}") from problem


def note_unread(model: LanguageModel) -> None:
    """Say on the error stream which tensors of a model's files are not part of what is measured."""
    if model.unread:
        new_console(stderr=True).print(
            f"note: {model.name} has tensors that its class does not know, and that are not read: "
            f"{list_some(model.unread)}.",
            soft_wrap=True,
        )
