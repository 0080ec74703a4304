import pytest

from tidegate.config import TransformerConfig
from tidegate.lab.compare.design import num_parameters
from tidegate.lab.compare.presets import PRESETS
from tidegate.lab.training.presets import SIZES, learning_rate, token_budget


@pytest.mark.parametrize("name", ["tiny", "small", "base"])
def test_the_rule_gives_the_learning_rates_that_were_chosen_for_comparisons(name):
    assert learning_rate(SIZES[name].d_model) == pytest.approx(PRESETS["lm"][name].lr, rel=0.13)


@pytest.mark.parametrize(
    ("name", "vocab_size", "millions"), [("35m", 16384, 33.6), ("124m", 50257, 123.6), ("1.3b", 50257, 1311.4)]
)
def test_the_large_sizes_have_the_parameters_that_they_are_named_after(name, vocab_size, millions):
    size = SIZES[name]
    config = TransformerConfig(
        gate="none",
        d_model=size.d_model,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        vocab_size=vocab_size,
        max_length=size.length,
    )
    assert size.tokenizer == f"bpe:{vocab_size}"
    assert num_parameters(config) / 1e6 == pytest.approx(millions, abs=0.06)


def test_the_learning_rate_falls_with_one_over_the_width_from_144_on():
    assert learning_rate(80) == learning_rate(144) == 3e-3
    assert learning_rate(288) == pytest.approx(1.5e-3)
    assert learning_rate(768) == pytest.approx(learning_rate(384) / 2)


def test_the_budget_is_twenty_tokens_for_each_parameter():
    assert token_budget(1_000_000) == 20_000_000
