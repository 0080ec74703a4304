import pytest
from torch import nn

from tidegate.torch.observing.modules import block_of
from tidegate.torch.observing.sums import nearest_layer


def wrapped(**parts):
    return nn.ModuleDict(parts)


def layer():
    return wrapped(self_attn=nn.Identity(), mlp=nn.Identity())


MODELS = {
    "a list of blocks": (wrapped(layers=nn.ModuleList([layer(), layer()])), "layers.1.self_attn", "layers.1"),
    "lists of stages of blocks": (
        wrapped(stages=nn.ModuleList([wrapped(blocks=nn.ModuleList([layer()]))])),
        "stages.0.blocks.0.self_attn",
        "stages.0.blocks.0",
    ),
    "a list of heads in a block": (
        wrapped(blocks=nn.ModuleList([wrapped(heads=nn.ModuleList([nn.Identity()]))])),
        "blocks.0.heads.0",
        "blocks.0",
    ),
    "a list before a sequence": (
        wrapped(blocks=nn.ModuleList([wrapped(attn=nn.Sequential(wrapped(inner=nn.Identity())))])),
        "blocks.0.attn.0.inner",
        "blocks.0",
    ),
    "no list": (layer(), "self_attn", None),
}


@pytest.mark.parametrize(("model", "name", "block"), MODELS.values(), ids=MODELS)
def test_the_block_of_a_layer(model, name, block):
    assert block_of(model, name) == block


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("h.1.attn.attn_gate.value", ["h.0.attn", "h.1.attn"], "h.1.attn"),
        ("h.1.attention.output.gate", ["h.0.attention.self", "h.1.attention.self"], "h.1.attention.self"),
        ("h.0.gate", [], None),
    ],
)
def test_a_gate_is_at_the_layer_with_the_longest_common_path(name, layers, expected):
    assert nearest_layer(name, layers) == expected
