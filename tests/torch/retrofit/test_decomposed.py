import model_types
import pytest
import supported_models
import torch
from closeness import assert_close
from retrofit_models import stir
from torch import nn
from torch.nn import functional
from transformers import EncoderDecoderModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tidegate.torch import gate_parameters
from tidegate.torch.retrofit import add_gates, merge_gates
from tidegate.torch.retrofit.probe import probe_inputs
from tidegate.torch.retrofit.survey import UNFIT, survey_attention

DECOMPOSED = ("bloom", "mpt", "gptj", "falcon", "openai-gpt", "xglm")
"""Types whose attention does not go through transformers' attention function."""


@pytest.mark.parametrize("model_type", DECOMPOSED)
def test_heads_and_projections_are_found(model_type):
    model = model_types.build(model_type)
    for layer in survey_attention(model, probe_inputs(model)).layers:
        assert (layer.shape.num_heads, layer.shape.head_dim) == (4, 8)
        assert set(layer.parts) == {"query", "key", "value"}
        assert layer.output is not None
        assert not layer.in_function


@pytest.mark.parametrize("gate", ["output:nothing:b0", "value:nothing:b0", "query:nothing:b0"])
@pytest.mark.parametrize("model_type", DECOMPOSED)
def test_a_constant_gate_is_a_scale_of_the_projection_beside_it(model_type, gate):
    """A constant gate on the columns found equals scaling these columns of the projection."""
    model = model_types.build(model_type)
    inputs = model_types.inputs_of(model)
    add_gates(model, gate)
    stir(model)
    with torch.no_grad():
        gated = model(**inputs).logits
        merge_gates(model)
        assert_close(model(**inputs).logits, gated, what="forward")
    assert not list(gate_parameters(model))


def test_a_query_is_read_before_its_rotation():
    model = model_types.build("gptj")
    add_gates(model, "bma-query")
    stir(model)
    attention, seen = model.transformer.h[0].attn, {}
    attention.q_proj.register_forward_hook(lambda _module, _args, output: seen.update(query=output))
    attention.out_proj.register_forward_pre_hook(lambda _module, args: seen.update(gated=args[0]), prepend=False)
    attention.out_proj.register_forward_pre_hook(lambda _module, args: seen.update(heads=args[0]), prepend=True)
    with torch.no_grad():
        model(**model_types.inputs_of(model))
    weight = attention.attn_gate.output.weight
    logits = torch.einsum("bthd,hde->bthe", seen["query"].unflatten(-1, (4, 8)), weight)
    assert_close(seen["gated"], seen["heads"] * (2 * torch.sigmoid(logits)).flatten(-2), what="forward")


class OwnConfig(PreTrainedConfig):
    model_type = "own"
    vocab_size = 64


class OwnAttention(nn.Module):
    """Four heads that attend by a function of query, key and value."""

    def __init__(self, attend):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.attend = attend

    def forward(self, x):
        heads = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, attend):
        super().__init__(OwnConfig())
        self.embedding, self.attention, self.head = nn.Embedding(64, 32), OwnAttention(attend), nn.Linear(32, 64)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        return CausalLMOutput(logits=self.head(self.attention(self.embedding(input_ids))))


BY_NAME = {
    "softmax": lambda q, k, v: torch.softmax(input=q @ k.mT, dim=-1) @ v,
    "product": lambda q, k, v: torch.matmul(input=(q @ k.mT).softmax(-1), other=v),
    "product of batches": lambda q, k, v: torch.bmm(
        (q @ k.mT).softmax(-1).flatten(0, 1), mat2=v.flatten(0, 1)
    ).unflatten(0, q.shape[:2]),
    "attention": lambda q, k, v: functional.scaled_dot_product_attention(query=q, key=k, value=v),
    "values alone": lambda q, k, v: functional.scaled_dot_product_attention(q, k, value=v),
}


@pytest.mark.parametrize("attend", BY_NAME.values(), ids=BY_NAME)
def test_operands_may_be_given_by_name(attend):
    report = add_gates(OwnModel(attend).eval(), "bma+g1")
    assert report.layers == ("attention",)
    assert report.bitwise_equal


def test_attention_by_convolutions_is_named_where_others_take_gates():
    encoder = supported_models.build_other("masked text", "squeezebert").transformer
    decoder = model_types.build("bert", is_decoder=True, add_cross_attention=True)
    report = add_gates(EncoderDecoderModel(encoder=encoder, decoder=decoder).eval(), "g1")
    assert len(report.layers) == 4
    assert list(report.left_alone) == ["encoder.encoder.layers.0.attention", "encoder.encoder.layers.1.attention"]
    assert set(report.left_alone.values()) == {UNFIT}
