"""Adapters of peft on projections and on gates: trained, saved and loaded together, and merged."""

import json

import pytest
import torch
from closeness import assert_close
from errors import rejects
from peft import LoraConfig, PeftModel, get_peft_model
from retrofit_models import inputs_of, logits, stir, tiny
from transformers import LlamaForCausalLM

from tidegate.torch.retrofit import (
    add_gates,
    load_pretrained,
    merge_gates,
    save_gates,
    save_pretrained,
    to_qwen3_next_attention,
)

PROJECTIONS = ["q_proj", "v_proj", "o_proj"]
WHOLE = {"target_modules": PROJECTIONS, "modules_to_save": ["attn_gate"]}
LOW_RANK = {"target_modules": PROJECTIONS, "target_parameters": ["attn_gate.output.weight", "attn_gate.value.weight"]}
"""Full copies of the gates, or low-rank adapters of their matrices."""


def gated(family="llama"):
    model = tiny(family)
    add_gates(model, "bma+g1")
    return stir(model)


def train(adapted, *, steps=4):
    """Train the trainable parameters for a few steps."""
    adapted.train()
    learning = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=2.0)
    for _ in range(steps):
        inputs = inputs_of(adapted.get_base_model())
        adapted(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted.eval()


@pytest.mark.parametrize(
    "options", [WHOLE, LOW_RANK, {"target_modules": PROJECTIONS}], ids=["whole", "low rank", "none"]
)
def test_adapters_of_transformers_own_are_refused_before_anything_is_written(tmp_path, options):
    model = gated()
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, **options))
    with rejects("model", hint="PeftModel.from_pretrained(model, DIR)"):
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_remedy_for_adapters_of_transformers_own_works(tmp_path):
    model = gated()
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=PROJECTIONS))
    model.save_pretrained(tmp_path / "adapters")
    save_pretrained(PeftModel.from_pretrained(gated(), tmp_path / "adapters").merge_and_unload(), tmp_path / "whole")
    assert_close(logits(load_pretrained(tmp_path / "whole")), logits(model.eval()), what="forward")


@pytest.mark.parametrize("options", [WHOLE, LOW_RANK], ids=["gates whole", "gates of low rank"])
@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_adapters_and_gates_are_saved_and_loaded_together_and_merged(tmp_path, family, options):
    targets = PROJECTIONS if family == "llama" else ["query_key_value", "dense"]
    model = gated(family)
    before = logits(model)
    adapted = train(get_peft_model(model, LoraConfig(r=2, **options | {"target_modules": targets})))
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad and "attn_gate" in name]
    assert trained
    expected = logits(adapted)
    assert (expected - before).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path / "adapters")
    again = PeftModel.from_pretrained(gated(family), tmp_path / "adapters").eval()
    assert torch.equal(logits(again), expected)
    merged = again.merge_and_unload()
    assert_close(logits(merged), expected, what="forward")
    save_pretrained(merged, tmp_path / "merged")
    assert torch.equal(logits(load_pretrained(tmp_path / "merged")), logits(merged))


@pytest.mark.parametrize("loads", ["in memory", "from a folder"])
def test_adapters_name_no_model_without_gates_as_their_base(tmp_path, loads):
    tiny("llama").save_pretrained(tmp_path / "plain")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    add_gates(model, "g1")
    if loads == "from a folder":
        save_pretrained(model, tmp_path / "gated")
        model = load_pretrained(tmp_path / "gated")
    get_peft_model(model, LoraConfig(r=2, target_modules=PROJECTIONS)).save_pretrained(tmp_path / "adapters")
    options = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text(encoding="utf-8"))
    assert options["base_model_name_or_path"] is None


@pytest.mark.parametrize(
    ("gate", "parameters"),
    [
        ("bma+g1", ["value.weight", "output.weight"]),
        ("output:input:r2", ["output.weight_down", "output.weight_up"]),
        ("output:input:head:b0", ["output.weight", "output.bias"]),
    ],
)
def test_the_parameters_of_gates_have_the_names_that_are_documented(gate, parameters):
    model = tiny("llama")
    add_gates(model, gate)
    names = [name for name, _ in model.named_parameters() if "layers.0" in name and "attn_gate" in name]
    assert names == [f"model.layers.0.self_attn.attn_gate.{name}" for name in parameters]


def test_gates_with_adapters_around_them_are_not_written_or_folded_by_halves(tmp_path):
    adapted = get_peft_model(gated("qwen3"), LoraConfig(r=2, **LOW_RANK | {"target_modules": ["up_proj"]})).eval()
    for convert in (
        lambda: save_gates(adapted, tmp_path),
        lambda: merge_gates(adapted),
        lambda: to_qwen3_next_attention(adapted.get_base_model()),
    ):
        with rejects("model", hint="Merge these first, with merge_and_unload"):
            convert()
    with rejects("model", hint="merge_and_unload"):
        save_pretrained(adapted, tmp_path)
