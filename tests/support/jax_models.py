"""Small JAX language models, the twins of PyTorch's, and a quicker compiler for their tests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax_layers import QUICKLY
from torch.nn import functional as F

from tidegate.config import TransformerConfig
from tidegate.flax import from_torch, stack_layers
from tidegate.torch import TransformerLM

SIZES = {"vocab_size": 31, "d_model": 24, "num_layers": 2, "num_heads": 4, "max_length": 32}

jit_quickly = partial(jax.jit, compiler_options=QUICKLY)
"""For functions that run once or twice."""


def make_torch(*, dtype=torch.float64, **options):
    """A PyTorch model with parameters far from their initial values, so that every part has an effect."""
    model = TransformerLM(TransformerConfig(**SIZES | options), dtype=torch.float64)
    model.reset_parameters(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "attn_gate" in name or parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_((0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.2) * noise)
    return model.to(dtype)


def make(*, dtype=jnp.float64, **options):
    """Configuration and parameters of its JAX twin."""
    model = make_torch(**options)
    params = from_torch(model.state_dict(), model.config)
    return model.config, jax.tree.map(lambda array: array.astype(dtype), params)


def sample(batch, length, *, seed=1):
    """Random tokens."""
    tokens = torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(seed))
    return jnp.asarray(tokens.numpy())


def logits_of_torch(tokens, **options):
    """Logits of the PyTorch twin: the expected logits, without a compilation."""
    with torch.no_grad():
        return make_torch(**options)(torch.tensor(tokens.tolist())).numpy()


def gradients_of_torch(tokens, *, documents=None, **options):
    """The PyTorch twin's `mean_loss` with the tokens themselves as targets, its gradients, and its logits."""
    model, tokens = make_torch(**options), torch.tensor(tokens.tolist())
    logits = model(tokens, documents=None if documents is None else torch.tensor(documents.tolist()))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    gradients = from_torch({name: tensor.grad for name, tensor in model.named_parameters()}, model.config)
    return loss.item(), gradients, logits.detach().numpy()


@jit_quickly
def with_stacked_blocks(params):
    """Stack the blocks of a model's parameters for a scan."""
    return params | {"stack": params["stack"] | {"blocks": stack_layers(params["stack"]["blocks"])}}


def left_padded(prompts, *, filler=5):
    """Pad prompts of several lengths to one batch; return it and its mask."""
    width = max(prompt.shape[1] for prompt in prompts)
    padded, mask = np.full((0, width), filler), np.zeros((0, width), bool)
    for prompt in prompts:
        lack = ((0, 0), (width - prompt.shape[1], 0))
        padded = np.concatenate((padded, np.pad(prompt, lack, constant_values=filler)))
        mask = np.concatenate((mask, np.pad(np.ones(prompt.shape, bool), lack)))
    return jnp.asarray(padded), jnp.asarray(mask)


def mean_loss(logits, targets):
    """Cross-entropy, averaged over all positions."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)
    return -chosen.mean()
