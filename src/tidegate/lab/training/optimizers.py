"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from tidegate.lab.training.run import Run
from tidegate.torch.block import TransformerBlock
from tidegate.torch.gate_groups import gate_optimizer_groups

OptimizerState: TypeAlias = dict[Tensor, dict[str, Tensor]]
"""The tensors that an optimizer keeps for each parameter."""


def make_optimizer(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """Return AdamW with three groups: gates at their own rate, matrices with weight decay, norms and biases without.

    With `muon` the matrices inside blocks are a group before these, updated by Muon.
    """
    training = run.training
    groups = gate_optimizer_groups(
        model, lr=training.lr, gate_lr=training.lr * training.gate_lr, weight_decay=training.weight_decay
    )
    betas = (training.beta1, training.beta2)
    if training.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=betas, fused=True)
    hidden = hidden_matrices(model)
    others = [{**group, "params": [weight for weight in group["params"] if weight not in hidden]} for group in groups]
    return MuonAndAdamW(
        list(hidden),
        [group for group in others if group["params"]],
        lr=training.lr,
        weight_decay=training.weight_decay,
        betas=betas,
    )


def empty_state(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return the state that the first step of each parameter would make, to be filled from a checkpoint."""
    states: OptimizerState = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            if "betas" in group:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                states[parameter] = {"step": step, "exp_avg": zeros, "exp_avg_sq": torch.zeros_like(zeros)}
            else:
                states[parameter] = {"momentum_buffer": zeros}
    return states


def hidden_matrices(model: nn.Module) -> dict[Tensor, None]:
    """Return the weights of linear layers inside blocks, in order: no embedding, head, gate or norm.

    They are found by type: a gate's parameters belong to an `AttentionGate`, not to a linear layer.
    """
    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    linear = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    return {module.weight: None for module in linear if module.weight.requires_grad}


@final
class MuonAndAdamW(torch.optim.Optimizer):
    """PyTorch's Muon for some matrices and its AdamW for everything else, with one state and one list of groups.

    Muon's updates are scaled to the usual size of AdamW's, so that one learning rate serves both.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, betas=betas, fused=True)
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share_state()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters."""
        assert closure is None
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; PyTorch replaces the groups and the state that the parts share."""
        super().load_state_dict(state_dict)
        self._share_state()

    def _share_state(self) -> None:
        muon, adamw = self._parts
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state
