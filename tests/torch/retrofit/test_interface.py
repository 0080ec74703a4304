import pytest
import torch
from closeness import assert_close
from retrofit_models import inputs_of, logits, stir, tiny

from tidegate.torch.retrofit import add_gates, remove_gates


@pytest.mark.parametrize("stock", ["eager", "sdpa"])
@pytest.mark.parametrize("gate", ["g1", "bma-query", "dense:output"])
def test_an_implementation_that_would_drop_the_gate_is_an_error(stock, gate):
    model = tiny("llama")
    add_gates(model, gate, layers=[1])
    model.set_attn_implementation(stock)
    with pytest.raises(RuntimeError, match=f"'{stock}'"):
        logits(model)
    model.config._attn_implementation = stock
    with pytest.raises(RuntimeError, match="tidegate_eager"):
        model.generate(**inputs_of(model), max_new_tokens=1)
    model.set_attn_implementation(f"tidegate_{stock}")
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit", "mistral"])
def test_the_gated_implementations_agree_with_each_other(family):
    model = tiny(family)
    add_gates(model, "g1+bma")
    stir(model)
    fused = logits(model)
    model.set_attn_implementation("tidegate_eager")
    inputs = inputs_of(model)
    # Eager and fused attention differ for queries without keys.
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones(2, dtype=torch.bool)
    assert_close(logits(model, inputs)[real], fused[real], what="forward")


def test_gates_elsewhere_leave_the_implementation_alone():
    model = tiny("llama")
    add_gates(model, "bma+g3+g4+g5")
    stir(model)
    fused = logits(model)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    real = inputs_of(model)["attention_mask"].bool()
    assert_close(logits(model)[real], fused[real], what="forward")
    remove_gates(model)
    assert model.config._attn_implementation == "eager"


def test_attention_weights_are_returned_on_request():
    model = tiny("llama", implementation="eager")
    add_gates(model)
    weights = model(**inputs_of(model), output_attentions=True).attentions
    assert [tuple(each.shape) for each in weights] == [(2, 4, 7, 7)] * 2


def test_the_name_of_the_implementation_is_not_saved_with_the_model(tmp_path):
    model = tiny("llama")
    add_gates(model)
    model.config.save_pretrained(tmp_path)
    assert model.config._attn_implementation == "tidegate_sdpa"
    assert "tidegate_sdpa" not in (tmp_path / "config.json").read_text()
