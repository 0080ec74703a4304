import pytest
import torch
from torch import nn

from tidegate.torch.observing.modules import ModuleCall, block_of, follow_modules, num_added_keys
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
    "a sequence": (wrapped(blocks=nn.Sequential(layer())), "blocks.0.self_attn", "blocks.0"),
    "a list before a sequence": (
        wrapped(blocks=nn.ModuleList([wrapped(attn=nn.Sequential(wrapped(inner=nn.Identity())))])),
        "blocks.0.attn.0.inner",
        "blocks.0",
    ),
    "no list": (layer(), "self_attn", None),
    "the model itself": (nn.Identity(), "", None),
    "the model is the list": (nn.ModuleList([layer()]), "0.self_attn", "0"),
}


@pytest.mark.parametrize(("model", "name", "block"), MODELS.values(), ids=MODELS)
def test_the_block_of_a_layer(model, name, block):
    assert block_of(model, name) == block


class Notes:
    def __init__(self):
        self.events = []
        self.stack = None

    def begin(self):
        self.events.append("begin")

    def leave(self, call, result):
        self.events.append(([each.name for each in self.stack], call.kwargs.get("add"), result))

    def end(self):
        self.events.append("end")


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x, add=1) + self.inner(x, add=2)


class Inner(nn.Module):
    def forward(self, x, add):
        if x < 0:
            raise ArithmeticError("on purpose")
        return x + add


def test_modules_are_left_inside_out_and_an_error_clears_the_stack():
    model, notes = Outer(), Notes()
    with follow_modules(model, notes) as stack:
        notes.stack = stack
        model(1)
        with pytest.raises(ArithmeticError):
            model(-1)
        assert stack == []
        model(5)
    model(7)
    once = ["begin", (["", "inner"], 1, 2), (["", "inner"], 2, 3), ([""], None, 5), "end"]
    again = ["begin", (["", "inner"], 1, 6), (["", "inner"], 2, 7), ([""], None, 13), "end"]
    assert notes.events == [*once, "begin", "end", *again]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("h.1.attn.attn_gate.value", ["h.0.attn", "h.1.attn"], "h.1.attn"),
        ("h.1.attention.output.gate", ["h.0.attention.self", "h.1.attention.self"], "h.1.attention.self"),
        ("h.10.gate", ["h.1.attn", "h.10.attn"], "h.10.attn"),
        ("attn_gate.value", [""], ""),
        ("h.0.gate", [], None),
    ],
)
def test_a_gate_is_at_the_layer_with_the_longest_common_path(name, layers, expected):
    assert nearest_layer(name, layers) == expected


class Masked(nn.Module):
    def forward(self, x, attention_mask=None): ...


@pytest.mark.parametrize(
    ("mask_shape", "num_added"),
    [((2, 1, 5, 5), 3), ((2, 1, 5, 8), 0), ((2, 1, 1, 1), 0), ((2, 5), 0), (None, 0)],
    ids=["shorter than the keys", "of every key", "of one column", "of tokens", "none"],
)
def test_keys_that_a_mask_does_not_speak_of_were_added(mask_shape, num_added):
    mask = None if mask_shape is None else torch.zeros(mask_shape)
    x = torch.zeros(2, 5, 4)
    assert num_added_keys(ModuleCall("", Masked(), (x, mask), {}), 8) == num_added
    assert num_added_keys(ModuleCall("", Masked(), (x,), {"attention_mask": mask}), 8) == num_added
