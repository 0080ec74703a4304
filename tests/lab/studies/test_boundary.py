import numpy as np
import pytest
from closeness import assert_close
from errors import rejects

from tidegate.lab.studies.boundary.correlation import correlate
from tidegate.lab.studies.boundary.run import (
    BoundaryResult,
    Trial,
    bayes_accuracies,
    correlation_levels,
    excess_errors,
    finding,
    nonlinear_gains,
    run_boundary,
)
from tidegate.lab.studies.boundary.tasks import (
    LINEAR,
    NONLINEAR,
    NUM_TOKENS,
    TASKS,
    WIDTH,
    bayes_labels,
    draw_examples,
    mean_point,
    tokens_of,
)
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


@pytest.mark.parametrize("task", TASKS)
def test_only_the_linear_tasks_are_solved_by_a_linear_function_of_the_sequence(task):
    rng = np.random.default_rng(0)
    sequences, labels = draw_examples(task, rng, 3000)
    assert sequences.shape == (3000, NUM_TOKENS, WIDTH)
    assert 0.35 < labels.mean() < 0.65
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


def test_every_variant_task_and_seed_has_one_trial(result):
    keys = {(trial.variant, trial.task, trial.seed) for trial in result.trials}
    assert len(keys) == len(result.trials) == 3 * 3 * 2
    assert all(trial.curvature >= 0 and trial.learning_rate in SMALL.learning_rates for trial in result.trials)
    assert min(trial.accuracy for trial in result.trials if trial.task == "half-plane") > 0.85


def test_differences_are_of_means_over_a_kind_of_tasks(result):
    def mean(variant):
        return np.mean([t.accuracy for t in result.trials if t.variant == variant and t.task in NONLINEAR])

    (one,) = [
        each for each in result.differences if (each.variant, each.control, each.kind) == ("bma", "none", "nonlinear")
    ]
    assert one.value == pytest.approx(mean("bma") - mean("none"))
    assert one.low <= one.value <= one.high
    together = {each.variant: each for each in nonlinear_gains(result).together}
    assert together["bma"].value == pytest.approx(one.value)
    assert (together["bma"].low, together["bma"].high) == pytest.approx((one.low, one.high))


@pytest.mark.parametrize("task", LINEAR)
def test_the_best_guess_is_the_likelier_label_of_points_that_could_have_been_shown(task):
    sequences, _ = draw_examples(task, np.random.default_rng(1), 50)
    points, labels = TASKS[task](np.random.default_rng(2), 200_000)
    noise = 0.1 / np.sqrt(NUM_TOKENS)
    for mean, guess in zip(mean_point(sequences, task), bayes_labels(task, sequences), strict=True):
        likelihood = np.exp(-((points - mean) ** 2).sum(axis=1) / (2 * noise**2))
        share = (likelihood * labels).sum() / likelihood.sum()
        # Where the two labels are nearly as likely, so many points do not tell.
        assert abs(share - 0.5) < 0.05 or (share > 0.5) == guess


@pytest.mark.parametrize(
    ("task", "length", "area"), [("half-plane", 3.3541, 9), ("steep", 3.0594, 9), ("contrast", 2.5, 4)]
)
def test_the_best_guess_errs_as_often_as_the_length_of_the_line_says(task, length, area):
    sequences, labels = draw_examples(task, np.random.default_rng(3), 40_000)
    error = (bayes_labels(task, sequences) != labels).mean()
    by_hand = 2 * 0.05 * length / (np.sqrt(2 * np.pi) * area)
    # Three standard errors, and what is gained at the sides of the square.
    assert abs(error - by_hand) < 3 * np.sqrt(by_hand / 40_000) + 1e-4


def test_excess_errors_are_those_beyond_the_best_guess_on_the_same_test_sets(result):
    excess = {each.variant: each.value for each in excess_errors(result)}
    straight = [trial.accuracy for trial in result.trials if trial.task == "half-plane" and trial.variant == "bma"]
    assert excess["bma"] == pytest.approx(bayes_accuracies(result).mean() - np.mean(straight))
    assert f"bma {excess['bma']:+.4f} (" in finding(result)


def planted(accuracy):
    """An answer of three variants, two bent tasks and four seeds with accuracies by (variant, task, seed)."""
    options = BoundaryOptions(variants=("none", "tanh", "bma"), tasks=("steep", "xor", "shells"), num_seeds=4)
    trials = [
        Trial(
            variant=variant,
            task=task,
            seed=seed,
            learning_rate=0.1,
            accuracy=accuracy(variant, task, seed),
            curvature={"none": 0.1, "tanh": 0.2, "bma": 0.4}[variant] * 1.1**seed,
            positive=0.0,
        )
        for variant in options.variants
        for task in options.tasks
        for seed in range(options.num_seeds)
    ]
    return BoundaryResult(options=options, num_parameters={}, trials=tuple(trials), differences=(), correlations=())


def test_the_correlation_is_given_at_every_level():
    # On xor curvature goes with errors, on shells with success, and more so: the signs of the levels differ.
    result = planted(
        lambda variant, task, seed: (
            0.5 + {"none": 0, "tanh": 1, "bma": 2}[variant] * {"steep": 0, "xor": -0.02, "shells": 0.2}[task]
        )
    )
    levels = {each.among: each for each in correlation_levels(result, nonlinear_gains(result))}
    assert list(levels) == [
        "within tasks",
        "within shells",
        "within tasks other than shells",
        "over all trials",
        "over the means of variants",
    ]
    assert levels["within shells"].value > 0.9
    assert levels["within tasks other than shells"].value < -0.9
    assert 0 < levels["within tasks"].value < 0.9
    assert levels["over the means of variants"].value > 0.999
    assert levels["over the means of variants"].count == 3


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
    with rejects("trials"):
        correlate("few", [(0, 0, 1.0, 2.0), (0, 1, 2.0, 3.0)])
