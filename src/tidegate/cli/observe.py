"""`tidegate observe`: where the heads of a trained model look, and what its gates do."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.console import new_console, print_json
from tidegate.cli.folders import require_apart, require_no_comparison, require_writable
from tidegate.cli.options import (
    DataOption,
    FieldOption,
    GatesOption,
    JsonOption,
    ModelArgument,
    QuietOption,
    note_unread,
)
from tidegate.cli.progress import display

_LENGTH = 512


def observe(
    model: ModelArgument,
    data: DataOption = None,
    gates: GatesOption = None,
    field: FieldOption = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a sequence. Without it: as many as the model was trained on; where it does not say, as a "
            f"Hugging Face model, {_LENGTH} or as many as it knows.",
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences, spread over the data.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 4,
    keys: Annotated[
        int, typer.Option(min=1, help="How many of the first keys mass, impact and contribution are of.")
    ] = 1,
    heat: Annotated[
        bool, typer.Option("--heat", help="Measure the largest score and the heat capacity too; slower.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = Path("observation"),
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Watch every attention call of a trained model on a text, and write a page of sinks, entropies and gates.

    The matrix of attention weights is never made, so that long sequences cost little memory.
    """
    from tidegate.lab.models.language_models import load_language_model, token_windows
    from tidegate.lab.observe.page import observation_page
    from tidegate.lab.observe.run import model_observation
    from tidegate.report import write_page

    command = shlex.join(["tidegate", *sys.argv[1:]])
    require_writable(out)
    require_apart(out, data)
    require_no_comparison(out)
    loaded = load_language_model(model, derivatives=False, gates=gates)
    note_unread(loaded)
    tokens = length or loaded.trained_length or min(_LENGTH, loaded.max_length or _LENGTH)
    windows = token_windows(loaded, data, length=tokens, count=sequences, field=field)
    with display(new_console(stderr=True), quiet=quiet) as shown:
        seen = model_observation(loaded, windows, batch_size=batch_size, keys=keys, heat=heat, tell=shown.show)
    page = observation_page(seen, model=loaded.name, command=command, num_sequences=len(windows), length=tokens)
    page_file = write_page(page, out)
    if as_json:
        print_json({"page": str(page_file), "results": page.data})
        return
    console = new_console()
    console.print(seen.table(), soft_wrap=True)
    console.print(f"The page: {page_file}", soft_wrap=True)
