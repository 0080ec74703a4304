import model_types
import pytest
import torch
import transformers
from retrofit_models import tiny
from torch import nn

from tidegate.torch import GatedAttention
from tidegate.torch.retrofit import add_gates

REFUSED = {
    "no softmax over keys": (
        lambda: model_types.build("mamba"),
        "none of its modules calls attention through transformers' ALL_ATTENTION_FUNCTIONS, and none takes a softmax",
    ),
    "heads in another order": (lambda: model_types.build("xlnet"), "and none takes a softmax over keys"),
    "modules that are exchanged": (lambda: model_types.build("big_bird"), "it exchanges its attention modules"),
    "a gate of its own behind a name": (
        lambda: model_types.build("axk2"),
        "no projection takes the attention output as it is, and the model goes by the name of its attention",
    ),
}


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_take_gates_is_refused_with_the_reason(build, reason):
    model = build()
    names = set(model.state_dict())
    with pytest.raises(ValueError, match=reason):
        add_gates(model)
    assert set(model.state_dict()) == names
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_gate_that_cannot_read_is_refused_with_the_layer():
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn, where the key is projected before the value"):
        add_gates(tiny("llama"), "key:value")


def test_a_part_that_no_single_projection_gives_is_named():
    # Experts give the queries.
    model = model_types.build("jetmoe")
    with pytest.raises(ValueError, match="no single projection gives the query with columns for each head"):
        add_gates(model, "bma")
    assert add_gates(model, "g1+g2").bitwise_equal


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("gate", "article"), [("bma", "a query"), ("g2", "an input")])
def test_values_that_are_made_from_a_cache_of_latents_cannot_read_what_is_gone(gate, article, use_cache):
    model = model_types.build("deepseek_v3", use_cache=use_cache)
    with pytest.raises(ValueError, match=f"made anew from the cache .* the current one has {article} to read"):
        add_gates(model, gate)
    assert add_gates(model, "vga+g1").bitwise_equal


def test_a_value_that_is_the_key_as_well_is_not_gated():
    model = model_types.build("deepseek_v4", layer_types=["sliding_attention", "sliding_attention"])
    with pytest.raises(ValueError, match="the value and the key are the same numbers"):
        add_gates(model, "vga")


@pytest.mark.parametrize("model", [nn.Linear(3, 3), GatedAttention(16, 2)], ids=["linear", "ours"])
def test_only_models_of_transformers_are_taken(model):
    with pytest.raises(TypeError, match="model must be a PreTrainedModel of transformers, or adapters around one; got"):
        add_gates(model)


def test_another_implementation_is_refused_with_what_to_do():
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"'flash_attention_2'; set_attn_implementation\('eager' or 'sdpa'\) first"):
        add_gates(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gate": "none"}, "gate must name at least one gate"),
        ({"gate": "g9"}, "gate must be a preset or site:reads, got 'g9'"),
        ({"activation": "relu"}, "activation must be one of sigmoid.* got 'relu'"),
    ],
)
def test_what_is_no_gate_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        add_gates(tiny("llama"), **options)


@pytest.mark.parametrize(
    ("gate", "name"), [("bma", "v_proj"), ("bma-query", "q_proj"), ("g5", "o_proj"), ("g2", "v_proj")]
)
@pytest.mark.parametrize("layers", [None, [0]])
def test_a_projection_that_two_layers_share_is_refused(gate, name, layers):
    model = tiny("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    setattr(second, name, getattr(first, name))
    places = rf"model\.layers\.0\.self_attn\.{name} and model\.layers\.1\.self_attn\.{name}"
    with pytest.raises(ValueError, match=f"one module is {places}; give each place a copy"):
        add_gates(model, gate, layers=layers)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert add_gates(model, "g1").bitwise_equal


def test_an_output_projection_that_two_layers_share_is_refused_where_the_gate_acts_before_it():
    model = model_types.build("bloom")
    first, second = (layer.self_attention for layer in model.transformer.h)
    second.dense = first.dense
    places = r"transformer\.h\.0\.self_attention\.dense and transformer\.h\.1\.self_attention\.dense"
    with pytest.raises(ValueError, match=f"one module is {places}; give each place a copy"):
        add_gates(model, "g1")


def test_inference_mode_is_refused_with_the_reason():
    model = tiny("llama")
    with torch.inference_mode(), pytest.raises(ValueError, match=r"found by gradients, .* leave that mode first"):
        add_gates(model)
    with torch.no_grad():
        assert add_gates(model, "bma+g1").bitwise_equal


def test_weights_without_values_are_refused_with_the_reason():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny("llama").config)
    with pytest.raises(
        ValueError, match=r"weights are on the meta device, .* load the whole model onto a device first"
    ):
        add_gates(model)


def test_a_layer_that_is_used_twice_is_refused_in_words():
    model = tiny("llama")
    model.model.layers[1] = model.model.layers[0]
    message = (
        r"LlamaForCausalLM cannot take gates: one module is model\.layers\.0\.self_attn and "
        r"model\.layers\.1\.self_attn, so that both write to one place in the cache, and a small made-up input fails "
        r"\(.*\); give each place a copy with a `layer_idx` of its own\.$"
    )
    with pytest.raises(ValueError, match=message):
        add_gates(model)
