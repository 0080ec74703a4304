from dataclasses import replace

import pytest
from lab_lines import everywhere, replanned, with_curve, with_seeds

from tidegate.lab.compare.answer import answer
from tidegate.lab.compare.summary import summarise
from tidegate.lab.judging import PlaceboResult
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
        ({"effect": "helps", "placebos": (PLACEBO,), "verdict": "better"}, "g1 helps; "),
        (
            {"effect": "helps", "placebos": (PLACEBO,), "verdict": "equivalent"},
            "g1 helps by less than the margin; ",
        ),
        ({"effect": "harms", "placebos": (PLACEBO,), "verdict": "worse"}, "g1 harms; "),
        (
            {"effect": "not shown", "placebos": (PLACEBO,), "verdict": "better"},
            "g1 is better than none, which its placebo may be as well; ",
        ),
        ({"effect": "not shown", "placebos": (), "verdict": "worse"}, "g1 is worse than none; "),
        ({"verdict": "equivalent"}, "g1 does as well as none; "),
        ({"verdict": "inconclusive"}, "g1 is not told apart from none; "),
        ({"verdict": "diverged"}, "g1 diverged; "),
        ({"verdict": "identical"}, "g1 is none under another name; "),
    ],
)
def test_it_says_first_what_was_found(summary, changes, words):
    assert answer(with_variant(summary, "g1", **changes)).startswith(f"In short: {words}")


def test_a_variant_that_is_only_a_placebo_is_not_spoken_of(summary):
    of_g1 = replace(PLACEBO, placebo="bma-query")
    assert "bma-query" not in answer(with_variant(summary, "g1", placebos=(of_g1,)))


def test_then_what_it_rests_on(summary):
    text = answer(summary)
    longest = summary.control.longest
    assert f"3 seeds of models with {longest.num_parameters:,} parameters and {longest.tokens:,} tokens" in text
    assert "at one untuned setting" in text


def test_tuning_is_said(compared):
    assert "tuned alike" in answer(summarise(replanned(compared, grid=Grid(rates=(1.0,), starts=(0.02,)))))


@pytest.mark.parametrize(("last", "falls"), [(1.0, False), (0.999, False), (0.98, True)])
def test_a_loss_that_still_falls_by_more_than_the_margin_binds_it_to_the_budget(compared, last, falls):
    lines = everywhere(compared, with_curve(1.2, 1.1, 1.05, 1.0, last))
    assert ("this holds at this budget" in answer(summarise(lines))) == falls


def test_without_a_verdict_it_says_why(compared):
    assert answer(summarise(with_seeds(compared, 1))).startswith("No verdict: a verdict needs at least 3 seeds")


def test_a_violated_check_is_named(summary):
    assert "Read it with care, a check is violated: Tokens per parameter" in answer(summary)
