"""Gated attention as a PyTorch layer, at the speed of the plain fused kernel.

Legend: B batch, T query positions, S attended positions, M model width, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tidegate._validation import require_positions_shape
from tidegate.config import AttentionConfig, MetricKind, Rotary
from tidegate.gate import GatePath
from tidegate.gates import GateLike, require_layer_inputs
from tidegate.tensors.layer import METRIC_FIELDS, AttentionArrays
from tidegate.torch.cache import AttentionCache, CacheOwner, KVCache, cached_positions
from tidegate.torch.gate import AttentionGate, AttentionGates, GateReads
from tidegate.torch.kernel import attend, inside_transform, require_no_tracing
from tidegate.torch.masks import AttentionMask, combine_masks, require_documents, require_mask
from tidegate.torch.metric import HeadMetric
from tidegate.torch.precision import require_dtype, require_tensor
from tidegate.torch.rotary import RotaryTables, rotary_tables, rotate
from tidegate.torch.sink import attend_with_sink, log_partition
from tidegate.torch.windows import attend_without_mask

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Names of the linear maps, as in models of transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTrace:
    """What one forward pass worked with, as the kernel saw it."""

    query: Tensor
    """(B, H, T, D): gated, normalised, rotated, under the metric."""
    key: Tensor
    """(B, G, S, D): cached positions included, those out of a single query's window left out."""
    value: Tensor
    """(B, G, S, D): gated, of the same positions."""
    mask: Tensor | None
    """What the kernel was given beside `causal`."""
    causal: bool
    scale: float
    output: Tensor
    """(B, T, H, D): the attention output before an output gate, after a sink has taken its share."""
    gates: dict[str, Tensor]
    """Every gate's values by path: (B, positions, heads, D or 1), at the dense site (B, T, M)."""


@final
class Traces(list[AttentionTrace]):
    """A list of traces; a class of its own, because FSDP passes copies of plain lists on to the modules inside."""


class _Attended(NamedTuple):
    """The attention output (B, H, T, D), and the keys, values, mask and causality that it was made with."""

    output: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool


class GatedAttention(nn.Module):
    """Multi-head attention with any gates of the vocabulary.

    The order of work: project, gate the query, key and value, normalise, rotate, apply the metric, attend, gate the
    output, project, gate the result. Every gate reads raw projections. Value and key gates act before the cache. A
    learned metric mixes what the rotation has turned, so that with both the scores depend on absolute positions.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        gate: GateLike = "bma",
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        rope: Rotary | bool | None = None,
        qk_norm: bool = False,
        metric: MetricKind | None = None,
        temperature: float = 1.0,
        dropout: float = 0.0,
        bias: bool = False,
        recompute_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the layer.

        Args:
            d_model: Width of the input and of the output.
            num_heads: Number of query heads.
            gate: A spelling such as `"bma"` or `"g1+g2"`, a `Gate`, or several; `"none"` is plain attention.
            num_kv_heads: Number of key/value heads, a divisor of `num_heads`; None has as many as query heads.
            head_dim: Width of a head; None is `d_model / num_heads`.
            causal: Whether a query sees no later position.
            window: Number of keys that a query sees, itself included, to both sides unless causal; None is all.
            rope: A rotary embedding; True is the usual one, None and False none.
            qk_norm: Whether queries and keys pass a root-mean-square norm, one scale for all heads.
            metric: A metric of each head, the identity at the start; None is the plain product.
            temperature: Divides the attention scores.
            dropout: Share of the attention weights that is dropped in training; it builds the score matrix.
            bias: Whether the projections have biases.
            recompute_gate: Whether to compute gates again in the backward pass instead of keeping their results.
            device: Where the parameters live.
            dtype: Of the parameters.
        """
        super().__init__()
        config = AttentionConfig(
            d_model=d_model,
            num_heads=num_heads,
            gate=gate,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            causal=causal,
            window=window,
            rope=rope,
            qk_norm=qk_norm,
            metric=metric,
            temperature=temperature,
            dropout=dropout,
            bias=bias,
            recompute_gate=recompute_gate,
        )
        self.shape = shape = config.shape
        self.gates = config.gates
        self.causal = config.causal
        self.dropout = config.dropout
        self.rotary = config.rotary
        self.window = config.window
        self.temperature = config.temperature
        self.recompute_gate = config.recompute_gate
        self.rotary_width = 0 if self.rotary is None else self.rotary.width(shape.head_dim)
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(d_model, width, bias=config.bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(d_model, kv_width, bias=config.bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(d_model, kv_width, bias=config.bias, device=device, dtype=dtype)
        self.o_proj = nn.Linear(width, d_model, bias=config.bias, device=device, dtype=dtype)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(shape.head_dim, eps=_NORM_EPSILON, device=device, dtype=dtype) if config.qk_norm else None
            for _ in range(2)
        )
        self.metric = None if config.metric is None else HeadMetric(config.metric, shape, device=device, dtype=dtype)
        self.attn_gate = AttentionGates(self.gates, shape, device=device, dtype=dtype)
        self._cache_owner = CacheOwner()

    @staticmethod
    def from_config(
        config: AttentionConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> GatedAttention:
        """Build the layer that a configuration describes."""
        options: dict[str, Any] = {option.name: getattr(config, option.name) for option in fields(config)}
        return GatedAttention(**options, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as a layer needs that was made on the meta device."""
        for module in self.modules():
            if module is not self and isinstance(reset := getattr(module, "reset_parameters", None), Callable):
                reset()

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | RotaryTables | None = None,
        documents: Tensor | None = None,
        traces: Traces | None = None,
    ) -> Tensor:
        """Return the layer's output (B, T, M).

        Args:
            x: (B, T, M).
            context: (B, S, M) for cross-attention; None attends to x.
            mask: bool (True = attend) or additive float, broadcasting to (B, H, T, S), S counting cached positions too.
                A row that may see nothing gives 0 (through the output projection: its bias).
            cache: Continues from its positions, and takes the new ones.
            positions: (T,) or (B, T) for the rotary embedding, or the `RotaryTables` of them; None continues from the
                cache.
            documents: (B, T) ids of packed documents, or `cu_seqlens` boundaries of a single packed row.
            traces: Receives the trace of this call; see `trace`.
        """
        require_no_tracing()
        require_layer_inputs(
            self.gates,
            self.shape.d_model,
            x=x.shape,
            context=None if context is None else context.shape,
            ordered=self.causal or self.window is not None,
            has_cache=cache is not None,
            packed=None if documents is None else "documents",
        )
        if documents is not None:
            require_documents(documents, batch=x.shape[0], num_positions=x.shape[1])
        num_cached = 0 if cache is None else self.claim(cache)
        context_BSM = x if context is None else context
        try:
            q_BTHD = self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim))
            k_BSGD = self.k_proj(context_BSM).unflatten(-1, (-1, self.shape.head_dim))
            v_BSGD = self.v_proj(context_BSM).unflatten(-1, (-1, self.shape.head_dim))
        except (RuntimeError, TypeError):
            # Not before: a projection may take other dtypes, as under autocast. A quantized one has a method `weight`.
            if isinstance(self.q_proj.weight, Tensor):
                require_dtype(self.q_proj.weight.dtype, x=x, context=context)
            raise
        gate_values: dict[str, Tensor] | None = None if traces is None else {}
        reads = GateReads(input=x, context=context_BSM, query=q_BTHD, value=v_BSGD)
        q_BTHD = self._gate("query", q_BTHD, reads, gate_values)
        k_BSGD = self._gate("key", k_BSGD, reads, gate_values)
        v_BSGD = self._gate("value", v_BSGD, reads, gate_values)

        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BSGD = normalize_heads(self.q_norm, q_BTHD), normalize_heads(self.k_norm, k_BSGD)
        if not isinstance(positions, RotaryTables):
            positions = self.rotary_tables(x, positions, start=num_cached)
        k_tables = positions if context is None else self.rotary_tables(context, None)
        if positions is not None and k_tables is not None:
            q_BTHD, k_BSGD = rotate(q_BTHD, positions), rotate(k_BSGD, k_tables)
        q_BTHD = q_BTHD if self.metric is None else self.metric(q_BTHD)
        q_BHTD, k_BGSD, v_BGSD = q_BTHD.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2)
        if mask is not None and isinstance(cache, KVCache):
            # Before the cache takes anything, so that a rejected call leaves it as it was.
            self._require_mask(mask, q_BHTD, num_keys=num_cached + k_BGSD.shape[2])
        if cache is not None:
            k_BGSD, v_BGSD = cache.update(k_BGSD, v_BGSD)

        allowed = AttentionMask(self.causal, self.window, mask, documents)
        attended = self._attend(q_BHTD, k_BGSD, v_BGSD, allowed, whole=traces is not None)
        reads.output = o_BTHD = self._gate_by_partition(q_BHTD, attended, reads, gate_values)
        y_BTM = self._gate("dense", self._project_out(reads, gate_values), reads, gate_values)
        if traces is not None and gate_values is not None:
            trace = AttentionTrace(
                query=q_BHTD,
                key=attended.key,
                value=attended.value,
                mask=attended.mask,
                causal=attended.causal,
                scale=self.scale,
                output=o_BTHD,
                gates=gate_values,
            )
            traces.append(trace)
        return y_BTM

    if TYPE_CHECKING:
        __call__ = forward

    def trace(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | RotaryTables | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, AttentionTrace]:
        """Return the output of `forward` and the tensors that it worked with."""
        traces = Traces()
        y_BTM = self(
            x, context=context, mask=mask, cache=cache, positions=positions, documents=documents, traces=traces
        )
        return y_BTM, traces[0]

    def claim(self, cache: AttentionCache) -> int:
        """Return how many positions the cache holds; what is no cache, or another layer's, is refused."""
        return cached_positions(cache, self._cache_owner)

    def rotary_tables(self, x: Tensor, positions: Tensor | None, *, start: int = 0) -> RotaryTables | None:
        """Return the tables that rotate the positions of x, or None in a layer that rotates nothing.

        Args:
            x: (B, T, M), the layer's input.
            positions: (T,) or (B, T); None counts from `start`.
            start: The number of positions before x.
        """
        if positions is not None:
            require_tensor("positions", positions)
            require_positions_shape(tuple(positions.shape), *x.shape[:2])
        if self.rotary is None:
            return None
        if positions is None:
            positions = torch.arange(start, start + x.shape[1], device=x.device)
        return rotary_tables(positions, self.rotary_width, self.rotary, x.dtype)

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.shape.head_dim**-0.5 / self.temperature

    def sink_logits(self) -> Tensor | None:
        """(H,): logits of the sinks in the softmax, if the layer has them; a placebo is in no softmax."""
        sink = self.attn_gate.at("partition")
        return None if sink is None or self._has_sink_placebo() else sink.sink_logits()

    def arrays(self) -> AttentionArrays:
        """The layer as plain arrays: the same tensors in another shape, so that gradients reach the parameters."""
        metric = {} if self.metric is None else {METRIC_FIELDS[self.metric.kind]: self.metric.weight}
        width, inward = self.shape.head_dim, {"Q": self.q_proj, "K": self.k_proj, "V": self.v_proj}
        heads_first = {f"W_{name}": weight_by_head(linear.weight, width) for name, linear in inward.items()}
        biases = {f"b_{name}": bias_by_head(linear.bias, width) for name, linear in inward.items()}
        return AttentionArrays(
            **heads_first,
            **biases,
            W_O=self.o_proj.weight.t().unflatten(0, (-1, width)),
            b_O=self.o_proj.bias,
            gates=self.gates,
            gate_parameters={
                gate.path: dict(self.attn_gate.get_submodule(gate.path).named_parameters()) for gate in self.gates
            },
            rotary=self.rotary,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            norm_epsilon=_NORM_EPSILON,
            temperature=self.temperature,
            causal=self.causal,
            window=self.window,
            **metric,
        )

    def num_parameters(self) -> int:
        """Return how many numbers the layer learns."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, num_keys: float) -> float:
        """Multiplications and additions of the matrix products of one position that attends to `num_keys` positions."""
        projections = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        products = sum(projection.weight.numel() for projection in projections)
        products += sum(gate.num_products for gate in self.attn_gate.children() if isinstance(gate, AttentionGate))
        if self.metric is not None and self.metric.kind == "learned":
            products += 2 * self.metric.weight.numel()
        return 2 * products + 4 * self.shape.num_heads * self.shape.head_dim * num_keys

    def extra_repr(self) -> str:
        """Its sizes and options."""
        sizes = ", ".join(f"{name}={size}" for name, size in asdict(self.shape).items())
        names = ("causal", "window", "dropout", "rotary", "temperature", "recompute_gate")
        return f"{sizes}, gate={self.gates}, " + ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _gate(self, site: GatePath, target: Tensor, reads: GateReads, gate_values: dict[str, Tensor] | None) -> Tensor:
        """Return the target under the gate at a site, if there is one; note the gate's values if they are wanted."""
        gate = self.attn_gate.at(site)
        if gate is None:
            return target
        source = gate.source(reads)
        if gate_values is None:
            return self._call_or_recompute(gate.apply_to, target, source)
        gate_values[site] = gate(source)
        return gate.combine(target, gate_values[site])

    def _project_out(self, reads: GateReads, gate_values: dict[str, Tensor] | None) -> Tensor:
        """Gate the attention output and project it."""
        assert reads.output is not None
        gate = self.attn_gate.at("output")
        if gate is None or gate_values is not None or not self.recompute_gate:
            return self.o_proj(self._gate("output", reads.output, reads, gate_values).flatten(-2))

        def gate_and_project(o_BTHD: Tensor, source: Tensor) -> Tensor:
            return self.o_proj(gate.apply_to(o_BTHD, source).flatten(-2))

        # The projection keeps its input for the backward pass, so it is recomputed along with what made it.
        return self._call_or_recompute(gate_and_project, reads.output, gate.source(reads))

    def _call_or_recompute(self, function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """Call the function; with `recompute_gate` keep its arguments alone, and call it again in the backward pass."""
        if not self.recompute_gate or inside_transform(*arguments):
            return function(*arguments)
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, determinism_check="none")

    def _attend(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, allowed: AttentionMask, *, whole: bool
    ) -> _Attended:
        """Attend by blocks where a kernel can, else, and if asked for the whole, under one mask of all restrictions."""
        dropout, sink_H, mask = self.dropout if self.training else 0.0, self.sink_logits(), allowed.mask
        if mask is None and dropout == 0 and not (whole or self._has_sink_placebo()):
            o_BHTD = attend_without_mask(q_BHTD, k_BGSD, v_BGSD, allowed, scale=self.scale, sink_H=sink_H)
            if o_BHTD is not None:
                return _Attended(o_BHTD, k_BGSD, v_BGSD, None, self.causal)
        num_queries = q_BHTD.shape[2]
        if mask is not None:
            self._require_mask(mask, q_BHTD, num_keys=k_BGSD.shape[2])
            mask = mask if mask.dtype == torch.bool else mask.to(k_BGSD.dtype)
        if self.window is not None and self.causal and num_queries == 1:
            k_BGSD, v_BGSD = k_BGSD[:, :, -self.window :], v_BGSD[:, :, -self.window :]
            mask = mask if mask is None else mask[..., -self.window :]
        mask, causal = combine_masks(
            allowed._replace(mask=mask), num_queries=num_queries, num_keys=k_BGSD.shape[2], device=q_BHTD.device
        )
        kernel = attend if sink_H is None else partial(attend_with_sink, sink_H=sink_H)
        o_BHTD = kernel(q_BHTD, k_BGSD, v_BGSD, mask=mask, causal=causal, dropout=dropout, scale=self.scale)
        return _Attended(o_BHTD, k_BGSD, v_BGSD, mask, causal)

    def _gate_by_partition(
        self, q_BHTD: Tensor, attended: _Attended, reads: GateReads, gate_values: dict[str, Tensor] | None
    ) -> Tensor:
        """Return the attention output (B, T, H, D) under a sink: its kernel has gated it, a placebo acts here."""
        o_BTHD = attended.output.transpose(1, 2)
        sink, is_placebo = self.attn_gate.at("partition"), self._has_sink_placebo()
        if sink is None or (gate_values is None and not is_placebo):
            return o_BTHD
        reads.partition = self._log_partition(q_BHTD, attended, of_count=is_placebo)
        if is_placebo:
            return self._gate("partition", o_BTHD, reads, gate_values)
        assert gate_values is not None
        # Not by a call of the module: its hooks would take it for a gate that acts.
        gate_values["partition"] = sink.forward(sink.source(reads))
        return o_BTHD

    def _has_sink_placebo(self) -> bool:
        sink = self.attn_gate.at("partition")
        return sink is not None and sink.gate.placebo is not None

    def _log_partition(self, q_BHTD: Tensor, attended: _Attended, *, of_count: bool) -> Tensor:
        """(B, T, H): the logarithm of the partition function, or of the number of keys that a query sees."""
        B, H, T, _ = q_BHTD.shape
        key = attended.key
        if of_count:
            # Scores of 0, the same for all heads unless the mask says otherwise.
            q_BHTD, key = q_BHTD.new_zeros(1, 1, T, 1), key.new_zeros(1, 1, key.shape[2], 1)
        partition = log_partition(q_BHTD, key, mask=attended.mask, causal=attended.causal, scale=self.scale)
        return partition.expand(B, H, T).transpose(1, 2)

    def _require_mask(self, mask: Tensor, q_BHTD: Tensor, *, num_keys: int) -> None:
        require_mask(mask, (q_BHTD.shape[0], self.shape.num_heads, q_BHTD.shape[2], num_keys))


def weight_by_head(weight: Tensor, head_dim: int) -> Tensor:
    """View the matrix (heads · D, M) of a projection as (heads, M, D)."""
    return weight.unflatten(0, (-1, head_dim)).transpose(1, 2)


def bias_by_head(bias: Tensor | None, head_dim: int) -> Tensor | None:
    """View the bias (heads · D,) of a projection, if it has one, as (heads, D)."""
    return None if bias is None else bias.unflatten(0, (-1, head_dim))


def normalize_heads(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Return queries or keys under the norm of their heads, in the dtype that they had."""
    # Autocast leaves the scale in its own dtype; the result keeps that of the projection, so that the cache does too.
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


_NORM_EPSILON = 1e-6
