import pytest
import torch
from errors import rejects

from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.tasks.task import NO_TARGET


def answers(task, row):
    """What a perfect memory says of one row."""
    pairs = row[: 2 * task.num_pairs].tolist()
    values = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return [values[key] for key in row[2 * task.num_pairs :].tolist()]


@pytest.mark.parametrize(
    "task", [RecallTask(), RecallTask(num_pairs=5, num_queries=3, num_keys=5, num_values=2), RecallTask(num_pairs=1)]
)
def test_targets_are_what_stood_beside_the_keys_and_nothing_else(task):
    inputs, targets = task.load().batch(seed=0, step=0, size=50)
    assert inputs.shape == targets.shape == (50, task.length)
    assert inputs.dtype == targets.dtype == torch.int64
    assert (targets[:, : 2 * task.num_pairs] == NO_TARGET).all()
    for row, target in zip(inputs, targets[:, 2 * task.num_pairs :], strict=True):
        assert target.tolist() == answers(task, row)


def test_keys_and_values_are_different_tokens_and_all_of_them_come():
    task = RecallTask(num_pairs=4, num_keys=10, num_values=7)
    inputs, _ = task.load().batch(seed=0, step=0, size=500)
    assert set(inputs[:, 0:8:2].flatten().tolist()) == set(range(10))
    assert set(inputs[:, 1:8:2].flatten().tolist()) == set(range(10, 17))
    assert task.load().vocab_size == 17


def test_keys_of_an_example_differ_and_are_asked_for_once():
    inputs, _ = RecallTask().load().batch(seed=0, step=0, size=50)
    for row in inputs.tolist():
        assert len(set(row[0:32:2])) == 16
        assert sorted(row[32:]) == sorted(row[0:32:2])
        assert row[32:] != row[0:32:2]


def test_a_batch_depends_on_seed_and_step_alone():
    data = RecallTask().load()
    first = data.batch(seed=3, step=5, size=4).inputs
    assert torch.equal(first, RecallTask().load().batch(seed=3, step=5, size=4).inputs)
    assert not torch.equal(first, data.batch(seed=3, step=6, size=4).inputs)
    assert not torch.equal(first, data.batch(seed=4, step=5, size=4).inputs)


def test_no_seed_gives_a_held_out_example():
    data = RecallTask().load()
    held_out = {tuple(row) for batch in (*data.validation(), data.probe()) for row in batch.inputs.tolist()}
    assert len(held_out) == 512 + 8
    for seed in (0, 1, 2, 2**32, 2**32 + 1, 2**63):
        seen = {tuple(row) for step in range(9) for row in data.batch(seed=seed, step=step, size=64).inputs.tolist()}
        assert held_out.isdisjoint(seen)


def test_validation_is_the_same_each_time():
    first, again = RecallTask().load().validation(), RecallTask().load().validation()
    assert [len(batch.inputs) for batch in first] == [64] * 8
    assert all(torch.equal(a.targets, b.targets) for a, b in zip(first, again, strict=True))


def test_long_examples_have_four_times_the_pairs_if_there_are_keys_for_them():
    task = RecallTask(num_pairs=4, num_queries=3, num_keys=16)
    inputs, targets = task.load().long()
    assert inputs.shape[1] == targets.shape[1] == 4 * task.length
    assert (targets != NO_TARGET).sum(dim=1).tolist() == [12] * len(inputs)
    assert targets[0, 32:].tolist() == answers(RecallTask(num_pairs=16), inputs[0])
    assert RecallTask(num_pairs=4, num_keys=15).load().long() is None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_pairs": 0}, "num_pairs"),
        ({"num_values": True}, "num_values"),
        ({"num_queries": 0}, "num_queries"),
        ({"num_pairs": 65}, "num_keys"),
        ({"num_queries": 17}, "num_queries"),
    ],
)
def test_impossible_options_are_refused(options, field):
    with rejects(field):
        RecallTask(**options)
