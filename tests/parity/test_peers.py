"""Our layer against attention that others wrote, with the same weights: outputs and gradients of the input."""

from types import SimpleNamespace

import pytest
import torch
from closeness import assert_close
from errors import rejects
from transformers import GPT2Config, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from tidegate.tensors.rotary import Rotary
from tidegate.torch import GatedAttention
from tidegate.torch.convert import from_fused_query_gate, from_gpt_oss, gpt_oss_layer, to_fused_query_gate, to_gpt_oss

WIDTH, BATCH, BASE = 24, 2, 500.0
GROUPED = {"hidden_size": WIDTH, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
OWN_GROUPED = {"d_model": WIDTH, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": BASE}

# An eager peer builds the score matrix itself, but takes its softmax in float32.
ROUTES = {"float32-eager": (torch.float32, "eager"), "float64-sdpa": (torch.float64, "sdpa")}
routes = pytest.mark.parametrize(("dtype", "route"), ROUTES.values(), ids=ROUTES)
lengths = pytest.mark.parametrize("length", [1, 63, 100])
biases = pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])


def drawn(module, dtype=torch.float32):
    """The module with every parameter drawn again, also those that would start at 0 or 1."""
    torch.manual_seed(0)
    module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def sequence(length, dtype=torch.float32, *, seed=1):
    torch.manual_seed(seed)
    return torch.randn(BATCH, length, WIDTH, dtype=dtype)


def causal_allowed(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def causal_mask(length, dtype, route):
    """As transformers gives it to its attention: added to the scores, or left to the fused kernel."""
    if route == "sdpa":
        return None
    return torch.zeros(1, 1, length, length, dtype=dtype).masked_fill(~causal_allowed(length), float("-inf"))


def cosines_and_sines(rotary, length, dtype):
    """By the peer's own module, which works in float32 alone; in float64 by the formula, for the whole head."""
    if dtype == torch.float32:
        return rotary(torch.empty(0, dtype=dtype), torch.arange(length)[None])
    frequencies = BASE ** (-torch.arange(0, 8, 2, dtype=dtype) / 8)
    angles = torch.arange(length, dtype=dtype)[:, None] * frequencies.repeat(2)
    return angles.cos()[None], angles.sin()[None]


def causal_call(peer, rotary, length, dtype=torch.float32, route="eager"):
    """A transformers attention with rotary embedding as a function of its input alone."""
    embedding, mask = cosines_and_sines(rotary, length, dtype), causal_mask(length, dtype, route)
    return lambda x: peer(x, embedding, mask)[0]


def assert_agree(own, peer, *inputs):
    """Equal outputs, and equal gradients of every input under one random cotangent."""
    results = []
    for function in (own, peer):
        given = [x.clone().requires_grad_() for x in inputs]
        y = function(*given)
        torch.manual_seed(2)
        results.append((y, torch.autograd.grad(y, given, torch.randn(y.shape, dtype=y.dtype))))
    (own_y, own_gradients), (peer_y, peer_gradients) = results
    assert own_y.dtype == peer_y.dtype == inputs[0].dtype
    assert_close(own_y, peer_y, what="forward")
    for own_gradient, peer_gradient in zip(own_gradients, peer_gradients, strict=True):
        assert_close(own_gradient, peer_gradient, what="gradient")


def qwen3_next(*, bias=False):
    """The peer, whose norms are float32 whatever the dtype, and its rotary module, for half of each head."""
    rope = {**ROPE, "partial_rotary_factor": 0.5}
    config = Qwen3NextConfig(**GROUPED, attention_bias=bias, rope_parameters=rope, attn_implementation="eager")
    return drawn(Qwen3NextAttention(config, layer_idx=3)), Qwen3NextRotaryEmbedding(config)


def own_g1(*, bias=False, base=BASE):
    gate = "output:input:b0" if bias else "g1"
    return GatedAttention(**OWN_GROUPED, gate=gate, bias=bias, qk_norm=True, rope=Rotary(base=base, fraction=0.5))


@lengths
@biases
def test_g1_is_the_gated_attention_of_qwen3_next(length, bias):
    (peer, rotary), own = qwen3_next(bias=bias), own_g1(bias=bias)
    own.load_state_dict(from_fused_query_gate(peer.state_dict()))
    assert_agree(own, causal_call(peer, rotary, length), sequence(length))


def test_qwen3_next_takes_the_weights_of_g1():
    (peer, rotary), own = qwen3_next(), drawn(own_g1())
    peer.load_state_dict(to_fused_query_gate(own.state_dict()))
    assert_agree(own, causal_call(peer, rotary, 63), sequence(63))


def test_the_comparison_notices_a_slightly_different_rotary_base():
    (peer, rotary), own = qwen3_next(), own_g1(base=1.01 * BASE)
    own.load_state_dict(from_fused_query_gate(peer.state_dict()))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_agree(own, causal_call(peer, rotary, 63), sequence(63))


YARN = {
    "rope_type": "yarn",
    "rope_theta": BASE,
    "factor": 4.0,
    "beta_fast": 3.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 40,
}
SCALINGS = {"default": ROPE, "yarn": YARN, "yarn between pairs": {**YARN, "truncate": False}}
scalings = pytest.mark.parametrize("rope", SCALINGS.values(), ids=SCALINGS)


def gpt_oss(rope, layer, *, bias=True):
    """The peer, whose even layers have a window, and its rotary module."""
    options = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    config = GptOssConfig(
        **GROUPED, **options, attention_bias=bias, rope_parameters=dict(rope), attn_implementation="eager"
    )
    return drawn(GptOssAttention(config, layer_idx=layer)), GptOssRotaryEmbedding(config), config


def windowed_call(peer, rotary, length):
    allowed = causal_allowed(length)
    if peer.sliding_window is not None:
        allowed &= ~allowed.tril(-peer.sliding_window)
    mask = torch.zeros(1, 1, length, length).masked_fill(~allowed, float("-inf"))
    embedding = rotary(torch.empty(0), torch.arange(length)[None])
    return lambda x: peer(x, embedding, mask)[0]


@scalings
@lengths
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
def test_a_sink_is_the_attention_of_gpt_oss(rope, length, layer):
    peer, rotary, config = gpt_oss(rope, layer)
    own = GatedAttention.from_config(gpt_oss_layer(config, layer))
    own.load_state_dict(from_gpt_oss(peer.state_dict()))
    assert_agree(own, windowed_call(peer, rotary, length), sequence(length))


def test_the_gradients_of_the_sinks_are_those_of_gpt_oss():
    peer, rotary, config = gpt_oss(YARN, 1, bias=False)
    own = GatedAttention.from_config(gpt_oss_layer(config, 1))
    own.load_state_dict(from_gpt_oss(peer.state_dict()))
    x = sequence(63)
    (theirs,) = torch.autograd.grad(windowed_call(peer, rotary, 63)(x).square().sum(), peer.sinks)
    bias = own.attn_gate.get_parameter("partition.bias")
    (ours,) = torch.autograd.grad(own(x).square().sum(), bias)
    assert_close(-ours[:, 0], theirs, what="gradient")


def test_gpt_oss_takes_the_weights_of_a_sink():
    peer, rotary, config = gpt_oss(ROPE, 1)
    own = drawn(GatedAttention.from_config(gpt_oss_layer(config, 1)))
    peer.load_state_dict(to_gpt_oss(own.state_dict()))
    assert_agree(own, windowed_call(peer, rotary, 63), sequence(63))


@pytest.mark.parametrize("changes", [{"rope_type": "llama3"}, {"mscale": 1.0}, {"factor": None}], ids=str)
def test_a_scaling_that_is_not_read_is_rejected(changes):
    config = SimpleNamespace(head_dim=8, rope_parameters=YARN | changes)
    with rejects("rope_parameters"):
        gpt_oss_layer(config, 0)


@routes
@lengths
@biases
def test_none_is_the_grouped_rotary_attention_of_llama(length, dtype, route, bias):
    config = LlamaConfig(**GROUPED, attention_bias=bias, rope_parameters=ROPE, attn_implementation=route)
    peer = drawn(LlamaAttention(config, layer_idx=0), dtype)
    own = GatedAttention(**OWN_GROUPED, gate="none", bias=bias, rope=Rotary(base=BASE), dtype=dtype)
    own.load_state_dict(peer.state_dict())
    call = causal_call(peer, LlamaRotaryEmbedding(config), length, dtype, route)
    assert_agree(own, call, sequence(length, dtype))


@lengths
def test_none_with_query_and_key_norm_is_the_attention_of_qwen3(length):
    config = Qwen3Config(**GROUPED, rope_parameters=ROPE, attn_implementation="eager")
    peer = drawn(Qwen3Attention(config, layer_idx=0))
    own = GatedAttention(**OWN_GROUPED, gate="none", qk_norm=True, rope=Rotary(base=BASE))
    own.load_state_dict(peer.state_dict())
    assert_agree(own, causal_call(peer, Qwen3RotaryEmbedding(config), length), sequence(length))


@routes
@lengths
def test_none_with_biases_is_the_attention_of_gpt2(length, dtype, route):
    config = GPT2Config(n_embd=WIDTH, n_head=3, resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation=route)
    peer = drawn(GPT2Attention(config, layer_idx=0), dtype)
    own = GatedAttention(WIDTH, 3, gate="none", bias=True, dtype=dtype)
    weights = (*peer.c_attn.weight.t().chunk(3), peer.c_proj.weight.t())
    own.load_state_dict(projections(weights, (*peer.c_attn.bias.chunk(3), peer.c_proj.bias)))
    mask = causal_mask(length, dtype, route)
    assert_agree(own, lambda x: peer(x, attention_mask=mask)[0], sequence(length, dtype))


def projections(weights, biases):
    """Tensors in the order query, key, value, output under our names."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {
        f"{name}.{kind}": tensor
        for kind, tensors in (("weight", weights), ("bias", biases))
        for name, tensor in zip(names, tensors, strict=True)
    }


def torch_multihead(*, causal):
    """PyTorch's multi-head attention, and ours with its weights, in float64."""
    peer = drawn(torch.nn.MultiheadAttention(WIDTH, 3, batch_first=True), torch.float64)
    own = GatedAttention(WIDTH, 3, gate="none", bias=True, causal=causal, dtype=torch.float64)
    weights, biases = peer.in_proj_weight.chunk(3), peer.in_proj_bias.chunk(3)
    own.load_state_dict(projections((*weights, peer.out_proj.weight), (*biases, peer.out_proj.bias)))
    return own, peer


@lengths
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_none_is_torch_multihead_attention(length, causal, padded):
    own, peer = torch_multihead(causal=causal)
    real = torch.arange(length) < torch.tensor([[length], [length // 2 + 1]])
    own_mask = real[:, None, None, :] if padded else None
    # In the peer's masks True means "may not".
    padding, ahead = (~real if padded else None), (~causal_allowed(length) if causal else None)
    assert_agree(
        lambda x: own(x, mask=own_mask),
        lambda x: peer(x, x, x, key_padding_mask=padding, attn_mask=ahead)[0],
        sequence(length, torch.float64),
    )


@lengths
def test_none_across_two_sequences_is_torch_multihead_attention(length):
    own, peer = torch_multihead(causal=False)
    assert_agree(
        lambda x, context: own(x, context=context),
        lambda x, context: peer(x, context, context)[0],
        sequence(length, torch.float64),
        sequence(41, torch.float64, seed=3),
    )
