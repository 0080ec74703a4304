"""Find the attention modules of a loaded model and their projections, by what flows through them.

Nothing here goes by the name of a model or of its parts. A small input is sent through the model. What reaches the
attention function is seen there, and its gradient says which columns of which projection each head came from.

Legend: B batch, T positions, M model width, W width of a projection, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tidegate.sizes import HeadShape
from tidegate.torch.retrofit.interface import calls_interface
from tidegate.torch.retrofit.layout import AttentionLayout, Columns, Part, PartKind, Slot
from tidegate.torch.retrofit.probe import bitwise_equal


def find_attention(model: nn.Module, run: Callable[[], object]) -> list[AttentionLayout]:
    """Return the layouts of the attention modules that a run of the model goes through, in that order.

    model : with one of the gated attention implementations switched on
    run   : sends a small input through the model
    """
    watch = _Watch(model)
    with watch.recording(), torch.enable_grad():
        run()
    return [trace.layout() for trace in watch.traces.values() if trace.shape is not None]


def layer_input(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Tensor:
    """Find the input of an attention module among the arguments of a call."""
    return args[0] if args else kwargs[name]


@dataclass(kw_only=True, slots=True)
class _Trace:
    """What is seen of one attention module during the run."""

    name: str
    module: nn.Module
    input_name: str
    input: Tensor | None = None
    calls: list[tuple[Slot, Tensor]] = field(default_factory=list[tuple[Slot, Tensor]])
    """Projections of the input in the order in which they ran, each with its result as a leaf (B, T, W)."""
    shape: HeadShape | None = None
    parts: dict[PartKind, Part] = field(default_factory=dict[PartKind, Part])
    merged: Tensor | None = None
    """(B, T, HD): the attention output, until the output projection has been found."""
    output: Slot | None = None

    def layout(self) -> AttentionLayout:
        assert self.shape is not None
        return AttentionLayout(
            name=self.name,
            module=self.module,
            input_name=self.input_name,
            shape=self.shape,
            parts=self.parts,
            output=self.output,
        )

    def record_call(self, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, output_BTHD: Tensor) -> None:
        """Record a call of the attention function; the first one with as many queries as keys counts."""
        if self.shape is not None or self.input is None or query_BHTD.shape[2] != key_BGTD.shape[2]:
            return
        heads = {"query": query_BHTD, "key": key_BGTD, "value": value_BGTD}
        for kind in ("query", "key", "value"):
            part = self._part(heads[kind])
            if part is not None and part.columns.head_dim == output_BTHD.shape[-1]:
                self.parts[kind] = part
        groups = self.parts["value"].columns.num_heads if "value" in self.parts else value_BGTD.shape[1]
        self.shape = HeadShape(
            d_model=self.input.shape[-1],
            num_heads=output_BTHD.shape[2],
            num_kv_heads=groups,
            head_dim=output_BTHD.shape[3],
        )
        self.merged = output_BTHD.detach().flatten(2)
        self.calls, self.input = [], None

    def _part(self, heads_BHTD: Tensor) -> Part | None:
        """Find the projection and the columns that the heads came from; None unless one regular layout fits."""
        found = [
            (order, slot, leaf, columns)
            for order, (slot, leaf) in enumerate(self.calls)
            if (columns := _columns_of(heads_BHTD, leaf)) is not None
        ]
        if len(found) != 1:
            return None
        order, slot, leaf, heads = found[0]
        columns = Columns.of(heads, width=leaf.shape[-1])
        return None if columns is None else Part(slot=slot, columns=columns, order=order)


def _columns_of(heads_BHTD: Tensor, leaf_BTW: Tensor) -> list[list[int]] | None:
    """List the columns of the leaf that each head depends on; None if it depends on none.

    Heads with the same columns count once: keys may have been repeated for the heads of their group.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(heads_BHTD.shape, generator=generator).to(heads_BHTD)
    heads: list[list[int]] = []
    for head in range(heads_BHTD.shape[1]):
        total = (heads_BHTD[:, head] * weights[:, head]).sum()
        if not total.requires_grad:
            return None
        (gradient,) = torch.autograd.grad(total, leaf_BTW, retain_graph=True, allow_unused=True)
        if gradient is None:
            return None
        columns = gradient.abs().sum((0, 1)).nonzero().flatten().tolist()
        if columns not in heads:
            heads.append(columns)
    return heads if all(heads) else None


class _Watch:
    """Listens to every attention module, to what they call on their input, and to what takes their output."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.traces: dict[nn.Module, _Trace] = {}
        self.names = {module: name for name, module in model.named_modules() if calls_interface(type(module))}

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record runs of the model inside this context."""
        with ExitStack() as stack:
            for module in self.names:
                stack.enter_context(module.register_forward_pre_hook(self._enter_attention, with_kwargs=True))
                for name, child in module.named_children():
                    hook = _Called(self, Slot(owner=module, name=name))
                    stack.enter_context(child.register_forward_hook(hook))
            for owner in self.model.modules():
                for name, child in owner.named_children():
                    if _is_matrix(child):
                        taken = _Taken(self, Slot(owner=owner, name=name))
                        stack.enter_context(child.register_forward_pre_hook(taken))
            yield

    def _enter_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module not in self.traces:
            name = next(iter(inspect.signature(module.forward).parameters))
            self.traces[module] = _Trace(name=self.names[module], module=module, input_name=name)
        trace = self.traces[module]
        if trace.shape is None:
            trace.input = layer_input(args, kwargs, trace.input_name)
        return args, {**kwargs, "attn_seen": trace.record_call}


@dataclass(frozen=True, slots=True)
class _Called:
    """Notes a projection of the layer's input, and makes its result a leaf that gradients can be taken to."""

    watch: _Watch
    slot: Slot

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        trace = self.watch.traces.get(self.slot.owner)
        if trace is None or trace.input is None or not args or args[0] is not trace.input:
            return None
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim != 3:
            return None
        leaf = output.detach().requires_grad_()
        trace.calls.append((self.slot, leaf))
        # A copy, since a leaf may not be changed in place.
        return leaf.clone()


@dataclass(frozen=True, slots=True)
class _Taken:
    """Notes the first matrix that takes a layer's attention output as it is."""

    watch: _Watch
    slot: Slot

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        for trace in self.watch.traces.values():
            merged = trace.merged
            if merged is not None and bitwise_equal([merged], [args[0]]):
                trace.output, trace.merged = self.slot, None


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2
