"""Every fault point is reached by the writer that it belongs to, in this process and in others."""

import errno
import os
import signal
import subprocess
import sys

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
        save_checkpoint(folder, model, make_optimizer(model, run), run=run.id, state=TrainingState())


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


def test_a_point_counts_and_acts_once(tmp_path, monkeypatch):
    fault_points.ask_for(monkeypatch, "record:written", 2)
    write_record(tmp_path)
    with pytest.raises(OSError, match="No space"):
        write_record(tmp_path)
    write_record(tmp_path)
    assert len(RecordFile(tmp_path / "records.jsonl").read()) == 3


def test_another_process_is_killed_at_its_second_write(tmp_path):
    code = (
        "from tidegate._files import write_content\n"
        "for name in ('a', 'b'): write_content(name, b'x'); print(name, flush=True)"
    )
    environment = fault_points.environment("file:before-move", 2)
    environment["PYTHONPATH"] = os.pathsep.join((environment["PYTHONPATH"], *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, cwd=tmp_path, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"a\n")
