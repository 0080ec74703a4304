"""Apply gates in the attention modules of a transformers model, by hooks on the modules and their projections.

Legend: B batch, T positions, M model width, H query heads, G key/value heads, D head width.
"""

# A module's hooks and their order have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from tidegate._validation import InputError
from tidegate.gate import GatePath
from tidegate.gates import Gates
from tidegate.torch.gate import AttentionGate, AttentionGates, GateReads
from tidegate.torch.kernel import require_no_tracing
from tidegate.torch.retrofit.interface import STOCK_IMPLEMENTATIONS, gated_implementation, implementation_of
from tidegate.torch.retrofit.layout import AttentionLayout, Columns, Part, PartKind, Slot
from tidegate.torch.retrofit.wrappers import acting_module, acting_modules, base_module

GATES_NAME = "attn_gate"
"""The name of the attention module's child with its gates."""

_PARTS: tuple[PartKind, ...] = ("query", "key", "value")
_OWN_IMPLEMENTATIONS = tuple(map(gated_implementation, STOCK_IMPLEMENTATIONS))


def gated_layers(model: nn.Module) -> Iterator[GatedLayer]:
    """Yield the layers of a model that have gates, in the order of its modules, including copies of layers."""
    for module in model.modules():
        yield from _gates_of(module)


def acting_layers(model: nn.Module) -> dict[str, GatedLayer]:
    """Return the layers whose gates act, by the first paths of their attention modules."""
    found: dict[GatedLayer, str] = {}
    for path, module in acting_modules(model):
        for layer in _gates_of(module):
            found.setdefault(layer, path)
    return {path: layer for layer, path in found.items()}


def require_gates(model: nn.Module, found: Iterable[object]) -> None:
    """Raise InputError unless gates, or layers with gates, were found in the model."""
    if next(iter(found), None) is None:
        hint = "Call add_gates(model) first."
        raise InputError("model", expected="one with gates", got=type(model).__name__, hint=hint)


def _gates_of(module: nn.Module) -> Iterator[GatedLayer]:
    return (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, GatedLayer))


@dataclass(kw_only=True, slots=True)
class LayerReads(GateReads):
    """The inputs of the gates in one call, set as the projections run; there is no partition."""

    key: Tensor | None = None
    """(B, T, G, D), raw."""

    def apply(self, gate: nn.Module, target: Tensor) -> Tensor:
        """Apply a gate, or the adapter around one, to the target."""
        plain = cast("AttentionGate", base_module(gate))
        return plain.combine(target, gate(plain.source(self)))

    def gate_output(self, gate: nn.Module | None, output: Tensor) -> Tensor:
        """Store the attention output (B, T, H, D) and apply its gate, if any; other gates may read the output."""
        self.output = output
        return output if gate is None else self.apply(gate, output)


class _Call(threading.local):
    """The inputs of the gates in one thread's call of a layer; copies of a layer start without."""

    reads: LayerReads | None = None

    def __reduce__(self) -> tuple[type[_Call], tuple[()]]:
        return _Call, ()


class GatedLayer:
    """A pre-hook on an attention module that applies its gates and stores the shared state of the layer's hooks.

    Hooks leave the names of the state dict unchanged. They move when a projection is replaced, so that gates read and
    multiply the result of an adapter around a projection.
    """

    def __init__(self, layout: AttentionLayout, gates: Gates) -> None:
        self.layout = layout
        self.gates = gates
        self.call = _Call()
        at_output = any("output" in (gate.site, gate.reads) for gate in gates)
        self.acts_in_function = at_output and layout.in_function
        self.acts_before_output = at_output and not layout.in_function
        self.hooks = tuple(_projection_hooks(self))

    def install(self, modules: nn.Module) -> None:
        """Add the gates and their hooks to the attention module."""
        attention = self.layout.module
        attention.add_module(GATES_NAME, modules)
        attention.register_forward_pre_hook(self, with_kwargs=True)
        attention.register_forward_hook(self.end_call, always_call=True)
        for hook in self.hooks:
            hook.move(hook.slot.module)

    def remove(self) -> None:
        """Remove gates and hooks."""
        delattr(self.layout.module, GATES_NAME)
        _remove_hooks(self.layout.module, lambda each: each in (self, self.end_call))
        for hook in self.hooks:
            hook.move(None)

    def require_plain_gates(self) -> None:
        """Raise InputError for gates with adapters around them, which change what the gates compute."""
        if any(not isinstance(gate, AttentionGate) for gate in self.modules.children()):
            expected = "one whose gates have no adapters"
            hint = "Merge these first, with merge_and_unload, or save them with save_pretrained of peft."
            raise InputError("model", expected=expected, got=f"adapters at the gates of {self.layout.name}", hint=hint)

    @property
    def modules(self) -> AttentionGates:
        """The gates that act: those of the attention module, or the active copy in a wrapper."""
        return cast("AttentionGates", acting_module(getattr(self.layout.module, GATES_NAME)))

    def reads(self) -> LayerReads:
        """Return the inputs of the gates in the current call, or raise RuntimeError if there is none."""
        if self.call.reads is None:
            raise RuntimeError(
                f"The output projection of {self.layout.name} runs without the attention module that it was gated "
                "with. If you replaced one of them, replace the layer that contains both."
            )
        return self.call.reads

    def gate_at(self, path: GatePath) -> nn.Module | None:
        """Return the gate at a site, or the adapter around it, if any."""
        return self.modules._modules.get(path)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start a call of the attention module, and pass the output gate to the attention function."""
        require_no_tracing()
        for hook in self.hooks:
            hook.move(hook.slot.module)
        self.call.reads = reads = LayerReads(input=args[0] if args else kwargs[self.layout.input_name])
        if not self.acts_in_function:
            return None
        if (name := implementation_of(module)) not in _OWN_IMPLEMENTATIONS:
            raise RuntimeError(
                f"The attention implementation {name!r} would ignore the gates of {self.layout.name}. Call "
                f"model.set_attn_implementation with {' or '.join(map(repr, _OWN_IMPLEMENTATIONS))}, or remove_gates."
            )
        return args, {**kwargs, "attn_gate": partial(reads.gate_output, self.gate_at("output"))}

    def end_call(self, _module: nn.Module, _args: tuple[Any, ...], result: Any) -> None:
        """Drop the inputs of the gates after the attention module, unless a gate outside it still has to run.

        After an error PyTorch calls this without a result.
        """
        if result is None or (self.gates.at("dense") is None and not self.acts_before_output):
            self.call.reads = None


class _ProjectionHook(ABC):
    """A hook on the projection in a slot, moved when the projection is replaced."""

    runs_before: ClassVar[bool] = False
    """Whether it is a pre-hook, which receives the projection's arguments instead of its result."""

    def __init__(self, layer: GatedLayer, slot: Slot) -> None:
        self.layer = layer
        self.slot = slot
        self.hooked: nn.Module | None = None

    def move(self, module: nn.Module | None) -> None:
        """Move the hook to this projection, unless it is there; None only removes it."""
        if module is not None and module is self.hooked:
            present = module._forward_pre_hooks if self.runs_before else module._forward_hooks
            if self in present.values():
                return
        if self.hooked is not None:
            _remove_hooks(self.hooked, lambda each: each is self)
        self.hooked = module
        if module is not None:
            # Quantization copies this hook to the new module. Copied or shared projections have hooks of other slots.
            _remove_hooks(
                module, lambda each: each is self or (isinstance(each, _ProjectionHook) and each.slot != self.slot)
            )
            hook: Any = self
            (module.register_forward_pre_hook if self.runs_before else module.register_forward_hook)(hook)

    @abstractmethod
    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], *_result: Any) -> Any:
        """Return the projection's arguments or its result with gates applied."""


class _PartsHook(_ProjectionHook):
    """Stores the raw query, key or value of a projection, and applies its gate."""

    def __init__(self, layer: GatedLayer, slot: Slot, parts: Sequence[tuple[PartKind, Part]]) -> None:
        super().__init__(layer, slot)
        self.parts: tuple[tuple[PartKind, Columns], ...] = tuple((kind, part.columns) for kind, part in parts)
        self.of_context = any(part.source == "context" for _, part in parts)

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], *_result: Any) -> Tensor:
        (output,) = _result
        # A model may call a projection outside its attention module.
        reads = self.layer.call.reads or LayerReads(input=_args[0])
        if self.of_context:
            reads.context = _args[0]
        # Latents (B, 1, T, W) have an extra axis for their single head.
        latent = output.ndim == 4
        gated = output.squeeze(1) if latent else output
        for kind, columns in self.parts:
            setattr(reads, kind, columns.take(gated))
        for kind, columns in self.parts:
            gate = self.layer.gate_at(kind)
            if gate is not None:
                gated = columns.put(gated, reads.apply(gate, getattr(reads, kind)))
        return gated.unsqueeze(1) if latent else gated


class _DenseHook(_ProjectionHook):
    """Gates the result of the output projection, which may run after the attention module."""

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], *_result: Any) -> Tensor:
        gate, reads = self.layer.gate_at("dense"), self.layer.reads()
        assert gate is not None
        self.layer.call.reads = None
        return reads.apply(gate, *_result)


class _OutputHook(_ProjectionHook):
    """Gates the concatenated heads before the output projection."""

    runs_before = True

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], *_result: Any) -> tuple[Any, ...]:
        reads, shape = self.layer.reads(), self.layer.layout.shape
        if self.layer.gates.at("dense") is None:
            self.layer.call.reads = None
        heads = _args[0].unflatten(-1, (shape.num_heads, shape.head_dim))
        return (reads.gate_output(self.layer.gate_at("output"), heads).flatten(-2), *_args[1:])


def _remove_hooks(module: nn.Module, matches: Callable[[object], bool]) -> None:
    # `RemovableHandle` does not survive a deep copy of the model.
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, each in hooks.items() if matches(each)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def _move_hooks(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Move the hooks of a slot to its new module; PyTorch calls this for every new child."""
    before = owner._modules.get(name)
    hooks = () if before is None else (*before._forward_hooks.values(), *before._forward_pre_hooks.values())
    for hook in hooks:
        if isinstance(hook, _ProjectionHook) and hook.slot.owner is owner and hook.slot.name == name:
            hook.move(module)


# Hooks move at once, not at the next forward pass, because a compiled model cannot move them while it runs.
register_module_module_registration_hook(_move_hooks)


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
