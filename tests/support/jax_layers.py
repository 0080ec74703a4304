"""Small JAX attention layers: the twins of those in `torch_layers`, weight for weight."""

import copy
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_layers
from layers import EXOTIC, TOGETHER

from tidegate import Gates
from tidegate.flax import AttentionConfig, attend_cached, gated_attention, init_cache
from tidegate.torch import GatedAttention

QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_llvm_disable_expensive_passes": True,
}
"""Compiler options that compile ten times as fast, to slower code."""

QUICK_FLAGS = " ".join(f"--{option}={value}".lower() for option, value in QUICKLY.items())
"""The same as `XLA_FLAGS`."""


def key(seed=0):
    """Return a random key of the kind that XLA compiles fastest."""
    return jax.random.key(seed, impl="rbg")


def quick_jit(function):
    """The function compiled for few runs; it returns NumPy arrays, which are compared without a compilation."""
    compiled = jax.jit(function, compiler_options=QUICKLY)
    return lambda *arguments: jax.tree.map(np.asarray, compiled(*arguments))


def side_by_side(gates):
    """Spellings of gates, combined on as few layers as their paths allow."""
    layers = []
    for gate in gates:
        (gate,) = Gates.parse(gate)
        free = next((layer for layer in layers if layer.at(gate.path) is None), Gates())
        layers = [layer for layer in layers if layer is not free] + [Gates((*free, gate))]
    return tuple(map(str, layers))


COMBINED = ("none", *TOGETHER, *side_by_side(EXOTIC))
"""Every legal and exotic gate, on as few layers as their sites allow: a layer costs a compilation."""

GROUPED = {"num_kv_heads": 2, "head_dim": 4, "rope": torch_layers.ROTARY, "qk_norm": True}
"""Options that most layers have."""

every_combination = pytest.mark.parametrize("gate", COMBINED)
every_precision = pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16])


@dataclass(frozen=True, eq=False)
class Layer:
    """Parameters and options of one layer, and its PyTorch original; call it on an input."""

    params: dict
    config: AttentionConfig
    source: GatedAttention
    is_causal: bool = True

    def __call__(self, x, **given):
        attend = attend_cached if "cache" in given else gated_attention
        return attend(self.params, x, self.config, is_causal=self.is_causal, **given)

    def torch_twin(self):
        """The PyTorch layer in float64, with weights rounded to this layer's precision."""
        dtype = getattr(torch, jnp.dtype(self.params["q_proj"]["kernel"].dtype).name)
        return copy.deepcopy(self.source).to(dtype).double()

    def by_torch(self, x, **given):
        """Output of the PyTorch layer: the expected output, without a compilation."""
        with torch.no_grad():
            return self.torch_twin()(as_tensor(x), **{name: as_tensor(array) for name, array in given.items()}).numpy()

    def under(self, params):
        """The layer with other parameters."""
        return replace(self, params=params)

    def to(self, dtype):
        """The layer in another dtype."""
        return self.under(jax.tree.map(lambda array: array.astype(dtype), self.params))

    def ungated(self):
        """The same layer, weight for weight, without its gates."""
        return replace(self, params={**self.params, "attn_gate": {}}, config=replace(self.config, gate=None))

    def cache(self, batch, max_length):
        """An empty cache of the layer's dtype."""
        dtype = self.params["q_proj"]["kernel"].dtype
        return init_cache(self.config.shape, batch=batch, max_length=max_length, dtype=dtype)


def as_tensor(array):
    """Convert to a PyTorch tensor, floating numbers to float64."""
    array = np.asarray(array)
    return torch.tensor(array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array)


def make(gate="none", *, dtype=jnp.float64, **options):
    """The twin of `torch_layers.make`, with parameters far from their initial values."""
    return twin(torch_layers.make(gate, **options)).to(dtype)


def twin(layer):
    """A PyTorch layer's JAX twin, of NumPy arrays."""
    config = AttentionConfig(**torch_layers.options_of(layer), gate=layer.gates, dropout=layer.dropout)
    return Layer(as_params(dict(layer.named_parameters()), layer.shape.head_dim), config, layer, layer.causal)


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
    return params


def sample(*shape, seed=0, dtype=jnp.float64):
    """The numbers of `torch_layers.sample`, as a NumPy array."""
    return torch_layers.sample(*shape, seed=seed).numpy().astype(dtype)


def largest_gap(actual, expected):
    """The largest difference, as a number; shapes must agree."""
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    return np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64)).max(initial=0)


def rounding(dtype, expected, *, times=8):
    """The error of that many roundings at the magnitude of the expected numbers."""
    return times * float(jnp.finfo(dtype).eps) * (1 + np.abs(np.asarray(expected, np.float64)).max(initial=0))
