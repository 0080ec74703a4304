import json
from dataclasses import asdict, replace

import fault_points
import pytest
import torch
from damage import flip_inside, forge_tensors
from lab_runs import run_of

from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.training import checkpoint
from tidegate.lab.training.checkpoint import (
    LoadedCheckpoint,
    TrainingState,
    checkpoint_path,
    forget_checkpoint,
    load_checkpoint,
    previous_path,
    save_checkpoint,
)
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import Point
from tidegate.lab.training.train import make_optimizer, train_step

POINT = Point(step=3, tokens=12, flops=1e9, loss=None, train_loss=2.5, gradient_norm=0.1 + 0.2)
RUN = run_of(RecallTask())
"""What checkpoints say that they are of; its tensors are those of a text."""
STATE = TrainingState(step=3, elapsed=0.1 + 0.2, started="now", batches="abc", curve=[POINT], seconds=[0.5])
MOMENT = "optimizer.stack.norm.weight.exp_avg"
LOADED = LoadedCheckpoint(state=STATE, problems=())


@pytest.fixture
def trained(task):
    return advanced(task, steps=3)


@pytest.fixture
def path(tmp_path):
    return checkpoint_path(tmp_path / "checkpoints", RUN.id)


@pytest.fixture
def two(trained, path):
    """A run with two checkpoints, of steps 2 and 3, and where the last of them lies."""
    _, model, optimizer = trained
    for step in (2, 3):
        save_checkpoint(path.parent, model, optimizer, run=RUN, state=replace(STATE, step=step))
    return path


def advanced(task, *, steps):
    run = run_of(task, gate_lr=0.5)
    model = build_model(run.model, seed=0)
    optimizer = make_optimizer(model, run)
    for step in range(steps):
        train_step(model, optimizer, run.task.load().batch(seed=0, step=step, size=4), run, step)
    return run, model, optimizer


def loaded_step(path, task):
    """The step of the checkpoint that a run finds, and why it did not take another."""
    _, model, optimizer = advanced(task, steps=0)
    before = [parameter.clone() for parameter in model.parameters()]
    loaded = load_checkpoint(path.parent, model, optimizer, run=RUN.id)
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
    assert any(changed) is (loaded.state is not None)
    return loaded.state and loaded.state.step, loaded.problems


def test_model_optimiser_and_state_come_back_bit_for_bit(task, trained, path):
    run, model, optimizer = trained
    save_checkpoint(path.parent, model, optimizer, run=RUN, state=STATE)
    _, other, its_optimizer = advanced(task, steps=0)
    assert load_checkpoint(path.parent, other, its_optimizer, run=RUN.id) == LOADED
    batch = run.task.load().batch(seed=0, step=3, size=4)
    assert train_step(model, optimizer, batch, run, 3) == train_step(other, its_optimizer, batch, run, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    before, after = optimizer.state_dict(), its_optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(
        torch.equal(before["state"][index][name], after["state"][index][name])
        for index in before["state"]
        for name in ("step", "exp_avg", "exp_avg_sq")
    )


def test_its_folder_is_made_and_holds_the_last_two_and_nothing_else(task, trained, tmp_path):
    _, model, optimizer = trained
    path = checkpoint_path(tmp_path / "some" / "where", RUN.id)
    for step in (1, 2, 3):
        save_checkpoint(path.parent, model, optimizer, run=RUN, state=replace(STATE, step=step))
    assert sorted(path.parent.iterdir()) == [previous_path(path), path]
    assert loaded_step(path, task) == (3, ())
    path.unlink()
    assert loaded_step(path, task) == (2, ())
    forget_checkpoint(path.parent, RUN.id)
    assert not any(path.parent.iterdir())


class TestAnotherProcessThatStillSaves:
    def test_while_it_is_read_gives_its_own_state_and_tensors(self, task, trained, path, monkeypatch):
        _, model, optimizer = trained
        save_checkpoint(path.parent, model, optimizer, run=RUN, state=STATE)
        load, later = checkpoint.load_file, advanced(task, steps=5)
        saves = [lambda: save_checkpoint(path.parent, *later[1:], run=RUN, state=replace(STATE, step=5))]

        def load_late(file):
            if saves:
                saves.pop()()
            return load(file)

        monkeypatch.setattr(checkpoint, "load_file", load_late)
        _, other, its_optimizer = advanced(task, steps=0)
        loaded = load_checkpoint(path.parent, other, its_optimizer, run=RUN.id)
        assert loaded == LoadedCheckpoint(state=replace(STATE, step=5), problems=())
        assert all(torch.equal(a, b) for a, b in zip(later[1].parameters(), other.parameters(), strict=True))

    def test_while_it_is_saved_takes_nothing_from_it(self, task, trained, two, monkeypatch):
        _, model, optimizer = trained
        monkeypatch.setattr("os.fsync", lambda _: two.unlink())
        save_checkpoint(two.parent, model, optimizer, run=RUN, state=replace(STATE, step=4))
        assert loaded_step(two, task) == (4, ())


@pytest.mark.parametrize(
    ("point", "step"), [("half-written", 3), ("before-move", 3), ("after-previous", 3), ("moved", 4)]
)
def test_at_every_moment_of_a_save_one_is_whole(task, trained, two, monkeypatch, point, step):
    _, model, optimizer = trained
    fault_points.ask_for(monkeypatch, f"checkpoint:{point}")
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(two.parent, model, optimizer, run=RUN, state=replace(STATE, step=4))
    assert loaded_step(two, task) == (step, ())


class TestADamagedCheckpoint:
    def test_does_not_push_out_the_whole_one_at_the_next_save(self, task, trained, two, monkeypatch):
        _, model, optimizer = trained
        flip_inside(two)
        assert loaded_step(two, task)[0] == 2
        assert not two.exists()
        fault_points.ask_for(monkeypatch, "checkpoint:before-move")
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(two.parent, model, optimizer, run=RUN, state=STATE)
        assert loaded_step(two, task) == (2, ())

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"metadata": {"run": "b"}}, "It belongs to the run b."),
            ({"metadata": {"state": json.dumps(asdict(STATE) | {"step": "3"})}}, "state.step must be a whole number"),
            ({"tensors": {"model.stack.norm.weight": None}}, "fit the run: model.stack.norm.weight is missing"),
            ({"tensors": {MOMENT: torch.zeros(3)}}, f"{MOMENT} has shape (3,), expected (16,)"),
            ({"tensors": {"optimizer.other.exp_avg": torch.zeros(3)}}, "optimizer.other.exp_avg is unexpected"),
            ({"metadata": {"version": "0"}}, "It has version '0'"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_or_one_that_is_not_of_the_run_changes_nothing(self, task, two, change, words):
        previous_path(two).unlink()
        forge_tensors(two, **change)
        step, (problem,) = loaded_step(two, task)
        assert step is None
        assert words in problem
        assert str(two) in problem
