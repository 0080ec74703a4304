"""Tensor parallelism: heads, their gates and the inner channels of feed-forward layers, sharded as DTensors.

Each process computes with its own heads. The input of a layer is the same in all processes, and so is its output: the
partial results of the processes are summed after the output projection. A gate is sharded with its heads; a gate at the
dense site, where there are no heads, by the channels that it reads.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from tidegate._text import number_of
from tidegate._validation import InputError
from tidegate.torch.attention import GatedAttention
from tidegate.torch.block import FeedForward
from tidegate.torch.gate import AttentionGate

Gradient: TypeAlias = Literal["whole", "summed", "shared"]
"""The part of a parameter's gradient that a process computes: `whole`, the whole gradient of its shard; `summed`, one
summand, because it uses a copy only for its own heads; `shared`, the whole gradient of a parameter that every process
adds to a sum."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement of a parameter, and the part of its gradient that a process computes."""

    placement: Placement
    gradient: Gradient = "whole"


_EVERYWHERE = Placed(Replicate())
_BY_ROW, _BY_COLUMN = Placed(Shard(0)), Placed(Shard(1))
_SHARED, _SUMMED = Placed(Replicate(), "shared"), Placed(Replicate(), "summed")

_FEEDFORWARD_PLAN = {
    **{f"{name}.{part}": _BY_ROW for name in ("gate_proj", "up_proj") for part in ("weight", "bias")},
    "down_proj.weight": _BY_COLUMN,
    "down_proj.bias": _SHARED,
}


def tensor_parallel_plan(model: nn.Module, num_processes: int) -> dict[str, Placed]:
    """Return the placement of each parameter by name.

    Query, key and value projections, metrics and gates are sharded by head, the output projection by the columns that
    read the heads, feed-forward layers by their inner channels. All other parameters are replicated.

    Raises:
        InputError: The heads or channels of a layer cannot be divided among so many processes.
    """
    plan = dict.fromkeys((name for name, _ in model.named_parameters()), _EVERYWHERE)
    for path, module in model.named_modules():
        if isinstance(module, GatedAttention):
            own = _attention_plan(module, path, num_processes)
        elif isinstance(module, FeedForward):
            own = _FEEDFORWARD_PLAN
        else:
            continue
        # Plans include parameters, such as biases, that only some layers have.
        named = {f"{path}.{name}" if path else name: placed for name, placed in own.items()}
        plan |= {name: placed for name, placed in named.items() if name in plan}
    return plan


def shard_heads(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model over the processes of a one-dimensional mesh, in place, by its plan.

    Its parameters become DTensors. Call the model only inside `local_weights`, backward pass included.
    """
    plan = tensor_parallel_plan(model, mesh.size())
    for name, placed in plan.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        weight = module.get_parameter(own)
        sharded = distribute_tensor(weight.detach(), mesh, [placed.placement])
        module.register_parameter(own, nn.Parameter(sharded, requires_grad=weight.requires_grad))
    model.__dict__[_PLAN] = (plan, mesh)
    for module in model.modules():
        if isinstance(module, GatedAttention):
            _shard_attention(module, mesh)
        elif isinstance(module, FeedForward):
            module.register_forward_pre_hook(lambda _, given: (_copy_to_heads(given[0], mesh), *given[1:]))
            _add_up_output(module.down_proj, mesh)


@contextmanager
def local_weights(model: nn.Module) -> Generator[None]:
    """Let a model that `shard_heads` has sharded compute with its local shards, as plain tensors.

    Other models are not changed.
    """
    plan, mesh = model.__dict__.get(_PLAN, ({}, None))
    shadowed: list[tuple[nn.Module, str]] = []
    try:
        for name, placed in plan.items():
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            # Python finds it before the parameter of that name, which optimizers and files still use.
            module.__dict__[own] = _own_part(module.get_parameter(own), placed, mesh)
            shadowed.append((module, own))
        yield
    finally:
        for module, own in shadowed:
            del module.__dict__[own]


_PLAN = "_tensor_parallel_plan"
_REMEDY = "Use another number of processes, or another way to run in parallel."


@dataclass(frozen=True, slots=True)
class DenseShare:
    """The channels that this process reads for a gate at the dense site."""

    mesh: DeviceMesh
    slices_source: bool
    """Whether the tensor that the gate reads is the same everywhere and must be sliced; heads are sliced already."""

    def own_part(self, source: Tensor) -> Tensor:
        """Return the channels of this process."""
        return source.chunk(self.mesh.size(), dim=-1)[self.mesh.get_local_rank()] if self.slices_source else source

    def add_up(self, logits: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return _add_up(logits, self.mesh)


def _attention_plan(layer: GatedAttention, path: str, num_processes: int) -> dict[str, Placed]:
    for name, count in (("num_heads", layer.shape.num_heads), ("num_kv_heads", layer.shape.num_kv_heads)):
        if count % num_processes:
            expected = f"a divisor of the {number_of(count, 'head')} of {path or 'the layer'} ({name})"
            raise InputError("num_processes", expected=expected, got=num_processes, hint=_REMEDY)
    plan = {f"{name}.{part}": _BY_ROW for name in ("q_proj", "k_proj", "v_proj") for part in ("weight", "bias")}
    plan |= {"o_proj.weight": _BY_COLUMN, "o_proj.bias": _SHARED, "metric.weight": _BY_ROW}
    # One scale for all heads: each process has the gradient of its own heads.
    plan |= {f"{name}.weight": _SUMMED for name in ("q_norm", "k_norm")}
    for site, gate in layer.attn_gate.named_children():
        assert isinstance(gate, AttentionGate)
        plan |= {f"attn_gate.{site}.{name}": placed for name, placed in _gate_plan(gate, path, num_processes).items()}
    return plan


def _gate_plan(gate: AttentionGate, path: str, num_processes: int) -> dict[str, Placed]:
    names = [name for name, _ in gate.named_parameters()]
    if gate.gate.site != "dense":
        # A matrix for each head or group of heads is sharded with them; one for the whole layer is replicated.
        return dict.fromkeys(names, _BY_ROW if gate.num_matrices > 1 else _SUMMED)
    first = next((name for name in names if name != "bias"), None)
    if first is None:
        return {}
    width = gate.get_parameter(first).shape[1]
    if width % num_processes or (gate.gate.width is not None and gate.gate.reads != "input"):
        channels = f"{width} channels that the gate {gate.gate} of {path or 'the layer'} reads"
        expected = f"a number that can share the {channels}"
        raise InputError("num_processes", expected=expected, got=num_processes, hint=_REMEDY)
    return {first: _BY_COLUMN}


def _shard_attention(layer: GatedAttention, mesh: DeviceMesh) -> None:
    """Make a layer compute with the heads of this process, and sum its output over all processes."""

    def enter(_: nn.Module, given: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        read = {name: options[name] for name in ("x", "context") if options.get(name) is not None}
        copied = {name: _copy_to_heads(value, mesh) for name, value in read.items()}
        return tuple(_copy_to_heads(value, mesh) for value in given), {**options, **copied}

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    _add_up_output(layer.o_proj, mesh)
    for gate in layer.attn_gate.children():
        assert isinstance(gate, AttentionGate)
        if gate.gate.site == "dense":
            gate.share = None if gate.gate.is_input_independent else DenseShare(mesh, gate.gate.reads == "input")
        else:
            gate.num_heads //= mesh.size()
            gate.num_matrices = max(1, gate.num_matrices // mesh.size())


def _add_up_output(module: nn.Module, mesh: DeviceMesh) -> None:
    def add_up(_: nn.Module, __: Any, output: Any) -> Tensor:
        return _add_up(output, mesh)

    module.register_forward_hook(add_up)


def _own_part(weight: Tensor, placed: Placed, mesh: DeviceMesh) -> Tensor:
    assert isinstance(weight, DTensor)
    local = weight.to_local()
    match placed.gradient:
        case "whole":
            return local
        case "summed":
            return _copy_to_heads(local, mesh)
        case "shared":
            # The values of all processes sum to the parameter; the gradient is that of the whole parameter.
            return local.detach() / mesh.size() + (local - local.detach())


def _copy_to_heads(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the same tensor; its gradient is the sum of those of all processes."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _add_up(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over all processes; its gradient is the same in all of them."""
    summed = DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return summed.to_local()
