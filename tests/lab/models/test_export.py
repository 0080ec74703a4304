"""Trained models of ours in architectures of transformers: equal logits, or a reason."""

import pytest
import torch
from closeness import assert_close
from errors import rejects
from transformers import AutoModelForCausalLM

from tidegate.config import TransformerConfig
from tidegate.lab.models.export import export_hugging_face, export_qwen3_next
from tidegate.torch import TransformerLM

SIZES = {"d_model": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "max_length": 32, "qk_norm": True}
TOKENS = torch.arange(18).reshape(2, 9) * 7 % 64


def stirred(gate, **options):
    """A model none of whose weights is where it starts."""
    model = TransformerLM(TransformerConfig(gate=gate, **SIZES | options)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return model


@pytest.mark.parametrize(
    ("gate", "options"),
    [
        ("g1", {}),
        ("g1", {"num_kv_heads": 2, "tie_embeddings": False, "head_dim": 6, "d_ff": 24}),
        ("output:input:twosigmoid", {}),
        ("output:input:r2", {}),
        ("output:input:w5:b1", {}),
        ("output:input:shared-layer", {}),
    ],
)
def test_a_model_that_fits_becomes_a_qwen3_next_with_equal_logits(gate, options, tmp_path):
    model = stirred(gate, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert export_qwen3_next(model, tmp_path / "out") == "Qwen3NextForCausalLM"
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(read).__name__ == "Qwen3NextForCausalLM"
    assert_close(read(TOKENS).logits, model(TOKENS))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("write", [export_hugging_face, export_qwen3_next])
def test_exported_weights_may_be_read_by_whoever_may_read_the_other_files(write, tmp_path):
    write(stirred("g1"), tmp_path / "out", tokenizer="{}")
    (tmp_path / "usual").touch()
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {(tmp_path / "usual").stat().st_mode}


@pytest.mark.parametrize(
    ("gate", "options", "offender"),
    [
        ("none", {}, "one without a gate"),
        ("g1", {"qk_norm": False}, "with qk_norm"),
        ("bma", {}, "bma"),
        ("output:input:softplus", {}, "softplus"),
        ("sink", {}, "sink"),
        ("g1", {"window": 4}, "window"),
        ("output:input:sigmoid:constant", {}, ""),
    ],
)
def test_a_model_that_does_not_fit_is_rejected_with_the_remedy(gate, options, offender, tmp_path):
    with rejects("model", hint="to='hf'") as error:
        export_qwen3_next(stirred(gate, **options), tmp_path / "out")
    assert offender in str(error.value)
    assert not (tmp_path / "out").exists()
