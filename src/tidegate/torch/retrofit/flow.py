"""Find the attention modules of a loaded model and their projections, by what flows through them.

Nothing here goes by the name of a model or of its parts. A small input is sent through the model. What reaches the
attention function is seen there, and its gradient says which columns of which projection each head came from. A module
that has no attention function is found by the operators that it calls, in `spelled.py`.

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
from tidegate.torch.retrofit.layout import AttentionLayout, Columns, Part, PartKind, Slot, Source
from tidegate.torch.retrofit.probe import bitwise_equal


def find_attention(model: nn.Module, run: Callable[[], object]) -> list[AttentionLayout]:
    """Return the layouts of the attention modules that a run of the model goes through, in that order.

    model : with one of the gated attention implementations switched on
    run   : sends a small input through the model
    """
    watch = Watch(model, {module: name for name, module in model.named_modules() if calls_interface(type(module))})
    with watch.recording(keyword="attn_seen"), torch.enable_grad():
        run()
    return [layout for trace in watch.traces.values() if (layout := trace.layout()) is not None]


def layer_input(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Tensor:
    """Find the input of an attention module among the arguments of a call."""
    return args[0] if args else kwargs[name]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProjectionCall:
    """A projection that an attention module has called."""

    slot: Slot
    source: Source
    leaf: Tensor
    """(B, T, W): its result, or that of the norm behind it; gradients are taken to it."""
    returned: Tensor
    """What went on through the model, a copy of the leaf."""
    norm: nn.Module | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Trace:
    """What is seen of one attention module during the run."""

    name: str
    module: nn.Module
    input_name: str
    input: Tensor | None = None
    context: tuple[Tensor, ...] = ()
    """The other tensors that it is given, among them what cross-attention attends to, and what norms make of them."""
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
        """Return what was found; None if attention was not reached, or runs without gradients alone."""
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
        """Record a call of the attention function; the first one that has gradients counts."""
        if self.settled or self.input is None:
            return
        heads = {"query": query_BHTD, "key": key_BGTD, "value": value_BGTD}
        self.record_parts({kind: self.part(heads[kind]) for kind in ("query", "key", "value")}, value_BGTD, output_BTHD)
        self.settled = query_BHTD.requires_grad

    def record_parts(self, found: Mapping[PartKind, Part | None], value_BGTD: Tensor, output_BTHD: Tensor) -> None:
        """Keep the projections that were found, and the sizes that the output tells."""
        assert self.input is not None
        parts = {
            kind: part
            for kind, part in found.items()
            if part is not None and part.columns.head_dim == output_BTHD.shape[-1]
        }
        value = parts.get("value")
        self.cross = value is not None and value.source == "context"
        if not self.cross and value_BGTD.shape[2] != output_BTHD.shape[1]:
            # Keys of another origin stand beside those of the layer's own positions.
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
        """Find the projection and the columns that the heads came from; None unless one regular layout fits."""
        return self.part_of([(call, _columns_of(heads_BHTD, call.leaf)) for call in self.calls])

    def part_of(self, found: list[tuple[ProjectionCall, list[list[int]] | None]]) -> Part | None:
        """Describe the one projection that heads came from, by the columns of each head; None if it is not one."""
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
    """Tell whether one head's columns alone give that head's columns alone, as a division by a common length does."""
    for head in columns.heads():
        alone = torch.zeros_like(like_BTW)
        alone[..., head] = like_BTW[..., head]
        if norm.forward(alone).any(0).any(0).nonzero().flatten().tolist() != head:
            return False
    return True


class Watch:
    """Listens to attention modules, to what they call, and to what takes their output."""

    def __init__(self, model: nn.Module, names: dict[nn.Module, str]) -> None:
        self.model = model
        self.traces: dict[nn.Module, Trace] = {}
        self.names = names
        """The modules to listen to, by their paths."""
        self.entered: set[nn.Module] = set()

    @contextmanager
    def recording(self, *, keyword: str | None = None) -> Generator[None]:
        """Record runs of the model inside this context.

        keyword : under which the modules are given what is to be called with query, key, value and output
        """
        with ExitStack() as stack:
            for module in self.names:
                enter = _Entered(self, keyword)
                stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                for name, child in module.named_children():
                    hook = _Called(self, Slot(owner=module, name=name))
                    stack.enter_context(child.register_forward_hook(hook))
            for owner in self.model.modules():
                for name, child in owner.named_children():
                    if is_matrix(child):
                        taken = _Taken(self, Slot(owner=owner, name=name))
                        stack.enter_context(child.register_forward_pre_hook(taken))
            yield

    def trace_of(self, module: nn.Module) -> Trace:
        """Return the trace of a module that is listened to; a new one at its first call."""
        if module not in self.traces:
            name = next(iter(inspect.signature(module.forward).parameters))
            self.traces[module] = Trace(name=self.names[module], module=module, input_name=name)
        return self.traces[module]


@dataclass(frozen=True, slots=True)
class _Entered:
    """Notes the input of an attention module, and hands it what is to be called by its attention function."""

    watch: Watch
    keyword: str | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace = self.watch.trace_of(module)
        self.watch.entered.add(module)
        if not trace.settled:
            found = args[0] if args else kwargs.get(trace.input_name)
            trace.input = found if isinstance(found, Tensor) and found.ndim == 3 else None
            trace.context = tuple(
                each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each is not found
            )
            trace.calls = []
        return None if self.keyword is None else (args, {**kwargs, self.keyword: trace.record_call})


@dataclass(frozen=True, slots=True)
class _Called:
    """Notes a projection or the norm behind it, and makes its result a leaf that gradients can be taken to."""

    watch: Watch
    slot: Slot

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        trace = self.watch.traces.get(self.slot.owner)
        if trace is None or trace.input is None or not args or not isinstance(args[0], Tensor):
            return None
        if not isinstance(output, Tensor) or not output.is_floating_point() or not _is_sequence(output):
            return None
        before = next((call for call in trace.calls if call.returned is args[0]), None)
        leaf = output.detach().reshape(output.shape[0], -1, output.shape[-1]).requires_grad_()
        # A copy, since a leaf may not be changed in place.
        with torch.enable_grad():
            returned = leaf.clone().view(output.shape)
        if before is not None and not is_matrix(module):
            if output.shape != args[0].shape or before.norm is not None:
                return None
            call = ProjectionCall(slot=before.slot, source=before.source, leaf=leaf, returned=returned, norm=module)
            trace.calls[trace.calls.index(before)] = call
            return returned
        source = self._source(trace, args[0])
        if source != "input" and not is_matrix(module):
            trace.context += (output,) if source == "context" else ()
            return None
        trace.calls.append(ProjectionCall(slot=self.slot, source=source, leaf=leaf, returned=returned))
        return returned

    @staticmethod
    def _source(trace: Trace, given: Tensor) -> Source:
        if given is trace.input:
            return "input"
        return "context" if any(given is each for each in trace.context) else "inner"


@dataclass(frozen=True, slots=True)
class _Taken:
    """Notes the first matrix that takes a layer's attention output as it is."""

    watch: Watch
    slot: Slot

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        for trace in self.watch.traces.values():
            merged = trace.merged
            if merged is not None and bitwise_equal([merged], [args[0]]):
                trace.output, trace.merged = self.slot, None


def _is_sequence(output: Tensor) -> bool:
    """Tell whether a result is (B, T, W), or (B, 1, T, W) as that of latents, which stand for one head."""
    return output.ndim == 3 or (output.ndim == 4 and output.shape[1] == 1)


def is_matrix(module: nn.Module) -> bool:
    """Tell whether a module has a matrix of weights."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2
