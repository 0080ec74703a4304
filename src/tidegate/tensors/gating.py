r"""Compute gates: what they read, their logits, their values, and the tensors that they gate.

Shapes: `H` query heads, `G` key/value heads, `T` positions, `h` head width, `d` model width; heads first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tidegate.gate import Gate
from tidegate.tensors._checks import require_equal, require_floating, require_rank
from tidegate.tensors.activations import activate
from tidegate.tensors.attention import attention_scores, attention_weights, scaled_dot_product_attention
from tidegate.tensors.heads import merge_groups, repeat_heads
from tidegate.tensors.namespace import Array, Namespace, accumulate, namespace_of, unify
from tidegate.tensors.primitives import stop_gradient
from tidegate.tensors.random import normal, split


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSources:
    """All that a gate may read, raw: before other gates, norms and rotation. What is not there yet is None."""

    input: Array = None
    """(..., T, d): the layer's input."""
    context: Array = None
    """(..., S, d): what is attended to; None is the input itself, self-attention."""
    query: Array = None
    """(..., H, T, h)"""
    value: Array = None
    """(..., G, S, h)"""
    output: Array = None
    """(..., H, T, h): the attention output, a sink in its softmax included"""
    partition: Array = None
    """(..., H, T): the logarithm of the partition function; -inf for a query that may see nothing"""


def apply_gate(gate: Gate, target: Array, sources: GateSources, parameters: Mapping[str, Array]) -> Array:
    r"""Gate a tensor: $x \odot g$, $x + g$ for the op `add`, $g$ for `replace`, with $g = \phi(r W + b)$.

    target     : (..., heads, T, h) at the site's heads; (..., T, d) at the dense site
    parameters : arrays by name, of the shapes that `gate.parameter_shapes` gives
    returns    : like target
    """
    dense = gate.site == "dense"
    xp, target, reads, *arrays = unify(target=target, reads=gate_reads(gate, sources), **parameters)
    require_floating(target=target)
    require_rank("position, width" if dense else "heads, position, width", target=target)
    named = dict(zip(parameters, arrays, strict=True))
    values = gate_values(gate, reads, named, num_heads=1 if dense else target.shape[-3])
    values = values[..., 0, :, :] if dense else values
    require_equal("number of positions", target=target.shape[-2], gate=values.shape[-2])
    expected = 1 if gate.grain == "head" or gate.placebo == "constant" else target.shape[-1]
    if values.shape[-1] != expected:
        raise ValueError(f"Gate {gate} must give {expected} numbers for each head; got {values.shape[-1]}.")
    values = xp.astype(values, target.dtype, copy=False)
    match gate.op:
        case "multiply":
            return target * values
        case "add":
            return target + values
        case "replace":
            return values


def gate_reads(gate: Gate, sources: GateSources) -> Array:
    """What the gate reads, laid out for the heads that it acts on: (..., heads or 1, T, read width).

    A gate on the attended side reads the context, its group's queries side by side, or its own value; a gate on the
    attending side reads the input, its own query or output, or its group's value. The dense site reads all heads. A
    gate that reads nothing has the width 0. A shuffled one reads the next of the first axis, without a gradient.
    """
    if sources.context is not None:
        gate.require_cross_attention()
    if gate.is_blind:
        positions = sources.context if gate.on_source and sources.context is not None else sources.input
        return positions[..., None, :, :0]
    reads = _own_reads(gate, sources)
    if gate.placebo is not None:
        reads = stop_gradient(reads)
    if gate.placebo == "shuffled":
        gate.require_other_sequences(reads.shape[0] if reads.ndim > 3 else 1)
        reads = namespace_of(reads).roll(reads, -1, axis=0)
    return reads if gate.width is None else reads[..., : gate.width]


def gate_logits(gate: Gate, reads: Array, parameters: Mapping[str, Array], *, num_heads: int) -> Array:
    r"""Logits $r W + b$, or $r\,W_{down} W_{up} + b$ for a rank, in float32 or better.

    $r + b$ for the partition function and for the op `replace`, $b$ for a gate that reads nothing.

    reads   : (..., num_heads or 1, T, read width)
    returns : (..., num_heads, T, gated width)
    """
    matrices = {"weight"} if gate.rank is None else {"weight_down", "weight_up"}
    expected: set[str] = matrices if gate.has_matrix else set()
    expected = expected | {"bias"} if gate.has_bias else expected
    if set(parameters) != expected:
        raise ValueError(f"parameters of gate {gate} must be {sorted(expected)}; got {sorted(parameters)}.")
    xp, reads, *arrays = unify(reads=reads, **parameters)
    require_floating(reads=reads, **dict(zip(parameters, arrays, strict=True)))
    named = dict(zip(parameters, map(accumulate, arrays), strict=True))
    logits = accumulate(reads)
    if gate.is_blind:
        # Of its own width only once the bias is there.
        logits = xp.zeros_like(xp.sum(logits, axis=-1, keepdims=True) + xp.zeros((num_heads, 1, 1), dtype=logits.dtype))
    for name in ("weight", "weight_down", "weight_up"):
        if name in named:
            require_rank("heads, read width, gated width", exact=True, **{name: named[name]})
            require_equal("read width", **{name: named[name].shape[-2], "reads": logits.shape[-1]})
            _require_shared(gate, name, named[name], num_heads)
            logits = xp.matmul(logits, repeat_heads(named[name], num_heads))
    if "bias" in named:
        require_rank("heads, width", exact=True, bias=named["bias"])
        _require_shared(gate, "bias", named["bias"], num_heads)
        if gate.has_matrix:
            require_equal("gated width", bias=named["bias"].shape[-1], weight=logits.shape[-1])
        logits = logits + repeat_heads(named["bias"][:, None, :], num_heads)
    return logits + gate.bias if gate.placebo == "constant" and gate.bias else logits


def gate_values(gate: Gate, reads: Array, parameters: Mapping[str, Array], *, num_heads: int) -> Array:
    """The gate itself, activation of the logits, (..., num_heads, T, gated width) in float32 or better."""
    return activate(gate.activation, gate_logits(gate, reads, parameters, num_heads=num_heads))


def bilinearly_modulated_attention(
    Q: Array, K: Array, V: Array, W_g: Array, *, index: Literal["source", "query"] = "source", mask: Array | None = None
) -> Array:
    r"""Attention whose values pass a gate $g = \sigma(q W_g)$; the weights $A$ are those of plain attention.

    `source`: $o_i = \sum_j A_{ij} (g_j \odot v_j)$, the attended position's own query decides what it offers.
    `query` : $o_i = g_i \odot \sum_j A_{ij} v_j$, the attending query decides what it receives.

    Q       : (..., T, h), with heads (..., H, T, h)
    K, V    : (..., S, h); `source` needs S = T
    W_g     : (h, value width), with heads (H, h, value width)
    mask    : bool, broadcasts to (..., T, S), True = may attend; a row that may see nothing gives 0
    returns : (..., T, value width)
    """
    if index not in ("source", "query"):
        raise ValueError(f"index must be 'source' or 'query'; got {index!r}.")
    xp, Q, K, V, W_g, mask = unify(Q=Q, K=K, V=V, W_g=W_g, mask=mask)
    gate = _query_gate(xp, Q, V, W_g)
    if index == "query":
        return gate * scaled_dot_product_attention(Q, K, V, mask)
    if Q.shape[-2] != K.shape[-2]:
        raise ValueError(
            f"index='source' needs self-attention, one query for each key; got {Q.shape[-2]} queries and "
            f"{K.shape[-2]} keys. For cross-attention use index='query'."
        )
    return scaled_dot_product_attention(Q, K, gate * V, mask)


def naive_query_modulated_attention(Q: Array, K: Array, V: Array, W_g: Array, *, mask: Array | None = None) -> Array:
    r"""$\sum_j A_{ij} (g_i \odot v_j)$ as it is written, through a (T, S, h) tensor: the proof of the factored form.

    Arguments and result as `bilinearly_modulated_attention(..., index="query")`.
    """
    xp, Q, K, V, W_g, mask = unify(Q=Q, K=K, V=V, W_g=W_g, mask=mask)
    gate = _query_gate(xp, Q, V, W_g)
    weights = attention_weights(attention_scores(Q, K), mask)
    gated = gate[..., :, None, :] * V[..., None, :, :]
    return xp.sum(weights[..., None] * gated, axis=-2)


def init_gate_parameters(
    key: Any,
    gate: Gate,
    *,
    d_model: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, Array]:
    """Starting parameters: the matrix from N(0, init_std²), the bias at `gate.bias`.

    With a rank r, `weight_down` is drawn from N(0, 1/r) and `weight_up` from N(0, init_std²), so that their product has
    standard deviation init_std and an init_std of 0 starts at zero without stopping the gradient.

    key : a NumPy or PyTorch generator, or a JAX key; the arrays are of its kind
    """
    shapes = gate.parameter_shapes(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    deviations = {"weight": gate.init_std, "weight_up": gate.init_std, "weight_down": (gate.rank or 1) ** -0.5}
    parameters: dict[str, Array] = {}
    for (name, shape), source in zip(shapes.items(), split(key, len(shapes)), strict=True):
        noise = normal(source, shape)
        parameters[name] = noise * 0 + gate.bias if name == "bias" else noise * deviations[name]
    return parameters


def _own_reads(gate: Gate, sources: GateSources) -> Array:
    """What the gate reads of its own sequence, in full width."""
    source_side = gate.on_source
    match gate.reads:
        case "input":
            reads = sources.context if source_side and sources.context is not None else sources.input
            _require_source(gate, reads)
            reads = reads[..., None, :, :]
        case "query":
            _require_source(gate, sources.query)
            reads = sources.query
            if source_side:
                _require_source(gate, sources.value, name="value")
                reads = merge_groups(reads, sources.value.shape[-3])
        case "value":
            _require_source(gate, sources.value)
            reads = sources.value
            if not source_side:
                _require_source(gate, sources.query, name="query")
                reads = repeat_heads(reads, sources.query.shape[-3])
        case "output":
            _require_source(gate, sources.output)
            reads = merge_groups(sources.output, 1) if gate.site == "dense" else sources.output
        case "partition":
            _require_source(gate, sources.partition)
            reads = sources.partition[..., None]
        case "nothing":
            raise AssertionError("a gate that reads nothing is blind")
    return reads


def _query_gate(xp: Namespace, Q: Array, V: Array, W_g: Array) -> Array:
    require_floating(Q=Q, V=V, W_g=W_g)
    require_rank("position, width", Q=Q, V=V)
    require_rank("width, value width", W_g=W_g)
    require_equal("width", Q=Q.shape[-1], W_g=W_g.shape[-2])
    require_equal("value width", V=V.shape[-1], W_g=W_g.shape[-1])
    logits = xp.matmul(accumulate(Q), accumulate(W_g))
    return xp.astype(activate("sigmoid", logits), V.dtype, copy=False)


def _require_source(gate: Gate, source: Array | None, *, name: str | None = None) -> None:
    if source is None:
        raise ValueError(f"Gate {gate} needs GateSources.{name or gate.reads}, which is None.")


def _require_shared(gate: Gate, name: str, parameter: Array, num_heads: int) -> None:
    given = parameter.shape[0]
    fits = {"head": given == num_heads, "group": num_heads % given == 0, "layer": given == 1}[gate.share]
    if not fits:
        wanted = {"head": f"{num_heads}", "group": f"a divisor of {num_heads}", "layer": "1"}[gate.share]
        raise ValueError(
            f"{name} must have as many heads as share={gate.share!r} asks for over {num_heads} gated heads, {wanted}; "
            f"got {given}."
        )
