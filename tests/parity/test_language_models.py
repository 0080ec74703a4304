"""Whole language models of PyTorch and of JAX, from one file: logits, gradients, generation."""

import jax
import jax.numpy as jnp
import pytest
import torch
from closeness import assert_close
from jax_layers import side_by_side
from jax_models import jit_quickly, left_padded, make_torch, mean_loss, sample
from torch.nn import functional as F

from tidegate import PRESETS
from tidegate.flax import apply_model, generate, load_params, to_torch
from tidegate.tensors.rotary import Rotary
from tidegate.torch import save_model

TOGETHER = side_by_side(PRESETS)
"""Every preset, in as few models as their sites allow."""

MODELS = {
    "none": {"gate": "none", "num_kv_heads": 2, "qk_norm": True},
    # A gate is a matter of its layer: one is enough.
    **{gate: {"gate": gate, "num_kv_heads": 2, "qk_norm": True, "num_layers": 1} for gate in (*TOGETHER, *PRESETS)},
    "learned positions": {
        "gate": "bma+g1",
        "positions": "learned",
        "norm": "layer",
        "feedforward": "gelu",
        "bias": True,
        "tie_embeddings": False,
    },
    "window": {
        "gate": "value:query:r2:b1+g5",
        "window": 3,
        "num_kv_heads": 1,
        "head_dim": 8,
        "rotary": Rotary(fraction=0.5, scale=2.0, offset=3),
        "metric": "learned",
        "temperature": 0.7,
        "num_layers": 1,
    },
    "no positions": {
        "gate": "output:output+key:value",
        "positions": "none",
        "window": 4,
        "metric": "diagonal",
        "num_layers": 1,
    },
}


def every_model(*left_out):
    """Run over the models; each preset alone, and those that are left out, with `--full` alone."""
    full = {*PRESETS, *left_out}
    rows = [
        pytest.param(options, id=name, marks=pytest.mark.full if name in full else ())
        for name, options in MODELS.items()
    ]
    return pytest.mark.parametrize("options", rows)


def twins(tmp_path, options, dtype=torch.float64):
    """A PyTorch model, and what JAX reads from its file."""
    model = make_torch(dtype=dtype, **options)
    save_model(model, tmp_path / "model.safetensors")
    config, params = load_params(tmp_path / "model.safetensors")
    assert config == model.config
    return model, config, params


def assert_logits_and_gradients_agree(tmp_path, options, dtype):
    model, config, params = twins(tmp_path, options, dtype)
    tokens = sample(3, 8)

    def loss(params):
        logits = apply_model(params, tokens[:, :-1], config)
        return mean_loss(logits, tokens[:, 1:]), logits

    gradients, logits = jit_quickly(jax.grad(loss, has_aux=True))(params)
    torch_tokens = torch.tensor(tokens.tolist())
    expected = model(torch_tokens[:, :-1])
    assert_close(logits, expected)
    F.cross_entropy(expected.flatten(0, 1), torch_tokens[:, 1:].flatten()).backward()
    named = to_torch(gradients, config)
    for name, parameter in model.named_parameters():
        assert parameter.grad.any()
        assert_close(named[name], parameter.grad, what="gradient")


@every_model()
def test_logits_and_gradients_are_pytorchs(tmp_path, options):
    assert_logits_and_gradients_agree(tmp_path, options, torch.float64)


# Each gate in single precision is the layers' own test.
@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*TOGETHER, *PRESETS)])
def test_logits_and_gradients_in_single_precision_are_pytorchs(tmp_path, name):
    assert_logits_and_gradients_agree(tmp_path, MODELS[name], torch.float32)


@every_model(*TOGETHER, "no positions")
def test_logits_in_single_precision_are_pytorchs(tmp_path, options):
    model, config, params = twins(tmp_path, options, torch.float32)
    tokens = sample(3, 8)
    logits = jit_quickly(apply_model, static_argnames="config")(params, tokens, config=config)
    assert_close(logits, model(torch.tensor(tokens.tolist())))


# That each gate resumes from a cache is the layers' own test.
@every_model(*TOGETHER[1:])
def test_greedy_generation_from_left_padded_prompts_is_pytorchs(tmp_path, options):
    # A tied head favours the token that was read last, and would repeat it.
    model, config, params = twins(tmp_path, options | {"tie_embeddings": False})
    prompt, mask = left_padded([sample(1, length, seed=length) for length in (1, 4, 7)])

    @jit_quickly
    def continued(params, prompt, mask):
        return generate(params, prompt, config, max_new_tokens=8, temperature=0, prompt_mask=mask)

    expected = model.generate(
        torch.tensor(prompt.tolist()), max_new_tokens=8, temperature=0, prompt_mask=torch.tensor(mask.tolist())
    )
    assert len(expected[:, 7:].unique()) > 3
    assert continued(params, prompt, mask).tolist() == expected.tolist()


def test_packed_documents_and_masks_are_pytorchs(tmp_path):
    model, config, params = twins(tmp_path, MODELS["learned positions"])
    tokens = sample(2, 8)
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 5], [3, 3, 2, 2, 2, 2, 2, 2]])
    hidden = jnp.arange(8) % 3 > 0
    apply = jit_quickly(apply_model, static_argnames="config")
    logits = apply(params, tokens, config=config, segment_ids=ids, mask=hidden[None])
    expected = model(
        torch.tensor(tokens.tolist()),
        documents=torch.tensor(ids.tolist()),
        mask=torch.tensor(hidden.tolist())[None],
    )
    assert_close(logits, expected)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_given_positions_are_pytorchs(tmp_path, positions):
    model, config, params = twins(tmp_path, {"positions": positions, "num_layers": 1})
    tokens, places = sample(2, 5), jnp.array([[4, 0, 7, 7, 1], [0, 1, 2, 3, 9]])
    expected = model(torch.tensor(tokens.tolist()), positions=torch.tensor(places.tolist()))
    apply = jit_quickly(apply_model, static_argnames="config")
    assert_close(apply(params, tokens, config=config, positions=places), expected)
