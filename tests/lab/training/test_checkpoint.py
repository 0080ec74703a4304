import pytest
import torch
from lab_runs import run_of

from tidegate.lab.training import checkpoint
from tidegate.lab.training.checkpoint import load_checkpoint, save_checkpoint
from tidegate.lab.training.model import build_model
from tidegate.lab.training.train import make_optimizer, train_step

STATE = {"step": 3, "elapsed": 0.1 + 0.2, "curve": [{"loss": None}]}


@pytest.fixture
def trained(task):
    return advanced(task, steps=3)


def advanced(task, *, steps):
    run = run_of(task, gate_lr=0.5)
    model = build_model(run.model, seed=0)
    optimizer = make_optimizer(model, run)
    for step in range(steps):
        train_step(model, optimizer, run.task.load().batch(seed=0, step=step, size=4), run, step)
    return run, model, optimizer


def test_model_optimiser_and_state_come_back_bit_for_bit(task, trained, tmp_path):
    run, model, optimizer = trained
    save_checkpoint(tmp_path / "a", model, optimizer, STATE)
    _, other, its_optimizer = advanced(task, steps=0)
    assert load_checkpoint(tmp_path / "a", other, its_optimizer) == STATE
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


def test_the_model_alone_comes_back_without_an_optimiser(task, trained, tmp_path):
    _, model, optimizer = trained
    save_checkpoint(tmp_path / "a", model, optimizer, STATE)
    _, other, _ = advanced(task, steps=0)
    assert load_checkpoint(tmp_path / "a", other) == STATE
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_where_there_is_none_nothing_changes(trained, tmp_path):
    _, model, optimizer = trained
    before = [parameter.clone() for parameter in model.parameters()]
    assert load_checkpoint(tmp_path / "none", model, optimizer) is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_its_folder_is_made_and_nothing_else_is_left_in_it(trained, tmp_path):
    _, model, optimizer = trained
    path = tmp_path / "some" / "where" / "a.safetensors"
    save_checkpoint(path, model, optimizer, STATE)
    save_checkpoint(path, model, optimizer, STATE)
    assert list(path.parent.iterdir()) == [path]


def test_one_that_was_not_written_to_its_end_leaves_the_one_before(trained, tmp_path, monkeypatch):
    _, model, optimizer = trained
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, model, optimizer, STATE)

    def broken(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(path, model, optimizer, STATE | {"step": 4})
    assert load_checkpoint(path, model, optimizer) == STATE
    assert not list(tmp_path.glob("*.partial"))
