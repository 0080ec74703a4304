"""What a trained model is measured for once, at its end: how its layers bend, and how free its heads are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.experts import model_gauge
from tidegate.experts.gauge_theory import reads_values
from tidegate.gates import Gates
from tidegate.geometry import GeometryError
from tidegate.lab.models.curvature import model_curvature
from tidegate.lab.models.language_models import language_model_of
from tidegate.lab.tasks.task import Batch
from tidegate.lab.training.measurements import LayerFreedom, ModelCurvature, Sampling
from tidegate.lab.training.model import Model
from tidegate.torch.decoder import TransformerLM

_NUM_SEQUENCES = 2
_LENGTH = 32
_SAMPLING = Sampling(num_positions=4, num_planes=8)
_WIDEST_HEAD = 32
"""The cost of a head's freedom grows with the sixth power of its width; at this one it is about a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """Both measurements, where they can be made."""

    curvature: ModelCurvature | None
    """None for images, for single positions, and where a slice is degenerate."""
    freedom: tuple[LayerFreedom, ...]
    """Empty for heads wider than 32, or than there are positions, and for gates that read what changes with a basis."""


def measure_anatomy(model: Model, probe: Batch) -> Anatomy:
    """Measure a model on the beginning of some examples; it stays as it is."""
    few = probe.inputs[:_NUM_SEQUENCES].cpu()
    return Anatomy(curvature=_curvature(model, few), freedom=_freedom(model, few))


def _curvature(model: Model, tokens: torch.Tensor) -> ModelCurvature | None:
    if not isinstance(model, TransformerLM) or tokens.shape[1] < 2:
        return None
    try:
        return model_curvature(language_model_of(model, name=str(model.config.gate)), tokens[:, :_LENGTH], _SAMPLING)
    except GeometryError:
        return None


def _freedom(model: Model, examples: torch.Tensor) -> tuple[LayerFreedom, ...]:
    width = model.config.shape.head_dim
    num_positions = examples.numel() if isinstance(model, TransformerLM) else len(examples) * model.config.num_tokens
    if not num_positions >= width <= _WIDEST_HEAD or any(map(reads_values, Gates.parse(model.config.gate))):
        return ()
    return tuple(
        LayerFreedom(
            layer=layer.layer,
            free=layer.free,
            predicted=layer.predicted,
            singular_values=tuple(map(tuple, layer.singular_values.tolist())),
        )
        for layer in model_gauge(model, examples)
    )
