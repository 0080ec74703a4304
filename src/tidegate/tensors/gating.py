r"""Gates: their sources, logits and values, and the tensors that they gate.

Shapes: `H` query heads, `G` key/value heads, `T` positions, `h` head width, `d` model width; heads first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tidegate._validation import InputError
from tidegate.gate import Gate
from tidegate.tensors._checks import check_arrays, require_floating, require_rank
from tidegate.tensors.activations import activate
from tidegate.tensors.attention import attention_scores, attention_weights, scaled_dot_product_attention
from tidegate.tensors.heads import merge_groups, repeat_heads
from tidegate.tensors.namespace import Array, Namespace, accumulate, namespace_of, stop_gradient, unify
from tidegate.tensors.random import normal, split


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSources:
    """The arrays that a gate may read, before other gates, norms and rotation; None if not available."""

    input: Array = None
    """(..., T, d): the layer's input."""
    context: Array = None
    """(..., S, d): the attended sequence; None is the input itself, self-attention."""
    query: Array = None
    """(..., H, T, h)"""
    value: Array = None
    """(..., G, S, h)"""
    output: Array = None
    """(..., H, T, h): the attention output, including any sink"""
    partition: Array = None
    """(..., H, T): the logarithm of the partition function; -inf for a fully masked query"""


def apply_gate(gate: Gate, target: Array, sources: GateSources, parameters: Mapping[str, Array]) -> Array:
    r"""Gate a tensor: $x \odot g$, $x + g$ for the op `add`, $g$ for `replace`, with $g = \phi(r W + b)$.

    Args:
        gate: The gate.
        target: (..., heads, T, h) at the site's heads; (..., T, d) at the dense site
        sources: The arrays that the gate may read.
        parameters: Arrays by name, of the shapes of `gate.parameter_shapes`.
    """
    dense = gate.site == "dense"
    xp, target, reads, *arrays = unify(target=target, reads=gate_reads(gate, sources), **parameters)
    require_floating(target=target)
    require_rank("..., position, width" if dense else "..., heads, position, width", target=target)
    named = dict(zip(parameters, arrays, strict=True))
    values = gate_values(gate, reads, named, num_heads=1 if dense else target.shape[-3])
    values = values[..., 0, :, :] if dense else values
    if target.shape[-2] != values.shape[-2]:
        raise InputError("target", expected=f"of length {values.shape[-2]}, like the gate", got=target.shape[-2])
    width = 1 if gate.grain == "head" or gate.placebo == "constant" else target.shape[-1]
    if values.shape[-1] != width:
        expected = f"of gated width {width} for gate {gate}"
        raise InputError("parameters", expected=expected, got=values.shape[-1])
    values = xp.astype(values, target.dtype, copy=False)
    match gate.op:
        case "multiply":
            return target * values
        case "add":
            return target + values
        case "replace":
            return values


def gate_reads(gate: Gate, sources: GateSources) -> Array:
    """Return the gate's source in the layout of the gated heads: (..., heads or 1, T, read width).

    A gate on the attended side reads the context, the concatenated queries of its group, or its own value; a gate on
    the attending side reads the input, its own query or output, or its group's value. The dense site reads all heads.
    A gate that reads nothing has width 0. A shuffled gate reads the next row of the first axis, without a gradient.
    """
    if sources.context is not None:
        gate.require_cross_attention()
    if gate.is_input_independent:
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
    r"""Return logits $r W + b$, or $r\,W_{down} W_{up} + b$ for a rank, in float32 or better.

    Without a matrix they are $r + b$; for a gate that reads nothing, $b$.

    Args:
        gate: The gate.
        reads: (..., num_heads or 1, T, read width)
        parameters: Arrays by name.
        num_heads: Heads of the gated tensor.

    Returns:
        (..., num_heads, T, gated width)
    """
    matrices = {"weight"} if gate.rank is None else {"weight_down", "weight_up"}
    expected: set[str] = matrices if gate.has_matrix else set()
    expected = expected | {"bias"} if gate.has_bias else expected
    if set(parameters) != expected:
        raise InputError("parameters", expected=f"{sorted(expected)} for gate {gate}", got=sorted(parameters))
    xp, reads, *arrays = unify(reads=reads, **parameters)
    require_floating(reads=reads, **dict(zip(parameters, arrays, strict=True)))
    named = dict(zip(parameters, map(accumulate, arrays), strict=True))
    logits = accumulate(reads)
    if gate.is_input_independent:
        # The bias defines the width.
        logits = xp.zeros_like(xp.sum(logits, axis=-1, keepdims=True) + xp.zeros((num_heads, 1, 1), dtype=logits.dtype))
    for name in ("weight", "weight_down", "weight_up"):
        if name in named:
            require_rank("heads, read width, gated width", **{name: named[name]})
            if named[name].shape[-2] != logits.shape[-1]:
                raise InputError(name, expected=f"of read width {logits.shape[-1]}", got=named[name].shape[-2])
            _require_shared(gate, name, named[name], num_heads)
            logits = xp.matmul(logits, repeat_heads(named[name], num_heads))
    if "bias" in named:
        require_rank("heads, width", bias=named["bias"])
        _require_shared(gate, "bias", named["bias"], num_heads)
        if gate.has_matrix and named["bias"].shape[-1] != logits.shape[-1]:
            raise InputError("bias", expected=f"of gated width {logits.shape[-1]}", got=named["bias"].shape[-1])
        logits = logits + repeat_heads(named["bias"][:, None, :], num_heads)
    return logits + gate.bias if gate.placebo == "constant" and gate.bias else logits


def gate_values(gate: Gate, reads: Array, parameters: Mapping[str, Array], *, num_heads: int) -> Array:
    """Return the activation of the logits, (..., num_heads, T, gated width), in float32 or better."""
    return activate(gate.activation, gate_logits(gate, reads, parameters, num_heads=num_heads))


def bilinearly_modulated_attention(
    Q: Array, K: Array, V: Array, W_g: Array, *, index: Literal["source", "query"] = "source", mask: Array | None = None
) -> Array:
    r"""Return attention whose values pass a gate $g = \sigma(q W_g)$; the weights $A$ are those of plain attention.

    `source`: $o_i = \sum_j A_{ij} (g_j \odot v_j)$, the query at the attended position gates.
    `query` : $o_i = g_i \odot \sum_j A_{ij} v_j$, the attending query gates.

    Args:
        Q: (..., T, h), with heads (..., H, T, h)
        K: (..., S, h); `source` needs S = T
        V: (..., S, value width)
        W_g: (h, value width), with heads (H, h, value width)
        index: The gating query, `source` or `query`.
        mask: bool, broadcasts to (..., T, S), True = may attend; a fully masked row gives 0

    Returns:
        (..., T, value width)
    """
    if index not in ("source", "query"):
        raise InputError("index", expected="'source' or 'query'", got=index)
    xp, Q, K, V, W_g, mask = unify(Q=Q, K=K, V=V, W_g=W_g, mask=mask)
    gate = _query_gate(xp, Q, V, W_g)
    if index == "query":
        return gate * scaled_dot_product_attention(Q, K, V, mask)
    if Q.shape[-2] != K.shape[-2]:
        expected = f"one query for each of the {K.shape[-2]} keys, as in self-attention, for index='source'"
        raise InputError("Q", expected=expected, got=Q.shape[-2], hint="For cross-attention use index='query'.")
    return scaled_dot_product_attention(Q, K, gate * V, mask)


def naive_query_modulated_attention(Q: Array, K: Array, V: Array, W_g: Array, *, mask: Array | None = None) -> Array:
    r"""Return $\sum_j A_{ij} (g_i \odot v_j)$ by definition, through a (T, S, h) tensor, to check the factored form.

    Arguments and result as in `bilinearly_modulated_attention(..., index="query")`.
    """
    xp, Q, K, V, W_g, mask = unify(Q=Q, K=K, V=V, W_g=W_g, mask=mask)
    gate = _query_gate(xp, Q, V, W_g)
    weights = attention_weights(attention_scores(Q, K), mask)
    gated = gate[..., :, None, :] * V[..., None, :, :]
    return xp.sum(weights[..., None] * gated, axis=-2)


def init_gate_parameters(
    key: Any, gate: Gate, *, d_model: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Array]:
    """Return initial parameters: the matrix from N(0, init_std²), the bias at `gate.bias`.

    With a rank r, `weight_down` is drawn from N(0, 1/r) and `weight_up` from N(0, init_std²), so that their product has
    standard deviation init_std and an init_std of 0 starts at zero without stopping the gradient.

    Args:
        key: A NumPy or PyTorch generator, or a JAX key; the arrays are of its library.
        gate: The gate.
        d_model: Width of the layer.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; None is num_heads.
        head_dim: Width of a head; None is d_model / num_heads.
    """
    shapes = gate.parameter_shapes(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    deviations = {"weight": gate.init_std, "weight_up": gate.init_std, "weight_down": (gate.rank or 1) ** -0.5}
    parameters: dict[str, Array] = {}
    for (name, shape), source in zip(shapes.items(), split(key, len(shapes)), strict=True):
        noise = normal(source, shape)
        parameters[name] = noise * 0 + gate.bias if name == "bias" else noise * deviations[name]
    return parameters


def _own_reads(gate: Gate, sources: GateSources) -> Array:
    """Return the gate's source in full width, before the changes that make a placebo."""

    def source(name: str) -> Array:
        array = getattr(sources, name)
        if array is None:
            raise InputError(f"GateSources.{name}", expected=f"an array for gate {gate}", got=None)
        return array

    match gate.reads:
        case "input":
            on_context = gate.on_source and sources.context is not None
            return source("context" if on_context else "input")[..., None, :, :]
        case "query":
            query = source("query")
            return merge_groups(query, source("value").shape[-3]) if gate.on_source else query
        case "value":
            value = source("value")
            return value if gate.on_source else repeat_heads(value, source("query").shape[-3])
        case "output":
            output = source("output")
            return merge_groups(output, 1) if gate.site == "dense" else output
        case "partition":
            return source("partition")[..., None]
        case "nothing":
            raise AssertionError("a gate that reads nothing has no source")


def _query_gate(xp: Namespace, Q: Array, V: Array, W_g: Array) -> Array:
    check_arrays(Q=(Q, "..., query, width"), V=(V, "..., key, value width"), W_g=(W_g, "..., width, value width"))
    logits = xp.matmul(accumulate(Q), accumulate(W_g))
    return xp.astype(activate("sigmoid", logits), V.dtype, copy=False)


def _require_shared(gate: Gate, name: str, parameter: Array, num_heads: int) -> None:
    given = parameter.shape[0]
    fits, wanted = {
        "head": (given == num_heads, f"{num_heads}"),
        "group": (num_heads % given == 0, f"a divisor of {num_heads}"),
        "layer": (given == 1, "1"),
    }[gate.share]
    if not fits:
        expected = f"for {wanted} heads with share={gate.share!r} and {num_heads} gated heads"
        raise InputError(name, expected=expected, got=given)
