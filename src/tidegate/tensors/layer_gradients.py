"""Backward passes of any gate and of a whole attention layer, derived by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from tidegate.gate import Gate, GatePath
from tidegate.tensors._checks import require_floating, require_same_shape
from tidegate.tensors.activations import activate, activation_slope
from tidegate.tensors.attention import attention_output
from tidegate.tensors.autodiff import gradients
from tidegate.tensors.gating import GateSources, gate_logits, gate_reads
from tidegate.tensors.gradients import (
    grad_output_wrt_A,
    grad_output_wrt_V,
    grad_scores_wrt_K,
    grad_scores_wrt_Q,
    grad_softmax,
    gradients_agree,
)
from tidegate.tensors.heads import repeat_heads, split_groups, sum_groups
from tidegate.tensors.layer import AttentionArrays, LayerTrace, project
from tidegate.tensors.namespace import Array, accumulate, namespace_of, sum_to_shape, unify
from tidegate.tensors.rotary import rotate


class GateGradients(NamedTuple):
    """The gradients of a gate's target, of the one source that it reads, and of its parameters."""

    target: Array
    source: Array | None
    """None if the gate passes no gradient to what it reads."""
    parameters: dict[str, Array]


def gate_backward(
    gate: Gate, dL_dgated: Array, target: Array, sources: GateSources, parameters: Mapping[str, Array]
) -> GateGradients:
    r"""Return the gradients of `apply_gate`: with $z = r W + b$, $g = \phi(z)$, $dL/dz = (x \odot dL/dy)\,\phi'(z)$.

    A gate of head grain sums over the features that it serves; the parameters' gradients sum over batch and positions.

    dL_dgated is like target, other arguments are those of `apply_gate`.

    Returns:
        Gradients like target, like the source that `gate.reads` names (the context, for a gate on the attended side of
        cross-attention that reads the input), and like each parameter
    """
    dense = gate.site == "dense"
    if dense:
        target, dL_dgated = target[..., None, :, :], dL_dgated[..., None, :, :]
    reads = gate_reads(gate, sources)
    logits = gate_logits(gate, reads, parameters, num_heads=target.shape[-3])
    values = activate(gate.activation, logits)
    dL_dtarget = {"multiply": dL_dgated * values, "add": dL_dgated, "replace": 0 * dL_dgated}[gate.op]
    dL_dvalues = dL_dgated * target if gate.op == "multiply" else dL_dgated
    if gate.grain == "head":
        dL_dvalues = namespace_of(target).sum(dL_dvalues, axis=-1, keepdims=True)
    dL_dlogits = dL_dvalues * activation_slope(gate.activation, logits)
    dL_dreads, dL_dparameters = _linear_backward(dL_dlogits, reads, parameters)
    return GateGradients(
        target=dL_dtarget[..., 0, :, :] if dense else dL_dtarget,
        source=None
        if gate.is_input_independent or gate.placebo is not None
        else _reads_backward(gate, dL_dreads, sources),
        parameters=dL_dparameters,
    )


def layer_backward(
    layer: AttentionArrays,
    x: Array,
    dL_dy: Array,
    *,
    context: Array | None = None,
    mask: Array | None = None,
    positions: Array | None = None,
) -> dict[str, Array]:
    """Return the gradients of the whole layer: for x, for the context if there is one, and for each parameter.

    dL_dy is (..., T, d); other arguments are those of `AttentionArrays.trace`.

    Returns:
        Arrays by name, `x`, `context` and the names of `layer.parameters()`, each of the shape of its array
    """
    layer, x, context, mask = layer.of_kind(x, context, mask)
    xp, _, dL_dy = unify(x=x, dL_dy=dL_dy)
    require_floating(dL_dy=dL_dy)
    trace = layer.trace(x, context=context, mask=mask, positions=positions)
    require_same_shape(output=trace.output, dL_dy=dL_dy)
    sources = trace.sources
    attended = x if context is None else context
    found: dict[str, Array] = {}
    through_gates: dict[str, Array] = {}

    def ungate(path: GatePath, dL_dgated: Array, target: Array) -> Array:
        gate = layer.gates.at(path)
        if gate is None:
            return dL_dgated
        back = gate_backward(gate, dL_dgated, target, sources, layer.gate_parameters[path])
        found.update({f"gate.{path}.{name}": array for name, array in back.parameters.items()})
        if back.source is None:
            return back.target
        source = "context" if gate.reads == "input" and gate.on_source and context is not None else gate.reads
        through_gates[source] = through_gates.get(source, 0) + back.source
        return back.target

    dL_dprojected = ungate("dense", dL_dy, trace.projected)
    found["W_O"] = _sum_batch(xp.einsum("...htk,...td->...hkd", trace.heads, dL_dprojected), keep=3)
    found["b_O"] = _sum_batch(dL_dprojected, keep=1)
    dL_dheads = xp.einsum("...td,hkd->...htk", dL_dprojected, layer.W_O)
    dL_doutput = ungate("output", dL_dheads, sources.output) + through_gates.get("output", 0)
    if layer.gates.at("partition") is not None:
        attended_value = repeat_heads(trace.value, trace.query.shape[-3])
        dL_doutput = ungate("partition", dL_doutput, attention_output(trace.weights, attended_value))

    raw_key = project(attended, layer.W_K, layer.b_K)
    gated_query = layer.apply_gate_at("query", sources.query, sources)
    gated_key = layer.apply_gate_at("key", raw_key, sources)
    dL_dquery, dL_dkey, dL_dvalue = _attention_backward(layer, trace, dL_doutput, through_gates.get("partition"))
    dL_dquery, metric = _metric_backward(layer, layer.norm_and_rotate(gated_query, layer.q_norm, positions), dL_dquery)
    dL_dquery, found["q_norm"] = _norm_and_rotate_backward(layer, gated_query, layer.q_norm, positions, dL_dquery)
    key_positions = positions if context is None else None
    dL_dkey, found["k_norm"] = _norm_and_rotate_backward(layer, gated_key, layer.k_norm, key_positions, dL_dkey)

    dL_dquery, dL_dkey = ungate("query", dL_dquery, sources.query), ungate("key", dL_dkey, raw_key)
    dL_dvalue = ungate("value", dL_dvalue, sources.value) + through_gates.get("value", 0)
    dL_dquery = dL_dquery + through_gates.get("query", 0)
    dL_dx, found["W_Q"], found["b_Q"] = _project_backward(x, layer.W_Q, dL_dquery)
    from_key, found["W_K"], found["b_K"] = _project_backward(attended, layer.W_K, dL_dkey)
    from_value, found["W_V"], found["b_V"] = _project_backward(attended, layer.W_V, dL_dvalue)
    dL_dx = dL_dx + through_gates.get("input", 0)
    dL_dattended = from_key + from_value + through_gates.get("context", 0)
    if context is None:
        inputs = {"x": dL_dx + dL_dattended}
    else:
        inputs = {"x": sum_to_shape(dL_dx, tuple(x.shape)), "context": sum_to_shape(dL_dattended, tuple(context.shape))}
    return inputs | {name: (found | metric)[name] for name in layer.parameters()}


def verify_layer_gradients(
    layer: AttentionArrays,
    x: Array,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    *,
    context: Array | None = None,
    mask: Array | None = None,
    positions: Array | None = None,
) -> dict[str, bool]:
    r"""Compare `layer_backward` with the library's own gradients for $L = \frac12 \sum y^2$, name by name.

    The reference is automatic differentiation for JAX and PyTorch arrays, central differences for NumPy arrays.

    Returns:
        dL_dx, dL_dcontext if there is one, dL_d<name> for each of `layer.parameters()`, and all_correct
    """
    layer, x, context, mask = layer.of_kind(x, context, mask)
    arrays = {"x": x} | ({} if context is None else {"context": context}) | layer.parameters()

    def output(named: Mapping[str, Array]) -> Array:
        inputs = {name: named[name] for name in ("x", "context") if name in named}
        moved = layer.with_parameters({name: array for name, array in named.items() if name not in inputs})
        return moved(**inputs, mask=mask, positions=positions)

    def loss(named: Mapping[str, Array]) -> Array:
        y = output(named)
        return namespace_of(y).sum(y * y) / 2

    analytic = layer_backward(layer, x, output(arrays), context=context, mask=mask, positions=positions)
    by_name = {f"dL_d{name}": array for name, array in analytic.items()}
    return gradients_agree(by_name, gradients(loss, arrays), rtol=rtol, atol=atol)


def _linear_backward(
    dL_dlogits: Array, reads: Array, parameters: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Return the gradients of `gate_logits`: for what it reads, (..., heads, T, width), and for the parameters."""
    xp = namespace_of(dL_dlogits)
    num_heads = dL_dlogits.shape[-3]
    found: dict[str, Array] = {}
    if "bias" in parameters:
        summed = xp.sum(_sum_batch(dL_dlogits, keep=3), axis=-2, keepdims=True)
        found["bias"] = sum_groups(summed, parameters["bias"].shape[0])[:, 0, :]
    steps: list[tuple[str, Array, Array]] = []
    inputs = accumulate(reads)
    for name in ("weight", "weight_down", "weight_up"):
        if name in parameters:
            weight = repeat_heads(parameters[name], num_heads)
            steps.append((name, inputs, weight))
            inputs = xp.matmul(inputs, weight)
    dL = dL_dlogits
    for name, inputs, weight in reversed(steps):
        product = xp.matmul(xp.moveaxis(inputs, -1, -2), dL)
        found[name] = sum_groups(_sum_batch(product, keep=3), parameters[name].shape[0])
        dL = xp.matmul(dL, xp.moveaxis(weight, -1, -2))
    return dL, found


def _reads_backward(gate: Gate, dL_dreads: Array, sources: GateSources) -> Array:
    """Return the gradient of `gate_reads`, from the gate's layout to that of the source."""
    xp = namespace_of(dL_dreads)
    if gate.width is not None:
        unread = gate_reads(replace(gate, width=None), sources).shape[-1] - gate.width
        zeros = xp.zeros_like(dL_dreads[..., :1])
        dL_dreads = xp.concat([dL_dreads] + [zeros] * unread, axis=-1)
    match gate.reads:
        case "input":
            return xp.sum(dL_dreads, axis=-3)
        case "query" if gate.on_source:
            return split_groups(dL_dreads, sources.query.shape[-3] // sources.value.shape[-3])
        case "value" if not gate.on_source:
            return sum_groups(dL_dreads, sources.value.shape[-3])
        case "output" if gate.site == "dense":
            return split_groups(dL_dreads, sources.output.shape[-3])
        case "partition":
            return dL_dreads[..., 0]
        case "nothing":
            raise AssertionError("a gate that reads nothing has no gradient for it")
        case _:
            return dL_dreads


def _attention_backward(
    layer: AttentionArrays, trace: LayerTrace, dL_doutput: Array, dL_dpartition: Array | None
) -> tuple[Array, Array, Array]:
    """Return the gradients of the trace's query, key and value; grouped ones are summed over their heads.

    dL_dpartition, (..., H, T), is for the logarithm of the partition function, whose slope by a score is its weight.
    """
    num_heads, num_kv_heads, width = trace.query.shape[-3], trace.key.shape[-3], trace.query.shape[-1]
    scale = width**-0.5 / layer.temperature
    dL_dweights = grad_output_wrt_A(dL_doutput, repeat_heads(trace.value, num_heads))
    dL_dscores = grad_softmax(dL_dweights, trace.weights)
    if dL_dpartition is not None:
        dL_dscores = dL_dscores + trace.weights * dL_dpartition[..., None]
    return (
        grad_scores_wrt_Q(dL_dscores, repeat_heads(trace.key, num_heads), scale),
        sum_groups(grad_scores_wrt_K(dL_dscores, trace.query, scale), num_kv_heads),
        sum_groups(grad_output_wrt_V(dL_doutput, trace.weights), num_kv_heads),
    )


def _metric_backward(layer: AttentionArrays, query: Array, dL: Array) -> tuple[Array, dict[str, Array]]:
    """Return the gradients of `AttentionArrays.under_metric`; a symmetric metric is its own transpose."""
    xp = namespace_of(query)
    if layer.metric_diagonal is not None:
        return layer.under_metric(dL), {"metric_diagonal": xp.sum(_sum_batch(query * dL, keep=3), axis=-2)}
    if layer.metric_factor is not None:
        outer = _sum_batch(xp.matmul(xp.moveaxis(query, -1, -2), dL), keep=3)
        symmetric = outer + xp.moveaxis(outer, -1, -2)
        return layer.under_metric(dL), {"metric_factor": xp.matmul(layer.metric_factor, symmetric)}
    return dL, {}


def _norm_and_rotate_backward(
    layer: AttentionArrays, x: Array, norm: Array | None, positions: Array | None, dL: Array
) -> tuple[Array, Array | None]:
    """Return the gradients of `AttentionArrays.norm_and_rotate`: for x, and for the scale of the norm."""
    xp = namespace_of(x)
    if layer.rotary is not None:
        dL = rotate(dL, -layer.angles(x, positions))
    if norm is None:
        return dL, None
    inverse = 1 / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + layer.norm_epsilon)
    dL_dscale = _sum_batch(dL * x * inverse, keep=1)
    scaled = dL * norm
    return inverse * (scaled - x * inverse**2 * xp.mean(scaled * x, axis=-1, keepdims=True)), dL_dscale


def _project_backward(x: Array, weight: Array, dL: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of `project`: for x, the weight and the bias."""
    xp = namespace_of(x)
    dL_dx = xp.einsum("...htk,hdk->...td", dL, weight)
    dL_dweight = _sum_batch(xp.einsum("...td,...htk->...hdk", x, dL), keep=3)
    return dL_dx, dL_dweight, xp.sum(_sum_batch(dL, keep=3), axis=-2)


def _sum_batch(x: Array, *, keep: int) -> Array:
    """Sum over all but the last `keep` axes."""
    leading = tuple(range(x.ndim - keep))
    return namespace_of(x).sum(x, axis=leading) if leading else x
