from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close, naming
from jax_layers import quick_jit, sample
from layers import EXOTIC, GATES

from tidegate import Gate, HeadShape
from tidegate.flax.gate import GateReads, activate, apply_gate, gate_logits, gate_values
from tidegate.tensors import activations, gating

ACTIVATIONS = ["sigmoid", "silu", "softplus", "tanh1", "twosigmoid", "identity", "gelu", "tanh"]
SHAPE = HeadShape(d_model=12, num_heads=4, num_kv_heads=2, head_dim=6)
EVERY_GATE = (*GATES, *map(Gate.parse, EXOTIC))


def parameters_of(gate):
    shapes = gate.parameter_shapes(**asdict(SHAPE))
    return {name: sample(*shape, seed=10 + i, dtype=jnp.bfloat16) for i, (name, shape) in enumerate(shapes.items())}


def test_logits_are_computed_in_float32_whatever_the_dtype():
    shapes = {"input": (2, 5, 12), "query": (2, 5, 4, 6), "value": (2, 5, 2, 6), "output": (2, 5, 4, 6)}
    shapes |= {"partition": (2, 5, 4)}
    reads = {name: sample(*shape, seed=i, dtype=jnp.bfloat16) for i, (name, shape) in enumerate(shapes.items())}
    wide = {name: array.astype(np.float64) for name, array in reads.items()}
    # The tensors have heads first.
    sources = {name: array if name == "input" else np.swapaxes(array, 1, 2) for name, array in wide.items()}

    def compute(reads, parameters):
        given, found = GateReads(**reads, context=reads["input"]), []
        for gate, own in zip(EVERY_GATE, parameters, strict=True):
            width = (12,) if gate.site == "dense" else (gate.num_heads_at_site(SHAPE), 6)
            target = jnp.ones((2, 5, *width), jnp.bfloat16)
            logits, values = gate_logits(gate, given, own), gate_values(gate, given, own)
            found.append((logits, values, apply_gate(gate, target, given, own)))
        return found

    parameters = [parameters_of(gate) for gate in EVERY_GATE]
    each = quick_jit(compute)(reads, parameters)
    for gate, own, (logits, values, gated) in zip(EVERY_GATE, parameters, each, strict=True):
        raw = gating.gate_reads(gate, gating.GateSources(**sources))
        own = {name: array.astype(np.float64) for name, array in own.items()}
        with naming(gate):
            assert (logits.dtype, values.dtype, gated.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
            exact = gating.gate_logits(gate, raw, own, num_heads=gate.num_heads_at_site(SHAPE))
            assert_close(np.swapaxes(logits, 1, 2), exact)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_an_activation_is_that_of_the_tensors(dtype):
    logits = np.concatenate([np.linspace(-60, 60, 241), [0.0, -1e4, 1e4]]).astype(dtype)

    def values_and_slopes(phi, z):
        return [(phi(a, z), jax.grad(lambda z, a=a: phi(a, z).sum())(z)) for a in ACTIVATIONS]

    ours, theirs = quick_jit(lambda z: [values_and_slopes(phi, z) for phi in (activate, activations.activate)])(logits)
    for activation, (own, slope), (expected, expected_slope) in zip(ACTIVATIONS, ours, theirs, strict=True):
        with naming(activation):
            assert_close(own, expected)
            assert_close(slope, expected_slope, what="gradient")
