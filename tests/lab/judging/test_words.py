import json
import re
from dataclasses import asdict

import pytest

from tidegate.lab.judging import Comparison, compare_to_control, rule_text

LOSSES = {
    "none": (1.500, 1.620, 1.410, 1.550, 1.480),
    "g1": (1.488, 1.605, 1.399, 1.539, 1.467),
    "bma": (1.532, 1.649, 1.441, 1.583, 1.509),
    "odd": (1.503, 1.616, 1.412, 1.553, 1.476),
    "lost": (1.5, None, 1.4, None, 1.5),
    "alias": (1.500, 1.620, 1.410, 1.550, 1.480),
}


def judge(losses=LOSSES, **options):
    return compare_to_control(losses, control="none", unit="nats", **options)


def numbers_in(text):
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", text)]


def test_better_is_told_by_how_much_with_its_interval_and_what_the_run_could_have_seen():
    result = judge()["g1"]
    pattern = (
        r"g1: better than none by 0\.0124 nats \(95 % interval 0\.\d{4} to 0\.\d{4}; 5 seeds; "
        r"0\.\d{4} would be seen 4 times in 5\)"
    )
    assert re.fullmatch(pattern, result.sentence)
    expected = [-result.difference, -result.high, -result.low, result.detectable]
    assert numbers_in(result.sentence) == pytest.approx(expected, abs=5e-5)


def test_worse_is_told_in_positive_numbers_too():
    result = judge()["bma"]
    assert result.sentence.startswith("bma: worse than none by 0.0308 nats (95 % interval 0.")
    assert numbers_in(result.sentence) == pytest.approx(
        [result.difference, result.low, result.high, result.detectable], abs=5e-5
    )


def test_a_difference_inside_the_margin_is_said_to_be_there_and_not_to_matter():
    sentence = judge(margin=0.1)["g1"].sentence
    assert sentence.startswith("g1: equivalent to none within ±0.1512, difference -0.0124 nats (95 %")
    assert sentence.endswith("; the difference is real but smaller than the margin")


@pytest.mark.parametrize(
    ("margin", "start"),
    [(0.005, "odd: equivalent to none within ±0.0076, difference "), (0.0, "odd: inconclusive against")],
)
def test_without_a_difference_numbers_carry_their_sign(margin, start):
    sentence = judge(margin=margin)["odd"].sentence
    assert sentence.startswith(start)
    assert re.search(r"difference [+-]?0\.\d{4} nats \(95 % interval -0\.\d{4} to \+0\.\d{4}; 5 seeds", sentence)


def test_those_who_are_not_judged_are_told_why():
    comparison = judge()
    assert comparison["none"].sentence == "none: the control, mean 1.5120 ± 0.0785 nats over 5 seeds"
    assert comparison["lost"].sentence == "lost: diverged in 2 of 5 seeds, and not judged"
    assert comparison["alias"].sentence == "alias: identical to none, and not judged"


def test_a_refusal_is_explained_in_the_sentence_and_in_the_rule():
    comparison = judge({name: row[:1] for name, row in LOSSES.items() if name != "lost"})
    why = "a verdict needs at least 3 seeds, and there are 1"
    assert comparison["g1"].sentence == f"g1: no verdict, because {why}"
    assert comparison["none"].sentence == "none: the control, mean 1.5000 nats over 1 seed"
    assert rule_text(comparison).endswith(f"Here no verdict is given: {why}.")


def test_a_diverged_control_says_so():
    comparison = judge({"none": (None, 1.4, 1.5), "g1": (1.4, 1.4, 1.5)})
    assert comparison["none"].sentence == "none: the control, diverged in 1 of 3 seeds"
    assert "±0.2 % of none's mean" in rule_text(comparison)


def test_the_rule_has_the_numbers_of_the_comparison():
    comparison = judge()
    text = rule_text(comparison)
    for part in ("on the same 5 seeds", "the 95 % intervals", "±0.0030 nats (0.2 % of none's mean)"):
        assert part in text
    degrees = [variant.degrees_of_freedom for variant in comparison.variants if variant.degrees_of_freedom]
    assert f"a standard deviation of {comparison.residual_sd:.4f} nats" in text
    assert f"{min(degrees):.1f} to {max(degrees):.1f} degrees of freedom" in text
    assert f"a true difference of {comparison.detectable:.4f} nats" in text


def test_where_nothing_is_left_to_judge_the_rule_stands_alone():
    comparison = judge({"none": LOSSES["none"], "alias": LOSSES["alias"]})
    assert rule_text(comparison).endswith("after the last run.")


def test_small_figures_are_written_with_more_decimals():
    tiny = {name: tuple(None if value is None else value / 1e6 for value in row) for name, row in LOSSES.items()}
    sentence = judge(tiny)["g1"].sentence
    assert numbers_in(sentence)[0] == pytest.approx(1.24e-8, rel=0.02)


def test_a_comparison_is_json_without_nan():
    text = json.dumps(asdict(judge()), allow_nan=False)
    assert json.loads(text)["variants"][1]["verdict"] == "better"


def test_variants_keep_their_order_and_are_found_by_name():
    comparison = judge()
    assert [variant.name for variant in comparison.variants] == list(LOSSES)
    assert isinstance(comparison, Comparison)
    with pytest.raises(KeyError, match="gone"):
        comparison["gone"]
