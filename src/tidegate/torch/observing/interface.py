"""Intercept the eager attention functions of transformers, where models look them up.

A model asks a table, `AttentionInterface`, for the function of its implementation, and supplies its own for `eager`.
While anything is observed, the table wraps that function in one that reads the arguments of the call: queries, keys,
values, mask, scale, soft cap and sinks. The statistics are computed from these. At some of the queries, the output is
compared with the one that these arguments imply. Other implementations, such as `sdpa`, call PyTorch's kernels and are
intercepted there.

Legend: B batch, T query positions, H heads, D head width.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]: it has no public twin
)

from tidegate.torch.observing.call_statistics import key_set_output, statistics_in_parts, with_plain_mask
from tidegate.torch.observing.calls import SharedPatch, calls_are_hidden, hide_calls, is_ignored
from tidegate.torch.observing.statistics import AttentionCall, with_sink

_HEADS = ("query", "key", "value")
_ARGUMENTS = (*_HEADS, "attention_mask")
"""The arguments of every attention function after the module, in order."""
_NUM_CHECKED = 4
"""Number of queries of a call at which the output is checked."""

_See = Callable[[AttentionCall], None]


class _ThreadState(threading.local):
    """The watchers of each thread."""

    def __init__(self) -> None:
        self.watching: list[_See] = []


_state = _ThreadState()


@contextmanager
def watch_interface(see: _See) -> Generator[None]:
    """Pass every call of an eager attention function of this thread to `see`, after it has run.

    Do nothing if transformers is not imported.
    """
    _lookup.acquire()
    _state.watching.append(see)
    try:
        yield
    finally:
        _state.watching.remove(see)
        _lookup.release()


def _patch_lookup() -> Callable[[], None] | None:
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from transformers import AttentionInterface

    table: Any = AttentionInterface
    stock = table.get_interface

    def watched(table: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = stock(table, attn_implementation, default)
        return partial(_attend, function) if function is default and _state.watching else function

    def remove() -> None:
        # If other code has wrapped our lookup, ours stays: without watchers it has no effect.
        if table.get_interface is watched:
            table.get_interface = stock

    table.get_interface = watched
    return remove


_lookup = SharedPatch(_patch_lookup)


def _attend(function: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> Any:
    """Run the function, and report the call if its arguments determine it; otherwise its softmax may be recognized."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | options
    call = None if calls_are_hidden() else _as_call(given)
    drops = module.training and given.get("dropout", 0.0) > 0
    # With dropout, the output does not verify the arguments; the softmax can be recognized unless it has a sink.
    if call is None or (drops and call.sink_H is None):
        return function(module, *args, **options)
    with hide_calls():
        result = function(module, *args, **options)
    with torch.no_grad(), hide_calls(), _disable_current_modes():
        call = call._replace(output=_output(result, call))
        if call.output is not None and (drops or _implies_output(call)):
            for see in _state.watching:
                see(call)
        else:
            warnings.warn(
                f"The attention of {type(module).__name__} is not observed: its first result is not the output "
                "(batch, queries, heads, width) that query, key, scaling, softcap, attention_mask and s_aux imply.",
                stacklevel=2,
            )
    return result


def _as_call(given: dict[str, Any]) -> AttentionCall | None:
    """Return the call that the arguments describe; None if it is ignored, or if another argument may affect it."""
    if not all(isinstance(given.get(name), Tensor) and given[name].ndim == 4 for name in _HEADS):
        return None
    query, key, value, mask = (*(given[name].detach() for name in _HEADS), given.get("attention_mask"))
    if is_ignored(query):
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
    """Return the function's first result as (B, H, T, D); None if its axes are not (B, T, H, D)."""
    output = result[0] if isinstance(result, tuple | list) and result else None
    batch, num_heads, num_queries, _ = call.query.shape
    if not isinstance(output, Tensor) or output.shape != (batch, num_queries, num_heads, call.value.shape[-1]):
        return None
    return output.detach().transpose(1, 2)


def _implies_output(call: AttentionCall) -> bool:
    """Return whether the call's arguments imply its output, at some queries that may see something."""
    assert call.output is not None
    if call.query.numel() == 0:
        return True
    num_queries = call.query.shape[2]
    rows = torch.linspace(0, num_queries - 1, min(num_queries, _NUM_CHECKED)).long().unique()
    mask = call.mask if call.mask is None or call.mask.shape[2] == 1 else call.mask[:, :, rows]
    few = with_plain_mask(call._replace(query=call.query[:, :, rows], mask=mask))
    every_key = torch.ones(call.key.shape[2], dtype=torch.bool)
    statistics = statistics_in_parts(few, keys=every_key, heat=True)
    assert statistics.max_score is not None
    largest = float(statistics.max_score.masked_fill(statistics.empty, 0).abs().max())
    if call.sink_H is not None:
        statistics = with_sink(statistics, call.sink_H)
    sees = ~statistics.empty.unsqueeze(-1)
    expected = key_set_output(few, statistics.log_partition, every_key) * sees
    difference = call.output[:, :, rows] * sees - expected
    # Many functions compute the softmax in float32 for any dtype; rounding errors grow with the scores.
    eps = max(torch.finfo(call.output.dtype).eps, torch.finfo(torch.float32).eps)
    allowed = (math.sqrt(eps) + 4 * eps * largest) * torch.linalg.vector_norm(expected)
    return bool(torch.linalg.vector_norm(difference) <= allowed)
