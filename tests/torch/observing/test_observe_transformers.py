"""Observations of tiny transformers models against the weights that their own eager attention returns."""

from functools import partial

import pytest
import torch
from closeness import assert_close
from observed import assert_curves, assert_moments, several_keys
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Qwen3Config,
    Qwen3Model,
)

from tidegate.torch.observing.sums import RunningRank
from tidegate.torch.observing.watcher import observe

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
BUILD = {
    "llama": (LlamaModel, partial(LlamaConfig, **GROUPED)),
    "qwen3": (Qwen3Model, partial(Qwen3Config, **GROUPED, head_dim=8)),
    "mistral": (MistralModel, partial(MistralConfig, **GROUPED, sliding_window=4)),
    "gpt2": (GPT2Model, partial(GPT2Config, vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "bert": (BertModel, partial(BertConfig, **SIZES, max_position_embeddings=64)),
}
NAMES = {
    "llama": "layers.0.self_attn",
    "qwen3": "layers.0.self_attn",
    "mistral": "layers.0.self_attn",
    "gpt2": "h.0.attn",
    "bert": "encoder.layer.0.attention.self",
}
TOKENS = torch.randint(50, (3, 10), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([10, 4, 7])
PADDINGS = {
    "none": None,
    "right": torch.arange(10) < LENGTHS[:, None],
    "left": torch.arange(10) >= 10 - LENGTHS[:, None],
}


@pytest.fixture(autouse=True)
def softmax_in_float64(monkeypatch):
    """Eager attention takes its softmax in float32, whatever the model's dtype."""
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: x.softmax(dim))


def twins(kind):
    """The same random model with fused and with eager attention, in float64, with large scores."""
    model_class, config = BUILD[kind]
    torch.manual_seed(0)
    fused = model_class(config(attn_implementation="sdpa")).double().eval()
    with torch.no_grad():
        for name, parameter in fused.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(6)
    eager = model_class(config(attn_implementation="eager")).double().eval()
    eager.load_state_dict(fused.state_dict())
    return fused, eager


def from_weights(weights, real, num_keys=1):
    first = real & (real.cumsum(-1) <= num_keys)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    mass = (weights * first[:, None, None]).sum(-1)
    return {"entropy": entropy, "effective_keys": entropy.exp(), "mass": mass}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", BUILD)
@torch.no_grad()
def test_equal_to_the_eager_weights(kind, padding):
    fused, eager = twins(kind)
    mask = PADDINGS[padding]
    options = {} if mask is None else {"attention_mask": mask.long()}
    unobserved = fused(TOKENS, **options).last_hidden_state
    with observe(fused, keys=2) as watcher:
        observed = fused(TOKENS, **options).last_hidden_state
    assert torch.equal(observed, unobserved)
    found = watcher.observation()
    result = eager(TOKENS, output_attentions=True, output_hidden_states=True, **options)
    real = torch.ones(3, 10, dtype=torch.bool) if mask is None else mask
    assert len(found.layers) == 2
    assert found.layers[0].name == NAMES[kind]
    for layer, weights in zip(found.layers, result.attentions, strict=True):
        expected = from_weights(weights, real, num_keys=2)
        for statistic, values in expected.items():
            assert_moments(layer, statistic, values, real[:, None] & several_keys(weights))
            assert_curves(layer, statistic, values, real[:, None].expand(values.shape))
    stream = RunningRank()
    stream.add(result.hidden_states[1][real])
    residual = found.layers[0].residual
    assert_close(residual.largest, stream.largest)
    assert_close(residual.effective_rank, stream.effective_rank(), what="finite difference")


@torch.no_grad()
def test_cross_attention_counts_every_query():
    sizes = {"vocab_size": 50, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    torch.manual_seed(0)
    fused, eager = (
        BartModel(BartConfig(**sizes, **heads, attn_implementation=kind)).double().eval() for kind in ("sdpa", "eager")
    )
    eager.load_state_dict(fused.state_dict())
    real = PADDINGS["right"]
    inputs = {"attention_mask": real.long(), "decoder_input_ids": TOKENS[:, :4]}
    with observe(fused) as watcher:
        fused(TOKENS, **inputs)
    whole = eager(TOKENS, **inputs, output_attentions=True)
    found = {layer.name: layer for layer in watcher.observation().layers}
    every_query = torch.ones(3, 4, dtype=torch.bool)
    for name, weights, keys, queries in (
        ("encoder.layers.0.self_attn", whole.encoder_attentions[0], real, real),
        ("decoder.layers.0.self_attn", whole.decoder_attentions[0], every_query, every_query),
        ("decoder.layers.0.encoder_attn", whole.cross_attentions[0], real, every_query),
    ):
        for statistic, values in from_weights(weights, keys).items():
            assert_moments(found[name], statistic, values, queries[:, None] & several_keys(weights))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gradient_checkpointing_counts_each_call_once(implementation, reentrant):
    fused = twins("llama")[implementation == "eager"].train()
    with observe(fused) as watcher:
        fused(TOKENS).last_hidden_state.sum().backward()
    plain = watcher.observation()
    gradient = fused.layers[0].self_attn.q_proj.weight.grad.clone()
    fused.zero_grad()
    fused.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    fused.enable_input_require_grads()
    with observe(fused) as watcher:
        fused(TOKENS, use_cache=False).last_hidden_state.sum().backward()
    assert watcher.observation() == plain
    assert_close(fused.layers[0].self_attn.q_proj.weight.grad, gradient, what="gradient")
