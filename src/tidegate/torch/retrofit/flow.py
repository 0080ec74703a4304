"""Record the projections of attention modules while a small input runs through a model.

Names of models and of their parts do not matter. The gradients of queries, keys and values identify the projection and
the columns that each head comes from.

Legend: B batch, T positions, M model width, W width of a projection, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tidegate.sizes import HeadShape
from tidegate.torch.retrofit.layout import AttentionLayout, Columns, Part, PartKind, Slot, Source, weight_of
from tidegate.torch.retrofit.probe import bitwise_equal


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProjectionCall:
    """A call of a projection by an attention module."""

    slot: Slot
    source: Source
    leaf: Tensor
    """(B, T, W): its result, or that of the norm after it; gradients are computed with respect to it."""
    returned: Tensor
    """The copy of the leaf that the model continues with."""
    norm: nn.Module | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Trace:
    """The record of one attention module's run."""

    name: str
    module: nn.Module
    input_name: str
    input: Tensor | None = None
    context: tuple[Tensor, ...] = ()
    """Its other input tensors, such as the context of cross-attention, also after a norm."""
    calls: list[ProjectionCall] = field(default_factory=list[ProjectionCall])
    """In the order in which they ran."""
    shape: HeadShape | None = None
    cross: bool = False
    settled: bool = False
    """Whether a call with gradients has been recorded."""
    parts: dict[PartKind, Part] = field(default_factory=dict[PartKind, Part])
    merged: Tensor | None = None
    """(B, T, HD): the attention output, until the output projection has been found."""
    output: Slot | None = None

    def layout(self) -> AttentionLayout | None:
        """Return the layout; None if attention was not reached, or ran only without gradients."""
        if self.shape is None or not self.settled:
            return None
        return AttentionLayout(
            name=self.name,
            module=self.module,
            input_name=self.input_name,
            shape=self.shape,
            parts=self.parts,
            output=self.output,
            cross=self.cross,
        )

    def record_call(self, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, output_BTHD: Tensor) -> None:
        """Record a call of the attention function; the first call with gradients counts."""
        if self.settled or self.input is None:
            return
        heads = {"query": query_BHTD, "key": key_BGTD, "value": value_BGTD}
        self.record_parts({kind: self.part(heads[kind]) for kind in ("query", "key", "value")}, value_BGTD, output_BTHD)
        self.settled = query_BHTD.requires_grad

    def record_parts(self, found: Mapping[PartKind, Part | None], value_BGTD: Tensor, output_BTHD: Tensor) -> None:
        """Store the projections that were found, and the sizes of the output."""
        assert self.input is not None
        parts = {
            kind: part
            for kind, part in found.items()
            if part is not None and part.columns.head_dim == output_BTHD.shape[-1]
        }
        value = parts.get("value")
        self.cross = value is not None and value.source == "context"
        if not self.cross and value_BGTD.shape[2] != output_BTHD.shape[1]:
            # Some keys do not come from the layer's own positions.
            parts = {kind: part for kind, part in parts.items() if kind == "query"}
            value = None
        self.parts = parts
        self.shape = HeadShape(
            d_model=self.input.shape[-1],
            num_heads=output_BTHD.shape[2],
            num_kv_heads=value_BGTD.shape[1] if value is None else value.columns.num_heads,
            head_dim=output_BTHD.shape[3],
        )
        self.merged = output_BTHD.detach().flatten(2)
        self.calls, self.input = [], None

    def part(self, heads_BHTD: Tensor) -> Part | None:
        """Find the projection and the columns of the heads; None unless a single regular layout fits."""
        return self.part_of([(call, _columns_of(heads_BHTD, call.leaf)) for call in self.calls])

    def part_of(self, found: list[tuple[ProjectionCall, list[list[int]] | None]]) -> Part | None:
        """Return the part with the columns of each head found for each call; None unless a single regular one fits."""
        fitting = [(order, call, heads) for order, (call, heads) in enumerate(found) if heads is not None]
        if len(fitting) != 1:
            return None
        order, call, heads = fitting[0]
        columns = Columns.of(heads, width=call.leaf.shape[-1])
        if columns is None or (call.norm is not None and not _keeps_heads_apart(call.norm, columns, call.leaf)):
            return None
        return Part(slot=call.slot, columns=columns, order=order, source=call.source)


def _columns_of(heads_BHTD: Tensor, leaf_BTW: Tensor) -> list[list[int]] | None:
    """List the columns of the leaf that each head depends on; None if it depends on none.

    Heads with the same columns count once: keys may have been repeated for the heads of their group.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(heads_BHTD.shape, generator=generator).to(heads_BHTD)
    heads: list[list[int]] = []
    for head in range(heads_BHTD.shape[1]):
        gradient = gradient_to(leaf_BTW, (heads_BHTD[:, head] * weights[:, head]).sum())
        if gradient is None:
            return None
        columns = gradient.abs().sum((0, 1)).nonzero().flatten().tolist()
        if columns not in heads:
            heads.append(columns)
    return heads if all(heads) else None


def gradient_to(leaf: Tensor, total: Tensor) -> Tensor | None:
    """Return the gradient of a sum to a leaf; None if it does not depend on it."""
    if not total.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(total, leaf, retain_graph=True, allow_unused=True)
    return gradient


@torch.no_grad()
def _keeps_heads_apart(norm: nn.Module, columns: Columns, like_BTW: Tensor) -> bool:
    """Return whether the norm of one head's columns is nonzero in that head's columns only."""
    for head in columns.heads():
        alone = torch.zeros_like(like_BTW)
        alone[..., head] = like_BTW[..., head]
        if norm.forward(alone).any(0).any(0).nonzero().flatten().tolist() != head:
            return False
    return True


class Watch:
    """Records the calls of attention modules, their children, and the projections that take their output."""

    def __init__(self, model: nn.Module, names: dict[nn.Module, str]) -> None:
        self.model = model
        self.traces: dict[nn.Module, Trace] = {}
        self.names = names
        """The modules to record, by their paths."""

    @contextmanager
    def recording(self, *, keyword: str | None = None) -> Generator[None]:
        """Record while the model runs; `keyword` passes modules a function of query, key, value and output to call."""
        with ExitStack() as stack:
            for module in self.names:
                enter = partial(self._enter, keyword)
                stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                for name, child in module.named_children():
                    record = partial(self._record_result, Slot(owner=module, name=name))
                    stack.enter_context(child.register_forward_hook(record))
            for owner in self.model.modules():
                for name, child in owner.named_children():
                    if _is_matrix(child):
                        compare = partial(self._compare_input, Slot(owner=owner, name=name))
                        stack.enter_context(child.register_forward_pre_hook(compare))
            yield

    def _enter(self, keyword: str | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the input of an attention module, and pass a recorder to its attention function."""
        if module not in self.traces:
            name = next(iter(inspect.signature(module.forward).parameters))
            self.traces[module] = Trace(name=self.names[module], module=module, input_name=name)
        trace = self.traces[module]
        if not trace.settled:
            found = args[0] if args else kwargs.get(trace.input_name)
            trace.input = found if isinstance(found, Tensor) and found.ndim == 3 else None
            trace.context = tuple(
                each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each is not found
            )
            trace.calls = []
        return None if keyword is None else (args, {**kwargs, keyword: trace.record_call})

    def _record_result(self, slot: Slot, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        """Record a projection or the norm after it, and make its result a leaf."""
        trace = self.traces.get(slot.owner)
        if trace is None or trace.input is None or not args or not isinstance(args[0], Tensor):
            return None
        # The shape is (B, T, W), or (B, 1, T, W) for latents, which are one head.
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        if not (output.ndim == 3 or (output.ndim == 4 and output.shape[1] == 1)):
            return None
        before = next((call for call in trace.calls if call.returned is args[0]), None)
        leaf = output.detach().reshape(output.shape[0], -1, output.shape[-1]).requires_grad_()
        # A copy, because a leaf may not be changed in place.
        with torch.enable_grad():
            returned = leaf.clone().view(output.shape)
        if before is not None and not _is_matrix(module):
            if output.shape != args[0].shape or before.norm is not None:
                return None
            call = ProjectionCall(slot=before.slot, source=before.source, leaf=leaf, returned=returned, norm=module)
            trace.calls[trace.calls.index(before)] = call
            return returned
        from_context = any(args[0] is each for each in trace.context)
        source: Source = "input" if args[0] is trace.input else "context" if from_context else "inner"
        if source != "input" and not _is_matrix(module):
            trace.context += (output,) if source == "context" else ()
            return None
        trace.calls.append(ProjectionCall(slot=slot, source=source, leaf=leaf, returned=returned))
        return returned

    def _compare_input(self, slot: Slot, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the first matrix whose input is a layer's unchanged attention output."""
        if not args or not isinstance(args[0], Tensor):
            return
        for trace in self.traces.values():
            if trace.merged is not None and bitwise_equal([trace.merged], [args[0]]):
                trace.output, trace.merged = slot, None


def _is_matrix(module: nn.Module) -> bool:
    weight = weight_of(module)
    return weight is not None and weight.ndim == 2
