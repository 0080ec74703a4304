"""Small attention layers with every gate, for laws and gradients."""

import numpy as np

from tidegate import Gates, legal_gates
from tidegate.tensors.gating import init_gate_parameters
from tidegate.tensors.layer import AttentionArrays
from tidegate.tensors.rotary import Rotary

GATES = tuple(legal_gates())
"""Every legal combination of site, reads and grain."""
WITH_MATRICES = tuple(gate for gate in GATES if gate.has_matrix)

EXOTIC = (
    "output:input:r2:w3:b1:shared-group",
    "output:query:twosigmoid:shared-group",
    "output:value:identity:add:shared-layer:head",
    "output:output:softplus:w2:b-0.5",
    "value:input:tanh1:b0:shared-layer",
    "value:query:head:silu:shared-layer",
    "value:query:r3:w5",
    "key:value:softplus:add:b0",
    "key:query:r1:shared-group:b2",
    "query:value:tanh1:w2",
    "query:query:head:identity:b1:r2",
    "dense:output:twosigmoid:r3:w5:b-1",
    "dense:input:silu:add",
    "sink",
    "output:partition:head:b0.1",
)
"""Spellings that together use every activation, op, share, rank, width and bias, at every site."""

TOGETHER = (
    "g1+g2+g3+g4+g5",
    "output:input:head+value:input:head+key:input:head+query:input:head+dense:output",
    "output:query+value:query+key:query+query:query",
    "output:query:head+value:query:head+key:query:head+query:query:head",
    "output:value+value:value+key:value+query:value",
    "output:value:head+value:value:head+key:value:head+query:value:head",
    "off-by-one+output:output",
    "output:output:head",
    "output:nothing+value:nothing+key:nothing+query:nothing+dense:nothing",
    "output:nothing:head+value:nothing:head+key:nothing:head+query:nothing:head",
)
"""Every gate of `GATES` once, in as few layers as the sites allow."""


CONTROLS = (
    "output:input:constant",
    "value:query:twosigmoid:b0.3:constant",
    "dense:output:tanh1:constant",
    "output:partition:head:b0.2:constant",
    "output:input:shuffled",
    "value:query:head:r2:b1:shuffled",
    "key:value:add:shuffled",
    "output:output:w2:shuffled",
    "dense:input:twosigmoid:shuffled",
    "output:output:gelu:replace",
    "value:value:tanh:replace",
    "query:query:silu:replace",
)
"""Placebos of every kind, and functions instead of gates; shuffled placebos need a batch of two."""


def gate_parameters(gates, rng, *, d=6, H=4, G=2, h=4, scale=20.0):
    """Return random parameters for each gate's path, `scale` times as large as initial ones; also constants."""
    sizes = {"d_model": d, "num_heads": H, "num_kv_heads": G, "head_dim": h}
    drawn = {gate.path: init_gate_parameters(rng, gate, **sizes) for gate in gates}
    for gate in gates:
        if gate.reads == "nothing" and gate.has_bias and gate.bias == 0:
            drawn[gate.path]["bias"] = rng.standard_normal(drawn[gate.path]["bias"].shape) / scale
    return {path: {name: array * scale for name, array in arrays.items()} for path, arrays in drawn.items()}


def make_layer(gates="none", *, seed=0, d=6, H=4, G=2, h=4, full=False, scale=20.0, **options):
    """Return a layer of NumPy arrays; `full` enables biases, norms, rotary, temperature and a learned metric."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape)

    gates = Gates.parse(gates)
    everything = {
        "b_Q": normal(H, h),
        "b_K": normal(G, h),
        "b_V": normal(G, h),
        "b_O": normal(d),
        "q_norm": normal(h),
        "k_norm": normal(h),
        "rotary": Rotary(fraction=0.5, scale=2.0, offset=3, base=100.0),
        "temperature": 0.7,
        "metric_factor": normal(H, 3, h),
    }
    return AttentionArrays(
        W_Q=normal(H, d, h),
        W_K=normal(G, d, h),
        W_V=normal(G, d, h),
        W_O=normal(H, h, d),
        gates=gates,
        gate_parameters=gate_parameters(gates, rng, d=d, H=H, G=G, h=h, scale=scale),
        **{**(everything if full else {}), **options},
    )
