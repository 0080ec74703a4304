"""Train many small classifiers at once: an attention layer with a gate or its replacement, and a linear readout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate._validation import InputError
from tidegate.lab.studies.boundary.tasks import LINEAR, NONLINEAR, TASKS, WIDTH, FloatArray, Labels, draw_examples
from tidegate.lab.studies.options import require_among, require_at_least
from tidegate.lab.training.loop import train
from tidegate.torch import GatedAttention, plain_kernel

_func: Any = torch.func

_HEADS = 2
_HEAD_DIM = 8
"""Heads as wide as a token, so that all elementwise gates have heads · width² parameters."""
_WIDER = 10
"""Head width without a gate, for the same number of parameters as with one."""
VARIANTS: dict[str, tuple[str, Callable[[Tensor], Tensor] | None]] = {
    "none": ("none", None),
    "tanh": ("none", torch.tanh),
    "gelu": ("none", F.gelu),
    "bma": ("bma", None),
    "bma-query": ("bma-query", None),
    "g1": ("g1", None),
    "output:output": ("output:output", None),
}
"""The gate of each variant, and a pointwise function of the heads' outputs."""
POINTWISE = tuple(name for name, (_, function) in VARIANTS.items() if function is not None)
GATED = tuple(name for name, (gate, _) in VARIANTS.items() if gate != "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryOptions:
    """Sizes of the study."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    tasks: tuple[str, ...] = tuple(TASKS)
    num_seeds: int = 10
    learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    num_tuning_seeds: int = 2
    """Separate seeds, after those of the study."""
    steps: int = 400
    batch_size: int = 48
    num_training: int = 1024
    num_test: int = 1000
    num_points: int = 50
    """Points at which curvature is measured: new draws from the task's distribution, without noise."""

    def __post_init__(self) -> None:
        require_among("variants", self.variants, tuple(VARIANTS))
        require_among("tasks", self.tasks, tuple(TASKS))
        if "none" not in self.variants or len(self.variants) < 2:
            raise InputError("variants", expected="none and at least one other", got=", ".join(self.variants))
        for kind in (LINEAR, NONLINEAR):
            if kind.keys().isdisjoint(self.tasks):
                expected = f"tasks with at least one of {', '.join(kind)}"
                raise InputError("tasks", expected=expected, got=", ".join(self.tasks))
        # An interval needs two seeds.
        require_at_least(self, num_seeds=2, num_tuning_seeds=1, num_points=2)
        require_at_least(self, steps=1, batch_size=1, num_training=1, num_test=1)
        if not self.learning_rates or min(self.learning_rates) <= 0:
            raise InputError("learning_rates", expected="one or more positive numbers", got=self.learning_rates)


class Classifier(nn.Module):
    """An attention layer, the mean of its outputs over the sequence, and a linear readout of two classes."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        gate, pointwise = VARIANTS[variant]
        width = _WIDER if gate == "none" else _HEAD_DIM
        self.layer = GatedAttention(WIDTH, _HEADS, gate=gate, head_dim=width, causal=False)
        self.readout = nn.Linear(WIDTH, 2)
        if pointwise is not None:
            self.layer.o_proj.register_forward_pre_hook(lambda _, inputs: (pointwise(inputs[0]), *inputs[1:]))

    def represent(self, sequences: Tensor) -> Tensor:
        """Map sequences (B, T, width) to the features (B, width) of the readout."""
        return self.layer(sequences).mean(dim=-2)

    def forward(self, sequences: Tensor) -> Tensor:
        """Map sequences (B, T, width) to logits (B, 2)."""
        return self.readout(self.represent(sequences))


class ManyAdam(torch.optim.Optimizer):
    """Adam for many models whose parameters are stacked along a leading axis, each with its own learning rate.

    PyTorch's Adam has one learning rate per tensor. Adam is elementwise, so that models do not interact.
    """

    def __init__(self, stacked: Iterable[Tensor], rates: Tensor) -> None:
        super().__init__(stacked, {"lr": 1.0})
        self.rates = rates

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter; the groups' `lr` multiplies the models' learning rates. Takes no closure."""
        assert closure is None
        for group in self.param_groups:
            rates = group["lr"] * self.rates
            for value in group["params"]:
                state = self.state[value]
                number = state["step"] = state.get("step", 0) + 1
                first = state.setdefault("first", torch.zeros_like(value)).lerp_(value.grad, 0.1)
                second = state.setdefault("second", torch.zeros_like(value)).lerp_(value.grad**2, 0.01)
                size = (second / (1 - 0.99**number)).sqrt_().add_(1e-8)
                value -= rates.reshape(-1, *[1] * (value.ndim - 1)) * first / (1 - 0.9**number) / size


def train_together(
    variant: str, cases: Sequence[tuple[str, int]], rates: Sequence[float], options: BoundaryOptions
) -> tuple[dict[str, Tensor], list[float]]:
    """Train one model for each (task, seed) in one computation; return stacked parameters and accuracies.

    Every model has its own data, initial weights and learning rate.
    """
    skeleton = Classifier(variant)
    stacked = _initial([seed for _, seed in cases], variant)
    data = [draw_data(task, seed, options) for task, seed in cases]
    inputs, test_inputs = (torch.from_numpy(np.stack([each[part] for each in data])).float() for part in (0, 2))
    labels, test_labels = (torch.from_numpy(np.stack([each[part] for each in data])) for part in (1, 3))

    def logits(parameters: dict[str, Tensor], sequences: Tensor) -> Tensor:
        return _func.functional_call(skeleton, parameters, (sequences,))

    batched = _func.vmap(logits)

    def loss(rows: Tensor) -> Tensor:
        found = batched(stacked, inputs[:, rows])
        return F.cross_entropy(found.flatten(0, 1), labels[:, rows].flatten(), reduction="sum") / options.batch_size

    generator = torch.Generator().manual_seed(0)
    shape = (options.batch_size,)
    batches = (torch.randint(options.num_training, shape, generator=generator) for _ in range(options.steps))
    with plain_kernel():
        train(
            loss,
            ManyAdam(stacked.values(), torch.tensor(rates)),
            batches,
            schedule=lambda step: 1 - step / options.steps,
            clip=None,
        )
        with torch.no_grad():
            right = (batched(stacked, test_inputs).argmax(dim=-1) == test_labels).double().mean(dim=-1)
    return {name: value.detach() for name, value in stacked.items()}, right.tolist()


def _initial(seeds: Sequence[int], variant: str) -> dict[str, Tensor]:
    """Initialize one model for each seed, and stack their parameters."""
    models: list[dict[str, Tensor]] = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append({name: value.detach() for name, value in Classifier(variant).named_parameters()})
    return {name: torch.stack([model[name] for model in models]).requires_grad_() for name in models[0]}


def draw_data(task: str, seed: int, options: BoundaryOptions) -> tuple[FloatArray, Labels, FloatArray, Labels]:
    """Draw training sequences and labels, then test sequences and labels: the same for all variants of a seed."""
    rng = np.random.default_rng((list(TASKS).index(task), seed))
    return (*draw_examples(task, rng, options.num_training), *draw_examples(task, rng, options.num_test))
