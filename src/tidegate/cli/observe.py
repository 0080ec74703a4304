"""`tidegate observe`: attention sinks, entropies and gates of a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate.cli.console import finish_page, new_console
from tidegate.cli.folders import require_page_folder
from tidegate.cli.options import GatedModelAndText, Output, note_unread, option, this_command, verb
from tidegate.cli.progress import display

_LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class ObserveOptions(GatedModelAndText, Output):
    """Options of `tidegate observe`."""

    length: int | None = option(
        None,
        f"Sequence length in tokens. Default: the training length, or {_LENGTH} if the model does not store it.",
        min=2,
    )
    sequences: int = option(16, "Number of sequences, spread over the data.", min=1)
    batch_size: int = option(4, "Batch size, in sequences.", min=1)
    keys: int = option(1, "Number of initial tokens to treat as the attention sink.", min=1)
    heat: bool = option(
        False,
        "Also measure the largest attention score and the variance of scores under the attention weights (slower).",
        "--heat",
    )
    out: Path = option(Path("observation"), "Folder for the page and its figures.")


@verb
def observe(options: ObserveOptions) -> None:
    """Measure sinks, entropies and gates in every attention call of a trained model on a text, and write a page.

    The attention matrix is never materialized, so long sequences need little memory.

    Example: tidegate observe model --data notes.txt
    """
    from tidegate.lab.models.language_models import load_language_model, token_windows
    from tidegate.lab.observe.page import observation_page
    from tidegate.lab.observe.run import model_observation
    from tidegate.report import write_page

    require_page_folder(options.out, options.data)
    loaded = load_language_model(options.model, derivatives=False, gates=options.gates)
    note_unread(loaded)
    length = options.length or loaded.trained_length or min(_LENGTH, loaded.max_length or _LENGTH)
    windows = token_windows(loaded, options.data, length=length, count=options.sequences, field=options.field)
    with display(new_console(stderr=True), quiet=options.quiet) as tell:
        seen = model_observation(
            loaded, windows, batch_size=options.batch_size, keys=options.keys, heat=options.heat, tell=tell
        )
    page = observation_page(seen, model=loaded.name, command=this_command(), num_sequences=len(windows), length=length)
    finish_page(write_page(page, options.out), page.data, as_json=options.as_json, result=seen.table())
