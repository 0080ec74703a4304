"""`tidegate export`: a trained model for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tidegate.cli.console import new_console, print_json
from tidegate.cli.folders import require_writable
from tidegate.cli.options import JsonOption, OwnModelArgument


def export(
    model: OwnModelArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    to: Annotated[
        Literal["hf", "qwen3-next"],
        typer.Option(
            help="hf: a folder that AutoModelForCausalLM reads, a Llama or Qwen3 where the model is one, else our own "
            "class. qwen3-next: a Qwen3-Next, which needs nothing of ours; for gates like g1, by channel or by head, "
            "in models with qk_norm=yes and without windows."
        ),
    ] = "hf",
    as_json: JsonOption = False,
) -> None:
    """Write a model of tidegate train, or of save_model, for other tools.

    Logits are those of the model; a model that does not fit is refused, and what does not fit is named.

    Example: tidegate export model --to hf model-hf
    """
    from tidegate.lab.models.export import export_hugging_face, export_qwen3_next, reading_code
    from tidegate.lab.models.language_models import load_language_model, tokenizer_beside
    from tidegate.lab.models.text import require_decoder

    require_writable(out)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty. Choose another place.")
    decoder = require_decoder(load_language_model(model, derivatives=False))
    file = model / "model.safetensors" if model.is_dir() else model
    write = export_hugging_face if to == "hf" else export_qwen3_next
    kind = write(decoder, out, tokenizer=tokenizer_beside(file, decoder))
    if as_json:
        print_json({"class": kind, "folder": str(out)})
        return
    new_console().print(f"A {kind} for transformers: {out}. To read it:\n\n{reading_code(out)}", soft_wrap=True)
