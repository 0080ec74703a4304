from dataclasses import replace

import pytest

from tidegate.config import TransformerConfig, VisionConfig
from tidegate.gates import Gates
from tidegate.lab.compare.design import num_parameters
from tidegate.lab.compare.fairness import TOKENS_PER_PARAMETER
from tidegate.lab.compare.presets import PRESETS
from tidegate.lab.tasks.catalogue import make_task

CASES = [(kind, name) for kind in PRESETS for name in PRESETS[kind]]


def prepared(kind, name):
    """A preset, its task at its length, and the task's data."""
    preset = PRESETS[kind][name]
    task = make_task(kind)
    task = task if preset.length is None else replace(task, length=preset.length)
    return preset, task, task.load()


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_its_model_fits_the_data(kind, name):
    preset, task, data = prepared(kind, name)
    model = preset.model(task, data, Gates.parse("bma"))
    assert model.gate == Gates.parse("bma")
    if kind == "image":
        assert isinstance(model, VisionConfig)
        assert (model.image_size, model.num_classes, model.channels) == (8, 10, 1)
    else:
        assert isinstance(model, TransformerConfig)
        assert (model.vocab_size, model.max_length) == (data.vocab_size, task.length)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_its_training_spends_its_budget_to_within_a_step(kind, name):
    preset, task, _ = prepared(kind, name)
    training = preset.training(task)
    per_step = training.batch_size * task.length
    assert abs(training.steps * per_step - preset.budget) <= per_step / 2
    assert training.lr == preset.lr


@pytest.mark.parametrize(("name", "millions"), [("tiny", 0.18), ("small", 1.0), ("base", 14)])
def test_the_language_models_have_the_sizes_that_are_said(name, millions):
    preset, task, data = prepared("lm", name)
    assert num_parameters(preset.model(task, data, Gates())) / 1e6 == pytest.approx(millions, rel=0.05)


def test_no_language_model_is_called_under_trained_by_its_page():
    for name in PRESETS["lm"]:
        preset, task, data = prepared("lm", name)
        assert preset.budget / num_parameters(preset.model(task, data, Gates())) >= TOKENS_PER_PARAMETER


def test_a_budget_of_its_own_is_rounded_to_whole_steps_and_is_at_least_one():
    preset, task, _ = prepared("lm", "tiny")
    assert [preset.training(task, budget).steps for budget in (1, 2048, 5000, 20_480)] == [1, 1, 2, 10]
