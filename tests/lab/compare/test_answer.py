from dataclasses import replace

import pytest
from lab_lines import everywhere, replanned, with_curve, with_seeds

from tidegate.lab.compare.answer import answer
from tidegate.lab.compare.summary import summarise
from tidegate.lab.judging import PlaceboResult
from tidegate.lab.judging.words import estimate_words
from tidegate.lab.training.records import Grid

PLACEBO = PlaceboResult(placebo="half", difference=-0.1, low=-0.2, high=-0.05)


def with_variant(summary, name, **changes):
    """The summary with another verdict, effect or placebos of one variant."""
    verdict = changes.pop("verdict", None)
    variants = []
    for variant in summary.variants:
        if variant.name == name:
            result = variant.result if verdict is None else replace(variant.result, verdict=verdict)
            variant = replace(variant, result=result, **changes)
        variants.append(variant)
    return replace(summary, variants=tuple(variants))


@pytest.fixture
def summary(compared):
    return summarise(compared)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"effect": "helps", "placebos": (PLACEBO,), "verdict": "better"}, "its mechanism helps"),
        (
            {"effect": "helps", "placebos": (PLACEBO,), "verdict": "equivalent"},
            "its mechanism helps, by less than the margin",
        ),
        ({"effect": "harms", "placebos": (PLACEBO,), "verdict": "worse"}, "its mechanism harms"),
        (
            {"effect": "not shown", "placebos": (PLACEBO,), "verdict": "better"},
            "significantly better, but not shown to be due to its mechanism",
        ),
        ({"effect": "not shown", "placebos": (), "verdict": "worse"}, "significantly worse"),
        ({"verdict": "equivalent"}, "equivalent"),
    ],
)
def test_it_begins_with_the_estimate_and_the_finding(summary, changes, words):
    text = answer(with_variant(summary, "g1", **changes))
    estimate = estimate_words(summary.comparison["g1"], summary.comparison)
    change = "has an estimated effect on the loss of" if words == "equivalent" else "changes the loss by"
    assert text.startswith(f"Compared with the baseline (none): g1 {change} {estimate}, {words}. ")


@pytest.mark.parametrize(("verdict", "words"), [("diverged", "g1 diverged. "), ("identical", "g1 is identical. ")])
def test_a_variant_that_was_not_tested_has_no_estimate(summary, verdict, words):
    assert f"Compared with the baseline (none): {words}" in answer(with_variant(summary, "g1", verdict=verdict))


def test_variants_without_a_significant_difference_share_a_sentence(summary):
    beginning = "No significant difference in loss from the baseline (none): g1, bma-query (95 % CIs within −"
    assert answer(summary).startswith(beginning)


def test_a_variant_that_is_only_a_placebo_is_not_spoken_of(summary):
    of_g1 = replace(PLACEBO, placebo="bma-query")
    assert "bma-query" not in answer(with_variant(summary, "g1", placebos=(of_g1,)))


def test_then_comes_the_evidence_with_its_limits(compared, summary):
    text, longest = answer(summary), summary.control.longest
    assert f"3 seeds of models with {longest.num_parameters:,} parameters (the baseline)" in text
    assert f"trained on {longest.tokens:,} tokens" in text
    assert "with one untuned setting" in text
    assert "failed (tokens per parameter" in text
    tuned = answer(summarise(replanned(compared, grid=Grid(rates=(1.0,), starts=(0.02,)))))
    assert "each variant tuned on the same grid" in tuned


@pytest.mark.parametrize(("last", "falls"), [(1.0, False), (0.999, False), (0.98, True)])
def test_a_loss_that_still_falls_by_more_than_the_margin_limits_it_to_the_training_length(compared, last, falls):
    lines = everywhere(compared, with_curve(1.2, 1.1, 1.05, 1.0, last))
    assert ("for this training length" in answer(summarise(lines))) == falls


def test_without_a_verdict_it_says_why(compared):
    assert answer(summarise(with_seeds(compared, 1))).startswith("No verdict: a verdict needs at least 3 seeds")
