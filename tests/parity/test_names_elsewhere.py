"""Gates of other projects equal ours, spelled as docs/names-elsewhere.md has them: output and gradient of whole layers.

In float32, since several of them have softmax and norms in float32 whatever the input's dtype.
"""

import re
from pathlib import Path

import pytest
import torch
from closeness import assert_close

from tidegate import Gates
from tidegate.torch import GatedAttention
from tidegate.torch.convert import from_fused_query_gate, from_gpt_oss

PAGE = Path(__file__).parents[2] / "docs" / "names-elsewhere.md"
D_MODEL, HEADS, HEAD_DIM = 24, 4, 6
SIZES = {
    "hidden_size": D_MODEL,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "attn_implementation": "eager",
}


def randomise(module):
    """Give every parameter numbers that differ from head to head; what starts at 0 or 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


def by_head(weight, width=HEAD_DIM):
    """A projection of all heads, (heads · width, read), as our gates have it: (heads, read, width)."""
    return weight.unflatten(0, (-1, width)).transpose(1, 2)


def split(state, names):
    return {ours: state[theirs] for ours, theirs in names.items() if theirs in state}


PROJECTIONS = {f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkvo"}
NORMS = {f"{name}_norm.weight": f"{name}_norm.weight" for name in "qk"}


def without_positions(attention, **options):
    """Their attention as a function of the input: causal, with rotations by 0."""

    def call(x):
        cos, sin = torch.ones(1, x.shape[1], HEAD_DIM), torch.zeros(1, x.shape[1], HEAD_DIM)
        ahead = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        return attention(x, position_embeddings=(cos, sin), attention_mask=ahead[None, None], **options)[0]

    return call


def afmoe():
    from transformers.models.afmoe.modeling_afmoe import AfmoeAttention, AfmoeConfig

    theirs = randomise(AfmoeAttention(AfmoeConfig(**SIZES), 0))
    state = theirs.state_dict()
    gate = {"attn_gate.output.weight": by_head(state["gate_proj.weight"])}
    return without_positions(theirs), split(state, PROJECTIONS | NORMS) | gate


def qwen3_next():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextConfig

    theirs = randomise(Qwen3NextAttention(Qwen3NextConfig(**SIZES, partial_rotary_factor=1.0), 0))
    return without_positions(theirs), from_fused_query_gate(theirs.state_dict())


def qwen3_5():
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5TextConfig

    theirs = randomise(Qwen3_5Attention(Qwen3_5TextConfig(**SIZES), 0))
    return without_positions(theirs), from_fused_query_gate(theirs.state_dict())


def step3p7():
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Attention, Step3p7TextConfig

    config = Step3p7TextConfig(**SIZES, query_pre_attn_scalar=HEAD_DIM)
    theirs = randomise(Step3p7Attention(config, 0))
    state = theirs.state_dict()
    # Their norm adds 1 to its weight.
    norms = {name: 1 + weight for name, weight in split(state, NORMS).items()}
    gate = {"attn_gate.output.weight": by_head(state["g_proj.weight"], 1)}
    return without_positions(theirs), split(state, PROJECTIONS) | norms | gate


def laguna(gating):
    from transformers.models.laguna.modeling_laguna import LagunaAttention, LagunaConfig

    theirs = randomise(LagunaAttention(LagunaConfig(**SIZES, gating=gating), 0, HEADS))
    state = theirs.state_dict()
    gate = {"attn_gate.output.weight": by_head(state["g_proj.weight"], 1 if gating == "per-head" else HEAD_DIM)}
    return without_positions(theirs), split(state, PROJECTIONS | NORMS) | gate


def gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssConfig

    theirs = randomise(GptOssAttention(GptOssConfig(**SIZES), 0))

    def call(x):
        half = HEAD_DIM // 2
        cos, sin = torch.ones(1, x.shape[1], half), torch.zeros(1, x.shape[1], half)
        ahead = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        return theirs(x, position_embeddings=(cos, sin), attention_mask=ahead[None, None])[0]

    return call, from_gpt_oss(theirs.state_dict())


def x_transformers(gate_of, **options):
    from x_transformers.x_transformers import Attention

    theirs = randomise(Attention(D_MODEL, heads=HEADS, dim_head=HEAD_DIM, causal=True, **options))
    state = theirs.state_dict()
    names = {f"{name}_proj.weight": f"to_{name}.weight" for name in "qkv"} | {"o_proj.weight": "to_out.weight"}
    return theirs, split(state, names) | gate_of(state)


def timm():
    try:
        from timm.layers.attention import Attention
    except (ImportError, RuntimeError) as problem:
        pytest.skip(f"timm cannot be imported: {problem}")
    theirs = randomise(Attention(D_MODEL, num_heads=HEADS, gated=True))
    state = theirs.state_dict()
    stacked = dict(zip(("q_proj", "k_proj", "v_proj"), state["qkv.weight"].chunk(3), strict=True))
    gate = {"attn_gate.output.weight": by_head(state["gate.weight"])}
    outer = {"o_proj.weight": state["proj.weight"], "o_proj.bias": state["proj.bias"]}
    return theirs, {f"{name}.weight": weight for name, weight in stacked.items()} | outer | gate


def value_gate(state):
    return {"attn_gate.output.weight": by_head(state["to_v_gate.weight"])}


def low_rank(state):
    return {
        "attn_gate.output.weight_down": state["to_v_gate.down.weight"].T.expand(HEADS, -1, -1),
        "attn_gate.output.weight_up": by_head(state["to_v_gate.up.weight"]),
    }


ROWS = {
    "Qwen3-Next": (qwen3_next, "g1", {"qk_norm": True}),
    "Qwen3.5": (qwen3_5, "g1", {"qk_norm": True}),
    "AFMoE": (afmoe, "g1", {"qk_norm": True}),
    "Step-3.7": (step3p7, "g1-head", {"qk_norm": True}),
    "Laguna per head": (lambda: laguna("per-head"), "output:input:head:softplus", {"qk_norm": True}),
    "Laguna per element": (lambda: laguna("per-element"), "output:input:softplus", {"qk_norm": True}),
    "GPT-OSS": (gpt_oss, "sink", {"bias": True}),
    "x-transformers gate_values": (lambda: x_transformers(value_gate, gate_values=True), "g1", {}),
    "x-transformers swiglu_values": (
        lambda: x_transformers(value_gate, gate_values=True, swiglu_values=True),
        "output:input:silu",
        {},
    ),
    "x-transformers gate_values_headwise": (
        lambda: x_transformers(
            lambda state: {"attn_gate.output.weight": by_head(state["to_v_gate.weight"], 1)},
            gate_values=True,
            gate_values_headwise=True,
        ),
        "g1-head",
        {},
    ),
    "x-transformers gate_values_rank": (
        lambda: x_transformers(low_rank, gate_values=True, gate_values_rank=3, low_rank_silu_gates=False),
        "output:input:r3",
        {},
    ),
    "x-transformers gate_value_heads": (
        lambda: x_transformers(
            lambda state: {
                "attn_gate.output.weight": by_head(state["to_v_head_gate.weight"], 1),
                "attn_gate.output.bias": state["to_v_head_gate.bias"][:, None],
            },
            gate_value_heads=True,
        ),
        "output:input:head:b10:s0",
        {},
    ),
    "x-transformers head_scale": (
        lambda: x_transformers(
            lambda state: {"attn_gate.output.bias": state["head_scale_params"].reshape(HEADS, 1)}, head_scale=True
        ),
        "output:nothing:head:identity:b1",
        {},
    ),
    "x-transformers on_attn": (
        lambda: x_transformers(
            lambda state: {
                "o_proj.weight": state["to_out.0.weight"][:D_MODEL],
                "attn_gate.dense.weight": state["to_out.0.weight"][D_MODEL:].T[None],
            },
            on_attn=True,
        ),
        "dense:output",
        {},
    ),
    "x-transformers head_learned_sink": (
        lambda: x_transformers(
            lambda state: {
                "attn_gate.partition.bias": -next(v for k, v in state.items() if "sink" in k).reshape(HEADS, 1)
            },
            head_learned_sink=True,
        ),
        "sink",
        {},
    ),
    "timm": (timm, "g1", {"causal": False, "bias": True}),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_gate_of_another_project_is_ours(name):
    build, gate, options = ROWS[name]
    theirs, state = build()
    ours = GatedAttention(D_MODEL, HEADS, gate=gate, head_dim=HEAD_DIM, **options)
    biases = {key: torch.zeros_like(value) for key, value in ours.state_dict().items() if key.endswith("_proj.bias")}
    ours.load_state_dict(biases | state)
    x = torch.randn(2, 7, D_MODEL, generator=torch.Generator().manual_seed(1))
    (y, dx), (z, dz) = (_output_and_gradient(layer, x) for layer in (ours, theirs))
    assert_close(y, z)
    assert_close(dx, dz, what="gradient")


def _output_and_gradient(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    y = y if isinstance(y, torch.Tensor) else y[0]
    return y.detach().numpy(), torch.autograd.grad(y.square().sum(), x)[0].numpy()


def spellings(text):
    """The spellings in the last column of the page's tables."""
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return {spelled for row in rows for spelled in re.findall(r"`([^`]+)`", row.rstrip("| ").rpartition("|")[2])}


def test_every_spelling_of_the_page_is_a_gate():
    found = spellings(PAGE.read_text(encoding="utf-8"))
    assert found
    for spelled in found:
        Gates.parse(spelled)


def test_the_page_names_every_gate_that_is_tested_here():
    assert {gate for _, gate, _ in ROWS.values()} <= spellings(PAGE.read_text(encoding="utf-8"))


def test_a_wrong_spelling_is_seen():
    with pytest.raises(ValueError, match="nonsense"):
        Gates.parse(next(iter(spellings("| a | b | `output:nonsense` |"))))


def test_a_layer_with_another_gate_is_told_apart():
    theirs, state = afmoe()
    ours = GatedAttention(D_MODEL, HEADS, gate="output:input:softplus", head_dim=HEAD_DIM, qk_norm=True)
    ours.load_state_dict(state)
    x = torch.randn(1, 5, D_MODEL, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError):
        assert_close(ours(x).detach().numpy(), theirs(x).detach().numpy())
