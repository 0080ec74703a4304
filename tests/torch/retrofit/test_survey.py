import model_types
import pytest
import torch
import transformers
from errors import rejects
from retrofit_models import SPECIAL, inputs_of, stir, tiny

from tidegate.torch import gate_parameters, observe
from tidegate.torch.retrofit import add_gates, remove_gates, survey
from tidegate.torch.retrofit.interface import keeps_to_stock
from tidegate.torch.retrofit.probe import largest_change, probe_inputs, run_probe
from tidegate.torch.retrofit.survey import survey_attention

SMALL = {"d_model": 32, "vocab_size": 64, "encoder_layers": 1, "decoder_layers": 1} | SPECIAL
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
START = {"decoder_start_token_id": 1, "forced_eos_token_id": None}
T5 = {"d_model": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 32, "vocab_size": 64}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}


def bart():
    config = transformers.BartConfig(**SMALL, **HEADS, **START, max_position_embeddings=64)
    return transformers.BartForConditionalGeneration(config)


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0))


def clip():
    text = {**LAYERS, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    images = {**LAYERS, "image_size": 16, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=images))


def crossing_gpt2():
    return tiny("gpt2", add_cross_attention=True)


STACKS = {
    "bart": (bart, 3, ("model.decoder.layers.0.encoder_attn",)),
    "t5": (t5, 3, ("decoder.block.0.layer.1.EncDecAttention",)),
    "clip": (clip, 2, ()),
    "gpt2 with an unused cross-attention": (crossing_gpt2, 2, ()),
}


@pytest.mark.parametrize(("build", "num_layers", "crossing"), STACKS.values(), ids=STACKS)
def test_every_stack_that_a_plain_input_reaches_takes_gates(build, num_layers, crossing):
    model = build().eval()
    inputs = probe_inputs(model)
    before = run_probe(model, inputs)
    assert len(add_gates(model, "g1").layers) == num_layers
    assert largest_change(run_probe(model, inputs), before) == 0
    stir(model)
    assert largest_change(run_probe(model, inputs), before) > 1e-3
    _require_gradients(model, inputs)
    remove_gates(model)
    report = add_gates(model, "bma")
    assert len(report.layers) == num_layers - len(crossing)
    assert set(crossing) <= set(report.left_alone)


def _require_gradients(model, inputs):
    output = model(**inputs)
    total = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
    total.square().sum().backward()
    assert all(gate.grad is not None and gate.grad.any() for gate in gate_parameters(model))


@pytest.mark.parametrize("gate", ["g1", "bma", "g2", "bma-query"])
def test_an_encoder_with_a_decoder_generates_the_same_with_and_without_a_cache(gate):
    torch.manual_seed(0)
    model = bart().eval()
    add_gates(model, gate)
    stir(model, std=1.0)
    tokens = torch.randint(3, 64, (2, 6))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached, plain = (model.generate(tokens, **options, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, plain)


def test_gates_on_cross_attention_read_what_it_attends_to():
    """A value gate there gates the value projection by the encoder's states."""
    torch.manual_seed(0)
    model = bart().eval()
    add_gates(model, "g2", layers=[2])
    stir(model)
    seen = {}
    attention = model.model.decoder.layers[0].encoder_attn
    attention.v_proj.register_forward_hook(lambda _module, args, output: seen.update(states=args[0], gated=output))
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7, 8]]), decoder_input_ids=torch.tensor([[1, 9]]))
        raw = attention.v_proj.forward(seen["states"])
        matrix = attention.attn_gate.value.weight.movedim(0, 1).flatten(1)
        assert torch.allclose(seen["gated"], raw * 2 * torch.sigmoid(seen["states"] @ matrix), atol=1e-5)


def test_what_a_plain_input_does_not_reach_is_left_alone_and_named():
    model = model_types.build("gemma3")
    report = add_gates(model, "g1")
    assert all(name.startswith("model.language_model.") for name in report.layers)
    assert list(report.left_alone) == [f"model.vision_tower.encoder.layers.{layer}.self_attn" for layer in (0, 1)]
    assert "Left alone: model.vision_tower.encoder.layers.0.self_attn" in str(report)


@pytest.mark.parametrize("num_keys", [4, 10])
def test_a_choice_of_keys_by_the_name_of_the_implementation_stays(num_keys):
    """Also if the probe has too few tokens for a choice."""
    model = model_types.build("deepseek_v32", index_topk=num_keys)
    inputs = model_types.inputs_of(model, length=20)
    assert keeps_to_stock(type(model.model.layers[0].self_attn))
    with torch.no_grad():
        before = model(**inputs).logits
        assert add_gates(model, "g1").bitwise_equal
        assert torch.equal(model(**inputs).logits, before)
    assert model.config._attn_implementation == "sdpa"


def test_what_is_observed_does_not_depend_on_where_the_gate_acts(monkeypatch):
    found = []
    for in_function in (True, False):
        monkeypatch.setattr(survey, "_supports_gated_twin", lambda *_, answer=in_function: answer)
        model = tiny("llama")
        add_gates(model, "g1")
        assert model.config._attn_implementation == ("tidegate_sdpa" if in_function else "sdpa")
        stir(model)
        with torch.no_grad(), observe(model) as watcher:
            model(**inputs_of(model))
        found.append(watcher.observation().layers)
    assert found[0] == found[1]


def test_an_input_of_unknown_size_is_refused_in_words():
    config = transformers.Wav2Vec2BertConfig(**LAYERS, feature_projection_input_dim=8, conv_depthwise_kernel_size=3)
    model = transformers.Wav2Vec2BertModel(config)
    with rejects("model", hint="size of its input_features"):
        add_gates(model)


def test_a_norm_over_all_heads_leaves_each_its_query():
    model = model_types.build("olmo2")
    layer = survey_attention(model, probe_inputs(model)).layers[0]
    assert layer.parts["query"].columns.heads() == [list(range(8 * head, 8 * head + 8)) for head in range(4)]
    assert layer.parts["query"].slot.name == "q_proj"
