import copy
import inspect
import pickle

import pytest
import torch
from errors import rejects

from tidegate.gates import Gates
from tidegate.torch import GatedAttention
from tidegate.torch.named import (
    BilinearlyModulatedAttention,
    MultiHeadAttention,
    PostGatedAttention,
)

NAMED = {
    "multi-head": (MultiHeadAttention, {}, "none"),
    "bilinear": (BilinearlyModulatedAttention, {}, "bma"),
    "bilinear-source": (BilinearlyModulatedAttention, {"index": "source"}, "bma"),
    "bilinear-query": (BilinearlyModulatedAttention, {"index": "query"}, "bma-query"),
    "post": (PostGatedAttention, {}, "g1"),
    "post-element": (PostGatedAttention, {"grain": "element"}, "g1"),
    "post-head": (PostGatedAttention, {"grain": "head"}, "g1-head"),
}
OPTIONS = {
    "num_kv_heads": 2,
    "head_dim": 6,
    "causal": False,
    "dropout": 0.25,
    "bias": True,
    "rope": True,
    "qk_norm": True,
    "window": 3,
    "metric": "diagonal",
    "temperature": 0.5,
    "recompute_gate": True,
    "device": "cpu",
    "dtype": torch.float64,
}
named = pytest.mark.parametrize(("layer", "choice", "gate"), NAMED.values(), ids=NAMED)
classes = pytest.mark.parametrize("layer", [MultiHeadAttention, BilinearlyModulatedAttention, PostGatedAttention])


@named
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["default", "everything"])
def test_a_name_is_gated_attention_with_its_gate(layer, choice, gate, options):
    torch.manual_seed(0)
    ours = layer(12, 4, **choice, **options).eval()
    torch.manual_seed(0)
    spelled = GatedAttention(12, 4, gate=gate, **options).eval()
    assert isinstance(ours, GatedAttention)
    assert ours.gates == Gates.parse(gate)
    assert ours.extra_repr() == spelled.extra_repr()
    x = torch.randn(2, 5, 12, dtype=options.get("dtype"))
    assert torch.equal(ours(x), spelled(x))


@classes
def test_the_options_are_those_of_gated_attention_but_the_gate(layer):
    own, theirs = (dict(inspect.signature(kind).parameters) for kind in (layer, GatedAttention))
    del theirs["gate"]
    assert {name: own[name] for name in theirs} == theirs
    assert OPTIONS.keys() == {name for name, option in theirs.items() if option.kind is option.KEYWORD_ONLY}


@classes
def test_a_misspelt_option_fails(layer):
    message = f"{layer.__name__}.* unexpected keyword argument 'num_kv_head'. Known: d_model, num_heads, .*num_kv_heads"
    with pytest.raises(TypeError, match=message):
        layer(12, 4, num_kv_head=2)


@classes
def test_the_gate_is_no_option(layer):
    with pytest.raises(TypeError, match="unexpected keyword argument 'gate'"):
        layer(12, 4, gate="g2")


@classes
def test_a_name_is_final(layer):
    assert layer.__final__


@classes
def test_a_copy_keeps_its_name_and_its_numbers(layer):
    original = layer(12, 4)
    for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert type(twin) is layer
        assert all(torch.equal(twin.state_dict()[name], tensor) for name, tensor in original.state_dict().items())


def test_an_unknown_index_is_refused():
    with pytest.raises(ValueError, match="index must be 'source' or 'query'; got 'key'"):
        BilinearlyModulatedAttention(12, 4, index="key")


def test_an_unknown_grain_is_refused():
    with rejects("Gate.grain"):
        PostGatedAttention(12, 4, grain="channel")
