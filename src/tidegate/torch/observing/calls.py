"""Intercept every attention call at PyTorch's dispatcher, for any caller and kernel.

Attention made of separate operators is recognized by `decomposed_attention.py`.

A call of `scaled_dot_product_attention` reaches a dispatch mode whole only in inference mode. Elsewhere autograd first
decomposes it into a fused kernel, which the mode receives, or into plain matrix products. So while anything is
observed, a kernel registered here receives the whole call before autograd, and then runs PyTorch's own. The mode
receives the rest: inference mode, and fused kernels called by name.

Legend: B batch, T query positions, S attended positions, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]: it has no public twin
)

from tidegate.torch.kernel import inside_transform
from tidegate.torch.observing.decomposed_attention import COMPOSITES, DecomposedAttention
from tidegate.torch.observing.statistics import AttentionCall
from tidegate.torch.windows import ATTEND_IN_BLOCKS, whole_call

_whole: Any = torch.ops.aten.scaled_dot_product_attention.default

_FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)
"""Kernels that reach a mode; which of them exist depends on the build."""

_WATCHED = {
    _whole,
    ATTEND_IN_BLOCKS,
    *(getattr(torch.ops.aten, name).default for name in _FUSED if hasattr(torch.ops.aten, name)),
}
_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMPS", "AutogradXPU")


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread, in which checkpointing repeats module calls."""
    # PyTorch has no public function for this.
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


class SharedPatch:
    """A patch that is installed while it has at least one user.

    Args:
        install: Applies the patch and returns a function that removes it, or None if there is nothing to patch yet.
    """

    def __init__(self, install: Callable[[], Callable[[], None] | None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._num_users = 0
        self._remove: Callable[[], None] | None = None

    def acquire(self) -> None:
        """Add a user."""
        with self._lock:
            self._num_users += 1
            self._remove = self._remove or self._install()

    def release(self) -> None:
        """Remove a user."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._remove is not None:
                self._remove()
                self._remove = None


class _ThreadState(threading.local):
    """The watchers of each thread, and whether calls are hidden from them."""

    def __init__(self) -> None:
        self.watching: list[AttentionCalls] = []
        self.hidden = False


_state = _ThreadState()


class AttentionCalls(TorchDispatchMode):
    """While entered, passes every attention call of this thread to `see`, once, after it has run.

    `miss` receives the reason if a softmax enters a batched product and the two are not certain to be attention. Calls
    made by `see` are ignored, as are calls in a backward pass, where checkpoints repeat them, inside `torch.func`
    transforms, of nested tensors, and on the meta device.
    """

    supports_higher_order_operators = True

    def __init__(self, see: Callable[[AttentionCall], None], miss: Callable[[str], None]) -> None:
        super().__init__()
        self._see = see
        self._miss = miss
        self._decomposed = DecomposedAttention()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the compiler at the first operator, which takes seconds. Nothing is compiled under a mode.
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
        """Run the operator, and report an attention call that it is or completes."""
        kwargs = kwargs or {}
        follows = not (_state.hidden or in_backward() or inside_transform())
        if func in COMPOSITES and follows:
            # It arrives whole in inference mode: follow its parts.
            super().__enter__()
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        result = func(*args, **kwargs)
        if func in _WATCHED:
            self.look(func, args, kwargs, result)
        elif follows and (found := self._decomposed.follow(func, args, result)) is not None:
            if isinstance(found, str):
                self._miss(found)
            else:
                self._report(found)
        return result

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Report the call, unless it is hidden or ignored."""
        # By the names in the operator's schema.
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        # A kernel may also return its log-partition.
        output = result[0] if isinstance(result, tuple) else result
        if func is ATTEND_IN_BLOCKS:
            named, output = whole_call(*named.values()), output.transpose(1, 2)
        if not _state.hidden and not is_ignored(named["query"]):
            self._report(_as_call(named, output))

    def _report(self, call: AttentionCall) -> None:
        # Run our own operators outside this mode: dispatching each one is slow.
        with hide_calls(), _disable_current_modes():
            self._see(call)


def _register_kernel() -> Callable[[], None]:
    library = torch.library.Library("aten", "IMPL")
    for key in _AUTOGRAD_KEYS:
        library.impl("scaled_dot_product_attention", _watched_whole_call, key)
    # PyTorch has no public way to remove a kernel.
    return library._destroy  # pyright: ignore[reportPrivateUsage]


_kernel = SharedPatch(_register_kernel)


def _watched_whole_call(*args: Any, **kwargs: Any) -> Any:
    # The fused kernel inside is the same call again.
    with hide_calls():
        result = _whole.decompose(*args, **kwargs)
    for watcher in _state.watching:
        watcher.look(_whole, args, kwargs, result)
    return result


@contextmanager
def hide_calls() -> Generator[None]:
    """Hide the calls of this thread from its watchers."""
    before, _state.hidden = _state.hidden, True
    try:
        yield
    finally:
        _state.hidden = before


def calls_are_hidden() -> bool:
    """Return whether the calls of this thread are hidden."""
    return _state.hidden


def is_ignored(query: Tensor) -> bool:
    """Return whether to ignore calls with this query: in a backward pass or transform, of nested or meta tensors."""
    return inside_transform() or in_backward() or query.is_nested or query.device.type == "meta"


def _as_call(named: dict[str, Any], output: Tensor) -> AttentionCall:
    """Return a call whose tensors all have four axes, from an operator's arguments by name and its result."""
    query, key, value = (named[name].detach() for name in ("query", "key", "value"))
    mask = named.get("attn_mask", named.get("attn_bias"))
    if mask is not None:
        mask = mask.detach()
        mask = mask.unsqueeze(-3) if mask.ndim == query.ndim == 3 else mask
    # Without a head axis there is one head.
    query, key, value, output = (x.unsqueeze(-3) if x.ndim < 4 else x for x in (query, key, value, output.detach()))
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], () if mask is None else mask.shape[:-3])

    def four_axes(x: Tensor) -> Tensor:
        """Join all axes before the heads into one batch."""
        return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])

    return AttentionCall(
        query=four_axes(query),
        key=four_axes(key),
        value=four_axes(value),
        mask=None if mask is None else mask[(None,) * (4 - mask.ndim)] if mask.ndim < 5 else four_axes(mask),
        causal=bool(named.get("is_causal", False)),
        scale=named.get("scale"),
        output=four_axes(output),
    )
