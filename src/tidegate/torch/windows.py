r"""Attend to windows and packed documents at the cost of the visible keys: call the fused CPU kernel on blocks.

The runs of keys of one block are joined by their log-partitions $L$: two outputs $o_1, o_2$ become
$o_1 + \sigma(L_2 - L_1)\, (o_2 - o_1)$. The kernel's backward pass on one run, given the joined output and
log-partition, returns that run's part of the gradients.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width, N positions
of all rows one after the other, C blocks of one shape, I queries of a block, J keys of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tidegate.tensors.spans import Blocks, KeyRun, Segment, plan_blocks
from tidegate.torch.kernel import (
    attend_packed,
    inside_transform,
    is_plain,
    packed_kernel_serves,
    with_adjacent_channels,
)
from tidegate.torch.masks import AttentionMask, combine_masks
from tidegate.torch.precision import like_autocast, wide_dtype
from tidegate.torch.sink import count_sink_in, sink_gradient

_fused_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_Options: TypeAlias = tuple[list[int] | None, bool, int | None, float]
"""The arguments of `attend_in_blocks` that are not tensors: boundaries, causality, window and scale."""

_LEAST_QUERIES = 256
"""With fewer queries, a mask is faster."""

_MOST_WORK = 0.8
"""Blocks with at least this fraction of the work under a mask save nothing."""

_WORK_OF_CALLS = 2e6
"""Overhead of the calls for all blocks of one shape, in multiplications of queries and keys."""

_TILE = 512
"""Number of keys that the kernel scores at once, including those that causality hides."""

_LEAST_KEYS = 512
"""A block with fewer keys is one call with a mask, a block with more keys up to three calls."""

_LEAST_FLIP = 64
"""From this number of keys on, a left edge is reversed by copies, so that it is causal and needs no mask."""

_BLOCK_SIZES = ((128, 64), (511, 128), (2047, 256))
"""Upper limits of windows, each with a number of queries per block: few hidden keys, but large products."""
_LARGEST_BLOCK = 512


def attend_blockwise(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    allowed: AttentionMask,
    *,
    scale: float,
    sink_H: Tensor | None = None,
) -> Tensor | None:
    """Return attention (B, H, T, D) within documents and a window; None if a mask is needed.

    On a GPU the kernel for variable lengths handles documents; everything else needs a mask. On the CPU the fused
    kernel handles blocks of queries, unless it is disabled (`plain_kernel`) or the values of documents cannot be read
    (in transforms, while compiling). `allowed` has no mask of its own; `sink_H` are the logits of sinks, if any.
    """
    causal, window, _, documents = allowed
    if sink_H is None and packed_kernel_serves(q_BHTD, documents):
        assert documents is not None
        return attend_packed(q_BHTD, k_BGSD, v_BGSD, documents, causal=causal, window=window, scale=scale)
    num_queries, num_keys = q_BHTD.shape[2], k_BGSD.shape[2]
    all_seen = documents is None and (window is None or window >= num_keys)
    if all_seen or num_queries < _LEAST_QUERIES or not _blocks_serve(q_BHTD, k_BGSD, v_BGSD, documents):
        return None
    boundaries = None if documents is None else document_boundaries(documents)
    if documents is not None and boundaries is None:
        return None
    q_BTHD, k_BSGD, v_BSGD = (x.transpose(1, 2) for x in like_autocast(q_BHTD, k_BGSD, v_BGSD))
    work = _work(_plan(q_BTHD, k_BSGD, boundaries, causal, window), q_BHTD[0, :, 0].numel())
    if work > _MOST_WORK * q_BHTD.numel() * num_keys:
        return None
    o_BTHD, _ = attend_in_blocks(q_BTHD, k_BSGD, v_BSGD, boundaries, causal, window, scale, sink_H=sink_H)
    return o_BTHD.transpose(1, 2)


def attend_in_blocks(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    boundaries: list[int] | None,
    causal: bool,
    window: int | None,
    scale: float,
    *,
    sink_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention (B, T, H, D) and its log-partition (B, T, H), sinks included; the latter has no gradient.

    Args:
        q_BTHD: Queries.
        k_BSGD: Keys.
        v_BSGD: Values.
        boundaries: First positions of all documents in the concatenated rows, and the end; None is no documents.
        causal: A query sees no later key; queries are the last positions of the keys.
        window: A query sees keys fewer than this many positions away; None sees all.
        scale: Of the scores.
        sink_H: The logit of each head's sink, if any.
    """
    return _AttentionInBlocks.apply(sink_H, q_BTHD, k_BSGD, v_BSGD, boundaries, causal, window, scale)


def whole_call(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, *options: *_Options) -> dict[str, Any]:
    """Return the arguments of `scaled_dot_product_attention` that are equivalent to a call of `attend_in_blocks`."""
    boundaries, causal, window, scale = options
    batch, num_queries = q_BTHD.shape[:2]
    documents = None
    if boundaries is not None:
        lengths = torch.tensor(boundaries).diff()
        documents = torch.arange(len(lengths)).repeat_interleave(lengths).view(batch, num_queries)
    mask, causal = combine_masks(
        AttentionMask(causal, window, documents=documents),
        num_queries=num_queries,
        num_keys=k_BSGD.shape[1],
        device=q_BTHD.device,
    )
    query, key, value = (x.transpose(1, 2) for x in (q_BTHD, k_BSGD, v_BSGD))
    return {"query": query, "key": key, "value": value, "attn_mask": mask, "is_causal": causal, "scale": scale}


def _blocks_serve(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, documents: Tensor | None) -> bool:
    """Return whether the fused CPU kernel supports these tensors, and the values of documents can be read."""
    given = (q_BHTD, k_BGSD, v_BGSD) if documents is None else (q_BHTD, k_BGSD, v_BGSD, documents)
    if torch.compiler.is_compiling() or not is_plain(*given) or inside_transform(q_BHTD, k_BGSD, v_BGSD):
        return False
    return (
        all(x.device.type == "cpu" and x.numel() > 0 for x in given)
        and q_BHTD.dtype == k_BGSD.dtype == v_BGSD.dtype
        and q_BHTD.dtype in _DTYPES
        # PyTorch checks this for its fused CPU kernel as well; `plain_kernel` disables it.
        and torch.backends.cuda.flash_sdp_enabled()
    )


def document_boundaries(documents: Tensor) -> list[int] | None:
    """Return first positions of all documents in the concatenated rows, and the end; None for split documents."""
    if documents.ndim == 1:
        return list(dict.fromkeys(documents.tolist()))
    changes = torch.ones_like(documents, dtype=torch.bool)
    torch.ne(documents[:, 1:], documents[:, :-1], out=changes[:, 1:])
    rows, columns = changes.nonzero(as_tuple=True)
    runs = list(zip(rows.tolist(), documents[rows, columns].tolist(), strict=True))
    if len(set(runs)) < len(runs):
        return None
    return [*(rows * documents.shape[1] + columns).tolist(), documents.numel()]


def _forward(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, *options: *_Options) -> tuple[Tensor, Tensor]:
    """Return what `attend_in_blocks` does."""
    boundaries, causal, window, scale = options
    q_NHD, k_NGD, v_NGD = (_end_to_end(x) for x in (q_BTHD, k_BSGD, v_BSGD))
    o_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
    L_NH1 = torch.empty(*q_NHD.shape[:2], 1, dtype=wide_dtype(q_NHD.dtype))
    for blocks in _plan(q_BTHD, k_BSGD, boundaries, causal, window):
        query = _take(q_NHD, blocks.queries, blocks.num_queries)
        total: tuple[Tensor, Tensor] | None = None
        for call in _calls(blocks, q_BTHD.dtype):
            key, value = (_take(x, call.starts, call.num_keys) for x in (k_NGD, v_NGD))
            part = call.forward(query, key, value, scale)
            total = part if total is None else _join(*total, *part)
        assert total is not None
        _put(o_NHD, blocks.queries, total[0])
        _put(L_NH1, blocks.queries, total[1].unsqueeze(-1))
    return o_NHD.view(q_BTHD.shape), L_NH1.view(q_BTHD.shape[:3])


def _backward(
    do_BTHD: Tensor, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, o_BTHD: Tensor, L_BTH: Tensor, *options: *_Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by the queries, keys and values."""
    boundaries, causal, window, scale = options
    q_NHD, k_NGD, v_NGD, o_NHD, do_NHD = (_end_to_end(x) for x in (q_BTHD, k_BSGD, v_BSGD, o_BTHD, do_BTHD))
    L_NH1 = L_BTH.flatten(0, 1).unsqueeze(-1)
    wide = wide_dtype(q_NHD.dtype)
    dq_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
    # Keys are in several blocks: half-precision parts are summed in float32.
    dk_NGD, dv_NGD = (torch.zeros(k_NGD.shape, dtype=wide) for _ in range(2))
    for blocks in _plan(q_BTHD, k_BSGD, boundaries, causal, window):
        query, output, d_output = (_take(x, blocks.queries, blocks.num_queries) for x in (q_NHD, o_NHD, do_NHD))
        log_partition = _take(L_NH1, blocks.queries, blocks.num_queries).squeeze(-1)
        dq: Tensor | None = None
        for call in _calls(blocks, q_BTHD.dtype):
            key, value = (_take(x, call.starts, call.num_keys) for x in (k_NGD, v_NGD))
            part, dk, dv = call.backward(d_output, query, key, value, output, log_partition, scale=scale)
            dq = part if dq is None else dq.to(wide).add_(part)
            _add(dk_NGD, call.starts, dk)
            _add(dv_NGD, call.starts, dv)
        assert dq is not None
        _put(dq_NHD, blocks.queries, dq)
    return (
        dq_NHD.view(q_BTHD.shape),
        dk_NGD.to(k_BSGD.dtype).view(k_BSGD.shape),
        dv_NGD.to(v_BSGD.dtype).view(v_BSGD.shape),
    )


# Operators, so that PyTorch's dispatch modes see one attention call. PyTorch's decorator for operators would load the
# compiler at the first call, which takes seconds.
_INPUTS = "Tensor q_BTHD, Tensor k_BSGD, Tensor v_BSGD"
_OPTIONS = "int[]? boundaries, bool causal, int? window, float scale"
_library = torch.library.Library("tidegate", "DEF")
_library.define(f"attend_in_blocks({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)")
_library.define(
    f"attend_in_blocks_backward(Tensor do_BTHD, {_INPUTS}, Tensor o_BTHD, Tensor L_BTH, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.impl("attend_in_blocks", _forward, "CPU")
_library.impl("attend_in_blocks_backward", _backward, "CPU")
ATTEND_IN_BLOCKS: Any = torch.ops.tidegate.attend_in_blocks.default
"""The operator that dispatch modes see."""
_backward_operator: Any = torch.ops.tidegate.attend_in_blocks_backward.default


class _AttentionInBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sink_H: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
        o_BTHD, L_BTH = ATTEND_IN_BLOCKS(*given)
        if sink_H is not None:
            o_BTHD, L_BTH = count_sink_in(o_BTHD, L_BTH, sink_H)
        ctx.save_for_backward(sink_H, *given[:3], o_BTHD, L_BTH)
        ctx.mark_non_differentiable(L_BTH)
        ctx.options = given[3:]
        return o_BTHD, L_BTH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        sink_H, *saved = ctx.saved_tensors
        do_BTHD, (o_BTHD, L_BTH) = grad_outputs[0], saved[3:]
        # Before the other gradients are allocated: its products take as much memory as one of them.
        by_sink = sink_gradient(do_BTHD, o_BTHD, L_BTH, sink_H, over=(0, 1)) if ctx.needs_input_grad[0] else None
        by_inputs = _backward_operator(do_BTHD, *saved, *ctx.options)
        return (by_sink, *by_inputs, *(None for _ in ctx.options))


def _end_to_end(x_BTHD: Tensor) -> Tensor:
    """Return the concatenated rows (N, H, D), as a view if possible."""
    return with_adjacent_channels(x_BTHD).flatten(0, 1)


class _KernelCall(NamedTuple):
    """One call of the kernel, for one run of keys of all blocks of one shape."""

    starts: Sequence[int]
    num_keys: int
    causal: bool
    flipped: bool
    """Whether queries and keys are reversed for the kernel, so that the left edge is causal."""
    mask: Tensor | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        query, key, value = self._flip(query, key, value)
        output, log_partition = _fused_kernel(
            query, key, value, is_causal=self.causal, attn_mask=self.mask, scale=scale
        )
        output, log_partition = self._flip(output, log_partition)
        return output, log_partition

    def backward(self, *given: Tensor, scale: float) -> tuple[Tensor, ...]:
        given = self._flip(*given)
        return self._flip(*_fused_backward(*given, 0.0, self.causal, attn_mask=self.mask, scale=scale))

    def _flip(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.flip(2) for x in tensors) if self.flipped else tensors


def _calls(blocks: Blocks, dtype: torch.dtype) -> Iterator[_KernelCall]:
    for run in blocks.runs:
        flipped = _is_triangle(blocks, run) and run.low == 0 and run.num_keys >= _LEAST_FLIP
        causal = flipped or (_is_triangle(blocks, run) and run.high == 0)
        mask = None if causal else _mask(blocks.num_queries, run, dtype)
        yield _KernelCall(_shift(blocks.origins, run.start), run.num_keys, causal, flipped, mask)


def _mask(num_queries: int, run: KeyRun, dtype: torch.dtype) -> Tensor | None:
    """Return the additive mask (I, J) of the keys of the run that each query sees; None if each sees all."""
    if run.low is None and run.high is None:
        return None
    ahead = torch.arange(run.num_keys) - torch.arange(num_queries)[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if run.low is not None:
        hidden |= ahead < run.low
    if run.high is not None:
        hidden |= ahead > run.high
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _plan(
    q_BTHD: Tensor, k_BSGD: Tensor, boundaries: list[int] | None, causal: bool, window: int | None
) -> tuple[Blocks, ...]:
    cuts = None if boundaries is None else tuple(boundaries)
    return _cached_plan(*q_BTHD.shape[:2], k_BSGD.shape[1], cuts, causal, window)


@lru_cache(maxsize=32)
def _cached_plan(
    batch: int, num_queries: int, num_keys: int, boundaries: tuple[int, ...] | None, causal: bool, window: int | None
) -> tuple[Blocks, ...]:
    if boundaries is None:
        segments = [Segment(row * num_queries, num_queries, row * num_keys, num_keys) for row in range(batch)]
    else:
        segments = [Segment(start, stop - start, start, stop - start) for start, stop in pairwise(boundaries)]
    sizes = (size for widest, size in _BLOCK_SIZES if window is not None and window <= widest)
    size = next(sizes, _LARGEST_BLOCK)
    return plan_blocks(segments, causal=causal, window=window, size=size, least_keys=_LEAST_KEYS)


def _work(plan: tuple[Blocks, ...], width: int) -> float:
    """Return the cost in multiplications of queries and keys, `width` channels in all heads, including overhead."""
    work = 0.0
    for blocks in plan:
        # Unevenly spaced blocks are copied.
        work += _WORK_OF_CALLS * (1 if isinstance(blocks.queries, range) else 2)
        # The average number of keys that the kernel scores for a query of a causal block.
        triangle = min(blocks.num_queries, (blocks.num_queries + _TILE) // 2)
        num_keys = sum(triangle if _is_triangle(blocks, run) else run.num_keys for run in blocks.runs)
        work += width * len(blocks.queries) * blocks.num_queries * num_keys
    return work


def _is_triangle(blocks: Blocks, run: KeyRun) -> bool:
    return run.num_keys == blocks.num_queries and (run.low, run.high) in ((None, 0), (0, None))


def _shift(starts: Sequence[int], by: int) -> Sequence[int]:
    if isinstance(starts, range):
        return range(starts.start + by, starts.stop + by, starts.step)
    return [start + by for start in starts]


def _take(x_NHD: Tensor, starts: Sequence[int], length: int) -> Tensor:
    """Return `length` positions from each start, (C, H, I, D); a view if the starts are evenly spaced."""
    if isinstance(starts, range):
        (_, heads, width), (position, head, channel) = x_NHD.shape, x_NHD.stride()
        shape, strides = (len(starts), heads, length, width), (starts.step * position, head, position, channel)
        return x_NHD.as_strided(shape, strides, x_NHD.storage_offset() + starts.start * position)
    return x_NHD[_index(starts, length)].transpose(1, 2)


def _put(x_NHD: Tensor, starts: Sequence[int], blocks_CHID: Tensor) -> None:
    """Write the blocks, which do not overlap, to the positions that `_take` reads."""
    if isinstance(starts, range):
        _take(x_NHD, starts, blocks_CHID.shape[2]).copy_(blocks_CHID)
    else:
        x_NHD[_index(starts, blocks_CHID.shape[2])] = blocks_CHID.transpose(1, 2).to(x_NHD.dtype)


def _add(x_NHD: Tensor, starts: Sequence[int], blocks_CHID: Tensor) -> None:
    """Add the blocks, which may overlap, to the positions that `_take` reads."""
    length = blocks_CHID.shape[2]
    if isinstance(starts, range):
        # Pieces no longer than the step do not overlap.
        step = length if len(starts) == 1 else starts.step
        for first in range(0, length, step):
            piece = blocks_CHID[:, :, first : first + step]
            _take(x_NHD, _shift(starts, first), piece.shape[2]).add_(piece)
    else:
        rows = blocks_CHID.transpose(1, 2).flatten(0, 1).to(x_NHD.dtype)
        x_NHD.index_add_(0, _index(starts, length).flatten(), rows)


def _index(starts: Sequence[int], length: int) -> Tensor:
    return torch.tensor(starts)[:, None] + torch.arange(length)


def _join(o1: Tensor, L1: Tensor, o2: Tensor, L2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the joint output and log-partition of two runs."""
    weight = (L2 - L1).sigmoid_().unsqueeze(-1)
    return o1.to(weight.dtype).lerp_(o2.to(weight.dtype), weight), torch.logaddexp(L1, L2)
