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
from tidegate.torch.cache import AttentionCache, CacheOwner, KVCache
from tidegate.torch.gate import AttentionGate, AttentionGates, GateReads
from tidegate.torch.kernel import attend, inside_transform, require_no_tracing
from tidegate.torch.masks import AttentionMask, combine_masks, require_documents, require_mask
from tidegate.torch.metric import HeadMetric
from tidegate.torch.precision import require_dtype, require_tensor
from tidegate.torch.rotary import RotaryTables, rotary_tables, rotate
from tidegate.torch.sink import attend_with_sink, log_partition
from tidegate.torch.windows import attend_blockwise

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Names of the linear maps, as in models of transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTrace:
    """The tensors of one forward pass, as the kernel received them."""

    query: Tensor
    """(B, H, T, D): gated, normalized, rotated, under the metric."""
    key: Tensor
    """(B, G, S, D): including cached positions, without those outside the window of a single query."""
    value: Tensor
    """(B, G, S, D): gated, at the same positions."""
    mask: Tensor | None
    """The mask that the kernel was given besides `causal`."""
    causal: bool
    scale: float
    output: Tensor
    """(B, T, H, D): the attention output, with the sink in the softmax, before an output gate."""
    gates: dict[str, Tensor]
    """The values of each gate by path: (B, positions, heads, D or 1), at the dense site (B, T, M)."""


@final
class Traces(list[AttentionTrace]):
    """A list of traces; a class of its own, because FSDP passes copies of plain lists to the modules inside."""


class _Attended(NamedTuple):
    """The attention output (B, H, T, D), and the keys, values, mask and causality that it was computed with."""

    output: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool


class GatedAttention(nn.Module):
    """Multi-head attention with any gates of the vocabulary.

    The order of work: project, gate the query, key and value, normalize, rotate, apply the metric, attend, gate the
    output, project, gate the result. Every gate reads raw projections. Value and key gates act before the cache. A
    learned metric mixes the rotated channels, so that with both the scores depend on absolute positions.
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
            window: Number of keys that a query sees, including itself, on both sides unless causal; None is all.
            rope: A rotary embedding; True is the default one, None and False are none.
            qk_norm: Whether queries and keys have an RMS norm, with one scale for all heads.
            metric: A metric per head, initially the identity; None is the plain product.
            temperature: Divides the attention scores.
            dropout: Dropout rate of the attention weights; it computes the full score matrix.
            bias: Whether the projections have biases.
            recompute_gate: Whether to recompute gates in the backward pass instead of storing their results.
            device: Of the parameters.
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
        """Initialize all parameters, as needed for a layer that was built on the meta device."""
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
            mask: bool (True = attend) or additive float, broadcasting to (B, H, T, S), where S includes cached
                positions. A row that may see nothing gives 0 before the output projection.
            cache: The layer continues from its positions, and appends the new ones.
            positions: (T,) or (B, T) for the rotary embedding, or their `RotaryTables`; None continues from the cache.
            documents: (B, T) ids of packed documents, or `cu_seqlens` boundaries of a single packed row.
            traces: Receives the trace of this call; see `trace`.
        """
        num_cached = self._check_inputs(x, context, cache, documents)
        context_BSM = x if context is None else context
        q_BTHD, k_BSGD, v_BSGD = self._project_in(x, context_BSM)
        reads = GateReads(input=x, context=context_BSM, query=q_BTHD, value=v_BSGD)
        reads.traced = None if traces is None else {}
        q_BTHD = self._gate("query", q_BTHD, reads)
        k_BSGD = self._gate("key", k_BSGD, reads)
        v_BSGD = self._gate("value", v_BSGD, reads)

        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BSGD = normalize_heads(self.q_norm, q_BTHD), normalize_heads(self.k_norm, k_BSGD)
        if not isinstance(positions, RotaryTables):
            positions = self.rotary_tables(x, positions, start=num_cached)
        k_tables = positions if context is None else self.rotary_tables(context, None)
        if positions is not None and k_tables is not None:
            q_BTHD, k_BSGD = rotate(q_BTHD, positions), rotate(k_BSGD, k_tables)
        if self.metric is not None:
            q_BTHD = self.metric(q_BTHD)

        q_BHTD, k_BGSD, v_BGSD = q_BTHD.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2)
        if mask is not None and isinstance(cache, KVCache):
            # Before the update, so that a rejected call leaves the cache unchanged.
            require_mask(mask, (*q_BHTD.shape[:3], num_cached + k_BGSD.shape[2]))
        if cache is not None:
            k_BGSD, v_BGSD = cache.update(k_BGSD, v_BGSD)
        allowed = AttentionMask(self.causal, self.window, mask, documents)
        attended = self._attend(q_BHTD, k_BGSD, v_BGSD, allowed, whole=traces is not None)
        reads.output = o_BTHD = self._gate_by_partition(q_BHTD, attended, reads)

        y_BTM = self._gate("output", o_BTHD, reads, then=lambda heads: self.o_proj(heads.flatten(-2)))
        y_BTM = self._gate("dense", y_BTM, reads)
        if traces is not None:
            trace = AttentionTrace(
                query=q_BHTD,
                key=attended.key,
                value=attended.value,
                mask=attended.mask,
                causal=attended.causal,
                scale=self.scale,
                output=o_BTHD,
                gates=reads.traced or {},
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
        """Return the output of `forward` and its intermediate tensors."""
        traces = Traces()
        y_BTM = self(
            x, context=context, mask=mask, cache=cache, positions=positions, documents=documents, traces=traces
        )
        return y_BTM, traces[0]

    def claim(self, cache: AttentionCache) -> int:
        """Return the number of cached positions.

        Raises:
            TypeError: It is not a cache.
            InputError: It holds another layer's positions.
        """
        if isinstance(cache, KVCache):
            cache.claim(self._cache_owner)
        try:
            return cache.length
        except AttributeError as error:
            raise TypeError(
                f"cache must be a KVCache, got {type(cache).__name__}. A layer takes one, a model a list of them as "
                "caches."
            ) from error

    def rotary_tables(self, x: Tensor, positions: Tensor | None, *, start: int = 0) -> RotaryTables | None:
        """Return the tables that rotate the positions (T,) or (B, T) of x (B, T, M), by default from `start` on.

        None in a layer without a rotary embedding.
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
        """Return the factor of the products of queries and keys."""
        return self.shape.head_dim**-0.5 / self.temperature

    def sink_logits(self) -> Tensor | None:
        """Return the logit (H,) of each head's sink in the softmax; None without a sink and for its placebo."""
        sink = self.attn_gate.at("partition")
        return None if sink is None or sink.gate.placebo is not None else sink.sink_logits()

    def arrays(self) -> AttentionArrays:
        """Return the layer as plain arrays: views of the parameters, so that gradients reach them."""
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
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, num_keys: float) -> float:
        """Return the FLOPs of the matrix products of one position that attends to `num_keys` positions."""
        projections = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        products = sum(projection.weight.numel() for projection in projections)
        products += sum(gate.num_products for gate in self.attn_gate.children() if isinstance(gate, AttentionGate))
        if self.metric is not None and self.metric.kind == "learned":
            products += 2 * self.metric.weight.numel()
        return 2 * products + 4 * self.shape.num_heads * self.shape.head_dim * num_keys

    def extra_repr(self) -> str:
        """Return the sizes and options."""
        sizes = ", ".join(f"{name}={size}" for name, size in asdict(self.shape).items())
        names = ("causal", "window", "dropout", "rotary", "temperature", "recompute_gate")
        return f"{sizes}, gate={self.gates}, " + ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _check_inputs(
        self, x: Tensor, context: Tensor | None, cache: AttentionCache | None, documents: Tensor | None
    ) -> int:
        """Check that the inputs fit the layer and each other, and return the number of cached positions."""
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
        return 0 if cache is None else self.claim(cache)

    def _project_in(self, x: Tensor, context_BSM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the raw queries (B, T, H, D), keys (B, S, G, D) and values (B, S, G, D)."""
        heads = (-1, self.shape.head_dim)
        try:
            q_BTHD = self.q_proj(x).unflatten(-1, heads)
            return q_BTHD, self.k_proj(context_BSM).unflatten(-1, heads), self.v_proj(context_BSM).unflatten(-1, heads)
        except (RuntimeError, TypeError):
            # Not before: a projection may take other dtypes, as under autocast. A quantized one has a method `weight`.
            if isinstance(self.q_proj.weight, Tensor):
                require_dtype(self.q_proj.weight.dtype, x=x, context=context_BSM)
            raise

    def _gate(
        self,
        site: GatePath,
        target: Tensor,
        reads: GateReads,
        *,
        then: Callable[[Tensor], Tensor] = lambda gated: gated,
    ) -> Tensor:
        """Apply the gate at a site, if any, and then a function.

        With `recompute_gate` only the target and the gate's input are stored for the backward pass. The function is
        recomputed with the gate, since the output projection would store the gated target.
        """
        gate = self.attn_gate.at(site)
        if gate is None:
            return then(target)
        # Not the whole of `reads` in the function below, which recomputation keeps alive.
        source, traced = gate.source(reads), reads.traced

        def apply(target: Tensor, source: Tensor) -> Tensor:
            values = gate(source)
            if traced is not None:
                traced[site] = values
            return then(gate.combine(target, values))

        if not self.recompute_gate or traced is not None or inside_transform(target, source):
            return apply(target, source)
        return checkpoint(
            apply, target, source, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )

    def _attend(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, allowed: AttentionMask, *, whole: bool
    ) -> _Attended:
        """Attend by blocks where a kernel supports it, else, and always if `whole`, under one mask."""
        dropout, sink_H, mask = self.dropout if self.training else 0.0, self.sink_logits(), allowed.mask
        has_placebo = sink_H is None and self.attn_gate.at("partition") is not None
        if mask is None and dropout == 0 and not (whole or has_placebo):
            o_BHTD = attend_blockwise(q_BHTD, k_BGSD, v_BGSD, allowed, scale=self.scale, sink_H=sink_H)
            if o_BHTD is not None:
                return _Attended(o_BHTD, k_BGSD, v_BGSD, None, self.causal)
        num_queries, num_keys = q_BHTD.shape[2], k_BGSD.shape[2]
        if mask is not None:
            require_mask(mask, (*q_BHTD.shape[:3], num_keys))
            mask = mask if mask.dtype == torch.bool else mask.to(k_BGSD.dtype)
        if self.window is not None and self.causal and num_queries == 1:
            k_BGSD, v_BGSD = k_BGSD[:, :, -self.window :], v_BGSD[:, :, -self.window :]
            num_keys, mask = k_BGSD.shape[2], mask if mask is None else mask[..., -self.window :]
        mask, causal = combine_masks(
            allowed._replace(mask=mask), num_queries=num_queries, num_keys=num_keys, device=q_BHTD.device
        )
        kernel = attend if sink_H is None else partial(attend_with_sink, sink_H=sink_H)
        o_BHTD = kernel(q_BHTD, k_BGSD, v_BGSD, mask=mask, causal=causal, dropout=dropout, scale=self.scale)
        return _Attended(o_BHTD, k_BGSD, v_BGSD, mask, causal)

    def _gate_by_partition(self, q_BHTD: Tensor, attended: _Attended, reads: GateReads) -> Tensor:
        """Return the attention output (B, T, H, D) under the sink.

        The kernel has applied a real sink, whose values are computed for a trace only; a placebo is applied here.
        """
        o_BTHD, sink = attended.output.transpose(1, 2), self.attn_gate.at("partition")
        if sink is None or (reads.traced is None and sink.gate.placebo is None):
            return o_BTHD
        query, key = q_BHTD, attended.key
        if sink.gate.placebo is not None:
            # Scores of 0 give the logarithm of the number of keys, the same for all heads unless the mask differs.
            query, key = query.new_zeros(1, 1, query.shape[2], 1), key.new_zeros(1, 1, key.shape[2], 1)
        partition_BHT = log_partition(query, key, mask=attended.mask, causal=attended.causal, scale=self.scale)
        reads.partition = partition_BHT.expand(q_BHTD.shape[:3]).transpose(1, 2)
        if sink.gate.placebo is not None:
            return self._gate("partition", o_BTHD, reads)
        assert reads.traced is not None
        # Not a call of the module: its hooks would count it as a gate that acts.
        reads.traced["partition"] = sink.forward(sink.source(reads))
        return o_BTHD


def weight_by_head(weight: Tensor, head_dim: int) -> Tensor:
    """View the matrix (heads · D, M) of a projection as (heads, M, D)."""
    return weight.unflatten(0, (-1, head_dim)).transpose(1, 2)


def bias_by_head(bias: Tensor | None, head_dim: int) -> Tensor | None:
    """View the bias (heads · D,) of a projection, if it has one, as (heads, D)."""
    return None if bias is None else bias.unflatten(0, (-1, head_dim))


def normalize_heads(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Normalize the heads of queries or keys, and keep their dtype."""
    # Autocast keeps the scale's dtype; the result has that of the projection, so that the cache has it too.
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


_NORM_EPSILON = 1e-6
