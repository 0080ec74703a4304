"""`tidegate export`: a trained model for other tools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidegate._validation import InputError
from tidegate.cli.console import new_console, print_json
from tidegate.cli.folders import require_output_folder
from tidegate.cli.options import OWN_MODEL, JsonOutput, argument, option, verb


@dataclass(frozen=True, kw_only=True)
class ExportOptions(JsonOutput):
    """Options of `tidegate export`."""

    model: Path = argument(OWN_MODEL)
    to: Literal["hf", "qwen3-next"] = option(
        "hf",
        "hf: a folder for AutoModelForCausalLM, as Llama or Qwen3 if the model is equivalent to one, else as our own "
        "class. qwen3-next: a Qwen3-Next that loads without tidegate, for gates like g1, elementwise or headwise, in "
        "models with qk_norm=yes and no windows.",
    )
    out: Path = option(Path("exported"), "Folder to write; it must be new or empty.")


@verb
def export(options: ExportOptions) -> None:
    """Export a model written by tidegate train or save_model to other tools, with the same logits.

    If the target cannot represent the model, the command exits with the reason.

    Example: tidegate export model --to hf --out model-hf
    """
    from tidegate.lab.models.export import export_hugging_face, export_qwen3_next, reading_code
    from tidegate.lab.models.language_models import load_language_model, tokenizer_beside
    from tidegate.lab.models.text import require_decoder

    model, out = options.model, options.out
    require_output_folder(out)
    if out.exists() and any(out.iterdir()):
        raise InputError("out", expected="a new or empty folder", got=out)
    decoder = require_decoder(load_language_model(model, derivatives=False))
    file = model / "model.safetensors" if model.is_dir() else model
    write = export_hugging_face if options.to == "hf" else export_qwen3_next
    kind = write(decoder, out, tokenizer=tokenizer_beside(file, decoder))
    if options.as_json:
        print_json({"class": kind, "folder": str(out)})
        return
    new_console().print(f"Wrote a {kind} for transformers to {out}. To load it:\n\n{reading_code(out)}", soft_wrap=True)
