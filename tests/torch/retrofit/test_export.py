import pytest
import torch
from closeness import assert_close
from covers import axis, over
from retrofit_models import inputs_of, logits, stir, tiny
from transformers import AutoModelForCausalLM

from tidegate.torch.convert import from_fused_query_gate
from tidegate.torch.retrofit import add_gates, to_qwen3_next, to_qwen3_next_attention

GATES = ["g1", "g1-head", "output:input:b0", "output:input:shared-group:r3", "output:input:w5:shared-layer"]


def gated(gate="g1", activation="twosigmoid", *, layers=None, **options):
    """A small Qwen3 with stirred gates and with norms that are not all ones."""
    model = tiny("qwen3", **options)
    torch.manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
    add_gates(model, gate, activation, layers)
    return stir(model)


@over(gate=axis(GATES), activation=axis(["twosigmoid", "tanh1", "sigmoid"], "tanh1"))
def test_the_exported_model_has_equal_logits(gate, activation):
    model = gated(gate, activation)
    exported = to_qwen3_next(model)
    assert type(exported).__name__ == "Qwen3NextForCausalLM"
    assert exported.config._attn_implementation == "sdpa"
    assert_close(logits(exported), logits(model), what="forward")


@pytest.mark.parametrize("options", [{"layers": [1]}, {"attention_bias": True}, {"tie_word_embeddings": True}])
def test_layers_without_gates_biases_and_tied_embeddings_are_exported_too(options):
    model = gated(**options)
    assert_close(logits(to_qwen3_next(model)), logits(model), what="forward")


def test_the_exported_model_can_be_saved_and_loaded_by_others(tmp_path):
    model = gated()
    to_qwen3_next(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_close(logits(loaded), logits(model), what="forward")
    prompt = inputs_of(model, length=5)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(loaded.generate(**prompt, **options), model.generate(**prompt, **options))


def test_the_layout_is_query_and_gate_by_head_with_the_scale_in_the_output_projection():
    attention = gated().model.layers[0].self_attn
    exported = to_qwen3_next_attention(attention)
    assert exported["q_proj.weight"].shape == (2 * 4 * 16, 32)
    query, gate = exported["q_proj.weight"].view(4, 2, 16, 32).unbind(1)
    assert torch.equal(query.flatten(0, 1), attention.q_proj.weight)
    assert torch.equal(gate.transpose(1, 2), attention.attn_gate.output.weight)
    assert torch.equal(exported["o_proj.weight"], 2 * attention.o_proj.weight)
    back = from_fused_query_gate(exported)
    assert_close(back["q_norm.weight"], attention.q_norm.weight, what="forward")


def test_a_model_gives_the_layers_under_their_paths():
    model = gated()
    exported = to_qwen3_next_attention(model)
    assert len(exported) == 2 * 6
    first = to_qwen3_next_attention(model.model.layers[0].self_attn)
    assert torch.equal(exported["model.layers.0.self_attn.k_norm.weight"], first["k_norm.weight"])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: tiny("qwen3"), "no gates to export"),
        (lambda: gated("g1+g2"), "has the gates .*; Qwen3-Next has one, at the output"),
        (lambda: gated("bma-query"), "Qwen3-Next has one, at the output, that reads the input"),
        (lambda: gated("g1", "silu"), "activation 'silu'; only sigmoid, twosigmoid, tanh1"),
        (lambda: with_gates(tiny("llama")), "LlamaAttention has no q_norm, k_norm, which Qwen3-Next attention needs"),
        (
            lambda: gated(use_sliding_window=True, sliding_window=4, max_window_layers=1),
            "layers of full_attention, sliding_attention",
        ),
    ],
    ids=["no gates", "two", "query", "silu", "no norms", "window"],
)
def test_what_qwen3_next_cannot_express_is_refused(build, reason):
    model = build()
    with pytest.raises(ValueError, match=reason):
        to_qwen3_next(model)


def with_gates(model):
    add_gates(model)
    return model
