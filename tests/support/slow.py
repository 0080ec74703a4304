"""Reference gates and attention layers in plain loops over NumPy numbers, independent of the library."""

import cmath
import math

import numpy as np

PHI = {
    "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
    "silu": lambda z: z / (1 + math.exp(-z)),
    "softplus": lambda z: math.log1p(math.exp(z)),
    "tanh1": lambda z: 1 + math.tanh(z),
    "twosigmoid": lambda z: 2 / (1 + math.exp(-z)),
    "identity": lambda z: z,
    "gelu": lambda z: z * math.erfc(-z / math.sqrt(2)) / 2,
    "tanh": math.tanh,
}


def slow_gate(gate, target, parameters, *, input, context=None, query=None, value=None, output=None, partition=None):  # noqa: A002
    """Apply a gate to one sequence: target is (heads, T, h), or (T, d) at the dense site."""
    heads = target[None] if gate.site == "dense" else target
    gated = np.empty_like(heads)
    source = gate.site in ("key", "value")
    group = None if query is None or value is None else query.shape[0] // value.shape[0]
    for n, head in enumerate(heads):
        for t, features in enumerate(head):
            if gate.reads == "input":
                reads = context[t] if source and context is not None else input[t]
            elif gate.reads == "query":
                reads = np.concatenate([query[n * group + i, t] for i in range(group)]) if source else query[n, t]
            elif gate.reads == "value":
                reads = value[n, t] if source else value[n // group, t]
            elif gate.reads == "partition":
                reads = partition[n, t : t + 1]
            elif gate.reads == "nothing":
                reads = ()
            else:
                reads = np.concatenate([o[t] for o in output]) if gate.site == "dense" else output[n, t]
            for c in range(len(features)):
                g = PHI[gate.activation](
                    slow_logit(gate, parameters, reads, n, group, 0 if gate.grain == "head" else c)
                )
                gated[n, t, c] = features[c] * g if gate.op == "multiply" else features[c] + g
    return gated[0] if gate.site == "dense" else gated


def slow_logit(gate, parameters, reads, n, group, column):
    """Return the logit of a gate in head n."""
    if gate.share == "layer":
        m = 0
    elif gate.share == "group" and gate.site not in ("key", "value"):
        m = n // group
    else:
        m = n
    if gate.reads == "partition":
        matrix = np.ones((1, 1))
    elif gate.reads == "nothing":
        matrix = np.ones((0, 1))
    elif gate.rank is None:
        matrix = parameters["weight"][m]
    else:
        matrix = parameters["weight_down"][m] @ parameters["weight_up"][m]
    width = len(reads) if gate.width is None else gate.width
    z = sum(reads[i] * matrix[i, column] for i in range(width))
    return z + (0 if gate.bias is None else parameters["bias"][m, column])


def slow_rotation(vector, position, rotary):
    """Rotate one head's query or key at one position; pairs of channels are complex numbers."""
    width = round(len(vector) * rotary.fraction)
    turned = vector.copy()
    for i in range(width // 2):
        angle = (position + rotary.offset) / rotary.scale / rotary.base ** (2 * i / width)
        number = complex(vector[i], vector[i + width // 2]) * cmath.exp(1j * angle)
        turned[i], turned[i + width // 2] = number.real, number.imag
    return turned


def slow_located(layer, heads, norm, positions):
    """Normalize and rotate queries or keys one by one."""
    located = heads.copy()
    for n in range(len(heads)):
        for t, v in enumerate(heads[n]):
            if norm is not None:
                v = v / math.sqrt(sum(c * c for c in v) / len(v) + layer.norm_epsilon) * norm
            located[n, t] = v if layer.rotary is None else slow_rotation(v, positions[t], layer.rotary)
    return located


def slow_score(layer, n, q, k):
    """Return the score of one query and one key in head n."""
    if layer.metric_diagonal is not None:
        k = layer.metric_diagonal[n] * k
    scale = math.sqrt(len(q)) * layer.temperature
    if layer.metric_factor is not None:
        q, k = layer.metric_factor[n] @ q, layer.metric_factor[n] @ k
    return sum(a * b for a, b in zip(q, k, strict=True)) / scale


def slow_weights(layer, q, k, mask, sink=None):
    """Return the softmax over the allowed keys and each head's sink, row by row; fully masked rows are 0."""
    H, T, S = len(q), q.shape[1], k.shape[1]
    weights = np.zeros((H, T, S))
    for n in range(H):
        for i in range(T):
            boltzmann = {}
            for j in range(S):
                near = layer.window is None or abs(i - j) < layer.window
                if near and (not layer.causal or j <= i) and (mask is None or mask[n, i, j]):
                    boltzmann[j] = math.exp(slow_score(layer, n, q[n, i], k[n * len(k) // H, j]))
            for j, factor in boltzmann.items():
                weights[n, i, j] = factor / (sum(boltzmann.values()) + (0 if sink is None else math.exp(sink[n])))
    return weights


def slow_layer(layer, x, context=None, mask=None, positions=None):
    """Return output and weights of a layer on one sequence x (T, d), with a mask (H, T, S)."""
    attended = x if context is None else context
    positions = range(len(x)) if positions is None else positions

    def project(sequence, weight, bias):
        return np.stack([sequence @ w + (0 if bias is None else bias[n]) for n, w in enumerate(weight)])

    def gated(site, target, **raw):
        gate = layer.gates.at(site)
        return target if gate is None else slow_gate(gate, target, layer.gate_parameters[site], **raw)

    sink = None
    if layer.gates.at("partition") is not None:
        sink = -layer.gate_parameters["partition"].get("bias", np.zeros((len(layer.W_Q), 1)))[:, 0]

    query, key = project(x, layer.W_Q, layer.b_Q), project(attended, layer.W_K, layer.b_K)
    value = project(attended, layer.W_V, layer.b_V)
    raw = {"input": x, "context": context, "query": query, "value": value}
    q = slow_located(layer, gated("query", query, **raw), layer.q_norm, positions)
    key_positions = positions if context is None else range(len(context))
    k = slow_located(layer, gated("key", key, **raw), layer.k_norm, key_positions)
    v = gated("value", value, **raw)

    weights, taken = slow_weights(layer, q, k, mask), slow_weights(layer, q, k, mask, sink)
    output = np.stack([taken[n] @ v[n * len(v) // len(q)] for n in range(len(q))])
    heads = gated("output", output, **raw, output=output)
    y = sum(heads[n] @ layer.W_O[n] for n in range(len(heads))) + (0 if layer.b_O is None else layer.b_O)
    return gated("dense", y, **raw, output=output), weights
