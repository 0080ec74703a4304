"""The one attention call, and which of PyTorch's kernels serves it and the layers around it.

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
    """Force the plain kernel, which builds the score matrix and has derivatives of every kind and order.

    The fused CPU kernel has neither forward mode nor a second backward. Inside `torch.func` transforms and forward-mode
    differentiation the plain kernel is chosen without asking, unless `torch.compile` traces them; that, and a double
    backward, cannot be foreseen, so ask for it here.
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
    """Softmax attention (B, H, T, D); a row that may see nothing gives 0 with gradient 0.

    mask   : bool (True = attend) or additive float, broadcasts to (B, H, T, S); not together with causal
    causal : query i sees keys up to i, with no mask in memory
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
    """Whether the variable-length kernel takes packed documents: on a GPU, in half precision, by boundaries alone."""
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
    """Attention within each document of one packed row, (1, H, T, D), with no mask in memory; GPUs only.

    boundaries : (documents + 1,), rising from 0 to T
    """
    # There is no such module in builds without a GPU's kernels.
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
    """Refuse to run under `torch.jit.trace`, which keeps the branches that one call takes for all others."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]: it is public, but not in `__all__`
        raise RuntimeError(
            "torch.jit.trace would fix the length, mask and cache of this one call for all others, and give wrong "
            "numbers there. Use torch.export.export or torch.compile."
        )


def with_adjacent_channels(x: Tensor) -> Tensor:
    """The tensor, copied unless its last axis lies side by side: the fused CPU kernel takes it so without asking."""
    return x if x.stride(-1) == 1 else x.contiguous()


def silu(x: Tensor) -> Tensor:
    """`x sigmoid(x)`; inside a transform by that formula, since PyTorch's kernel has no second forward derivative."""
    return x * x.sigmoid() if inside_transform(x) else F.silu(x)


def is_untracked(*tensors: Tensor) -> bool:
    """Whether no autograd, transform or compiler tracks these tensors.

    False also for tensors of other kinds than PyTorch's own, which may track it in ways of their own.
    """
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return False
    return is_plain(*tensors) and not inside_transform(*tensors)


def is_plain(*tensors: Tensor) -> bool:
    """Whether these are PyTorch's own tensors, and none of another kind that stands for them."""
    return all(type(tensor) in _PLAIN_TENSORS for tensor in tensors)


def inside_transform(*tensors: Tensor) -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation is at work."""
    if torch.compiler.is_compiling():
        return False
    # PyTorch has no public way to ask for an active transform.
    level = torch._C._functorch.maybe_current_level()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    if level is not None:
        return True
    # Quick to ask, for steps of a single position: outside forward-mode differentiation there are no tangents.
    if forward_ad._current_level < 0:  # pyright: ignore[reportPrivateUsage]
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


@cache
def load_forward_mode() -> None:
    """Differentiate once in forward mode, ignoring the deprecation warning that PyTorch raises at its first use."""
    # The annotations of these transforms are partial.
    jvp: Any = torch.func.jvp
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))
