import model_types
import pytest
import torch
import transformers
from errors import rejects
from retrofit_models import tiny
from torch import nn

from tidegate.torch import GatedAttention
from tidegate.torch.retrofit import add_gates

UNFIT = {
    "no softmax over keys": (lambda: model_types.build("mamba"), "g1", "none takes a softmax over keys"),
    "heads in another order": (lambda: model_types.build("xlnet"), "g1", "none takes a softmax over keys"),
    "modules that are exchanged": (lambda: model_types.build("big_bird"), "g1", "replaces its attention modules"),
    "a gate of its own behind a name": (
        lambda: model_types.build("axk2"),
        "g1",
        "no projection takes the attention output unchanged, and the model depends on the name of its attention",
    ),
    "a key before the value": (
        lambda: tiny("llama"),
        "key:value",
        "model.layers.0.self_attn, where the key is projected before the value",
    ),
    "the value is the key": (
        lambda: model_types.build("deepseek_v4", layer_types=["sliding_attention", "sliding_attention"]),
        "vga",
        "the value and the key are the same numbers",
    ),
}


@pytest.mark.parametrize(("build", "gate", "reason"), UNFIT.values(), ids=UNFIT)
def test_a_model_that_cannot_take_gates_stays_as_it_is(build, gate, reason):
    model = build()
    names = set(model.state_dict())
    with rejects("model", hint=reason):
        add_gates(model, gate)
    assert set(model.state_dict()) == names
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_part_that_no_single_projection_gives_is_named():
    # Queries come from a mixture of experts.
    model = model_types.build("jetmoe")
    with rejects("model", hint="no single projection gives the query with columns for each head"):
        add_gates(model, "bma")
    assert add_gates(model, "g1+g2").bitwise_equal


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("gate", "source"), [("bma", "a query"), ("g2", "an input")])
def test_values_that_are_recomputed_from_a_cache_of_latents_cannot_read_what_is_gone(gate, source, use_cache):
    model = model_types.build("deepseek_v3", use_cache=use_cache)
    with rejects(
        "model", hint=f"recomputed from the cache for all its positions, and only the current one has {source}"
    ):
        add_gates(model, gate)
    assert add_gates(model, "vga+g1").bitwise_equal


@pytest.mark.parametrize("model", [nn.Linear(3, 3), GatedAttention(16, 2)], ids=["linear", "ours"])
def test_only_models_of_transformers_are_taken(model):
    with pytest.raises(TypeError, match="model must be"):
        add_gates(model)


def test_another_implementation_is_named_with_those_that_can_be_gated():
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    with rejects("model", hint="'flash_attention_2'; call model.set_attn_implementation('eager' or 'sdpa')"):
        add_gates(model)


def test_no_gate_and_an_unknown_activation_are_named():
    with rejects("gate"):
        add_gates(tiny("llama"), "none")
    with rejects("activation"):
        add_gates(tiny("llama"), activation="relu")


@pytest.mark.parametrize(
    ("gate", "name"), [("bma", "v_proj"), ("bma-query", "q_proj"), ("g5", "o_proj"), ("g2", "v_proj")]
)
@pytest.mark.parametrize("layers", [None, [0]])
def test_a_projection_that_two_layers_share_is_named(gate, name, layers):
    model = tiny("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    setattr(second, name, getattr(first, name))
    places = f"model.layers.0.self_attn.{name} and model.layers.1.self_attn.{name}"
    with rejects("model", hint=f"one module is {places}; give each place a copy"):
        add_gates(model, gate, layers=layers)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert add_gates(model, "g1").bitwise_equal


def test_inference_mode_is_named():
    model = tiny("llama")
    with torch.inference_mode(), rejects("model", hint="leave torch.inference_mode() first"):
        add_gates(model)
    with torch.no_grad():
        assert add_gates(model, "bma+g1").bitwise_equal


def test_weights_without_values_are_named():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny("llama").config)
    with rejects("model", hint="load the whole model onto a device"):
        add_gates(model)


def test_a_layer_that_is_used_twice_is_named():
    model = tiny("llama")
    model.model.layers[1] = model.model.layers[0]
    with rejects("model", hint="One module is model.layers.0.self_attn and model.layers.1.self_attn") as caught:
        add_gates(model)
    assert "layer_idx" in caught.value.hint
