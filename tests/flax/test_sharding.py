import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P
from jax_layers import QUICK_FLAGS

from tidegate import PRESETS
from tidegate.config import TransformerConfig
from tidegate.flax import AttentionConfig, init_attention, init_model, partition_specs

ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tidegate.config import TransformerConfig
from tidegate.flax import GatedAttention, TransformerLM, apply_model, init_model, partition_specs

jax.config.update("jax_enable_x64", True)
assert jax.device_count() == 2
mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
tokens = jnp.arange(12).reshape(2, 6)

config = TransformerConfig(
    vocab_size=31, d_model=24, num_layers=1, num_heads=4, num_kv_heads=2, gate="bma+g1+g5", bias=True, qk_norm=True
)
rng = np.random.default_rng(0)
shapes = jax.eval_shape(lambda: init_model(jax.random.key(0), config))
params = jax.device_put(jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape), shapes))
shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(config))
spread = jax.device_put(params, shardings)

attention = spread["stack"]["blocks"][0]["attention"]
def on_one_device(array):
    return array.addressable_shards[0].data.shape
assert on_one_device(attention["q_proj"]["kernel"]) == (24, 2, 6)
assert on_one_device(attention["attn_gate"]["output"]["weight"]) == (2, 24, 6)
assert on_one_device(attention["v_proj"]["kernel"]) == (24, 1, 6)
assert on_one_device(attention["attn_gate"]["value"]["weight"]) == (1, 12, 6)
assert on_one_device(attention["o_proj"]["kernel"]) == (2, 6, 24)
assert on_one_device(attention["attn_gate"]["dense"]["weight"]) == (1, 24, 24)

def loss(params):
    logits = apply_model(params, tokens, config)
    return (logits**2).mean(), logits
run = jax.jit(jax.grad(loss, has_aux=True))
def assert_close(one, other, tolerance):
    # As NumPy arrays, which are compared without a compilation.
    one, other = np.asarray(one), np.asarray(other)
    assert np.abs(one - other).max() < tolerance * (1 + np.abs(other).max())
(gradients, logits), (own_gradients, own_logits) = run(params), run(spread)
assert np.abs(logits).max() > 0.1
assert_close(own_logits, logits, 1e-12)
for one, other in zip(jax.tree.leaves(own_gradients), jax.tree.leaves(gradients), strict=True):
    assert_close(one, other, 1e-10)

with jax.set_mesh(mesh):
    model = TransformerLM(config, params=params, mesh_axis="model", rngs=nnx.Rngs(0))
layer = model.stack["blocks"][0].attention
for variable, spec in (
    (layer.q_proj["kernel"], P(None, "model", None)),
    (layer.attn_gate["output"]["weight"], P("model", None, None)),
    (layer.attn_gate["value"]["weight"], P("model", None, None)),
):
    assert variable.out_sharding == spec
    assert variable[...].sharding == NamedSharding(mesh, spec)
assert_close(jax.jit(lambda model: model(tokens))(model), logits, 1e-12)

@jax.jit
def created():
    return GatedAttention(4, 24, mesh_axis="model", rngs=nnx.Rngs(jax.random.key(0)))
with jax.set_mesh(mesh):
    layer = created()
assert on_one_device(layer.q_proj["kernel"][...]) == (24, 2, 6)
assert on_one_device(layer.attn_gate["value"]["weight"][...]) == (2, 6, 6)
print("equal")
"""


def test_heads_and_their_gates_on_two_devices_give_what_one_device_gives():
    flags = f"--xla_force_host_platform_device_count=2 {QUICK_FLAGS}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", ON_TWO_DEVICES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"


SITES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "q_proj"}


@pytest.mark.parametrize("gate", PRESETS)
def test_a_gate_is_partitioned_like_what_it_gates(gate):
    specs = partition_specs(AttentionConfig(d_model=24, num_heads=4, num_kv_heads=2, gate=gate), axis="tensor")
    if PRESETS[gate].reads == "partition":
        assert specs["attn_gate"] == ({"partition": {"bias": P("tensor", None)}} if gate == "sink" else {})
        return
    (site,) = specs["attn_gate"]
    (spec,) = specs["attn_gate"][site].values()
    if site == "dense":
        assert spec == P()
    else:
        assert specs[SITES[site]]["kernel"] == P(None, "tensor", None)
        assert spec == P("tensor", None, None)


def test_every_array_has_a_spec_of_its_own_rank_or_is_everywhere():
    config = TransformerConfig(
        gate="output:input:r2:b1+value:query", num_kv_heads=2, bias=True, qk_norm=True, metric="learned", norm="layer"
    )
    params = jax.eval_shape(lambda: init_model(jax.random.key(0), config))
    specs = partition_specs(config)
    assert jax.tree.structure(specs) == jax.tree.structure(params)
    block = specs["stack"]["blocks"][0]
    assert block["attention"]["o_proj"] == {"kernel": P("model", None, None), "bias": P()}
    low_rank = {"weight_down": P("model", None, None), "weight_up": P("model", None, None)}
    assert block["attention"]["attn_gate"]["output"] == low_rank | {"bias": P("model", None)}
    assert block["feedforward"]["gate_proj"] == {"kernel": P(None, "model"), "bias": P("model")}
    assert block["feedforward"]["down_proj"] == {"kernel": P("model", None), "bias": P()}
    for part in (specs["embedding"], specs["stack"]["norm"], block["attention_norm"], block["attention"]["q_norm"]):
        assert set(part.values()) == {P()}


def test_what_there_is_one_of_is_on_every_device():
    config = AttentionConfig(d_model=24, num_heads=4, num_kv_heads=1, gate="bma+output:query:shared-layer")
    specs = partition_specs(config)
    assert jax.tree.structure(specs) == jax.tree.structure(
        jax.eval_shape(lambda: init_attention(jax.random.key(0), config))
    )
    assert specs["q_proj"]["kernel"] == P(None, "model", None)
    assert specs["k_proj"]["kernel"] == specs["v_proj"]["kernel"] == P()
    assert specs["attn_gate"]["value"]["weight"] == specs["attn_gate"]["output"]["weight"] == P()
