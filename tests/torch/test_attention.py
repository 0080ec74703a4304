import inspect
from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch
from covers import every_layer
from errors import rejects
from torch_layers import every_option, make, sample

from tidegate import Gates
from tidegate.config import AttentionConfig
from tidegate.torch import GatedAttention, KVCache

EVERYTHING = {"bias": True, "qk_norm": True, "metric": "learned", "rope": True, "num_kv_heads": 2}
NAMES = [
    "q_proj.weight",
    "q_proj.bias",
    "k_proj.weight",
    "k_proj.bias",
    "v_proj.weight",
    "v_proj.bias",
    "o_proj.weight",
    "o_proj.bias",
    "q_norm.weight",
    "k_norm.weight",
    "metric.weight",
    "attn_gate.value.weight",
    "attn_gate.output.weight",
]


def test_names_in_a_state_dict_are_stable():
    assert list(make("g1+bma", **EVERYTHING).state_dict()) == NAMES
    assert list(make("none").state_dict()) == [f"{letter}_proj.weight" for letter in "qkvo"]
    parts = [f"attn_gate.dense.{name}" for name in ("weight_down", "weight_up", "bias")]
    assert list(make("dense:input:r2:b1").state_dict())[-3:] == parts


def test_bma_is_the_default_and_none_is_plain():
    assert GatedAttention(24, 4).gates == Gates.parse("bma")
    assert GatedAttention(24, 4, gate=None).gates == GatedAttention(24, 4, gate="none").gates == Gates()


@pytest.mark.parametrize(
    ("options", "num_keys", "expected"),
    [
        # Two FLOPs for each weight, and 2 · 2 · 24 channels for each key and its value.
        ({}, 0, 2 * 4 * 24 * 24),
        ({}, 10, 2 * 4 * 24 * 24 + 4 * 24 * 10),
        ({"gate": "bma", "num_kv_heads": 1}, 2.5, 2 * (2 * 24 * 24 + 2 * 24 * 6 + 24 * 6) + 4 * 24 * 2.5),
        ({"gate": "output:query:shared-layer", "bias": True}, 0, 2 * (4 * 24 * 24 + 4 * 6 * 6)),
        ({"metric": "diagonal", "qk_norm": True}, 0, 2 * 4 * 24 * 24),
        ({"metric": "learned"}, 0, 2 * (4 * 24 * 24 + 2 * 4 * 6 * 6)),
        # Heads that share a matrix each use it; a gate of the input multiplies it once.
        ({"gate": "output:input:shared-layer"}, 0, 2 * (4 * 24 * 24 + 24 * 6)),
        ({"gate": "output:output:r2:w4:shared-layer:b1"}, 0, 2 * (4 * 24 * 24 + 4 * (4 * 2 + 2 * 6))),
        ({"gate": "dense:output"}, 0, 2 * (4 * 24 * 24 + 24 * 24)),
    ],
)
def test_operations_are_counted(options, num_keys, expected):
    assert GatedAttention(24, 4, **{"gate": "none", **options}).flops_per_token(num_keys) == expected


@every_layer
def test_an_empty_batch_gives_an_empty_result_and_gradients_of_zero(gate, options):
    layer, x = make(gate, **options), sample(0, 5, 24, requires_grad=True)
    y = layer(x)
    assert y.shape == (0, 5, 24)
    found = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    assert all((gradient == 0).all() for gradient in found)


@every_option
def test_an_empty_sequence_gives_an_empty_result(options):
    assert make("g1+bma", **options)(sample(2, 0, 24)).shape == (2, 0, 24)


def test_the_constructor_has_the_options_of_the_configuration():
    shown = {name: option.default for name, option in inspect.signature(GatedAttention).parameters.items()}
    declared = {option.name: option.default for option in fields(AttentionConfig)}
    declared |= {name: inspect.Parameter.empty for name, default in declared.items() if default is MISSING}
    assert shown == declared | {"device": None, "dtype": None}


@pytest.mark.parametrize("gate", ["bma", "value:query:head", "key:query", "output:value", "query:value", "g1+bma"])
def test_a_gate_that_needs_self_attention_refuses_a_context_and_offers_another(gate):
    rejected = next(g for g in Gates.parse(gate) if g.needs_self_attention)
    with rejects("gate", hint="Use a gate such as") as caught:
        make(gate, causal=False)(sample(2, 5, 24), context=sample(2, 7, 24))
    assert caught.value.got == str(rejected)


def test_under_autocast_an_input_may_have_another_dtype():
    layer = make("bma", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(sample(2, 5, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16


X, FREE = sample(2, 5, 24), {"causal": False}
REJECTED = [
    ({}, {"x": sample(5, 24)}, "x", ""),
    ({}, {"x": sample(2, 5, 23)}, "x", ""),
    (FREE, {"context": sample(2, 5, 23)}, "context", ""),
    (FREE, {"context": sample(3, 5, 24)}, "context", ""),
    ({}, {"context": sample(2, 7, 24)}, "context", "causal=False and window=None"),
    ({"causal": False, "window": 2}, {"context": sample(2, 7, 24)}, "context", "causal=False and window=None"),
    (FREE, {"context": sample(2, 7, 24), "cache": KVCache()}, "cache", ""),
    (FREE, {"documents": torch.zeros(2, 5, dtype=torch.int64), "cache": KVCache()}, "documents", "Use mask"),
    (FREE, {"documents": torch.tensor([0, 5]), "context": X}, "documents", "Use mask"),
    ({}, {"documents": torch.tensor([0, 5])}, "documents", "Boundaries describe a single packed row"),
    ({}, {"positions": torch.arange(4)}, "positions", ""),
    ({"rope": True}, {"positions": torch.zeros(3, 5)}, "positions", ""),
]


@pytest.mark.parametrize(("options", "given", "field", "hint"), REJECTED)
def test_an_input_that_does_not_fit_is_rejected_by_name(options, given, field, hint):
    with rejects(field, hint=hint):
        make("bma-query", **options)(**{"x": X} | given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_an_input_of_another_dtype_is_refused_by_name(dtype):
    layer = make("bma-query", causal=False)
    for given in ({"x": X.to(dtype)}, {"x": X, "context": X.to(dtype)}):
        with pytest.raises(TypeError, match=rf"^{list(given)[-1]} must be"):
            layer(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", np.zeros((2, 5, 24))),
        ("mask", np.ones((5, 5), bool)),
        ("positions", np.arange(5)),
        ("documents", [[0] * 5] * 2),
        ("cache", [KVCache()]),
        ("cache", {}),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be"):
        make("bma", rope=True)(**{"x": X, name: value})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_is_refused_with_what_to_use_instead():
    with pytest.raises(RuntimeError, match=r"torch\.export"):
        torch.jit.trace(make("bma"), X)
