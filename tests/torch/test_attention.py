import copy
import inspect
from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch
from closeness import assert_close
from covers import every_layer
from errors import rejects
from torch import nn
from torch_layers import OPTIONS, every_option, every_spelling, exactly, make, sample, ungated

from tidegate import Gate, Gates, InputError
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


def test_a_state_dict_brings_a_layer_back():
    layer, other, x = make("g1+bma", **EVERYTHING), make("g1+bma", seed=1, **EVERYTHING), sample(2, 5, 24)
    assert not torch.equal(other(x), layer(x))
    result = other.load_state_dict(layer.state_dict(), strict=True)
    assert result.missing_keys == result.unexpected_keys == []
    assert torch.equal(other(x), layer(x))


@every_spelling
def test_a_copy_computes_the_same_with_memory_of_its_own(gate):
    layer, x = make(gate, **OPTIONS["everything"]), sample(2, 5, 24)
    twin, y = copy.deepcopy(layer), layer(x)
    assert torch.equal(twin(x), y)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(layer(x), y)


@pytest.mark.parametrize("gate", ["bma", Gate(), Gates.parse("g1+g2"), ["g1", Gate(site="value")]])
def test_a_gate_is_given_in_any_way_that_the_vocabulary_reads(gate):
    assert GatedAttention(24, 4, gate=gate).gates == Gates.parse(gate)


def test_bma_is_the_default_and_none_is_plain():
    assert GatedAttention(24, 4).gates == Gates.parse("bma")
    assert GatedAttention(24, 4, gate=None).gates == GatedAttention(24, 4, gate="none").gates == Gates()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4 * 24 * 24),
        ({"gate": "bma"}, 4 * 24 * 24 + 4 * 6 * 6),
        ({"gate": "bma", "num_kv_heads": 2}, 2 * 24 * 24 + 2 * 24 * 12 + 4 * 6 * 6),
        ({"gate": "g1"}, 5 * 24 * 24),
        ({"head_dim": 5, "bias": True}, 4 * 24 * 20 + 3 * 20 + 24),
        ({"qk_norm": True, "metric": "learned"}, 4 * 24 * 24 + 2 * 6 + 4 * 6 * 6),
        ({"gate": "output:query:r2:b1+g5"}, 4 * 24 * 24 + 4 * (6 * 2 + 2 * 6 + 6) + 24 * 24),
    ],
)
def test_parameters_are_counted(options, expected):
    layer = GatedAttention(24, 4, **{"gate": "none", **options})
    assert layer.num_parameters() == expected
    sizes = {"num_kv_heads": options.get("num_kv_heads"), "head_dim": options.get("head_dim")}
    gates = layer.gates.num_parameters(d_model=24, num_heads=4, **sizes)
    assert expected - ungated(layer).num_parameters() == gates


@pytest.mark.parametrize(
    ("options", "num_keys", "expected"),
    [
        # Two for each weight, and a product with each key and each value: 2 · 2 · 24 channels.
        ({}, 0, 2 * 4 * 24 * 24),
        ({}, 10, 2 * 4 * 24 * 24 + 4 * 24 * 10),
        ({"gate": "bma"}, 10, 2 * (4 * 24 * 24 + 4 * 6 * 6) + 4 * 24 * 10),
        ({"gate": "bma", "num_kv_heads": 1}, 2.5, 2 * (2 * 24 * 24 + 2 * 24 * 6 + 24 * 6) + 4 * 24 * 2.5),
        ({"gate": "output:query:shared-layer", "bias": True}, 0, 2 * (4 * 24 * 24 + 4 * 6 * 6)),
        ({"metric": "diagonal", "qk_norm": True}, 0, 2 * 4 * 24 * 24),
        ({"metric": "learned"}, 0, 2 * (4 * 24 * 24 + 2 * 4 * 6 * 6)),
    ],
)
def test_operations_are_counted(options, num_keys, expected):
    assert GatedAttention(24, 4, **{"gate": "none", **options}).flops_per_token(num_keys) == expected


def test_a_layer_shows_its_sizes_and_options():
    layer = GatedAttention(24, 4, gate="g1+bma", num_kv_heads=2, window=3, dropout=0.1)
    sizes = "d_model=24, num_heads=4, num_kv_heads=2, head_dim=6"
    options = "causal=True, window=3, dropout=0.1, rotary=None, temperature=1.0, recompute_gate=False"
    assert layer.extra_repr() == f"{sizes}, gate=bma+g1, {options}"
    assert "(attn_gate): AttentionGates(\n    (value): AttentionGate(bma)" in repr(layer)


def test_dropout_is_for_training_alone():
    torch.manual_seed(0)
    layer, x = make("g1+bma"), sample(2, 5, 24)
    expected = layer(x)
    layer.dropout = 0.5
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), expected)


def test_dropout_is_right_on_average():
    torch.manual_seed(0)
    layer, x = make("bma", d_model=8, num_heads=2, dropout=0.25), sample(1, 3, 8).expand(40_000, -1, -1)
    with torch.no_grad():
        noisy = layer(x)
        exact = layer.eval()(x[:1])
    deviation = noisy.std(dim=0) / 200
    assert ((noisy.mean(dim=0) - exact[0]).abs() < 6 * deviation + 1e-12).all()


@every_layer
def test_one_position_is_no_special_case(gate, options):
    layer, x = make(gate, **options), sample(2, 5, 24)
    assert_close(layer(x[:, :1]), layer.arrays()(x)[:, :1] if layer.causal else layer.arrays()(x[:, :1]))


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


def test_a_layer_starts_anew_in_every_part():
    torch.manual_seed(0)
    layer = GatedAttention(24, 4, gate="g1+bma", **EVERYTHING)
    before = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    torch.manual_seed(0)
    layer.reset_parameters()
    assert list(before) == NAMES
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_the_constructor_has_the_options_of_the_configuration():
    shown = {name: option.default for name, option in inspect.signature(GatedAttention).parameters.items()}
    declared = {option.name: option.default for option in fields(AttentionConfig)}
    declared |= {name: inspect.Parameter.empty for name, default in declared.items() if default is MISSING}
    assert shown == declared | {"device": None, "dtype": None}


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        GatedAttention(24, 4, casual=True)
    with pytest.raises(TypeError, match="positional argument"):
        GatedAttention(24, 4, "bma")


@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 23), (1, 2, 5, 24)])
def test_an_input_of_another_shape_is_refused(shape):
    with rejects("x"):
        make("bma")(sample(*shape))
    with rejects("context"):
        make("g1", causal=False)(sample(2, 5, 24), context=sample(*shape))


def test_a_context_of_another_batch_is_refused():
    with rejects("context"):
        make("g1", causal=False)(sample(2, 5, 24), context=sample(3, 5, 24))


@pytest.mark.parametrize("gate", ["bma", "value:query:head", "key:query", "output:value", "query:value", "g1+bma"])
def test_a_gate_that_needs_self_attention_refuses_a_context_and_offers_another(gate):
    rejected = next(g for g in Gates.parse(gate) if g.needs_self_attention)
    with pytest.raises(InputError, match=f"^gate must be .*, got '{rejected}'.*Use a gate such as 'bma-query' or 'g1'"):
        make(gate, causal=False)(sample(2, 5, 24), context=sample(2, 7, 24))


@pytest.mark.parametrize("options", [{}, {"causal": False, "window": 2}, {"window": 2}])
def test_a_layer_that_compares_positions_refuses_a_context(options):
    with rejects("context", hint="causal=False and window=None"):
        make("bma-query", **options)(sample(2, 5, 24), context=sample(2, 7, 24))


def test_a_context_needs_no_cache():
    with rejects("cache"):
        make("g1", causal=False)(sample(2, 5, 24), context=sample(2, 7, 24), cache=KVCache())


@pytest.mark.parametrize("given", [{"cache": KVCache()}, {"context": sample(1, 7, 24)}], ids=["cache", "context"])
def test_documents_are_for_whole_rows(given):
    with rejects("documents", hint="Use mask"):
        make("g1", causal=False)(sample(1, 5, 24), documents=torch.tensor([0, 5]), **given)


def test_the_input_as_its_own_context_is_self_attention():
    layer, x = make("g1+g2", causal=False, rope=True), sample(2, 5, 24)
    assert_close(layer(x, context=x), layer(x))


def test_a_layer_is_a_module_like_any_other():
    layer = make("g1+bma", bias=True)
    model = nn.Sequential(nn.LayerNorm(24, dtype=torch.float64), layer)
    assert model(sample(2, 5, 24)).shape == (2, 5, 24)
    assert len(list(layer.buffers())) == 0
    assert layer.to(torch.float32)(sample(2, 5, 24, dtype=torch.float32)).dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"rope": True}], ids=["plain", "rotary"])
def test_positions_of_another_shape_are_refused_also_where_nothing_turns(options):
    with rejects("positions"):
        make("bma", **options)(sample(2, 5, 24), positions=torch.arange(4))


@pytest.mark.parametrize("name", ["causal", "bias", "qk_norm", "recompute_gate"])
def test_a_string_is_no_boolean(name):
    with rejects(name):
        GatedAttention(24, 4, **{name: "no"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_an_input_of_another_dtype_is_refused_by_name(dtype):
    layer, x = make("bma-query", causal=False), sample(2, 5, 24)
    instead = dtype if dtype.is_floating_point else torch.float32
    words = (
        f"must be torch.float64, like the weights; got {dtype}. Convert it with {{}}.to(torch.float64), or the module "
    )
    words += f"with .to({instead})."
    with pytest.raises(TypeError, match=exactly(f"x {words.format('x')}")):
        layer(x.to(dtype))
    with pytest.raises(TypeError, match=exactly(f"context {words.format('context')}")):
        layer(x, context=x.to(dtype))


def test_under_autocast_an_input_may_have_another_dtype():
    layer = make("bma", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(sample(2, 5, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_an_error_of_a_projection_itself_is_left_as_it_is():
    layer = make("bma")

    def fail(*_call):
        raise RuntimeError("out of order")

    layer.k_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=exactly("out of order")):
        layer(sample(2, 5, 24))


ARRAYS = {
    "x": np.zeros((2, 5, 24)),
    "mask": np.ones((5, 5), bool),
    "positions": np.arange(5),
    "documents": [[0] * 5] * 2,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_what_is_no_tensor_is_refused_with_what_makes_one(name):
    given = ARRAYS[name]
    message = f"{name} must be a tensor, got {type(given).__name__}. Use torch.as_tensor({name})."
    with pytest.raises(TypeError, match=exactly(message)):
        make("bma", rope=True)(**{"x": sample(2, 5, 24), name: given})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("gate", ["none", "bma"])
def test_tracing_is_refused_with_what_to_use_instead(gate):
    message = (
        "torch.jit.trace would fix the length, mask and cache of this one call for all others, and give wrong "
        "numbers there. Use torch.export.export or torch.compile."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        torch.jit.trace(make(gate), sample(2, 5, 24))
