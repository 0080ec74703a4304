"""Trained models of ours as folders that other tools read."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from tidegate.torch.decoder import TransformerLM

TOKENIZER_FILE = "tokenizer.json"


def export_hugging_face(model: TransformerLM, folder: Path, *, tokenizer: str = "") -> str:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` reads; return the name of the class in it.

    A decoder that transformers has itself, Llama or Qwen3, becomes one of those: nothing of ours is needed to read it,
    and `add_gates` takes it. Any other is read after `import tidegate.torch.hf`.

    tokenizer : byte pairs as JSON, which `AutoTokenizer` reads then; empty where a token is a byte
    """
    hf: Any = import_module("tidegate.torch.hf")
    try:
        exported = hf.to_stock_model(model)
    except ValueError:
        exported = hf.from_transformer_lm(model)
    with _without_bars():
        exported.save_pretrained(folder)
    if tokenizer:
        (folder / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.config.max_length}
        (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return type(exported).__name__


@contextmanager
def _without_bars() -> Generator[None]:
    """Keep transformers from drawing bars of its own."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()
