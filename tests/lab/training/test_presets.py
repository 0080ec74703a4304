import pytest

from tidegate.lab.compare.presets import PRESETS
from tidegate.lab.training.presets import SIZES, learning_rate


@pytest.mark.parametrize("name", ["tiny", "small", "base"])
def test_the_rule_gives_the_learning_rates_that_were_chosen_for_comparisons(name):
    assert learning_rate(SIZES[name].d_model) == pytest.approx(PRESETS["lm"][name].lr, rel=0.13)


def test_the_learning_rate_falls_with_one_over_the_width_from_144_on():
    assert learning_rate(80) == learning_rate(144) == 3e-3
    assert learning_rate(288) == pytest.approx(1.5e-3)
    assert learning_rate(768) == pytest.approx(learning_rate(384) / 2)
