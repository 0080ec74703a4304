"""What runs can show, said before they are done, against simulated comparisons."""

import numpy as np
import pytest

from tidegate.lab.judging import compare_to_control, detectable_difference, seeds_needed


@pytest.mark.parametrize(("num_blocks", "num_comparisons"), [(5, 1), (5, 4), (8, 2)])
def test_a_detectable_difference_is_seen_four_times_in_five(num_blocks, num_comparisons):
    generator, deviation = np.random.default_rng(7), 0.01
    difference = detectable_difference(deviation, num_blocks=num_blocks, num_comparisons=num_comparisons)
    seen, number = 0, 600
    for _ in range(number):
        # Each variant has its own noise, so that a difference of two scatters by the deviation.
        table = 1.5 + generator.normal(scale=deviation / np.sqrt(2), size=(num_comparisons + 1, num_blocks))
        table[1] -= difference
        losses = {str(name): row.tolist() for name, row in enumerate(table)}
        result = compare_to_control(losses, control="0")["1"]
        seen += result.high is not None and result.high < 0
    assert 0.74 <= seen / number <= 0.86


def test_as_many_seeds_are_needed_as_show_the_difference_and_not_one_less():
    needed = seeds_needed(0.0065, 0.01, num_comparisons=4)
    shown = [detectable_difference(0.0065, num_blocks=number, num_comparisons=4) for number in (needed - 1, needed)]
    assert shown[0] > 0.01 >= shown[1]


def test_no_difference_is_promised_where_there_is_no_verdict():
    assert detectable_difference(0.01, num_blocks=2, num_comparisons=1) is None
    assert seeds_needed(1.0, 1e-6, num_comparisons=1) is None
    assert seeds_needed(1e-9, 0.01, num_comparisons=1) == 3
