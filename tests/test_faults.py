import errno
import os
import signal
import subprocess
import sys

import pytest
from lab_runs import model_of, run_of, text_of
from retrofit_models import tiny

from tidegate import _faults
from tidegate._faults import POINTS, reach
from tidegate._files import write_content
from tidegate.lab.training.checkpoint import TrainingState, save_checkpoint
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import LayerMeasurements, RecordFile
from tidegate.lab.training.train import make_optimizer
from tidegate.torch import save_model
from tidegate.torch.retrofit import add_gates, save_gates


@pytest.fixture(autouse=True)
def nothing_reached(monkeypatch):
    monkeypatch.delenv("TIDEGATE_FAULT", raising=False)
    _faults._reached.clear()
    yield
    _faults._reached.clear()


def write_record(folder):
    RecordFile(folder / "records.jsonl").append(LayerMeasurements(id="1"))


def write_checkpoints(folder):
    run = run_of(text_of(folder))
    model = build_model(run.model, seed=0)
    for _ in range(2):
        save_checkpoint(folder / "c", model, make_optimizer(model, run), run=run.id, state=TrainingState())


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
def test_every_point_is_reached_and_does_what_it_is_asked_to(point, tmp_path, monkeypatch):
    write = WRITERS[point.partition(":")[0]]
    monkeypatch.setenv("TIDEGATE_FAULT", f"{point}:1:full")
    with pytest.raises(OSError, match="No space left on device") as raised:
        write(tmp_path)
    assert raised.value.errno == errno.ENOSPC


def test_without_the_variable_nothing_happens(tmp_path):
    for write in WRITERS.values():
        write(tmp_path)
    assert not _faults._reached


def test_a_point_counts_and_acts_once(monkeypatch):
    monkeypatch.setenv("TIDEGATE_FAULT", "record:written:3:full")
    for name in ("record:written", "model:before-move", "record:written"):
        reach(name)
    with pytest.raises(OSError, match="No space"):
        reach("record:written")
    reach("record:written")


def test_kill_is_a_kill():
    once = "reach('record:written')"
    code = f"from tidegate._faults import reach; {once}; print('alive', flush=True); {once}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TIDEGATE_FAULT": "record:written:2:kill", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b"alive\n"


@pytest.mark.parametrize(
    "asked", ["x", "record:written", "record:wrote:1:kill", "record:written:0:kill", "record:written:1:burn", ":::"]
)
def test_what_is_not_understood_is_refused_at_the_first_point(asked, monkeypatch):
    monkeypatch.setenv("TIDEGATE_FAULT", asked)
    with pytest.raises(ValueError, match=r"TIDEGATE_FAULT must be NAME:COUNT:ACTION .* Names: record:before-write, "):
        reach("file:before-move")


def test_an_unknown_point_in_the_program_is_a_slip():
    with pytest.raises(AssertionError):
        reach("nowhere")
