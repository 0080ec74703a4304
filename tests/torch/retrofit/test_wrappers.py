"""Gates in models inside adapters of peft."""

import pytest
import torch
from closeness import assert_close
from peft import LoraConfig, get_peft_model
from retrofit_models import logits, stir, tiny
from torch import nn

from tidegate.torch import gate_parameters
from tidegate.torch.retrofit import add_gates, load_gates, merge_gates, remove_gates, save_gates
from tidegate.torch.retrofit.files import base_fingerprint
from tidegate.torch.retrofit.wrappers import unwrap_model


def wrap(model, *kept, targets=("q_proj", "v_proj")):
    """Return the model with random adapters, and trained copies of the named modules."""
    options = {"target_modules": list(targets), "modules_to_save": list(kept) or None}
    adapted = get_peft_model(model, LoraConfig(r=2, **options)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name or ".modules_to_save." in name:
                weight.normal_(std=0.3, generator=generator)
    return adapted


def gated(gate="bma+g1"):
    model = tiny("llama")
    add_gates(model, gate)
    return stir(model)


@pytest.mark.parametrize("kept", [(), ("attn_gate",), ("lm_head",), ("lm_head", "attn_gate"), ("self_attn",)])
def test_gates_are_saved_from_inside_a_wrapper_and_loaded_with_or_without_it(tmp_path, kept):
    targets = ("gate_proj",) if "self_attn" in kept else ("q_proj", "v_proj")
    adapted = wrap(gated(), *kept, targets=targets)
    save_gates(adapted, tmp_path)
    plain = tiny("llama")
    load_gates(plain, tmp_path)
    acting = [gate for name, gate in adapted.named_parameters() if "attn_gate" in name and "original" not in name]
    assert len(acting) == 4
    assert sorted(gate.sum().item() for gate in gate_parameters(plain)) == sorted(gate.sum().item() for gate in acting)
    inside = wrap(tiny("llama"))
    load_gates(inside, tmp_path)
    if kept == ():
        assert torch.equal(logits(inside), logits(adapted))


def test_saved_gates_take_the_place_of_an_adapters_own(tmp_path):
    adapted = wrap(gated(), "attn_gate")
    expected = logits(adapted)
    save_gates(adapted, tmp_path)
    with torch.no_grad():
        for gate in gate_parameters(adapted):
            gate.zero_()
    assert not torch.equal(logits(adapted), expected)
    load_gates(adapted, tmp_path)
    assert torch.equal(logits(adapted), expected)


def test_with_adapters_switched_off_the_original_gates_are_saved(tmp_path):
    model = gated()
    expected = logits(model)
    adapted = wrap(model, "attn_gate")
    with adapted.disable_adapter():
        save_gates(adapted, tmp_path)
    plain = tiny("llama")
    load_gates(plain, tmp_path)
    assert torch.equal(logits(plain), expected)


@pytest.mark.parametrize("kept", [(), ("attn_gate",), ("lm_head",), ("embed_tokens",)])
def test_adapters_are_no_part_of_the_fingerprint(kept):
    expected = base_fingerprint(tiny("llama"))
    adapted = wrap(gated(), *kept)
    assert base_fingerprint(unwrap_model(adapted)) == expected
    with torch.no_grad():
        unwrap_model(adapted).model.norm.weight[0] += 1
    assert base_fingerprint(unwrap_model(adapted)) != expected


@pytest.mark.parametrize("kept", [(), ("attn_gate",)])
def test_gates_are_taken_out_of_a_wrapper(kept):
    ungated = logits(wrap(tiny("llama")))
    adapted = wrap(gated(), *kept)
    assert not torch.equal(logits(adapted), ungated)
    remove_gates(adapted)
    assert not list(gate_parameters(adapted))
    assert unwrap_model(adapted).config._attn_implementation == "sdpa"
    assert logits(adapted).isfinite().all()
    if not kept:
        assert torch.equal(logits(adapted), ungated)


def test_gates_can_be_added_through_a_wrapper():
    adapted = wrap(tiny("llama"))
    before = logits(adapted)
    assert add_gates(adapted, "bma+g1").model == "LlamaForCausalLM"
    assert torch.equal(logits(adapted), before)
    assert adapted.config is unwrap_model(adapted).config


@pytest.mark.parametrize("kept", [(), ("attn_gate",)])
def test_the_gates_that_act_are_merged_where_no_adapter_stands(kept):
    adapted = wrap(gated("output:input:b0"), *kept, targets=("q_proj",))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for gate in gate_parameters(adapted):
            gate.zero_() if gate.ndim == 3 else gate.normal_(generator=generator)
    expected = logits(adapted)
    merge_gates(adapted)
    assert not list(gate_parameters(adapted))
    assert_close(logits(adapted), expected, what="forward")


@pytest.mark.parametrize("function", [remove_gates, merge_gates, lambda model: save_gates(model, "x")])
def test_a_wrapper_of_another_kind_is_rejected(function):
    with pytest.raises(TypeError):
        function(nn.DataParallel(tiny("llama")))
