"""The attention call, and the choice of PyTorch's kernels for it and for the layers around it.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_PLAIN_TENSORS = (Tensor, nn.Parameter)


def plain_kernel() -> AbstractContextManager[Any]:
    """Force the plain kernel, which computes the score matrix and has derivatives of every kind and order.

    The fused CPU kernel has neither forward mode nor a second backward pass. Inside `torch.func` transforms and
    forward-mode differentiation the plain kernel is chosen automatically. It cannot be in functions that
    `torch.compile` traces, nor for a double backward: use this context there.
    """
    return sdpa_kernel(SDPBackend.MATH)


def attend(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Return softmax attention (B, H, T, D); a row that may see nothing gives 0 with gradient 0.

    `mask` is bool (True = attend) or additive float, and broadcasts to (B, H, T, S). With `causal`, which excludes a
    mask, query i sees keys up to i. `scale` is 1/√D by default.
    """
    with plain_kernel() if inside_transform(q_BHTD, k_BGSD, v_BGSD) else nullcontext():
        o_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=q_BHTD.shape[1] != k_BGSD.shape[1],
        )
    # On the CPU every kernel gives 0 for an empty row; elsewhere the kernels differ.
    if mask is None or o_BHTD.device.type == "cpu":
        return o_BHTD
    sees = mask if mask.dtype == torch.bool else mask != float("-inf")
    return torch.where(sees.any(dim=-1, keepdim=True), o_BHTD, 0.0)


def packed_kernel_serves(q_BHTD: Tensor, documents: Tensor | None) -> bool:
    """Return whether the variable-length kernel supports these documents: boundaries, on a GPU, in half precision."""
    by_boundaries = documents is not None and documents.ndim == 1
    return by_boundaries and q_BHTD.device.type == "cuda" and q_BHTD.dtype in (torch.float16, torch.bfloat16)


def attend_packed(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    boundaries: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """Return attention (1, H, T, D) within each document of one packed row, without a mask in memory; GPUs only.

    `boundaries` (documents + 1,) rise from 0 to T; causality and window are those of `AttentionMask`.
    """
    # Builds without GPU kernels do not have this module.
    from torch.nn.attention.varlen import varlen_attn

    ends = boundaries.to(torch.int32)
    back = -1 if window is None else window - 1
    o_THD = varlen_attn(
        *(x.squeeze(0).transpose(0, 1) for x in (q_BHTD, k_BGTD, v_BGTD)),
        cu_seq_q=ends,
        cu_seq_k=ends,
        max_q=q_BHTD.shape[2],
        max_k=k_BGTD.shape[2],
        scale=scale,
        window_size=(back, 0 if causal else back),
        enable_gqa=q_BHTD.shape[1] != k_BGTD.shape[1],
    )
    assert isinstance(o_THD, Tensor)
    return o_THD.transpose(0, 1).unsqueeze(0)


def require_no_tracing() -> None:
    """Raise RuntimeError under `torch.jit.trace`, which would fix the branches of one call for all others."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]: it is public, but not in `__all__`
        raise RuntimeError(
            "torch.jit.trace would fix the length, mask and cache of this call, so that other calls give wrong "
            "results. Use torch.export.export or torch.compile."
        )


def with_adjacent_channels(x: Tensor) -> Tensor:
    """Return the tensor, copied unless its last axis is contiguous, which the fused CPU kernel assumes unchecked."""
    return x if x.stride(-1) == 1 else x.contiguous()


def silu(x: Tensor) -> Tensor:
    """Return `x sigmoid(x)`; in transforms by that formula: PyTorch's kernel has no second forward derivative."""
    return x * x.sigmoid() if inside_transform(x) else F.silu(x)


def is_plain(*tensors: Tensor) -> bool:
    """Return whether these are PyTorch's own tensors, not of a subclass."""
    return all(type(tensor) in _PLAIN_TENSORS for tensor in tensors)


def inside_transform(*tensors: Tensor) -> bool:
    """Return whether a `torch.func` transform or forward-mode differentiation is active."""
    if torch.compiler.is_compiling():
        return False
    # PyTorch has no public way to ask for an active transform.
    level = torch._C._functorch.maybe_current_level()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    if level is not None:
        return True
    # A quick check for decoding: outside forward-mode differentiation there are no tangents.
    if forward_ad._current_level < 0:  # pyright: ignore[reportPrivateUsage]
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


@cache
def load_forward_mode() -> None:
    """Differentiate once in forward mode, and ignore the deprecation warning of PyTorch's first use."""
    # The annotations of these transforms are partial.
    jvp: Any = torch.func.jvp
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))
