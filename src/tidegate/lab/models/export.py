"""Export our trained models to folders that other tools read."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tidegate._files import fix_permissions
from tidegate._validation import InputError
from tidegate.lab.models.hugging_face import silent_transformers
from tidegate.torch.decoder import TransformerLM

TOKENIZER_FILE = "tokenizer.json"


def export_hugging_face(model: TransformerLM, folder: Path, *, tokenizer: str = "") -> str:
    """Write a folder for `AutoModelForCausalLM.from_pretrained`, and return the name of the model's class there.

    A decoder with an equivalent in transformers becomes a Llama or Qwen3, which loads without Tidegate and accepts
    `add_gates`. Any other loads after `import tidegate.torch.hf`. `tokenizer` is a byte-pair tokenizer as JSON, for
    `AutoTokenizer`; empty if tokens are bytes.
    """
    hf: Any = import_module("tidegate.torch.hf")
    try:
        exported = hf.to_stock_model(model)
    except ValueError:
        exported = hf.from_transformer_lm(model)
    _write(exported, folder, tokenizer=tokenizer, max_length=model.config.max_length)
    return type(exported).__name__


def reading_code(folder: Path) -> str:
    """Return the lines of Python that load an exported folder."""
    place, has_tokenizer = repr(str(folder)), (folder / TOKENIZER_FILE).exists()
    lines = [
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if has_tokenizer else ''}",
        f"model = AutoModelForCausalLM.from_pretrained({place})",
    ]
    if json.loads((folder / "config.json").read_bytes())["model_type"] == "tidegate":
        # This import registers our class with transformers.
        lines.insert(0, "import tidegate.torch.hf")
    if has_tokenizer:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({place})")
    return "\n".join(lines)


def export_qwen3_next(model: TransformerLM, folder: Path, *, tokenizer: str = "") -> str:
    """Write a folder with the same model as a Qwen3-Next, and return the name of that class in transformers.

    The model must be built like Qwen3 (rotary positions, RMS norms, SwiGLU, `qk_norm`, no window, no biases) and have a
    single gate, at the output, that reads the input and multiplies by a sigmoid: `g1` and its variants per head, with a
    bias, a rank or shared matrices. The tokenizer is as in `export_hugging_face`.

    Raises:
        InputError: The model does not fit.
    """
    config, expected = model.config, "one that fits Qwen3-Next"
    remedy = "Export it with to='hf', which accepts every model."
    if not config.gates:
        raise InputError("model", expected=expected, got="one without a gate", hint=remedy)
    if not config.qk_norm:
        hint = f"Train a model with qk_norm and a gate that fits, such as g1. {remedy}"
        raise InputError("model", expected=expected, got="one without qk_norm", hint=hint)
    try:
        exported = _as_qwen3_next(model)
    except ValueError as problem:
        raise InputError("model", expected=expected, hint=f"{problem} {remedy}") from None
    _write(exported, folder, tokenizer=tokenizer, max_length=config.max_length)
    return type(exported).__name__


def _as_qwen3_next(model: TransformerLM) -> Any:
    """Convert the ungated model to a Qwen3, add the gates to it, and convert that to a Qwen3-Next."""
    hf: Any = import_module("tidegate.torch.hf")
    retrofit: Any = import_module("tidegate.torch.retrofit")
    state = model.state_dict()
    gates = {name: state.pop(name) for name in list(state) if _GATE in name}
    plain = TransformerLM(replace(model.config, gate="none"), device="meta")
    plain.load_state_dict(state, assign=True)
    stock = hf.to_stock_model(plain.train(model.training))
    retrofit.add_gates(stock, model.config.gates, activation=None)
    own = {_from_layer(name): value for name, value in gates.items()}
    stock.load_state_dict(
        {name: own.pop(_from_layer(name)) for name in stock.state_dict() if _GATE in name}, strict=False
    )
    assert not own
    return retrofit.to_qwen3_next(stock)


_GATE = ".attn_gate."


def _from_layer(name: str) -> tuple[int, str]:
    """Return the number of a gate's layer and the gate's name in it, the same in both models; the prefixes differ."""
    layer, _, gate = name.partition(_GATE)
    return int(layer.split(".")[2]), gate


def _write(exported: Any, folder: Path, *, tokenizer: str, max_length: int) -> None:
    with silent_transformers():
        exported.save_pretrained(folder)
    fix_permissions(folder)
    if tokenizer:
        (folder / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
        (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
