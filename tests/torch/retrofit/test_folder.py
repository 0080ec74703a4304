import json

import model_types
import pytest
import torch
from retrofit_models import inputs_of, logits, stir, tiny
from transformers import AutoModelForCausalLM

import tidegate
from tidegate.torch import load_pretrained, save_pretrained
from tidegate.torch.retrofit import add_gates, remove_gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_saved_gated_model_is_loaded_with_its_bits(tmp_path, family, dtype):
    model = tiny(family, dtype=dtype)
    add_gates(model, "bma+g1-head")
    stir(model)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert type(again) is type(model)
    assert again.dtype == dtype
    assert not again.training
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("model_type", ["bloom", "gemma3", "bart"])
def test_types_of_all_kinds_are_loaded_without_their_code(tmp_path, model_type):
    model = model_types.build(model_type)
    add_gates(model, "g1")
    stir(model)
    save_pretrained(model, tmp_path)
    assert not list(tmp_path.glob("*.py"))
    inputs = model_types.inputs_of(model)
    with torch.no_grad():
        assert torch.equal(load_pretrained(tmp_path)(**inputs).logits, model(**inputs).logits)


def test_a_loaded_model_generates_and_goes_on_learning(tmp_path):
    model = tiny("llama", tie_word_embeddings=True)
    add_gates(model, "g1")
    stir(model)
    save_pretrained(model, tmp_path)
    again = tidegate.torch.load_pretrained(str(tmp_path))
    prompt = inputs_of(model, length=5)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(again.generate(**prompt, **options), model.generate(**prompt, **options))
    again(**prompt, labels=prompt["input_ids"]).loss.backward()
    assert all(weight.grad is not None for name, weight in again.named_parameters() if "attn_gate" in name)


def test_transformers_alone_loads_the_model_without_gates(tmp_path):
    model = tiny("llama")
    add_gates(model, "g1")
    stir(model)
    save_pretrained(model, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    remove_gates(model)
    assert torch.equal(logits(plain.eval()), logits(model))


def test_what_cannot_be_loaded_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"holds no model: config\.json is missing"):
        load_pretrained(tmp_path)
    model = tiny("llama")
    with pytest.raises(ValueError, match="has no gates; call add_gates"):
        save_pretrained(model, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no gates"):
        load_pretrained(tmp_path)
    add_gates(model)
    save_pretrained(model, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["NobodysModel"]}))
    with pytest.raises(ValueError, match=r"names the architecture 'NobodysModel', which transformers .* does not have"):
        load_pretrained(tmp_path)


def test_other_weights_under_the_gates_are_noticed(tmp_path):
    model = tiny("llama")
    add_gates(model)
    save_pretrained(model, tmp_path)
    tiny("llama", seed=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has another configuration or other weights"):
        load_pretrained(tmp_path)
