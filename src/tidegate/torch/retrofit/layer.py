"""Let gates act in an attention module of somebody else's model, by hooks on it and its projections.

Legend: B batch, T positions, M model width, H query heads, G key/value heads, D head width.
"""

# The order of a module's hooks, and which are there, has no public door.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from tidegate.gate import Gate, GatePath
from tidegate.gates import Gates
from tidegate.torch.gate import AttentionGate, AttentionGates
from tidegate.torch.kernel import require_no_tracing
from tidegate.torch.retrofit.flow import layer_input
from tidegate.torch.retrofit.interface import STOCK_IMPLEMENTATIONS, gated_implementation, implementation_of
from tidegate.torch.retrofit.layout import AttentionLayout, Columns, Part, PartKind, Slot
from tidegate.torch.retrofit.wrappers import acting_module, acting_modules, base_module

GATES_NAME = "attn_gate"
"""The attention module's child that holds its gates."""

_PARTS: tuple[PartKind, ...] = ("query", "key", "value")
_OWN_IMPLEMENTATIONS = tuple(map(gated_implementation, STOCK_IMPLEMENTATIONS))


def acts_at_output(gates: Gates) -> bool:
    """Tell whether any of the gates acts on or reads the heads' outputs."""
    return any(gate.site == "output" or gate.reads == "output" for gate in gates)


def gated_layers(model: nn.Module) -> Iterator[GatedLayer]:
    """Yield the layers of a model that have gates, in the order of its modules, copies of layers included."""
    for module in model.modules():
        yield from _gates_of(module)


def acting_layers(model: nn.Module) -> dict[str, GatedLayer]:
    """Return the layers whose gates act, each by the path of its attention module in this model."""
    found: dict[GatedLayer, str] = {}
    for path, module in acting_modules(model):
        for layer in _gates_of(module):
            found.setdefault(layer, path)
    return {path: layer for layer, path in found.items()}


def _gates_of(module: nn.Module) -> Iterator[GatedLayer]:
    return (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, GatedLayer))


@dataclass(kw_only=True, slots=True)
class LayerReads:
    """What the gates of one call may read, filled in as the projections run; a `Readable`."""

    input: Tensor
    """(B, T, M)"""
    attended: Tensor | None = None
    """(B, S, M), what cross-attention attends to; None if it is the input."""
    query: Tensor | None = None
    """(B, T, H, D), raw."""
    key: Tensor | None = None
    """(B, T, G, D), raw."""
    value: Tensor | None = None
    """(B, T, G, D), raw."""
    output: Tensor | None = None
    """(B, T, H, D), before an output gate."""
    partition: None = None
    """A model's own kernel does not give it, and gates that read it are refused."""

    @property
    def context(self) -> Tensor:
        """What is attended to."""
        return self.input if self.attended is None else self.attended

    def apply(self, gate: ActingGate, target: Tensor) -> Tensor:
        """Apply a gate that reads from here to the target."""
        return gate.plain.combine(target, gate.runs(gate.plain.source(self)))


@dataclass(frozen=True, slots=True)
class ActingGate:
    """A gate of a layer, and the adapter around it that runs in its place, if there is one."""

    plain: AttentionGate
    runs: nn.Module


class _Call(threading.local):
    """What one thread's call of a layer has read so far; a copy of it is empty."""

    reads: LayerReads | None = None

    def __reduce__(self) -> tuple[type[_Call], tuple[()]]:
        return _Call, ()


class GatedLayer:
    """A pre-hook on an attention module that lets its gates act; it holds what the other hooks of the layer share.

    Hooks sit on the projections, not around them, so that no name in the state dict changes. They follow when a
    projection is exchanged, so that a gate reads and gates what an adapter has added too.
    """

    def __init__(self, layout: AttentionLayout, gates: Gates) -> None:
        self.layout = layout
        self.gates = gates
        self._call = _Call()
        self.acts_in_function = acts_at_output(gates) and layout.in_function
        self.acts_before_output = acts_at_output(gates) and not layout.in_function
        self.shares = self.acts_before_output or any(_reads_elsewhere(gate, layout) for gate in gates)
        self.hooks = tuple(_projection_hooks(self))
        self.forget = _Forget(self)

    @property
    def reads(self) -> LayerReads | None:
        """What the gates may read in the call that this thread makes; None if it makes none."""
        return self._call.reads

    @reads.setter
    def reads(self, reads: LayerReads | None) -> None:
        self._call.reads = reads

    def install(self, modules: nn.Module) -> None:
        """Give the attention module its gates and the hooks through which they act."""
        _watch_replacements()
        attention = self.layout.module
        attention.add_module(GATES_NAME, modules)
        attention.register_forward_pre_hook(self, with_kwargs=True)
        if self.shares:
            attention.register_forward_hook(self.forget, always_call=True)
        for hook in self.hooks:
            hook.follow()

    def remove(self) -> None:
        """Take gates and hooks away again."""
        attention = self.layout.module
        delattr(attention, GATES_NAME)
        for key in _keys(attention._forward_pre_hooks, self):
            del attention._forward_pre_hooks[key], attention._forward_pre_hooks_with_kwargs[key]
        for key in _keys(attention._forward_hooks, self.forget):
            del attention._forward_hooks[key], attention._forward_hooks_always_called[key]
        for hook in self.hooks:
            hook.leave()

    def require_plain_gates(self) -> None:
        """Refuse gates with adapters around them, where their own numbers are to be written or folded."""
        if any(not isinstance(gate, AttentionGate) for gate in self.modules.children()):
            raise ValueError(
                f"The gates of {self.layout.name} have adapters around them. Merge these first, with merge_and_unload, "
                "or save them by save_pretrained of peft."
            )

    @property
    def modules(self) -> AttentionGates:
        """The gates that act: those of the attention module, or the active copy in a wrapper."""
        return cast("AttentionGates", acting_module(getattr(self.layout.module, GATES_NAME)))

    def gate_at(self, path: GatePath) -> ActingGate | None:
        """Return the gate at a site, if there is one."""
        runs = self.modules._modules.get(path)
        return None if runs is None else ActingGate(cast("AttentionGate", base_module(runs)), runs)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the attention module runs: start new reads, and hand the output gate to the attention function."""
        require_no_tracing()
        for hook in self.hooks:
            hook.follow()
        reads = LayerReads(input=layer_input(args, kwargs, self.layout.input_name))
        if self.shares:
            self.reads = reads
        if not self.acts_in_function:
            return None
        if (name := implementation_of(module)) not in _OWN_IMPLEMENTATIONS:
            raise RuntimeError(
                f"The attention implementation {name!r} would leave out the gates of {self.layout.name}. Call "
                f"model.set_attn_implementation with {' or '.join(map(repr, _OWN_IMPLEMENTATIONS))}, or remove_gates."
            )
        return args, {**kwargs, "attn_gate": _OutputGate(self.gate_at("output"), reads)}


class _OutputGate:
    """What the attention function does to its output; the gate is None where another gate only reads the output."""

    def __init__(self, gate: ActingGate | None, reads: LayerReads) -> None:
        self.gate = gate
        self.reads = reads

    def __call__(self, output: Tensor) -> Tensor:
        self.reads.output = output
        return output if self.gate is None else self.reads.apply(self.gate, output)


class _ProjectionHook(ABC):
    """A hook on the projection that a slot holds, moved along when the projection is exchanged."""

    def __init__(self, layer: GatedLayer, slot: Slot) -> None:
        self.layer = layer
        self.slot = slot
        self.hooked: nn.Module | None = None

    def follow(self) -> None:
        """Move to the projection that the slot holds now, if it is another."""
        if self.slot.module is not self.hooked:
            self.move(self.slot.module)

    def move(self, module: nn.Module) -> None:
        """Leave the module that it is on, and go to this one."""
        self.leave()
        self.register(module)
        self.hooked = module

    @abstractmethod
    def register(self, module: nn.Module) -> None:
        """Put the hook on a projection."""

    def leave(self) -> None:
        """Take the hook away."""
        if self.hooked is not None:
            for hooks in (self.hooked._forward_hooks, self.hooked._forward_pre_hooks):
                for key in [key for key, hook in hooks.items() if hook is self]:
                    del hooks[key]
        self.hooked = None


class _ResultHook(_ProjectionHook):
    """A hook that acts on a projection's result."""

    def register(self, module: nn.Module) -> None:
        module.register_forward_hook(self)

    @abstractmethod
    def __call__(self, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Return the projection's result with the layer's gates applied."""


class _PartsHook(_ResultHook):
    """Notes the raw query, key or value of a projection, and gates it before anything else sees it."""

    def __init__(self, layer: GatedLayer, slot: Slot, parts: Sequence[tuple[PartKind, Part]]) -> None:
        super().__init__(layer, slot)
        self.parts: tuple[tuple[PartKind, Columns], ...] = tuple((kind, part.columns) for kind, part in parts)
        self.of_context = any(part.source == "context" for _, part in parts)

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        reads = self.layer.reads if self.layer.shares else None
        reads = LayerReads(input=args[0]) if reads is None else reads
        if self.of_context:
            reads.attended = args[0]
        # Latents of one head stand behind an axis of their own.
        alone = output.ndim == 4
        result = output.squeeze(1) if alone else output
        for kind, columns in self.parts:
            setattr(reads, kind, columns.take(result))
        for kind, columns in self.parts:
            gate = self.layer.gate_at(kind)
            if gate is not None:
                result = columns.put(result, reads.apply(gate, getattr(reads, kind)))
        return result.unsqueeze(1) if alone else result


class _DenseHook(_ResultHook):
    """Gates the result of the output projection, which may run after the attention module has ended."""

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # noqa: ARG002
        gate, reads = self.layer.gate_at("dense"), self.layer.reads
        assert gate is not None
        assert reads is not None
        self.layer.reads = None
        return reads.apply(gate, output)


class _OutputHook(_ProjectionHook):
    """Gates the heads' outputs, side by side, before the output projection takes them."""

    def register(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self)

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the output projection with the first one gated."""
        reads, shape = self.layer.reads, self.layer.layout.shape
        assert reads is not None
        if self.layer.gates.at("dense") is None:
            self.layer.reads = None
        heads = args[0].unflatten(-1, (shape.num_heads, shape.head_dim))
        return (_OutputGate(self.layer.gate_at("output"), reads)(heads).flatten(-2), *args[1:])


class _Forget:
    """Lets go of what the gates have read when the attention module ends, unless a gate outside it is yet to run.

    It is called after an error too, and then without a result.
    """

    def __init__(self, layer: GatedLayer) -> None:
        self.layer = layer

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], result: Any) -> None:
        if result is None or (self.layer.gates.at("dense") is None and not self.layer.acts_before_output):
            self.layer.reads = None


def _move_hooks(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Move the hooks of a slot to the module that is put there; PyTorch calls this for every new child."""
    before = owner._modules.get(name)
    hooks = () if before is None else (*before._forward_hooks.values(), *before._forward_pre_hooks.values())
    for hook in hooks:
        if isinstance(hook, _ProjectionHook) and hook.slot.owner is owner and hook.slot.name == name:
            hook.move(module)


@cache
def _watch_replacements() -> None:
    """Register `_move_hooks` with PyTorch, once in a process.

    Hooks move at once, not at the next forward pass, because a compiled model cannot move them while it runs.
    """
    register_module_module_registration_hook(_move_hooks)


def _keys(hooks: Mapping[int, Callable[..., Any]], wanted: Callable[..., Any]) -> list[int]:
    return [key for key, hook in hooks.items() if hook is wanted]


def _reads_elsewhere(gate: Gate, layout: AttentionLayout) -> bool:
    """Tell whether the gate reads something that its own hook is not given."""
    part = layout.parts.get(gate.site) if gate.site in _PARTS else None
    if part is not None and part.source == "inner" and gate.reads == "input":
        return True
    match gate.site:
        case "dense":
            return True
        case "output":
            return gate.reads in ("query", "value")
        case _:
            return gate.reads not in ("input", "nothing", gate.site)


def _projection_hooks(layer: GatedLayer) -> Iterator[_ProjectionHook]:
    wanted = {gate.site for gate in layer.gates} | {gate.reads for gate in layer.gates}
    by_slot: dict[Slot, list[tuple[PartKind, Part]]] = {}
    for kind in _PARTS:
        if kind in wanted:
            part = layer.layout.parts[kind]
            by_slot.setdefault(part.slot, []).append((kind, part))
    for slot, parts in by_slot.items():
        yield _PartsHook(layer, slot, parts)
    if layer.acts_before_output:
        assert layer.layout.output is not None
        yield _OutputHook(layer, layer.layout.output)
    if layer.gates.at("dense") is not None:
        assert layer.layout.output is not None
        yield _DenseHook(layer, layer.layout.output)
