import numpy as np
import pytest
from closeness import assert_close

from tidegate.lab.studies.boundary.correlation import correlate
from tidegate.lab.studies.boundary.finding import finding
from tidegate.lab.studies.boundary.run import run_boundary
from tidegate.lab.studies.boundary.tasks import LINEAR, NONLINEAR, NUM_TOKENS, TASKS, WIDTH, draw_examples, tokens_of
from tidegate.lab.studies.boundary.training import VARIANTS, BoundaryOptions, Classifier, train_together

SMALL = BoundaryOptions(
    variants=("none", "tanh", "bma"),
    tasks=("half-plane", "circle", "xor"),
    num_seeds=2,
    learning_rates=(0.01, 0.03),
    num_tuning_seeds=1,
    steps=60,
    batch_size=32,
    num_training=128,
    num_test=128,
    num_points=6,
)


@pytest.fixture(scope="module")
def result():
    return run_boundary(SMALL)


def test_there_are_three_straight_boundaries_and_five_bent_ones():
    assert len(LINEAR) == 3
    assert set(NONLINEAR) == {"circle", "xor", "moons", "spirals", "shells"}


@pytest.mark.parametrize("task", TASKS)
def test_both_classes_are_about_as_frequent(task):
    sequences, labels = draw_examples(task, np.random.default_rng(0), 2000)
    assert sequences.shape == (2000, NUM_TOKENS, WIDTH)
    assert set(labels.tolist()) == {0, 1}
    assert 0.35 < labels.mean() < 0.65


@pytest.mark.parametrize("task", TASKS)
def test_only_the_linear_tasks_are_solved_by_a_linear_function_of_the_sequence(task):
    rng = np.random.default_rng(0)
    sequences, labels = draw_examples(task, rng, 3000)
    flat = sequences.reshape(len(sequences), -1)
    weights = np.linalg.lstsq(flat, 2.0 * labels - 1, rcond=None)[0]
    test, truth = draw_examples(task, rng, 3000)
    accuracy = ((test.reshape(len(test), -1) @ weights > 0) == truth).mean()
    assert (accuracy > 0.93) == (task in LINEAR)


@pytest.mark.parametrize("task", TASKS)
def test_the_sequence_is_affine_in_the_point(task):
    one, other = np.random.default_rng(0).standard_normal((2, 2))
    middle = tokens_of((one + other) / 2, task)
    assert_close(middle, (tokens_of(one, task) + tokens_of(other, task)) / 2)


def test_all_variants_have_as_many_parameters():
    assert len({sum(p.numel() for p in Classifier(name).parameters()) for name in VARIANTS}) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_that_are_trained_together_are_trained_alone(variant):
    options = BoundaryOptions(steps=5, num_training=64, num_test=64, batch_size=16)
    together, accuracies = train_together(variant, [("xor", 0), ("circle", 1)], [0.01, 0.02], options)
    alone, accuracy = train_together(variant, [("circle", 1)], [0.02], options)
    assert accuracies[1] == pytest.approx(accuracy[0], abs=1 / 64)
    for name, value in alone.items():
        assert_close(together[name][1], value[0], what="gradient")


def test_a_straight_boundary_is_learnt_by_all(result):
    straight = [trial.accuracy for trial in result.trials if trial.task == "half-plane"]
    assert min(straight) > 0.85


def test_every_variant_task_and_seed_has_one_trial(result):
    keys = {(trial.variant, trial.task, trial.seed) for trial in result.trials}
    assert len(keys) == len(result.trials) == 3 * 3 * 2
    assert all(trial.curvature >= 0 and trial.learning_rate in SMALL.learning_rates for trial in result.trials)


def test_differences_are_of_means_over_a_kind_of_tasks(result):
    def mean(variant):
        return np.mean([t.accuracy for t in result.trials if t.variant == variant and t.task in NONLINEAR])

    (one,) = [
        each for each in result.differences if (each.variant, each.control, each.kind) == ("bma", "none", "nonlinear")
    ]
    assert one.value == pytest.approx(mean("bma") - mean("none"))
    assert one.low <= one.value <= one.high
    assert "Over none: bma" in finding(result)


@pytest.mark.parametrize("strength", [-1.0, 0.0, 1.0])
def test_a_planted_correlation_within_tasks_is_found_however_far_tasks_lie_apart(strength):
    rng = np.random.default_rng(0)
    trials = []
    for task in range(4):
        for seed in range(20):
            one = rng.standard_normal()
            trials.append((task, seed, 10 * task + one, -10 * task + strength * one + rng.standard_normal()))
    found = correlate("planted", trials)
    expected = strength / np.sqrt(1 + strength**2)
    assert found.low < expected < found.high
    assert found.high - found.low < 0.6


def test_too_few_trials_have_no_correlation():
    with pytest.raises(ValueError, match="at least three trials; got 2"):
        correlate("few", [(0, 0, 1.0, 2.0), (0, 1, 2.0, 3.0)])
