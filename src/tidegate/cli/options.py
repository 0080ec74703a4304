"""Options that several verbs have: which trained model, which text it reads, how much is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ModelArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(
        help="A file of save_model or a folder with one, or a folder with a Hugging Face model.", show_default=False
    ),
]
DataOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="A text file, a folder, a quoted glob, .jsonl or .npy tokens. Without it: Python's own sources.",
        show_default=False,
    ),
]
GatesOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="A folder of save_gates, for a Hugging Face model with added gates.", show_default=False),
]
FieldOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Where .jsonl lines have their text.", show_default=False)
]
QuietOption: TypeAlias = Annotated[bool, typer.Option("--quiet", help="Show the result alone.")]
