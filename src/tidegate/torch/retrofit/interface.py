"""Attention implementations for transformers that gate the output of a stock one.

`set_attn_implementation` switches a model to `tidegate_eager` or `tidegate_sdpa`, which call the stock functions with
the stock masks. The keyword `attn_gate` is a gate for the output; `attn_seen` is called with the query, key, value and
output.

Legend: B batch, T query positions, H query heads, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

STOCK_IMPLEMENTATIONS = ("eager", "sdpa")
"""The implementations that have a gated version."""

OutputGate: TypeAlias = Callable[[Tensor], Tensor]
"""From a layer's attention output, (B, T, H, D), to the gated one."""

_PREFIX = "tidegate_"
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_EAGER = "eager_attention_forward"
"""The suffix of the name of the eager attention function in modeling files."""
_table = AttentionInterface()
_FUNCTIONS: dict[tuple[type[nn.Module], str], Callable[..., Any]] = {}


def gated_implementation(stock: str) -> str:
    """Return the name of the gated version of a stock implementation."""
    return f"{_PREFIX}{stock}"


def stock_implementation(name: str) -> str:
    """Return the stock implementation of a name, which may be that of a gated version."""
    return name.removeprefix(_PREFIX)


def implementation_of(module: nn.Module) -> str:
    """Return the implementation that an attention module uses now."""
    config: Any = module.config
    return config._attn_implementation


def implementation_in(model: nn.Module) -> str:
    """Return the implementation in the configuration of a model's first attention module that calls the interface.

    If no module does, return that of the model's configuration.
    """
    calling = (module for module in model.modules() if calls_interface(type(module)))
    return implementation_of(next(calling, model))


def calls_interface(kind: type[nn.Module]) -> bool:
    """Return whether modules of this class call attention through transformers' table and have an eager function."""
    return _TABLE in _names(kind) and any(name.endswith(_EAGER) for name in _names(kind))


def keeps_to_stock(kind: type[nn.Module]) -> bool:
    """Return whether modules of this class need a stock implementation, so that it cannot be gated.

    They call the table without an eager function of their own, or contain the name of a stock implementation and may
    behave differently with another name, perhaps only on long inputs.
    """
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    constants: tuple[Any, ...] = () if code is None else code.co_consts
    nested = (each for constant in constants for each in (constant if isinstance(constant, tuple) else (constant,)))
    names_stock = any(each in STOCK_IMPLEMENTATIONS for each in nested if isinstance(each, str))
    return names_stock or (_TABLE in _names(kind) and not calls_interface(kind))


def supported_implementations(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the stock implementations that the model supports; only its own if no module calls the interface."""
    if not any(calls_interface(type(module)) for module in model.modules()):
        return (implementation_of(model),)
    # transformers has no public way to ask.
    supports_sdpa = model._supports_sdpa  # pyright: ignore[reportPrivateUsage]
    return STOCK_IMPLEMENTATIONS if supports_sdpa else STOCK_IMPLEMENTATIONS[:1]


def remember_functions(kind: type[nn.Module]) -> None:
    """Store the stock functions that modules of this class call.

    Every modeling file has its own eager function, and some have their own table. `torch.compile` can trace the stored
    functions, but not the search for their names.
    """
    known = inspect.unwrap(kind.forward).__globals__
    _FUNCTIONS[kind, "eager"] = next(known[name] for name in _names(kind) if name.endswith(_EAGER))
    _FUNCTIONS[kind, "sdpa"] = known[_TABLE]["sdpa"]


def _names(kind: type[nn.Module]) -> tuple[str, ...]:
    """List the names that the forward method of a class refers to."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return () if code is None else code.co_names


def _attend(stock: str, module: nn.Module, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
    gate: OutputGate | None = options.pop("attn_gate", None)
    seen: Callable[..., None] | None = options.pop("attn_seen", None)
    if (type(module), stock) not in _FUNCTIONS:
        remember_functions(type(module))
    function = _FUNCTIONS[type(module), stock]
    if stock == "eager":
        # The same lookup as in models, so that replacing an entry of transformers' table has an effect here.
        function = _table.get_interface(stock, function)
    output, weights = function(module, *arguments, **options)
    if seen is not None:
        seen(*arguments[:3], output)
    return (output if gate is None else gate(output)), weights


for _stock in STOCK_IMPLEMENTATIONS:
    AttentionInterface.register(gated_implementation(_stock), partial(_attend, _stock))
    # Without a mask function of the same name transformers would drop the mask.
    AttentionMaskInterface.register(gated_implementation(_stock), AttentionMaskInterface()[_stock])
