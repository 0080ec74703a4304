"""False alarms and power of the whole procedure, on noise of which both are known."""

import numpy as np
import pytest
from errors import rejects

from tidegate.lab.judging import compare_to_control
from tidegate.lab.judging.calibration import Calibration, calibrate


def recorded(*, variants=4, settings=3, seeds=60, spread=0.01, own=(0.0, 0.3, -0.2, 0.1), generator=None):
    """Losses of made-up runs: each variant has a mean of its own, each seed luck that all share."""
    generator = generator or np.random.default_rng(3)
    shared = generator.normal(scale=0.02, size=(1, 1, seeds))
    noise = generator.normal(scale=spread, size=(variants, settings, seeds))
    surface = 1.5 + 0.01 * np.arange(settings)[None, :, None]
    return surface + np.array(own[:variants])[:, None, None] + shared + noise


def test_false_alarms_are_as_rare_as_promised_whatever_the_variants_means_are():
    found = calibrate(recorded(), num_comparisons=1500)
    assert 0.02 <= found.alarm_rate <= 0.07
    flipped = calibrate(recorded(), num_comparisons=1500, flip_signs=True)
    assert 0.03 <= flipped.alarm_rate <= 0.075


def test_a_procedure_that_shares_one_choice_between_blocks_would_raise_more():
    """The check can fail: with one setting for all blocks, chosen on one seed, a wrong choice looks like an effect."""
    generator, alarms, number = np.random.default_rng(5), 0, 400
    # Settings differ a little, and the noise of tuning hides by how much.
    surface = np.array([1.5, 1.52, 1.54])
    for _ in range(number):
        chosen = (surface + generator.normal(scale=0.05, size=(4, 3))).argmin(axis=1)
        table = surface[chosen][:, None] + generator.normal(scale=0.01, size=(4, 5))
        losses = {str(index): row for index, row in enumerate(table.tolist())}
        results = compare_to_control(losses, control="0").variants[1:]
        alarms += any(not result.low <= 0 <= result.high for result in results if result.low is not None)
    assert alarms / number > 0.15


def test_a_large_difference_is_seen_and_none_is_not():
    assert calibrate(recorded(spread=0.001), num_comparisons=50, effect=0.05).power == 1.0
    nothing = calibrate(recorded(), num_comparisons=400, effect=0.0)
    assert nothing.power < 0.05


def test_power_falls_with_the_noise():
    powers = [calibrate(recorded(spread=spread), num_comparisons=200).power for spread in (0.002, 0.01, 0.04)]
    assert powers[0] > powers[1] > powers[2]


def test_the_same_seed_gives_the_same_answer():
    assert calibrate(recorded(), num_comparisons=50) == calibrate(recorded(), num_comparisons=50)


def test_the_limit_is_clopper_and_pearsons():
    assert Calibration(num_comparisons=100, num_alarms=0, num_seen=0).alarm_limit == pytest.approx(1 - 0.05**0.01)
    assert Calibration(num_comparisons=4000, num_alarms=200, num_seen=0).alarm_limit == pytest.approx(0.0560, abs=5e-4)
    assert Calibration(num_comparisons=3, num_alarms=3, num_seen=0).alarm_limit == 1.0


@pytest.mark.parametrize(
    ("losses", "options", "field"),
    [
        (np.ones((1, 3, 40)), {}, "losses"),
        (np.full((2, 3, 40), np.nan), {}, "losses"),
        (np.ones((2, 3, 9)), {}, "losses"),
        (np.ones((2, 3, 40)), {"num_blocks": 2}, "num_blocks"),
        (np.ones((2, 3, 40)), {"num_comparisons": 0}, "num_comparisons"),
    ],
)
def test_a_calibration_needs_finite_losses_of_enough_variants_and_seeds(losses, options, field):
    with rejects(field):
        calibrate(losses, **options)
