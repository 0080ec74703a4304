"""Measure a run's trained model: the curvature of its layers, and the gauge of their heads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tidegate.experts import model_gauge
from tidegate.experts.channel_gauge import positions_needed
from tidegate.experts.gauge_theory import reads_values
from tidegate.gates import Gates
from tidegate.geometry import GeometryError
from tidegate.lab.models.curvature import model_curvature
from tidegate.lab.models.language_models import make_language_model
from tidegate.lab.tasks.task import Batch
from tidegate.lab.training.checkpoint import load_checkpoint
from tidegate.lab.training.measurements import LayerGauge, ModelCurvature, Sampling
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import LayerMeasurements
from tidegate.lab.training.run import Run
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.weights import Model

_NUM_SEQUENCES = 2
_LENGTH = 32
_SAMPLING = Sampling(num_positions=4, num_planes=8)
_WIDEST_HEAD = 32
"""The cost of a head's gauge grows with the sixth power of its width; at this width it is about one second."""


def measure_run(run: Run, checkpoints: Path) -> LayerMeasurements:
    """Measure the model in the last checkpoint of a finished run, of one process or several.

    A missing or damaged checkpoint is not an error: the result states the reason.
    """
    model = build_model(run.model, seed=run.seed)
    loaded = load_checkpoint(checkpoints, model, run=run.id)
    if loaded.state is None or loaded.state.step != run.training.steps:
        reason = f"the checkpoint with the trained model is {'damaged' if loaded.problems else 'no longer there'}"
        return LayerMeasurements(id=run.id, curvature_reason=reason, gauge_reason=reason)
    before = torch.get_num_threads()
    torch.set_num_threads(run.training.num_threads)
    try:
        return measure_layers(model, run.task.load().probe(), run=run.id)
    finally:
        torch.set_num_threads(before)


def measure_layers(model: Model, probe: Batch, *, run: str) -> LayerMeasurements:
    """Measure the model of a run, given by its id, on the beginning of some examples, without changing it."""
    if model.config.gates.read_other_sequences:
        reason = "its gate reads another sequence, so its layers depend on more than their own input"
        return LayerMeasurements(id=run, curvature_reason=reason, gauge_reason=reason)
    examples = probe.inputs[:_NUM_SEQUENCES].cpu()
    curvature, curvature_reason = _curvature(model, examples)
    gauge_reason = _no_gauge_reason(model, examples)
    return LayerMeasurements(
        id=run,
        curvature=curvature,
        curvature_reason=curvature_reason,
        gauge=()
        if gauge_reason
        else tuple(
            LayerGauge(
                layer=layer.layer,
                free=layer.free,
                predicted=layer.predicted,
                singular_values=tuple(map(tuple, layer.singular_values.tolist())),
            )
            for layer in model_gauge(model, examples)
        ),
        gauge_reason=gauge_reason,
    )


def _curvature(model: Model, examples: Tensor) -> tuple[ModelCurvature | None, str]:
    """Return the curvature, or the reason why there is none."""
    if not isinstance(model, TransformerLM):
        return None, "curvature is measured on language models alone"
    if examples.shape[1] < 2:
        return None, "the examples have only one position"
    try:
        language_model = make_language_model(model, name=str(model.config.gate))
        return model_curvature(language_model, examples[:, :_LENGTH], _SAMPLING), ""
    except GeometryError as problem:
        return None, str(problem).rstrip(".")


def _no_gauge_reason(model: Model, examples: Tensor) -> str:
    """Return the reason why the gauge cannot be measured, or an empty string."""
    width = model.config.shape.head_dim
    if width > _WIDEST_HEAD:
        return f"the measurement is too slow for heads of {width} channels, more than {_WIDEST_HEAD}"
    num_positions = examples.numel() if isinstance(model, TransformerLM) else len(examples) * model.config.num_tokens
    if num_positions < (needed := positions_needed(model.config.shape)):
        return f"heads of {width} channels need {needed} positions, and the examples have {num_positions}"
    if any(map(reads_values, Gates.parse(model.config.gate))):
        return "its gate reads values or attention outputs, so it depends on their basis"
    return ""
