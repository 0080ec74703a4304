import pytest
import torch
from closeness import assert_close
from errors import rejects
from retrofit_models import adapt, logits, tiny

from tidegate.torch import gate_parameters
from tidegate.torch.retrofit import add_gates, merge_gates

EVERYWHERE = "output:input:b0+value:query:head:b0+key:input:b0+query:input:head:b0+dense:input:b0"


def with_constants(family, gate):
    """A model whose gates have zero matrices and random biases."""
    model = tiny(family)
    add_gates(model, gate)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn_gate" in name and name.endswith("bias"):
                parameter.normal_()
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "gpt-neox", "phi3", "opt"])
def test_constant_gates_fold_into_the_projections(family):
    plain, model = logits(tiny(family)), with_constants(family, EVERYWHERE)
    names, gated = set(tiny(family).state_dict()), logits(model)
    merge_gates(model)
    assert set(model.state_dict()) == names
    assert model.config._attn_implementation == "sdpa"
    assert_close(logits(model), gated, what="forward")
    assert (gated - plain).abs().max() > 1e-3


@pytest.mark.parametrize(
    "gate",
    [
        *("output:input:shared-layer:b0", "value:input:shared-layer:r2:b0", "output:query:head:shared-group:b0"),
        *("output:nothing", "value:nothing:head+key:nothing", "dense:nothing"),
    ],
)
def test_shared_gates_and_trained_constants_fold_too(gate):
    model = with_constants("llama", gate)
    gated = logits(model)
    assert not torch.allclose(gated, logits(tiny("llama")))
    merge_gates(model)
    assert_close(logits(model), gated, what="forward")


def test_gates_that_were_never_trained_leave_every_bit():
    model = tiny("llama")
    before = logits(model)
    add_gates(model, "bma+g1+g5")
    merge_gates(model)
    assert torch.equal(logits(model), before)


def test_a_gate_that_is_not_constant_is_named_and_nothing_is_changed():
    model = with_constants("llama", EVERYWHERE)
    with torch.no_grad():
        model.model.layers[1].self_attn.attn_gate.key.weight[0, 0, 0] = 1e-9
    gated = logits(model)
    with rejects("model", hint="Its matrix is not zero") as caught:
        merge_gates(model)
    assert caught.value.got.startswith("key:input:")
    assert caught.value.got.endswith("model.layers.1.self_attn")
    assert torch.equal(logits(model), gated)
    assert any(True for _ in gate_parameters(model))


def adding():
    model = tiny("llama")
    add_gates(model, "value:input:add", "identity")
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: adapt(with_constants("llama", "g2")), "v_proj is a Linear, not a plain matrix"),
        (adding, "It adds"),
        (lambda: tiny("llama"), "add_gates(model)"),
    ],
    ids=["an adapter", "a gate that adds", "no gates"],
)
def test_what_cannot_be_merged_is_named(make, reason):
    model = make()
    with rejects("model", hint=reason):
        merge_gates(model)


@pytest.mark.parametrize("share", ["module", "weight"])
def test_weights_that_two_layers_share_are_named_and_nothing_is_changed(share):
    model = tiny("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    if share == "module":
        second.o_proj = first.o_proj
    else:
        second.o_proj.weight = first.o_proj.weight
    add_gates(model, "output:input:b0")
    with torch.no_grad():
        for attention in (first, second):
            attention.attn_gate.output.bias.fill_(0.5)
    gated = logits(model)
    with rejects("model", hint="model.layers.0.self_attn.o_proj and model.layers.1.self_attn.o_proj"):
        merge_gates(model)
    assert torch.equal(logits(model), gated)


@pytest.mark.parametrize("site", ["value", "value:query:head:b0+output"])
def test_gates_whose_merging_would_change_the_answers_stay(site):
    model = tiny("llama")
    # The hook between the projection and its gate would receive the merged result.
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _module, _args, output: output + 1)
    add_gates(model, f"{site}:input:b0")
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    gated, implementation = logits(model), model.config._attn_implementation
    with rejects("model", hint="change outputs by up to"):
        merge_gates(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model), gated)


def test_constant_gates_fold_in_float64_with_eager_attention_too():
    model = with_constants("llama", "output:input:b0").double()
    model.set_attn_implementation("tidegate_eager")
    gated = logits(model)
    merge_gates(model)
    # The first row begins with padding, where this attention is nan.
    assert torch.equal(logits(model).isnan(), gated.isnan())
    assert_close(logits(model)[1], gated[1], what="forward")
