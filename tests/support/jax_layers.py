"""Small JAX attention layers: the twins of those in `torch_layers`, weight for weight, and what is compared of them."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch_layers

from tidegate.flax import AttentionConfig, gated_attention, init_cache

TORCH_DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Layer:
    """Parameters and options of one layer; call it on an input."""

    params: dict
    config: AttentionConfig
    is_causal: bool = True

    def __call__(self, x, **given):
        return gated_attention(self.params, x, self.config, is_causal=self.is_causal, **given)

    def with_params(self, params):
        return replace(self, params=params)

    def ungated(self):
        """The same layer, weight for weight, without its gates."""
        return replace(self, params={**self.params, "attn_gate": {}}, config=replace(self.config, gate=None))

    def cache(self, batch, max_length):
        dtype = self.params["q_proj"]["kernel"].dtype
        return init_cache(self.config.shape, batch=batch, max_length=max_length, dtype=dtype)


def make(gate="none", *, dtype=jnp.float64, **options):
    """The twin of `torch_layers.make`: nothing is near its start."""
    layer = twin(torch_layers.make(gate, **options))
    return layer.with_params(jax.tree.map(lambda array: array.astype(dtype), layer.params))


def twin(layer):
    """A PyTorch layer's JAX twin."""
    config = AttentionConfig(
        d_model=layer.shape.d_model,
        num_heads=layer.shape.num_heads,
        gate=layer.gates,
        num_kv_heads=layer.shape.num_kv_heads,
        head_dim=layer.shape.head_dim,
        dropout=layer.dropout,
        bias=layer.q_proj.bias is not None,
        rope=layer.rotary,
        qk_norm=layer.q_norm is not None,
        window=layer.window,
        metric=None if layer.metric is None else layer.metric.kind,
        temperature=layer.temperature,
    )
    return Layer(as_params(dict(layer.named_parameters()), layer.shape.head_dim), config, layer.causal)


def as_params(tensors, head_dim):
    """A PyTorch layer's parameters, or their gradients, as the tree of `init_attention`."""
    params = {"attn_gate": {}}
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        node = params
        for part in path:
            node = node.setdefault(part, {})
        array = tensor.detach().numpy()
        match path[0], leaf:
            case "o_proj", "weight":
                node["kernel"] = array.T.reshape(-1, head_dim, array.shape[0])
            case (("q_proj" | "k_proj" | "v_proj"), "weight"):
                node["kernel"] = array.T.reshape(array.shape[1], -1, head_dim)
            case (("q_proj" | "k_proj" | "v_proj"), "bias"):
                node["bias"] = array.reshape(-1, head_dim)
            case (("q_norm" | "k_norm"), "weight"):
                node["scale"] = array
            case _:
                node[leaf] = array
    return jax.tree.map(jnp.asarray, params)


def sample(*shape, seed=0, dtype=jnp.float64):
    """The numbers of `torch_layers.sample`."""
    return jnp.asarray(torch_layers.sample(*shape, seed=seed).numpy(), dtype)


def largest_gap(actual, expected):
    """The largest difference, as a number; shapes must agree."""
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    return np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64)).max()
