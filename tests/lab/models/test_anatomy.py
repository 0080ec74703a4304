import json
from dataclasses import asdict

import pytest
import torch
from lab_runs import executed, model_of, run_of

from tidegate._json import read_as
from tidegate.config import VisionConfig
from tidegate.lab.models.anatomy import measure_anatomy
from tidegate.lab.tasks.task import Batch
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import Record


def probe_of(inputs):
    return Batch(inputs, inputs)


def anatomy_of(gate, **options):
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(0))
    return measure_anatomy(build_model(model_of(gate, **options), seed=0), probe_of(tokens))


@pytest.mark.parametrize(("gate", "free"), [("none", 64), ("g5", 64), ("g1-head", 64), ("g1", 8), ("bma", 8)])
def test_heads_are_as_free_as_the_theory_says(gate, free):
    layers = anatomy_of(gate).freedom
    assert [layer.free for layer in layers] == [(free, free)] * 2
    assert [layer.predicted for layer in layers] == [free] * 2


def test_every_layer_has_its_curvature():
    curvature = anatomy_of("bma").curvature
    assert curvature.model == "bma"
    assert [layer.layer for layer in curvature.layers] == [0, 1]
    assert all(layer.count == 2 * 4 * 8 and layer.magnitude > 0 for layer in curvature.layers)


def test_the_model_stays_as_it_is():
    model = build_model(model_of("bma"), seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_anatomy(model, probe_of(torch.zeros(2, 16, dtype=torch.long)))
    assert all(tensor.dtype == torch.float32 for tensor in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_cannot_be_measured_is_left_out():
    assert anatomy_of("output:output").freedom == ()
    assert anatomy_of("g1", head_dim=40).freedom == ()
    images = build_model(VisionConfig(d_model=16, num_layers=2, num_heads=2, image_size=8, gate="g1"), seed=0)
    pictures = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    measured = measure_anatomy(images, probe_of(pictures))
    assert measured.curvature is None
    assert all(layer.free == (8, 8) for layer in measured.freedom)


def test_the_first_run_of_a_variant_is_measured_and_its_record_can_be_read_back(task):
    record = executed(run_of(task))
    assert record.curvature is not None
    assert len(record.freedom) == 2
    assert read_as(Record, json.loads(json.dumps(asdict(record)))) == record
    later = executed(run_of(task, block=1))
    assert (later.curvature, later.freedom) == (None, ())
