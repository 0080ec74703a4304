"""`tidegate evaluate`: how likely a text is to a trained model."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.cli.console import new_console
from tidegate.cli.options import DataOption, FieldOption, ModelArgument, QuietOption
from tidegate.cli.progress import display


def evaluate(
    model: ModelArgument,
    data: DataOption = None,
    field: FieldOption = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a sequence; the length it was trained on by default.", show_default=False),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences, spread over the data.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 4,
    quiet: QuietOption = False,
) -> None:
    """Say the loss, the perplexity and the bits per byte of a text: for a model of tidegate train, or of save_model.

    Bits per byte compare models whatever their tokens. The first token of each sequence is not predicted.

    Example: tidegate evaluate model --data notes.txt
    """
    from tidegate.lab.models.language_models import load_language_model, token_windows
    from tidegate.lab.models.text import require_decoder, text_loss

    loaded = load_language_model(model, derivatives=False)
    size = length or require_decoder(loaded).config.max_length
    windows = token_windows(loaded, data, length=size, count=sequences, field=field)
    with display(new_console(stderr=True), quiet=quiet) as shown:
        found = text_loss(loaded, windows, batch_size=batch_size, tell=shown.show)
    new_console().print(
        f"{loaded.name} on {found.num_tokens:,} tokens, {found.num_bytes:,} bytes: loss {found.loss:.4f} nats, "
        f"perplexity {found.perplexity:.3f}, {found.bits_per_byte:.4f} bits per byte.",
        soft_wrap=True,
    )
