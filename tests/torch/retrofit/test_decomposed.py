import model_types
import pytest
import supported_models
import torch
from closeness import assert_close
from retrofit_models import stir
from transformers import EncoderDecoderModel

from tidegate.torch import gate_parameters
from tidegate.torch.retrofit import add_gates, merge_gates
from tidegate.torch.retrofit.survey import UNFIT

DECOMPOSED = ("bloom", "mpt", "gptj", "falcon", "openai-gpt", "xglm")
"""Types whose attention does not go through transformers' attention function."""


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


def test_attention_by_convolutions_is_named_where_others_take_gates():
    encoder = supported_models.build_other("masked text", "squeezebert").transformer
    decoder = model_types.build("bert", is_decoder=True, add_cross_attention=True)
    report = add_gates(EncoderDecoderModel(encoder=encoder, decoder=decoder).eval(), "g1")
    assert len(report.layers) == 4
    assert list(report.left_alone) == ["encoder.encoder.layers.0.attention", "encoder.encoder.layers.1.attention"]
    assert set(report.left_alone.values()) == {UNFIT}
