r"""Attention with a sink: one more state of the softmax, with its own logit $s$ and no value.

With $L = \log Z$ of the keys and $l' = \log(Z + e^s)$ the output is $y = e^{L - l'} o$. The backward pass of the plain
fused kernel needs only the weights $\exp(S - l')$ and the products of $y$ with its gradient. Called with $y$ and $l'$
instead of its own output and log-sum-exp, it returns the exact gradients of queries, keys and values; the sink's
gradient is $-\sum_i e^{s - l'_i}\, (dy_i \cdot y_i)$. See `tidegate.tensors.sink` for the mathematics.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tidegate.torch.kernel import attend, inside_transform, with_adjacent_channels
from tidegate.torch.precision import like_autocast, widen, without_autocast

_cpu_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_cuda_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
_cuda_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def attend_with_sink(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    sink_H: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float,
) -> Tensor:
    """Return softmax attention with a sink in each head, (B, H, T, D).

    `sink_H` are the sinks' logits; the other options are those of `attend`. Dropout drops only weights of keys. In
    a row that may see nothing the sink has all the weight; the output is 0 with gradient 0.
    """
    sink_H = sink_H.to(q_BHTD.device)
    if _fused_kernel_serves(q_BHTD, k_BGSD, v_BGSD, mask, dropout):
        q_BHTD, k_BGSD, v_BGSD = like_autocast(q_BHTD, k_BGSD, v_BGSD)
        bias = None
        if mask is not None:
            # The kernel supports additive masks with four axes.
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q_BHTD.dtype).masked_fill_(~mask, -math.inf)
            bias = mask.to(q_BHTD.dtype)[(None,) * (4 - mask.ndim)]
        return _FusedSink.apply(q_BHTD, k_BGSD, v_BGSD, sink_H, bias, causal, scale)
    o_BHTD = attend(q_BHTD, k_BGSD, v_BGSD, mask=mask, causal=causal, dropout=dropout, scale=scale)
    partition_BHT = log_partition(q_BHTD, k_BGSD, mask=mask, causal=causal, scale=scale)
    kept_BHT = (partition_BHT - sink_H.to(partition_BHT.dtype)[:, None]).sigmoid()
    return (o_BHTD * kept_BHT.unsqueeze(-1)).to(o_BHTD.dtype)


def log_partition(
    q_BHTD: Tensor, k_BGSD: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float
) -> Tensor:
    """Return the logarithm of the partition function of the keys (B, H, T), in float32 or better.

    It is computed from the score matrix and has derivatives of every kind and order. A row that may see nothing gives
    -inf with gradient 0.
    """
    B, H, T, D = q_BHTD.shape
    G, S = k_BGSD.shape[1:3]
    with without_autocast(q_BHTD):
        query = widen(q_BHTD).reshape(B, G, H // G * T, D) * scale
        scores = (query @ widen(k_BGSD).mT).view(B, H, T, S)
    if causal:
        scores = scores.masked_fill(scores.new_ones(T, S, dtype=torch.bool).triu(1), -math.inf)
    if mask is None:
        return scores.logsumexp(dim=-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    sees_nothing = ~_sees(mask).any(dim=-1)
    # If all scores are -inf, the derivative of the log-sum-exp is nan.
    finite = scores.masked_fill(sees_nothing.unsqueeze(-1), 0.0).logsumexp(dim=-1)
    return finite.masked_fill(sees_nothing, -math.inf)


def count_sink_in(output: Tensor, log_partition: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink to the softmax: return the attention output (..., D) and the log-partition (...) with it."""
    total = torch.logaddexp(log_partition, sink.to(log_partition.dtype))
    # Not in place: a dispatch mode may have a reference to the kernel's output.
    return output * (log_partition - total).exp_().unsqueeze(-1).to(output.dtype), total


def sink_gradient(d_output: Tensor, output: Tensor, total: Tensor, sink: Tensor, *, over: tuple[int, ...]) -> Tensor:
    """Return the gradient of a sink's logit, summed over some axes, from the results of `count_sink_in`."""
    mass = (sink.to(total.dtype) - total).exp_()
    products = torch.linalg.vecdot(widen(d_output), widen(output))
    return -(mass * products).sum(dim=over).to(sink.dtype)


class _FusedSink(torch.autograd.Function):
    """The fused kernel with a sink in the softmax."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: the base class leaves the arguments open
        ctx: Any,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        sink_H: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        """Return (B, H, T, D)."""
        random: tuple[Any, ...] = ()
        q_BHTD, k_BGSD, v_BGSD = (with_adjacent_channels(x) for x in (q_BHTD, k_BGSD, v_BGSD))
        if q_BHTD.device.type == "cpu":
            o_BHTD, partition_BHT = _cpu_forward(q_BHTD, k_BGSD, v_BGSD, 0.0, causal, attn_mask=bias, scale=scale)
            if bias is not None:
                # The kernel returns 0 for a row that may see nothing.
                partition_BHT = partition_BHT.masked_fill(~_sees(bias).any(dim=-1), -math.inf)
        else:
            o_BHTD, partition_BHT, *rest = _cuda_forward(q_BHTD, k_BGSD, v_BGSD, 0.0, causal, False, scale=scale)
            random = tuple(rest[:6])
        y_BHTD, total_BHT = count_sink_in(o_BHTD, partition_BHT, sink_H[:, None])
        ctx.save_for_backward(q_BHTD, k_BGSD, v_BGSD, sink_H, bias, y_BHTD, total_BHT)
        ctx.options = causal, scale, random
        return y_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHTD: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of the tensors; the mask has none."""
        q, k, v, sink_H, bias, y_BHTD, total_BHT = ctx.saved_tensors
        causal, scale, random = ctx.options
        # Before the other gradients are allocated: its products take as much memory as one of them.
        dsink_H = None
        if ctx.needs_input_grad[3]:
            dsink_H = sink_gradient(dy_BHTD, y_BHTD, total_BHT, sink_H[:, None], over=(0, 2))
        given = with_adjacent_channels(dy_BHTD), q, k, v, y_BHTD, total_BHT
        if q.device.type == "cpu":
            dq, dk, dv = _cpu_backward(*given, 0.0, causal, attn_mask=bias, scale=scale)
        else:
            cumulative_q, cumulative_k, max_q, max_k, seed, offset = random
            dq, dk, dv = _cuda_backward(
                *given, cumulative_q, cumulative_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
            )
        return dq, dk, dv, dsink_H, None, None, None


def _fused_kernel_serves(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Return whether a fused kernel that returns its log-sum-exp supports this call."""
    # `plain_kernel` disables the fused kernels, on the CPU too. A call without queries would crash the CPU kernel.
    if dropout or q_BHTD.numel() == 0 or k_BGSD.numel() == 0 or not _fused_kernels_enabled():
        return False
    if inside_transform(q_BHTD, k_BGSD, v_BGSD) or (mask is not None and mask.requires_grad):
        return False
    if q_BHTD.device.type == "cuda":
        return mask is None and q_BHTD.dtype in (torch.float16, torch.bfloat16)
    return q_BHTD.device.type == "cpu"


def _fused_kernels_enabled() -> bool:
    return torch.backends.cuda.flash_sdp_enabled()


# The compiler cannot trace this function and calls it once, when it compiles. `torch.compiler.assume_constant_result`
# sets this mark too, but imports the compiler, which doubles the time of `import tidegate.torch`.
_fused_kernels_enabled._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _sees(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != -math.inf
