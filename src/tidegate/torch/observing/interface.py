"""Watch the attention that models of transformers spell out, where they look up the function for it.

A model asks a table, `AttentionInterface`, for the function of its implementation, and brings one of its own for
`eager`. While somebody watches, the table hands out that function inside one that looks at the call: at queries, keys,
values, mask, scale, soft cap and sinks, from which its statistics follow without the matrix of weights. That they
describe what the function does is checked on some of its queries. Other implementations, such as `sdpa`, call
PyTorch's kernels, which are watched there.

Legend: B batch, T query positions, H heads, D head width.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]: it has no public twin
)

from tidegate.torch.observing.call_statistics import key_set_output, statistics_in_parts, with_plain_mask
from tidegate.torch.observing.calls import AttentionCall, calls_are_hidden, hide_calls, hide_spelled_out, is_left_out
from tidegate.torch.observing.statistics import with_sink

_HEADS = ("query", "key", "value")
_ARGUMENTS = (*_HEADS, "attention_mask")
"""What every attention function takes after the module, in this order."""
_NUM_CHECKED = 4
"""Queries of a call that are compared with what the function returned."""

_See = Callable[[AttentionCall], None]


class _ThreadState(threading.local):
    """Who watches, in each thread."""

    def __init__(self) -> None:
        self.watching: list[_See] = []


_state = _ThreadState()


class InterfaceCalls:
    """While entered, hands every call of an eager attention function of this thread to `see`, after it was served.

    Where transformers is not imported there is nothing to watch.
    """

    def __init__(self, see: _See) -> None:
        self._see = see

    def __enter__(self) -> InterfaceCalls:
        _table.acquire()
        _state.watching.append(self._see)
        return self

    def __exit__(self, *raised: object) -> None:
        _state.watching.remove(self._see)
        _table.release()


class _WatchedTable:
    """The table's lookup, replaced as long as anybody watches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._kind: Any = None
        self._stock: Any = None
        self._watched: Any = None

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._kind is None and "transformers.modeling_utils" in sys.modules:
                from transformers import AttentionInterface

                self._kind, self._stock = AttentionInterface, AttentionInterface.get_interface
                self._watched = _watched_lookup(self._stock)
                self._kind.get_interface = self._watched

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._kind is not None:
                # If somebody else has put a lookup around ours, it stays: it does nothing while nobody watches.
                if self._kind.get_interface is self._watched:
                    self._kind.get_interface = self._stock
                self._kind = None


_table = _WatchedTable()


def _watched_lookup(stock: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(table: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = stock(table, attn_implementation, default)
        return partial(_attend, function) if function is default and _state.watching else function

    return get_interface


def _attend(function: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> Any:
    """Serve the call, and report it if it is understood; if not, its softmax may still be seen."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | options
    call = None if calls_are_hidden() else _as_call(given)
    drops = module.training and given.get("dropout", 0.0) > 0
    # After dropout the output says nothing of the weights, but their softmax can be seen unless it has a sink.
    if call is None or (drops and call.sink_H is None):
        return function(module, *args, **options)
    with hide_spelled_out() as a_kernel_was_called:
        result = function(module, *args, **options)
    if a_kernel_was_called():
        return result
    with torch.no_grad(), hide_calls(), _disable_current_modes():
        call = call._replace(output=_output(result, call))
        if call.output is not None and (drops or _explains(call)):
            for see in _state.watching:
                see(call)
        else:
            warnings.warn(
                f"The attention of {type(module).__name__} is not what its arguments say, and is not observed: "
                "scores by query, key, scaling, softcap, attention_mask and s_aux give another output, or it is not "
                "the first of what is returned, as (batch, queries, heads, width).",
                stacklevel=2,
            )
    return result


def _as_call(given: dict[str, Any]) -> AttentionCall | None:
    """The call by its arguments; None if it is left out, or if something else may have a part in it."""
    if not all(isinstance(given.get(name), Tensor) and given[name].ndim == 4 for name in _HEADS):
        return None
    query, key, value, mask = (*(given[name].detach() for name in _HEADS), given.get("attention_mask"))
    if is_left_out(query):
        return None
    others = (option for name, option in given.items() if name not in _ARGUMENTS)
    if any(isinstance(option, Tensor) and option.ndim > 2 for option in others):
        return None
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == key.shape[2]):
        return None
    scale, softcap, sinks = given.get("scaling"), given.get("softcap"), given.get("s_aux")
    if query.shape[1] % key.shape[1] or not all(x is None or isinstance(x, int | float) for x in (scale, softcap)):
        return None
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=None if mask is None else mask.detach(),
        causal=False,
        scale=scale,
        softcap=softcap,
        sink_H=None if sinks is None else sinks.detach().flatten(),
    )


def _output(result: Any, call: AttentionCall) -> Tensor | None:
    """(B, H, T, D): what the function returned first; None if that has not the axes (B, T, H, D)."""
    output = result[0] if isinstance(result, tuple | list) and result else None
    batch, num_heads, num_queries, _ = call.query.shape
    if not isinstance(output, Tensor) or output.shape != (batch, num_queries, num_heads, call.value.shape[-1]):
        return None
    return output.detach().transpose(1, 2)


def _explains(call: AttentionCall) -> bool:
    """Whether the call's arguments give the output that it had, at some queries that may see something."""
    assert call.output is not None
    num_queries = call.query.shape[2]
    if call.query.numel() == 0:
        return True
    rows = torch.linspace(0, num_queries - 1, min(num_queries, _NUM_CHECKED)).long().unique()
    mask = call.mask if call.mask is None or call.mask.shape[2] == 1 else call.mask[:, :, rows]
    few = with_plain_mask(call._replace(query=call.query[:, :, rows], mask=mask))
    every_key = torch.ones(call.key.shape[2], dtype=torch.bool)
    statistics = statistics_in_parts(few, keys=every_key, heat=True)
    assert statistics.max_score is not None
    largest = float(statistics.max_score.masked_fill(statistics.empty, 0).abs().max())
    if call.sink_H is not None:
        statistics = with_sink(statistics, call.sink_H)
    expected = key_set_output(few, statistics.log_partition, every_key)
    found = call.output[:, :, rows].to(expected.dtype)
    sees = ~statistics.empty.unsqueeze(-1)
    # Many take the softmax in float32, whatever their dtype; rounding of scores grows with them.
    eps = max(torch.finfo(call.output.dtype).eps, torch.finfo(torch.float32).eps)
    allowed = (math.sqrt(eps) + 4 * eps * largest) * torch.linalg.vector_norm(expected * sees)
    return bool(torch.linalg.vector_norm((found - expected) * sees) <= allowed)
