"""Whether a module attends to another sequence than its own, by the arguments of its call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import nn

from tidegate.torch.observing.module_calls import ModuleCall

_OTHER = ("key_value_states", "encoder_hidden_states", "context")
"""What attention modules call the other sequence: those of transformers, and ours."""


def attends_across(call: ModuleCall) -> bool:
    """Whether the call of a module names another sequence to attend to.

    `nn.MultiheadAttention` does if its key is not the very tensor that its query is. Any other module does if its
    `forward` has an argument `key_value_states`, `encoder_hidden_states` or `context`, and it is given.
    """
    names = _argument_names(type(call.module).forward)
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    if isinstance(call.module, nn.MultiheadAttention):
        return given.get("key") is not given.get("query")
    return any(name in names and given.get(name) is not None for name in _OTHER)


def require_names(crossing: Sequence[str]) -> None:
    """Refuse what is no sequence of names of layers."""
    if isinstance(crossing, str) or not all(isinstance(name, str) and name for name in crossing):
        raise TypeError(
            f"crossing must be a tuple of names of layers, or of their endings; got {crossing!r}. "
            'Write ("encoder_attn",) for a single one.'
        )


@lru_cache(maxsize=1024)
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
