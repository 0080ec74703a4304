"""Projections and sizes are found by running an input through the model."""

import pytest
from errors import rejects
from peft.tuners.lora import LoraLayer
from retrofit_models import FAMILIES, adapt, tiny
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from tidegate.sizes import HeadShape
from tidegate.torch.retrofit import add_gates
from tidegate.torch.retrofit.probe import probe_inputs
from tidegate.torch.retrofit.survey import survey_attention

PROJECTIONS = {
    "gpt2": ("c_attn", "c_attn", "c_attn", "c_proj"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "bert": ("query", "key", "value", "dense"),
    "gpt-neox": ("query_key_value", "query_key_value", "query_key_value", "dense"),
    "phi3": ("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
}
USUAL = ("q_proj", "k_proj", "v_proj", "o_proj")
SHAPES = {
    "qwen3": HeadShape(d_model=32, num_heads=4, num_kv_heads=2, head_dim=16),
    "gemma": HeadShape(d_model=32, num_heads=4, num_kv_heads=1, head_dim=8),
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3"), HeadShape.of(d_model=32, num_heads=4, num_kv_heads=2)),
}


def layers_of(model):
    return survey_attention(model, probe_inputs(model)).layers


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_and_projections_are_found(family):
    layers = layers_of(tiny(family))
    assert len(layers) == 2
    for layer in layers:
        names = [layer.parts[kind].slot.name for kind in ("query", "key", "value")]
        assert (*names, layer.output.name) == PROJECTIONS.get(family, USUAL)
        assert layer.shape == SHAPES.get(family, HeadShape.of(d_model=32, num_heads=4))


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "phi3"])
def test_the_parts_of_a_fused_projection_lie_side_by_side_and_fill_it(family):
    (layer, _) = layers_of(tiny(family))
    columns = [column for part in layer.parts.values() for head in part.columns.heads() for column in head]
    assert sorted(columns) == list(range(len(columns)))
    weight = layer.parts["query"].slot.module.weight
    assert len(columns) == max(weight.shape)


def test_an_adapter_is_found_in_the_place_of_what_it_stands_around():
    (layer, _) = layers_of(adapt(tiny("llama")))
    assert isinstance(layer.parts["value"].slot.module, LoraLayer)


class ValueFirst(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **self.options(kwargs))
        return self.projected(output.flatten(2)), weights

    def options(self, kwargs):
        kwargs.pop("past_key_values", None)
        return kwargs

    def projected(self, output):
        return self.o_proj(output)


class WideNorm(ValueFirst):
    """With a norm over all heads between the attention and the output projection."""

    def projected(self, output):
        return self.o_proj(nn.functional.rms_norm(output, output.shape[-1:]))


def with_attention(kind):
    model = tiny("llama", use_cache=False)
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    return model


def test_a_value_that_is_projected_before_the_query_cannot_read_it():
    model = with_attention(ValueFirst)
    with rejects("model", hint="the value is projected before the query"):
        add_gates(model, "bma")
    assert add_gates(model, "bma-query+g2+query:value").bitwise_equal


def test_what_stands_after_a_norm_is_not_taken_for_the_output_projection():
    model = with_attention(WideNorm)
    with rejects("model", hint="no projection takes the attention output"):
        add_gates(model, "g5")
    assert add_gates(model, "g1").bitwise_equal
