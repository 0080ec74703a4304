import pytest
import torch
from closeness import assert_close
from errors import rejects
from safetensors.torch import load, save

from tidegate.torch import GatedAttention
from tidegate.torch.convert import (
    from_fused_query_gate,
    from_gpt_oss,
    from_stacked_qkv,
    to_fused_query_gate,
    to_gpt_oss,
)

M, H, G, D = 6, 4, 2, 3
NORMS = ("q_norm.weight", "k_norm.weight")


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def fused_state(*, bias=False, dtype=torch.float64):
    """Return a checkpoint with each head's query rows before its gate rows."""
    torch.manual_seed(0)
    shapes = {"q_proj": (2 * H * D, M), "k_proj": (G * D, M), "v_proj": (G * D, M), "o_proj": (M, H * D)}
    state = {f"{name}.weight": normal(*shape, dtype=dtype) for name, shape in shapes.items()}
    state |= {name: 0.1 * normal(D, dtype=dtype) for name in NORMS}
    if bias:
        state |= {f"{name}.bias": normal(shape[0], dtype=dtype) for name, shape in shapes.items()}
    return state


def g1_layer(*, bias=False, **options):
    torch.manual_seed(0)
    gate = "output:input:b0" if bias else "g1"
    sizes = {"num_kv_heads": G, "head_dim": D, "dtype": torch.float64}
    return GatedAttention(M, H, gate=gate, bias=bias, **{**sizes, "qk_norm": True, **options})


def stacked_state(*biases, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = {"qkv.weight": (3 * H * D, M), "out.weight": (M, H * D), "W_g": (H, D, D)}
    shapes |= {name: {"qkv.bias": (3 * H * D,), "out.bias": (M,)}[name] for name in biases}
    return {name: normal(*shape, dtype=dtype) for name, shape in shapes.items()}


def stacked_attention(state, x, *, index):
    """Compute the causal attention of such a checkpoint with an explicit score matrix."""
    qkv = x @ state["qkv.weight"].t() + state.get("qkv.bias", 0)
    q, k, v = qkv.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
    gate = torch.sigmoid(torch.einsum("bhtd,hde->bhte", q, state["W_g"]))
    scores = q @ k.mT / D**0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
    heads = weights @ (gate * v) if index == "source" else gate * (weights @ v)
    return heads.transpose(1, 2).flatten(-2) @ state["out.weight"].t() + state.get("out.bias", 0)


def assert_same_bits(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_checkpoint_is_a_whole_state_of_the_layer(bias):
    layer, state = g1_layer(bias=bias), fused_state(bias=bias)
    layer.load_state_dict(from_fused_query_gate(state))
    x_BTM = normal(2, 5, M)
    both = torch.nn.functional.linear(x_BTM, state["q_proj.weight"], state.get("q_proj.bias"))
    query_BTHD, gate_BTHD = both.unflatten(-1, (H, 2 * D)).split(D, dim=-1)
    _, trace = layer.trace(x_BTM)
    assert_close(layer.q_proj(x_BTM), query_BTHD.flatten(-2))
    assert_close(trace.gates["output"], gate_BTHD.sigmoid())
    assert_close(layer.k_norm.weight, 1 + state["k_norm.weight"])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back_gives_the_same_bits_but_for_the_norms(bias, dtype):
    state = fused_state(bias=bias, dtype=dtype)
    again = to_fused_query_gate(from_fused_query_gate(state))
    rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for name in NORMS:
        assert again[name].dtype == dtype
        assert torch.all((again[name] - state[name]).abs() <= rounding)
    assert_same_bits({**again, **{name: state[name] for name in NORMS}}, state)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_with_norms_near_1_comes_back_bit_by_bit(bias):
    state = g1_layer(bias=bias).state_dict()
    for name in NORMS:
        state[name] = torch.empty(D, dtype=torch.float64).uniform_(0.5, 2)
    assert_same_bits(from_fused_query_gate(to_fused_query_gate(state)), state)


def test_half_precision_norms_keep_what_they_add_to_1():
    state = fused_state(dtype=torch.bfloat16) | {name: torch.full((D,), 0.001, dtype=torch.bfloat16) for name in NORMS}
    norm = from_fused_query_gate(state)["q_norm.weight"]
    assert norm.dtype == torch.float32
    assert_close(norm - 1, state["q_norm.weight"].float())
    assert torch.all(norm.bfloat16() == 1)


@pytest.mark.parametrize(("gate", "index"), [("bma", "source"), ("bma-query", "query")])
@pytest.mark.parametrize("biases", [(), ("qkv.bias",), ("out.bias",), ("qkv.bias", "out.bias")], ids=str)
def test_a_stacked_checkpoint_computes_the_same_in_the_layer(gate, index, biases):
    state = stacked_state(*biases)
    layer = GatedAttention(M, H, head_dim=D, gate=gate, bias=bool(biases), dtype=torch.float64)
    layer.load_state_dict(from_stacked_qkv(state, gate=gate))
    x = normal(2, 7, M).requires_grad_()
    own, plain = layer(x), stacked_attention(state, x, index=index)
    assert_close(own, plain)
    (own_gradient,) = torch.autograd.grad(own.square().sum(), x)
    (plain_gradient,) = torch.autograd.grad(plain.square().sum(), x)
    assert_close(own_gradient, plain_gradient, what="gradient")


def sink_layer():
    layer = GatedAttention(M, H, head_dim=D, num_kv_heads=G, gate="sink", bias=True, dtype=torch.float64)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        parameter.data = normal(*parameter.shape)
    return layer


def test_sinks_there_and_back_are_the_same_bits():
    state = dict(sink_layer().state_dict())
    peer = to_gpt_oss(state)
    assert torch.equal(peer["sinks"], -state["attn_gate.partition.bias"][:, 0])
    assert_same_bits(from_gpt_oss(peer), state)


CONVERSIONS = {
    "from fused": (from_fused_query_gate, lambda: fused_state(bias=True)),
    "to fused": (to_fused_query_gate, lambda: dict(g1_layer(bias=True).state_dict())),
    "from sinks": (from_gpt_oss, lambda: to_gpt_oss(sink_layer().state_dict())),
    "to sinks": (to_gpt_oss, lambda: dict(sink_layer().state_dict())),
    "from stacked": (from_stacked_qkv, lambda: stacked_state("out.bias")),
}
conversions = pytest.mark.parametrize(("convert", "state_of"), CONVERSIONS.values(), ids=CONVERSIONS)


@conversions
def test_a_converted_state_shares_no_memory_with_the_checkpoint_and_can_be_saved(convert, state_of):
    state, untouched = state_of(), state_of()
    converted = convert(state)
    assert_same_bits(load(save(converted)), converted)
    for tensor in converted.values():
        tensor.fill_(torch.nan)
    assert_same_bits(state, untouched)


@conversions
def test_every_tensor_that_is_missing_or_that_nobody_asked_for_is_named(convert, state_of):
    for name in state_of():
        if name in ("out.bias", "qkv.bias"):
            continue
        state = state_of()
        del state[name]
        with rejects("state", hint=f"Missing: {name}; unexpected: none. Give one layer's tensors"):
            convert(state)
    state = state_of() | {"metric.weight": normal(H, D), "a.b": normal(1)}
    with rejects("state", hint="Missing: none; unexpected: a.b, metric.weight."):
        convert(state)


@conversions
@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t[..., :0], lambda t: t[0], lambda t: t[None]])
def test_every_wrong_shape_is_refused_by_name(convert, state_of, change):
    for name in state_of():
        state = state_of()
        state[name] = change(state[name])
        with rejects("state", hint=name) as caught:
            convert(state)
        assert " must have shape (" in caught.value.hint


def test_a_stacked_checkpoint_becomes_no_other_gate():
    with rejects("gate") as caught:
        from_stacked_qkv(stacked_state(), gate="g1")
    assert caught.value.got == "g1"
