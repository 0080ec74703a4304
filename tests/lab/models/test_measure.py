import json
from dataclasses import asdict

import pytest
import torch
from damage import flip_inside
from lab_runs import COARSE, executed, model_of, run_of

from tidegate._json import decode
from tidegate.config import VisionConfig
from tidegate.geometry import GeometryError
from tidegate.lab.models import measure
from tidegate.lab.models.measure import measure_layers, measure_run
from tidegate.lab.tasks.task import Batch
from tidegate.lab.training.checkpoint import checkpoint_path
from tidegate.lab.training.events import Interrupted
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import LayerMeasurements
from tidegate.lab.training.train import make_optimizer, train_step

SAMPLING = measure._SAMPLING


@pytest.fixture(autouse=True)
def coarsely(monkeypatch):
    """Measure curvature with few samples."""
    monkeypatch.setattr(measure, "_SAMPLING", COARSE)


def layers_of(gate, **options):
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(0))
    return measure_layers(build_model(model_of(gate, **options), seed=0), Batch(tokens, tokens), run="a")


@pytest.mark.parametrize(("gate", "free"), [("none", 64), ("g5", 64), ("g1-head", 64), ("g1", 8), ("bma", 8)])
def test_heads_have_the_predicted_number_of_free_directions(gate, free):
    layers = layers_of(gate).gauge
    assert [layer.free for layer in layers] == [(free, free)] * 2
    assert [layer.predicted for layer in layers] == [free] * 2


def test_every_layer_has_its_curvature(monkeypatch):
    monkeypatch.setattr(measure, "_SAMPLING", SAMPLING)
    curvature = layers_of("bma").curvature
    assert curvature.model == "bma"
    assert [layer.layer for layer in curvature.layers] == [0, 1]
    assert all(layer.count == 2 * 4 * 8 and layer.magnitude > 0 for layer in curvature.layers)


def test_the_model_does_not_change():
    model = build_model(model_of("bma"), seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.zeros(2, 16, dtype=torch.long)
    measure_layers(model, Batch(tokens, tokens), run="a")
    assert all(tensor.dtype == torch.float32 for tensor in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("gate", "options", "reason"),
    [
        ("output:output", {}, "depends on their basis"),
        ("g1", {"head_dim": 40}, "too slow for heads of 40 channels"),
    ],
)
def test_a_gauge_that_cannot_be_measured_has_a_reason(gate, options, reason):
    measured = layers_of(gate, **options)
    assert measured.gauge == ()
    assert reason in measured.gauge_reason
    assert measured.curvature_reason == ""


def test_too_few_positions_are_a_reason():
    tokens = torch.zeros(2, 1, dtype=torch.long)
    measured = measure_layers(build_model(model_of("g1"), seed=0), Batch(tokens, tokens), run="")
    assert measured.curvature is None
    assert "only one position" in measured.curvature_reason
    assert "need 16 positions" in measured.gauge_reason


def test_a_degenerate_slice_is_a_reason(monkeypatch):
    def refuse(*_):
        raise GeometryError("Layer 0, position 1: the plane is degenerate.")

    monkeypatch.setattr(measure, "model_curvature", refuse)
    measured = layers_of("none")
    assert (measured.curvature, measured.curvature_reason) == (None, "Layer 0, position 1: the plane is degenerate")
    assert measured.gauge


def test_only_the_gauge_of_image_models_is_measured():
    images = build_model(VisionConfig(d_model=16, num_layers=2, num_heads=2, image_size=16, gate="g1"), seed=0)
    pictures = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    measured = measure_layers(images, Batch(pictures, pictures), run="")
    assert measured.curvature is None
    assert "language models" in measured.curvature_reason
    assert all(layer.free == (8, 8) for layer in measured.gauge)


def test_the_model_of_a_run_is_that_of_its_last_step(task, tmp_path):
    run = run_of(task)
    executed(run, folder=tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measured = measure_run(run, tmp_path)
        assert torch.get_num_threads() == 2 != run.training.num_threads
    finally:
        torch.set_num_threads(threads)
    model = build_model(run.model, seed=run.seed)
    optimizer = make_optimizer(model, run)
    for step in range(run.training.steps):
        batch = task.load().batch(seed=run.seed, step=step, size=run.training.batch_size)
        train_step(model, optimizer, batch, run, step)
    assert measured == measure_layers(model, task.load().probe(), run=run.id)
    assert measured.curvature is not None
    assert len(measured.gauge) == 2
    assert decode(LayerMeasurements, json.loads(json.dumps(asdict(measured)))) == measured


def test_a_checkpoint_that_is_gone_damaged_or_of_an_earlier_step_is_a_reason(task, tmp_path):
    run = run_of(task)
    path = checkpoint_path(tmp_path, run.id)

    def unmeasured(state):
        reason = f"the checkpoint with the trained model is {state}"
        return LayerMeasurements(id=run.id, curvature_reason=reason, gauge_reason=reason)

    assert measure_run(run, tmp_path) == unmeasured("no longer there")
    with pytest.raises(Interrupted):
        executed(run, folder=tmp_path, stopping=lambda: True)
    assert path.exists()
    assert measure_run(run, tmp_path) == unmeasured("no longer there")
    executed(run, folder=tmp_path)
    flip_inside(path)
    assert measure_run(run, tmp_path) == unmeasured("damaged")
