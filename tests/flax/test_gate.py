from dataclasses import asdict, fields
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax_layers import quick_jit, sample
from layers import EXOTIC, GATES

from tidegate import Gate, HeadShape
from tidegate.flax.gate import GateReads, activate, apply_gate, gate_logits, gate_values
from tidegate.tensors import activations, gating

ACTIVATIONS = ["sigmoid", "silu", "softplus", "tanh1", "twosigmoid", "identity", "gelu", "tanh"]
SHAPE = HeadShape(d_model=12, num_heads=4, num_kv_heads=2, head_dim=6)
EVERY_GATE = (*GATES, *map(Gate.parse, EXOTIC))
every_gate = pytest.mark.parametrize("gate", EVERY_GATE, ids=str)


def read(*, dtype=jnp.float64):
    return GateReads(
        input=sample(2, 5, 12, seed=1, dtype=dtype),
        context=sample(2, 5, 12, seed=1, dtype=dtype),
        query=sample(2, 5, 4, 6, seed=2, dtype=dtype),
        value=sample(2, 5, 2, 6, seed=3, dtype=dtype),
        output=sample(2, 5, 4, 6, seed=4, dtype=dtype),
        partition=sample(2, 5, 4, seed=6, dtype=dtype),
    )


def as_dtype(reads, dtype):
    return GateReads(**{field.name: getattr(reads, field.name).astype(dtype) for field in fields(reads)})


def sources(reads):
    """The same for the tensors, heads first."""
    heads_first = {name: np.swapaxes(getattr(reads, name), 1, 2) for name in ("query", "value", "output", "partition")}
    return gating.GateSources(input=reads.input, **heads_first)


def parameters_of(gate, *, dtype=jnp.float64):
    shapes = gate.parameter_shapes(**asdict(SHAPE))
    return {name: sample(*shape, seed=10 + i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def target_of(gate, *, dtype=jnp.float64):
    shape = (2, 5, 12) if gate.site == "dense" else (2, 5, gate.num_heads_at_site(SHAPE), 6)
    return sample(*shape, seed=5, dtype=dtype)


@cache
def everything(gates, dtype):
    """Logits, values and the gated target of each gate; all are compiled together, which takes less than each alone."""

    def compute(given, parameters, targets):
        reads = GateReads(**given)
        return [
            (gate_logits(gate, reads, own), gate_values(gate, reads, own), apply_gate(gate, target, reads, own))
            for gate, own, target in zip(gates, parameters, targets, strict=True)
        ]

    reads = read(dtype=dtype)
    given = {field.name: getattr(reads, field.name) for field in fields(reads)}
    parameters, targets = ([of(gate, dtype=dtype) for gate in gates] for of in (parameters_of, target_of))
    return dict(zip(gates, quick_jit(compute)(given, parameters, targets), strict=True))


@every_gate
def test_a_gate_is_that_of_the_tensors(gate):
    reads, parameters, target = read(), parameters_of(gate), target_of(gate)
    logits, values, gated = everything(EVERY_GATE, jnp.float64)[gate]
    raw, num_heads = gating.gate_reads(gate, sources(reads)), gate.num_heads_at_site(SHAPE)
    assert_close(np.swapaxes(logits, 1, 2), gating.gate_logits(gate, raw, parameters, num_heads=num_heads))
    expected = gating.gate_values(gate, raw, parameters, num_heads=num_heads)
    if gate.site == "dense":
        assert_close(values, expected[:, 0])
        assert_close(gated, gating.apply_gate(gate, target, sources(reads), parameters))
    else:
        assert_close(values, np.swapaxes(expected, 1, 2))
        turned = gating.apply_gate(gate, np.swapaxes(target, 1, 2), sources(reads), parameters)
        assert_close(gated, np.swapaxes(turned, 1, 2))


@every_gate
def test_logits_are_computed_in_float32_whatever_the_dtype(gate):
    reads, parameters = read(dtype=jnp.bfloat16), parameters_of(gate, dtype=jnp.bfloat16)
    logits, values, gated = everything(EVERY_GATE, jnp.bfloat16)[gate]
    assert (logits.dtype, values.dtype, gated.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    wide = {name: array.astype(np.float64) for name, array in parameters.items()}
    raw = gating.gate_reads(gate, sources(as_dtype(reads, np.float64)))
    exact = gating.gate_logits(gate, raw, wide, num_heads=gate.num_heads_at_site(SHAPE))
    assert_close(np.swapaxes(logits, 1, 2), exact)


@cache
def activated(dtype):
    """Of each activation, by us and by the tensors, values and slopes."""
    logits = np.concatenate([np.linspace(-60, 60, 241), [0.0, -1e4, 1e4]]).astype(dtype)

    def with_slopes(phi, activation, z):
        return phi(activation, z), jax.grad(lambda z: phi(activation, z).sum())(z)

    def each(phi, z):
        return {activation: with_slopes(phi, activation, z) for activation in ACTIVATIONS}

    return quick_jit(lambda z: (each(activate, z), each(activations.activate, z)))(logits)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_an_activation_is_that_of_the_tensors(activation, dtype):
    (own, slope), (expected, expected_slope) = (found[activation] for found in activated(dtype))
    assert_close(own, expected)
    assert_close(slope, expected_slope, what="gradient")
