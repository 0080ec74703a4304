"""`tidegate generate`: text from a trained model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tidegate._text import printable
from tidegate._validation import InputError
from tidegate.cli.console import print_json
from tidegate.cli.options import OWN_MODEL, JsonOutput, argument, option, verb


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(JsonOutput):
    """Options of `tidegate generate`."""

    model: Path = argument(OWN_MODEL)
    prompt: str = option(..., "Prompt text.")
    tokens: int = option(200, "Number of new tokens.", min=1)
    temperature: float = option(0.8, "Sampling temperature; 0 is greedy decoding.", min=0)
    top_k: int | None = option(None, "Sample from the K most likely tokens.", min=1)
    top_p: float | None = option(
        None, "Nucleus sampling: sample from the smallest set of tokens with this probability."
    )
    seed: int = option(0, "Random seed for sampling.", min=0)


@verb
def generate(options: GenerateOptions) -> None:
    """Generate text from a prompt, streaming, with a model written by tidegate train or save_model.

    Example: tidegate generate model --prompt "def main("
    """
    from tidegate.lab.models.language_models import load_language_model
    from tidegate.lab.models.text import continue_text

    try:
        prompt = options.prompt.encode()
    except UnicodeEncodeError:
        # Python decodes arguments that are not UTF-8 to lone surrogates.
        raise InputError("prompt", expected="valid UTF-8", got=options.prompt) from None
    loaded = load_language_model(options.model, derivatives=False)
    pieces = continue_text(
        loaded,
        prompt,
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    # Sample the first piece before printing anything, so that an error does not follow half a line.
    pieces = chain([next(pieces, b"")], pieces)
    if options.as_json:
        text = b"".join(pieces).decode("utf-8", errors="replace")
        print_json({"prompt": options.prompt, "text": text})
        return
    sys.stdout.write(options.prompt)
    for piece in pieces:
        text = piece.decode("utf-8", errors="replace")
        sys.stdout.write("".join(letter if letter in "\n\t" else printable(letter) for letter in text))
        sys.stdout.flush()
    sys.stdout.write("\n")
