"""Every fault point is reached by the writer that it belongs to, in this process and in others."""

import errno

import fault_points
import pytest
from fault_points import POINTS
from lab_runs import model_of, run_of, text_of
from retrofit_models import tiny

from tidegate._files import write_content
from tidegate.lab.training.checkpoint import TrainingState, save_checkpoint
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import LayerMeasurements, RecordFile
from tidegate.lab.training.train import make_optimizer
from tidegate.torch import save_model
from tidegate.torch.retrofit import add_gates, save_gates


def write_record(folder):
    RecordFile(folder / "records.jsonl").append(LayerMeasurements(id="1"))


def write_checkpoints(folder):
    run = run_of(text_of(folder))
    model = build_model(run.model, seed=0)
    for _ in range(2):
        save_checkpoint(folder, model, make_optimizer(model, run), run=run, state=TrainingState())


def write_model(folder):
    save_model(build_model(model_of()), folder / "m")


def write_gates(folder):
    model = tiny("llama")
    add_gates(model, "g1")
    save_gates(model, folder)


WRITERS = {
    "record": write_record,
    "checkpoint": write_checkpoints,
    "model": write_model,
    "gates": write_gates,
    "file": lambda folder: write_content(folder / "f", b"x"),
}


@pytest.mark.parametrize("point", POINTS)
def test_every_point_is_reached_and_acts_when_asked(point, tmp_path, monkeypatch):
    fault_points.ask_for(monkeypatch, point)
    with pytest.raises(OSError, match="No space left on device") as raised:
        WRITERS[point.partition(":")[0]](tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert fault_points.reached == {point: 1}
