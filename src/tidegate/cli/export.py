"""`tidegate export`: a trained model for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tidegate.cli.console import new_console
from tidegate.cli.folders import require_writable
from tidegate.cli.options import ModelArgument


def export(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    to: Annotated[
        Literal["hf"],
        typer.Option(help="hf: a folder that AutoModelForCausalLM reads, a Llama or Qwen3 where the model is one."),
    ] = "hf",
) -> None:
    """Write a model of tidegate train, or of save_model, for other tools.

    Example: tidegate export model --to hf model-hf
    """
    from tidegate.lab.models.export import export_hugging_face
    from tidegate.lab.models.language_models import load_language_model, tokenizer_beside
    from tidegate.lab.models.text import require_decoder

    assert to == "hf"
    require_writable(out)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty. Choose another place.")
    decoder = require_decoder(load_language_model(model, derivatives=False))
    file = model / "model.safetensors" if model.is_dir() else model
    kind = export_hugging_face(decoder, out, tokenizer=tokenizer_beside(file, decoder))
    new_console().print(f"A {kind} for transformers: {out}", soft_wrap=True)
