"""Projections and sizes are found by running an input through the model."""

import pytest
from retrofit_models import FAMILIES, tiny

from tidegate.sizes import HeadShape
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
