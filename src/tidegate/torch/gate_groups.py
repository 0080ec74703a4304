"""Train gates separately from the rest of a model: freeze the rest, or give gates their own learning rate."""

from __future__ import annotations

from typing import Any

from torch import nn

from tidegate._validation import InputError
from tidegate.torch.gate import gate_parameters


def freeze_all_but_gates(model: nn.Module) -> int:
    """Freeze all parameters except those of gates, and return the number of gate parameters.

    `model.requires_grad_()` undoes it.

    Raises:
        InputError: The model has no gates.
    """
    gates = list(gate_parameters(model))
    if not gates:
        hint = "Build it with a gate, or call add_gates(model) first."
        raise InputError("model", expected="a model with gates", got=type(model).__name__, hint=hint)
    model.requires_grad_(False)
    for gate in gates:
        gate.requires_grad_()
    return sum(gate.numel() for gate in gates)


def gate_optimizer_groups(
    model: nn.Module, *, lr: float, gate_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Split a model's parameters into groups for an optimizer: gates, then matrices, then biases and norms.

    Gates have their own learning rate and no decay; matrices decay, biases and norms do not. Parameters that require no
    gradient are left out, and so are groups without parameters.

    Args:
        model: With gates.
        lr: Learning rate of all parameters except gates.
        gate_lr: Learning rate of gates; None is ten times `lr`, since a gate that starts at zero moves slowly.
        weight_decay: Of the matrices that are not gates.
    """
    gates = [gate for gate in gate_parameters(model) if gate.requires_grad]
    known = set(gate_parameters(model))
    rest = [weight for weight in model.parameters() if weight.requires_grad and weight not in known]
    matrices, vectors = ([weight for weight in rest if (weight.ndim > 1) is many] for many in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": gates, "lr": 10 * lr if gate_lr is None else gate_lr, "weight_decay": 0.0},
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": vectors, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
