"""`tidegate generate`: what a trained model writes."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Annotated

import typer

from tidegate.cli.console import print_json
from tidegate.cli.options import JsonOption, OwnModelArgument


def generate(
    model: OwnModelArgument,
    prompt: Annotated[str, typer.Option(help="The text to go on with.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to draw.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Divides the logits; 0 takes the likeliest token each time.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw from that many likeliest tokens.", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the fewest likeliest tokens that have this probability.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same text.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Go on with a text, as it is drawn: a model of tidegate train, or of save_model.

    Example: tidegate generate model --prompt "def main("
    """
    from tidegate.lab.models.language_models import load_language_model
    from tidegate.lab.models.text import continue_text

    loaded = load_language_model(model, derivatives=False)
    pieces = continue_text(
        loaded,
        prompt.encode(),
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    # Drawn before anything is shown: what cannot be drawn is an error alone.
    pieces = chain([next(pieces, b"")], pieces)
    if as_json:
        print_json({"prompt": prompt, "text": b"".join(pieces).decode("utf-8", errors="replace")})
        return
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(_shown(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")


def _shown(piece: bytes) -> str:
    """Text without what would steer a terminal; lines and tabs stay."""
    from tidegate._text import printable

    text = piece.decode("utf-8", errors="replace")
    return "".join(letter if letter in "\n\t" else printable(letter) for letter in text)
