import dataclasses

import pytest

from tidegate.lab.studies.gate_tuning.run import (
    CONTROL,
    REMEDIES,
    GateTuningOptions,
    Remedy,
    run_gate_tuning,
)

TINY = GateTuningOptions(
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    length=16,
    batch_size=4,
    training_steps=30,
    tuning_steps=12,
    num_validation_tokens=256,
    num_seeds=2,
)


@pytest.fixture(scope="module")
def result():
    return run_gate_tuning(TINY)


def moved(result, remedy):
    """Mean distance of the gates from 1 under each seed."""
    row = next(row for row in result.rows if row.remedy == remedy)
    return [each.movement for each in row.measured]


def test_there_is_a_row_for_every_remedy_and_a_number_for_every_seed(result):
    assert [row.remedy for row in result.rows] == list(REMEDIES)
    assert all(len(row.measured) == len(result.before) == 2 for row in result.rows)
    assert len({remedy.name for remedy in REMEDIES}) == len(REMEDIES)


def test_gates_move_where_there_are_gates_and_farther_at_a_higher_rate(result):
    for remedy in REMEDIES:
        assert all((distance is not None) == (remedy.gate_rate is not None) for distance in moved(result, remedy))
    slow, faster, fast = (moved(result, remedy) for remedy in REMEDIES[:3])
    assert all(0 < one < two < three for one, two, three in zip(slow, faster, fast, strict=True))


def test_gates_that_do_not_learn_leave_the_model_as_it_was(result, monkeypatch):
    still = Remedy(name="gates at rest", gate_rate=0.0)
    monkeypatch.setattr("tidegate.lab.studies.gate_tuning.run.REMEDIES", (still, CONTROL))
    again = run_gate_tuning(TINY)
    assert again.before == result.before
    assert again.rows[0].measured == tuple(dataclasses.replace(each, movement=0.0) for each in result.before)
    assert again.rows[1] == next(row for row in result.rows if row.remedy == CONTROL)


def test_gates_that_learn_first_are_followed_by_all_weights(monkeypatch):
    first = Remedy(name="gates, then both", gate_rate=10.0, whole_rate=1.0, gates_first=True)
    learned = []

    def train(model, groups, batches, *, num_steps):
        moving = {name for name, weight in model.named_parameters() if weight.requires_grad}
        learned.append((num_steps, len(list(batches)), moving == set(dict(model.named_parameters())), len(groups)))
        assert len(moving) == sum(len(group["params"]) for group in groups)

    monkeypatch.setattr("tidegate.lab.studies.gate_tuning.run.REMEDIES", (first, CONTROL))
    monkeypatch.setattr("tidegate.lab.studies.gate_tuning.run._train", train)
    run_gate_tuning(dataclasses.replace(TINY, tuning_steps=5))
    assert learned == [(30, 30, True, 1), (2, 2, False, 1), (3, 3, True, 2), (5, 5, True, 1)] * 2


def test_changes_are_differences_of_the_means(result):
    def mean(measured, name):
        return sum(getattr(each, name) for each in measured) / len(measured)

    control = next(row for row in result.rows if row.remedy == CONTROL)
    assert control.against_control is None
    for row in result.rows:
        for name in ("loss", "sink", "strongest"):
            change = getattr(row, name)
            assert change.value == pytest.approx(mean(row.measured, name) - mean(result.before, name))
            assert change.low <= change.value <= change.high
        if row is not control:
            expected = mean(row.measured, "loss") - mean(control.measured, "loss")
            assert row.against_control.value == pytest.approx(expected)
