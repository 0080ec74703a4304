"""A step of a decoder that reads one position of each row: what the model computes, by few calls of modules.

Such a step is so short that calling modules and looking up their parameters takes a good part of it. So the parameters
are gathered once, for as many steps as follow.

Legend: B batch, S attended positions, H query heads, G key/value heads, D head width, M model width, V tokens of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate._validation import require_known_positions, require_known_tokens
from tidegate.config import Rotary
from tidegate.torch.attention import GatedAttention, normalize_heads
from tidegate.torch.block import TransformerBlock, TransformerStack
from tidegate.torch.cache import KVCache, require_caches
from tidegate.torch.embedding import look_up
from tidegate.torch.feedforward import FeedForward
from tidegate.torch.gate import AttentionGate, AttentionGates, GateReads
from tidegate.torch.kernel import attend, inside_transform, is_plain
from tidegate.torch.metric import HeadMetric
from tidegate.torch.precision import is_under_autocast
from tidegate.torch.rotary import Turn, rotary_turn, rotate
from tidegate.torch.sink import attend_with_sink

_Map: TypeAlias = Callable[[Tensor], Tensor]
_Product: TypeAlias = Callable[[nn.Linear | nn.Embedding], _Map]

# With 6 layers of width 512 and 8 rows, making the copy takes as long as some twenty to forty steps save.
_ROWS_TO_PACK_FOR = range(2, 17)
_STEPS_TO_PACK_FOR = 48
_BYTES_TO_PACK = 2**30

_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    kind: kind.forward
    for kind in (
        TransformerStack,
        TransformerBlock,
        GatedAttention,
        AttentionGates,
        AttentionGate,
        HeadMetric,
        FeedForward,
        nn.ModuleList,
        nn.Linear,
        nn.Embedding,
        nn.RMSNorm,
        nn.LayerNorm,
        nn.Dropout,
    )
}
"""What the parts of a model do when they are called, unless somebody changes it."""


def can_skip_modules(model: nn.Module, stack: TransformerStack) -> bool:
    """Whether calling the parts of the model does nothing but what `DecodeStep` computes.

    Not so where one was replaced, wrapped or hooked, with dropout and placebos, nor under autocast, transforms and
    compilers.
    """
    # PyTorch has no public way to ask for hooks on every module.
    if torch.compiler.is_compiling() or nn.modules.module._has_any_global_hook():  # pyright: ignore[reportPrivateUsage]
        return False
    parameters = list(model.parameters())
    if is_under_autocast(parameters[0]) or inside_transform(*parameters) or not is_plain(*parameters):
        return False
    if any(isinstance(part, AttentionGate) and part.gate.placebo is not None for part in model.modules()):
        return False
    layers = [block.attention for block in cast("Sequence[TransformerBlock]", stack.blocks)]
    alike = all(layer.causal and _rotation(layer) == _rotation(layers[0]) for layer in layers)
    parts = list(model.modules())[1:]
    return alike and not _is_hooked(model) and all(_does_no_more(part) for part in parts)


def pays_to_pack(model: nn.Module, *, rows: int, steps: int) -> bool:
    """Whether that many steps end sooner with a copy of the weights that is laid out for batches of `rows`.

    So with few rows, where a plain product does not reach the speed at which weights are read, on CPUs and in float32;
    a copy of more than 1 GiB is not made.
    """
    parameters = list(model.parameters())
    return (
        rows in _ROWS_TO_PACK_FOR
        and steps >= _STEPS_TO_PACK_FOR
        and torch.backends.mkldnn.is_available()
        and all(parameter.dtype == torch.float32 and parameter.device.type == "cpu" for parameter in parameters)
        and sum(parameter.nbytes for parameter in parameters) <= _BYTES_TO_PACK
    )


class DecodeStep:
    """Compute the logits that the model gives for one more token of each row; for inference alone.

    packed_rows : copy the weights in a layout that is fast for batches of that many rows, see `pays_to_pack`; the step
                  then no longer follows the model when that changes. None reads the model's own
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        position_embedding: nn.Embedding | None,
        stack: TransformerStack,
        head: nn.Linear | None,
        *,
        packed_rows: int | None = None,
    ) -> None:
        blocks = cast("Sequence[TransformerBlock]", stack.blocks)
        product = _plain_product if packed_rows is None else partial(_packed_product, packed_rows)
        self._embedding, self._position_embedding = embedding, position_embedding
        self._rotary, self._rotary_width = _rotation(blocks[0].attention)
        self._blocks = [_BlockStep(block, product) for block in blocks]
        self._norm = _norm(stack.norm)
        self._head = product(embedding if head is None else head)

    @torch.no_grad()
    def __call__(
        self,
        tokens_B1: Tensor,
        *,
        caches: Sequence[KVCache],
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The logits (B, V) of the tokens that follow; the caches take the position in.

        mask      : bool, (B, 1, 1, S), S counting the new position too; None sees all
        positions : (B, 1); None counts on from the caches
        """
        if tokens_B1.ndim != 2 or tokens_B1.shape[1] != 1:
            raise ValueError(
                f"tokens must have shape (batch, 1); got {tuple(tokens_B1.shape)}. Call the model for more."
            )
        require_caches(caches, len(self._blocks))
        x_B1M = look_up(self._embedding, tokens_B1, require_known_tokens)
        if positions is None:
            start = caches[0].length
            positions = torch.arange(start, start + 1, device=tokens_B1.device)
        if self._position_embedding is not None:
            x_B1M = x_B1M + look_up(self._position_embedding, positions, require_known_positions)
        turn = None
        if self._rotary is not None:
            turn = rotary_turn(positions, self._rotary_width, self._rotary, x_B1M.dtype)
        for block, cache in zip(self._blocks, caches, strict=True):
            x_B1M = block(x_B1M, turn, cache, mask)
        return self._head(self._norm(x_B1M[:, 0]))


class _BlockStep:
    def __init__(self, block: TransformerBlock, product: _Product) -> None:
        self._attention_norm, self._feedforward_norm = _norm(block.attention_norm), _norm(block.feedforward_norm)
        self._attend = _AttentionStep(block.attention, product)
        self._feed = _feedforward(block.feedforward, product)

    def __call__(self, x_B1M: Tensor, turn: Turn | None, cache: KVCache, mask: Tensor | None) -> Tensor:
        x_B1M = x_B1M + self._attend(self._attention_norm(x_B1M), turn, cache, mask)
        return x_B1M + self._feed(self._feedforward_norm(x_B1M))


class _AttentionStep:
    def __init__(self, attention: GatedAttention, product: _Product) -> None:
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        self._q, self._k, self._v, self._o = (product(projection) for projection in projections)
        self._by_head = (-1, attention.shape.head_dim)
        self._scale, self._window = attention.scale, attention.window
        self._claim = attention.claim
        self._q_norm, self._k_norm = attention.q_norm, attention.k_norm
        self._metric = attention.metric
        gates = attention.attn_gate
        self._query_gate, self._key_gate, self._value_gate = gates.at("query"), gates.at("key"), gates.at("value")
        self._output_gate, self._dense_gate = gates.at("output"), gates.at("dense")
        self._is_gated = any(gate.path != "partition" for gate in attention.gates)
        self._sink_logits = attention.sink_logits

    def __call__(self, x_B1M: Tensor, turn: Turn | None, cache: KVCache, mask: Tensor | None) -> Tensor:
        self._claim(cache)
        q_B1HD = self._q(x_B1M).unflatten(-1, self._by_head)
        k_B1GD = self._k(x_B1M).unflatten(-1, self._by_head)
        v_B1GD = self._v(x_B1M).unflatten(-1, self._by_head)
        reads = GateReads(input=x_B1M, context=x_B1M, query=q_B1HD, value=v_B1GD) if self._is_gated else None
        if reads is not None:
            q_B1HD = _apply(self._query_gate, q_B1HD, reads)
            k_B1GD = _apply(self._key_gate, k_B1GD, reads)
            v_B1GD = _apply(self._value_gate, v_B1GD, reads)
        if self._q_norm is not None and self._k_norm is not None:
            q_B1HD, k_B1GD = normalize_heads(self._q_norm, q_B1HD), normalize_heads(self._k_norm, k_B1GD)
        if turn is not None:
            q_B1HD, k_B1GD = rotate(q_B1HD, turn), rotate(k_B1GD, turn)
        if self._metric is not None:
            q_B1HD = self._metric(q_B1HD)
        k_BGSD, v_BGSD = cache.update(k_B1GD.transpose(1, 2), v_B1GD.transpose(1, 2))
        if self._window is not None:
            k_BGSD, v_BGSD = k_BGSD[:, :, -self._window :], v_BGSD[:, :, -self._window :]
            mask = mask if mask is None else mask[..., -self._window :]
        sink_H = self._sink_logits()
        kernel = attend if sink_H is None else partial(attend_with_sink, sink_H=sink_H)
        o_BH1D = kernel(q_B1HD.transpose(1, 2), k_BGSD, v_BGSD, mask=mask, scale=self._scale)
        o_B1HD = o_BH1D.transpose(1, 2)
        if reads is None:
            return self._o(o_B1HD.flatten(2))
        reads = reads.with_output(o_B1HD)
        y_B1M = self._o(_apply(self._output_gate, o_B1HD, reads).flatten(2))
        return _apply(self._dense_gate, y_B1M, reads)


def _apply(gate: AttentionGate | None, target: Tensor, reads: GateReads) -> Tensor:
    return target if gate is None else gate.apply_to(target, gate.source(reads))


def _plain_product(factor: nn.Linear | nn.Embedding) -> _Map:
    return partial(F.linear, weight=factor.weight, bias=_bias(factor))


def _packed_product(rows: int, factor: nn.Linear | nn.Embedding) -> _Map:
    # The product that PyTorch's own compiler calls for weights that are frozen; it has no public name.
    packed = torch.ops.mkldnn._reorder_linear_weight(factor.weight.detach(), rows)
    product, bias = torch.ops.mkldnn._linear_pointwise.default, _bias(factor)
    return lambda x: product(x, packed, bias, "none", [], "")


def _bias(factor: nn.Linear | nn.Embedding) -> Tensor | None:
    return factor.bias if isinstance(factor, nn.Linear) else None


def _norm(norm: nn.RMSNorm | nn.LayerNorm) -> _Map:
    if isinstance(norm, nn.RMSNorm):
        return partial(F.rms_norm, normalized_shape=norm.normalized_shape, weight=norm.weight, eps=norm.eps)
    shape, eps = list(norm.normalized_shape), norm.eps
    return partial(F.layer_norm, normalized_shape=shape, weight=norm.weight, bias=norm.bias, eps=eps)


def _feedforward(feedforward: FeedForward, product: _Product) -> _Map:
    up, down = product(feedforward.up_proj), product(feedforward.down_proj)
    if feedforward.gate_proj is None:
        return lambda x: down(F.gelu(up(x)))
    gate = product(feedforward.gate_proj)
    return lambda x: down(F.silu(gate(x)) * up(x))


def _rotation(attention: GatedAttention) -> tuple[Rotary | None, int]:
    return attention.rotary, attention.rotary_width


def _does_no_more(part: nn.Module) -> bool:
    """Whether calling this part does what its kind does, and nothing at random."""
    if type(part).forward is not _FORWARDS.get(type(part)) or _is_hooked(part):
        return False
    if isinstance(part, nn.Embedding):
        return part.max_norm is None
    if isinstance(part, nn.Dropout):
        return not (part.training and part.p)
    return not (isinstance(part, GatedAttention) and part.training and part.dropout)


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks  # pyright: ignore[reportPrivateUsage]
        or module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        or module._compiled_call_impl  # pyright: ignore[reportPrivateUsage]
        or "forward" in vars(module)
    )
