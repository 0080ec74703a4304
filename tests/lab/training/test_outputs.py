"""The folder of one training: whose it is, what is in it, and its log."""

import json
import re
from dataclasses import replace

import pytest
from damage import flip_inside
from errors import rejects
from lab_runs import executed, run_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tidegate.lab.training.events import Interrupted, Notice, Progress
from tidegate.lab.training.outputs import RunLog, TrainingFolder, log_path


def step_of(step, loss=2.0):
    return Progress(
        run="a", variant="g1", seed=0, role="comparison", step=step, steps=10, tokens=100 * step, loss=loss,
        seconds=2.0 * step, flops=1e6 * step,
    )  # fmt: skip


def lines_of(folder):
    return [json.loads(line) for line in log_path(folder).read_text().splitlines()]


def test_each_step_has_a_line_with_loss_speed_share_and_time_left(tmp_path):
    log = RunLog(tmp_path, peak=1e6)
    log.report(step_of(4, loss=1.5))
    log.report(step_of(5, loss=float("nan")))
    line, odd = lines_of(tmp_path)
    assert odd["loss"] is None
    assert line == {
        "step": 4,
        "tokens": 400,
        "loss": 1.5,
        "tokens_per_second": 50.0,
        "share_of_peak": 0.5,
        "seconds": 8.0,
        "seconds_left": 12.0,
    }


def test_a_run_that_goes_on_replaces_what_it_does_again_and_what_was_cut_off(tmp_path):
    first = RunLog(tmp_path)
    for step in (1, 2, 3):
        first.report(step_of(step))
    with log_path(tmp_path).open("a") as file:
        file.write('{"step": 4, "lo')
    second = RunLog(tmp_path)
    second.report(Notice(text="The run resumes from step 1."))
    for step in (2, 3, 4):
        second.report(step_of(step, loss=1.0))
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 2.0), (2, 1.0), (3, 1.0), (4, 1.0)]


# Its files are read by code that is older than the warnings that it meets.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_same_numbers(tmp_path):
    for first, last, loss in ((1, 3, 2.0), (2, 4, 1.0)):
        log = RunLog(tmp_path, peak=1e6, tensorboard=True)
        for step in range(first, last + 1):
            log.report(step_of(step, loss=loss))
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert events.Scalars("share_of_peak")[0].value == pytest.approx(0.5)


STRAY = (".tmpAbC123", ".DS_Store", ".nfs000000000001", "notes.safetensors", "54e37b68e34d1efe.txt")
"""Files that no run has left; the first is of a safetensors writer that was killed."""


def stopped(run, folder):
    """Leave a checkpoint of a run in a folder."""
    folder.checkpoints.mkdir(parents=True)
    with pytest.raises(Interrupted):
        executed(run, folder=folder.checkpoints, stopping=lambda: True)


def kept(run, folder):
    """Train a run in a folder to its end."""
    folder.keep(run, executed(run, folder=folder.checkpoints))


def test_files_that_no_run_has_left_do_not_count_as_runs(task, tmp_path):
    folder = TrainingFolder(tmp_path)
    folder.checkpoints.mkdir()
    for name in STRAY:
        (folder.checkpoints / name).touch()
    assert folder.finished(run_of(task)) is None
    assert not folder.has_begun()


def test_files_of_killed_writers_are_removed_and_no_others(tmp_path):
    folder = TrainingFolder(tmp_path)
    folder.checkpoints.mkdir()
    partial = "model.safetensors.0123456789abcdef.partial"
    for place in (tmp_path, folder.checkpoints):
        for name in (*STRAY, partial, "mine.partial"):
            (place / name).touch()
    folder.remove_partial_files()
    assert {file.name for file in folder.checkpoints.iterdir()} == {*STRAY[1:], "mine.partial"}
    assert {file.name for file in tmp_path.iterdir()} == {*STRAY[1:], "mine.partial", "checkpoints"}


@pytest.mark.parametrize("leave", [stopped, kept])
def test_the_folder_of_another_run_is_rejected_by_what_differs(task, tmp_path, leave):
    folder, other = TrainingFolder(tmp_path), run_of(task, lr=2e-2)
    leave(other, folder)
    run = run_of(replace(task, num_validation_tokens=128))
    with rejects("out", hint=f"the run {other.id}: ") as caught:
        folder.finished(run)
    differences = re.search(r": (.*)\. Use the options", caught.value.hint)[1]
    assert differences == (
        "task.num_validation_tokens is 256 there and 128 here, training.lr is 0.02 there and 0.01 here"
    )


def test_the_folder_of_a_run_whose_checkpoint_cannot_be_read_is_rejected(task, tmp_path):
    folder, other = TrainingFolder(tmp_path), run_of(task, lr=2e-2)
    folder.checkpoints.mkdir()
    (folder.checkpoints / f"{other.id}.safetensors").write_bytes(b"half")
    with rejects("out", hint=f"the run {other.id}: its options or data differ"):
        folder.finished(run_of(task))


@pytest.mark.parametrize(
    "damage", [flip_inside, lambda path: path.write_bytes(path.read_bytes()[:-100])], ids=["flipped", "truncated"]
)
def test_a_trained_model_that_is_damaged_is_an_error_and_removed_it_is_trained_again(task, tmp_path, damage):
    folder, run = TrainingFolder(tmp_path), run_of(task)
    kept(run, folder)
    whole = folder.model.read_bytes()
    assert folder.finished(run).status == "finished"
    damage(folder.model)
    with rejects("out", hint="Remove that file"):
        folder.finished(run)
    folder.model.unlink()
    assert folder.finished(run) is None
    kept(run, folder)
    assert folder.model.read_bytes() == whole
