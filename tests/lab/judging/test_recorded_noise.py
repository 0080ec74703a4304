"""Verdicts on noise from real runs: `recorded_noise.json` has one variant's losses under forty seeds."""

import json
from pathlib import Path

import pytest

from tidegate.lab.judging import compare_to_control, false_positive_rate

NOISE = json.loads((Path(__file__).parent / "recorded_noise.json").read_text())["losses"]


def test_few_null_comparisons_of_recorded_noise_are_called_different():
    assert false_positive_rate(NOISE, num_comparisons=200, seed=0) <= 0.07


@pytest.mark.full
def test_the_rate_is_near_its_nominal_level_over_many_comparisons():
    # Within four standard errors of 5 percent, over 2,000 comparisons.
    assert false_positive_rate(NOISE, num_comparisons=2000, seed=1) == pytest.approx(0.05, abs=0.02)


def test_the_control_under_another_name_and_other_seeds_is_not_called_different():
    losses = {"none": NOISE[:20], "other": NOISE[20:]}
    assert compare_to_control(losses, control="none")["other"].verdict in ("equivalent", "inconclusive")


def test_a_difference_of_three_deviations_is_found_in_the_same_noise():
    shift = 3 * (sum((loss - sum(NOISE) / 40) ** 2 for loss in NOISE) / 39) ** 0.5
    losses = {"none": NOISE[:20], "other": [loss + shift for loss in NOISE[20:]]}
    assert compare_to_control(losses, control="none")["other"].verdict == "worse"
