from contextlib import nullcontext

import model_types
import pytest
import torch
from closeness import assert_close
from covers import axis, over
from errors import rejects
from peft import LoraConfig, get_peft_model
from retrofit_models import inputs_of, logits, stir, tiny
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tidegate.torch.convert import from_fused_query_gate
from tidegate.torch.retrofit import (
    add_gates,
    export_gated,
    to_laguna,
    to_qwen3_next,
    to_qwen3_next_attention,
    to_step3p7,
)

SIGMOIDS = ["g1", "g1-head", "output:input:b0", "output:input:shared-group:r3", "output:input:w5:shared-layer"]
WINDOWS = {
    "sliding_window": 4,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
}


def gated(gate="g1", activation="twosigmoid", *, layers=None, **options):
    """Build a small Qwen3 with random gates and norms."""
    model = tiny("qwen3", **options)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(mean=1.0, std=0.2, generator=generator)
    add_gates(model, gate, activation, layers)
    return stir(model)


@over(gate=axis(SIGMOIDS), activation=axis(["twosigmoid", "tanh1", "sigmoid"], "tanh1"))
def test_sigmoid_gates_become_those_of_qwen3_next(gate, activation):
    model = gated(gate, activation)
    exported = to_qwen3_next(model)
    assert type(exported).__name__ == "Qwen3NextForCausalLM"
    assert exported.config._attn_implementation == "sdpa"
    assert_close(logits(exported), logits(model), what="forward")


@pytest.mark.parametrize("options", [{"layers": [1]}, {"attention_bias": True}, {"tie_word_embeddings": True}])
def test_qwen3_next_has_layers_without_gates_biases_and_tied_embeddings(options):
    model = gated(**options)
    assert_close(logits(to_qwen3_next(model)), logits(model), what="forward")


@pytest.mark.parametrize("options", [{}, WINDOWS, {"layers": [1]}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("activation", ["twosigmoid", "tanh1"])
def test_gates_of_one_number_a_head_become_those_of_step(activation, options):
    model = gated("output:input:head:r2", activation, **options)
    with pytest.warns(UserWarning, match="AutoModelForImageTextToText"):
        exported = to_step3p7(model)
    assert exported.model.language_model.layers[0].self_attn.g_proj.weight.shape == (4, 32)
    assert_close(logits(exported), logits(model), what="forward")


@pytest.mark.parametrize("options", [{}, WINDOWS, {"layers": [0]}, {"attention_bias": True}])
@pytest.mark.parametrize("gate", ["output:input:softplus", "output:input:head:softplus:w5"])
def test_softplus_gates_become_those_of_laguna(gate, options):
    model = gated(gate, None, **options)
    assert_close(logits(to_laguna(model)), logits(model), what="forward")


@pytest.mark.parametrize(
    ("gate", "activation", "options", "architecture"),
    [
        ("g1", "twosigmoid", {}, "Qwen3NextForCausalLM"),
        ("g1-head", "twosigmoid", WINDOWS, "Step3p7ForConditionalGeneration"),
        ("output:input:softplus", None, WINDOWS, "LagunaForCausalLM"),
    ],
)
def test_the_first_architecture_that_fits_can_be_saved_and_loaded_by_others(
    tmp_path, gate, activation, options, architecture
):
    model = gated(gate, activation, **options)
    step = architecture.startswith("Step")
    with pytest.warns(UserWarning, match="AutoModelForImageTextToText") if step else nullcontext():
        exported = export_gated(model)
    assert type(exported).__name__ == architecture
    exported.save_pretrained(tmp_path)
    if step:
        with pytest.raises(ValueError, match="Step3p7Config"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = (AutoModelForImageTextToText if step else AutoModelForCausalLM).from_pretrained(tmp_path).eval()
    assert_close(logits(loaded), logits(model), what="forward")
    prompt = inputs_of(model, length=5)
    sampling = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(loaded.generate(**prompt, **sampling), model.generate(**prompt, **sampling))


def test_the_layout_is_query_and_gate_by_head_with_the_scale_in_the_output_projection():
    model = gated()
    attention = model.model.layers[0].self_attn
    exported = to_qwen3_next_attention(attention)
    assert exported["q_proj.weight"].shape == (2 * 4 * 16, 32)
    query, gate = exported["q_proj.weight"].view(4, 2, 16, 32).unbind(1)
    assert torch.equal(query.flatten(0, 1), attention.q_proj.weight)
    assert torch.equal(gate.transpose(1, 2), attention.attn_gate.output.weight)
    assert torch.equal(exported["o_proj.weight"], 2 * attention.o_proj.weight)
    assert_close(from_fused_query_gate(exported)["q_norm.weight"], attention.q_norm.weight, what="forward")
    whole = to_qwen3_next_attention(model)
    assert len(whole) == 2 * 6
    assert torch.equal(whole["model.layers.0.self_attn.k_norm.weight"], exported["k_norm.weight"])


def adapted(*, around):
    model = gated("g1")
    wrapper = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    return wrapper if around else model


def with_gates(model, gate="g1-head"):
    add_gates(model, gate)
    return model


UNFIT_MODELS = {
    "adapters around": (lambda: adapted(around=True), "merge_and_unload"),
    "adapters inside": (lambda: adapted(around=False), "merge_and_unload"),
    "no gates": (lambda: tiny("qwen3"), "add_gates(model)"),
    "experts": (lambda: with_gates(model_types.build("qwen3_moe")), "model.layers.0.mlp.experts"),
    "a norm over all heads": (lambda: with_gates(model_types.build("olmo2")), "q_norm of model.layers.0.self_attn"),
}


@pytest.mark.parametrize("convert", [export_gated, to_qwen3_next, to_step3p7, to_laguna])
@pytest.mark.parametrize(("make", "reason"), UNFIT_MODELS.values(), ids=UNFIT_MODELS)
def test_the_reason_why_a_model_cannot_be_exported_is_given_once(make, reason, convert):
    with rejects("model", hint=reason) as caught:
        convert(make())
    assert str(caught.value).count(reason) == 1


@pytest.mark.parametrize(
    ("convert", "gate", "activation"),
    [
        (to_qwen3_next, "g1+g2", "twosigmoid"),
        (to_qwen3_next, "bma-query", "twosigmoid"),
        (to_step3p7, "output:input:head:b0", "twosigmoid"),
        (to_laguna, "g1", "twosigmoid"),
    ],
)
def test_gates_that_an_architecture_cannot_express_are_named(convert, gate, activation):
    model = gated(gate, activation)
    with rejects("gates", hint="model.layers.0.self_attn"):
        convert(model)


def test_what_an_architecture_lacks_is_named():
    with rejects("module", hint="q_norm, k_norm"):
        to_qwen3_next(with_gates(tiny("llama"), "g1"))
    with rejects("model", hint="sliding_attention"):
        to_qwen3_next(gated(**WINDOWS))
    with rejects("model") as caught:
        export_gated(gated("g1", None, **WINDOWS))
    assert all(name in caught.value.hint for name in ("sliding_attention", "Step-3.7", "Laguna"))
