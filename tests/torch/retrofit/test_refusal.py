import pytest
import torch
import transformers
from retrofit_models import SPECIAL, TOKENS, tiny
from torch import nn

from tidegate.torch import GatedAttention, gate_parameters
from tidegate.torch.retrofit import add_gates

SMALL = {"d_model": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 32, "vocab_size": 64}
CLIP_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 64,
}
CLIP_IMAGES = {**CLIP_TEXT, "image_size": 16, "patch_size": 8}


def sound():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    options = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (4,), "num_feat_extract_layers": 1}
    config = transformers.Wav2Vec2Config(**sizes, **options, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    return transformers.Wav2Vec2Model(config)


REFUSED = {
    "an encoder and a decoder": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL, decoder_start_token_id=0)),
        "T5ForConditionalGeneration cannot take gates: its configuration says is_encoder_decoder",
    ),
    "cross-attention": (lambda: tiny("gpt2", add_cross_attention=True), "its configuration says add_cross_attention"),
    "attention of its own": (
        lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64, **SPECIAL)
        ),
        "none of its modules calls attention through transformers' ALL_ATTENTION_FUNCTIONS",
    ),
    "two inputs": (
        lambda: transformers.CLIPModel(transformers.CLIPConfig(text_config=CLIP_TEXT, vision_config=CLIP_IMAGES)),
        "CLIPModel cannot take gates: it takes input_ids and pixel_values at once, and only one of them can be made "
        "up; add gates to its parts, model.text_model and model.vision_model",
    ),
    "attention that drops keywords": (
        lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**CLIP_IMAGES)),
        "attention function of encoder.layers.0.self_attn, or not as self-attention, or without the keywords",
    ),
    "sound": (sound, "its input is 'input_values', and only 'input_ids' and 'pixel_values' can be made up"),
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
    config = transformers.Olmo2Config(**TOKENS, **SPECIAL)
    model = transformers.Olmo2ForCausalLM(config)
    # The norm before the heads are split mixes all columns, so that none belong to one head.
    with pytest.raises(ValueError, match="no single projection of the layer's input gives the query"):
        add_gates(model, "bma")
    assert add_gates(model, "g1+g2").bitwise_equal


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
        ({"gate": "g9"}, "Unknown gate 'g9'"),
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


def test_the_parts_of_a_model_with_two_inputs_take_gates():
    special = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=CLIP_TEXT | special, vision_config=CLIP_IMAGES)
    model = transformers.CLIPModel(config).eval()
    inputs = {"input_ids": torch.arange(3, 13).reshape(2, 5), "pixel_values": torch.ones(2, 3, 16, 16)}
    with torch.no_grad():
        before = model(**inputs).logits_per_text
        for part in (model.text_model, model.vision_model):
            add_gates(part, "bma")
        assert torch.equal(model(**inputs).logits_per_text, before)
        for gate in gate_parameters(model):
            gate.normal_(std=0.5)
        assert not torch.allclose(model(**inputs).logits_per_text, before)
