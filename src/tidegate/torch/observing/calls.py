"""Intercept every attention call at PyTorch's dispatcher, whatever the caller and kernel.

Attention that a model spells out, as products around a softmax, is put together again (`spelled_out.py`).

A call of `scaled_dot_product_attention` reaches a dispatch mode whole only in inference mode. Elsewhere autograd takes
it apart first: into one fused kernel, which the mode sees, or into plain matrix products, in which it can no longer be
told. So a kernel of our own, registered while somebody watches, sees the whole call before autograd does, and then does
what PyTorch would have done. The mode sees what is left: inference mode, and fused kernels that are called by name.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]: it has no public twin
)

from tidegate.torch.kernel import inside_transform
from tidegate.torch.observing.spelled_out import COMPOSITES, SpelledOutAttention
from tidegate.torch.windows import ATTEND_IN_BLOCKS, whole_call


class AttentionCall(NamedTuple):
    """What one call was given and gave: queries (B, H, T, D), keys and values (B, G, S, D), as the kernel gets them."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    """Bool (True = attend) or added to the scores, with four axes."""
    causal: bool
    """Query i sees no key after key i, whatever T and S are."""
    scale: float | None
    """None is 1/sqrt(D)."""
    output: Tensor | None = None
    """(B, H, T, D): what the kernel returned."""
    softcap: float | None = None
    """c: before the mask a score s becomes c tanh(s / c)."""
    sink_H: Tensor | None = None
    """Logits of sinks that the call itself has in its softmax; those of a layer around it are not here."""
    scored: bool = False
    """Whether the mask, (B, H, T, S), is the scores themselves, forbidden from -5,000 down; queries add nothing."""
    changed: bool = False
    """Whether the weights that met the values are not the softmax of these scores: then it is no call to count."""


_whole: Any = torch.ops.aten.scaled_dot_product_attention.default

_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)
"""Kernels that a mode sees; which of them exist depends on the build."""

_WATCHED = {
    _whole,
    ATTEND_IN_BLOCKS,
    *(getattr(torch.ops.aten, name).default for name in _FUSED if hasattr(torch.ops.aten, name)),
}
_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMPS", "AutogradXPU")


def in_backward() -> bool:
    """Whether a backward pass runs in this thread, in which checkpointing calls modules again."""
    # PyTorch has no public way to ask.
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


class _ThreadState(threading.local):
    """Per-thread state: active watchers, whether calls are ignored now, and how many of a kernel were not."""

    def __init__(self) -> None:
        self.watching: list[AttentionCalls] = []
        self.hidden = False
        self.spelled_out_hidden = False
        self.num_kernel_calls = 0


_state = _ThreadState()


class AttentionCalls(TorchDispatchMode):
    """While entered, hands every attention call of this thread to `see`, once, after it has been served.

    What `see` does itself is not seen. Calls in a backward pass are left out: they repeat those of a checkpoint. So are
    calls inside `torch.func` transforms, those of nested tensors, and those on the meta device.
    """

    supports_higher_order_operators = True

    def __init__(self, see: Callable[[AttentionCall], None]) -> None:
        super().__init__()
        self._see = see
        self._spelled_out = SpelledOutAttention()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the compiler, which takes seconds, at the first operator. Nothing is compiled under a mode.
        return False

    def __enter__(self) -> AttentionCalls:
        _kernel.acquire()
        _state.watching.append(self)
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        _state.watching.remove(self)
        _kernel.release()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Serve the operator, and look at it if it is an attention call."""
        kwargs = kwargs or {}
        spelled_out = not (_state.hidden or _state.spelled_out_hidden or in_backward() or inside_transform())
        if func in COMPOSITES and spelled_out:
            # In inference mode; its parts are followed.
            with self._entered_again():
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _WATCHED:
            self.look(func, args, kwargs, result)
        elif spelled_out:
            self._follow(func, args, result)
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Report the call that ends with this operator, if one does."""
        found = self._spelled_out.follow(func, args, result)
        if found is not None:
            query, key, value, scores, output, changed = found
            self._report(AttentionCall(query, key, value, scores, False, None, output, scored=True, changed=changed))

    @contextmanager
    def _entered_again(self) -> Generator[None]:
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Report the call, unless it is hidden or left out."""
        # Under the names that the operator's schema gives its arguments.
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if func is ATTEND_IN_BLOCKS:
            named = whole_call(*named.values())
        if _state.hidden or is_left_out(named["query"]):
            return
        _state.num_kernel_calls += 1
        self._report(_as_call(named, _output(func, result)))

    def _report(self, call: AttentionCall) -> None:
        # Run our own operators outside this mode: dispatching each would be slow.
        with hide_calls(), _disable_current_modes():
            self._see(call)


class _WholeCallKernel:
    """The kernel of our own, registered as long as anybody watches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._library: Any = None

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._library is None:
                self._library = torch.library.Library("aten", "IMPL")
                for key in _AUTOGRAD_KEYS:
                    self._library.impl("scaled_dot_product_attention", _watched_whole_call, key)

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._library._destroy()
                self._library = None


_kernel = _WholeCallKernel()


def _watched_whole_call(*args: Any, **kwargs: Any) -> Any:
    # The fused kernel inside is the same call again.
    with hide_calls():
        result = _whole.decompose(*args, **kwargs)
    for watcher in _state.watching:
        watcher.look(_whole, args, kwargs, result)
    return result


@contextmanager
def hide_calls() -> Generator[None]:
    """Keep what this thread does from being seen."""
    before, _state.hidden = _state.hidden, True
    try:
        yield
    finally:
        _state.hidden = before


def _output(func: Any, result: Any) -> Tensor:
    """What the kernel returned, (B, H, T, D), without its log-partition."""
    output = result[0] if isinstance(result, tuple) else result
    return output.transpose(1, 2) if func is ATTEND_IN_BLOCKS else output


@contextmanager
def hide_spelled_out() -> Generator[Callable[[], bool]]:
    """Keep attention that is spelled out from being seen; yield what tells whether a kernel was called and seen."""
    before, _state.spelled_out_hidden = _state.spelled_out_hidden, True
    num_before = _state.num_kernel_calls
    try:
        yield lambda: _state.num_kernel_calls > num_before
    finally:
        _state.spelled_out_hidden = before


def calls_are_hidden() -> bool:
    """Whether what this thread does is not seen now."""
    return _state.hidden


def is_left_out(query: Tensor) -> bool:
    """Whether no call with this query is seen: in a backward pass or a transform, of nested or meta tensors."""
    return inside_transform() or in_backward() or query.is_nested or query.device.type == "meta"


def _as_call(named: dict[str, Any], output: Tensor) -> AttentionCall:
    """The call with four axes to each tensor, from an operator's arguments by name and its result."""
    query, key, value = (named[name].detach() for name in ("query", "key", "value"))
    mask = named.get("attn_mask", named.get("attn_bias"))
    if mask is not None:
        mask = mask.detach()
        mask = mask.unsqueeze(-3) if mask.ndim == query.ndim == 3 else mask
    # Without an axis of heads there is one head.
    query, key, value, output = (x.unsqueeze(-3) if x.ndim < 4 else x for x in (query, key, value, output.detach()))
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], () if mask is None else mask.shape[:-3])
    return AttentionCall(
        query=_four_axes(query, lead),
        key=_four_axes(key, lead),
        value=_four_axes(value, lead),
        mask=None if mask is None else mask[(None,) * (4 - mask.ndim)] if mask.ndim < 5 else _four_axes(mask, lead),
        causal=bool(named.get("is_causal", False)),
        scale=named.get("scale"),
        output=_four_axes(output, lead),
    )


def _four_axes(x: Tensor, lead: torch.Size) -> Tensor:
    """The same numbers with all axes before the heads as one batch."""
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])
